"""Corrections of DeepSpeed 0.19.8's comms_logger and flops_profiler.

The logger is active whenever its block exists, even with `enabled: false`; it reports the summed
time of all collectives of a kind as the time of one; and it never prints its table by itself. The
profiler starts inside the model's forward pass and reports the time since 1970 for the model.
DeepSpeed is not imported: build.py passes its objects.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import wraps
from typing import Any


class CollectivesLog:
    """DeepSpeed's log of collectives, configured by the `comms_logger` block or None.

    The log belongs to the process; `release` restores it.
    """

    def __init__(self, comm: Any, block: Mapping[str, Any] | None) -> None:
        """comm: the module deepspeed.comm.comm, after an engine was built."""
        self._comm = comm
        self._was_enabled = comm.comms_logger.enabled if block is None else False
        self.is_on = block is not None and bool(block.get("enabled"))
        if block is not None:
            comm.comms_logger.enabled = self.is_on
            comm.comms_logger.reset_data()  # collectives of the engine's construction
        if self.is_on:
            comm.timers.Timer = _reset_on_read(comm.timers.Timer)
            comm.timers.timers.clear()

    def table(self) -> str:
        """Table of the collectives since the last call; empty if disabled."""
        if not self.is_on:
            return ""
        output = io.StringIO()
        with redirect_stdout(output):
            self._comm.comms_logger.log_all()
        self._comm.comms_logger.reset_data()
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def release(self) -> None:
        """Stop logging and restore the logger."""
        self._comm.comms_logger.enabled = self._was_enabled
        if self.is_on:
            self._comm.comms_logger.reset_data()
            self._comm.timers.timers.clear()
            del self._comm.timers.Timer
        self.is_on = False


def _reset_on_read(timer: type[Any]) -> type[Any]:
    """Subclass of a timer class whose elapsed time is reset when read."""

    class ResetOnRead(timer):
        def elapsed(self, reset: bool = True) -> float:
            return super().elapsed(reset=True)

    return ResetOnRead


def fix_start_time(profiler: Any, model: Any) -> None:
    """Set the start time of the forward pass, which the flops profiler misses."""
    start = profiler.start_profile

    @wraps(start)
    def start_profile(*args: Any, **kwargs: Any) -> None:
        start(*args, **kwargs)
        model.__start_time__ = time.time()  # read by its hook at the end

    profiler.start_profile = start_profile
