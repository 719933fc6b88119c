"""What a run prints at its start: what is trained and where it goes, and what is not a default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.train_state import TrainState
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.loader.manifest import where_listed
from minimind.data.prepare.prepare import Prepared
from minimind.telemetry.mfu import peak_text
from minimind.train.loop_actions import RunContext
from minimind.train.settings import (
    COLUMNS,
    LABEL,
    non_default_settings,
    labelled_lines,
    short_source,
    resolved_table,
    shorten,
)

MOST = 20  # lines of a start, as long as nothing has to be said but what is set
LEAST = 3  # of which so many are for what is set
FIRST_OF_ONE_CYCLE = 2000  # steps; DeepSpeed's default


def startup_summary(
    context: RunContext, prepared: Prepared, resumed: Resumed, room: str, told: Sequence[str]
) -> str:
    """The lines before the first step.

    `room` says how many checkpoints fit; `told` is what else there is to say of this start, a text
    or a line that has a label.
    """
    run, state = context.run, resumed.state
    lines = [
        *labelled_lines("model", _series(_model(context, prepared))),
        *labelled_lines("data", _series(_data(context, prepared))),
        *labelled_lines("step", [_step(context)]),
        *labelled_lines("length", _series(_length(context, state))),
        *labelled_lines("rate", [_rate(context)]),
        *labelled_lines("backend", _series(_backend(context))),
        *labelled_lines("output", _series([shorten(run.out_dir, 60), _cadence(run), room])),
    ]
    notes = [line for text in told for line in _note(text)]
    for warning in cadence_warnings(run, context.schedule, context.engine.resolved.config, state.step):
        notes += labelled_lines("warning", warning.split(" "))
    notes += labelled_lines("start", [_start(run, resumed)])
    if run.verbose:
        return "\n".join([*lines, resolved_table(context.engine.resolved), *notes])
    return "\n".join([*lines, *_settings(context, MOST - len(lines) - len(notes)), *notes])


def _note(text: str) -> list[str]:
    label, gap, words = text.partition("  ")  # as in `weights  from a/b`
    return labelled_lines(label, words.split()) if gap else labelled_lines("note", text.split())


def cadence_warnings(
    run: RunConfig, schedule: Schedule, config: dict[str, Any], step: int
) -> list[str]:
    """What a run from `step` on does not do before it ends: save, log, or reach its peak rate."""
    end = schedule.total_steps
    if run.stop_at_step and run.stop_at_step > step:
        end = min(end, run.stop_at_step)
    if step >= end:
        return []
    found, last = [], f"step {end:,}, the last"
    if not run.save_minutes and _is_never_due(run.save_interval, step, end):
        found.append(
            f"no checkpoint before {last}: --save_interval is {run.save_interval:,} and"
            " --save_minutes 0"
        )
    if _is_never_due(run.log_interval, step, end):
        found.append(f"no step line before {last}: --log_interval is {run.log_interval:,}")
    warmup = _warmup_steps(schedule, config)
    if step < end <= warmup:
        found.append(
            f"the run stops at step {end:,}, {'before' if end < warmup else 'at'} the end of its"
            f" warm-up of {warmup:,} steps"
        )
    return found


def _is_never_due(every: int, step: int, end: int) -> bool:
    """Whether nothing is due strictly between `step` and `end`, though there are steps between."""
    return end - step > 1 and step // every == (end - 1) // every


def _warmup_steps(schedule: Schedule, config: dict[str, Any]) -> int:
    """Steps in which the rate rises: ours, or those of DeepSpeed's scheduler."""
    scheduler = config.get("scheduler")
    if not scheduler or not scheduler.get("type"):
        return schedule.warmup_steps
    params = scheduler.get("params", {})
    if scheduler["type"] == "OneCycle":
        return int(params.get("cycle_first_step_size", FIRST_OF_ONE_CYCLE))
    return int(params.get("warmup_num_steps", 0))


