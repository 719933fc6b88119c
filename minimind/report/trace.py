"""Chrome traces of some steps of every rank, for Perfetto (--trace_steps)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from minimind.runtime import disk
from minimind.runtime.device import HOST, Host
from minimind.runtime.durable_files import storing


class Trace:
    """Records from the first to the last step and writes one file per rank.

    A file is named by the steps in it, which may be fewer than requested. If an earlier start
    recorded from the same step on, its files stay and the new name gets a number.
    """

    def __init__(self, steps: tuple[int, int], out_dir: Path, rank: int, kind: Host = HOST) -> None:
        self._first, self._last = steps
        self._directory, self._rank, self._kind = out_dir / "traces", rank, kind
        self._start = self._number = 0
        self._profiler: Any = None

    @property
    def is_recording(self) -> bool:
        return self._profiler is not None

    def is_due(self, step: int) -> bool:
        """Whether to start or to write a recording after `step` steps; equal on every rank.

        A run resumed within the range records the rest.
        """
        if self.is_recording:
            return step >= self._last
        return self._first - 1 <= step < self._last

    def begin(self, step: int) -> None:
        self._start = step + 1
        # No rank of this start has written yet, so all ranks find the same number.
        self._number = 1 + max(self._numbers(), default=0)
        # A CPU run on a host with GPUs records none: it would make a context on GPU 0.
        gpu = [] if self._kind.activity is None else [self._kind.activity]
        self._kind.synchronize()  # or the first step begins with what is left of those before it
        self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
        self._profiler.start()

    def stop(self) -> Any:
        """Stop the profiler and return it, or None; a failed run writes nothing."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler

    def write(self, step: int) -> Path:
        """Stop after `step` and write the trace; return its path."""
        profiler = self.stop()
        again = f"-again_{self._number}" if self._number > 1 else ""
        path = self._directory / f"steps_{self._start}-{step}{again}-rank_{self._rank}.json.gz"
        with storing(str(path), "correct the path of --out_dir"):
            self._directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        return path

    def _numbers(self) -> Iterator[int]:
        """Numbers of existing recordings that begin at the same step."""
        for path in disk.matching(self._directory, f"steps_{self._start}-*"):
            if match := re.fullmatch(r"steps_\d+-\d+(-again_(\d+))?-rank_\d+\.json\.gz", path.name):
                yield int(match[2] or 1)
