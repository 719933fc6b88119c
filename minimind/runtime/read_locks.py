"""Locks that keep a directory from being deleted while somebody reads it.

A reader holds a shared flock on a file inside. It needs no right to write, leaves nothing behind
and ends with its holder. Where a file system has no locks there is none: a reader must then expect
that the directory disappears.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
