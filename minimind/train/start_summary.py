"""The log of a start: run_start, and a summary with the settings that are not default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minimind.architecture.hf_models import rotary_dtype
from minimind.architecture.select import scaling_text
from minimind.checkpoint.directory import TrainState
from minimind.checkpoint.identity import hardware, layout, source_commit, versions
from minimind.checkpoint.resume import Resumed
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.prepare.prepare import Prepared
from minimind.data.shards.conversation_shards import ConversationShards
from minimind.data.shards.manifest import where_listed
from minimind.data.tokenizer.lossless import loss_lines
from minimind.engine.optimizers import iteration_dtype, mup_line
from minimind.provenance.step_rows import logged_order
from minimind.provenance.token_balance import (
    ConversationBalance,
    TokenBalance,
    conversation_balance,
    token_balance,
)
from minimind.storage.object_cache import named
from minimind.telemetry.mfu import peak_of, peak_text
from minimind.telemetry.trace import traced_steps
from minimind.train.initial_weights import InitialModel
from minimind.train.loop_actions import RunContext, log_rejected
from minimind.train.settings import (
    COLUMNS,
    LABEL,
    labelled_lines,
    non_default_settings,
    resolved_table,
    short_source,
    shorten,
)

MAX_LINES = 20  # of the summary, warnings and notes aside
MIN_SETTINGS = 3  # lines of settings that are shown in any case
SHARDING = ("world_size", "zero_stage")
Balance = TokenBalance | ConversationBalance
FIRST_OF_ONE_CYCLE = 2000  # steps; DeepSpeed's default


def log_run_start(
    context: RunContext,
    prepared: Prepared,
    resumed: Resumed,
    initial: InitialModel,
    notes: list[str],
) -> None:
    """Log the run's start; raise StorageError if no checkpoint would fit."""
    run, logger = context.run, context.logger
    log_rejected(logger, resumed)
    state = resumed.state
    has_steps = state.step < (total := context.schedule.total_steps)
    capacity = context.saver.require_capacity(total) if has_steps else "no step is left"
    log_start_event(context, prepared, resumed, initial)
    balance = balance_of(context, prepared)
    logger.event("token_balance", step=state.step, **asdict(balance))
    _log_changes(context, resumed, layout(run, context.engine))
    own = (initial.architecture.start_summary_line(), initial.line(), initial.template_line)
    notes = [*filter(None, own), *data_notes(context, prepared), *notes]
    if (traced := traced_steps(run)) and traced[1] <= state.step:
        notes.append(f"trace    none: --trace_steps {run.trace_steps} is before step {state.step}")
    logger.print(startup_summary(context, prepared, resumed, balance, capacity, notes))


def log_start_event(
    context: RunContext, prepared: Prepared, resumed: Resumed, initial: InitialModel
) -> None:
    """Log the `run_start` event: at the start, and again after going back to a checkpoint."""
    run, engine, order = context.run, context.engine, context.batches.order
    peak = peak_of(run, engine.device)
    context.logger.event(
        "run_start",
        step=resumed.state.step,
        resume_from=str(resumed.path) if resumed.path else None,
        init_from=initial.origin(resumed.manifest),
        **layout(run, engine),
        dtype=run.dtype,
        device=engine.device.type,
        hardware=hardware(engine.device),
        peak_tflops=peak[0] if peak else None,
        peak_source=peak[1] if peak else None,
        parameters=engine.parameters,
        tokens_per_step=context.batches.tokens_per_step,
        rows_per_epoch=order.rows_per_epoch,
        **logged_order(order, run.max_seq_len + 1, prepared),
        total_steps=context.schedule.total_steps,
        versions=versions(),
        commit=source_commit(),
        rotary=engine.gather(rotary_dtype(engine.model)),
    )


def _log_changes(context: RunContext, resumed: Resumed, current: dict[str, Any]) -> None:
    """Log what differs from the checkpoint."""
    whole = {"tensor_parallel": 1, "sequence_parallel": 1}  # sizes that `layout` leaves out
    current, before = whole | current, whole | resumed.manifest
    saved = {key: before.get(key, current[key]) for key in current}
    if resumed.path and saved != current:
        changes = [f"{k} {saved[k]} -> {new}" for k, new in current.items() if saved[k] != new]
        context.logger.print(f"checkpoint resharded: {', '.join(changes)}")
        before, after = ({key: side[key] for key in SHARDING} for side in (saved, current))
        if before != after:
            context.logger.event("checkpoint_resharded", **{"from": before, "to": after})
    if resumed.changed:
        changes = [str(one) for one in resumed.changed]
        context.logger.event("run_changed", changes=changes)
        context.logger.print(f"changed with --allow_change: {'; '.join(changes)}")


