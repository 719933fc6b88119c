"""The start of a run: the `run_start` event, and the first screen, which shows that record."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minimind.architecture.hf_models import rotary_dtype
from minimind.architecture.select import scaling_text
from minimind.architecture.shape import trained_parameters
from minimind.checkpoint.identity import hardware, layout, source_commit, versions
from minimind.checkpoint.resume import Resumed, log_rejected
from minimind.checkpoint.retention import kept_unknown
from minimind.checkpoint.run_folder import recorded_flags
from minimind.config.deepspeed.document import leaves
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.deepspeed.rules import ignored_flags
from minimind.config.flags import AUTO, EPOCH, FLAGS, RULED
from minimind.config.origin import Rank
from minimind.config.rules import held_out_of
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.order import Order
from minimind.data.shards.conversation_shards import ConversationShards
from minimind.data.shards.manifest import how_skipped
from minimind.data.tokenizer.lossless import loss_lines
from minimind.engine.optimizers import iteration_dtype, mup_line
from minimind.recovery.token_balance import (
    conversation_balance,
    sentence,
    staged_balance,
    token_balance,
)
from minimind.report.formats import count
from minimind.runtime.terminal import aligned, folded, screen_columns
from minimind.runtime.urls import masked_values, named
from minimind.train.loop import RunContext
from minimind.train.speed import peak_of
from minimind.train.start import traced_steps

COLUMNS = 100  # of a line, unless the terminal is narrower
LABEL = 9  # columns of the label before the text
# Flags that have their own line on the first screen, and flags that do not affect training.
SHOWN_ABOVE = ("model", "data_path", "out_dir", "save_interval", "save_minutes", "deepspeed_config")
NOT_TRAINING = ("config", "local_rank", "dry_run", "debug", "verbose")
# Keys of a DeepSpeed file whose value here is the default anyway.
DEFAULT_KEYS = {
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "optimizer.type": "AdamW",
    "optimizer.params.eps": 1e-8,
}
# Derived keys that are not worth a line: a product of others, and one that is equal in every run.
UNINFORMATIVE = ("train_batch_size", "timers.throughput.synchronized")
SHARDING = ("world_size", "zero_stage")
FIRST_OF_ONE_CYCLE = 2000  # steps; DeepSpeed's default


def log_run_start(context: RunContext, resumed: Resumed, notes: Sequence[str]) -> None:
    """Log the run's start and print the first screen; raise StorageError if no checkpoint fits.

    `notes` are further texts, with or without a label.
    """
    run, logger, plan = context.run, context.logger, context.plan
    log_rejected(logger, resumed.rejected)
    if context.engine.rank == 0:
        for line in kept_unknown(context.saver.root, context.saver.rules):
            logger.print(line)
    step, total = resumed.state.step, context.schedule.total_steps
    capacity = context.saver.require_capacity(total) if step < total else "no step is left"
    facts = log_start_event(context, resumed)
    balance = balance_of(context)
    logger.event("token_balance", step=step, **balance)
    _log_changes(context, resumed, layout(run, context.engine))
    initial = plan.initial
    loss = context.engine.distillation.name if context.engine.distillation else run.own_loss
    loss = f"loss     {loss}; validation: cross-entropy" if loss else ""
    own = (plan.model.start_summary_line(), initial.line(), initial.template_line, loss)
    notes = [*filter(None, own), *data_notes(context), *notes]
    if (traced := traced_steps(run)) and traced[1] <= step:
        notes.append(f"trace    none: --trace_steps {run.trace_steps} is before step {step}")
    notes += cadence_warnings(run, context.schedule, plan.resolved.config, step)
    logger.print(first_screen(facts, plan.resolved, sentence(balance), capacity, notes))


def log_start_event(context: RunContext, resumed: Resumed) -> dict[str, Any]:
    """Log `run_start`, at the start and after going back to a checkpoint; return its fields."""
    run, engine, order = context.run, context.engine, context.batches.order
    prepared, vocabulary = context.prepared, context.engine.model.config.vocab_size
    peak = peak_of(run, engine.device)
    held_out, state, total = context.held_out, resumed.state, context.schedule.total_steps
    tokens_per_step = context.batches.of(state.step).tokens_per_step
    tokens_left = order.tokens_of(range(state.step, total), run.max_seq_len)
    facts = {
        "step": state.step,
        "resume_from": str(resumed.path) if resumed.path else None,
        "init_from": context.init_from,
        "identity": context.identity,
        **layout(run, engine),
        "group_size": engine.parallel.group_size,
        "dtype": run.dtype,
        "device": engine.device.type,
        "zero_update": engine.zero_update or None,
        "hardware": hardware(engine.device),
        "peak_tflops": peak[0] if peak else None,
        "peak_source": peak[1] if peak else None,
        "parameters": engine.parameters,
        "trained": trained_parameters(run, context.plan.model.sizes(run)) if run.freeze else None,
        "vocabulary": vocabulary,
        "unused_ids": vocabulary - run.vocab_size + prepared.tokenizer.unused,
        "text": [*context.plan.text.names],
        "text_tokens": len(prepared.train),
        "held_out_rows": len(held_out.rows),
        "held_out_rows_read": held_out.reads if held_out.may_grow else len(held_out.rows),
        "held_out_rows_of_text": held_out.total,
        "skipped": prepared.manifest["rejected"],
        "tokens_per_step": tokens_per_step,
        "tokens_at_end": state.tokens + tokens_left,
        "rows_per_epoch": order.rows_per_epoch,
        **_logged_rows(context),
        "total_steps": total,
        "steps_per_epoch": order.steps_per_epoch,
        "rate": _rate(context),
        "versions": versions(),
        "commit": source_commit(),
        "rotary": engine.gather(rotary_dtype(engine.model)),
    }
    context.logger.event("run_start", **facts)
    return facts


def first_screen(
    facts: Mapping[str, Any],
    resolved: ResolvedConfig,
    balance: str,
    capacity: str,
    notes: Sequence[str],
) -> str:
    """Return the lines before the first step: the run_start event, and the settings.

    `balance` states where the tokens of the text go, `capacity` how many checkpoints fit.
    """
    run = resolved.run
    lines = [
        *_labelled("model", _model(facts, run)),
        *_labelled("data", _data(facts)),
        *_labelled("tokens", balance),
        *_steps(facts),
        *_labelled("rate", facts["rate"]),
        *_labelled("backend", _backend(facts, resolved)),
        *_labelled("output", f"{run.out_dir}; {_cadence(run)}; {capacity}"),
    ]
    tables = settings_tables(resolved) if run.verbose else [changed_settings(resolved)]
    if not run.verbose:
        lines += _labelled(
            "settings",
            "that differ from the defaults; for all see --verbose, or config.yaml in out_dir",
        )
    lines += tables
    for note in filter(None, (mup_line(run), *notes)):
        label, gap, text = note.partition("  ")  # as in `weights  from a/b`
        lines += _labelled(label, text.strip()) if gap else _labelled("note", note)
    return "\n".join([*lines, *_labelled("start", _start(facts, Path(run.out_dir)))])


def _labelled(label: str, text: str) -> list[str]:
    return folded(f"{label:<{LABEL}}{text}", LABEL, screen_columns(COLUMNS))


def settings_tables(resolved: ResolvedConfig) -> list[str]:
    """Return every flag with a value, and every key for DeepSpeed: name, value, source."""
    flags = f"flags:\n{aligned(flag_rows(resolved), indent='  ')}"
    if not resolved.config:
        return [flags]
    return [flags, f"resolved DeepSpeed configuration:\n{resolved.table()}"]


def flag_rows(resolved: ResolvedConfig) -> list[tuple[str, str, str]]:
    """Name, value and source of every flag that has a value, or gets one by the start.

    A flag that the file's scheduler replaces has no value, nor --data_path with other text.
    """
    run, values = resolved.run, recorded_flags(resolved.run)
    replaced = {
        name: f"by the scheduler of {resolved.path}" for _, name in ignored_flags(resolved.config)
    }
    if run.source or run.stages:
        replaced["data_path"] = "by --source" if run.source else "by --stages"
    by_start = {name: RULED[name] for name in run.open_flags}
    if run.has_open_accumulation:
        by_start["accumulation_steps"] = by_start["batch_size"]
    rows = []
    for name in FLAGS:
        if name in replaced:
            rows.append((name, "-", replaced[name]))
        elif name in by_start:
            rows.append((name, AUTO, by_start[name]))
        elif name in run.per_epoch:
            rows.append((name, EPOCH, run.sources[name]))
        elif values[name] is not None:
            value = values[name]
            shown = " ".join(value) if isinstance(value, tuple) else str(value)
            rows.append((name, shown, run.sources[name]))
    return rows


def changed_settings(resolved: ResolvedConfig) -> str:
    """Return the settings that differ from the defaults and have no line of their own."""
    run, hidden = resolved.run, (*SHOWN_ABOVE, *NOT_TRAINING)
    rows = [
        (name, value, source)
        for name, value, source in flag_rows(resolved)
        if name not in hidden and _is_changed(run, name)
    ]
    for key, value in leaves(masked_values(resolved.config)).items():
        if _is_shown(resolved, key, value):
            rows.append((key, json.dumps(value), resolved.sources[key]))
    here = f"{Path.cwd()}{os.sep}"
    cells = [
        (name, value.replace("\n", r"\n"), source.replace(here, "").replace("\n", r"\n"))
        for name, value, source in rows
    ]
    return aligned(cells, indent="  ", columns=screen_columns(COLUMNS)) if cells else ""


def _is_changed(run: RunConfig, name: str) -> bool:
    """Whether a flag has another value than its default, or a rule decided it."""
    rank = run.sources[name].rank
    if rank is Rank.DEFAULT:
        return False
    return name in RULED or rank is Rank.RULE or getattr(run, name) != FLAGS[name].default


def _is_shown(resolved: ResolvedConfig, key: str, value: Any) -> bool:
    """Whether a key of the DeepSpeed configuration differs from its default and from a flag."""
    if key.rpartition(".")[2].startswith("stage3_") and resolved.zero_stage != 3:
        return False
    is_of_file = Rank.DEFAULT < resolved.sources[key].rank < Rank.FLAG
    is_known = key in (*UNINFORMATIVE, "zero_optimization.stage")
    return is_of_file and not is_known and DEFAULT_KEYS.get(key) != value


def logged_order(
    order: Order, row_tokens: int, prepared: Prepared, stages: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Fields of a run_start from which `recovery.step_rows` knows the rows of its steps."""
    directory = str(prepared.directory.absolute())
    url = named(directory)
    mixed = [
        {
            "name": part.source.name,
            "weight": part.source.weight,
            "directory": str(part.folder),
            "url": named(str(part.folder)),
        }
        for part in prepared.parts
    ]
    return {
        "order": {
            "rows": order.n_rows,
            "rows_per_step": order.rows_per_step,
            "seed": order.seed,
            "row_tokens": row_tokens,
            "origin": order.start_json(),
            "mixture": order.mixture_json(),
            **({"stages": stages} if stages else {}),
        },
        "data": {
            "directory": directory,
            **({} if url == directory else {"url": url}),
            "fingerprint": prepared.manifest["fingerprint"],
            "renamed": {old: new for old, new in prepared.names.items() if old != new},
            **({"sources": mixed} if mixed else {}),
        },
    }


