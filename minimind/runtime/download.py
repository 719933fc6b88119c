"""Download an object to a local file: in blocks, verified, complete or absent."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from minimind.errors import DataError
from minimind.runtime.drafts import draft_of
from minimind.runtime.filesystem import PARTIAL, WEB, Truncated, print_retry, retrying, scheme_of
from minimind.runtime.urls import masked

BLOCK_BYTES = 2**23
MOST_DOWNLOADS = 4  # downloads of one object whose content does not match
REPLACED = "was replaced while it was fetched; run the same command again"


@dataclass(frozen=True)
class RemoteObject:
    """An object as its storage lists it; `size` and `etag` may be unknown."""

    url: str
    path: str  # path in its file system
    size: int | None
    etag: str = ""  # or what the storage has in its place, see `etag_of`
    modified: float | None = None  # seconds since 1970
    sha256: str | None = None  # known from elsewhere, as from a manifest

    @property
    def is_md5(self) -> bool:
        """Whether the ETag is the MD5 of an upload in one part, unless the bucket is encrypted."""
        return re.fullmatch("[0-9a-f]{32}", self.etag) is not None


class Cancelled(Exception):
    """The object is not wanted any more."""


def download(
    filesystem: Any,
    remote: RemoteObject,
    target: Path,
    report: Callable[[str], object] = print_retry,
    stopped: threading.Event | None = None,
) -> str:
    """Write the object to `target`, which is replaced when all of it is verified.

    Return its sha256. Raise DataError if it is missing, refused, replaced meanwhile, or never
    matches its checksum, and Cancelled once `stopped` is set.
    """
    draft = draft_of(target.with_name(f".{target.name}"), str(threading.get_ident()))
    stopped = stopped or threading.Event()
    before = fault = ""
    try:
        for _ in range(MOST_DOWNLOADS):
            if scheme_of(remote.url) is WEB:  # tried again from its beginning
                sha256, md5, size = retrying(
                    remote.url,
                    lambda: _write(_body(filesystem, remote), draft, stopped),
                    report=report,
                )
            else:
                sha256, md5, size = _write(_blocks(filesystem, remote, report), draft, stopped)
            fault = _fault(filesystem, remote, sha256, md5, size, before)
            if not fault:
                os.replace(draft, target)
                return sha256
            report(f"{masked(remote.url)}: {fault}; fetching it again")
            before = sha256
    finally:
        draft.unlink(missing_ok=True)
    raise DataError(
        f"{masked(remote.url)}: {fault}, fetched {MOST_DOWNLOADS} times; upload the object again"
    )


def _write(blocks: Iterator[bytes], draft: Path, stopped: threading.Event) -> tuple[str, str, int]:
    """Write all bytes durably; return sha256, MD5 and size."""
    sha256, md5, size = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
    with open(draft, "wb") as file:
        for content in blocks:
            if stopped.is_set():
                raise Cancelled
            file.write(content)
            sha256.update(content)
            md5.update(content)
            size += len(content)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest(), md5.hexdigest(), size


def _blocks(
    filesystem: Any, remote: RemoteObject, report: Callable[[str], object]
) -> Iterator[bytes]:
    """Yield the content of an object of storage, each block tried again by itself."""
    if remote.size is None:
        yield retrying(remote.url, lambda: filesystem.cat_file(remote.path), report=report)
        return
    for start in range(0, remote.size, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, remote.size)

        def block(start: int = start, stop: int = stop) -> bytes:
            content = filesystem.cat_file(remote.path, start=start, end=stop)
            if len(content) != stop - start:
                raise Truncated(f"{len(content):,} of {stop - start:,} bytes arrived")
            return content

        yield retrying(remote.url, block, report=report)


def _body(filesystem: Any, remote: RemoteObject) -> Iterator[bytes]:
    """Yield the content of an https object: not all web servers know ranges or sizes."""
    # A compressed body has another size. A size of 1 keeps the library from asking for it again.
    headers, arrived = {"Accept-Encoding": "identity"}, 0
    with closing(filesystem.open(remote.path, block_size=0, size=1, headers=headers)) as body:
        if body.r.status == PARTIAL:
            raise Truncated("a part arrived that nobody asked for")
        while content := body.read(BLOCK_BYTES):
            arrived += len(content)
            yield content
            if remote.size is not None and arrived > remote.size:
                return  # it may have no end
    if remote.size is not None and arrived < remote.size:
        raise Truncated(f"{arrived:,} of {remote.size:,} bytes arrived")


def _fault(
    filesystem: Any, remote: RemoteObject, sha256: str, md5: str, size: int, before: str
) -> str:
    """Why what arrived is not the object; empty if it is. DataError if that was replaced."""
    if remote.sha256 is not None:
        return "" if sha256 == remote.sha256 else "does not match its sha256"
    is_whole = remote.size in (None, size)
    if is_whole and md5 == remote.etag:
        return ""
    if remote.etag:
        now = retrying(remote.url, lambda: filesystem.info(remote.path))
        if etag_of(now) != remote.etag:
            raise DataError(f"{masked(remote.url)}: {REPLACED}")
    if not is_whole:
        return f"{size:,} of {remote.size:,} bytes arrived"
    # The ETag of an encrypted object is no checksum of it: the same bytes come again.
    return "does not match its ETag" if remote.is_md5 and sha256 != before else ""


def etag_of(info: Mapping[str, Any]) -> str:
    """What changes with the content: the ETag or its like, else the time; empty without any."""
    for name in ("ETag", "etag", "md5Hash", "blob_id"):
        if info.get(name):
            return str(info[name]).strip('"')
    if (modified := modified_of(info)) is not None:
        return f"modified {modified}"
    return ""


def modified_of(info: Mapping[str, Any]) -> float | None:
    """When the object was last written, in seconds since 1970; None if that is unknown."""
    for name in ("LastModified", "Last-Modified", "updated", "mtime"):
        value = info.get(name)
        try:
            if isinstance(value, str):
                is_web = name == "Last-Modified"
                value = parsedate_to_datetime(value) if is_web else datetime.fromisoformat(value)
            if isinstance(value, datetime):
                return value.timestamp()
        except ValueError:
            continue
        if isinstance(value, int | float):
            return float(value)
    return None