def startup_summary(
    context: RunContext,
    prepared: Prepared,
    resumed: Resumed,
    balance: Balance,
    capacity: str,
    notes: Sequence[str],
) -> str:
    """Return the lines printed before the first step.

    `balance` states where the tokens of the text go, `capacity` how many checkpoints fit; `notes`
    are further texts, with or without a label.
    """
    run, state = context.run, resumed.state
    lines = [
        *labelled_lines("model", _series(_model(context, prepared))),
        *labelled_lines("data", _series(_data(context, prepared))),
        *labelled_lines("tokens", str(balance).split(" ")),
        *labelled_lines("step", [_step(context)]),
        *labelled_lines("length", _series(_length(context, state))),
        *labelled_lines("rate", [_rate(context)]),
        *labelled_lines("backend", _series(_backend(context))),
        *labelled_lines("output", _series([shorten(run.out_dir, 60), _cadence(run), capacity])),
    ]
    note_lines: list[str] = []
    for note in filter(None, (mup_line(run), *notes)):
        label, gap, text = note.partition("  ")  # as in `weights  from a/b`
        note_lines += labelled_lines(*(label, text.split()) if gap else ("note", note.split()))
    for warning in cadence_warnings(
        run, context.schedule, context.engine.resolved.config, state.step
    ):
        note_lines += labelled_lines("warning", warning.split(" "))
    note_lines += labelled_lines("start", [_start(run, resumed)])
    if run.verbose:
        return "\n".join([*lines, resolved_table(context.engine.resolved), *note_lines])
    settings = [
        line
        for label, pieces in non_default_settings(context.engine.resolved).items()
        for line in labelled_lines(label, pieces)
    ]
    kept = settings[: max(MIN_SETTINGS, MAX_LINES - len(lines) - len(note_lines) - 1)]
    part = "these are not all; " if len(kept) < len(settings) else ""
    more = f"{part}every value and its source: --verbose, or config.yaml in out_dir"
    return "\n".join([*lines, *kept, f"{'more':<{LABEL}}{more}", *note_lines])


def data_notes(context: RunContext, prepared: Prepared) -> list[str]:
    """What of the text is not read, not validated, or lost by the tokenizer."""
    notes = [f"lossy    {line}" for line in loss_lines(prepared.manifest["sources"])]
    if names := context.held_out.unvalidated:
        notes.append(
            f"warning  no row of {', '.join(names)} is held out: the validation loss is that of the"
            " other sources"
        )
    if ignored := prepared.manifest.get("ignored"):
        notes.append(f"ignored beside the turns: {', '.join(ignored)}")
    return notes


def balance_of(context: RunContext, prepared: Prepared) -> Balance:
    """Where the tokens of the text go."""
    row_tokens, train = context.run.max_seq_len + 1, prepared.train
    if isinstance(train, ConversationShards):
        return conversation_balance(prepared, train, row_tokens)
    return token_balance(prepared, context.batches.order, row_tokens)


def cadence_warnings(
    run: RunConfig, schedule: Schedule, config: dict[str, Any], step: int
) -> list[str]:
    """Warnings that a run from `step` on ends without a save, a step line, or its peak rate."""
    end = schedule.total_steps
    if run.stop_at_step and run.stop_at_step > step:
        end = min(end, run.stop_at_step)
    if step >= end:
        return []
    warnings, last = [], f"step {end:,}, the last"
    if not run.save_minutes and _is_never_due(run.save_interval, step, end):
        warnings.append(
            f"no checkpoint before {last}: --save_interval is {run.save_interval:,} and"
            " --save_minutes 0"
        )
    if _is_never_due(run.log_interval, step, end):
        warnings.append(f"no step line before {last}: --log_interval is {run.log_interval:,}")
    warmup = _warmup_steps(schedule, config)
    if step < end <= warmup:
        warnings.append(
            f"the run stops at step {end:,}, {'before' if end < warmup else 'at'} the end of its"
            f" warm-up of {warmup:,} steps"
        )
    return warnings


def _is_never_due(interval: int, step: int, end: int) -> bool:
    """Whether no multiple of `interval` lies strictly between `step` and `end`."""
    return end - step > 1 and step // interval == (end - 1) // interval