def _logged_rows(context: RunContext) -> dict[str, Any]:
    """The row order of a run, and what its stages read, where there are some."""
    run, order, row_tokens = context.run, context.batches.order, context.run.max_seq_len + 1
    if not run.stages:
        return logged_order(order, row_tokens, context.prepared)
    from minimind.data.rows.stages import StagedOrder, orders_json

    assert isinstance(order, StagedOrder)
    orders = orders_json(order, context.engine.parallel.data_size, run.accumulation_steps)
    return {
        **logged_order(order, row_tokens, context.prepared, orders),
        "stages": _stages_read(context),
    }


def _stages_read(context: RunContext) -> list[dict[str, Any]]:
    """What the stages of a run read; empty without --stages."""
    if not context.run.stages:
        return []
    from minimind.data.rows.stages import StagedOrder, stages_table

    order = context.batches.order
    assert isinstance(order, StagedOrder)
    return stages_table(order, [source["name"] for source in context.prepared.manifest["sources"]])


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


def data_notes(context: RunContext) -> list[str]:
    """What of the text is not read, not validated, or lost by the tokenizer."""
    run, text, prepared = context.run, context.plan.text, context.prepared
    notes = [f"lossy    {line}" for line in loss_lines(prepared.manifest["sources"])]
    notes += _shorter_stages(context)
    if names := context.held_out.unvalidated:
        notes.append(
            f"warning  no row of {', '.join(names)} is held out: the validation loss covers only"
            " the other sources"
        )
    is_validated = run.eval_rows != 0 and (run.val_fraction or run.val_path)
    if is_validated and not len(context.held_out.rows):
        documents = sum(source["documents"] for source in prepared.manifest["sources"])
        tokens = sum(part["tokens"] for part in prepared.manifest["splits"].values())
        fraction = held_out_of(documents, tokens, run.max_seq_len + 1)
        way_out = "give --val_path, or more documents (a .txt file is one document)"
        if fraction > (run.val_fraction or 0):
            way_out = f"give --val_fraction {fraction:g}, or --val_path"
        if text.folder:
            way_out = "prepare it with a larger --val_fraction, or a --val_path"
        what = "the document" if documents == 1 else f"the {documents:,} documents"
        notes.append(f"warning  no validation: no row of {what} is held out; {way_out}")
    if text.folder is None:
        from minimind.data.text.inputs import left_out_of

        notes += left_out_of(text.paths, run.val_path)
    notes += (f"warning  {remark}" for remark in prepared.remarks)
    if ignored := prepared.manifest.get("ignored"):
        notes.append(f"ignored keys beside the turns: {', '.join(ignored)}")
    return notes


