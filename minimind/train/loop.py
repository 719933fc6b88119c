"""The training loop, and nothing else."""

from __future__ import annotations

from minimind.checkpoint.train_state import TrainState, is_due
from minimind.engine.phase_clock import PhaseClock
from minimind.errors import PREEMPTED
from minimind.train.loop_actions import (
    Desk,
    advance,
    asked_by,
    begin_save,
    report_collectives,
    report_evaluation,
    report_profile,
    report_samples,
    report_saved,
    report_skipped,
    report_step,
    settle,
    trace,
    wind_up,
)


def train(desk: Desk, state: TrainState) -> tuple[TrainState, int, str]:
    """Take optimizer steps from `state` to the end; the last state, exit status and reason.

    One pass is one optimizer step of all ranks. Every rank runs every line: saving, evaluating
    and reporting are collective, so none of them may hide behind "if rank 0".
    """
    run, engine, last = desk.run, desk.engine, desk.schedule.total_steps
    clock = desk.progress.clock = PhaseClock(engine.device, desk.communication)
    begun = desk.progress.step = state.step
    desk.report.begin(state.step)
    if state.step == last and not desk.saver.has(last):  # finished elsewhere, resumed into here
        begin_save(desk, state)
    while state.step < last:
        settle(desk, state.step - begun)
        trace(desk, state, clock)
        engine.seed(state.step)
        clock.begin()
        micro_batches = desk.report.follow(desk.batches.at(state.step))  # fetch
        result = engine.step(micro_batches, desk.schedule.lr_at(state.step), clock)  # step
        state = state.after(desk.batches.tokens_per_step)  # advance
        advance(desk, state, state.step - begun)
        desk.progress.step = state.step
        asked, failed, overdue = engine.sum_over_ranks(
            [bool(desk.stop.reason), desk.saver.has_failed, desk.saver.is_overdue]
        )
        stopping = asked > 0 or state.step == run.stop_at_step
        report_saved(desk, wait=failed > 0)
        logging = is_due(state.step, run.log_interval, last) or stopping
        profiling = run.profile and (is_due(state.step, run.profile_interval, last) or stopping)
        saving = is_due(state.step, run.save_interval, last) or stopping or overdue > 0
        report_skipped(desk, state, result, is_due=logging or profiling or saving)
        if logging or profiling:
            desk.report.took(clock.take())
        if logging:
            report_step(desk, state, result)
        if saving:
            begin_save(desk, state)  # before the validation, for which a notice may be too short
        if is_due(state.step, run.eval_interval, last) and len(desk.held_out.rows):
            report_evaluation(desk, state)
        if desk.samples and is_due(state.step, run.sample_interval, last):
            report_samples(desk, state)
        if profiling:
            report_profile(desk, state)
        report_collectives(desk, state, stopping)
        if stopping and state.step < last:
            wind_up(desk, state, clock)
            return state, PREEMPTED, f"stopped on {asked_by(desk)}, saved"
    wind_up(desk, state, clock)
    return state, 0, "done"
