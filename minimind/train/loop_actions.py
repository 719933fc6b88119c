"""What the loop works with, and what it does between steps: report, validate, save."""

from __future__ import annotations

import gc
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from minimind.checkpoint.saver import Saver
from minimind.checkpoint.train_state import TrainState, is_due
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.loader.batches import Batches
from minimind.data.prepare.inspect import shown
from minimind.engine.build import Engine
from minimind.engine.collective_clock import CommunicationClock
from minimind.engine.loss_of_batch import routing_facts
from minimind.engine.phase_clock import PhaseClock
from minimind.engine.plain_backend import StepResult
from minimind.errors import NumericError
from minimind.runtime.collectives import lost_peers, together
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.process import Progress, StopRequest
from minimind.telemetry.progress import Report, duration
from minimind.telemetry.trace import Trace
from minimind.train.evaluate import HeldOut, evaluate
from minimind.train.sample_text import Samples, draw
from minimind.train.skipped_steps import SkippedSteps

WARM_UP = 2  # steps, in which everything that lasts is built
TIMED = 3  # steps after which a step's time is known
SILENCE = 3600.0  # seconds without a step line that a run warns of


class Spared:
    """What the garbage collector passes over while the run lasts: what its first steps built.

    Thawing is of everything that is frozen. Where a notebook has frozen something by itself, the
    run freezes nothing, so that it has nothing to thaw.
    """

    def __init__(self) -> None:
        self._is_ours = False

    def settle(self) -> None:
        """Spare the collector all that is there."""
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._is_ours = True

    def thaw(self) -> None:
        """Undo it, if it was done."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False


@dataclass(frozen=True)
class Desk:
    """What the loop works with, each built by the script."""

    run: RunConfig
    schedule: Schedule
    engine: Engine
    batches: Batches
    held_out: HeldOut
    samples: Samples | None
    saver: Saver
    trace: Trace | None
    communication: CommunicationClock | None  # watched only while profiling
    report: Report
    skipped: SkippedSteps
    stop: StopRequest
    progress: Progress
    spared: Spared = field(default_factory=Spared)


def close_with(held: ExitStack, desk: Desk) -> None:
    """Have `held` end what works beside the loop, however the loop ends."""
    held.callback(desk.batches.close)
    held.callback(desk.saver.close)
    held.callback(desk.spared.thaw)
    if desk.trace:
        held.callback(desk.trace.stop)


def settle(desk: Desk, steps: int) -> None:
    """Spare the garbage collector what the run's first `steps` built, once that is all of it."""
    if steps == WARM_UP:
        started = time.perf_counter()
        desk.spared.settle()
        desk.report.pause("gc", (time.perf_counter() - started) * 1e3)


def advance(desk: Desk, state: TrainState, steps: int) -> None:
    """Move the bar; say so, once steps are timed, where step lines will be an hour apart."""
    desk.report.advance()
    if steps != TIMED:
        return
    every = desk.run.log_interval
    pace = desk.report.seconds_per_step()
    apart = pace * min(every, desk.schedule.total_steps - state.step)
    if apart > SILENCE:
        desk.report.say(
            f"warning  no step line for {duration(apart)}: a step takes {pace:.1f} s and"
            f" --log_interval is {every:,}"
        )


def asked_by(desk: Desk) -> str:
    """Who asked the run to stop, be it through another rank; every rank must ask."""
    reasons = [reason for reason in desk.engine.gather(desk.stop.reason) if reason]
    return reasons[0] if reasons else f"--stop_at_step {desk.run.stop_at_step}"


def report_step(desk: Desk, state: TrainState, result: StepResult) -> None:
    """The step line: the loss of this very step over all ranks, and the times since the last.

    After it how much of them went into compiling, so that nobody takes it for something else.
    """
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
            "skipped": int(result.skipped_so_far),
            "tokens": state.tokens,
            "rows": [rows.start, rows.stop],
            **routing_facts(result.routing, desk.engine),
        },
        desk.batches.tokens_per_step,
    )
    if seconds := desk.engine.compiling.take():  # in the first step, and nowhere else
        desk.report.event("compiled", step=state.step, seconds=seconds)
        desk.report.say(f"step {state.step}: {seconds:.1f} s since the last line for compiling")


def report_skipped(desk: Desk, state: TrainState, result: StepResult, is_due: bool) -> None:
    """Tell of steps that were skipped; a NumericError on every rank when there is one too many.

    Where only the device knows, it is asked when something is due anyway.
    """
    try:
        desk.skipped.look(state.step, result, is_due)
    except NumericError:
        report_saved(desk, wait=True)  # the last good checkpoint may still be on its way
        raise


