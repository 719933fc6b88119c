"""Go back to a checkpoint before a series of spikes, and leave their rows out.

Not in `recovery`, which knows no loop: what the loop shares is built anew here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from minimind.checkpoint.directory import published_checkpoints, step_of
from minimind.checkpoint.resume import Resumed, damage_logged, log_rejected, resume
from minimind.config.flags import CHANGEABLE
from minimind.config.run_config import MARGIN, PATIENCE
from minimind.data.rows.skip_rows import skip_rows_text
from minimind.errors import NumericError
from minimind.runtime import disk
from minimind.runtime.collectives import on_rank_0
from minimind.runtime.durable_files import storing
from minimind.train.loop import RunContext, poll_save
from minimind.train.rows import build_batches


def write_rows(context: RunContext, rows: np.ndarray, step: int) -> Path:
    """Write the rows that a rollback leaves out as a file for --skip_rows; return its path.

    Files of other rollbacks that ended at the same step are kept (collective).
    """
    out_dir = Path(context.run.out_dir)
    fingerprint = context.prepared.manifest["fingerprint"]
    text = skip_rows_text(rows.tolist(), context.batches.row_tokens, fingerprint)

    def write() -> Path:
        path, number = out_dir / f"rolled_back-{step}.txt", 1
        with storing(str(path), "correct the path of --out_dir"):
            while disk.exists(path) and path.read_text(encoding="utf-8") != text:
                number += 1
                path = out_dir / f"rolled_back-{step}-{number}.txt"
            path.write_text(text, encoding="utf-8")
        return path

    return on_rank_0(context.saver.ranks, write)


def require_rollback(context: RunContext, steps: range, rollbacks: int, what: str) -> None:
    """Raise NumericError, which begins with `what`, if the run cannot go back to one of `steps`."""
    saver, limit = context.saver, context.run.guard
    published = on_rank_0(saver.ranks, lambda: published_checkpoints(saver.root))
    good = [path for path in published if step_of(path) in steps]
    if not good:
        raise NumericError(
            f"{what} and there is no checkpoint up to step {max(steps.stop - 1, 0)} to go back to;"
            " save earlier with --save_interval, or train with a lower --learning_rate or"
            " --grad_clip"
        )
    if rollbacks >= limit["max_rollbacks"]:
        raise NumericError(
            f"{what} after {rollbacks} rollbacks, and max_rollbacks ="
            f" {limit['max_rollbacks']} ({context.run.sources['max_rollbacks']}); the last"
            f" checkpoint before them is {good[0]}: train on from it (--resume) with a lower"
            " --learning_rate or --grad_clip (and --allow_change lr), or with a higher"
            " --max_rollbacks"
        )


def go_back(context: RunContext) -> tuple[RunContext, Resumed]:
    """Load the newest checkpoint before the spikes (collective); return the context from there on.

    Training repeats the steps up to MARGIN before the first spike, and goes on with the rows after
    the last one. Raise NumericError without such a checkpoint, and after --max_rollbacks.
    """
    guard, saver, order = context.spikes, context.saver, context.batches.order
    assert guard is not None  # it asks for this
    detector = guard.detector
    assert detector.first is not None
    first, last = detector.first, detector.first + detector.in_a_row - 1
    poll_save(context, wait=True)
    if message := saver.prune_error(wait=True):
        context.logger.print(message)
    what = f"loss or gradient norm are high for {PATIENCE} steps, {first + 1} to {last + 1},"
    start, limit = first - MARGIN, context.run.guard["max_rollbacks"]
    steps = range(order.origin.step, start + 1)
    if context.mirror:
        context.mirror.fetch(steps)
    require_rollback(context, steps, detector.rollbacks, what)
    # All checkpoints from the origin of its order are of this run.
    changeable = frozenset(CHANGEABLE)
    with context.logger.pausing("checkpoint"), damage_logged(context.logger):
        resumed = resume(
            context.engine, saver.ranks, saver.root, "auto", context.identity, changeable, steps
        )
    log_rejected(context.logger, resumed.rejected)
    if context.mirror:
        context.mirror.go_back(resumed.state.step)
    if trackers := context.logger.trackers:
        trackers.go_back(resumed.state.step)
    assert resumed.path is not None  # the newest of `good` that is not damaged
    context.held_out.begin_with(resumed.eval_rows)
    after = order.jumping(start, last + 1)
    positions = [order.positions(start).start, order.positions(last).stop]
    file = write_rows(context, order.rows_for(start, 0, 1, last + 1 - start), last + 1)
    facts = {"to": resumed.state.step, "steps": [start + 1, last + 1], "positions": positions}
    facts |= {"rows": str(file)}
    facts |= {"rollbacks": detector.rollbacks + 1, **context.logger.unlogged_pauses()}
    context.logger.event("rolled_back", step=last + 1, **facts)
    context.logger.print(
        f"{what} so the run goes back to {resumed.path.name} and leaves out the rows of steps"
        f" {start + 1} to {last + 1} (listed in {file}); rollback {detector.rollbacks + 1} of"
        f" {limit}"
    )
    if context.corruption:
        context.corruption.go_back(resumed.state.step)
        saver.good = context.corruption.good
    context.batches.close()
    batches = build_batches(context.run, context.engine, context.prepared, after)
    context.cleanup.callback(batches.close)
    spikes = guard.restored(batches, resumed, detector.rollbacks + 1)
    skipped = replace(context.skipped, order=after, batches_at=batches.at, pending=[])
    patience = context.patience and context.patience.restored(resumed, saver.ranks)
    parts = {"batches": batches, "spikes": spikes, "skipped": skipped, "patience": patience}
    return replace(context, **parts), resumed
