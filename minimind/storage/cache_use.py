"""Which objects of the cache are in use, and the deletion of others within a bound.

A process lists what it uses in `CACHE/by-url/.use-RANDOM`, on which it holds a lock (flock), so
that its death ends the use. All lists are read and written under one lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from minimind.errors import StorageError, UsageError
from minimind.runtime.durable_files import mebibytes
from minimind.storage.download import DRAFT

LIST = ".use-"
A_WHOLE_DRAFT = re.compile(r".+\.tmp-\d+")  # of `write_whole`
A_DRAFT = re.compile(rf"\.(.+){re.escape(DRAFT)}\d+-\d+")  # by process and thread
GIB = 2**30


def record_path(target: Path) -> Path:
    """The record of a cached file; its time is that of the last use."""
    return target.with_name(f".{target.name}.json")


class CacheUse:
    """The objects that this process uses, and at most `max_gib` of all objects of the cache."""

    def __init__(self, folder: Path, max_gib: float | None = None) -> None:
        self._folder = folder
        self._max_gib = max_gib
        self._most = None if max_gib is None else int(max_gib * GIB)
        self._sizes: dict[str, int] = {}  # by path in the folder
        self._list: IO[str] | None = None

    def claim(self, sizes: Mapping[Path, int], what: str) -> None:
        """Keep files, there or still to be fetched, until `close`; make room for their bytes.

        Raise UsageError if this process alone needs more than the bound, StorageError if it does
        together with others. Drafts of processes that were killed are deleted.
        """
        if self._folder.exists() and not os.access(self._folder, os.W_OK):
            return  # a cache for reading
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._all_locked() as is_locked:
            if not is_locked:
                return  # as well
            own = {str(path.relative_to(self._folder)): size for path, size in sizes.items()}
            others = self._of_others()
            sizes_now = {**self._sizes, **own}
            self._require_room(sizes_now, others, what)
            self._delete_drafts({path.parent for path in sizes}, others)
            self._sizes = sizes_now
            self._write_list()
            if self._most is not None:
                self._make_room(self._most, {**others, **sizes_now})

    def close(self) -> None:
        """End the use of all files."""
        if self._list is not None:
            with suppress(OSError):
                os.unlink(self._list.name)
            self._list.close()
            self._list = None

    @contextmanager
    def _all_locked(self) -> Iterator[bool]:
        """Hold the lock of all lists; yield False if it is another user's."""
        try:
            lock = open(self._folder / ".lock", "w")
        except PermissionError:
            yield False
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield True

    def _write_list(self) -> None:
        if self._list is None:
            path = self._folder / f"{LIST}{secrets.token_hex(8)}"
            self._list = open(path, "w+")
            fcntl.flock(self._list, fcntl.LOCK_EX)
        self._list.seek(0)
        self._list.truncate()
        json.dump(self._sizes, self._list)
        self._list.flush()

    def _of_others(self) -> dict[str, int]:
        """What other processes use, by path; the lists of dead ones are deleted."""
        found: dict[str, int] = {}
        own = self._list and self._list.name
        for path in self._folder.glob(f"{LIST}*"):
            if str(path) == own:
                continue
            with suppress(FileNotFoundError), open(path) as file:
                try:  # NFS refuses an exclusive lock on what is open for reading
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    with suppress(ValueError):  # cut by a full disk, which ends that process
                        found |= json.load(file)
                else:
                    path.unlink()
        return found

    def _require_room(self, own: dict[str, int], others: dict[str, int], what: str) -> None:
        needed, together = sum(own.values()), sum({**others, **own}.values())
        if self._most is None or together <= self._most:
            return
        bound = f"max_cache_gib = {self._max_gib:g} ({self._most:,} bytes)"
        if needed > self._most:
            raise UsageError(
                f"{what}: needs {needed:,} bytes ({mebibytes(needed)}) of objects at once, more"
                f" than {bound}; raise --max_cache_gib, or drop it"
            )
        raise StorageError(
            f"{what}: needs {needed:,} bytes ({mebibytes(needed)}), and with the"
            f" {together - needed:,} that other commands use from {self._folder} they are more than"
            f" {bound}; wait for those, raise --max_cache_gib, or give another --cache_dir"
        )

    def _make_room(self, most: int, used: dict[str, int]) -> None:
        """Delete the files that were not used for the longest time, until all fit."""
        unused = [one for one in self._files() if one[1] not in used]
        total = sum(used.values()) + sum(size for _, _, size in unused)
        for _, name, size in sorted(unused):
            if total <= most:
                return
            path = self._folder / name
            for one in (record_path(path), path, path.with_name(f".{path.name}.lock")):
                one.unlink(missing_ok=True)
            total -= size  # folders stay: another process may be about to write there

    def _files(self) -> Iterator[tuple[float, str, int]]:
        """Time of the last use, path and bytes of every object.

        The time of one without a record, whose process was killed before it, is its own.
        """
        for folder, _, names in os.walk(self._folder):
            if Path(folder) == self._folder:  # listings
                continue
            for name in names:
                path = Path(folder, name)
                record = record_path(path)
                has_record = record.exists()
                if not has_record and (name.startswith(".") or A_WHOLE_DRAFT.fullmatch(name)):
                    continue
                with suppress(FileNotFoundError):
                    when = (record if has_record else path).stat().st_mtime
                    yield when, str(path.relative_to(self._folder)), path.stat().st_size

    def _delete_drafts(self, folders: set[Path], used: Mapping[str, int]) -> None:
        """Delete what killed processes were fetching."""
        for folder in filter(Path.is_dir, folders):
            for path in folder.iterdir():
                if found := A_DRAFT.fullmatch(path.name):
                    target = folder / found[1]
                    if str(target.relative_to(self._folder)) not in used:
                        path.unlink(missing_ok=True)
