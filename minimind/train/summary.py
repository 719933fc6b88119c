"""The log of a start: run_start, the first screen, and the tables of --dry_run and --verbose."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.utils import disp_len, disp_trim

from minimind.architecture.hf_models import rotary_dtype
from minimind.architecture.select import Architecture, scaling_text
from minimind.checkpoint.directory import TrainState
from minimind.checkpoint.identity import hardware, layout, source_commit, versions
from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.run_folder import recorded_flags
from minimind.config.deepspeed.backend_choice import Setup, dry_run_notices
from minimind.config.deepspeed.document import leaves
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.flags import AUTO, is_auto
from minimind.config.rules import needs_text
from minimind.config.run_config import FLAGS, RULED, RunConfig
from minimind.config.schedule import Schedule
from minimind.data.prepare.prepared import (
    Prepared,
    is_prepared,
    open_prepared,
    require_text,
    require_tokenizer,
)
from minimind.data.rows.order import Order
from minimind.data.shards.conversation_shards import ConversationShards
from minimind.data.shards.manifest import how_skipped, options_of, read_manifest, require_whole
from minimind.data.tokenizer.lossless import loss_lines
from minimind.engine.build import Engine
from minimind.engine.optimizers import iteration_dtype, mup_line
from minimind.recovery.token_balance import (
    ConversationBalance,
    StagedBalance,
    TokenBalance,
    conversation_balance,
    token_balance,
)
from minimind.report.formats import count
from minimind.report.verdict import Setting
from minimind.runtime.device import CUDA
from minimind.runtime.terminal import aligned
from minimind.runtime.urls import is_url, masked, masked_values, named
from minimind.train.auto_values import with_auto_values
from minimind.train.build import (
    place_of,
    plan_data_and_schedule,
    plan_folder,
    plan_length,
    prepared_folder,
    run_budgets,
    text_names,
    with_derived_values,
    with_tokenizer,
)
from minimind.train.initial_weights import InitialModel
from minimind.train.loop import RunContext, log_rejected
from minimind.train.optional import require_traceable, traced_steps

# Flags that have their own line in the start summary, and flags that do not affect training.
SHOWN_ABOVE = ("model", "data_path", "out_dir", "save_interval", "save_minutes", "deepspeed_config")
NOT_TRAINING = ("config", "local_rank", "dry_run", "debug", "verbose")
# Keys of a DeepSpeed file whose value here is the default anyway.
DEFAULT_KEYS = {
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "optimizer.type": "AdamW",
    "optimizer.params.eps": 1e-8,
}
# Derived keys that inform nobody: a product of others, and one that is equal in every run.
UNINFORMATIVE = ("train_batch_size", "timers.throughput.synchronized")
PREFIXES = ("zero_optimization.", "optimizer.params.", "scheduler.params.")
MAX_WIDTH = 40  # columns of one value or source
COLUMNS = 100  # of a line
LABEL = 9  # columns of the label before the text


def flags_table(run: RunConfig, names: Iterable[str] = FLAGS) -> str:
    """One line per flag that has a value, or gets one by the start: name, value, source."""
    flags = recorded_flags(run)
    by_start = {name: RULED[name] for name in run.open_flags}
    if run.has_open_accumulation:
        by_start["accumulation_steps"] = by_start["batch_size"]
    given = (name for name in names if flags[name] is not None or name in by_start)
    rows = [
        (name, AUTO, by_start[name])
        if name in by_start
        else (name, _text(flags[name]), run.sources[name])
        for name in given
    ]
    return aligned(rows, indent="  ", widest=MAX_WIDTH)


def resolved_table(resolved: ResolvedConfig) -> str:
    """Every flag and every key of the resolved DeepSpeed configuration: name, value, source."""
    flags = f"flags:\n{flags_table(resolved.run)}"
    return f"{flags}\n{deepspeed_table(resolved)}" if resolved.config else flags


def deepspeed_table(resolved: ResolvedConfig) -> str:
    """Every key of the resolved DeepSpeed configuration: name, value, source."""
    return f"resolved DeepSpeed configuration:\n{resolved.table()}"


def non_default_settings(resolved: ResolvedConfig) -> dict[str, list[str]]:
    """Settings that are not default, as pieces for `labelled_lines`, by label."""
    groups: dict[str, dict[str, list[str]]]  # label: source: settings
    groups = {"auto": {}, "files": {}, "flags": {}, "preset": {}, "derived": {}}
    for name in FLAGS:
        value, source = masked_values(getattr(resolved.run, name)), resolved.run.sources[name]
        if label := _label_of_flag(resolved, name, value, source):
            shown_source = source.removeprefix("derived: ").removeprefix("auto: ")
            shown_source = "" if label == "flags" else shown_source
            text = ("on" if value else "off") if isinstance(value, bool) else _text(value)
            setting = f"{name} {shorten(text, MAX_WIDTH)}"
            groups[label].setdefault(shown_source, []).append(setting)
    for key, value in leaves(masked_values(resolved.config)).items():
        source = resolved.sources[key]
        if label := _label_of_key(resolved, key, value, source):
            name, shown_source = key, source
            if label == "derived":
                prefixes = (prefix for prefix in PREFIXES if key.startswith(prefix))
                name, shown_source = key.removeprefix(next(prefixes, "")), ""
            setting = f"{name} {shorten(json.dumps(value), MAX_WIDTH)}"
            groups[label].setdefault(shown_source, []).append(setting)
    return {label: _pieces(by_source) for label, by_source in groups.items() if by_source}


def _label_of_flag(resolved: ResolvedConfig, name: str, value: Any, source: str) -> str:
    """Return the label of a flag; empty if it is not shown."""
    if value is None or source == "default" or name in (*SHOWN_ABOVE, *NOT_TRAINING):
        return ""
    # Else shown as a key of the DeepSpeed file, which a block of type Muon does not reach.
    if source.startswith(f"{resolved.path}: ") and not (
        resolved.run.muon and "optimizer" in source
    ):
        return ""
    is_typed = source == f"--{name}" or source.startswith("train(")
    is_preset = source == f"model {resolved.run.model}"
    is_given = is_typed or is_preset or source.startswith("--config ")
    if is_given and value == FLAGS[name].default and name not in RULED:
        return ""
    if is_typed:
        return "flags"
    if is_preset:
        return "preset"
    if is_auto(source):
        return "auto"
    return "derived" if source.startswith("derived: ") else "files"


def _label_of_key(resolved: ResolvedConfig, key: str, value: Any, source: str) -> str:
    """Return the label of a key of the DeepSpeed configuration; empty if it is not shown."""
    is_stage_3 = key.rsplit(".", 1)[-1].startswith("stage3_")
    if is_stage_3 and resolved.zero_stage != 3:
        return ""
    if source.startswith("derived: "):
        return "" if key in UNINFORMATIVE else "derived"
    is_default = source.split(" ")[0] in FLAGS or source.endswith("default")
    if is_default or key == "zero_optimization.stage" or DEFAULT_KEYS.get(key) == value:
        return ""
    return "files"


def _pieces(by_source: dict[str, list[str]]) -> list[str]:
    """`a 1,`, `b 2 (source);` ...: pieces that are not broken over lines."""
    pieces: list[str] = []
    for source, settings in by_source.items():
        suffix = f" ({short_source(source)})" if source else ""
        pieces += [f"{setting}," for setting in settings[:-1]]
        pieces.append(f"{settings[-1]}{suffix};")
    pieces[-1] = pieces[-1].removesuffix(";")
    return pieces


def short_source(source: str) -> str:
    """Return a source with paths relative to the current directory, shortened."""
    return shorten(source.replace(f"{Path.cwd()}{os.sep}", ""), MAX_WIDTH)


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, with its middle replaced by `...`."""
    if disp_len(text) <= width:
        return text
    head = disp_trim(text, (width - 3) // 2)
    tail = disp_trim(text[::-1], width - 3 - disp_len(head))[::-1]
    return f"{head}...{tail}"


def labelled_lines(label: str, pieces: Iterable[str]) -> list[str]:
    """Wrap `pieces` behind a label into lines of at most `COLUMNS` columns.

    Lines break between pieces; a piece longer than a line breaks between words.
    """
    width, lines = COLUMNS - LABEL, [""]
    for piece in pieces:
        for part in [piece] if disp_len(piece) <= width else piece.split(" "):
            part = shorten(part, width)
            longer = f"{lines[-1]} {part}".lstrip()
            if disp_len(longer) > width:
                lines.append(part)
            else:
                lines[-1] = longer
    return [f"{'' if number else label:<{LABEL}}{line}" for number, line in enumerate(lines)]


@dataclass(frozen=True)
class Planned:
    """A run as its start decides it, as far as that is known without reading tokens.

    Flags that raw text decides are open.
    """

    setup: Setup
    resolved: ResolvedConfig
    run: RunConfig  # with what the prepared text and the rules decide
    manifest: dict[str, Any] | None  # of the prepared text
    order: Order | None  # None where the rows are not known, and with --stages


def plan_run(setup: Setup, resolved: ResolvedConfig, model: Architecture) -> Planned:
    """Decide what the manifest of a prepared folder decides; raise what the start would raise."""
    manifest, derived = None, {}
    if folder := prepared_folder(resolved.run):
        manifest = read_manifest(folder)
        _require_usable(folder, manifest, resolved.run.tokenizer)
        derived = {"vocab_size": manifest["vocab_size"], **options_of(manifest)}

    def known(run: RunConfig) -> RunConfig:
        return with_derived_values(with_tokenizer(run), place_of(run), derived)

    run = known(resolved.run)
    if run.open_flags:
        setup = replace(
            setup, run=with_auto_values(setup, run, resolved.optimizer, manifest, model)
        )
        resolved = setup.resolve()
        run = known(resolved.run)
    order = None if manifest is None else plan_folder(run, setup.launch.world_size, manifest)
    return Planned(setup, resolved, run, manifest, order)


def dry_run_text(planned: Planned, model: Architecture) -> str:
    """Return the settings and the estimated cost of the run; raise what its start would raise."""
    setup, resolved, run = planned.setup, planned.resolved, planned.run
    world_size, manifest, tables = setup.launch.world_size, planned.manifest, []
    tables.append(f"flags:\n{flags_table(run)}")
    if manifest is not None:
        row_tokens = run.max_seq_len + 1
        lines = [f"data: {' '.join(text_names(run))}"]
        for split, part in manifest["splits"].items():
            lines.append(
                f"{split:<6} {part['tokens']:>14,} tokens, {part['documents']:,} documents, about"
                f" {part['tokens'] // row_tokens:,} rows of {row_tokens}"
            )
        tables.append("\n".join(lines))
    if urls := [path for path in run.data_path if is_url(path)]:
        tables.append(f"data: what {' '.join(map(masked, urls))} holds is looked at by the start")
    if resolved.config:
        tables.append(deepspeed_table(resolved))
    if run.stages:
        tables.append(stages_text(run, world_size, model))
    elif length := length_text(planned, model):
        tables.append(length)
    from minimind.architecture.plan import plan_text

    costs = model.costs(run) or plan_text(run, world_size, resolved.config, device=setup.device)
    notices = [*filter(None, [mup_line(resolved.run)]), *dry_run_notices(setup, resolved)]
    if "batch_size" in run.open_flags:
        notices.append(
            f"auto: the text decides {', '.join(run.open_flags)}; what follows is for"
            f" --batch_size {run.batch_size}"
        )
    return "\n\n".join([*tables, *notices, costs])


def length_text(planned: Planned, model: Architecture) -> str:
    """Return the steps, tokens and learning rate of the run; empty if raw text decides them.

    Raise UsageError if the limits, warm-up, decay or --trace_steps of the run do not fit.
    """
    run, order, world_size = planned.run, planned.order, planned.setup.launch.world_size
    if order is None and needs_text(replace(run, epochs=None)):
        return ""
    schedule = plan_length(run, world_size, model, order)
    steps, tokens = schedule.total_steps, run.rows_per_step(world_size) * run.max_seq_len
    require_traceable(run, steps)
    lines = [f"length: {steps:,} steps of {tokens:,} tokens, {steps * tokens:,} tokens"]
    if order is not None:
        lines.append(f"{count(order.steps_per_epoch, 'step')} an epoch")
    elif run.epochs is not None:
        lines.append(f"or {run.epochs} passes over the text, if they are fewer steps")
    budgets = run_budgets(run, tokens, model)
    lines += [f"{name} = {getattr(run, name):g} is {n:,} steps" for name, n in budgets.items()]
    if planned.resolved.scheduler is None:  # else it is DeepSpeed's
        lines.append(f"rate: {schedule}")
    return "\n  ".join(lines)


def stages_text(run: RunConfig, world_size: int, model: Architecture) -> str:
    """Return what the stages read; the epochs if the text is prepared."""
    from minimind.config.stages import plan_stages, stage_text

    if folder := prepared_folder(run):
        prepared = open_prepared(folder, run.tokenizer)
        order, schedule = plan_data_and_schedule(run, prepared, world_size, model)
        table = stages_read(run, order, prepared)
    else:
        _, stages, schedule = plan_stages(run, world_size, run_budgets(run, 1, model))
        table = [stage.facts() for stage in stages]
    require_traceable(run, schedule.total_steps)
    return "\n  ".join(["stages:", *map(stage_text, table), f"rate: {schedule}"])


def _require_usable(folder: Path, manifest: dict[str, Any], tokenizer: str | None) -> None:
    """Raise DataError for a cut shard, conversations, or a `tokenizer` that is not the folder's."""
    for split in manifest["splits"].values():
        require_whole(folder, split["shards"])
    require_text(folder, manifest)
    require_tokenizer(folder, manifest, tokenizer)


def setting_of(engine: Engine, schedule: Schedule) -> Setting:
    """The layout and the flags that the verdict of --profile depends on."""
    resolved = engine.resolved
    facts = {
        "world_size": engine.world_size,
        "zero_stage": resolved.zero_stage,
        "device": engine.device.type,
        "total_steps": schedule.total_steps,
        "zero_update": engine.zero_update,
        "kernels": kernels_of(engine) if resolved.run.profile else 0,
    }
    return Setting.read({**vars(resolved.run), **leaves(resolved.config), **facts})


def kernels_of(engine: Engine) -> int:
    """About as many kernels as the host launches in a step; 0 where they are not counted."""
    from minimind.architecture.costs import ZERO_LAUNCHES, step_launches
    from minimind.architecture.plan import layout_of
    from minimind.architecture.shape import shape_of

    resolved, run = engine.resolved, engine.resolved.run
    is_counted = run.hugging_face is None and run.optimizer == "adamw"
    if not is_counted or run.use_moe or run.gradient_checkpointing:
        return 0
    layout = layout_of(run, engine.world_size, resolved.config, engine.device.type)
    kernels = step_launches(shape_of(run), layout)
    if engine.zero_update.startswith("by DeepSpeed"):
        weights = sum(p.requires_grad for p in engine.model.parameters())
        kernels += ZERO_LAUNCHES[resolved.zero_stage or 0] * weights
    return kernels


def peak_of(run: RunConfig, device: torch.device) -> tuple[float, str] | None:
    """Return the peak of one device in TFLOP/s and its source; None if unknown."""
    if run.peak_tflops is not None:
        return run.peak_tflops, run.sources["peak_tflops"]
    if device.type != CUDA.name or run.dtype == "float32":
        return None
    from minimind.architecture.costs import known_gpu

    gpu = known_gpu(CUDA.model_of(device))
    return gpu and (gpu.peak_tflops, f"NVIDIA's data sheet, {gpu.name}, dense bf16")


def mfu_per_speed(
    run: RunConfig, model: Architecture, device: torch.device, world_size: int, order: Order
) -> dict[str, float]:
    """Return the factor from tokens/s of all ranks to MFU, by name of the stage, "" without stages.

    Empty if the peak is unknown.
    """
    if (peak := peak_of(run, device)) is None:
        return {}
    runs = order.stage_runs or {"": run}
    return {
        name: model.flops_per_token(own) / (world_size * peak[0] * 1e12)
        for name, own in runs.items()
    }


def peak_text(run: RunConfig, device: torch.device) -> str:
    """The peak as the start summary shows it; empty if unknown."""
    peak = peak_of(run, device)
    return "" if peak is None else f"MFU of {peak[0]:g} TFLOP/s ({peak[1]})"


MAX_LINES = 20  # of the summary, warnings and notes aside
MIN_SETTINGS = 3  # lines of settings that are shown in any case
SHARDING = ("world_size", "zero_stage")
Balance = TokenBalance | ConversationBalance | StagedBalance
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
    log_rejected(logger, resumed.rejected)
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


def logged_order(
    order: Order, row_tokens: int, prepared: Prepared, stages: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Fields of a run_start from which `recovery.step_rows` knows the rows of its steps."""
    directory = str(prepared.directory.absolute())
    url = named(directory)
    return {
        "order": {
            **{"rows": order.n_rows, "rows_per_step": order.rows_per_step, "seed": order.seed},
            **{"row_tokens": row_tokens, "origin": order.start_json()},
            "mixture": order.mixture_json(),
            **({"stages": stages} if stages else {}),
        },
        "data": {
            "directory": directory,
            **({} if url == directory else {"url": url}),
            "fingerprint": prepared.manifest["fingerprint"],
            "renamed": {old: new for old, new in prepared.names.items() if old != new},
        },
    }


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
        zero_update=engine.zero_update or None,
        hardware=hardware(engine.device),
        peak_tflops=peak[0] if peak else None,
        peak_source=peak[1] if peak else None,
        parameters=engine.parameters,
        tokens_per_step=context.batches.of(resumed.state.step).tokens_per_step,
        rows_per_epoch=order.rows_per_epoch,
        **_logged_rows(context, prepared),
        total_steps=context.schedule.total_steps,
        versions=versions(),
        commit=source_commit(),
        rotary=engine.gather(rotary_dtype(engine.model)),
    )


def _logged_rows(context: RunContext, prepared: Prepared) -> dict[str, Any]:
    """The row order of a run, and what its stages read, where there are some."""
    run, order, row_tokens = context.run, context.batches.order, context.run.max_seq_len + 1
    if not run.stages:
        return logged_order(order, row_tokens, prepared)
    from minimind.data.rows.stages import StagedOrder, orders_json

    assert isinstance(order, StagedOrder)
    orders = orders_json(order, context.engine.parallel.data_size, run.accumulation_steps)
    return {
        **logged_order(order, row_tokens, prepared, orders),
        "stages": stages_read(context.run, context.batches.order, prepared),
    }


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
        *_steps(context, balance),
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
    is_folder = is_prepared(context.run.data_path[0])
    is_validated = context.run.eval_rows != 0 and (context.run.val_fraction or context.run.val_path)
    if is_validated and not len(context.held_out.rows):
        documents = sum(source["documents"] for source in prepared.manifest["sources"])
        way_out = "raise --val_fraction, or give --val_path or more documents (a .txt file is one)"
        if is_folder:
            way_out = "prepare it with a larger --val_fraction, or a --val_path"
        notes.append(
            f"warning  no row of {documents:,} documents is held out, so the run is not validated;"
            f" {way_out}"
        )
    if not prepared.train.has_sums:
        notes.append(
            f"note     {prepared.directory} has no sums of blocks: damage that leaves a file its"
            " time is not seen; prepare the text again to have them"
        )
    if not is_folder:
        from minimind.data.text.inputs import left_out_of

        notes += left_out_of(context.run.data_path, context.run.val_path)
    notes += (f"warning  {remark}" for remark in prepared.remarks)
    if ignored := prepared.manifest.get("ignored"):
        notes.append(f"ignored beside the turns: {', '.join(ignored)}")
    return notes


def balance_of(context: RunContext, prepared: Prepared) -> Balance:
    """Where the tokens of the text go."""
    row_tokens, train = context.run.max_seq_len + 1, prepared.train
    if isinstance(train, ConversationShards):
        return conversation_balance(prepared, train, row_tokens)
    if table := stages_read(context.run, context.batches.order, prepared):
        trained = sum(stage["tokens"] for stage in table)
        held_out = len(prepared.val)
        return StagedBalance(len(train) + held_out, held_out, trained, tuple(table))
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


def _model(context: RunContext, prepared: Prepared) -> list[str]:
    run, vocabulary = context.run, context.engine.model.config.vocab_size
    unused = vocabulary - run.vocab_size + prepared.tokenizer.unused
    name = f"{shorten(run.model, 40)}, " if run.model and not run.hugging_face else ""
    size = f"{name}{context.engine.parameters:,} parameters"
    some = f" ({unused:,} of it unused)" if unused else ""
    return [size, f"vocabulary {vocabulary:,}{some}", *scaling_text(run)]


def _data(context: RunContext, prepared: Prepared) -> list[str]:
    run, rejected = context.run, prepared.manifest["rejected"]
    first, *others = text_names(run)
    more = f" and {len(others)} more" if others else ""
    held_out = context.held_out
    number = f"{len(held_out.rows):,}"
    if held_out.may_grow:
        number = f"{held_out.reads:,} to {number}"
    if len(held_out.rows) < held_out.total:
        number = f"{number} of the {held_out.total:,}"
    items = [
        f"{shorten(first, COLUMNS - LABEL - len(more) - 1)}{more}",
        f"{len(prepared.train):,} tokens in {count(context.batches.order.n_rows, 'row')} of"
        f" {run.max_seq_len + 1}",
        f"{number} held out for validation",
    ]
    if rejected["count"]:
        bad = count(rejected["count"], "bad document")
        items.append(f"{bad} {how_skipped(rejected)}")
    return items


def _steps(context: RunContext, balance: Balance) -> list[str]:
    """The lines of a step, or of each stage with the epochs that it reads of its sources."""
    if not isinstance(balance, StagedBalance):
        return labelled_lines("step", [_step(context)])
    from minimind.config.stages import stage_text

    return labelled_lines("stages", _series(list(map(stage_text, balance.stages))))


def stages_read(run: RunConfig, order: Order, prepared: Prepared) -> list[dict[str, Any]]:
    """What the stages of a run read; empty without --stages."""
    if not run.stages:
        return []
    from minimind.data.rows.stages import StagedOrder, stages_table

    assert isinstance(order, StagedOrder)
    return stages_table(order, [source["name"] for source in prepared.manifest["sources"]])


def _step(context: RunContext) -> str:
    run, world_size, of = context.run, context.engine.world_size, context.engine.parallel.group_size
    names = ("process", "processes") if of == 1 else (f"group of {of}", f"groups of {of}")
    factors = (
        count(run.micro_batch_rows(world_size), "row"),
        count(run.accumulation_steps, "micro-batch", "micro-batches"),
        count(world_size // of, *names),
    )
    rows, tokens = context.batches.order.rows_per_step, context.batches.tokens_per_step
    return f"{' x '.join(factors)} = {rows:,} rows, {tokens:,} tokens"


def _length(context: RunContext, state: TrainState) -> list[str]:
    order, total = context.batches.order, context.schedule.total_steps
    if context.run.stages:
        return [count(total, "step")]
    tokens = state.tokens + (total - state.step) * context.batches.tokens_per_step
    epoch = f"{count(order.steps_per_epoch, 'step')} an epoch"
    return [f"{count(total, 'step')}, {tokens:,} tokens", epoch]


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
    items += [f"update {engine.zero_update}"] * bool(engine.zero_update)
    items += ["compiled in the first step"] * (run.compile == "on")
    return [*items, *filter(None, [peak_text(run, engine.device)])]


def _cadence(run: RunConfig) -> str:
    by_clock = f" or {run.save_minutes:g} minutes" if run.save_minutes else ""
    return f"a checkpoint every {count(run.save_interval, 'step')}{by_clock}"


def _start(run: RunConfig, resumed: Resumed) -> str:
    if not resumed.path:
        return "at step 0"
    path, out_dir = resumed.path, Path(run.out_dir)
    known = path.relative_to(out_dir) if path.is_relative_to(out_dir) else path
    return f"resuming at step {resumed.state.step} from {shorten(str(known), 60)} (verified)"
