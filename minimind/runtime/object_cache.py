"""The local cache of objects: paths that mirror their URLs, and what was verified of each file.

`CACHE/by-url/s3/bucket/key` is `s3://bucket/key`; `CACHE/by-url/@VERSION/s3/...` are the files of a
prepared folder. Beside each file is a hidden record of its object and of the state in which it was
verified: any write changes a size or a time of a file. Objects that running commands use stay when
others are deleted within --max_cache_gib.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeVar

from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.download import RemoteObject, download
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
    under way, Ctrl-C does not: daemon threads end with the process, those of an executor delay it.
    """
    todo: SimpleQueue[Item] = SimpleQueue()
    for item in items:
        todo.put(item)
    done: SimpleQueue[Future[Result]] = SimpleQueue()
    stopped = threading.Event()
    running = [
        threading.Thread(target=_work, args=(work, todo, done, stopped), daemon=True)
        for _ in range(min(threads, len(items)))
    ]
    for thread in running:
        thread.start()
    try:
        for _ in items:
            yield done.get().result()
    except Exception:  # `work` may raise anything: the threads end before it is raised again
        stopped.set()
        for thread in running:
            thread.join()
        raise
    finally:
        stopped.set()


def _work(
    work: Callable[[Item, threading.Event], Result],
    todo: SimpleQueue[Item],
    done: SimpleQueue[Future[Result]],
    stopped: threading.Event,
) -> None:
    """Do what is left until nothing is, or one fails."""
    while not stopped.is_set():
        try:
            item = todo.get_nowait()
        except Empty:
            return
        result: Future[Result] = Future()
        try:
            result.set_result(work(item, stopped))
        except BaseException as error:  # raised by the caller's thread; here it is only printed
            result.set_exception(error)
            return
        finally:
            done.put(result)


LIST = ".use-"
GIB = 2**30


def record_path(target: Path) -> Path:
    """The record of a cached file; its mtime is the time of the last use."""
    return target.with_name(f".{target.name}.json")


class CacheUse:
    """The objects that this process uses, and at most `max_gib` of all objects of the cache."""

    def __init__(self, folder: Path, max_gib: float | None = None) -> None:
        self._folder = folder
        self._max_gib = max_gib
        self._most = None if max_gib is None else int(max_gib * GIB)
        self._sizes: dict[str, int] = {}  # sizes by path in the folder
        self._list: IO[str] | None = None

    def claim(self, sizes: Mapping[Path, int], what: str) -> None:
        """Keep files, there or still to be fetched, until `close`; make room for their bytes.

        Raise UsageError if this process alone needs more than the bound, StorageError if it does
        together with others. Drafts of processes that were killed are deleted.
        """
        if disk.exists(self._folder) and not os.access(self._folder, os.W_OK):
            return  # a cache for reading
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._all_locked() as is_locked:
            if not is_locked:
                return  # a cache for reading, too
            ours = {str(path.relative_to(self._folder)): size for path, size in sizes.items()}
            others = self._of_others()
            sizes_now = {**self._sizes, **ours}
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
        others: dict[str, int] = {}
        own = self._list and self._list.name
        for path in disk.matching(self._folder, f"{LIST}*"):
            if str(path) == own:
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

    def _require_room(self, ours: dict[str, int], others: dict[str, int], what: str) -> None:
        needed, together = sum(ours.values()), sum({**others, **ours}.values())
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
                has_record = disk.exists(record)
                if not has_record and (name.startswith(".") or A_DRAFT.fullmatch(name)):
                    continue
                with suppress(FileNotFoundError):
                    when = disk.stat(record if has_record else path).st_mtime
                    yield when, str(path.relative_to(self._folder)), disk.stat(path).st_size

    def _delete_drafts(self, folders: set[Path], used: Mapping[str, int]) -> None:
        """Delete what killed processes were fetching."""
        for folder in filter(disk.is_dir, folders):
            remove_left(folder)
            for path in disk.entries(folder):
                match = A_DRAFT.fullmatch(path.name)
                if match and match["more"]:  # a download, which claims its file
                    target = folder / match["name"].removeprefix(".")
                    if str(target.relative_to(self._folder)) not in used:
                        path.unlink(missing_ok=True)


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
                f"{masked(url)}: has a part ({name[:20]!r}) that is no file name here; rename it"
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
        targets = [self.path(remote.url, version) for remote in objects]
        pairs = list(zip(objects, targets, strict=True))
        with storing(f"{self.folder}: cannot be written", REMEDY):
            self.use.claim({path: remote.size or 0 for remote, path in pairs}, masked(what))
        missing = [pair for pair in pairs if not is_verified(*pair)]
        needed = sum(remote.size or 0 for remote, _ in missing)
        if missing and needed > (free := free_bytes(self.folder)):
            raise StorageError(
                f"{self.folder}: {needed:,} bytes ({mebibytes(needed)}) of {masked(what)} do not"
                f" fit in the {free:,} that are free; free some space, or {REMEDY}"
            )
        with storing(f"{self.folder}: cannot be written", REMEDY):
            fetched = [size for size in _in_parallel(filesystem, missing) if size is not None]
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
        targets = [self.path(remote.url, version) for remote in objects]
        sizes = [remote.size or 0 for remote in objects]
        with storing(f"{self.folder}: cannot be written", REMEDY):
            self.use.claim(dict(zip(targets, sizes, strict=True)), masked(what))
        return targets if all(map(is_verified, objects, targets)) else None

    def put(self, remote: RemoteObject, content: bytes, version: str) -> Path:
        """Write an object whose content is known; return its file."""
        target = self.path(remote.url, version)
        with storing(f"{self.folder}: cannot be written", REMEDY):
            self.use.claim({target: len(content)}, masked(remote.url))
            if not is_verified(remote, target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with _locked(target):
                    write_whole(target, content)
                    _record(remote, target, hashlib.sha256(content).hexdigest())
        return target


@contextmanager
def open_cache(cache_dir: str | Path, max_gib: float | None = None) -> Iterator[ObjectCache]:
    """The objects of a cache; those that are fetched in the block are kept until its end.

    Others are deleted, oldest first, to keep all within `max_gib`. Errors of the block name URLs.
    """
    folder = Path(cache_dir).expanduser().absolute() / CACHED
    with naming_urls(folder), closing(CacheUse(folder, max_gib)) as use:
        yield ObjectCache(folder, use)


def _in_parallel(
    filesystem: Any, pairs: Sequence[tuple[RemoteObject, Path]]
) -> Iterator[int | None]:
    from tqdm import tqdm

    def fetch(pair: tuple[RemoteObject, Path], stopped: threading.Event) -> int | None:
        return _fetch(filesystem, *pair, stopped)

    results = in_parallel(fetch, pairs, PARALLEL)
    bar = {"desc": "fetching", "unit": " objects", "leave": False}
    silent = not (pairs and sys.stderr.isatty())
    return iter(tqdm(results, total=len(pairs), disable=silent, **bar))


def _fetch(
    filesystem: Any, remote: RemoteObject, target: Path, stopped: threading.Event
) -> int | None:
    """Make `target` the object, in one process at a time; return the bytes of a download."""
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