def _warmup_steps(schedule: Schedule, config: dict[str, Any]) -> int:
    """Warm-up steps of the schedule, or of DeepSpeed's scheduler."""
    scheduler = config.get("scheduler")
    if not scheduler or not scheduler.get("type"):
        return schedule.warmup_steps
    params = scheduler.get("params", {})
    if scheduler["type"] == "OneCycle":
        return int(params.get("cycle_first_step_size", FIRST_OF_ONE_CYCLE))
    return int(params.get("warmup_num_steps", 0))


def _series(items: Sequence[str]) -> list[str]:
    """Add a semicolon to all items but the last."""
    return [*(f"{item};" for item in items[:-1]), *items[-1:]]


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _model(context: RunContext, prepared: Prepared) -> list[str]:
    run, vocabulary = context.run, context.engine.model.config.vocab_size
    unused = vocabulary - run.vocab_size + prepared.tokenizer.unused
    name = f"{shorten(run.model, 40)}, " if run.model and not run.hugging_face else ""
    size = f"{name}{context.engine.parameters:,} parameters"
    some = f" ({unused:,} of it unused)" if unused else ""
    return [size, f"vocabulary {vocabulary:,}{some}", *scaling_text(run)]


def _data(context: RunContext, prepared: Prepared) -> list[str]:
    run, rejected = context.run, prepared.manifest["rejected"]
    first, *others = map(named, run.data_path)
    more = f" and {len(others)} more" if others else ""
    items = [
        f"{shorten(first, COLUMNS - LABEL - len(more) - 1)}{more}",
        f"{len(prepared.train):,} tokens in {_count(context.batches.order.n_rows, 'row')} of"
        f" {run.max_seq_len + 1}",
        f"{len(context.held_out.rows):,} held out for validation",
    ]
    if rejected["count"]:
        bad = _count(rejected["count"], "bad document")
        items.append(f"{bad} skipped ({where_listed(rejected)})")
    return items


def _step(context: RunContext) -> str:
    run, world_size, of = context.run, context.engine.world_size, context.engine.parallel.group_size
    names = ("process", "processes") if of == 1 else (f"group of {of}", f"groups of {of}")
    factors = (
        _count(run.micro_batch_rows(world_size), "row"),
        _count(run.accumulation_steps, "micro-batch", "micro-batches"),
        _count(world_size // of, *names),
    )
    rows, tokens = context.batches.order.rows_per_step, context.batches.tokens_per_step
    return f"{' x '.join(factors)} = {rows:,} rows, {tokens:,} tokens"


def _length(context: RunContext, state: TrainState) -> list[str]:
    order, total = context.batches.order, context.schedule.total_steps
    tokens = state.tokens + (total - state.step) * context.batches.tokens_per_step
    epoch = f"{_count(order.steps_per_epoch, 'step')} an epoch"
    return [f"{_count(total, 'step')}, {tokens:,} tokens", epoch]


def _rate(context: RunContext) -> str:
    schedule, scheduler = context.schedule, context.engine.resolved.scheduler
    if scheduler:
        return f"DeepSpeed's {scheduler}, as its file says"
    if not context.run.muon:
        return f"{schedule}"
    dtype = str(iteration_dtype(context.engine.device)).removeprefix("torch.")
    return f"{schedule}, of Muon {context.run.muon['muon_lr']:g} (iterated in {dtype})"


def _backend(context: RunContext) -> list[str]:
    run, engine = context.run, context.engine
    resolved, zero = engine.resolved, ""
    if resolved.config:
        source = short_source(resolved.sources["zero_optimization.stage"])
        zero = f", ZeRO stage {resolved.zero_stage} ({source})"
    where = f"on {engine.world_size} x {engine.device.type}"
    items = [f"{resolved.backend}{zero}, {run.dtype}, {where}"]
    items += ["compiled in the first step"] * (run.compile == "on")
    return [*items, *filter(None, [peak_text(run, engine.device)])]


def _cadence(run: RunConfig) -> str:
    by_clock = f" or {run.save_minutes:g} minutes" if run.save_minutes else ""
    return f"a checkpoint every {_count(run.save_interval, 'step')}{by_clock}"


def _start(run: RunConfig, resumed: Resumed) -> str:
    if not resumed.path:
        return "at step 0"
    path, out_dir = resumed.path, Path(run.out_dir)
    known = path.relative_to(out_dir) if path.is_relative_to(out_dir) else path
    return f"resuming at step {resumed.state.step} from {shorten(str(known), 60)} (verified)"