def _shorter_stages(context: RunContext) -> list[str]:
    """Warn of conversations that rows of --max_seq_len hold, but not those of a stage."""
    train, notes = context.prepared.train, []
    if not isinstance(train, ConversationShards):
        return notes
    names = [source["name"] for source in context.prepared.manifest["sources"]]
    for stage in _stages_read(context):
        row_tokens = stage["max_seq_len"] + 1
        too_long = dict(zip(names, train.too_long(row_tokens), strict=True))
        read = [source["name"] for source in stage["sources"]]
        number = sum(too_long[name] for name in read)
        if number and row_tokens <= context.run.max_seq_len:
            notes.append(
                f"warning  stage {stage['name']}: {count(number, 'conversation')} of"
                f" {', '.join(read)} cut or dropped, as longer than its rows of {row_tokens} tokens"
            )
    return notes


def balance_of(context: RunContext) -> dict[str, Any]:
    """Where the tokens of the text go."""
    prepared, row_tokens = context.prepared, context.run.max_seq_len + 1
    train = prepared.train
    if isinstance(train, ConversationShards):
        return conversation_balance(prepared, train, row_tokens, context.batches.order.mixture)
    if table := _stages_read(context):
        return staged_balance(prepared, table)
    return token_balance(prepared, context.batches.order, row_tokens)


