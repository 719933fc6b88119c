"""File locks: beside an output folder, and on a checkpoint that is being read.

They are kernel locks (flock), which end with their holder. Across machines the file system must
support flock. The last holder removes the lock file.
"""

from __future__ import annotations

import fcntl
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minimind.runtime import disk


@contextmanager
def held(out: Path, name: str, how: int) -> Iterator[int]:
    """Hold a lock beside `out` (LOCK_SH or LOCK_EX); yield its inheritable descriptor."""
    path = _path(out, name)
    while True:
        descriptor = _open_lock(path, out)
        try:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another command that works on {out}", file=sys.stderr)
                fcntl.flock(descriptor, how)
            if _is_still(path, descriptor):  # otherwise its last holder removed it
                try:
                    yield descriptor
                finally:
                    _remove_if_last(path, descriptor)
                return
        finally:
            os.close(descriptor)


def is_locked_by_anyone(out: Path, name: str) -> bool:
    """Whether any process holds the lock."""
    try:
        descriptor = os.open(_path(out, name), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _is_ours_alone(descriptor)
    finally:
        os.close(descriptor)


def remove_unheld(out: Path) -> None:
    """Remove the locks beside `out` that killed commands left."""
    for name in ("begin", "work", "write", "swap"):
        try:
            descriptor = _open_lock(_path(out, name), out, os.O_RDWR | PLAIN)
        except (FileNotFoundError, PermissionError):  # another user's command removes it
            continue
        except OSError as error:  # a name that is too long: errors name the output folder
            raise OSError(error.errno, error.strerror, str(out)) from error
        try:
            _remove_if_last(_path(out, name), descriptor)
        finally:
            os.close(descriptor)


def _path(out: Path, name: str) -> Path:
    return out.with_name(f".{out.name}.{name}.lock")


def _open_lock(path: Path, out: Path, how: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open the lock file; errors name the output folder instead."""
    try:
        return os.open(path, how, 0o644)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from error


def _remove_if_last(path: Path, descriptor: int) -> None:
    """Remove the lock file if no other process holds it; call while it is held."""
    if _is_ours_alone(descriptor) and _is_still(path, descriptor):
        path.unlink()


def _is_ours_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), disk.stat(path))
    except FileNotFoundError:
        return False


PLAIN = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW  # does not wait for a pipe, follows no link


class ReadLock:
    """A shared lock, held until closed or garbage-collected."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        self._closing()


def lock_for_reading(file: Path) -> ReadLock | None:
    """Lock `file`; None if it cannot be opened or the file system has no locks.

    Raise FileNotFoundError if the file is being deleted.
    """
    try:
        lock = ReadLock(os.open(file, os.O_RDONLY | PLAIN))
    except OSError:  # reported when the file is read
        return None
    try:
        fcntl.flock(lock.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileNotFoundError(str(file)) from error
    except OSError:
        return None
    if not os.path.samestat(os.fstat(lock.descriptor), disk.stat(file)):
        raise FileNotFoundError(str(file))
    return lock


@contextmanager
def locked_for_deletion(file: Path) -> Iterator[bool]:
    """Yield whether the directory of `file` may be deleted: no process reads it."""
    try:
        descriptor = os.open(file, os.O_RDWR | PLAIN)
    except OSError:  # no process can hold a lock on it
        yield True
        return
    try:
        yield _has_no_reader(descriptor)
    finally:
        os.close(descriptor)


def _has_no_reader(descriptor: int) -> bool:
    """Whether no process reads the file; true without support for locks."""
    try:
        return _is_ours_alone(descriptor)
    except OSError:
        return True
