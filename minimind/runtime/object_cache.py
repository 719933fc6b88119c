"""The local cache of objects: paths that mirror their URLs, and what was verified of each file.

`CACHE/by-url/s3/bucket/key` is `s3://bucket/key`; `CACHE/by-url/@VERSION/s3/...` are the files of a
prepared folder. Beside each file is a hidden record of its object and of the state in which it was
verified: any write changes a size or a time of a file. Objects that running commands use stay when
others are deleted within --max_cache_gib.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO, Any, TypeVar

from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.download import Cancelled, RemoteObject, download
from minimind.runtime.drafts import A_DRAFT, remove_left
from minimind.runtime.durable_files import (
    canonical_json,
    free_bytes,
    mebibytes,
    sha256_of,
    storing,
    write_whole,
)
from minimind.runtime.urls import (
    CACHED,
    OF_A_QUERY,
    PLACE,
    begin_of,
    has_credentials,
    masked,
    named,
    without_query,
)

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    work: Callable[[Item, threading.Event], Result], items: Sequence[Item], threads: int
) -> Generator[Result, None, None]:
    """Yield `work(item, stopped)` as each is done; raise the first error.

    `stopped` is set when the results are not wanted any more. An error waits for the work that is
    under way, Ctrl-C does not: the threads are daemons, those of an executor delay its end.
    """
    stopped = threading.Event()

    def start(item: Item) -> Result:
        if stopped.is_set():
            raise Cancelled("another one failed")
        return work(item, stopped)

    pool = ThreadPool(max(1, min(threads, len(items))))
    try:
        yield from pool.imap_unordered(start, items)
    except Exception:  # `work` may raise anything: the threads end before it is raised again
        stopped.set()
        pool.close()
        pool.join()
        raise
    finally:
        stopped.set()
        pool.terminate()


LIST = ".use-"
GIB = 2**30


def record_path(target: Path) -> Path:
    """The record of a cached file; its mtime is the time of the last use."""
    return target.with_name(f".{target.name}.json")


class CacheUse:
    """The objects that this process uses, and at most `max_gib` of all objects of the cache.

    They are in a list that is locked while the process uses them: a run whose tokens were deleted
    would end at its next checkpoint, and a preparation at the first text that is gone.
    """

    def __init__(self, folder: Path, max_gib: float | None = None) -> None:
        self._folder = folder
        self._max_gib = max_gib
        self._sizes: dict[str, int] = {}  # by path in the folder
        self._list: IO[str] | None = None

    def claim(self, sizes: Mapping[Path, int], what: str) -> None:
        """Keep files, there or still to be fetched, until `close`; make room for their bytes.

        Raise UsageError if this process alone needs more than the bound, StorageError if it does
        together with others. Drafts of processes that were killed are deleted.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self._folder, os.W_OK):
            return  # a cache for reading
        try:
            lock = open(self._folder / ".lock", "w")
        except OSError as error:
            if error.errno in FOR_READING:
                return
            raise
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ours = {str(path.relative_to(self._folder)): size for path, size in sizes.items()}
            ours, others = {**self._sizes, **ours}, self._of_others()
            self._make_room(ours, others, what)
            for folder in {path.parent for path in sizes}:
                remove_left(folder)
            self._sizes = ours
            if self._list is None:
                self._list = open(self._folder / f"{LIST}{secrets.token_hex(8)}", "w+")
                fcntl.flock(self._list, fcntl.LOCK_EX)
            self._list.seek(0)
            self._list.truncate()
            json.dump(ours, self._list)
            self._list.flush()

    def close(self) -> None:
        """End the use of all files."""
        if self._list is not None:
            with suppress(OSError):
                os.unlink(self._list.name)
            self._list.close()
            self._list = None

    def _of_others(self) -> dict[str, int]:
        """What other processes use, by path; the lists of dead ones are deleted."""
        others: dict[str, int] = {}
        for path in disk.matching(self._folder, f"{LIST}*"):
            if self._list is not None and str(path) == self._list.name:
                continue
            with suppress(FileNotFoundError), open(path) as file:
                try:  # NFS refuses an exclusive lock on what is open for reading
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    with suppress(ValueError):  # cut by a full disk, which ends that process
                        others |= json.load(file)
                else:
                    path.unlink()
        return others

    def _make_room(self, ours: dict[str, int], others: dict[str, int], what: str) -> None:
        """Delete the files that were not used for the longest time, until all fit the bound."""
        if self._max_gib is None:
            return
        most, needed, used = int(self._max_gib * GIB), sum(ours.values()), {**others, **ours}
        total = sum(used.values())
        if total > most:
            text = f"{what}: needs {needed:,} bytes ({mebibytes(needed)})"
            bound = f"more than max_cache_gib = {self._max_gib:g} ({most:,} bytes)"
            if needed > most:
                raise UsageError(
                    f"{text} of objects at once, {bound}; raise --max_cache_gib, or remove it"
                )
            raise StorageError(
                f"{text}, and with the {total - needed:,} that other commands use from"
                f" {self._folder} they are {bound}; wait for those, raise --max_cache_gib, or"
                f" {REMEDY}"
            )
        unused = [one for one in self._files() if one[1] not in used]
        total += sum(size for _, _, size in unused)
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
                has_record = disk.exists(record)
                if not has_record and (name.startswith(".") or A_DRAFT.fullmatch(name)):
                    continue
                with suppress(FileNotFoundError):
                    when = disk.stat(record if has_record else path).st_mtime
                    yield when, str(path.relative_to(self._folder)), disk.stat(path).st_size


