"""Write documents as compressed .jsonl files."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.inputs import segments_of
from minimind.data.text.readers import read_segment
from minimind.errors import StorageError
from minimind.runtime.durable_files import sync_file

PART_BYTES = 2**28  # of text, before compression: parts are what `prepare` divides


class PartWriter:
    """Writes part-00000.jsonl.zst, part-00001.jsonl.zst, ...; .gz without zstandard.

    The same documents give the same bytes.
    """

    def __init__(self, directory: Path) -> None:
        self.names: list[str] = []
        self._directory = directory
        self._left = 0  # bytes until the next part
        self._file: Any = None
        self._open = ExitStack()

    def add(self, text: str) -> None:
        """Write one document."""
        if self._left <= 0:
            self._next_part()
        line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._left -= len(line)

    def _next_part(self) -> None:
        self.close()
        suffix, compress = _compression()
        self.names.append(f"part-{len(self.names):05d}.jsonl{suffix}")
        file = self._open.enter_context(open(self._directory / self.names[-1], "wb"))
        self._file = self._open.enter_context(compress(file))
        self._left = PART_BYTES

    def texts(self) -> Iterator[str]:
        """Read the documents again, after `close`."""
        reading = ReadOptions(max_document_bytes=sys.maxsize)
        for name in self.names:
            (segment,) = segments_of(self._directory / name, sys.maxsize)
            for document in read_segment(segment, reading):
                if isinstance(document, Rejection):
                    raise StorageError(f"{document}; run it again")
                yield document[0]

    def close(self) -> None:
        """Finish the last part and make it durable."""
        self._open.close()
        if self.names:
            sync_file(self._directory / self.names[-1])


def _compression() -> tuple[str, Any]:
    """The suffix, and a function that makes a file compress what is written to it."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return ".gz", _gzip
    compressor = zstandard.ZstdCompressor()
    return ".zst", lambda file: compressor.stream_writer(file, closefd=False)


def _gzip(file: BinaryIO) -> io.BufferedIOBase:
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
