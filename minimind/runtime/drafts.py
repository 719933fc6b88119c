"""Names of files that are being written, and the removal of those that killed processes left.

A name says on which machine which process writes. A file of this machine is left over if its
process is gone, or began a day after it: a process may have the number of an older one, and servers
of files have clocks of their own. That of another machine or user, whose processes may be hidden,
or of before a boot, is left over after a day.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from glob import escape
from pathlib import Path

from minimind.runtime import disk
from minimind.runtime.heartbeat import machine_id

MARK = ".tmp-"
A_DRAFT = re.compile(
    rf"(?P<name>.+){re.escape(MARK)}(?P<place>[0-9a-f]{{12}})-(?P<pid>\d+)(-(?P<more>\d+))?"
)
A_DAY = 24 * 3600.0  # seconds


@cache
def _place() -> str:
    return hashlib.sha256(f"{socket.gethostname()} {machine_id()}".encode()).hexdigest()[:12]


def draft_of(path: Path, more: str = "") -> Path:
    """The name beside `path` under which this process writes it; `more` is a number."""
    return path.with_name(f"{path.name}{MARK}{_place()}-{os.getpid()}{more and f'-{more}'}")


def remove_left(folder: Path, name: str | None = None) -> None:
    """Delete the drafts that killed processes left in a folder, or of the file `name` there.

    What cannot be deleted stays, as in a folder of others.
    """
    with suppress(OSError):
        for path in left_in(folder, name):
            if disk.is_dir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def left_in(folder: Path, name: str | None = None) -> Iterator[Path]:
    """The drafts in a folder, or of the file `name` there, that nobody writes; never links."""
    for path in disk.matching(folder, f"{'*' if name is None else escape(name)}{MARK}*"):
        with suppress(FileNotFoundError):  # its process has just renamed it
            state = disk.stat(path, follow=False)
            match = A_DRAFT.fullmatch(path.name)
            if match and not stat.S_ISLNK(state.st_mode):
                place = match["place"] if state.st_uid == os.geteuid() else ""
                if _is_left(place, int(match["pid"]), state.st_mtime):
                    yield path


def _is_left(place: str, pid: int, written: float) -> bool:
    if place != _place():
        return time.time() - written > A_DAY
    import psutil  # imported late: few folders have drafts

    try:
        process = psutil.Process(pid)
        is_zombie = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return is_zombie or process.create_time() > written + A_DAY
    except psutil.NoSuchProcess:
        return True