FOR_READING = (errno.EACCES, errno.EPERM, errno.EROFS)  # errors of a cache of another user
REMEDY = "give another --cache_dir"
PARALLEL = 8  # downloads
LONGEST_NAME = 200  # characters of a file name, which gets a suffix while it is written


def path_of(url: str, folder: Path, version: str = "") -> Path:
    """Where `CACHE/by-url` has a URL, without its password; raise DataError if it cannot."""
    base, query = without_query(url)
    scheme, _, rest = base.partition("://")
    if scheme.startswith("http"):
        rest = rest.rstrip("?#")  # an empty query
        rest = rest.rpartition("@")[2] if has_credentials(url) else rest
    if query:  # may have a signature, and may choose the file
        above, _, name = rest.rpartition("/")
        rest = (
            f"{above}/q-{hashlib.sha256(query.removeprefix('?').encode()).hexdigest()[:16]}/{name}"
        )
    names = rest.strip("/").split("/")
    for name in names:
        if name in ("", ".", "..") or "\0" in name or len(name.encode()) > LONGEST_NAME:
            raise DataError(
                f"{masked(url)}: has a part ({name[:20]!r}) that is not a file name here; rename it"
            )
    return folder.joinpath(*([f"@{version}"] if version else []), scheme, *names)


@contextmanager
def naming_urls(folder: Path) -> Iterator[None]:
    """Replace paths below `CACHE/by-url` in the messages of errors by their URLs."""
    places = "|".join(re.escape(str(place)) for place in {folder, disk.resolve(folder)})
    paths = re.compile(rf"(?:{places})/{PLACE}")

    def with_urls(text: str) -> str:
        return OF_A_QUERY.sub("/", paths.sub(begin_of, text)) if paths.search(text) else text

    try:
        yield
    except RunError as error:
        if (message := with_urls(str(error))) == str(error):
            raise
        table = [with_urls(line) for line in error.table]
        raise type(error)(message, error.cause_rank, table) from error


