"""The folder of --out: written aside, renamed when complete, never over foreign files."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import free_bytes, storing, sync_directory, write_durably
from minimind.runtime.locks import held, remove_unheld

REMEDY = "give another --out"
KEY_NAME = "key.json"


@dataclass(frozen=True)
class NewFolder:
    """The --out of a command, and which earlier output it may replace.

    With `force`, an empty folder, and one whose files all match the patterns `own` of `author` and
    that `is_marked` as its work; otherwise nothing.
    """

    path: Path
    force: bool
    own: tuple[str, ...]  # patterns of paths in the folder
    author: str
    is_marked: Callable[[Path], bool]

    def require_free(self) -> None:
        """Raise UsageError if the path is taken; first recover from an interrupted replace."""
        with storing(str(self.path), REMEDY):
            put_back(self.path)
            remove_unheld(self.path)
        self._require_free()

    def _require_free(self) -> None:
        out = self.path
        if not disk.lexists(out):
            return
        if not self.force:
            force = ", or --force to replace it" if self.own else ""
            raise UsageError(f"--out {out} exists; give another folder{force}")
        if disk.is_symlink(out) or not disk.is_dir(out):
            raise UsageError(
                f"--out {out} is a file or a link, which --force does not replace; give another"
                " folder"
            )
        with storing(str(out), REMEDY):
            foreign = _foreign(out, self.own)
            is_own = not any(disk.entries(out)) or (foreign is None and self.is_marked(out))
        if not is_own:
            if foreign:
                raise UsageError(
                    f"--out {out} holds {foreign!r}, which this version of {self.author} does not"
                    " write, and --force replaces nothing else; remove it if another version wrote"
                    " it, or give another folder"
                )
            raise UsageError(
                f"--out {out} was not written by {self.author}, and --force replaces nothing else;"
                " remove it, or give another folder"
            )

    @contextmanager
    def written_aside(self, needed: int = 0, key: bytes | None = None) -> Iterator[Path]:
        """Yield a draft folder that is renamed to the path at the end.

        Raise StorageError at once if there is no room for `needed` bytes. A second command waits,
        then fails. With a key the draft stays after an error, other than that of arguments or data,
        and is yielded again to the next command with the same key.
        """
        out, draft = self.path, _beside(self.path, "draft")
        remedy = REMEDY if key is None else f"{REMEDY}; {draft} is kept for the same command"
        with storing(str(out), REMEDY, needed=needed):
            if needed:
                # A draft that a killed command left is continued or deleted.
                left = sum(disk.stat(path).st_size for path in disk.files_below(draft))
                if free_bytes(out) + left < needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            out.parent.mkdir(parents=True, exist_ok=True)
            with held(out, "write", fcntl.LOCK_EX):
                self.require_free()
                mark = draft / KEY_NAME
                if key is None or not disk.exists(mark) or mark.read_bytes() != key:
                    shutil.rmtree(draft, ignore_errors=True)
                    draft.mkdir()
                try:
                    if key is not None:
                        write_durably(mark, key)
                    with storing(str(out), remedy, needed=needed):
                        yield draft
                    mark.unlink(missing_ok=True)
                    sync_directory(draft)
                    self.replace(draft)
                except BaseException as error:  # Ctrl-C, too; raised again
                    if key is None or isinstance(error, UsageError | DataError):
                        shutil.rmtree(draft, ignore_errors=True)
                    raise

    def replace(self, draft: Path) -> None:
        """Rename `draft` to the path, then delete the old folder.

        After a kill between the two renames `put_back` restores the old folder. Raise UsageError if
        the path was taken meanwhile.
        """
        with _swapping(self.path):
            self._require_free()
            if self.force and disk.exists(self.path):
                self.path.rename(_beside(self.path, "before"))
            draft.rename(self.path)
            sync_directory(self.path.parent)


def _foreign(folder: Path, own: Sequence[str]) -> str | None:
    """The path in the folder of the first entry that matches no pattern."""
    for path in sorted(disk.entries(folder)):
        inner = [rest for name, _, rest in (p.partition("/") for p in own) if name == path.name]
        foreign: str | None = path.name
        if disk.is_symlink(path):
            pass
        elif disk.is_dir(path) and any(inner):
            below = _foreign(path, inner)
            foreign = below and f"{path.name}/{below}"
        elif disk.is_file(path) and any("/" not in p and path.match(p) for p in own):
            foreign = None
        if foreign:
            return foreign
    return None


def put_back(out: Path) -> None:
    """Complete or undo an interrupted `NewFolder.replace`."""
    if any(disk.seems_there(_beside(out, role)) for role in ("before", "gone")):
        with _swapping(out):
            pass


@contextmanager
def _swapping(out: Path) -> Iterator[None]:
    """Lock renames at `out`, and clean up after interrupted ones before and after."""
    with held(out, "swap", fcntl.LOCK_EX):
        _recover(out)
        try:
            yield
        finally:
            _recover(out)  # also after an error


def _recover(out: Path) -> None:
    before, gone = _beside(out, "before"), _beside(out, "gone")
    if disk.exists(before) and not disk.lexists(out):
        before.rename(out)
        sync_directory(out.parent)
    elif disk.exists(before):
        shutil.rmtree(gone, ignore_errors=True)
        before.rename(gone)  # so that no half-deleted folder is restored
    if disk.exists(gone):
        shutil.rmtree(gone)


def _beside(out: Path, role: str) -> Path:
    return out.parent / f".{out.name}.{role}"
