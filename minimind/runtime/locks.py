"""Locks beside a folder that several jobs fill: one of them begins, any number work.

They are the kernel's and end with their holder, however that ends. On several machines the file
system must carry flock between them. Whoever holds one last removes its file.
"""

from __future__ import annotations

import fcntl
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(out: Path, name: str, how: int) -> Iterator[int]:
    """A lock beside `out`, LOCK_SH or LOCK_EX, as an open file that other processes may inherit."""
    path = _path(out, name)
    while True:
        descriptor = _opened(path, out)
        try:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another command that works on {out}", file=sys.stderr)
                fcntl.flock(descriptor, how)
            if _is_still(path, descriptor):  # or who held it has removed it
                try:
                    yield descriptor
                finally:
                    _remove_if_last(path, descriptor)
                return
        finally:
            os.close(descriptor)


def is_held(out: Path, name: str) -> bool:
    """Whether anybody holds the lock now."""
    try:
        descriptor = os.open(_path(out, name), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _is_ours_alone(descriptor)
    finally:
        os.close(descriptor)


def _path(out: Path, name: str) -> Path:
    return out.with_name(f".{out.name}.{name}.lock")


def _opened(path: Path, out: Path) -> int:
    """An error names the folder that was asked for, not a file of ours."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from error


def _remove_if_last(path: Path, descriptor: int) -> None:
    """While it is held: after that it may be another's."""
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
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


PLAIN = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW  # does not wait for a pipe, follows no link


class ReadLock:
    """A shared lock, held until it is closed or garbage-collected."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Release the lock."""
        self._closing()


def lock_for_reading(file: Path) -> ReadLock | None:
    """A lock on `file`; None where it cannot be opened, or its file system has no locks.

    A FileNotFoundError where the file is deleted meanwhile, or about to be.
    """
    try:
        lock = ReadLock(os.open(file, os.O_RDONLY | PLAIN))
    except OSError:  # whoever reads the file says what is wrong with it
        return None
    try:
        fcntl.flock(lock.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileNotFoundError(str(file)) from error
    except OSError:
        return None
    if not os.path.samestat(os.fstat(lock.descriptor), file.stat()):
        raise FileNotFoundError(str(file))
    return lock


@contextmanager
def locked_for_deletion(file: Path) -> Iterator[bool]:
    """Whether the directory of `file` may be deleted inside: nobody reads it."""
    try:
        descriptor = os.open(file, os.O_RDWR | PLAIN)
    except OSError:  # nobody can hold a lock on it, or the deletion fails for the same reason
        yield True
        return
    try:
        yield _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Whether no reader is there; true where there are no locks at all."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # without locks there is no reader to wait for
    return True
