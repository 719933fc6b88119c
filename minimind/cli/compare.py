"""`minimind compare`: where two runs part."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from minimind.cli.command import PLACES, OfPlaces, argument
from minimind.errors import UsageError
from minimind.runtime.event_log import left_out
from minimind.runtime.terminal import fitted

LABELED = 14  # column of the text


@dataclass(kw_only=True)
class Compare(OfPlaces):
    """Find the first step and number at which two runs part by more than rounding.

    With --fingerprints in both runs it names the block. The status is 1 if they part, else 0.
    """

    example = "minimind compare out/a out/b"
    place: Any = argument((), **PLACES)
    """two out_dirs, files of events (metrics.jsonl, or that of another program), or step_
    directories"""
    json: bool = argument(False)
    """print a JSON object"""

    def execute(self) -> int:
        if len(self.checkpoint) != 2:
            raise UsageError(f"compare takes two runs, not {len(self.checkpoint)}; name two")
        from minimind.recovery.compare import as_json, compare, described, read_side

        a, b = map(read_side, self.checkpoint)
        for side in (a, b):
            if side.unread:
                print(f"note: {left_out(side.unread, side.name)}", file=sys.stderr)
        result = compare(a, b)
        if self.json:
            print(json.dumps(as_json(result), ensure_ascii=False))
        else:
            print(fitted(described(result), LABELED))
        return int(result.step is not None)
