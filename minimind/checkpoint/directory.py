"""Checkpoint directories: written aside, published by one rename, verified before they are read.

    out_dir/checkpoints/step_00000042/
        shard-R-of-N.safetensors   what rank R of N owned: fp32 weights and the optimizer's moments
        buffers.safetensors        persistent buffers
        state.json                 shapes, optimizer step, the engine's counters
        config.json tokenizer.model ds_config.resolved.json   for generate and for readers
        validation.json            not of every one (retention.py)
        manifest.json              written last: size and sha256 of every file, identity of the run

A directory under its final name is complete. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from minimind.checkpoint.validation import require_manifest
from minimind.errors import CheckpointError
from minimind.runtime import disk
from minimind.runtime.checked_json import Unreadable, read_object, shown
from minimind.runtime.drafts import remove_left
from minimind.runtime.durable_files import (
    canonical_json,
    fingerprint,
    sha256_of,
    sync_directory,
    write_durably,
)
from minimind.runtime.file_kinds import form_of_folder
from minimind.runtime.locks import ReadLock, lock_for_reading, locked_for_deletion
from minimind.runtime.terminal import aligned, shorten_line

FORMAT = 4
MANIFEST = "manifest.json"
OWNER = "mirror.json"  # names the run, in out_dir and at the URL of --mirror
NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Rejected:
    """A rejected checkpoint, with the file at fault and the reason."""

    path: Path
    file: str
    reason: str
    is_unreadable: bool = False  # not necessarily damaged

    def __str__(self) -> str:
        return f"{'UNREADABLE' if self.is_unreadable else 'DAMAGED'}: {self.file} {self.reason}"


class AllDamaged(CheckpointError):
    """Every checkpoint that could be used is damaged."""

    def __init__(self, message: str, rejected: Sequence[Rejected] = ()) -> None:
        super().__init__(message)
        self.rejected = rejected


def rejected(path: Path, file: str, error: CheckpointError) -> Rejected:
    """Build a Rejected from an error in `file`."""
    return Rejected(path, file, str(error), isinstance(error, Unreadable))


def step_directory(root: Path, step: int) -> Path:
    """`root/step_00000042`; names sort by step."""
    return root / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def published_checkpoints(root: Path) -> list[Path]:
    """Published checkpoints under `root`, highest step first; file times are not used.

    Empty if there is no such folder. Raise Unreadable if it cannot be listed.
    """
    found = [path for path in _listed(root) if NAME.fullmatch(path.name) and disk.is_dir(path)]
    return sorted(found, key=step_of, reverse=True)


def ended_at_once(out_dir: Path) -> str:
    """What the last line of a run says that a second Ctrl-C ended, and what is left of it."""
    steps = [step_of(path) for path in published_checkpoints(out_dir / "checkpoints")]
    if not steps:
        return f"ended at once by a second Ctrl-C; no checkpoint yet in {out_dir}"
    return (
        f"ended at once by a second Ctrl-C; the last checkpoint is step {steps[0]} of {out_dir},"
        " later steps are lost"
    )


def _listed(root: Path, pattern: str = "*") -> list[Path]:
    """What is in a folder, if it is there; raise Unreadable if it cannot be listed."""
    try:
        return [*disk.matching(root, pattern)]
    except OSError as error:
        raise Unreadable(
            f"{root}: cannot be read ({error.strerror}); correct its permissions"
        ) from error


def describe_file(path: Path) -> dict[str, Any]:
    """The manifest entry of a file: `name`, `bytes`, `sha256`."""
    return {"name": path.name, "bytes": disk.stat(path).st_size, "sha256": sha256_of(path)}


def write_manifest(directory: Path, facts: dict[str, Any], files: list[dict[str, Any]]) -> None:
    """Write `manifest.json`, with the sha256 of its canonical form as last field."""
    manifest = {"format": FORMAT, **facts, "files": sorted(files, key=lambda f: f["name"])}
    write_durably(directory / MANIFEST, with_sum(manifest))
    sync_directory(directory)


def publish(tmp: Path, final: Path) -> None:
    """Rename a complete directory to its final name durably; an existing one is set aside."""
    if disk.exists(final):
        set_aside(final, "rejected")
    tmp.rename(final)
    sync_directory(final.parent)


def _free_name(path: Path) -> Path:
    others = (path.with_name(f"{path.name}-{n}") for n in count(2))
    return next(free for free in chain([path], others) if not disk.exists(free))


def set_aside(path: Path, why: str) -> None:
    """Rename a checkpoint to `WHY-step_...`: kept, but ignored by resume and pruning."""
    path.rename(_free_name(path.with_name(f"{why}-{path.name}")))


def delete(path: Path) -> bool:
    """Rename a directory, then delete it; return False if it is being read.

    Renamed first, so that no partial checkpoint exists under a final name.
    """
    with locked_for_deletion(path / MANIFEST) as is_free:
        if not is_free:
            return False
        if ".tmp-" not in path.name:
            path = path.rename(_free_name(path.with_name(f"{path.name}.tmp-retired")))
    _remove(path)
    return True


def _remove(path: Path) -> None:
    """Delete a directory, a file or a link (not its target)."""
    if disk.is_dir(path) and not disk.is_symlink(path):
        shutil.rmtree(path)
    else:
        path.unlink()


def leftovers(root: Path) -> list[Path]:
    """Checkpoints that were set aside."""
    aside = [p for why in ("rejected", "abandoned") for p in _listed(root, f"{why}-step_*")]
    return sorted(p for p in aside if ".tmp-" not in p.name)


def unfinished(root: Path) -> list[Path]:
    """Directories of interrupted saves and deletions."""
    return sorted(_listed(root, "*step_*.tmp-*"))


def sweep(root: Path) -> None:
    """Delete the directories of interrupted saves and deletions, and unfinished files in others."""
    for left in unfinished(root):
        _remove(left)
    for path in published_checkpoints(root):
        remove_left(path)


def with_sum(content: dict[str, Any]) -> bytes:
    """Serialize an object with the sha256 of its canonical form as last field."""
    return json.dumps({**content, "sha256": fingerprint(content)}, indent=1).encode()


def require_sum(found: dict[str, Any], text: bytes) -> None:
    """Raise CheckpointError unless `text` is, byte for byte, what `with_sum` makes of `found`."""
    content = {key: value for key, value in found.items() if key != "sha256"}
    try:
        is_whole = text == with_sum(content)
    except UnicodeEncodeError:  # a lone surrogate, escaped
        is_whole = False
    if not is_whole:
        raise CheckpointError("does not match its own sha256")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and validate the manifest and its hash; raise CheckpointError."""
    return checked_manifest(*read_object(directory / MANIFEST), directory)


