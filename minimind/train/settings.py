"""The values of a run and their sources for people: the complete table, and what is not default."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minimind.config.run_config import FLAGS, RunConfig
from minimind.train.columns import shortened
from minimind.config.deepspeed.resolve import Resolved, leaves

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
