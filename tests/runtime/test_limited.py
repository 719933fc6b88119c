"""A process with limits, also where the system refuses one of its memory."""

import sys
from pathlib import Path

import pytest

from minimind.runtime import limited
from minimind.runtime.limited import tried_within

GIB = 2**30
MODULE = """
def main(request):
    if request["gib"]:
        held = bytearray(b"1") * int(request["gib"] * 2**30)
        while True:
            pass
    return request["text"]
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "asked.py"
    path.write_text(MODULE)
    return str(path)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_what_takes_too_much_memory_is_ended(
    module: str, platform: str, monkeypatch: pytest.MonkeyPatch
):
    """With a stand-in for macOS, whose processes have no limit and are watched."""
    monkeypatch.setattr(sys, "platform", platform)
    assert tried_within(module, {"gib": 0, "text": "done"}, 10, GIB) == "done"
    assert tried_within(module, {"gib": 0.5, "text": ""}, 10, GIB // 4) is None


def test_a_watched_process_is_ended_in_the_end(module: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(limited, "PATIENCE", 0.5)
    assert tried_within(module, {"gib": 0.01, "text": ""}, 60, GIB) is None