def _settings(context: RunContext, most: int) -> list[str]:
    """What is not a default, in at most so many lines, and how to see the rest."""
    found = non_default_settings(context.engine.resolved)
    lines = [line for label, words in found.items() for line in labelled_lines(label, words)]
    kept = lines[: max(LEAST, most - 1)]
    record = "config.yaml in out_dir"
    some = "these are not all; " if len(kept) < len(lines) else ""
    return [*kept, f"{'more':<{LABEL}}{some}every value and its source: --verbose, or {record}"]


def _series(items: Sequence[str]) -> list[str]:
    """The same with a semicolon between two."""
    return [*(f"{item};" for item in items[:-1]), *items[-1:]]


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _model(context: RunContext, prepared: Prepared) -> list[str]:
    run, vocabulary = context.run, context.engine.model.config.vocab_size
    unused = vocabulary - run.vocab_size + prepared.tokenizer.unused
    name = f"{shorten(run.model, 40)}, " if run.model and not run.hugging_face else ""
    size = f"{name}{context.engine.parameters:,} parameters"
    some = f" ({unused:,} of it unused)" if unused else ""
    return [size, f"vocabulary {vocabulary:,}{some}"]


def _data(context: RunContext, prepared: Prepared) -> list[str]:
    run, rejected = context.run, prepared.manifest["rejected"]
    first, *others = run.data_path
    more = f" and {len(others)} more" if others else ""
    found = [
        f"{shorten(first, COLUMNS - LABEL - len(more) - 1)}{more}",
        f"{len(prepared.train):,} tokens in {_count(context.batches.order.n_rows, 'row')} of"
        f" {run.max_seq_len + 1}",
        f"{len(context.held_out.rows):,} held out for validation",
    ]
    if rejected["count"]:
        bad = _count(rejected["count"], "bad document")
        found.append(f"{bad} passed over ({where_listed(rejected)})")
    return found


def _step(context: RunContext) -> str:
    run, world_size = context.run, context.engine.world_size
    factors = (
        _count(run.micro_batch_rows(world_size), "row"),
        _count(run.accumulation_steps, "micro-batch", "micro-batches"),
        _count(world_size, "process", "processes"),
    )
    rows = context.batches.order.rows_per_step
    return f"{' x '.join(factors)} = {rows:,} rows, {context.batches.tokens_per_step:,} tokens"


def _length(context: RunContext, state: TrainState) -> list[str]:
    order, total = context.batches.order, context.schedule.total_steps
    tokens = state.tokens + (total - state.step) * context.batches.tokens_per_step
    dropped = order.n_rows - order.steps_per_epoch * order.rows_per_step
    epoch = f"{_count(order.steps_per_epoch, 'step')} an epoch"
    if dropped:
        epoch += f", its last {_count(dropped, 'row')} dropped"
    return [f"{_count(total, 'step')}, {tokens:,} tokens", epoch]


def _rate(context: RunContext) -> str:
    schedule, scheduler = context.schedule, context.engine.resolved.scheduler
    if scheduler:
        return f"DeepSpeed's {scheduler}, as its file says"
    warmup = _count(schedule.warmup_steps, "step")
    return f"{schedule.shape}, {warmup} of warm-up, peak {schedule.peak:g}"


def _backend(context: RunContext) -> list[str]:
    run, engine = context.run, context.engine
    resolved, zero = engine.resolved, ""
    if resolved.config:
        source = short_source(resolved.sources["zero_optimization.stage"])
        zero = f", ZeRO stage {resolved.zero_stage} ({source})"
    found = [
        f"{resolved.backend}{zero}, {run.dtype}, on {engine.world_size} x {engine.device.type}"
    ]
    if run.compile == "on":
        found.append("compiled in the first step")
    return [*found, *filter(None, [peak_text(run, engine.device).removeprefix("; ")])]


def _cadence(run: RunConfig) -> str:
    by_clock = f" or {run.save_minutes:g} minutes" if run.save_minutes else ""
    return f"a checkpoint every {_count(run.save_interval, 'step')}{by_clock}"


def _start(run: RunConfig, resumed: Resumed) -> str:
    if not resumed.path:
        return "at step 0"
    path, out_dir = resumed.path, Path(run.out_dir)
    known = path.relative_to(out_dir) if path.is_relative_to(out_dir) else path
    return f"resuming at step {resumed.state.step} from {shorten(str(known), 60)} (verified)"
