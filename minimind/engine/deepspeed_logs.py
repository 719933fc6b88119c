"""DeepSpeed's own comms_logger and flops_profiler, where its JSON switches them on: put right.

Of 0.19.8. The logger is on wherever its block is, `enabled` or not; it takes for the time of one
collective that of all of its kind so far; and its table waits for somebody to ask. The profiler
begins within the model's forward pass, and takes for that of the whole model the time since 1970.
Nothing of DeepSpeed is imported: engine.py hands over its objects.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import wraps
from typing import Any


class CollectivesLog:
    """DeepSpeed's log of collectives, by the `comms_logger` block of its JSON; None: by no block.

    It belongs to the process, and `release` leaves it as it was.
    """

    def __init__(self, comm: Any, block: Mapping[str, Any] | None) -> None:
        """comm is the module deepspeed.comm.comm, after an engine was built."""
        self._comm = comm
        self._kept = comm.comms_logger.enabled if block is None else False
        self.is_on = block is not None and bool(block.get("enabled"))
        if block is not None:
            comm.comms_logger.enabled = self.is_on
            comm.comms_logger.reset_data()  # of building the engine
        if self.is_on:
            comm.timers.Timer = _single(comm.timers.Timer)
            comm.timers.timers.clear()

    def table(self) -> str:
        """What DeepSpeed tells of the collectives since the last call; nothing where it is off."""
        if not self.is_on:
            return ""
        printed = io.StringIO()
        with redirect_stdout(printed):
            self._comm.comms_logger.log_all()
        self._comm.comms_logger.reset_data()
        return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())

    def release(self) -> None:
        """Time nothing any more."""
        self._comm.comms_logger.enabled = self._kept
        if self.is_on:
            self._comm.comms_logger.reset_data()
            self._comm.timers.timers.clear()
            del self._comm.timers.Timer
        self.is_on = False


def _single(timer: type[Any]) -> type[Any]:
    """The same kind of timer, which forgets a span that has been asked for."""

    class Single(timer):
        def elapsed(self, reset: bool = True) -> float:
            return super().elapsed(reset=True)

    return Single


def time_from_the_start(profiler: Any, model: Any) -> None:
    """Have the flops profiler know when the forward pass that it begins in began."""
    start = profiler.start_profile

    @wraps(start)
    def started(*given: Any, **named: Any) -> None:
        start(*given, **named)
        model.__start_time__ = time.time()  # by which its hook at the end goes

    profiler.start_profile = started
