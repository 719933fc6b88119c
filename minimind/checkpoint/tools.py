"""`minimind checkpoint list | verify | prune`: list, verify and delete checkpoints of a run.

Needs neither DeepSpeed nor a GPU nor the number of processes that trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import (
    MANIFEST,
    NAME,
    delete,
    fault,
    leftovers,
    newest_valid,
    published_checkpoints,
    read_manifest,
    rejected,
    step_of,
    unfinished,
    verify,
)
from minimind.checkpoint.retention import (
    VALIDATION,
    Rules,
    fate,
    good_step,
    kept,
    rules_of_run,
    saved_of,
    unknown,
)
from minimind.checkpoint.run_folder import lock_out_dir
from minimind.config.flags import MIXED
from minimind.errors import CheckpointError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import storing
from minimind.runtime.event_log import EventLog

DTYPES = ("float32", "bfloat16", "float16", MIXED)
SIZES, HASHES, CONTENTS = range(3)  # how far `examine` reads
ONE = re.compile(r"(?:rejected-|abandoned-)?step_\d{8,}.*")
NAME_ONE = "name a run's out_dir or a step_ directory"


@dataclass(frozen=True)
class Listing:
    """A directory as listed; a field that a damaged manifest lacks is None."""

    path: str
    name: str
    step: int | None
    tokens: int | None
    saved: float  # unix seconds, when the manifest was written
    bytes: int
    world_size: int | None
    zero_stage: int | None
    dtype: str | None
    files: int
    state: str
    val_loss: float | None = None
    kept: str = ""  # why, or that the next save deletes it


@dataclass(frozen=True)
class Examined:
    """A directory beside its manifest; without faults, `remarks` name files that are never read."""

    manifest: dict[str, Any]  # empty if it is damaged
    sizes: dict[str, int]
    faults: list[str]
    remarks: list[str] = field(default_factory=list)


def is_one(path: Path) -> bool:
    """Whether a directory is one checkpoint, complete or not, and not a run."""
    return disk.exists(path / MANIFEST) or bool(ONE.fullmatch(path.name) and disk.is_dir(path))


def folder_of(place: str) -> Path:
    """Return the checkpoints folder of a run; raise CheckpointError if there is none."""
    for root in (Path(place) / "checkpoints", Path(place)):
        if disk.is_dir(root) and (root.name == "checkpoints" or published_checkpoints(root)):
            return root
    raise CheckpointError(f"{place}: holds no checkpoint; {NAME_ONE}")


def beside(root: Path) -> Path:
    """`root`, absolute; a link is not followed, since the files of its run are beside it."""
    whole = root if root.name not in ("", "..") else disk.resolve(root)
    return disk.resolve(whole.parent) / whole.name


def directories(place: str) -> list[Path]:
    """Return the checkpoints of a run, or the one named; raise CheckpointError if there is none."""
    if is_one(Path(place)):
        return [Path(place)]
    checkpoints = published_checkpoints(folder_of(place))
    if not checkpoints:
        raise CheckpointError(f"{place}: holds no checkpoint; {NAME_ONE}")
    return checkpoints


def list_checkpoints(
    place: str, is_verifying: bool, tell: Callable[[str], None] = print
) -> list[Listing]:
    """List published checkpoints, newest first, then those set aside and unfinished ones.

    `tell` gets a sentence for each file of the run that is damaged.
    """
    how = HASHES if is_verifying else SIZES
    if is_one(Path(place)):
        return [*_listed([Path(place)], "", how)]
    root = folder_of(place)
    return [
        *_with_fates(root, [*_listed(published_checkpoints(root), "", how)], tell),
        *_listed(leftovers(root), "set aside, never resumed from"),
        *_listed(unfinished(root), "unfinished"),
    ]


def _with_fates(
    root: Path, listings: list[Listing], tell: Callable[[str], None]
) -> Iterable[Listing]:
    """Add why the run keeps each checkpoint, if its config.yaml is there."""
    try:
        rules = rules_of_run(beside(root).parent)
        if rules is None:
            return listings
        good = _good_of(root, rules, tell)
    except CheckpointError as error:
        tell(f"{error}; so it is unknown which checkpoints the run keeps")
        return listings
    paths = [Path(entry.path) for entry in listings]
    fates = fate([saved_of(path) for path in paths], rules, good)
    return (
        replace(entry, kept=fates[step_of(path)])
        for entry, path in zip(listings, paths, strict=True)
    )


def _listed(paths: Iterable[Path], state: str, how: int = SIZES) -> Iterator[Listing]:
    """Describe directories; an empty `state` is what `examine` finds."""
    for path in paths:
        if (found := examine(path, how)) is None:
            continue
        manifest, sizes = found.manifest, found.sizes
        stage, dtype = manifest.get("zero_stage"), manifest.get("dtype")
        whole = "ok, hashes verified" if how else "complete, hashes not verified"
        yield Listing(
            path=str(path),
            name=path.name,
            step=manifest.get("step"),
            tokens=manifest.get("tokens"),
            saved=_saved(path),
            bytes=sum(sizes.values()),
            world_size=manifest.get("world_size"),
            zero_stage=stage if stage in (0, 1, 2, 3) else None,
            dtype=dtype if dtype in DTYPES else None,
            files=len(sizes),
            state=state or (found.faults[0] if found.faults else whole),
            val_loss=saved_of(path).val_loss if NAME.fullmatch(path.name) else None,
        )


def sizes_of(path: Path) -> dict[str, int] | None:
    """Size of every file in bytes, by name; None if there is no such directory."""
    try:
        return {file.name: disk.stat(file, follow=False).st_size for file in disk.entries(path)}
    except FileNotFoundError:
        return None
    except NotADirectoryError:  # a stray file of such a name
        return {path.name: disk.stat(path, follow=False).st_size}


def _saved(path: Path) -> float:
    """Modification time (unix seconds) of the manifest, or of the directory if it has none."""
    for candidate in (path / MANIFEST, path):
        try:
            return disk.stat(candidate).st_mtime
        except FileNotFoundError:
            pass
    return 0.0


def verify_checkpoints(place: str) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield (checkpoint, faults, remarks) of each one at `place`."""
    for path in directories(place):
        found = examine(path, CONTENTS)
        # Otherwise the run deleted it.
        if found and (disk.is_dir(path) or is_one(Path(place))):
            yield path, found.faults, found.remarks


