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
from minimind.telemetry.progress import RunLogger, duration
from minimind.telemetry.trace import Trace
from minimind.train.evaluate import HeldOutRows, evaluate
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

    def freeze_gc_after_warmup(self) -> None:
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
class RunContext:
    """What the loop works with, each built by the script."""

    run: RunConfig
    schedule: Schedule
    engine: Engine
    batches: Batches
    held_out: HeldOutRows
    samples: Samples | None
    saver: Saver
    trace: Trace | None
    communication: CommunicationClock | None  # watched only while profiling
    logger: RunLogger
    skipped: SkippedSteps
    stop: StopRequest
    progress: Progress
    spared: Spared = field(default_factory=Spared)


def register_cleanup(held: ExitStack, context: RunContext) -> None:
    """Have `held` end what works beside the loop, however the loop ends."""
    held.callback(context.batches.close)
    held.callback(context.saver.close)
    held.callback(context.spared.thaw)
    if context.trace:
        held.callback(context.trace.stop)


def freeze_gc_after_warmup(context: RunContext, steps: int) -> None:
    """Spare the garbage collector what the run's first `steps` built, once that is all of it."""
    if steps == WARM_UP:
        started = time.perf_counter()
        context.spared.freeze_gc_after_warmup()
        context.logger.add_pause("gc", (time.perf_counter() - started) * 1e3)


def advance(context: RunContext, state: TrainState, steps: int) -> None:
    """Move the bar; say so, once steps are timed, where step lines will be an hour apart."""
    context.logger.advance()
    if steps != TIMED:
        return
    every = context.run.log_interval
    pace = context.logger.seconds_per_step()
    apart = pace * min(every, context.schedule.total_steps - state.step)
    if apart > SILENCE:
        context.logger.print(
            f"warning  no step line for {duration(apart)}: a step takes {pace:.1f} s and"
            f" --log_interval is {every:,}"
        )


def stop_reason(context: RunContext) -> str:
    """Who asked the run to stop, be it through another rank; every rank must ask."""
    reasons = [reason for reason in context.engine.gather(context.stop.reason) if reason]
    return reasons[0] if reasons else f"--stop_at_step {context.run.stop_at_step}"


def log_step(context: RunContext, state: TrainState, result: StepResult) -> None:
    """The step line: the loss of this very step over all ranks, and the times since the last.

    After it how much of them went into compiling, so that nobody takes it for something else.
    """
    loss, count = context.engine.sum_over_ranks([float(result.loss_sum), float(result.tokens)])
    norm = None if result.grad_norm is None else float(result.grad_norm)
    rows = context.batches.order.positions(state.step - 1)
    context.logger.step(
        {
            "step": state.step,
            "loss": loss / count,
            "lr": result.lr,
            "grad_norm": norm,
            "clipped": norm is not None and 0 < context.run.grad_clip < norm < math.inf,
            "skipped": int(result.skipped_so_far),
            "tokens": state.tokens,
            "rows": [rows.start, rows.stop],
            **routing_facts(result.routing, context.engine),
        },
        context.batches.tokens_per_step,
    )
    if seconds := context.engine.compiling.take():  # in the first step, and nowhere else
        context.logger.event("compiled", step=state.step, seconds=seconds)
        context.logger.print(f"step {state.step}: {seconds:.1f} s since the last line for compiling")


def check_skipped_steps(context: RunContext, state: TrainState, result: StepResult, is_due: bool) -> None:
    """Tell of steps that were skipped; a NumericError on every rank when there is one too many.

    Where only the device knows, it is asked when something is due anyway.
    """
    try:
        context.skipped.look(state.step, result, is_due)
    except NumericError:
        poll_save(context, wait=True)  # the last good checkpoint may still be on its way
        raise


def log_profile(context: RunContext, state: TrainState) -> None:
    """Where the time of every rank went since the last profile."""
    context.logger.profile(state.step, context.engine.gather(context.logger.medians()))


