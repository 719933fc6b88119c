"""The training loop, and its actions between steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minimind.checkpoint.identity import layout, versions
from minimind.checkpoint.resume import TrainState
from minimind.checkpoint.saver import Saver
from minimind.config.flags import VAL_LOSS
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import Batches
from minimind.engine.clocks import CommunicationClock, PhaseClock
from minimind.engine.engine import Engine, StepResult
from minimind.errors import PREEMPTED, NumericError
from minimind.report.formats import clock_time, scores_line
from minimind.report.run_logger import RunLogger
from minimind.runtime.collectives import Ranks, lost_peers, run_on_all_ranks
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.process import Progress, StopRequest
from minimind.runtime.terminal import shorten_line
from minimind.runtime.urls import masked_values
from minimind.train.evaluate import HeldOutRows, Samples, draw, evaluate, log_evaluation
from minimind.train.failures import SkippedSteps
from minimind.train.memory import log_peak
from minimind.train.start import Plan

if TYPE_CHECKING:
    from minimind.checkpoint.mirror import Mirror
    from minimind.recovery.corruption import CorruptionCheck
    from minimind.recovery.fingerprints import Fingerprints
    from minimind.recovery.spikes import SpikeGuard
    from minimind.report.trace import Trace
    from minimind.train.own_code import Hooks
    from minimind.train.patience import Patience
    from minimind.train.scores import Scores

GC_WARMUP_STEPS = 2  # all long-lived objects exist after them
# More frozen objects mean that a host program has frozen its own: Python 3.12 itself freezes 375.
FROZEN_AT_START = 1000
TIMED_STEPS = 3  # the time of a step is known after them
LONG_SILENCE = 3600.0  # seconds without a step line that deserve a warning
GO_BACK = -1  # instead of an exit status: the spike guard asks for an earlier checkpoint


@dataclass(frozen=True)
class RunContext:
    """Objects that the loop and its actions share; built by `pretrain`."""

    plan: Plan
    identity: dict[str, Any]  # values that must not change on resume
    init_from: dict[str, str] | None  # place and kind of the initial weights
    prepared: Prepared
    engine: Engine
    batches: Batches
    held_out: HeldOutRows
    samples: Samples | None
    scores: Scores | None
    patience: Patience | None
    hooks: Hooks | None
    saver: Saver
    mirror: Mirror | None
    trace: Trace | None
    communication: CommunicationClock | None  # None unless profiling
    logger: RunLogger
    spikes: SpikeGuard | None
    corruption: CorruptionCheck | None
    fingerprints: Fingerprints | None
    skipped: SkippedSteps
    stop: StopRequest
    progress: Progress
    cleanup: ExitStack  # closed when the run ends, however it ends

    @property
    def run(self) -> RunConfig:
        """All flags with their final values."""
        return self.plan.run

    @property
    def schedule(self) -> Schedule:
        """The schedule of the run, up to the step at which --patience or a hook ended it."""
        schedule = self.patience.schedule if self.patience else self.plan.rows()[2]
        if self.hooks is None or self.hooks.stopped_at is None:
            return schedule
        return replace(schedule, total_steps=self.hooks.stopped_at)

    @property
    def norm_limit(self) -> float:
        """Gradient norm above which the next update is skipped."""
        return self.spikes.norm_limit if self.spikes else math.inf


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether an action with interval `every`, and at the last step, is due after `step`."""
    return step % every == 0 or step == last_step