def report_profile(desk: Desk, state: TrainState) -> None:
    """Where the time of every rank went since the last profile."""
    desk.report.profile(state.step, desk.engine.gather(desk.report.medians()))


def report_collectives(desk: Desk, state: TrainState, stopping: bool) -> None:
    """Every --profile_interval what DeepSpeed's comms_logger tells, where its JSON has it on."""
    is_time = stopping or is_due(state.step, desk.run.profile_interval, desk.schedule.total_steps)
    if is_time and (told := desk.engine.backend.collectives_table()):
        desk.report.say(f"DeepSpeed's comms_logger, up to step {state.step}:\n{told}")


def trace(desk: Desk, state: TrainState, clock: PhaseClock, is_over: bool = False) -> None:
    """Begin or end a trace on every rank, where --trace_steps says so or the run is over."""
    recorder = desk.trace
    if recorder is None or not recorder.is_due(state.step, is_over):
        return
    started = time.perf_counter()
    if recorder.is_recording:
        clock.is_traced = False
        path = together(desk.engine, partial(recorder.write, state.step))[desk.engine.rank]
        desk.report.say(f"step {state.step}: trace {path}, for ui.perfetto.dev")
    else:
        recorder.begin(state.step)
        clock.is_traced = True
    desk.report.pause("trace", (time.perf_counter() - started) * 1e3)


def report_evaluation(desk: Desk, state: TrainState) -> None:
    """Validate, and tell."""
    started = time.perf_counter()
    found = evaluate(desk.engine, desk.held_out, desk.run.micro_batch_rows(desk.engine.world_size))
    desk.report.event("eval", step=state.step, **found)
    shown = [
        ("", found),
        *((f" of {name}", sums) for name, sums in found.get("by_source", {}).items()),
    ]
    desk.report.say(
        "\n".join(
            f"step {state.step}: validation loss{name} {sums['val_loss']:.4f},"
            f" perplexity {sums['val_ppl']:.1f}, {sums['val_bpb']:.3f} bits per byte"
            for name, sums in shown
        )
    )
    desk.report.pause("evaluate", (time.perf_counter() - started) * 1e3)


def report_samples(desk: Desk, state: TrainState) -> None:
    """Tell what the model makes of each prompt by now."""
    if desk.samples is None:
        return
    started = time.perf_counter()
    with lost_peers():
        texts = draw(desk.engine, desk.samples)
    for number, (prompt, text) in enumerate(zip(desk.samples.prompts, texts, strict=True)):
        desk.report.event("sample", step=state.step, number=number, prompt=prompt, text=text)
        desk.report.say(f"step {state.step}: sample {number + 1}: {shown(prompt + text)}")
    desk.report.pause("sample", (time.perf_counter() - started) * 1e3)


def begin_save(desk: Desk, state: TrainState) -> None:
    """Save, in the background unless --no-async_save; the save before is waited for."""
    started = time.perf_counter()
    report_saved(desk, wait=True)
    together(desk.engine, partial(require_same_text, desk))
    desk.saver.begin(state)
    if not desk.saver.in_background:
        report_saved(desk, wait=True)
    desk.report.pause("checkpoint", (time.perf_counter() - started) * 1e3)


def require_same_text(desk: Desk) -> None:
    """Nothing, or a DataError when a token file that this rank reads is another by now.

    Before a save, so that no checkpoint holds what was learnt from it.
    """
    desk.batches.require_unchanged()
    desk.held_out.shards.require_unchanged()


def report_saved(desk: Desk, wait: bool) -> None:
    """Tell of a checkpoint once it lasts, then let older ones go; every rank waits, or none."""
    if told := desk.saver.not_retired():
        desk.report.say(told)
    if saved := desk.saver.published(wait):
        desk.report.event("checkpoint_saved", **saved)
        size = mebibytes(saved["bytes"])
        desk.report.say(f"step {saved['step']}: checkpoint {saved['path']} ({size})")
        desk.saver.retire()


def wind_up(desk: Desk, state: TrainState, clock: PhaseClock) -> None:
    """Write what is recorded and wait for what is being saved: the run is over, or stops."""
    trace(desk, state, clock, is_over=True)
    started = time.perf_counter()
    report_saved(desk, wait=True)
    desk.report.pause("checkpoint", (time.perf_counter() - started) * 1e3)
