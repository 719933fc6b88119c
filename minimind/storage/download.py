"""Download an object to a local file: in blocks, verified, complete or absent."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.errors import DataError
from minimind.storage.filesystem import (
    AWS,
    WEB,
    Truncated,
    masked,
    print_retry,
    retrying,
    scheme_of,
)

BLOCK_BYTES = 2**23
MOST_DOWNLOADS = 4  # of one object whose content does not match


@dataclass(frozen=True)
class RemoteObject:
    """An object as its storage lists it; `size` and `etag` may be unknown."""

    url: str
    path: str  # in its file system
    size: int | None
    etag: str = ""
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


def download(
    filesystem: Any,
    remote: RemoteObject,
    target: Path,
    report: Callable[[str], object] = print_retry,
) -> str:
    """Write the object to `target`, which is replaced when all of it is verified.

    Return its sha256. Raise DataError if it is missing, refused, or never matches its checksum.
    """
    draft = target.with_name(f".{target.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    before = fault = ""
    try:
        for _ in range(MOST_DOWNLOADS):
            sha256, md5, size = _write(filesystem, remote, draft, report)
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


def _write(
    filesystem: Any, remote: RemoteObject, draft: Path, report: Callable[[str], object]
) -> tuple[str, str, int]:
    """Write all bytes durably; return sha256, MD5 and size."""
    sha256, md5, size = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
    with open(draft, "wb") as file:
        for content in _blocks(filesystem, remote, report):
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
    if scheme_of(remote.url) is WEB or remote.size is None:  # not every server knows ranges
        yield retrying(remote.url, lambda: _whole(filesystem, remote), report=report)
        return
    for start in range(0, remote.size, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, remote.size)

        def block(start: int = start, stop: int = stop) -> bytes:
            content = filesystem.cat_file(remote.path, start=start, end=stop)
            return _complete(content, stop - start)

        yield retrying(remote.url, block, report=report)


def _whole(filesystem: Any, remote: RemoteObject) -> bytes:
    content = filesystem.cat_file(remote.path)
    return content if remote.size is None else _complete(content, remote.size)


def _complete(content: bytes, size: int) -> bytes:
    if len(content) != size:
        raise Truncated(f"{len(content):,} of {size:,} bytes arrived")
    return content


def _fault(
    filesystem: Any, remote: RemoteObject, sha256: str, checksum: str, size: int, before: str
) -> str:
    """Why what arrived is not the object; empty if it is."""
    if remote.sha256 is not None:
        return "" if sha256 == remote.sha256 else "does not match its sha256"
    if remote.size is not None and size != remote.size:
        return f"{size:,} of {remote.size:,} bytes arrived"
    if checksum == remote.etag:
        return ""
    is_known = remote.is_md5 or (remote.is_of_parts and "-" in checksum)
    if is_known and sha256 != before:
        return "does not match its ETag"
    # The ETag of an encrypted object, or of one in parts of unknown sizes, is no checksum of it.
    if remote.etag:
        now = retrying(remote.url, lambda: filesystem.info(remote.path))
        return "" if etag_of(now) == remote.etag else "was replaced meanwhile"
    return ""


def _md5_of_parts(filesystem: Any, remote: RemoteObject, file: Path) -> str:
    """The ETag that S3 gives to a file uploaded in parts; empty if their size is not known."""
    if scheme_of(remote.url) is not AWS or remote.sha256 is not None or not remote.is_of_parts:
        return ""

    def first_part() -> dict[str, Any]:
        bucket, key, _ = filesystem.split_path(remote.path)
        return filesystem.call_s3("head_object", Bucket=bucket, Key=key, PartNumber=1)

    try:
        found = retrying(remote.url, first_part)
    except DataError:  # a storage without this request
        return ""
    by_kms = found.get("ServerSideEncryption", "").startswith("aws:kms")
    if by_kms or found.get("SSECustomerAlgorithm"):  # the ETag is no checksum
        return ""
    number, size = int(remote.etag.partition("-")[2]), found["ContentLength"]
    is_even = (number - 1) * size < file.stat().st_size <= number * size
    return etag_of_parts(file, size) if is_even else ""


def etag_of_parts(file: Path, size: int) -> str:
    """The ETag that S3 gives to a file that is uploaded in parts of `size` bytes."""
    digests = []
    with open(file, "rb") as content:
        for start in range(0, file.stat().st_size, size):
            digest, stop = hashlib.md5(usedforsecurity=False), start + size
            while block := content.read(min(BLOCK_BYTES, stop - content.tell())):
                digest.update(block)
            digests.append(digest.digest())
    joined = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{joined}-{len(digests)}"


def etag_of(info: dict[str, Any]) -> str:
    """The ETag, or what a storage has in its place; empty if there is none."""
    return str(info.get("ETag") or info.get("etag") or info.get("md5Hash") or "").strip('"')
