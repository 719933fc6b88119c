"""config.yaml of a run: a run writes it with a sum, and whoever reads it learns of damage.

What lacks lines would read as defaults, by which `minimind checkpoint prune` might delete.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from minimind.config.flags import FLAGS
from minimind.config.origin import Rank
from minimind.config.run_config import RunConfig
from minimind.config.yaml_files import load_yaml
from minimind.errors import CheckpointError, UsageError
from minimind.runtime import disk
from minimind.runtime.checked_json import shown
from minimind.runtime.durable_files import read_small

NAME = "config.yaml"
HEAD = "# The flags of this run; --config reads them back. The comment is the source."
REST = "# Not given: defaults, and what the start decided."
LAST = b"# sha256 of the lines above: "
ALWAYS = (
    *("keep_last", "keep_every", "keep_best", "keep_best_by", "save_interval"),
    *("verify_interval", "spike_guard", "eval_interval", "eval_tasks_interval"),
)  # flags that decide what is deleted; every run writes them


def with_sum(text: str) -> bytes:
    """The content of the file: `text` with its sum as the last line."""
    content = text.encode()
    return content + LAST + hashlib.sha256(content).hexdigest().encode() + b"\n"


def given_names(path: Path) -> set[str]:
    """The flags of a run's config.yaml that were given, or decided by what was given."""
    given, _, _ = path.read_text("utf-8", "replace").partition(REST)
    return {line.partition(":")[0] for line in given.splitlines()}


def record_fault(path: Path) -> str:
    """Why a run's config.yaml is not as the run wrote it; empty if it is, or is by another hand."""
    try:
        content = read_small(path)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    text, found, digest = content.rpartition(LAST)
    if found and digest == hashlib.sha256(text).hexdigest().encode() + b"\n":
        return ""
    if found or content.startswith(HEAD.encode()) or not content.strip():
        return "is cut, damaged or edited: its last line is not the sha256 of the others"
    return ""


def require_rules(run: RunConfig) -> None:
    """Raise UsageError for a run's config.yaml, given with --config, that lacks one of `ALWAYS`.

    With default values in their place, a resumed run would delete checkpoints that it kept.
    """
    fault = _fault_of_config(run)
    missing = [name for name in ALWAYS if fault and run.sources[name].rank is Rank.DEFAULT]
    if missing:
        raise UsageError(
            f"--config {run.config} {fault}; it has no {missing[0]}, which every run writes:"
            f" restore it, give --{missing[0]}, or, if you wrote it yourself, delete its first and"
            " last line"
        )


def config_notice(run: RunConfig) -> str:
    """Warning that --config is a run's config.yaml, and not as that run wrote it; else empty."""
    fault = _fault_of_config(run)
    return f"warning  --config {run.config} {fault}; flags that it lacks are defaults" * bool(fault)


def _fault_of_config(run: RunConfig) -> str:
    path = Path(run.config or "")
    return record_fault(path) if disk.is_file(path) else ""


def read_record(path: Path) -> dict[str, Any]:
    """Read a run's config.yaml; raise CheckpointError if it is not whole.

    One by another hand has no sum, and has to have all of `ALWAYS`.
    """
    if fault := record_fault(path):
        raise CheckpointError(f"{path} {fault}")
    try:
        values = load_yaml(str(path), "the run's")
    except UsageError as error:
        raise CheckpointError(str(error).partition(";")[0]) from error
    for name in ALWAYS:
        default = FLAGS[name].default
        if name not in values:
            raise CheckpointError(f"{path} has no {name}, which every run writes")
        value, least = values[name], FLAGS[name].ge
        if type(value) is not type(default) or (least is not None and value < least):
            raise CheckpointError(f"{path} has {name}: {shown(value)}, which no run writes")
    return values
