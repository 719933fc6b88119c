"""Which checkpoint a place means, verified, and kept from being deleted while it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from minimind.checkpoint.directory import MANIFEST, Rejected, candidates, verify
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import Unreadable
from minimind.runtime.locks import ReadLock, lock_for_reading

TRIES = 20  # a run that saves several times a second may retire what was just listed

T = TypeVar("T")


class Removed(CheckpointError):
    """The checkpoint was deleted or renamed while it was read."""


@dataclass(frozen=True)
class Chosen:
    """A verified checkpoint, those passed over, and the lock that keeps it for its reader."""

    path: Path
    rejected: list[Rejected]
    lock: ReadLock | None


def choose(place: str) -> Chosen:
    """The step directory that `--checkpoint place` means: of a run its newest valid one.

    A run that goes on may delete what was listed before it is locked; then the choice is made
    again. A CheckpointError where there is none, a Removed where the one that was named is gone.
    """
    return read_chosen(place, lambda chosen: chosen)


def read_chosen(place: str, use: Callable[[Chosen], T]) -> T:
    """`use` of the checkpoint that `place` means; again of another one if it is removed meanwhile.

    Nothing is removed that is locked. Not every file system has locks, though, and not everything
    that deletes a directory asks for them.
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
            if chosen.path.is_dir():
                raise
            if not is_run:
                raise _removed(chosen.path) from error
    raise CheckpointError(
        f"--checkpoint {place}: each of {TRIES} checkpoints was removed while it was read; let the"
        " run keep more of them (--keep_last)"
    )


def newest_valid(
    found: list[Path], check: Callable[[Path], Rejected | None]
) -> tuple[Path | None, list[Rejected]]:
    """The first of `found` that `check` finds nothing wrong with, and those passed over.

    None when there is none at all; when all are damaged a CheckpointError: never a silent step 0.
    One that cannot be read may be whole: it is not passed over, but an Unreadable.
    """
    rejected = []
    for path in found:
        bad = check(path)
        if bad is None:
            return path, rejected
        if bad.is_unreadable:
            raise Unreadable(
                f"{bad.path / bad.file}: {bad.reason}; nothing shows that it is damaged, so that no"
                " older checkpoint is taken by itself: make it readable, or name another"
            )
        rejected.append(bad)
    if rejected:
        told = "; ".join(f"{r.path.name}: {r.file} {r.reason}" for r in rejected)
        which = f"no checkpoint in {found[0].parent}" if len(found) > 1 else str(found[0])
        raise CheckpointError(
            f"{which} {'can' if len(found) > 1 else 'cannot'} be used ({told}); restore one, or"
            " start afresh in another folder"
        )
    return None, []


def _run_of(place: str) -> Path | None:
    """The checkpoints folder where `place` is a run; None where it is one checkpoint."""
    roots = (Path(place) / "checkpoints", Path(place))
    return next((root for root in roots if root.is_dir() and root.name == "checkpoints"), None)


def _choose(place: str) -> Chosen:
    root = _run_of(place)
    found = candidates(root) if root else [Path(place)]
    if not Path(place).is_dir() or not found:
        raise CheckpointError(
            f"--checkpoint {place}: holds no checkpoint; name a run's out_dir or a step_ directory"
        )
    locks: dict[Path, ReadLock | None] = {}

    def check(path: Path) -> Rejected | None:
        try:
            locks[path] = lock_for_reading(path / MANIFEST)
        except FileNotFoundError as error:
            raise _removed(path) from error
        bad = verify(path)
        if bad and not path.is_dir():
            raise _removed(path)
        return bad

    path, rejected = newest_valid(found, check)
    assert path is not None  # newest_valid raises where all of some are damaged
    return Chosen(path, rejected, locks[path])


def _removed(path: Path) -> Removed:
    return Removed(f"{path}: was removed while it was read; name another, or the run's out_dir")
