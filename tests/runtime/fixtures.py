"""Fixtures of the S3 server, the proxy and the Hub, for an import in a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minimind.runtime.hub import newest
from tests.runtime.hub_server import Hub, running_hub
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


@pytest.fixture(scope="session")
def _hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(_hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """An empty Hub that huggingface_hub asks in this process, with an empty cache and no token."""
    _hub.clear()
    use_hub(_hub.url, tmp_path / "hub_cache", monkeypatch)
    return _hub


def use_hub(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub of this process use a server and a cache; it retries at once."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    newest.cache_clear()
