"""What every rank did in some steps, as Chrome traces that Perfetto opens (--trace_steps)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from minimind.config.run_config import RunConfig
from minimind.errors import UsageError
from minimind.runtime.durable_files import storing


def traced_steps(run: RunConfig) -> tuple[int, int] | None:
    """The first and the last step of --trace_steps; None without. A UsageError for nonsense."""
    if run.trace_steps is None:
        return None
    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", run.trace_steps)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(
            f"trace_steps = {run.trace_steps} ({run.sources['trace_steps']}) is not FIRST:LAST with"
            " 1 <= FIRST <= LAST; write 10:13 for steps 10 to 13"
        )
    return first, last


def require_traceable(run: RunConfig, total_steps: int) -> None:
    """Nothing, or a UsageError where the run is over before the first step of --trace_steps."""
    steps = traced_steps(run)
    if steps and steps[0] > total_steps:
        raise UsageError(
            f"trace_steps = {run.trace_steps} ({run.sources['trace_steps']}) begins after the run's"
            f" last step, {total_steps}; give steps that it takes"
        )


def trace_of(run: RunConfig, rank: int) -> Trace | None:
    """What --trace_steps asks for."""
    steps = traced_steps(run)
    return Trace(steps, Path(run.out_dir), rank) if steps else None


class Trace:
    """Records from before the first step to after the last one, and writes one file a rank.

    A file is named by the steps that are in it, which may be fewer than were asked for; where a
    start before recorded from the same step on, its files stay and the name has a number.
    """

    def __init__(self, steps: tuple[int, int], out_dir: Path, rank: int) -> None:
        self._first, self._last = steps
        self._place, self._rank = out_dir / "traces", rank
        self._begins = self._number = 0
        self._profiler: Any = None

    @property
    def is_recording(self) -> bool:
        """Whether steps are being recorded."""
        return self._profiler is not None

    def is_due(self, step: int, is_over: bool = False) -> bool:
        """Whether to begin, or to write, `step` steps having been taken; alike on every rank.

        A run that begins within the steps, resumed, records the rest of them; one that is over
        before the last has what there is written.
        """
        if self.is_recording:
            return is_over or step >= self._last
        return not is_over and self._first - 1 <= step < self._last

    def begin(self, step: int) -> None:
        """Record from now on, `step` steps having been taken."""
        self._begins = step + 1
        # Now, when no rank of this start writes yet, so that all of them find the same number.
        self._number = 1 + max(self._numbers(), default=0)
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=kinds)
        self._profiler.start()

    def stop(self) -> Any:
        """The profiler that recorded, if one did; a run that fails leaves it at that."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler

    def write(self, step: int) -> Path:
        """End the recording with `step` and write it; a StorageError where it cannot be."""
        profiler = self.stop()
        again = f"-again_{self._number}" if self._number > 1 else ""
        path = self._place / f"steps_{self._begins}-{step}{again}-rank_{self._rank}.json.gz"
        with storing(str(path), "free some space, or mend the path of --out_dir"):
            self._place.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        return path

    def _numbers(self) -> Iterator[int]:
        """Those of the recordings that begin with the same step."""
        for path in self._place.glob(f"steps_{self._begins}-*"):
            if found := re.fullmatch(r"steps_\d+-\d+(-again_(\d+))?-rank_\d+\.json\.gz", path.name):
                yield int(found[2] or 1)
