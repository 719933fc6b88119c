"""Sweeps that look at their trials without a pause."""

from __future__ import annotations

import pytest

from minimind.sweep import run


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("launch"):
        monkeypatch.setattr(run, "POLL", 0.0)
