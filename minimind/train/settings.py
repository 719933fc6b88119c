"""Tables of a run's values with their sources: all of them, and those that are not default."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm.utils import disp_len, disp_trim

from minimind.architecture.plan import plan_text
from minimind.architecture.select import Architecture
from minimind.checkpoint.run_folder import recorded_flags
from minimind.config.deepspeed.backend_choice import Setup, dry_run_notices
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.deepspeed.values import leaves
from minimind.config.run_config import FLAGS, RunConfig
from minimind.config.schedule import Schedule, plan_schedule
from minimind.data.prepare.work_units import Options
from minimind.data.shards.manifest import is_whole, read_manifest
from minimind.data.tokenizer.load import load_tokenizer
from minimind.engine.build import Engine
from minimind.engine.optimizers import mup_line
from minimind.errors import DataError
from minimind.runtime.urls import masked, masked_values
from minimind.storage.filesystem import is_url
from minimind.storage.object_cache import named
from minimind.telemetry.verdict import Setting
from minimind.train.build import (
    check_enough_rows,
    prepared_folder,
    run_budgets,
    with_derived_values,
    with_tokenizer,
)

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
    """One line per flag that has a value: name, value, source."""
    flags = recorded_flags(run)
    rows = [(name, _text(flags[name])) for name in names if flags[name] is not None]
    name_width, width = (max(len(row[n]) for row in rows) for n in (0, 1))
    width = min(width, MAX_WIDTH)
    return "\n".join(f"  {n:<{name_width}}  {v:<{width}}  {run.sources[n]}" for n, v in rows)


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
    groups = {"files": {}, "flags": {}, "preset": {}, "derived": {}}
    for name in FLAGS:
        value, source = masked_values(getattr(resolved.run, name)), resolved.run.sources[name]
        if label := _label_of_flag(resolved, name, value, source):
            shown_source = "" if label == "flags" else source.removeprefix("derived: ")
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
    if value == FLAGS[name].default and (is_typed or is_preset or source.startswith("--config ")):
        return ""
    if is_typed:
        return "flags"
    if is_preset:
        return "preset"
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


def dry_run_text(setup: Setup, resolved: ResolvedConfig, model: Architecture) -> str:
    """Return the settings and the estimated cost of the run; raise what its start would raise.

    Of a prepared folder the manifest and the sizes of the shards are read, no tokens.
    """
    run, world_size, tables = with_tokenizer(resolved.run), setup.launch.world_size, []
    if folder := prepared_folder(run):
        manifest = read_manifest(folder)
        _require_usable(folder, manifest, run.tokenizer)
        derived = {"vocab_size": manifest["vocab_size"], **Options(**manifest["options"]).to_json()}
        run = with_derived_values(run, f"--data_path {named(str(folder))}", derived)
        row_tokens, lines = run.max_seq_len + 1, [f"data: {named(str(folder))}"]
        for split, part in manifest["splits"].items():
            lines.append(
                f"{split:<6} {part['tokens']:>14,} tokens, {part['documents']:,} documents, about"
                f" {part['tokens'] // row_tokens:,} rows of {row_tokens}"
            )
        tables.append("\n".join(lines))
        tokens = manifest["splits"]["train"]["tokens"]
        # Several sources may have a few rows fewer.
        check_enough_rows(resolved.run, world_size, tokens, tokens // row_tokens)
    if urls := [path for path in run.data_path if is_url(path)]:
        tables.append(f"data: what {' '.join(map(masked, urls))} holds is looked at by the start")
    tables.insert(0, f"flags:\n{flags_table(run)}")
    if resolved.config:
        tables.append(deepspeed_table(resolved))
    if resolved.scheduler is None and (length := length_text(run, world_size, model)):
        tables.append(length)
    costs = model.costs(run) or plan_text(run, world_size, resolved.config, device=setup.device)
    notices = [*filter(None, [mup_line(resolved.run)]), *dry_run_notices(setup, resolved)]
    return "\n\n".join([*tables, *notices, costs])


def length_text(run: RunConfig, world_size: int, model: Architecture) -> str:
    """Return the steps, tokens and learning rate of the run; empty if its text decides them."""
    rows = run.rows_per_step(world_size)
    budgets = run_budgets(run, rows, model)
    if not budgets and run.max_steps is None:
        return ""
    schedule = plan_schedule(run, sys.maxsize, budgets)
    steps, tokens = schedule.total_steps, rows * run.max_seq_len
    lines = [
        f"length: {steps:,} steps of {tokens:,} tokens, {steps * tokens:,} tokens",
        *(f"{name} = {getattr(run, name):g} is {n:,} steps" for name, n in budgets.items()),
        f"rate: {schedule}",
    ]
    if run.epochs is not None:
        lines.insert(1, f"or {run.epochs} passes over the text, if they are fewer steps")
    return "\n  ".join(lines)


def _require_usable(folder: Path, manifest: dict[str, Any], tokenizer: str | None) -> None:
    """Raise DataError if a shard is cut or missing, or `tokenizer` is not the folder's."""
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            if not is_whole(folder, shard):
                raise DataError(
                    f"{folder / shard['name']}: is missing or cut; put it back, or prepare the"
                    " text again"
                )
    if tokenizer is not None and load_tokenizer(tokenizer).fingerprint != manifest["tokenizer"]:
        raise DataError(
            f"{tokenizer}: is not the tokenizer of {folder}; leave out"
            " --tokenizer, or prepare the text again with it"
        )


def setting_of(engine: Engine, schedule: Schedule) -> Setting:
    """The layout and the flags that the verdict of --profile depends on."""
    resolved = engine.resolved
    facts = {
        "world_size": engine.world_size,
        "zero_stage": resolved.zero_stage,
        "device": engine.device.type,
        "total_steps": schedule.total_steps,
    }
    return Setting.read({**vars(resolved.run), **leaves(resolved.config), **facts})
