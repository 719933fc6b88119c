"""The training loop, and nothing else."""

from __future__ import annotations

from minimind.checkpoint.train_state import TrainState, is_due
from minimind.engine.phase_clock import PhaseClock
from minimind.errors import PREEMPTED
from minimind.train.loop_actions import (
    RunContext,
    advance,
    stop_reason,
    start_save,
    log_collectives,
    run_evaluation,
    log_profile,
    log_samples,
    poll_save,
    check_skipped_steps,
    log_step,
    freeze_gc_after_warmup,
    trace,
    finish_recording,
)


def train(context: RunContext, state: TrainState) -> tuple[TrainState, int, str]:
    """Take optimizer steps from `state` to the end; the last state, exit status and reason.

    One pass is one optimizer step of all ranks. Every rank runs every line: saving, evaluating
    and reporting are collective, so none of them may hide behind "if rank 0".
    """
    run, engine, last = context.run, context.engine, context.schedule.total_steps
    clock = context.progress.clock = PhaseClock(engine.device, context.communication)
    begun = context.progress.step = state.step
    context.logger.begin(state.step)
    if state.step == last and not context.saver.has(last):  # finished elsewhere, resumed into here
        start_save(context, state)
    while state.step < last:
        freeze_gc_after_warmup(context, state.step - begun)
        trace(context, state, clock)
        engine.seed(state.step)
        clock.begin()
        micro_batches = context.logger.track(context.batches.at(state.step))  # fetch
        result = engine.step(micro_batches, context.schedule.lr_at(state.step), clock)  # step
        state = state.after(context.batches.tokens_per_step)  # advance
        advance(context, state, state.step - begun)
        context.progress.step = state.step
        asked, failed, overdue = engine.sum_over_ranks(
            [bool(context.stop.reason), context.saver.has_failed, context.saver.is_overdue]
        )
        stopping = asked > 0 or state.step == run.stop_at_step
        poll_save(context, wait=failed > 0)
        logging = is_due(state.step, run.log_interval, last) or stopping
        profiling = run.profile and (is_due(state.step, run.profile_interval, last) or stopping)
        saving = is_due(state.step, run.save_interval, last) or stopping or overdue > 0
        check_skipped_steps(context, state, result, is_due=logging or profiling or saving)
        if logging or profiling:
            context.logger.add_phase_times(clock.take())
        if logging:
            log_step(context, state, result)
        if saving:
            start_save(context, state)  # before the validation, for which a notice may be too short
        if is_due(state.step, run.eval_interval, last) and len(context.held_out.rows):
            run_evaluation(context, state)
        if context.samples and is_due(state.step, run.sample_interval, last):
            log_samples(context, state)
        if profiling:
            log_profile(context, state)
        log_collectives(context, state, stopping)
        if stopping and state.step < last:
            finish_recording(context, state, clock)
            return state, PREEMPTED, f"stopped on {stop_reason(context)}, saved"
    finish_recording(context, state, clock)
    return state, 0, "done"
