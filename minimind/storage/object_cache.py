"""The local cache of objects: paths that mirror their URLs, and what was verified of each file.

`CACHE/by-url/s3/bucket/key` is `s3://bucket/key`; `CACHE/by-url/@VERSION/s3/...` are the files of a
prepared folder. Beside each file is a hidden record of its object and of the state in which it was
verified: any write changes a size or a time of a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.errors import DataError, RunError, StorageError
from minimind.runtime.durable_files import (
    canonical_json,
    free_bytes,
    mebibytes,
    sha256_of,
    storing,
    write_whole,
)
from minimind.runtime.urls import has_credentials, masked, without_query
from minimind.storage.cache_use import CacheUse, record_path
from minimind.storage.download import RemoteObject, download
from minimind.storage.filesystem import SCHEMES
from minimind.storage.parallel import in_parallel

MIRROR = "by-url"
PLACE = rf"(?:@[0-9a-f]{{16}}/)?({'|'.join(SCHEMES)})/"  # below it
BEGINNING = re.compile(rf"^/.*?/{MIRROR}/{PLACE}", re.DOTALL)
OF_A_QUERY = re.compile(r"/q-[0-9a-f]{16}/")
REMEDY = "free some space, or give another --cache_dir"
PARALLEL = 8  # downloads
LONGEST_NAME = 200  # of a file, which gets a suffix while it is written


def path_of(url: str, folder: Path, version: str = "") -> Path:
    """Where `CACHE/by-url` has a URL, without its password; raise DataError if it cannot."""
    place, query = without_query(url)
    scheme, _, rest = place.partition("://")
    if scheme.startswith("http"):
        rest = rest.rstrip("?#")  # of an empty query
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


def named(text: str) -> str:
    """A path as records name it: one of a cache by its URL, and a URL without its query."""
    found = BEGINNING.match(text)
    if found is None:
        return masked(text)
    return OF_A_QUERY.sub("/", f"{_begin(found)}{text[found.end() :]}")


def _begin(place: re.Match[str]) -> str:
    """How the URLs below a place of the cache begin: those of files have no host."""
    return "file:///" if place[1] == "file" else f"{place[1]}://"


@contextmanager
def naming_urls(folder: Path) -> Iterator[None]:
    """Replace paths below `CACHE/by-url` in the messages of errors by their URLs."""
    places = "|".join(re.escape(str(place)) for place in {folder, folder.resolve()})
    paths = re.compile(rf"(?:{places})/{PLACE}")

    def with_urls(text: str) -> str:
        return OF_A_QUERY.sub("/", paths.sub(_begin, text)) if paths.search(text) else text

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
        targets = [self.path(one.url, version) for one in objects]
        pairs = list(zip(objects, targets, strict=True))
        with storing(f"{self.folder}: cannot be written", REMEDY):
            self.use.claim({path: one.size or 0 for one, path in pairs}, masked(what))
        missing = [pair for pair in pairs if not is_verified(*pair)]
        needed = sum(one.size or 0 for one, _ in missing)
        if missing and needed > (free := free_bytes(self.folder)):
            raise StorageError(
                f"{self.folder}: {needed:,} bytes ({mebibytes(needed)}) of {masked(what)} do not"
                f" fit in the {free:,} that are free; {REMEDY}"
            )
        with storing(f"{self.folder}: cannot be written", REMEDY):
            fetched = [size for size in _in_parallel(filesystem, missing) if size is not None]
        for target in targets:
            with suppress(OSError):  # of a cache that cannot be written
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
        targets = [self.path(one.url, version) for one in objects]
        sizes = [one.size or 0 for one in objects]
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
    folder = Path(cache_dir).expanduser().absolute() / MIRROR
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
        record, was_there = _read_record(target), target.is_file()
        if was_there and _is_of(record, remote) and sha256_of(target) == record["sha256"]:
            sha256, is_new = record["sha256"], False
        else:
            if was_there and _is_of(record, remote):
                print(f"{named(str(target))}: is damaged; fetching it again", file=sys.stderr)
            sha256, is_new = download(filesystem, remote, target, stopped=stopped), True
            if remote.modified is not None:
                os.utime(target, (remote.modified, remote.modified))
        _record(remote, target, sha256)
        return target.stat().st_size if is_new else None


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


def _record(remote: RemoteObject, target: Path, sha256: str) -> None:
    """Record that the file is verified as it is now."""
    facts = {"url": masked(remote.url), "etag": remote.etag, "size": remote.size}
    content = {**facts, "sha256": sha256, "state": _state(target)}
    write_whole(record_path(target), canonical_json(content))


def _state(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
