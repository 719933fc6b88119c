"""Files that survive a power cut, and what is in them."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
