"""The training loop, and its actions between steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minimind.checkpoint.directory import (
    AllDamaged,
    Rejected,
    TrainState,
    is_due,
    published_checkpoints,
    step_of,
)
from minimind.checkpoint.resume import Resumed, resume
from minimind.checkpoint.saver import Saver
from minimind.config.flags import CHANGEABLE, VAL_LOSS
from minimind.config.run_config import MARGIN, PATIENCE, RunConfig
from minimind.config.schedule import Schedule
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import Batches
from minimind.data.rows.skip_rows import skip_rows_text
from minimind.engine.build import Engine
from minimind.engine.clocks import CommunicationClock, PhaseClock
from minimind.engine.loss_of_batch import routing_fields
from minimind.engine.plain_backend import StepResult
from minimind.errors import PREEMPTED, NumericError
from minimind.report.formats import clock_time, scores_line, skipped
from minimind.report.run_logger import RunLogger
from minimind.runtime import disk
from minimind.runtime.collectives import lost_peers, on_rank_0, run_on_all_ranks
from minimind.runtime.durable_files import mebibytes, storing
from minimind.runtime.process import Progress, StopRequest
from minimind.runtime.terminal import shorten_line
from minimind.train.evaluate import EVAL_ROWS, HeldOutRows, Samples, draw, evaluate, log_evaluation
from minimind.train.failures import SkippedSteps
from minimind.train.rows import build_batches
from minimind.train.start import Plan

if TYPE_CHECKING:
    from minimind.checkpoint.mirror import Mirror
    from minimind.recovery.corruption import CorruptionCheck
    from minimind.recovery.spikes import SpikeGuard
    from minimind.report.trace import Trace
    from minimind.train.scores import Scores

GC_WARMUP_STEPS = 2  # all long-lived objects exist after them
# More frozen objects mean that a host program has frozen its own: Python 3.12 itself freezes 375.
FROZEN_AT_START = 1000
TIMED_STEPS = 3  # the time of a step is known after them
LONG_SILENCE = 3600.0  # seconds without a step line that deserve a warning


@dataclass(frozen=True)
class RunContext:
    """Objects that the loop and its actions share; built by `pretrain`."""

    plan: Plan
    prepared: Prepared
    schedule: Schedule
    engine: Engine
    batches: Batches
    held_out: HeldOutRows
    samples: Samples | None
    scores: Scores | None
    saver: Saver
    mirror: Mirror | None
    trace: Trace | None
    communication: CommunicationClock | None  # None unless profiling
    logger: RunLogger
    spikes: SpikeGuard | None
    corruption: CorruptionCheck | None
    skipped: SkippedSteps
    stop: StopRequest
    progress: Progress
    cleanup: ExitStack  # closed when the run ends, however it ends

    @property
    def run(self) -> RunConfig:
        """All flags with their final values."""
        return self.plan.run


def train(context: RunContext, state: TrainState) -> tuple[TrainState, int, str]:
    """Train from `state` to the last step; return the final state, exit status and reason.

    One iteration is one optimizer step of all ranks. Every rank runs every line: saving, evaluation
    and logging are collective, so none of them may depend on `rank == 0`.
    """
    run, engine, last = context.run, context.engine, context.schedule.total_steps
    clock = context.progress.clock = PhaseClock(engine.device, context.communication)
    first = context.progress.step = state.step
    context.logger.begin(state.step, state.tokens)
    is_cut_off = not catch_up(context, state)
    while state.step < last and not is_cut_off:
        freeze_gc_after_warmup(context, state.step - first)
        update_trace(context, state, clock)
        engine.seed(state.step)
        clock.begin()
        micro_batches = context.logger.track(context.batches.at(state.step))  # fetch
        norm_limit = context.spikes.norm_limit if context.spikes else math.inf
        result = engine.step(  # step
            micro_batches, context.schedule.lr_at(state.step), clock, norm_limit
        )
        state = state.after(context.batches.of(state.step).tokens_per_step)  # advance
        advance_progress(context, state, state.step - first)
        stop_requests, failed, overdue, must_go_back = sum_requests(context, state, result)
        if must_go_back:
            return state, GO_BACK, "spikes"
        stopping = stop_requests > 0 or state.step == run.stop_at_step
        poll_save(context, wait=failed > 0)
        logging = is_due(state.step, run.log_interval, last) or stopping
        profiling = run.profile and (is_due(state.step, run.profile_interval, last) or stopping)
        saving = is_due(state.step, run.save_interval, last) or stopping or overdue > 0
        check_skipped_steps(context, state, result, is_due=logging or profiling or saving)
        if logging or profiling:
            context.logger.add_phase_times(clock.take(engine.backend.waits))
        if logging:
            log_step(context, state, result)
        check_corruption(context, state, first)
        if saving:
            start_save(context, state)  # before evaluation, which may outlast a grace period
        if is_due(state.step, run.eval_interval, last) and len(context.held_out.rows):
            run_evaluation(context, state)
        log_samples(context, state)
        is_cut_off = not log_scores(context, state)
        if profiling:
            log_profile(context, state, is_last=stopping or state.step == last)
        if stopping:
            break
    if is_cut_off:  # the next start asks again
        poll_save(context, wait=True)
        if not context.saver.has(state.step):
            start_save(context, state)
    finish_recording(context, state, clock)
    if state.step < last:
        return state, PREEMPTED, f"stopped on {stop_reason(context)}, saved"
    return state, 0, "done"


def register_cleanup(context: RunContext) -> None:
    """Close the background work of the loop when the run ends."""
    context.cleanup.callback(context.batches.close)
    context.cleanup.callback(context.saver.close)
    if context.trace:
        context.cleanup.callback(context.trace.stop)


def freeze_gc_after_warmup(context: RunContext, steps: int) -> None:
    """Freeze all live objects once `steps` is GC_WARMUP_STEPS; later collections skip them.

    gc.unfreeze() at the end releases everything, so nothing is done where the host process (a
    notebook) has frozen objects already.
    """
    if steps == GC_WARMUP_STEPS and gc.get_freeze_count() <= FROZEN_AT_START:
        with context.logger.pausing("gc"):
            gc.collect()
            gc.freeze()
            context.cleanup.callback(gc.unfreeze)


def advance_progress(context: RunContext, state: TrainState, steps: int) -> None:
    """Advance progress and its bar; warn once if step lines will be over an hour apart."""
    context.progress.step = state.step
    context.logger.advance()
    if steps != TIMED_STEPS:
        return
    interval, step_seconds = context.run.log_interval, context.logger.seconds_per_step()
    silence = step_seconds * min(interval, context.schedule.total_steps - state.step)
    if silence > LONG_SILENCE:
        context.logger.print(
            f"warning  no step line for {clock_time(silence)}: a step takes {step_seconds:.1f} s"
            f" and --log_interval is {interval:,}"
        )


def sum_requests(
    context: RunContext, state: TrainState, result: StepResult
) -> tuple[float, float, float, bool]:
    """Count the ranks that want to stop, whose save failed, and that want to save (collective).

    Last, whether the spike guard wants to go back. One all-reduce serves all four: the guard judges
    the previous step by it, and keeps this one.
    """
    saver, spikes = context.saver, context.spikes
    requests = [bool(context.stop.reason), saver.has_failed, saver.is_overdue]
    own_sums = spikes.own_sums() if spikes else []
    stop, failed, overdue, *sums = context.engine.sum_over_ranks([*requests, *own_sums])
    if spikes is None:
        return stop, failed, overdue, False
    norm_limit = spikes.norm_limit  # of this step; `observe` replaces it
    must_go_back = spikes.observe(sums)
    if must_go_back:  # the last chance to count what is pending
        check_skipped_steps(context, state, result, is_due=True)
    spikes.hold(state.step - 1, result, norm_limit)
    return stop, failed, overdue, must_go_back


def log_rejected(logger: RunLogger, rejected: Sequence[Rejected]) -> None:
    """Log the checkpoints that could not be used."""
    for bad in rejected:
        logger.event("checkpoint_rejected", path=str(bad.path), file=bad.file, reason=bad.reason)
        logger.print(skipped(bad.path, bad.file, bad.reason))


@contextmanager
def damage_logged(logger: RunLogger) -> Iterator[None]:
    """Log the checkpoints of AllDamaged; of another end of the block the caller logs them."""
    try:
        yield
    except AllDamaged as error:
        log_rejected(logger, error.rejected)
        raise


def stop_reason(context: RunContext) -> str:
    """Reason for the stop request, gathered from all ranks (collective)."""
    reasons = context.engine.decide(context.stop.reason, lambda every: [*filter(None, every)][:1])
    return reasons[0] if reasons else f"--stop_at_step {context.run.stop_at_step}"


def log_step(context: RunContext, state: TrainState, result: StepResult) -> None:
    """Log the step line: the mean loss of this step over all ranks, and times since the last line.

    Time spent in torch.compile is logged separately.
    """
    loss, count = context.engine.sum_over_ranks([float(result.loss_sum), float(result.tokens)])
    norm = None if result.grad_norm is None else float(result.grad_norm)
    rows = context.batches.order.positions(state.step - 1)
    context.logger.step(
        {
            "step": state.step,
            "loss": loss / max(count, 1.0),
            "lr": result.lr,
            "grad_norm": norm,
            "clipped": norm is not None and 0 < context.run.grad_clip < norm < math.inf,
            "skipped": int(result.skipped_so_far),
            "tokens": state.tokens,
            "rows": [rows.start, rows.stop],
            **context.batches.order.stage_of(state.step - 1),
            **routing_fields(result.routing, context.engine),
        }
    )
    if change := context.engine.take_update_change():
        context.logger.event("zero_update_changed", step=state.step, zero_update=change)
        context.logger.print(f"warning  update {change}, since step {state.step} at the latest")
    if seconds := context.engine.compiling.take():
        context.logger.event("compiled", step=state.step, seconds=seconds)
        context.logger.print(
            f"step {state.step}: {seconds:.1f} s since the last line for compiling"
        )


def check_skipped_steps(
    context: RunContext, state: TrainState, result: StepResult, is_due: bool
) -> None:
    """Log skipped steps; raise NumericError on every rank if there are more than allowed.

    Flags on the GPU are read if `is_due` (the step synchronizes anyway) or 64 are pending.
    """
    try:
        context.skipped.check(state.step, result, is_due)
    except NumericError:
        poll_save(context, wait=True)  # a save in the background may hold the last good checkpoint
        raise


def check_corruption(context: RunContext, state: TrainState, first: int) -> None:
    """Check for corruption if due; `first`: step from which the loop goes on (collective)."""
    check, logger, saver = context.corruption, context.logger, context.saver
    if check is None or not check.is_due(state.step, context.schedule.total_steps):
        return
    with logger.pausing("verify"):
        found = check.check(state.step, context.batches)
    check.report(found, state.step, logger, state.step - first >= TIMED_STEPS)
    saver.good = check.good
    if found and context.run.on_corruption == "stop":
        poll_save(context, wait=True)
        saver.prune_error(wait=True)
        error = check.error(found, saver.root)
        if context.mirror:
            context.mirror.end_at(check.good)
        raise error


def log_profile(context: RunContext, state: TrainState, is_last: bool) -> None:
    """Log the phase times of every rank since the last profile, and the verdict (collective)."""
    medians = context.engine.gather(context.logger.medians())
    context.logger.profile(state.step, medians, is_last)


def update_trace(
    context: RunContext, state: TrainState, clock: PhaseClock, is_over: bool = False
) -> None:
    """Start or write the trace of --trace_steps on every rank if due at this step."""
    trace = context.trace
    if trace is None or not trace.is_due(state.step, is_over):
        return
    with context.logger.pausing("trace"):
        clock.is_traced = not trace.is_recording
        if not trace.is_recording:
            trace.begin(state.step)
            return
        path = run_on_all_ranks(context.engine, partial(trace.write, state.step))
        context.logger.print(f"step {state.step}: trace {path}, for ui.perfetto.dev")


def run_evaluation(context: RunContext, state: TrainState) -> None:
    """Compute and log the validation loss, and record it in the checkpoint of this step."""
    with context.logger.pausing("evaluate"):
        rows = context.run.micro_batch_rows(context.engine.world_size)
        results = log_evaluation(context.engine, context.held_out, rows, state.step, context.logger)
        if context.run.keep_best_by == VAL_LOSS:
            context.saver.validated(state.step, results["val_loss"])


def catch_up(context: RunContext, state: TrainState) -> bool:
    """Save and evaluate after a start where the loop will not (collective).

    Return False if a stop request interrupted the scoring.
    """
    run, saver, last = context.run, context.saver, context.schedule.total_steps
    if state.step == last and not saver.has(last):  # resumed at its end, in a new out_dir
        start_save(context, state)
    is_evaluated = len(context.held_out.rows) and is_due(state.step, run.eval_interval, last)
    # Killed between the save of a step and its validation, which --keep_best compares.
    by_loss = run.keep_best and run.keep_best_by == VAL_LOSS
    if by_loss and state.step and is_evaluated and saver.lacks_validation(state.step):
        run_evaluation(context, state)
    elif context.held_out.may_grow and 0 < state.step < last and is_evaluated:
        # The checkpoint was saved before the validation of its step, which may have read more rows.
        with context.logger.pausing("evaluate"):
            rows = run.micro_batch_rows(context.engine.world_size)
            evaluate(context.engine, context.held_out, rows)
    if (scores := context.scores) and state.step:
        by_score = run.keep_best and not by_loss and saver.lacks_validation(state.step)
        if scores.lacks(context.engine, state.step) or by_score:  # a stop cuts them off, too
            return log_scores(context, state)
    return True


def log_samples(context: RunContext, state: TrainState) -> None:
    """Generate and log a continuation of each prompt, every --sample_interval."""
    samples, last = context.samples, context.schedule.total_steps
    if samples is None or not is_due(state.step, context.run.sample_interval, last):
        return
    with context.logger.pausing("sample"):
        with lost_peers():
            texts = draw(context.engine, samples)
        for number, (prompt, text) in enumerate(zip(samples.prompts, texts, strict=True)):
            context.logger.event("sample", step=state.step, number=number, prompt=prompt, text=text)
            context.logger.print(
                f"step {state.step}: sample {number + 1}: {shorten_line(prompt + text)}"
            )


def log_scores(context: RunContext, state: TrainState) -> bool:
    """Ask and log the tasks of --eval_tasks every --eval_tasks_interval.

    Return False if a stop cut them off: the run ends at this step, where the next start asks them.
    """
    scores, last = context.scores, context.schedule.total_steps
    if scores is None or not is_due(state.step, scores.interval, last):
        return True
    with context.logger.pausing("score"):
        found = scores.compute(context.engine)
        if found is None:
            context.logger.print(f"step {state.step}: a stop is asked for, so there are no scores")
            return False
        context.logger.event("scores", step=state.step, tokens=state.tokens, **found)
        context.logger.print(f"step {state.step}: {scores_line(found)}")
        if (value := scores.compared(found)) is not None:
            context.saver.validated(state.step, value)
    return True


def start_save(context: RunContext, state: TrainState) -> None:
    """Start saving a checkpoint, after the previous save ended; wait with --no-async_save."""
    with context.logger.pausing("checkpoint"):
        poll_save(context, wait=True)
        run_on_all_ranks(context.engine, partial(check_data_unchanged, context))
        order = context.batches.order.start_json()
        facts = {"order": order, **(context.spikes.state() if context.spikes else {})}
        if (reads := context.held_out.reads) is not None:
            facts[EVAL_ROWS] = reads
        context.saver.begin(state, facts)
        if not context.saver.in_background:
            poll_save(context, wait=True)


def check_data_unchanged(context: RunContext) -> None:
    """Raise DataError if a token file changed since the run started.

    Checked before each save, so that no checkpoint contains training on modified data.
    """
    context.batches.require_unchanged()
    context.held_out.shards.require_unchanged()


def poll_save(context: RunContext, wait: bool) -> None:
    """Log a finished save and prune older checkpoints; `wait` must be equal on all ranks."""
    if context.mirror:
        context.mirror.report()
    if message := context.saver.prune_error():
        context.logger.print(message)
    if saved := context.saver.poll(wait):
        context.logger.event("checkpoint_saved", **saved)
        size = mebibytes(saved["bytes"])
        context.logger.print(f"step {saved['step']}: checkpoint {saved['path']} ({size})")
        if context.mirror:
            context.mirror.offer(saved["path"], context.saver.good)
    if wait:
        context.saver.wait_for_validations()
    if saved:
        context.saver.prune()


def finish_recording(context: RunContext, state: TrainState, clock: PhaseClock) -> None:
    """Write the trace and wait for the save in progress, at the end of the loop."""
    update_trace(context, state, clock, is_over=True)
    with context.logger.pausing("checkpoint"):
        poll_save(context, wait=True)


GO_BACK = -1  # instead of an exit status: the spike guard asks for an earlier checkpoint


def checkpoints_in(root: Path, steps: range) -> list[Path]:
    """Checkpoints of some steps, the newest first."""
    return [path for path in published_checkpoints(root) if step_of(path) in steps]


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
    good = on_rank_0(saver.ranks, lambda: checkpoints_in(saver.root, steps))
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
    identity = saver.facts["identity"]
    with context.logger.pausing("checkpoint"), damage_logged(context.logger):
        resumed = resume(
            context.engine, saver.ranks, saver.root, "auto", identity, changeable, steps=steps
        )
    log_rejected(context.logger, resumed.rejected)
    if context.mirror:
        context.mirror.go_back(resumed.state.step)
    if trackers := context.logger.trackers:
        trackers.go_back(resumed.state.step)
    assert resumed.path is not None  # the newest of `good` that is not damaged
    context.held_out.begin_with(resumed.manifest.get(EVAL_ROWS, 0))
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
    return replace(context, batches=batches, spikes=spikes, skipped=skipped), resumed