@dataclass(frozen=True)
class ObjectCache:
    """`CACHE/by-url`, and what the process has taken from it; see `open_cache`."""

    folder: Path
    use: CacheUse

    def path(self, url: str, version: str = "") -> Path:
        """Where the cache has a URL."""
        return path_of(url, self.folder, version)

    def fetch(
        self, filesystem: Any, objects: Sequence[RemoteObject], what: str, version: str = ""
    ) -> list[Path]:
        """Return the verified local files of objects; missing and changed ones are fetched."""
        from tqdm import tqdm

        targets = self._claim(objects, what, version)
        pairs = zip(objects, targets, strict=True)
        missing = [pair for pair in pairs if not is_verified(*pair)]
        needed = sum(remote.size or 0 for remote, _ in missing)
        if missing and needed > (free := free_bytes(self.folder)):
            raise StorageError(
                f"{self.folder}: {needed:,} bytes ({mebibytes(needed)}) of {masked(what)} do not"
                f" fit in the {free:,} that are free; free some space, or {REMEDY}"
            )
        results = in_parallel(partial(_fetch, filesystem), missing, PARALLEL)
        bar = {"desc": "fetching", "unit": " objects", "leave": False, "total": len(missing)}
        with storing(f"{self.folder}: cannot be written", REMEDY):
            shown = tqdm(results, disable=not (missing and sys.stderr.isatty()), **bar)
            fetched = [size for size in shown if size is not None]
        for target in targets:
            with suppress(OSError):  # the cache may not be writable
                os.utime(record_path(target))
        if fetched:
            many = f"{len(fetched)} object{'s' if len(fetched) > 1 else ''}"
            size = mebibytes(sum(fetched))
            print(f"fetched {many} of {masked(what)}, {size}", file=sys.stderr)
        return targets

    def known(
        self, objects: Sequence[RemoteObject], what: str, version: str = ""
    ) -> list[Path] | None:
        """The local files of objects without a look at the storage; None unless all are there."""
        targets = self._claim(objects, what, version)
        return targets if all(map(is_verified, objects, targets)) else None

    def put(self, remote: RemoteObject, content: bytes, version: str) -> Path:
        """Write an object whose content is known; return its file."""
        (target,) = self._claim([remote], remote.url, version)
        with storing(f"{self.folder}: cannot be written", REMEDY):
            if not is_verified(remote, target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with _locked(target):
                    write_whole(target, content)
                    _record(remote, target, hashlib.sha256(content).hexdigest())
        return target

    def _claim(self, objects: Sequence[RemoteObject], what: str, version: str) -> list[Path]:
        """The local paths of objects, which are kept from now on."""
        targets = [self.path(remote.url, version) for remote in objects]
        sizes = (remote.size or 0 for remote in objects)
        with storing(f"{self.folder}: cannot be written", REMEDY):
            self.use.claim(dict(zip(targets, sizes, strict=True)), masked(what))
        return targets


@contextmanager
def open_cache(cache_dir: str | Path, max_gib: float | None = None) -> Iterator[ObjectCache]:
    """The objects of a cache; those that are fetched in the block are kept until its end.

    Others are deleted, oldest first, to keep all within `max_gib`. Errors of the block name URLs.
    """
    folder = Path(cache_dir).expanduser().absolute() / CACHED
    with naming_urls(folder), closing(CacheUse(folder, max_gib)) as use:
        yield ObjectCache(folder, use)


def _fetch(
    filesystem: Any, pair: tuple[RemoteObject, Path], stopped: threading.Event
) -> int | None:
    """Make the file the object, in one process at a time; return the bytes of a download."""
    remote, target = pair
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if is_verified(remote, target):
            return None
        record, was_there = _read_record(target), disk.is_file(target)
        if was_there and _is_of(record, remote) and sha256_of(target) == record["sha256"]:
            sha256, is_new = record["sha256"], False
        else:
            if was_there and _is_of(record, remote):
                print(f"{named(str(target))}: is damaged; fetching it again", file=sys.stderr)
            sha256, is_new = download(filesystem, remote, target, stopped=stopped), True
            if remote.modified is not None:
                os.utime(target, (remote.modified, remote.modified))
        _record(remote, target, sha256)
        return disk.stat(target).st_size if is_new else None


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_verified(remote: RemoteObject, target: Path) -> bool:
    """Whether the file is the object and unchanged since it was verified."""
    record = _read_record(target)
    if not _is_of(record, remote):
        return False
    try:
        return record["state"] == _state(target)
    except OSError:
        return False


def _is_of(record: dict[str, Any], remote: RemoteObject) -> bool:
    if remote.sha256 is not None:
        return record.get("sha256") == remote.sha256
    known = (record.get("etag"), record.get("size")) == (remote.etag, remote.size)
    return known and "sha256" in record


def _read_record(target: Path) -> dict[str, Any]:
    try:
        record = json.loads(record_path(target).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def fetched_sha256(target: Path) -> str | None:
    """The sha256 of a file when it was fetched into the cache; None for any other file."""
    record = _read_record(target)
    return record.get("sha256") if "state" in record else None


def _record(remote: RemoteObject, target: Path, sha256: str) -> None:
    """Record that the file is verified as it is now."""
    facts = {"url": masked(remote.url), "etag": remote.etag, "size": remote.size}
    content = {**facts, "sha256": sha256, "state": _state(target)}
    write_whole(record_path(target), canonical_json(content))


def _state(path: Path) -> list[int]:
    state = disk.stat(path)
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
