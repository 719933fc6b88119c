"""Sweeps that look at their trials without a pause, and do not wait for the disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event

from minimind.sweep import run


def _without_fsync(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("launch"):
        yield
        return
    monkeypatch.setattr(run, "POLL", 0.0)
    event.listen(Engine, "connect", _without_fsync)
    yield
    event.remove(Engine, "connect", _without_fsync)
