"""A folder that a command writes for its --out: whole or not there, and never over another's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from minimind.errors import UsageError
from minimind.files import storing, sync_directory


def require_free(out: Path, force: bool, own: Sequence[str], author: str) -> None:
    """Nothing, or a UsageError where `out` is taken; with `force` only what `author` wrote goes.

    `own` are the patterns of the names it writes.
    """
    if not os.path.lexists(out):
        return
    if not force:
        raise UsageError(f"--out {out} exists; give another folder, or --force to replace it")
    if out.is_symlink() or not out.is_dir():
        raise UsageError(f"--out {out} is a file or a link, which --force does not replace")
    strangers = [p.name for p in sorted(out.iterdir()) if not any(p.match(name) for name in own)]
    if strangers:
        raise UsageError(
            f"--out {out} holds {strangers[0]!r}, which {author} did not write, and --force"
            " replaces nothing else; give another folder"
        )


@contextmanager
def written_aside(out: Path, needed: int = 0) -> Iterator[Path]:
    """A folder to write to, which gets the name `out` at the end: interrupted, it leaves nothing.

    `needed` bytes are told where the disk is full.
    """
    draft = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        with storing(str(out), "free some space, or give another --out", needed=needed):
            draft.mkdir(parents=True)
            yield draft
            sync_directory(draft)
            replace_folder(out, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def replace_folder(out: Path, draft: Path) -> None:
    """Give `draft` the name `out`; what had it goes after that, so that one of them is there."""
    before = out.with_name(f"{out.name}.tmp-{os.getpid()}-before")
    if out.exists():
        out.rename(before)
    draft.rename(out)
    sync_directory(out.parent)
    if before.exists():
        shutil.rmtree(before)