def train(context: RunContext, state: TrainState) -> tuple[TrainState, int, str]:
    """Train from `state` to the last step; return the final state, exit status and reason.

    One iteration is one optimizer step of all ranks. Every rank runs every line: saving, evaluation
    and logging are collective, so none of them may depend on `rank == 0`.
    """
    run, engine = context.run, context.engine
    clock = context.progress.clock = PhaseClock(engine.device, context.communication)
    first = context.progress.step = state.step
    context.logger.begin(state.step, state.tokens, clock)
    is_cut_off = not catch_up(context, state)
    last = context.schedule.total_steps
    while state.step < last and not is_cut_off:
        if state.step - first == GC_WARMUP_STEPS:
            freeze_gc(context)
        if context.trace and context.trace.is_due(state.step):
            switch_trace(context, context.trace, state, clock)
        engine.seed(state.step)
        clock.begin()
        micro_batches = context.logger.track(context.batches.at(state.step))  # fetch
        result = take_step(context, state.step, micro_batches, clock)  # step
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
        check_skipped_steps(context, state, result, waits=logging or profiling or saving)
        if logging or profiling:
            context.logger.add_phase_times(clock.take(engine.backend.waits))
        if logging:
            log_step(context, state, result)
        if context.corruption and is_due(state.step, run.verify_interval, last):
            check_corruption(context, context.corruption, state, first)
        if saving:
            start_save(context, state)  # before evaluation, which may outlast a grace period
        if is_due(state.step, run.eval_interval, last) and len(context.held_out.rows):
            run_evaluation(context, state)
        if context.samples and is_due(state.step, run.sample_interval, last):
            log_samples(context, context.samples, state)
        if context.scores and is_due(state.step, run.eval_tasks_interval, last):
            is_cut_off = not log_scores(context, context.scores, state)
        if state.step == context.schedule.total_steps < last:
            is_cut_off, profiling = end_early(context, state, result, clock, first, logging)
        last = context.schedule.total_steps
        if profiling:
            log_profile(context, state, is_last=stopping or state.step == last)
        if stopping:
            break
    if is_cut_off or state.step == last:  # the next start asks again what is cut off
        save_last(context, state)
    finish_recording(context, state, clock)
    if state.step < last:
        return state, PREEMPTED, f"stopped on {stop_reason(context)}, saved"
    ends = (part.reason for part in (context.hooks, context.patience) if part)
    return state, 0, next(filter(None, ends), "done")


def take_step(
    context: RunContext, step: int, micro_batches: Sequence[Tensor], clock: PhaseClock
) -> StepResult:
    """Take the step after `step`, and log its fingerprint if one is due (collective)."""
    run, engine, fingerprints = context.run, context.engine, context.fingerprints
    is_recorded = step == 0 or is_due(step + 1, run.fingerprints or 1, context.schedule.total_steps)
    if fingerprints and is_recorded:
        fingerprints.begin(step)
    lr = context.schedule.lr_at(step)
    share = context.batches.order.of(step).share(engine.data_rank, engine.parallel.data_size)
    result = engine.step(micro_batches, lr, clock, context.norm_limit, share.start)
    if fingerprints and is_recorded:
        log_fingerprint(context, fingerprints, step + 1, result)
    return result


def log_fingerprint(
    context: RunContext, fingerprints: Fingerprints, step: int, result: StepResult
) -> None:
    """Log what was recorded of a step, and the weights after it (collective)."""
    with context.logger.pausing("fingerprint"):
        context.logger.event("fingerprint", **fingerprints.end(step, result))


def register_cleanup(context: RunContext) -> None:
    """Close the background work of the loop when the run ends."""
    context.cleanup.callback(context.batches.close)
    context.cleanup.callback(context.saver.close)
    if context.trace:
        context.cleanup.callback(context.trace.stop)


def freeze_gc(context: RunContext) -> None:
    """Freeze all live objects; later collections skip them.

    gc.unfreeze() at the end releases everything, so nothing is done where the host process (a
    notebook) has frozen objects already.
    """
    if gc.get_freeze_count() <= FROZEN_AT_START:
        with context.logger.pausing("gc"):
            gc.collect()
            gc.freeze()
            context.cleanup.callback(gc.unfreeze)


def advance_progress(context: RunContext, state: TrainState, steps: int) -> None:
    """Advance progress and its bar; warn once if step lines will be over an hour apart.

    After the first step hold its memory against the estimate by which the batch was divided.
    """
    context.progress.step = state.step
    context.logger.advance()
    if steps == 1 and context.plan.fit:
        log_peak(context.plan.setup, context.engine, context.logger, state.step)
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
    norm_limit = context.norm_limit  # of this step; `observe` replaces it
    must_go_back = spikes.observe(sums)
    if must_go_back:  # the last chance to count what is pending
        check_skipped_steps(context, state, result, waits=True)
    spikes.hold(state.step - 1, result, norm_limit)
    return stop, failed, overdue, must_go_back


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
    line = context.logger.step(
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
            **routing_fields(result, context.engine),
        }
    )
    if change := context.engine.take_update_change():
        context.logger.event("zero_update_changed", step=state.step, zero_update=change)
        context.logger.print(f"warning  update {change}, since step {state.step} at the latest")
    if seconds := context.engine.compiling.take():
        context.logger.event("compiled", step=state.step, seconds=seconds)
        context.logger.print(
            f"step {state.step}: {seconds:.1f} s of the time since the last line went into"
            " compiling"
        )
    if context.hooks:
        context.hooks.call("on_step", state.step, line, context.schedule.total_steps)


