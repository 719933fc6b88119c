"""A folder that a command writes for its --out: whole or not there, and never over another's."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from minimind.errors import UsageError
from minimind.files import storing, sync_directory
from minimind.folder_locks import held

MEND = "free some space, or give another --out"


def require_free(out: Path, force: bool, own: Sequence[str], author: str) -> None:
    """Nothing, or a UsageError where `out` is taken; with `force` only what `author` wrote goes.

    `own` are the patterns of the names it writes. What a kill left of a replacement is put right.
    """
    with storing(str(out), MEND):
        put_back(out)
    if not os.path.lexists(out):
        return
    if not force:
        raise UsageError(f"--out {out} exists; give another folder, or --force to replace it")
    if out.is_symlink() or not out.is_dir():
        raise UsageError(
            f"--out {out} is a file or a link, which --force does not replace; give another folder"
        )
    with storing(str(out), MEND):
        there = sorted(out.iterdir())
    strangers = [path.name for path in there if not any(path.match(name) for name in own)]
    if strangers:
        raise UsageError(
            f"--out {out} holds {strangers[0]!r}, which {author} did not write, and --force"
            " replaces nothing else; give another folder"
        )


@contextmanager
def written_aside(out: Path, needed: int = 0) -> Iterator[Path]:
    """A folder to write to, which gets the name `out` at the end: interrupted, it leaves nothing.

    `needed` bytes are told where the disk is full. Who comes second waits.
    """
    draft = _beside(out, "draft")
    with storing(str(out), MEND, needed=needed):
        out.parent.mkdir(parents=True, exist_ok=True)
        with held(out, "write", fcntl.LOCK_EX):
            try:
                shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
                draft.mkdir()
                yield draft
                sync_directory(draft)
                replace_folder(out, draft)
            finally:
                shutil.rmtree(draft, ignore_errors=True)


def replace_folder(out: Path, draft: Path) -> None:
    """Give `draft` the name `out`; what had it goes after that, so that one of them is there.

    A kill between the two renames leaves the old one under another name, for `put_back` to find.
    """
    with _swapping(out):
        if out.exists():
            out.rename(_beside(out, "before"))
        draft.rename(out)
        sync_directory(out.parent)


def put_back(out: Path) -> None:
    """After a `replace_folder` that was killed: `out` is the new folder or the old one, alone."""
    if any(_beside(out, role).exists() for role in ("before", "gone")):
        with _swapping(out):
            pass


@contextmanager
def _swapping(out: Path) -> Iterator[None]:
    """Nobody else renames at `out`, and nothing is left there of one that was killed."""
    with held(out, "swap", fcntl.LOCK_EX):
        _settle(out)
        try:
            yield
        finally:
            _settle(out)  # whatever stopped the renaming: `out` is there


def _settle(out: Path) -> None:
    before, gone = _beside(out, "before"), _beside(out, "gone")
    if before.exists() and not os.path.lexists(out):
        before.rename(out)
        sync_directory(out.parent)
    elif before.exists():
        shutil.rmtree(gone, ignore_errors=True)
        before.rename(gone)  # so that what is put back is never half deleted
    if gone.exists():
        shutil.rmtree(gone)


def _beside(out: Path, role: str) -> Path:
    return out.parent / f".{out.name}.{role}"