def checked_manifest(manifest: dict[str, Any], text: bytes, directory: Path) -> dict[str, Any]:
    """Validate a parsed manifest of a checkpoint, and its hash; raise CheckpointError."""
    if "sha256" not in manifest:
        raise CheckpointError("is not a manifest")
    require_sum(manifest, text)
    if manifest.get("format") != FORMAT:
        other = shown(manifest.get("format"))
        raise CheckpointError(f"has format {other}, this version reads {FORMAT}")
    require_manifest(manifest)
    own_name = step_directory(directory, manifest["step"]).name
    if NAME.fullmatch(directory.name) and directory.name != own_name:
        raise CheckpointError(f"is that of {own_name}")
    return manifest


def verify(directory: Path, part: int = 0, of: int = 1) -> Rejected | None:
    """Return the first damage or None; hashes every `of`-th file from `part` on."""
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return rejected(directory, MANIFEST, error)
    for entry in manifest["files"][part::of]:
        if bad := fault(directory / entry["name"], entry):
            return bad
    return None


def size_fault(size: int | None, entry: dict[str, Any]) -> str:
    """What is wrong with the size of a file of the manifest; None: it is not there."""
    if size is None:
        return "is missing"
    return "" if size == entry["bytes"] else f"is {size} of {entry['bytes']} bytes"


