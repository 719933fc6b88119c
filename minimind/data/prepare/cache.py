"""Directories that are built once, by whichever process comes first, and are whole or not there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from minimind.errors import RunError
from minimind.runtime.durable_files import storing, sync_directory


def build_once(
    directory: Path, build: Callable[[Path], None], remedy: str, is_resumable: bool = False
) -> None:
    """Have `build` fill `directory`, unless it is there; others wait for the one that builds.

    What is left of a build that was killed is taken up again by one that `is_resumable`.

    It works in a temporary directory beside, renamed when it is done, so what has its name is
    complete, and can be used without a lock (from a read-only cache, too). The lock is the
    kernel's: it goes with the process that held it. Its file stays, for removing it would let two
    processes hold locks on two files of one name.
    """
    if directory.is_dir():
        return
    with storing(f"{directory}: cannot be written", remedy):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(directory.with_name(f"{directory.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.is_dir():
                _build(directory, build, is_resumable)


def _build(directory: Path, build: Callable[[Path], None], is_resumable: bool) -> None:
    if is_resumable:
        draft = directory.with_name(f"{directory.name}.part")
        draft.mkdir(exist_ok=True)
    else:
        for leftover in directory.parent.glob(f"{directory.name}.tmp-*"):  # its builder is dead
            shutil.rmtree(leftover)
        draft = Path(tempfile.mkdtemp(prefix=f"{directory.name}.tmp-", dir=directory.parent))
        draft.chmod(0o755)  # mkdtemp hides it from everybody else
    try:
        build(draft)
        sync_directory(draft)
        os.rename(draft, directory)
        sync_directory(directory.parent)
    except BaseException as error:  # also a Ctrl-C, which only a resumable draft outlives
        if isinstance(error, RunError | OSError) or not is_resumable:
            shutil.rmtree(draft, ignore_errors=True)
        raise
