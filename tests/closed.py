"""Folders that this process may not look into, also where it is root's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
VERSION_3 = 0x20080522
OVERRIDES = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what makes root see everything


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextmanager
def like_others() -> Iterator[None]:
    """This thread, and those that it starts, heed the permissions of files inside the block."""
    header, sets = _Header(VERSION_3, 0), (_Sets * 2)()
    if LIBC.capget(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capget")
    before = sets[0].effective
    sets[0].effective = before & ~OVERRIDES
    if LIBC.capset(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        sets[0].effective = before
        LIBC.capset(ctypes.byref(header), sets)


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Nobody, this thread included, may list, enter or write the folder inside the block."""
    folder.chmod(0)
    try:
        with like_others():
            yield
    finally:
        folder.chmod(0o755)
