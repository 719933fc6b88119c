"""The training loop."""

from __future__ import annotations

from minimind.checkpoint.directory import TrainState, is_due
from minimind.engine.clocks import PhaseClock
from minimind.errors import PREEMPTED
from minimind.train.loop_actions import (
    RunContext,
    advance_progress,
    catch_up,
    check_corruption,
    check_skipped_steps,
    finish_recording,
    freeze_gc_after_warmup,
    log_collectives,
    log_profile,
    log_samples,
    log_step,
    poll_save,
    run_evaluation,
    start_save,
    stop_reason,
    sum_requests,
    update_trace,
)

GO_BACK = -1  # instead of an exit status: the spike guard asks for an earlier checkpoint


def train(context: RunContext, state: TrainState) -> tuple[TrainState, int, str]:
    """Train from `state` to the last step; return the final state, exit status and reason.

    One iteration is one optimizer step of all ranks. Every rank runs every line: saving, evaluation
    and logging are collective, so none of them may depend on `rank == 0`.
    """
    run, engine, last = context.run, context.engine, context.schedule.total_steps
    clock = context.progress.clock = PhaseClock(engine.device, context.communication)
    first = context.progress.step = state.step
    context.logger.begin(state.step)
    catch_up(context, state)
    while state.step < last:
        freeze_gc_after_warmup(context, state.step - first)
        update_trace(context, state, clock)
        engine.seed(state.step)
        clock.begin()
        micro_batches = context.logger.track(context.batches.at(state.step))  # fetch
        result = engine.step(  # step
            micro_batches, context.schedule.lr_at(state.step), clock, context.spikes.norm_limit
        )
        state = state.after(context.batches.tokens_per_step)  # advance
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
            context.logger.add_phase_times(clock.take())
        if logging:
            log_step(context, state, result)
        check_corruption(context, state, first)
        if saving:
            start_save(context, state)  # before evaluation, which may outlast a grace period
        if is_due(state.step, run.eval_interval, last) and len(context.held_out.rows):
            run_evaluation(context, state)
        log_samples(context, state)
        if profiling:
            log_profile(context, state, is_last=stopping or state.step == last)
        log_collectives(context, state, stopping)
        if stopping and state.step < last:
            finish_recording(context, state, clock)
            return state, PREEMPTED, f"stopped on {stop_reason(context)}, saved"
    finish_recording(context, state, clock)
    return state, 0, "done"
