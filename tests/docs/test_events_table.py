"""The table of events in docs/events.md has each event that is written, and no other."""

from __future__ import annotations

import re

from minimind.errors import HALVED
from minimind.report.history import ENDS, KEPT_EVENTS
from tests.conftest import ROOT

# As an argument, and as the first of a pair that is written later.
WRITTEN = re.compile(r'\.(?:event|write)\(\s*"(\w+)",|\("((?:mirror|checkpoint)_\w+)", [f{]')


def test_every_event_that_is_written_is_described():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "minimind").rglob("*.py")]
    found = {name for text in sources for pair in WRITTEN.findall(text) for name in pair if name}
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    section = page.split("\n## Events\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    described = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(described) == sorted({*found, *KEPT_EVENTS, *ENDS, HALVED})
    assert {"mirror_kept", "checkpoint_fetched", "exit", "step"} <= found