def examine(path: Path, how: int) -> Examined | None:
    """Compare a directory with its manifest, by sizes, by hashes, or by contents as well.

    Return None if it no longer exists: a run deletes its older checkpoints.
    """
    sizes = sizes_of(path)
    if sizes is None:
        return None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Examined({}, sizes, [str(rejected(path, MANIFEST, error))])
    names = [entry["name"] for entry in manifest["files"]]
    damages = (fault(path / entry["name"], entry, how > SIZES) for entry in manifest["files"])
    faults = [str(bad) for bad in damages if bad]
    if how == CONTENTS and not faults:
        from minimind.checkpoint.reader import Contents  # imports torch

        try:
            Contents(path).require_finite()
        except CheckpointError as error:
            text = str(error).removeprefix(f"{path}/").removeprefix(f"{path}: ")
            faults.append(f"DAMAGED: {text}")
    value = saved_of(path) if NAME.fullmatch(path.name) else None
    if value and value.fault and not faults:  # it decides what is deleted
        faults.append(f"DAMAGED: {VALIDATION} {value.fault} (a resume does not need it)")
    extra = sorted({*sizes} - {MANIFEST, VALIDATION, *names})
    remarks = [f"{name!r} is not in the manifest, and is not read" for name in extra]
    return Examined(manifest, sizes, faults, [] if faults else remarks)


@dataclass(frozen=True)
class Pruned:
    """A directory that is, or in a dry run would be, deleted, or why it stays."""

    path: Path
    bytes: int
    stays: str = ""
    damage: str = ""


