"""Directories that are built once, by the first process, and are complete or absent."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from minimind.errors import DataError, StorageError, UsageError
from minimind.runtime.durable_files import storing, sync_directory


def build_once(
    directory: Path, build: Callable[[Path], None], remedy: str, is_resumable: bool = False
) -> None:
    """Call `build` to fill `directory` unless it exists; other processes wait meanwhile.

    A resumable build continues from what a killed one left.

    `build` fills a temporary directory that is renamed when complete, so `directory` can be used
    without a lock, also in a read-only cache. The kernel releases the lock when its process ends.
    The lock file stays: if it were removed, two processes could lock two files of one name.
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
        for leftover in directory.parent.glob(f"{directory.name}.tmp-*"):  # of a killed process
            shutil.rmtree(leftover)
        draft = Path(tempfile.mkdtemp(prefix=f"{directory.name}.tmp-", dir=directory.parent))
        draft.chmod(0o755)  # mkdtemp makes it private
    try:
        build(draft)
        sync_directory(draft)
        os.rename(draft, directory)
        sync_directory(directory.parent)
    except BaseException as error:
        # Kept after Ctrl-C and after the death of a worker, not if the same text would fail again
        # or the disk is full.
        if isinstance(error, DataError | UsageError | StorageError | OSError) or not is_resumable:
            shutil.rmtree(draft, ignore_errors=True)
        raise
