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
from minimind.runtime import disk
from minimind.runtime.drafts import draft_of
from minimind.runtime.filesystem import (
    AWS,
    PARTIAL,
    WEB,
    Truncated,
    print_retry,
    retrying,
    scheme_of,
)
from minimind.runtime.urls import masked

BLOCK_BYTES = 2**23
MOST_DOWNLOADS = 4  # downloads of one object whose content does not match
MODIFIED = "modified "  # begins what stands for an ETag
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
    def is_of_parts(self) -> bool:
        """Whether the ETag is that of an upload in parts."""
        return re.fullmatch(r"[0-9a-f]{32}-\d+", self.etag) is not None

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
            sha256, md5, size = _write(_blocks(filesystem, remote, report), draft, stopped)
            checksum = _md5_of_parts(filesystem, remote, draft) or md5
            fault = _fault(filesystem, remote, sha256, checksum, size, before)
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
    """Yield the content, each block tried again by itself."""
    if scheme_of(remote.url) is WEB:
        stream = _Stream(filesystem, remote)
        with closing(stream):
            while content := retrying(remote.url, stream.read, report=report):
                yield content
        return
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


class _Stream:
    """The body of an https object, from any web server: not all of them know ranges or sizes."""

    def __init__(self, filesystem: Any, remote: RemoteObject) -> None:
        self._filesystem = filesystem
        self._remote = remote
        self._body: Any = None
        self._at = 0  # bytes that were read
        self._sha256 = hashlib.sha256()  # digest of these bytes
        # A range after the end is an error, and one of another version would go unnoticed.
        self._has_ranges = bool(remote.etag) and remote.size is not None

    def read(self) -> bytes:
        """The next bytes, empty at the end; after an error, they are asked for again."""
        size = self._remote.size
        try:
            if self._body is None:
                if 0 < self._at == size:
                    return b""  # cut after the last byte
                self._body = self._opened()
            if size is not None and self._at > size:
                return b""  # it may have no end
            content = self._body.read(BLOCK_BYTES)
            if not content and size is not None and self._at < size:
                raise Truncated(f"{self._at:,} of {size:,} bytes arrived")
        except Exception:  # raised again; the next attempt opens the object anew
            self.close()
            raise
        self._at += len(content)
        self._sha256.update(content)
        return content

    def _opened(self) -> Any:
        """The body of what is missing, or of all, from which what arrived before is read."""
        # A compressed body has no ranges, and another size.
        headers, start = {"Accept-Encoding": "identity"}, 0
        if self._at and self._has_ranges:
            start = self._at
            headers |= {"Range": f"bytes={start}-", **self._if_unchanged()}
        # A size of 1 keeps the library from asking for it again.
        body = self._filesystem.open(self._remote.path, block_size=0, size=1, headers=headers)
        self._body = body  # closed after an error
        if body.r.status != PARTIAL:
            start = 0
        elif not self._is_all_from(start, body.r.headers):
            self._has_ranges = False
            came = body.r.headers.get("Content-Range", "an unknown part")
            raise Truncated(f"{came} came instead of all bytes from {start} on")
        if not start:
            self._pass_over(self._at)
        return body

    def _is_all_from(self, start: int, headers: Mapping[str, str]) -> bool:
        """Whether a part is, by its headers, all bytes of the object from `start` on."""
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", headers.get("Content-Range", ""))
        is_encoded = headers.get("Content-Encoding", "identity") != "identity"
        if span is None or is_encoded or headers.get("Content-Type", "").startswith("multipart/"):
            return False
        first, stop, size = int(span[1]), int(span[2]) + 1, int(span[3])
        is_rest = first == start and stop == size and self._remote.size in (None, size)
        length = headers.get("Content-Length", "")
        is_rest = is_rest and (not length.isdecimal() or int(length) == stop - start)
        is_same = not start or etag_of(headers) == self._remote.etag
        return is_rest and is_same and modified_of(headers) in (None, self._remote.modified)

    def _pass_over(self, left: int) -> None:
        """Read what arrived before, and is sent again, from the beginning; it must be the same."""
        again = hashlib.sha256()
        while left:
            content = self._body.read(min(left, BLOCK_BYTES))
            if not content:
                raise Truncated(f"{self._at - left:,} of {self._at:,} bytes arrived again")
            again.update(content)
            left -= len(content)
        if again.digest() != self._sha256.digest():
            raise DataError(f"{masked(self._remote.url)}: {REPLACED}")

    def _if_unchanged(self) -> dict[str, str]:
        is_strong = self._remote.etag and not self._remote.etag.startswith(("W/", MODIFIED))
        return {"If-Range": f'"{self._remote.etag}"'} if is_strong else {}

    def close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()


def _fault(
    filesystem: Any, remote: RemoteObject, sha256: str, checksum: str, size: int, before: str
) -> str:
    """Why what arrived is not the object; empty if it is. DataError if that was replaced."""
    if remote.sha256 is not None:
        return "" if sha256 == remote.sha256 else "does not match its sha256"
    is_whole = remote.size in (None, size)
    if is_whole and checksum == remote.etag:
        return ""
    if remote.etag:
        now = retrying(remote.url, lambda: filesystem.info(remote.path))
        if etag_of(now) != remote.etag:
            raise DataError(f"{masked(remote.url)}: {REPLACED}")
    if not is_whole:
        return f"{size:,} of {remote.size:,} bytes arrived"
    # The ETag of an encrypted object, or of one in parts of unknown sizes, is no checksum of it.
    is_known = remote.is_md5 or (remote.is_of_parts and "-" in checksum)
    return "does not match its ETag" if is_known and sha256 != before else ""


def _md5_of_parts(filesystem: Any, remote: RemoteObject, file: Path) -> str:
    """The ETag that S3 gives to a file uploaded in parts; empty if their size is not known."""
    if scheme_of(remote.url) is not AWS or remote.sha256 is not None or not remote.is_of_parts:
        return ""

    def first_part() -> dict[str, Any]:
        bucket, key, _ = filesystem.split_path(remote.path)
        return filesystem.call_s3("head_object", Bucket=bucket, Key=key, PartNumber=1)

    try:
        answer = retrying(remote.url, first_part)
    except DataError:  # a storage without this request
        return ""
    by_kms = answer.get("ServerSideEncryption", "").startswith("aws:kms")
    if by_kms or answer.get("SSECustomerAlgorithm"):  # the ETag is no checksum
        return ""
    number, size = int(remote.etag.partition("-")[2]), answer["ContentLength"]
    is_even = (number - 1) * size < disk.stat(file).st_size <= number * size
    return etag_of_parts(file, size) if is_even else ""


def etag_of_parts(file: Path, size: int) -> str:
    """The ETag that S3 gives to a file that is uploaded in parts of `size` bytes."""
    digests = []
    with open(file, "rb") as content:
        for start in range(0, disk.stat(file).st_size, size):
            digest, stop = hashlib.md5(usedforsecurity=False), start + size
            while block := content.read(min(BLOCK_BYTES, stop - content.tell())):
                digest.update(block)
            digests.append(digest.digest())
    joined = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{joined}-{len(digests)}"


def etag_of(info: Mapping[str, Any]) -> str:
    """What changes with the content: the ETag or its like, else the time; empty without any."""
    for name in ("ETag", "etag", "md5Hash", "blob_id"):
        if info.get(name):
            return str(info[name]).strip('"')
    if (modified := modified_of(info)) is not None:
        return f"{MODIFIED}{modified}"
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