def routing_fields(result: StepResult, ranks: Ranks) -> dict[str, Any]:
    """Fields of a step event: `aux_loss` and the load of experts over all ranks (collective).

    expert_load is the share of visits per expert, averaged over layers. expert_load_range is the
    smallest and largest share of any expert in any layer, as a multiple of the uniform share.
    """
    if result.aux_loss is None or result.expert_load is None:
        return {}
    layers, experts = result.expert_load.shape
    local = [float(result.aux_loss), *result.expert_load.flatten().tolist()]
    aux_loss, *shares = (number / ranks.world_size for number in ranks.sum_over_ranks(local))
    multiples = [share * experts for share in shares]
    return {
        "aux_loss": aux_loss,
        "expert_load": [sum(shares[n::experts]) / layers for n in range(experts)],
        "expert_load_range": [min(multiples), max(multiples)],
    }


def check_skipped_steps(
    context: RunContext, state: TrainState, result: StepResult, waits: bool
) -> None:
    """Log skipped steps; raise NumericError on every rank if there are more than allowed.

    Flags on the GPU are read if the step `waits` for it anyway, or 64 are pending.
    """
    try:
        context.skipped.check(state.step, result, waits)
    except NumericError:
        poll_save(context, wait=True)  # a save in the background may hold the last good checkpoint
        raise


def check_corruption(
    context: RunContext, check: CorruptionCheck, state: TrainState, first: int
) -> None:
    """Check for corruption; `first`: step from which the loop goes on (collective)."""
    logger, saver = context.logger, context.saver
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


def switch_trace(context: RunContext, trace: Trace, state: TrainState, clock: PhaseClock) -> None:
    """Start or write the trace of --trace_steps on every rank."""
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
            compare(context, state, results["val_loss"])
    if context.hooks:
        context.hooks.call("on_eval", state.step, results, context.schedule.total_steps)


def compare(context: RunContext, state: TrainState, value: float) -> None:
    """Record what --keep_best compares, the lower the better, and count it for --patience."""
    context.saver.validated(state.step, value)
    if context.patience:
        context.patience.observe(state.step, value)


def end_early(
    context: RunContext,
    state: TrainState,
    result: StepResult,
    clock: PhaseClock,
    first: int,
    is_logged: bool,
) -> tuple[bool, bool]:
    """Do what the loop does at a last step only, after this one has become the last.

    Return whether a stop request interrupted the scoring, and whether a profile is due. Collective.
    """
    run, step = context.run, state.step
    if not is_logged:
        context.logger.add_phase_times(clock.take(context.engine.backend.waits))
        log_step(context, state, result)
    if (fingerprints := context.fingerprints) and step > 1 and step % run.fingerprints:
        fingerprints.begin(step - 1)  # too late for what the step itself computes
        log_fingerprint(context, fingerprints, step, result)
    if context.corruption and step % run.verify_interval:
        check_corruption(context, context.corruption, state, first)
    save_last(context, state)
    if len(context.held_out.rows) and step % run.eval_interval:
        run_evaluation(context, state)
    if context.samples and step % run.sample_interval:
        log_samples(context, context.samples, state)
    scores, is_cut_off = context.scores, False
    if scores and step % run.eval_tasks_interval:
        is_cut_off = not log_scores(context, scores, state)
    return is_cut_off, run.profile


def save_last(context: RunContext, state: TrainState) -> None:
    """Save the last step of a run that ends at it, unless it is saved (collective)."""
    with context.logger.pausing("checkpoint"):
        poll_save(context, wait=True)
    if context.saver.has(state.step):
        return
    start_save(context, state)
    patience = context.patience
    if patience and patience.value is not None and patience.step == state.step:
        context.saver.validated(state.step, patience.value)


