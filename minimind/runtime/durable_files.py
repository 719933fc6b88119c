"""Files that survive a power cut, and what is in them."""

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
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from minimind.errors import StorageError


def write_durably(path: Path, content: bytes) -> None:
    """Write and fsync; the name is only safe once its directory is synced too."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_small(path: str | Path, most: int = 2**20, pipes: bool = False) -> bytes:
    """The content of a regular file of at most `most` bytes; an OSError for anything else.

    A pipe or a device is refused without waiting for it; with `pipes`, pipes are read.
    """
    waits = 0 if pipes else os.O_NONBLOCK
    with open(os.open(path, os.O_RDONLY | waits), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) and not (pipes and stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def read_small_text(path: str | Path, most: int = 2**20, pipes: bool = False) -> str:
    """The same as text, with newlines as Python has them; a UnicodeDecodeError if not UTF-8."""
    text = read_small(path, most, pipes).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one go: a reader finds the old content or the new, never a part."""
    draft = _draft(path)
    try:
        write_durably(draft, content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Nothing, or the OSError that `write_whole` would meet, before there is anything to lose."""
    _draft(path).touch()
    _draft(path).unlink()


def _draft(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


@contextmanager
def storing(what: str, remedy: str, needed: int = 0) -> Iterator[None]:
    """Turn an OSError inside into a StorageError: `what: why; remedy`.

    A full disk or quota is told with the bytes `needed` and those that are free. A pipe whose
    reader has gone is no fault, and passes as it is.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        told = f"{error.filename or what}: {error.strerror or error}"
        if needed and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(Path(what))
            told += f", {needed:,} bytes ({mebibytes(needed)}) needed, {free:,} free"
        raise StorageError(f"{told}; {remedy}") from error


def printing() -> AbstractContextManager[None]:
    """The same of what is written to standard output."""
    return storing("standard output", "free some space, or send it somewhere else")


def escape_unencodable() -> None:
    """Let standard output write what its encoding lacks, such as a file name's bytes, escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def free_bytes(path: Path) -> int:
    """Bytes free for us where `path` is, or would be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def mebibytes(count: int) -> str:
    """`27.1 MiB`."""
    return f"{count / 2**20:,.1f} MiB"


def sync_file(path: Path) -> None:
    """fsync of a file somebody else wrote."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """fsync of the names in a directory: what makes a rename in it last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values: sorted keys, no spaces; what fingerprints are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def fingerprint(value: Any) -> str:
    """Sha256 hex digest of a JSON value's canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Metrics:
    """Appends one JSON object a line to metrics.jsonl; nothing is ever rewritten.

    Unbuffered: what a full disk refuses must not be written once more, and fail again, at closing.
    """

    def __init__(self, path: Path) -> None:
        require_regular(path)
        self._file = open(path, "ab", buffering=0)
        if path.stat().st_size:
            with open(path, "rb") as written:
                written.seek(-1, 2)
                is_torn = written.read(1) != b"\n"
            if is_torn:  # by a crash: close the line, keep the next whole
                self._append(b"\n")

    def write(self, event: str, **facts: Any) -> None:
        """Append one event; numbers in full precision, non-finite ones as null."""
        line = {"event": event, "time": time.time(), **_finite(facts)}
        self._append((json.dumps(line, ensure_ascii=False) + "\n").encode())

    def _append(self, content: bytes) -> None:
        left = memoryview(content)
        while left:  # a disk that fills up takes a part, and refuses the next
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()


def require_regular(path: Path) -> None:
    """Nothing, or an OSError for what is no file: a pipe would wait for a reader."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is a folder, a pipe or a device, not a file", str(path))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def newest_acknowledged(path: Path) -> int | None:
    """The last step of which `checkpoint_saved` was recorded since the run began at step 0."""
    newest = None
    if not path.exists():
        return None
    with open(path, "rb") as file:
        for raw in file:
            if b'"run_start"' in raw or b'"checkpoint_saved"' in raw:
                with suppress(ValueError):  # a line torn by a crash acknowledges nothing
                    line = json.loads(raw)
                    if line["event"] == "checkpoint_saved":
                        newest = line["step"]
                    elif line["event"] == "run_start" and line["resume_from"] is None:
                        newest = None
    return newest
