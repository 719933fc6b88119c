"""A clock for --save_minutes that only steps advance; as a module, train_pretrain.py on it.

As a module a step takes 25 s on rank 0, and an hour on every other rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from minimind.checkpoint import saver
from minimind.engine.clocks import PhaseClock


def use_clock(replace: Callable[[Any, str, Any], None], seconds_per_step: float) -> None:
    """Replace the saver's clock, by `setattr` or monkeypatch's."""
    now, begin = 0.0, PhaseClock.begin

    def advance(clock: PhaseClock) -> None:
        nonlocal now
        now += seconds_per_step
        begin(clock)

    replace(PhaseClock, "begin", advance)
    stand_in = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    replace(saver, "time", stand_in)


if __name__ == "__main__":
    from minimind.launch import train_pretrain

    use_clock(setattr, 25 if os.environ["RANK"] == "0" else 3600)
    raise SystemExit(train_pretrain.main(sys.argv[1:]))
