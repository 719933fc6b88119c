"""The parts of the loop that a flag turns on: each is imported if its flag is given.

What the loop calls at many places has a null object in place of what is off; a check, a trace or
trackers that are off are None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minimind.checkpoint.directory import OWNER
from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.run_folder import recorded_flags
from minimind.config.checks import given
from minimind.config.run_config import RunConfig
from minimind.config.schedule import budget_steps
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import Batches
from minimind.engine.build import Engine
from minimind.engine.plain_backend import StepResult
from minimind.errors import UsageError
from minimind.report.run_logger import RunLogger
from minimind.runtime import disk
from minimind.runtime.collectives import Ranks
from minimind.runtime.device import device_kind
from minimind.runtime.process import StopRequest
from minimind.train.build import RAW_TEXT, prepared_folder

if TYPE_CHECKING:
    from minimind.checkpoint.mirror import Mirror
    from minimind.recovery.corruption import CorruptionCheck
    from minimind.recovery.spikes import SpikeGuard
    from minimind.report.trace import Trace
    from minimind.report.trackers import Trackers
    from minimind.train.scores import Scores


class NoMirror:
    """A run without --mirror."""

    def restore(self, identity: dict[str, Any]) -> None: ...
    def fetch(self, steps: range) -> None: ...
    def begin(self, resumed: Resumed) -> None: ...
    def start(self, good: int | None) -> None: ...
    def offer(self, path: str, good: int | None) -> None: ...
    def go_back(self, step: int) -> None: ...
    def end_at(self, step: int) -> None: ...
    def report(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class NoSpikeGuard:
    """A run without --spike_guard: skips no update, and never goes back."""

    norm_limit = math.inf

    def own_sums(self) -> list[float]:
        return []

    def observe(self, sums: Sequence[float]) -> bool:
        return False

    def hold(self, step: int, result: StepResult, norm_limit: float) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}


def require_place_of_mirror(run: RunConfig, is_start: bool) -> None:
    """Raise LockedError if out_dir is a mirror; at a start, too, if --mirror cannot be this run's.

    Raise StorageError if nothing can be written to the URL.
    """
    out_dir = Path(run.out_dir)
    if run.mirror is None and not disk.is_file(out_dir / OWNER):
        return
    from minimind.checkpoint.mirror import require_mirror, require_no_mirror

    require_no_mirror(out_dir, run.mirror)
    if is_start and run.mirror is not None:
        require_mirror(run.mirror, out_dir, run.resume)


def build_mirror(run: RunConfig, ranks: Ranks, logger: RunLogger) -> Mirror | NoMirror:
    """The uploads of --mirror."""
    if run.mirror is None:
        return NoMirror()
    from minimind.checkpoint.mirror import Mirror

    return Mirror(run, run.mirror, ranks, logger)


def build_spike_guard(
    run: RunConfig,
    engine: Engine,
    batches: Batches,
    prepared: Prepared,
    logger: RunLogger,
    resumed: Resumed,
) -> SpikeGuard | NoSpikeGuard:
    """The guard of --spike_guard, as of a checkpoint."""
    if not run.guard:
        return NoSpikeGuard()
    from minimind.recovery.spikes import SpikeGuard

    return SpikeGuard.of(run, engine, batches, prepared, logger, resumed)


def build_corruption_check(run: RunConfig, engine: Engine, step: int) -> CorruptionCheck | None:
    """The checks of --verify_interval; the run continues from `step`."""
    if not run.verify_interval:
        return None
    from minimind.recovery.corruption import CorruptionCheck

    return CorruptionCheck(run, engine, step)


def traced_steps(run: RunConfig) -> tuple[int, int] | None:
    """Return the first and last step of --trace_steps, or None; raise UsageError if malformed."""
    if run.trace_steps is None:
        return None
    match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", run.trace_steps)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(
            f"trace_steps = {run.trace_steps} ({run.sources['trace_steps']}) is not FIRST:LAST with"
            " 1 <= FIRST <= LAST; write 10:13 for steps 10 to 13"
        )
    return first, last


def require_fitting_stages(run: RunConfig, world_size: int) -> None:
    """Raise UsageError for a mistake in --stages that can be seen before the text is read.

    With --tokens_per_param the vocabulary of the text decides the length of the run. Where
    --batch_size is "auto", the size of the text may decide the steps.
    """
    if run.stages is None:
        return
    from minimind.config.stages import plan_stages, read_stages, require_stages

    if prepared_folder(run) is None:
        read_stages(run.stages).require_sources((RAW_TEXT,))
    if run.tokens_per_param is not None:
        require_stages(run, {})
        return
    budgets = budget_steps(run, 1, 1, 1)
    if "batch_size" in run.open_flags:
        require_stages(run, budgets)
        return
    run = replace(run, warmup_steps=0) if "warmup_steps" in run.open_flags else run
    plan_stages(run, world_size, budgets)


def require_traceable(run: RunConfig, total_steps: int) -> None:
    """Raise UsageError if the run ends before the first step of --trace_steps."""
    steps = traced_steps(run)
    if steps and steps[0] > total_steps:
        raise UsageError(
            f"trace_steps = {run.trace_steps} ({run.sources['trace_steps']}) begins after the run's"
            f" last step, {total_steps}; give steps that it takes"
        )


def build_trace(run: RunConfig, rank: int, device: torch.device) -> Trace | None:
    """The recorder of --trace_steps."""
    steps = traced_steps(run)
    if steps is None:
        return None
    from minimind.report.trace import Trace

    return Trace(steps, Path(run.out_dir), rank, device_kind(device))


def require_tasks(run: RunConfig) -> None:
    """Raise UsageError for a task of --eval_tasks that cannot be asked, before its data is read.

    So for a --keep_best_by that is no score, if no task is a group, whose tasks are not known yet.
    """
    if run.eval_tasks is None:
        return
    from minimind.config.tasks import OWN_TASKS, require_compared, tasks_of

    has_chance, has_groups = dict[str, bool](), False
    for one in tasks_of(run):
        has_chance[one.name] = not one.is_own or OWN_TASKS[one.name].chance is not None
        if not one.is_own:
            from minimind.inference.lm_eval_tasks import require_task

            manager = require_task(one, f"{given(run, 'eval_tasks')}")
            has_groups |= one.name not in manager.all_subtasks
    if not has_groups:
        require_compared(run, has_chance)


def build_scores(run: RunConfig, prepared: Prepared, stop: StopRequest) -> Scores | None:
    """The tasks of --eval_tasks."""
    if run.eval_tasks is None:
        return None
    from minimind.train.scores import Scores

    return Scores.of(run, prepared, stop)


def open_trackers(run: RunConfig, step: int) -> Trackers | None:
    """The trackers of --report_to; the run continues from `step`. Rank 0 alone calls it."""
    if not run.trackers():
        return None
    from minimind.report.trackers import open_trackers

    return open_trackers(run, step, recorded_flags(run))
