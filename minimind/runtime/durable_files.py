"""Durable and atomic writes, bounded reads, hashes, and the writer of metrics.jsonl."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from minimind.errors import CURES, FULL, StorageError
from minimind.runtime import disk
from minimind.runtime.drafts import draft_of, remove_left


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write and fsync; the name is durable only after its directory is synced too."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def without_waiting(path: str, flags: int) -> int:
    """An opener for `open` that does not wait for the writer of a pipe.

    Given a descriptor, `open` of a folder would report its number, and leave it open.
    """
    return os.open(path, flags | os.O_NONBLOCK)


def read_small(path: str | Path, most: int = 2**20, pipes: bool = False) -> bytes:
    """Read a regular file of at most `most` bytes; raise OSError for anything else.

    Does not block on pipes or devices; with `pipes`, pipes are read.
    """
    with open(path, "rb", opener=None if pipes else without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) and not (pipes and stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most + 1)
    if content is None:  # a file of the kernel that waits for its next line
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def read_small_text(path: str | Path, most: int = 2**20, pipes: bool = False) -> str:
    """`read_small` as text with universal newlines; raise UnicodeDecodeError if not UTF-8."""
    text = read_small(path, most, pipes).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content."""
    draft = draft_of(path)
    try:
        write_durably(draft, content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Raise the OSError that `write_whole` would raise, before any work is done.

    What killed processes left of the file is deleted.
    """
    remove_left(path.parent, path.name)
    draft_of(path).touch()
    draft_of(path).unlink()


def why_unwritable(error: OSError) -> str:
    """Why no file could be made in a folder that is there, in words."""
    if error.errno == errno.ENOENT:  # such as /proc: "No such file" would be of the new one
        return "its file system takes no new files"
    return error.strerror or str(error)


@contextmanager
def storing(what: str, remedy: str, needed: int = 0) -> Iterator[None]:
    """Convert an OSError inside the block into StorageError: `what: why; remedy`.

    What helps against the cause (`CURES`) comes before `remedy`. For a full disk the message has
    the bytes `needed` and free. BrokenPipeError passes.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"{error.filename or what}: {error.strerror or error}"
        cure = CURES.get(error.errno or 0)
        first = f"{cure}, or " if cure and cure not in remedy else ""
        if needed and error.errno in FULL:
            free = free_bytes(Path(what))
            message += f", {needed:,} bytes ({mebibytes(needed)}) needed, {free:,} free"
        raise StorageError(f"{message}; {first}{remedy}") from error


def printing() -> AbstractContextManager[None]:
    """`storing` for standard output."""
    return storing("standard output", "send it somewhere else")


def escape_unencodable() -> None:
    """Make standard output escape characters that its encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, which need not exist."""
    while not disk.exists(path):
        path = path.parent
    return shutil.disk_usage(path).free


def mebibytes(count: int) -> str:
    """Format as `27.1 MiB`."""
    return f"{count / 2**20:,.1f} MiB"


def sync_file(path: Path) -> None:
    """fsync a file written by other code."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """fsync a directory, which makes renames in it durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """SHA-256 hex digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def canonical_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def fingerprint(value: Any) -> str:
    """SHA-256 hex digest of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Metrics:
    """Appends one JSON object per line to metrics.jsonl; never rewrites.

    Unbuffered: after a full disk, a buffer would be written again, and fail again, at closing.
    Raises OSError once the file is no longer at its path: its lines would be lost without a word.
    """

    def __init__(self, path: Path) -> None:
        require_regular(path)
        self._path = path
        self._file = open(path, "ab", buffering=0)
        if disk.stat(path).st_size:
            with open(path, "rb") as existing:
                existing.seek(-1, 2)
                is_torn = existing.read(1) != b"\n"
            if is_torn:  # a crash left half a line: end it
                self._append(b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append an event; numbers in full precision, non-finite ones as null."""
        line = {"event": event, "time": time.time(), **finite(fields)}
        self._append((json.dumps(line, ensure_ascii=False) + "\n").encode())

    def _append(self, content: bytes) -> None:
        is_there = disk.exists(self._path)
        if not is_there or not os.path.samestat(
            os.fstat(self._file.fileno()), disk.stat(self._path)
        ):
            reason = "was replaced" if is_there else "was removed or renamed, or its folder was,"
            raise OSError(errno.ENOENT, f"{reason} while a run writes it", str(self._path))
        left = memoryview(content)
        while left:  # a disk that fills up may accept a part
            left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()


def require_regular(path: Path) -> None:
    """Raise OSError if the path exists and is not a regular file."""
    if disk.exists(path) and not disk.is_file(path):
        raise OSError(errno.EINVAL, "is a folder, a pipe or a device, not a file", str(path))


def finite(value: Any) -> Any:
    """The value with null in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