def catch_up(context: RunContext, state: TrainState) -> bool:
    """Save and evaluate after a start where the loop will not (collective).

    Return False if a stop request interrupted the scoring.
    """
    run, saver, last = context.run, context.saver, context.schedule.total_steps
    if state.step == last and not saver.has(last):  # resumed at its end, in a new out_dir
        start_save(context, state)
    has_rows = len(context.held_out.rows)
    if run.eval_at_start and state.step == 0 and has_rows:
        run_evaluation(context, state)
    is_evaluated = has_rows and is_due(state.step, run.eval_interval, last)
    # Killed between the save of a step and its validation, which --keep_best compares.
    by_loss = run.keep_best and run.keep_best_by == VAL_LOSS
    if by_loss and state.step and is_evaluated and lacks_value(context, state):
        run_evaluation(context, state)
    elif context.held_out.may_grow and 0 < state.step < last and is_evaluated:
        # The checkpoint was saved before the validation of its step, which may have read more rows.
        with context.logger.pausing("evaluate"):
            rows = run.micro_batch_rows(context.engine.world_size)
            evaluate(context.engine, context.held_out, rows)
    scores, last = context.scores, context.schedule.total_steps
    if scores and state.step and is_due(state.step, run.eval_tasks_interval, last):
        by_score = run.keep_best and not by_loss and lacks_value(context, state)
        if scores.lacks(context.engine, state.step) or by_score:  # a stop cuts them off, too
            return log_scores(context, scores, state)
    return True


def lacks_value(context: RunContext, state: TrainState) -> bool:
    """Whether what --keep_best or --patience compares of a resumed step is unknown (collective)."""
    is_counted = context.patience is None or not context.patience.lacks(state.step)
    return context.saver.lacks_validation(state.step) or not is_counted


def log_samples(context: RunContext, samples: Samples, state: TrainState) -> None:
    """Generate and log a continuation of each prompt."""
    with context.logger.pausing("sample"):
        with lost_peers():
            texts = draw(context.engine, samples)
        for number, (prompt, text) in enumerate(zip(samples.prompts, texts, strict=True)):
            context.logger.event("sample", step=state.step, number=number, prompt=prompt, text=text)
            context.logger.print(
                f"step {state.step}: sample {number + 1}: {shorten_line(prompt + text)}"
            )


def log_scores(context: RunContext, scores: Scores, state: TrainState) -> bool:
    """Ask and log the tasks of --eval_tasks.

    Return False if a stop cut them off: the run ends at this step, where the next start asks them.
    """
    with context.logger.pausing("score"):
        found = scores.compute(context.engine)
        if found is None:
            context.logger.print(
                f"step {state.step}: the run is asked to stop, so there are no scores"
            )
            return False
        context.logger.event("scores", step=state.step, tokens=state.tokens, **found)
        context.logger.print(f"step {state.step}: {scores_line(found)}")
        if (value := scores.compared(found)) is not None:
            compare(context, state, value)
    return True


def start_save(context: RunContext, state: TrainState) -> None:
    """Start saving a checkpoint, after the previous save ended; wait with --no-async_save."""
    with context.logger.pausing("checkpoint"):
        poll_save(context, wait=True)
        run_on_all_ranks(context.engine, partial(check_data_unchanged, context))
        context.saver.begin(manifest_of(context, state))
        if not context.saver.in_background:
            poll_save(context, wait=True)


def manifest_of(context: RunContext, state: TrainState) -> dict[str, Any]:
    """All that a checkpoint says of its run and step, but not of its files (collective).

    Read back by checkpoint/resume.py.
    """
    run, engine, order = context.run, context.engine, context.batches.order
    manifest = {
        "identity": context.identity,
        **layout(run, engine),
        "dtype": run.dtype,
        "rows": order.n_rows,
        "mixture": order.mixture_json(),
        "configuration": masked_values(engine.resolved.config),
        "sources": engine.resolved.sources,
        "versions": versions(),
        "init_from": context.init_from,
        "order": order.start_json(),
    }
    if context.spikes:
        manifest["spikes"] = context.spikes.state()
    if context.patience:
        manifest["patience"] = context.patience.state()
    if context.held_out.reads is not None:  # --eval_rows auto
        manifest["eval_rows"] = context.held_out.reads
    return manifest | {"step": state.step, "tokens": state.tokens}


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
    if context.trace and context.trace.is_recording:
        switch_trace(context, context.trace, state, clock)
    with context.logger.pausing("checkpoint"):
        poll_save(context, wait=True)
