"""Select and verify the checkpoint of --checkpoint, and lock it against deletion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from minimind.checkpoint.directory import MANIFEST, Rejected, published_checkpoints, verify
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import Unreadable
from minimind.runtime.locks import ReadLock, lock_for_reading

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
            if chosen.path.is_dir():
                raise
            if not is_run:
                raise _removed(chosen.path) from error
    raise CheckpointError(
        f"--checkpoint {place}: each of {TRIES} checkpoints was removed while it was read; let the"
        " run keep more of them (--keep_last)"
    )


def newest_valid(
    checkpoints: list[Path], check: Callable[[Path], Rejected | None]
) -> tuple[Path | None, list[Rejected]]:
    """Return the first of `checkpoints` that passes `check`, and the rejected ones before it.

    None if there are none. Raise CheckpointError if all are damaged (never start silently at step
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
        raise CheckpointError(
            f"{which} be used ({reasons}); restore one, or start afresh in another folder"
        )
    return None, []


def _run_of(place: str) -> Path | None:
    """Return the checkpoints folder if `place` is a run; None if it is a checkpoint."""
    roots = (Path(place) / "checkpoints", Path(place))
    return next((root for root in roots if root.is_dir() and root.name == "checkpoints"), None)


def _choose(place: str) -> Chosen:
    root = _run_of(place)
    checkpoints = published_checkpoints(root) if root else [Path(place)]
    if not Path(place).is_dir() or not checkpoints:
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

    path, rejected = newest_valid(checkpoints, check)
    assert path is not None  # newest_valid raises if none verifies
    return Chosen(path, rejected, locks[path])


def _removed(path: Path) -> Removed:
    return Removed(f"{path}: was removed while it was read; name another, or the run's out_dir")
