"""A folder that a command writes for its --out: whole or not there, and never over another's."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minimind.errors import UsageError
from minimind.runtime.durable_files import storing, sync_directory
from minimind.runtime.locks import held

MEND = "free some space, or give another --out"


@dataclass(frozen=True)
class NewFolder:
    """The --out of a command, and what of an earlier one it may replace.

    With `force` what `author` wrote, which has no names but such as the patterns `own`; else
    nothing, also nothing that appears while the command works.
    """

    path: Path
    force: bool
    own: tuple[str, ...]
    author: str

    def require_free(self) -> None:
        """Nothing, or a UsageError where it is taken; what a kill left of one is put right."""
        with storing(str(self.path), MEND):
            put_back(self.path)
        self._require_free()

    def _require_free(self) -> None:
        out = self.path
        if not os.path.lexists(out):
            return
        if not self.force:
            raise UsageError(f"--out {out} exists; give another folder, or --force to replace it")
        if out.is_symlink() or not out.is_dir():
            raise UsageError(
                f"--out {out} is a file or a link, which --force does not replace; give another"
                " folder"
            )
        with storing(str(out), MEND):
            there = sorted(out.iterdir())
        strangers = [path.name for path in there if not any(map(path.match, self.own))]
        if strangers:
            raise UsageError(
                f"--out {out} holds {strangers[0]!r}, which {self.author} did not write, and"
                " --force replaces nothing else; give another folder"
            )

    @contextmanager
    def written_aside(self, needed: int = 0) -> Iterator[Path]:
        """A folder to write to, which gets the name at the end: interrupted, it leaves nothing.

        `needed` bytes are told where the disk is full. Who comes second waits, and finds it taken.
        """
        out, draft = self.path, _beside(self.path, "draft")
        with storing(str(out), MEND, needed=needed):
            out.parent.mkdir(parents=True, exist_ok=True)
            with held(out, "write", fcntl.LOCK_EX):
                self.require_free()
                try:
                    shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
                    draft.mkdir()
                    yield draft
                    sync_directory(draft)
                    self.replace(draft)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)

    def replace(self, draft: Path) -> None:
        """Give `draft` the name; what had it goes after that, so that one of them is there.

        A kill between the two renames leaves the old one under another name, for `put_back` to
        find. A UsageError where the name was taken since it was asked for.
        """
        with _swapping(self.path):
            self._require_free()
            if self.force and self.path.exists():
                self.path.rename(_beside(self.path, "before"))
            draft.rename(self.path)
            sync_directory(self.path.parent)


def put_back(out: Path) -> None:
    """`out` is the new folder or the old one, alone, even if a `NewFolder.replace` was killed."""
    if any(os.path.exists(_beside(out, role)) for role in ("before", "gone")):
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
