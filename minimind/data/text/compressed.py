"""Streaming decompression of .gz and .zst files in bounded memory, with damage detected."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from minimind.errors import DataError
from minimind.runtime.file_kinds import GZIP, ZSTD, kind_of_content

# A kibibyte unpacks to 32 MiB at most (zstd; 1 MiB of deflate): a bomb goes off in small parts.
PIECE_BYTES = 2**10
BUFFER_BYTES = 2**20
TOO_FAR_BACK = "requires too much memory"  # what zstd says of a window of more than 2**27 bytes
GZIP_CONTAINER = 31  # wbits: deflate inside a gzip header and checksum


class Damage(Exception):
    """The rest of a file cannot be read; has the reason and the remedy."""

    def __init__(self, what: str, remedy: str = "copy the file again") -> None:
        super().__init__(what)
        self.remedy = remedy


class Unpacked(io.RawIOBase):
    """Decompressed content of a file; `consumed` counts the compressed bytes read so far.

    Concatenated streams (`cat a.gz b.gz`, parallel compressors) are one content. A truncated stream
    raises Damage: the libraries' readers end silently (zstandard) or lose count of bytes (gzip).
    """

    def __init__(
        self,
        file: BinaryIO,
        kind: str,
        start: Callable[[], Any],
        faults: type[Exception],
        padding: bytes,
    ) -> None:
        self.consumed = 0
        self._kind = kind
        self._file = file
        self._start = start  # gives a decompressor of one stream
        self._faults = faults
        self._padding = padding  # what may fill the space behind a stream
        self._stream: Any = None  # None between two streams
        self._finished = False  # one stream at least
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; return the number of bytes, 0 at the end. Raise Damage."""
        while not self._ready:
            if not self._refill():
                return 0
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _refill(self) -> bool:
        """Read more compressed bytes; return False at the end of the file."""
        if not self._packed:
            self._packed = self._file.read(PIECE_BYTES)
            self.consumed += len(self._packed)
        if not self._packed:
            if self._stream is not None:
                raise Damage("the compressed stream is cut off")
            return False
        if self._stream is None:
            if self._finished:
                self._packed = self._packed.lstrip(self._padding)
                if not self._packed:
                    return True
            self._stream = self._start()
        try:
            self._ready = memoryview(self._stream.decompress(self._packed))
        except self._faults as error:
            if TOO_FAR_BACK in str(error):
                raise Damage(
                    "the compressed stream looks further back than 128 MiB",
                    "compress it again without --long, or with --long=27 at most",
                ) from error
            is_first = not self._finished and self.consumed <= PIECE_BYTES
            if is_first and (kind := kind_of_content(self._packed, self._kind)):
                raise Damage(f"the file is {kind.name}, not {self._kind}", kind.remedy) from error
            raise Damage(f"the compressed stream is damaged ({error})") from error
        self._packed = b""
        if self._stream.eof:
            self._packed = self._stream.unused_data
            self._stream = None
            self._finished = True
        return True

    def close(self) -> None:
        """Close the file too."""
        self._file.close()
        super().close()


def unpacked(path: Path) -> Unpacked:
    """Open a .gz or .zst file; raise DataError if its library is missing."""
    if path.suffix.lower() == ".zst":
        zstandard = _zstandard(path)
        start = zstandard.ZstdDecompressor().decompressobj
        return Unpacked(open(path, "rb"), ZSTD, start, zstandard.ZstdError, b"")
    # gzip's own tools take zeros behind a stream, which tapes and block devices leave, for nothing.
    return Unpacked(open(path, "rb"), GZIP, _inflater, zlib.error, b"\0")


def _inflater() -> Any:
    return zlib.decompressobj(GZIP_CONTAINER)


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise needs_extra(path, "zstandard") from error
    return zstandard


def needs_extra(path: Path, package: str) -> DataError:
    """Message for a missing optional package."""
    return DataError(f"{path}: is read with {package}; pip install {package}")