def log_collectives(context: RunContext, state: TrainState, stopping: bool) -> None:
    """Every --profile_interval what DeepSpeed's comms_logger tells, where its JSON has it on."""
    is_time = stopping or is_due(state.step, context.run.profile_interval, context.schedule.total_steps)
    if is_time and (told := context.engine.backend.collectives_table()):
        context.logger.print(f"DeepSpeed's comms_logger, up to step {state.step}:\n{told}")


def trace(context: RunContext, state: TrainState, clock: PhaseClock, is_over: bool = False) -> None:
    """Begin or end a trace on every rank, where --trace_steps says so or the run is over."""
    recorder = context.trace
    if recorder is None or not recorder.is_due(state.step, is_over):
        return
    started = time.perf_counter()
    if recorder.is_recording:
        clock.is_traced = False
        path = together(context.engine, partial(recorder.write, state.step))[context.engine.rank]
        context.logger.print(f"step {state.step}: trace {path}, for ui.perfetto.dev")
    else:
        recorder.begin(state.step)
        clock.is_traced = True
    context.logger.add_pause("trace", (time.perf_counter() - started) * 1e3)


def run_evaluation(context: RunContext, state: TrainState) -> None:
    """Validate, and tell."""
    started = time.perf_counter()
    found = evaluate(context.engine, context.held_out, context.run.micro_batch_rows(context.engine.world_size))
    context.logger.event("eval", step=state.step, **found)
    shown = [
        ("", found),
        *((f" of {name}", sums) for name, sums in found.get("by_source", {}).items()),
    ]
    context.logger.print(
        "\n".join(
            f"step {state.step}: validation loss{name} {sums['val_loss']:.4f},"
            f" perplexity {sums['val_ppl']:.1f}, {sums['val_bpb']:.3f} bits per byte"
            for name, sums in shown
        )
    )
    context.logger.add_pause("evaluate", (time.perf_counter() - started) * 1e3)


def log_samples(context: RunContext, state: TrainState) -> None:
    """Tell what the model makes of each prompt by now."""
    if context.samples is None:
        return
    started = time.perf_counter()
    with lost_peers():
        texts = draw(context.engine, context.samples)
    for number, (prompt, text) in enumerate(zip(context.samples.prompts, texts, strict=True)):
        context.logger.event("sample", step=state.step, number=number, prompt=prompt, text=text)
        context.logger.print(f"step {state.step}: sample {number + 1}: {shown(prompt + text)}")
    context.logger.add_pause("sample", (time.perf_counter() - started) * 1e3)


def start_save(context: RunContext, state: TrainState) -> None:
    """Save, in the background unless --no-async_save; the save before is waited for."""
    started = time.perf_counter()
    poll_save(context, wait=True)
    together(context.engine, partial(check_data_unchanged, context))
    context.saver.begin(state)
    if not context.saver.in_background:
        poll_save(context, wait=True)
    context.logger.add_pause("checkpoint", (time.perf_counter() - started) * 1e3)


def check_data_unchanged(context: RunContext) -> None:
    """Nothing, or a DataError when a token file that this rank reads is another by now.

    Before a save, so that no checkpoint holds what was learnt from it.
    """
    context.batches.require_unchanged()
    context.held_out.shards.require_unchanged()


def poll_save(context: RunContext, wait: bool) -> None:
    """Tell of a checkpoint once it lasts, then let older ones go; every rank waits, or none."""
    if told := context.saver.not_retired():
        context.logger.print(told)
    if saved := context.saver.published(wait):
        context.logger.event("checkpoint_saved", **saved)
        size = mebibytes(saved["bytes"])
        context.logger.print(f"step {saved['step']}: checkpoint {saved['path']} ({size})")
        context.saver.retire()


def finish_recording(context: RunContext, state: TrainState, clock: PhaseClock) -> None:
    """Write what is recorded and wait for what is being saved: the run is over, or stops."""
    trace(context, state, clock, is_over=True)
    started = time.perf_counter()
    poll_save(context, wait=True)
    context.logger.add_pause("checkpoint", (time.perf_counter() - started) * 1e3)