def prune(
    place: str, given: Mapping[str, int], is_dry: bool, tell: Callable[[str], None] = print
) -> Iterator[Pruned]:
    """Delete the checkpoints that the rules do not keep; yield each, and those that stay instead.

    The rules are those of the run, replaced by those `given`. Unfinished checkpoints and those that
    were set aside are deleted too. A damaged one among the newest and one that is being read stay.
    Raise LockedError while a run writes there, and CheckpointError, before anything is deleted, if
    damage of the run's files leaves open what a rule keeps. `tell` gets other damage.
    """
    if is_one(Path(place)):
        raise UsageError(f"{place} is one checkpoint; name the out_dir of its run")
    root = beside(folder_of(place))
    rules = _rules_of_prune(root.parent, given)
    with lock_out_dir(root.parent if root.name == "checkpoints" else root):
        try:
            good = _good_of(root, rules, tell)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; nothing is deleted: give --keep_last N") from error
        paths = published_checkpoints(root)
        damages = {path: bad for path in paths if (bad := verify(path))}
        newest_valid(paths, damages.get)  # raises if all are damaged, so that nothing is deleted
        valid = [path for path in paths if path not in damages]
        saved = [saved_of(path) for path in valid]
        reasons, why = kept(saved, rules, good), unknown(saved, rules)
        stay = {path for path in valid if reasons[step_of(path)]}
        for path in valid:
            if reasons[step_of(path)] == ["unproven"]:
                fault = f"{VALIDATION} {why[step_of(path)]}"
                yield Pruned(path, 0, f"it may be among the best: {fault}")
        recent = min(map(step_of, valid[: rules.keep_last]), default=0)
        for path, bad in damages.items():
            if bad.is_unreadable or step_of(path) > recent:
                stay.add(path)
                kind = "unreadable" if bad.is_unreadable else "damaged"
                yield Pruned(path, 0, f"is {kind} and not counted: {bad.file} {bad.reason}")
        older = [path for path in reversed(paths) if path not in stay]
        for path in [*older, *leftovers(root), *unfinished(root)]:
            size = sum((sizes_of(path) or {}).values())
            is_deleted = True
            if not is_dry:
                with storing(str(path), "check the path"):
                    is_deleted = delete(path)
            bad = damages.get(path)
            damage = f"{bad.file} {bad.reason}" if bad else ""
            yield Pruned(path, size, "" if is_deleted else "is being read", damage)


def _rules_of_prune(out_dir: Path, given: Mapping[str, int]) -> Rules:
    """The rules of a run with some replaced; without keep_last what it goes back to is kept too."""
    whole = {"keep_last", "keep_every", "keep_best"}
    try:
        rules = rules_of_run(out_dir)
    except CheckpointError as error:
        if {*given} < whole:
            raise CheckpointError(
                f"{error}; nothing is deleted: restore it, or give --keep_last, --keep_every and"
                " --keep_best"
            ) from error
        rules = None
    if rules is None and "keep_last" not in given:
        raise UsageError(
            f"{out_dir} has no config.yaml with the rules of its run; give --keep_last"
        )
    rules = rules or Rules(1)
    if "keep_last" in given:
        rules = replace(rules, reach=0, verifies=False)
    return replace(rules, **given)


def _good_of(root: Path, rules: Rules, tell: Callable[[str], None]) -> int | None:
    """The last step known to be good, if it counts; raise CheckpointError if that is uncertain."""
    if not rules.verifies:
        return None
    log = EventLog(beside(root).parent / "metrics.jsonl")
    newest = max(map(step_of, published_checkpoints(root)), default=0)
    good, is_certain = good_step(log, newest)
    if not is_certain:
        what = log.warning() or f"{log.path} is cut, missing, or ends before step {newest}"
        raise CheckpointError(f"{what}, so the last check of --verify_interval may be lost")
    if warning := log.warning():
        tell(warning)
    return good
