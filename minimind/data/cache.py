"""Directories that are built once, by whichever process comes first, and are whole or not there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from minimind.files import storing, sync_directory


def build_once(directory: Path, build: Callable[[Path], None]) -> None:
    """Have `build` fill `directory`, unless it is there; others wait for the one that builds.

    It works in a temporary directory beside, renamed when it is done, so what has its name is
    complete, and can be used without a lock (from a read-only cache, too). The lock is the
    kernel's: it goes with the process that held it. Its file stays, for removing it would let two
    processes hold locks on two files of one name.
    """
    if directory.is_dir():
        return
    with storing(f"{directory}: cannot be written", "free space or give another --cache_dir"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(directory.with_name(f"{directory.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.is_dir():
                _build(directory, build)


def _build(directory: Path, build: Callable[[Path], None]) -> None:
    for leftover in directory.parent.glob(f"{directory.name}.tmp-*"):  # its builder is dead
        shutil.rmtree(leftover)
    draft = Path(tempfile.mkdtemp(prefix=f"{directory.name}.tmp-", dir=directory.parent))
    try:
        draft.chmod(0o755)  # mkdtemp hides it from everybody else
        build(draft)
        sync_directory(draft)
        os.rename(draft, directory)
        sync_directory(directory.parent)
    except BaseException:  # a Ctrl-C too must leave no draft behind
        shutil.rmtree(draft, ignore_errors=True)
        raise