def cadence_warnings(
    run: RunConfig, schedule: Schedule, config: dict[str, Any], step: int
) -> list[str]:
    """Warn that a run from `step` on ends without a save, a step line, or its peak rate."""
    end = schedule.total_steps
    if run.stop_at_step and run.stop_at_step > step:
        end = min(end, run.stop_at_step)
    if step >= end:
        return []
    warnings, last = [], f"step {end:,}, the last"
    if not run.save_minutes and _is_never_due(run.save_interval, step, end):
        warnings.append(
            f"warning  no checkpoint before {last}: --save_interval is {run.save_interval:,} and"
            " --save_minutes 0"
        )
    if _is_never_due(run.log_interval, step, end):
        warnings.append(
            f"warning  no step line before {last}: --log_interval is {run.log_interval:,}"
        )
    warmup = _warmup_steps(schedule, config)
    if step < end <= warmup:
        warnings.append(
            f"warning  the run stops at step {end:,}, {'before' if end < warmup else 'at'} the end"
            f" of its warm-up of {warmup:,} steps"
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


def _model(facts: Mapping[str, Any], run: RunConfig) -> str:
    name = f"{run.model}, " if run.model and not run.hugging_face else ""
    unused = f" ({facts['unused_ids']:,} of it unused)" if facts["unused_ids"] else ""
    vocabulary = f"vocabulary {facts['vocabulary']:,}{unused}"
    trained = "" if facts["trained"] is None else f", {facts['trained']:,} of them trained"
    parameters = f"{name}{facts['parameters']:,} parameters{trained}"
    return "; ".join([parameters, vocabulary, *scaling_text(run)])


def _data(facts: Mapping[str, Any]) -> str:
    first, *others = facts["text"]
    more = f" and {len(others)} more" if others else ""
    rows, read, every = (facts[f"held_out_rows{which}"] for which in ("", "_read", "_of_text"))
    held_out = f"{rows:,}" if read == rows else f"{read:,} to {rows:,}"
    if rows < every:
        held_out = f"{held_out} of the {every:,}"
    order = facts["order"]
    parts = [
        f"{first}{more}",
        f"{facts['text_tokens']:,} tokens in {count(order['rows'], 'row')} of"
        f" {order['row_tokens']}",
        f"{held_out} held out for validation",
    ]
    if skipped := facts["skipped"]["count"]:
        parts.append(f"{count(skipped, 'bad document')} {how_skipped(facts['skipped'])}")
    return "; ".join(parts)


def _steps(facts: Mapping[str, Any]) -> list[str]:
    """The lines of a step and of the length, or of each stage."""
    total = count(facts["total_steps"], "step")
    if "stages" in facts:
        from minimind.config.stages import stage_text

        stages = "; ".join(map(stage_text, facts["stages"]))
        return [*_labelled("stages", stages), *_labelled("length", total)]
    size = facts["group_size"]
    names = ("process", "processes") if size == 1 else (f"group of {size}", f"groups of {size}")
    factors = (
        count(facts["micro_batch_rows"], "row"),
        count(facts["accumulation_steps"], "micro-batch", "micro-batches"),
        count(facts["world_size"] // size, *names),
    )
    rows, tokens = facts["order"]["rows_per_step"], facts["tokens_per_step"]
    computed = facts["micro_batch_rows"] * facts["accumulation_steps"]
    padding = computed * (facts["world_size"] // size) - rows
    more = f" and {padding:,} of padding" if padding else ""
    step = f"{' x '.join(factors)} = {rows:,} rows{more}, {tokens:,} tokens"
    epoch = f"{count(facts['steps_per_epoch'], 'step')} an epoch"
    length = f"{total}, {facts['tokens_at_end']:,} tokens; {epoch}"
    return [*_labelled("step", step), *_labelled("length", length)]


def _rate(context: RunContext) -> str:
    scheduler = context.plan.resolved.scheduler
    if scheduler:
        return f"DeepSpeed's {scheduler}, as its file says"
    if not context.run.muon:
        return f"{context.schedule}"
    dtype = str(iteration_dtype(context.engine.device)).removeprefix("torch.")
    return f"{context.schedule}, of Muon {context.run.muon['muon_lr']:g} (iterated in {dtype})"


def _backend(facts: Mapping[str, Any], resolved: ResolvedConfig) -> str:
    zero = ""
    if resolved.config:
        source = resolved.sources["zero_optimization.stage"].replace(f"{Path.cwd()}{os.sep}", "")
        zero = f", ZeRO stage {facts['zero_stage']} ({source})"
    where = f"on {facts['world_size']} x {facts['device']}"
    parts = [f"{facts['backend']}{zero}, {facts['dtype']}, {where}"]
    if facts["zero_update"]:
        parts.append(f"update {facts['zero_update']}")
    if facts["compile"] == "on":
        parts.append("compiled in the first step")
    if facts["peak_tflops"]:
        parts.append(f"MFU of {facts['peak_tflops']:g} TFLOP/s ({facts['peak_source']})")
    return "; ".join(parts)


def _cadence(run: RunConfig) -> str:
    by_clock = f" or {run.save_minutes:g} minutes" if run.save_minutes else ""
    return f"a checkpoint every {count(run.save_interval, 'step')}{by_clock}"


def _start(facts: Mapping[str, Any], out_dir: Path) -> str:
    if facts["resume_from"] is None:
        return "at step 0"
    path = Path(facts["resume_from"])
    known = path.relative_to(out_dir) if path.is_relative_to(out_dir) else path
    return f"resuming at step {facts['step']} from {known} (verified)"
