"""Fixtures of the S3 server and the proxy, for `pytest_plugins` or an import in a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.servers import KEYS, FaultyProxy, ObjectStore, faulty_proxy, running_store


@pytest.fixture(scope="session")
def _server() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(_server: ObjectStore) -> ObjectStore:
    """The server with an empty bucket."""
    _server.clear()
    return _server


@pytest.fixture
def proxy(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, which s3:// URLs of this process and its children name."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with faulty_proxy(store) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running
