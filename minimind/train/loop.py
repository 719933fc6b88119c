"""The training loop, and nothing else."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from minimind.config import RunConfig
from minimind.data.batches import Batches
from minimind.errors import PREEMPTED
from minimind.process import Progress, StopRequest
from minimind.train.backends import StepResult
from minimind.train.engine import Engine
from minimind.train.evaluate import HeldOut, evaluate
from minimind.train.profile import PhaseClock
from minimind.train.report import Report
from minimind.train.saver import Saver
from minimind.train.schedule import Schedule
from minimind.train.state import TrainState, is_due


@dataclass(frozen=True)
class Desk:
    """What the loop works with, each built by the script."""

    run: RunConfig
    schedule: Schedule
    engine: Engine
    batches: Batches
    held_out: HeldOut
    saver: Saver
    report: Report
    stop: StopRequest
    progress: Progress


def train(desk: Desk, state: TrainState) -> tuple[TrainState, int, str]:
    """Take optimizer steps from `state` to the end; the last state, exit status and reason.

    One pass is one optimizer step of all ranks. Every rank runs every line: saving, evaluating
    and reporting are collective, so none of them may hide behind "if rank 0".
    """
    run, engine, last = desk.run, desk.engine, desk.schedule.total_steps
    clock = PhaseClock(engine.device)
    desk.report.begin(state.step)
    if state.step == last and not desk.saver.has(last):  # finished elsewhere, resumed into here
        report_save(desk, state)
    while state.step < last:
        desk.progress.step = state.step
        engine.seed(state.step)
        clock.begin()
        micro_batches = desk.batches.at(state.step)  # fetch
        result = engine.step(micro_batches, desk.schedule.lr_at(state.step), clock)  # step
        state = state.after(desk.batches.tokens_per_step)  # advance
        stopping = engine.any_rank(bool(desk.stop.reason)) or state.step == run.stop_at_step
        logging = is_due(state.step, run.log_interval, last)
        profiling = run.profile and is_due(state.step, run.profile_interval, last)
        if logging or profiling:
            desk.report.took(clock.take())
        if logging:
            report_step(desk, state, result)
        if is_due(state.step, run.eval_interval, last) and len(desk.held_out.rows):
            report_evaluation(desk, state)
        if is_due(state.step, run.save_interval, last) or stopping:
            report_save(desk, state)
        if profiling:
            desk.report.profile(state.step)
        if stopping and state.step < last:
            return state, PREEMPTED, "stopped on request, saved"
    return state, 0, "done"


def report_step(desk: Desk, state: TrainState, result: StepResult) -> None:
    """The step line: the loss of this very step over all ranks, and the times since the last."""
    loss, count = desk.engine.sum_over_ranks([float(result.loss_sum), float(result.tokens)])
    norm = None if result.grad_norm is None else float(result.grad_norm)
    rows = desk.batches.order.positions(state.step - 1)
    desk.report.step(
        {
            "step": state.step,
            "loss": loss / count,
            "lr": result.lr,
            "grad_norm": norm,
            "clipped": norm is not None and 0 < desk.run.grad_clip < norm < math.inf,
            "skipped": result.skipped_so_far,
            "tokens": state.tokens,
            "rows": [rows.start, rows.stop],
        },
        desk.batches.tokens_per_step,
    )


def report_evaluation(desk: Desk, state: TrainState) -> None:
    """Validate, and tell."""
    started = time.perf_counter()
    found = evaluate(desk.engine, desk.held_out, desk.run.micro_batch_rows(desk.engine.world_size))
    desk.report.event("eval", step=state.step, **found)
    desk.report.say(
        f"step {state.step}: validation loss {found['val_loss']:.4f},"
        f" perplexity {found['val_ppl']:.1f}, {found['val_bpb']:.3f} bits per byte"
    )
    desk.report.pause("evaluate", (time.perf_counter() - started) * 1e3)


def report_save(desk: Desk, state: TrainState) -> None:
    """Save, and tell once it lasts."""
    saved = desk.saver.save(state)
    desk.report.event("checkpoint_saved", **saved)
    desk.report.say(
        f"step {state.step}: checkpoint {saved['path']} ({saved['bytes'] / 2**20:.1f} MiB)"
    )
    desk.report.pause("checkpoint", saved["stall_ms"])
