"""The local cache of objects: paths that mirror their URLs, and what was verified of each file.

`CACHE/by-url/s3/bucket/key` is `s3://bucket/key`. Beside each file is a hidden record of its
object and of the state in which it was verified: any write changes a size or a time of a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from minimind.errors import DataError, RunError, StorageError
from minimind.runtime.durable_files import (
    canonical_json,
    free_bytes,
    mebibytes,
    sha256_of,
    storing,
    write_whole,
)
from minimind.storage.download import RemoteObject, download
from minimind.storage.filesystem import SCHEMES, masked

MIRROR = "by-url"
MIRRORED = re.compile(rf"[^\s'\"=]*/{MIRROR}/({'|'.join(SCHEMES)})/")
REMEDY = "free some space, or give another --cache_dir"
PARALLEL = 8  # downloads
LONGEST_NAME = 200  # of a file, which gets a suffix while it is written


def path_of(url: str, cache_dir: Path) -> Path:
    """Where the cache has a URL, without its user and password; raise DataError if it cannot."""
    parts = urlsplit(url) if url.startswith("http") else None
    scheme, _, rest = url.partition("://")
    if parts is not None:
        rest = f"{parts.netloc.rpartition('@')[2]}{parts.path}"
        if parts.query:  # may have a signature, and may choose the file
            folder, _, name = rest.rpartition("/")
            rest = f"{folder}/q-{hashlib.sha256(parts.query.encode()).hexdigest()[:16]}/{name}"
    names = rest.strip("/").split("/")
    for name in names:
        if name in ("", ".", "..") or "\0" in name or len(name.encode()) > LONGEST_NAME:
            raise DataError(
                f"{masked(url)}: has a part ({name[:20]!r}) that is no file name here; rename it"
            )
    return cache_dir.expanduser().absolute().joinpath(MIRROR, scheme, *names)


def with_urls(text: str) -> str:
    """`text` with paths of the cache replaced by their URLs."""
    return MIRRORED.sub(r"\1://", text)


@contextmanager
def naming_urls() -> Iterator[None]:
    """Replace paths of the cache in the messages of errors by their URLs."""
    try:
        yield
    except RunError as error:
        if (message := with_urls(str(error))) == str(error):
            raise
        table = [with_urls(line) for line in error.table]
        raise type(error)(message, error.cause_rank, table) from error


def fetch_all(
    filesystem: Any, objects: Sequence[RemoteObject], cache_dir: Path, what: str
) -> list[Path]:
    """Return the verified local files of objects; those that are missing or changed are fetched."""
    targets = [path_of(one.url, cache_dir) for one in objects]
    pairs = list(zip(objects, targets, strict=True))
    missing = [pair for pair in pairs if not is_verified(*pair)]
    if not missing:
        return targets
    needed = sum(one.size or 0 for one, _ in missing)
    if needed > (free := free_bytes(cache_dir.expanduser())):
        raise StorageError(
            f"{cache_dir}: {needed:,} bytes ({mebibytes(needed)}) of {masked(what)} do not fit in"
            f" the {free:,} that are free; {REMEDY}"
        )
    with storing(f"{cache_dir}: cannot be written", REMEDY):
        fetched = sum(_in_parallel(filesystem, missing))
    if fetched:
        print(f"fetched {fetched} objects of {masked(what)}, {mebibytes(needed)}", file=sys.stderr)
    return targets


def _in_parallel(filesystem: Any, pairs: Iterable[tuple[RemoteObject, Path]]) -> list[bool]:
    from tqdm import tqdm

    pool = ThreadPoolExecutor(PARALLEL, "fetch")
    try:
        running = [pool.submit(_fetch, filesystem, *pair) for pair in pairs]
        bar = {"desc": "fetching", "unit": " objects", "leave": False}
        return [one.result() for one in tqdm(running, **bar, disable=not sys.stderr.isatty())]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _fetch(filesystem: Any, remote: RemoteObject, target: Path) -> bool:
    """Make `target` the object, in one process at a time; return whether it was downloaded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_verified(remote, target):
            return False
        record, was_there = _record(target), target.is_file()
        if was_there and _is_of(record, remote) and sha256_of(target) == record["sha256"]:
            sha256, is_new = record["sha256"], False
        else:
            if was_there and _is_of(record, remote):
                print(f"{target}: is damaged; fetching it again", file=sys.stderr)
            sha256, is_new = download(filesystem, remote, target), True
            if remote.modified is not None:
                os.utime(target, (remote.modified, remote.modified))
        facts = {"url": masked(remote.url), "etag": remote.etag, "size": remote.size}
        content = {**facts, "sha256": sha256, "state": _state(target)}
        write_whole(_record_path(target), canonical_json(content))
        return is_new


def is_verified(remote: RemoteObject, target: Path) -> bool:
    """Whether the file is the object and unchanged since it was verified."""
    record = _record(target)
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


def _record(target: Path) -> dict[str, Any]:
    try:
        record = json.loads(_record_path(target).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _record_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.json")


def _state(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
