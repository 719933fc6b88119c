"""Download an object to a local file: verified, complete or absent."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from minimind.errors import DataError, RunError
from minimind.runtime import disk
from minimind.runtime.drafts import draft_of
from minimind.runtime.durable_files import sha256_of
from minimind.runtime.filesystem import AWS, WEB, Progress, Truncated, retrying, scheme_of
from minimind.runtime.urls import masked

READS = 4  # parts in which s3fs reads an object whose connection is cut
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


class Cancelled(RunError):
    """The object is not wanted any more."""


def download(
    filesystem: Any, remote: RemoteObject, target: Path, stopped: threading.Event | None = None
) -> str:
    """Write the object to `target`, which is replaced when all of it is verified.

    Return its sha256. Raise DataError if it is missing, refused, replaced meanwhile, or never
    matches its checksum, and Cancelled once `stopped` is set.
    """
    draft = draft_of(target.with_name(f".{target.name}"), str(threading.get_ident()))
    before = fault = ""
    try:
        for _ in range(MOST_DOWNLOADS):
            _fetch(filesystem, remote, draft, stopped or threading.Event())
            sha256 = sha256_of(draft)
            fault = _fault(filesystem, remote, draft, sha256, before)
            if not fault:
                os.replace(draft, target)
                return sha256
            print(f"{masked(remote.url)}: {fault}; fetching it again", file=sys.stderr)
            before = sha256
    finally:
        draft.unlink(missing_ok=True)
    raise DataError(
        f"{masked(remote.url)}: {fault}, fetched {MOST_DOWNLOADS} times; upload the object again"
    )


def _fetch(filesystem: Any, remote: RemoteObject, draft: Path, stopped: threading.Event) -> None:
    """Write all bytes of the object to `draft`, durably."""

    def require_wanted() -> None:
        if stopped.is_set():
            raise Cancelled("another object could not be fetched")

    options: dict[str, Any] = {}
    if scheme_of(remote.url) is AWS:
        # s3fs reads on after a cut, but not where it fetches parts of 50 MiB, ten at a time.
        options["max_concurrency"] = 1
        filesystem.retries = READS
    elif scheme_of(remote.url) is WEB:
        options["headers"] = {"Accept-Encoding": "identity"}  # a compressed body has another size

    progress = Progress()

    def whole() -> None:
        callback = progress.callback(require_wanted)
        filesystem.get_file(remote.path, str(draft), callback=callback, **options)
        arrived = disk.stat(draft).st_size
        if remote.size is not None and arrived < remote.size:
            raise Truncated(f"{arrived:,} of {remote.size:,} bytes arrived")

    draft.touch()  # an error of the disk is not taken for one of the storage
    retrying(remote.url, whole, progress=progress)
    with open(draft, "rb") as file:
        os.fsync(file.fileno())


def _fault(filesystem: Any, remote: RemoteObject, draft: Path, sha256: str, before: str) -> str:
    """Why what arrived is not the object; empty if it is. DataError if that was replaced."""
    if remote.sha256 is not None:
        return "" if sha256 == remote.sha256 else "does not match its sha256"
    size = disk.stat(draft).st_size
    is_whole = remote.size in (None, size)
    if is_whole and remote.is_md5:
        with open(draft, "rb") as file:
            if hashlib.file_digest(file, "md5").hexdigest() == remote.etag:
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
