"""The values of a run and their sources for people: the complete table, and what is not default."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm.utils import disp_len, disp_trim

from minimind.architecture.select import Architecture
from minimind.config.deepspeed.backend_choice import Setup, dropped_config_notice
from minimind.config.deepspeed.resolve import Resolved, leaves
from minimind.config.run_config import FLAGS, RunConfig
from minimind.data.loader.manifest import is_whole, read_manifest
from minimind.data.prepare.work_units import Options
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import DataError
from minimind.estimate.plan import plan_text
from minimind.train.build import prepared_folder, require_a_step, with_decided, with_tokenizer

# Flags that `opening` shows in lines of their own, and flags that say nothing about the training.
SHOWN_ABOVE = ("model", "data_path", "out_dir", "save_interval", "save_minutes", "deepspeed_config")
OF_THE_START = ("config", "local_rank", "dry_run", "debug", "verbose")
# Keys of a DeepSpeed file that say what happens without them as well.
ORDINARY = {
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "optimizer.type": "AdamW",
    "optimizer.params.eps": 1e-8,
}
# Keys that we fill with a product of others, and with the same value in every run.
NO_DECISION = ("train_batch_size", "timers.throughput.synchronized")
PREFIXES = ("zero_optimization.", "optimizer.params.", "scheduler.params.")
MOST = 40  # columns of one value or source

Groups = dict[str, list[str]]  # source: settings


def flags_table(run: RunConfig, names: Iterable[str] = FLAGS) -> str:
    """One line per flag that has a value: name, value, source."""
    values = {name: getattr(run, name) for name in names}
    rows = [(name, _text(value)) for name, value in values.items() if value is not None]
    wide, broad = (max(len(row[n]) for row in rows) for n in (0, 1))
    return "\n".join(f"  {n:<{wide}}  {v:<{min(broad, 40)}}  {run.sources[n]}" for n, v in rows)


def resolved_table(resolved: Resolved) -> str:
    """Every flag and every key that DeepSpeed is given: name, value, source."""
    flags = f"flags:\n{flags_table(resolved.run)}"
    return f"{flags}\n{deepspeed_table(resolved)}" if resolved.config else flags


def deepspeed_table(resolved: Resolved) -> str:
    """Every key that DeepSpeed is given: name, value, source."""
    return f"resolved DeepSpeed configuration:\n{resolved.table()}"


def differing(resolved: Resolved) -> dict[str, list[str]]:
    """What is not a default, by label, as words for `labelled`; the most surprising label first."""
    found: dict[str, Groups] = {"files": {}, "flags": {}, "preset": {}, "derived": {}}
    for name in FLAGS:
        value, source = getattr(resolved.run, name), resolved.run.sources[name]
        label = _label_of_flag(resolved, name, value, source)
        if label:
            said = "" if label == "flags" else source.removeprefix("derived: ")
            found[label].setdefault(said, []).append(f"{name} {_brief(value)}")
    for key, value in leaves(resolved.config).items():
        source = resolved.sources[key]
        label = _label_of_key(resolved, key, value, source)
        if label:
            name = next((key.removeprefix(p) for p in PREFIXES if key.startswith(p)), key)
            name = name if label == "derived" else key
            said = "" if label == "derived" else source
            found[label].setdefault(said, []).append(f"{name} {shortened(json.dumps(value), MOST)}")
    return {label: _words(groups) for label, groups in found.items() if groups}


def _label_of_flag(resolved: Resolved, name: str, value: Any, source: str) -> str:
    """Under which label a flag is shown; empty where it is not."""
    if value is None or source == "default" or name in (*SHOWN_ABOVE, *OF_THE_START):
        return ""
    if source.startswith(f"{resolved.path}: "):  # the key of the DeepSpeed file is shown
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


def _label_of_key(resolved: Resolved, key: str, value: Any, source: str) -> str:
    """The same of a key that DeepSpeed is given."""
    is_stage_3 = key.rsplit(".", 1)[-1].startswith("stage3_")
    if is_stage_3 and resolved.zero_stage != 3:
        return ""
    if source.startswith("derived: "):
        return "" if key in NO_DECISION else "derived"
    is_default = source.split(" ")[0] in FLAGS or source.endswith("default")
    if is_default or key == "zero_optimization.stage" or ORDINARY.get(key) == value:
        return ""
    return "files"


def _words(groups: Groups) -> list[str]:
    """`a 1,`, `b 2 (source);` ...: pieces that are not to be broken."""
    words: list[str] = []
    for source, settings in groups.items():
        behind = f" ({place_of(source)})" if source else ""
        words += [f"{setting}," for setting in settings[:-1]]
        words.append(f"{settings[-1]}{behind};")
    words[-1] = words[-1].removesuffix(";")
    return words


def _brief(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return shortened(_text(value), MOST)


def place_of(source: str) -> str:
    """A source without the way from the root to the current directory."""
    return shortened(source.replace(f"{Path.cwd()}{os.sep}", ""), MOST)


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


COLUMNS = 100


LABEL = 9  # columns before the text


def shortened(text: str, most: int) -> str:
    """`text` in at most `most` columns: where it is longer, its middle is left out."""
    if disp_len(text) <= most:
        return text
    head = disp_trim(text, (most - 3) // 2)
    tail = disp_trim(text[::-1], most - 3 - disp_len(head))[::-1]
    return f"{head}...{tail}"


def labelled(label: str, pieces: Iterable[str]) -> list[str]:
    """Lines of at most `COLUMNS` columns: the label, then `pieces`, broken between two of them.

    A piece that is longer than a line is broken between words.
    """
    lines = [""]
    for piece in _fitting(pieces, COLUMNS - LABEL):
        longer = f"{lines[-1]} {piece}".lstrip()
        if disp_len(longer) > COLUMNS - LABEL:
            lines.append(piece)
        else:
            lines[-1] = longer
    labels = [label, *("" for _ in lines[1:])]
    return [f"{name:<{LABEL}}{line}" for name, line in zip(labels, lines, strict=True)]


def _fitting(pieces: Iterable[str], most: int) -> Iterator[str]:
    for piece in pieces:
        parts = [piece] if disp_len(piece) <= most else piece.split(" ")
        yield from (shortened(part, most) for part in parts)


def dry_run_text(setup: Setup, resolved: Resolved, model: Architecture) -> str:
    """What the run would be, and what it would cost; raises what a prepared folder's start would.

    Of such a folder the manifest is read and the sizes of its shards, none of its tokens.
    """
    run, tables = with_tokenizer(resolved.run), []
    if folder := prepared_folder(run):
        manifest = read_manifest(folder)
        _require_usable(folder, manifest, run.tokenizer)
        run = _with_manifest(run, folder, manifest)
        tables.append(_data_table(folder, manifest, run.max_seq_len + 1))
        tokens = manifest["splits"]["train"]["tokens"]
        rows = tokens // (run.max_seq_len + 1)  # of several sources perhaps a few fewer
        require_a_step(resolved.run, setup.launch.world_size, tokens, rows)
    tables.insert(0, f"flags:\n{flags_table(run)}")
    if resolved.config:
        tables.append(deepspeed_table(resolved))
    world_size = setup.launch.world_size
    costs = model.costs(run) or plan_text(run, world_size, resolved.config, device=setup.device)
    return "\n\n".join([*tables, *filter(None, [dropped_config_notice(setup.launch)]), costs])


def _require_usable(folder: Path, manifest: dict[str, Any], tokenizer: str | None) -> None:
    """Nothing, or a DataError for a shard that is cut or missing, or another tokenizer."""
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            if not is_whole(folder, shard):
                raise DataError(
                    f"{folder / shard['name']}: is missing or cut; put it back, or prepare the"
                    " text again"
                )
    if tokenizer is not None and load_tokenizer(tokenizer).fingerprint != manifest["tokenizer"]:
        raise DataError(
            f"{tokenizer}: is not the tokenizer that {folder} was made with; leave out"
            " --tokenizer, or prepare the text again with it"
        )


def _with_manifest(run: RunConfig, folder: Path, manifest: dict[str, Any]) -> RunConfig:
    options = asdict(Options(**manifest["options"]))
    decided = {"vocab_size": manifest["vocab_size"], **options}
    return with_decided(run, f"--data_path {folder}", decided)


def _data_table(folder: Path, manifest: dict[str, Any], row_tokens: int) -> str:
    lines = [f"data: {folder}"]
    for split, found in manifest["splits"].items():
        tokens, documents = found["tokens"], found["documents"]
        rows = tokens // row_tokens
        lines.append(
            f"{split:<6} {tokens:>14,} tokens, {documents:,} documents, about {rows:,} rows of"
            f" {row_tokens}"
        )
    return "\n".join(lines)
