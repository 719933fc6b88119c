"""Compressed files as bounded streams of their content; other files with the same interface."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from minimind.errors import DataError
from minimind.runtime.file_kinds import BZIP2, GZIP, LOOKED_AT, XZ, ZSTD, kind_of_content
from minimind.runtime.installed import install_extra

PACKINGS = (".gz", ".zst", ".xz", ".bz2")
# A kibibyte unpacks to 32 MiB at most (zstd; 1 MiB of deflate), which bounds the memory of a
# decompression bomb. xz and bzip2 take the bound themselves (`BUFFER_BYTES`).
PIECE_BYTES = 2**10
BUFFER_BYTES = 2**20
XZ_MEMORY = 2**28  # bytes; `xz -9` needs a quarter
# What zstd says of a window of more than 2**27 bytes, and xz of one that needs more memory.
TOO_FAR_BACK = {
    "requires too much memory": (
        "the compressed stream looks further back than 128 MiB",
        "compress it again without --long, or with --long=27 at most",
    ),
    "Memory usage limit": (
        f"the compressed stream needs more than {XZ_MEMORY >> 20} MiB of memory",
        "compress it again with xz -9 at most",
    ),
}
GZIP_CONTAINER = 31  # wbits: deflate inside a gzip header and checksum


class Damage(Exception):
    """The rest of a file cannot be read; has the reason and the remedy.

    `lacking` are the bytes of content that a file no longer has, where it says how many it had.
    """

    def __init__(self, what: str, remedy: str = "copy the file again", lacking: int = 0) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.lacking = lacking


class Unpacked(io.RawIOBase):
    """Decompressed content of a file; bytes `consumed` of the file so far, and `given` by them.

    `reached` are those bytes of the file that gave something: blocks give all or nothing.
    Concatenated streams (`cat a.gz b.gz`, parallel compressors) are one content. A truncated stream
    raises Damage: the libraries' readers end silently (zstandard) or lose count of bytes (gzip).
    """

    def __init__(
        self,
        file: BinaryIO,
        kind: str,
        start: Callable[[], Any],
        faults: type[Exception] | tuple[type[Exception], ...],
        padding: bytes,
        *bound: int,
    ) -> None:
        self.consumed = self.given = self.reached = 0
        self._kind = kind
        self._file = file
        self._start = start  # gives a decompressor of one stream
        self._faults = faults
        self._padding = padding  # what may fill the space behind a stream
        self._bound = bound  # bytes that a decompressor gives at most, if it takes such a limit
        self._stream: Any = None  # None between two streams
        self._finished = False  # one stream at least
        self._packed = b""
        self._ready = memoryview(b"")
        self._promised = 0  # bytes given at the end of this stream, as its header says
        self._damage: Damage | None = None  # behind what is ready

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; return the number of bytes, 0 at the end. Raise Damage."""
        if not self.consumed:
            self._begin()
        while not self._ready:
            if self._damage:
                raise self._damage
            if not self._refill():
                return 0
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _begin(self) -> None:
        """Have LOOKED_AT bytes ready, also of short streams: a peek shows them, as of any file."""
        start = b""
        try:
            while len(start) < LOOKED_AT and self._refill():
                start, self._ready = start + self._ready, memoryview(b"")
        except Damage as damage:
            self._damage = damage
        self._ready = memoryview(start)

    def _refill(self) -> bool:
        """Unpack more bytes; return False at the end of the file."""
        has_more = not getattr(self._stream, "needs_input", True)
        if not self._packed and not has_more:
            self._packed = self._file.read(PIECE_BYTES)
            self.consumed += len(self._packed)
        if not self._packed and not has_more:
            if self._stream is not None:
                lacking = max(0, self._promised - self.given)
                known = (
                    f"it lacks {lacking:,} bytes of text" if lacking else "what it lacks is unknown"
                )
                raise Damage(f"the compressed stream is cut off, and {known}", lacking=lacking)
            return False
        if self._stream is None:
            if self._finished:
                self._packed = self._packed.lstrip(self._padding)
                if not self._packed:
                    return True
            self._stream = self._start()
            if self._kind == ZSTD:
                self._promised = self.given + _content_size(self._packed)
        try:
            self._ready = memoryview(self._stream.decompress(self._packed, *self._bound))
        except self._faults as error:
            for words, told in TOO_FAR_BACK.items():
                if words in str(error):
                    raise Damage(*told) from error
            is_first = not self._finished and self.consumed <= PIECE_BYTES
            if is_first and (kind := kind_of_content(self._packed, self._kind)):
                raise Damage(f"the file is {kind.name}, not {self._kind}", kind.remedy) from error
            raise Damage(f"the compressed stream is damaged ({error})") from error
        if self._ready:
            self.given += len(self._ready)
            self.reached = self.consumed
        self._packed = b""
        if self._stream.eof:
            self._packed = self._stream.unused_data
            self._stream = None
            self._finished = True
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def unpacked(path: Path) -> Unpacked:
    """Open a compressed file; raise DataError if its library is missing."""
    suffix = path.suffix.lower()
    if suffix == ".xz":
        import lzma

        start = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, XZ_MEMORY)
        return Unpacked(open(path, "rb"), XZ, start, lzma.LZMAError, b"\0", BUFFER_BYTES)
    if suffix == ".bz2":
        import bz2

        faults, start = (OSError, ValueError), bz2.BZ2Decompressor
        return Unpacked(open(path, "rb"), BZIP2, start, faults, b"", BUFFER_BYTES)
    if suffix == ".zst":
        zstandard = _zstandard(path)
        start = zstandard.ZstdDecompressor().decompressobj
        return Unpacked(open(path, "rb"), ZSTD, start, zstandard.ZstdError, b"")
    # gzip's own tools ignore zeros behind a stream, which tapes and block devices leave.
    start = partial(zlib.decompressobj, GZIP_CONTAINER)
    return Unpacked(open(path, "rb"), GZIP, start, zlib.error, b"\0")


def _content_size(frame: bytes) -> int:
    """Bytes of content by the header of a zstd frame, which may lack them; else 0."""
    import zstandard

    try:
        return max(0, zstandard.frame_content_size(frame))
    except zstandard.ZstdError:  # the header is cut or damaged, which its decompressor says
        return 0


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise needs_extra(path, "zstandard") from error
    return zstandard


def needs_extra(path: Path, package: str) -> DataError:
    """Message for a missing optional package."""
    return DataError(
        f"{path}: needs the package {package}, which is not installed; run {install_extra('data')}"
    )


class _Plain(io.FileIO):
    """A file that is not compressed, as `Unpacked`."""

    @property
    def consumed(self) -> int:
        return self.tell()

    given = reached = consumed


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, io.BufferedReader[Any]]]:
    """The content of a file, and the same with a buffer; the former counts for `reached_by`."""
    with unpacked(path) if path.suffix.lower() in PACKINGS else _Plain(path) as content:
        with io.BufferedReader(content, BUFFER_BYTES) as file:
            yield content, file


def reached_by(content: Any, end: int) -> int:
    """Bytes of the file for `end` bytes of its content, which is read further ahead."""
    return content.consumed * end // max(1, content.given)