def fault(path: Path, entry: dict[str, Any], is_hashed: bool = True) -> Rejected | None:
    """Return the damage of one file, by its size or by its hash too; None if there is none."""
    try:
        state = disk.stat(path, follow=False)
        text = size_fault(state.st_size if stat.S_ISREG(state.st_mode) else None, entry)
        if is_hashed and not text and sha256_of(path) != entry["sha256"]:
            text = "does not match its sha256"
    except (FileNotFoundError, NotADirectoryError):
        text = size_fault(None, entry)
    except OSError as error:
        return Rejected(path.parent, path.name, f"cannot be read ({error.strerror})", True)
    return Rejected(path.parent, path.name, text) if text else None


@dataclass(frozen=True)
class Difference:
    """A value that differs between two checkpoints, or a checkpoint and a run."""

    group: str  # name for --allow_change
    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.group}.{self.name}: {self.old} -> {self.new}"


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """All values, by group and name, that differ."""
    differing = []
    for group in sorted({*saved, *now}):
        old, new = saved.get(group, {}), now.get(group, {})
        for key in sorted({*old, *new}):
            before, after = old.get(key), new.get(key)
            if canonical_json(before) != canonical_json(after):
                differing.append(Difference(group, key, before, after))
    return differing


def difference_table(changed: list[Difference], allowed: Set[str]) -> list[str]:
    """Table of changed values, old and new, with the flag that allows each."""
    rows = [("changed", "checkpoint", "this run", "allowed by")]
    for change in changed:
        by = f"--allow_change {change.group}" + (" (given)" if change.group in allowed else "")
        old, new = (shorten_line(str(value), 32) for value in (change.old, change.new))
        rows.append((f"{change.group}.{change.name}", old, new, by))
    return aligned(rows, indent="  ").splitlines()


def require_same_run(
    directory: Path,
    saved: dict[str, Any],
    now: dict[str, Any],
    allowed: Set[str] = frozenset(),
    accumulation_steps: int = 0,
) -> list[Difference]:
    """Return the allowed differences; raise CheckpointError with a table for others.

    With the `accumulation_steps` of this run, the error names those that give the old rows back, if
    any do, else --global_batch_size.
    """
    changed = differences(saved, now)
    refused = [change for change in changed if change.group not in allowed]
    if refused:
        groups = ",".join(dict.fromkeys(change.group for change in changed))
        text = "; ".join(map(str, refused))
        back = "restore the old values"
        if rows := [change for change in refused if change.name == "rows_per_step"]:
            text += "; rows_per_step is --batch_size x --accumulation_steps x processes, or"
            text += " --global_batch_size"
            steps, rest = divmod(accumulation_steps * (rows[0].old or 0), rows[0].new or 1)
            if steps and not rest:
                back += f" (--accumulation_steps {steps})"
            elif rows[0].old and "stages" not in now["batch"]:
                back += f" (--global_batch_size {rows[0].old})"
        raise CheckpointError(
            f"{directory} belongs to another run ({text}); {back},"
            f" add --allow_change {groups}, or start afresh in another --out_dir",
            table=difference_table(changed, allowed),
        )
    return changed


def start_over(root: Path) -> None:
    """Rename an existing checkpoints folder for a fresh start, and create an empty one."""
    if disk.is_dir(root) and any(disk.entries(root)):
        root.rename(_free_name(root.with_name(f"{root.name}-before")))
        root.mkdir()


TRIES = 20  # a run that saves often may prune what was just listed

T = TypeVar("T")


class Removed(CheckpointError):
    """The checkpoint was deleted or renamed while it was read."""


@dataclass(frozen=True)
class Chosen:
    """A verified checkpoint with its read lock, and the checkpoints that were rejected."""

    path: Path
    rejected: list[Rejected]
    lock: ReadLock | None


def choose(place: str) -> Chosen:
    """Return the step directory of `--checkpoint place`; of a run its newest valid one.

    Repeated if a running job prunes the choice before it is locked. Raise CheckpointError if there
    is none, Removed if the named checkpoint was deleted.
    """
    return read_chosen(place, lambda chosen: chosen)


def read_chosen(place: str, use: Callable[[Chosen], T]) -> T:
    """Call `use` with the checkpoint of `place`; again with another one if it is removed.

    Our own code never removes a locked checkpoint, but file systems may lack locks and other
    programs do not check them.
    """
    is_run = _run_of(place) is not None
    for _ in range(TRIES):
        try:
            chosen = _choose(place)
        except Removed:
            if not is_run:
                raise
            continue
        try:
            return use(chosen)
        except (CheckpointError, FileNotFoundError) as error:
            if disk.is_dir(chosen.path):
                raise
            if not is_run:
                raise _removed(chosen.path) from error
    raise CheckpointError(
        f"{place}: each of {TRIES} checkpoints was removed while it was read; let the"
        " run keep more of them (--keep_last)"
    )


def newest_valid(
    checkpoints: list[Path], check: Callable[[Path], Rejected | None]
) -> tuple[Path | None, list[Rejected]]:
    """Return the first of `checkpoints` that passes `check`, and the rejected ones before it.

    None if there are none. Raise AllDamaged if all are damaged (never start silently at step
    0), and Unreadable for one that cannot be read, since it may be intact.
    """
    rejected = []
    for path in checkpoints:
        bad = check(path)
        if bad is None:
            return path, rejected
        if bad.is_unreadable:
            raise Unreadable(
                f"{bad.path / bad.file}: {bad.reason}; it may be intact, so no older"
                " checkpoint is used instead: make it readable, or name another"
            )
        rejected.append(bad)
    if rejected:
        reasons = "; ".join(f"{r.path.name}: {r.file} {r.reason}" for r in rejected)
        if len(checkpoints) > 1:
            which = f"no checkpoint in {checkpoints[0].parent} can"
        else:
            which = f"{checkpoints[0]} cannot"
        raise AllDamaged(
            f"{which} be used ({reasons}); restore one, or start afresh in another folder", rejected
        )
    return None, []


def _run_of(place: str) -> Path | None:
    """Return the checkpoints folder if `place` is a run; None if it is a checkpoint."""
    roots = (Path(place) / "checkpoints", Path(place))
    return next((root for root in roots if disk.is_dir(root) and root.name == "checkpoints"), None)


def _choose(place: str) -> Chosen:
    root = _run_of(place)
    checkpoints = published_checkpoints(root) if root else [Path(place)]
    is_ours = checkpoints if root else disk.lexists(Path(place) / MANIFEST)
    form = "" if is_ours else form_of_folder(Path(place))
    if form or not disk.is_dir(Path(place)) or not checkpoints:
        remedy = "holds no checkpoint; name a run's out_dir or a step_ directory"
        raise CheckpointError(f"{place}: {form or remedy}")
    locks: dict[Path, ReadLock | None] = {}

    def check(path: Path) -> Rejected | None:
        try:
            locks[path] = lock_for_reading(path / MANIFEST)
        except FileNotFoundError as error:
            raise _removed(path) from error
        bad = verify(path)
        if bad and not disk.is_dir(path):
            raise _removed(path)
        return bad

    path, rejected = newest_valid(checkpoints, check)
    assert path is not None  # newest_valid raises if none verifies
    return Chosen(path, rejected, locks[path])


def _removed(path: Path) -> Removed:
    return Removed(f"{path}: was removed while it was read; name another, or the run's out_dir")
