"""Read the documents of segments; bad ones are yielded as rejections."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from minimind.data.text.documents import (
    DocumentError,
    ReadOptions,
    Rejection,
    document_of_file,
    document_of_line,
    is_too_long,
    too_long_line,
)
from minimind.data.text.inputs import DATASET, Segment, kind_of
from minimind.data.text.tables import BUFFER_BYTES, Damage, dataset_texts, parquet_texts, unpacked
from minimind.errors import DataError
from minimind.runtime.file_kinds import JSON_TEXT, LOOKED_AT, Kind, kind_of_content, kind_of_file

# A document: its text, the bytes of the segment read so far, its line or row, and its offset.
Found = Iterator[tuple[str, int, int, int | None] | Rejection]
PIECE_BYTES = 2**20


def read_segment(segment: Segment, reading: ReadOptions) -> Found:
    r"""Yield documents or rejections, with the bytes of the segment read so far and the place.

    A document is the `text_field` of a line or a row, or all of it (`records`), or a whole .txt
    file with its newlines; lines of JSON may end with \r\n. Reading continues after a rejection
    unless the file is damaged. Raise DataError for an unreadable file, or a table without these
    columns.

    Lines, rows and offsets are those of a Rejection, but in a .jsonl file line numbers count from
    the start of the segment; every line gives one document or one rejection.
    """
    kind = kind_of(segment.path)
    if segment.start == segment.stop:
        yield _emptiness(segment.path, kind in (".parquet", DATASET))
        return
    try:
        yield from _READERS[kind](segment, reading)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{segment.path}: cannot be read ({reason}); check the file") from error


def _plain_lines(segment: Segment, reading: ReadOptions) -> Found:
    kinds: list[Kind | None] = []  # kind of the file, once a line of it is bad
    with open(segment.path, "rb", buffering=BUFFER_BYTES) as file:
        first = _first_line_within(file, segment)
        lines = _lines(file, first, segment.stop, reading)
        for number, (begin, end, line) in enumerate(lines, 1):
            document = _document_or_error(line, reading)
            if isinstance(document, str):
                yield document, end - segment.start, number, begin
            else:
                kinds = kinds or [kind_of_file(segment.path, JSON_TEXT)]
                yield _rejection(segment.path, number, begin, document, kinds[0])


def _first_line_within(file: BinaryIO, segment: Segment) -> int:
    """Offset of the first line that begins in the segment, or `stop`."""
    position = max(segment.start - 1, 0)
    file.seek(position)
    if segment.start == 0:
        return 0
    while position < segment.stop:
        piece = file.readline(min(PIECE_BYTES, segment.stop - position))
        position += len(piece)
        if not piece or piece.endswith(b"\n"):
            break
    return position


def _lines(
    file: BinaryIO, begin: int, stop: int, reading: ReadOptions
) -> Iterator[tuple[int, int, bytes | bytearray | None]]:
    """Yield start, end and content of the lines that begin between `begin` and `stop`.

    The content is None for a line that is too long.
    """
    while begin < stop and (line := file.readline(PIECE_BYTES)):
        if len(line) < PIECE_BYTES or line.endswith(b"\n"):
            suspect = len(line) > reading.max_document_bytes  # counting takes time
            too_long = suspect and is_too_long(len(line), line.count(b"\\"), reading)
            whole = None if too_long else line
            end = begin + len(line)
        else:
            whole, size = _long_line(file, line, stop - begin, reading)
            end = begin + size
        yield begin, end, whole
        begin = end


def _long_line(
    file: BinaryIO, piece: bytes, stop: int, reading: ReadOptions
) -> tuple[bytearray | None, int]:
    """Return a line read in pieces, or None if too long, and its size in bytes.

    A line that is too long is read to its end only if another line can begin before `stop`.
    """
    line: bytearray | None = bytearray()
    size = backslashes = 0
    while piece:
        size += len(piece)
        if line is not None:
            line += piece
            backslashes += piece.count(b"\\")
            line = None if is_too_long(size, backslashes, reading) else line
        if piece.endswith(b"\n") or (line is None and size >= stop):
            break
        piece = file.readline(PIECE_BYTES)
    return line, size


def _document_or_error(line: bytes | bytearray | None, reading: ReadOptions) -> str | DocumentError:
    if line is None:
        return too_long_line(reading)
    try:
        return reading.records.of_line(line) if reading.records else document_of_line(line, reading)
    except DocumentError as error:
        return error


def in_file(rejection: Rejection) -> Rejection:
    """Return the rejection with its line number in the file, which requires reading up to it."""
    if rejection.byte is None or kind_of(rejection.path) != ".jsonl":
        return rejection
    return replace(rejection, line=_line_number(rejection.path, rejection.byte))


def _line_number(path: Path, offset: int) -> int:
    """Number of the line that contains the byte at `offset`."""
    return newlines(path, 0, offset) + 1


def newlines(path: Path, start: int, stop: int) -> int:
    """Newlines among the bytes `start` to `stop` of a file."""
    count = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(PIECE_BYTES, stop - start))):
            count += piece.count(b"\n")
            start += len(piece)
    return count


def line_offset(path: Path, line: int) -> int:
    """Offset of a line, or the size of the file if it has fewer lines."""
    offset, left = 0, line - 1
    with open(path, "rb", buffering=0) as file:
        while left and (piece := file.read(PIECE_BYTES)):
            here = piece.count(b"\n")
            if here >= left:
                lines = piece.split(b"\n", left)[:left]
                return offset + sum(map(len, lines)) + left
            left -= here
            offset += len(piece)
    return offset


def _packed_lines(segment: Segment, reading: ReadOptions) -> Found:
    with unpacked(segment.path) as content, io.BufferedReader(content, BUFFER_BYTES) as file:
        number = position = 0
        try:
            start = file.peek(LOOKED_AT)
            for begin, end, line in _lines(file, 0, sys.maxsize, reading):
                number, position = number + 1, end
                document = _document_or_error(line, reading)
                if isinstance(document, str):
                    yield document, content.consumed, number, begin
                else:
                    kind = kind_of_content(start, JSON_TEXT)
                    yield _rejection(segment.path, number, begin, document, kind)
            if not number:
                yield _emptiness(segment.path)
        except Damage as damage:
            error = DocumentError(str(damage), damage.remedy)
            yield _rejection(segment.path, number + 1, position, error)


def _whole_file(segment: Segment, reading: ReadOptions) -> Found:
    with open(segment.path, "rb") as file:
        content = file.read(reading.max_document_bytes + 1)
    kind = kind_of_content(content)
    kind = None if kind is not None and kind.is_text else kind
    try:
        text = document_of_file(content, reading)
        if kind is not None and kind.is_pointer:
            raise DocumentError("is not the text", "give the text")
        yield text, segment.weight, 1, 0
    except DocumentError as error:
        line = 1 + content.count(b"\n", 0, error.at)
        yield _rejection(segment.path, line, 0, error, kind)


def _parquet_rows(segment: Segment, reading: ReadOptions) -> Found:
    return _rows(segment, parquet_texts(segment.path, segment.start, segment.stop, reading))


def _dataset_rows(segment: Segment, reading: ReadOptions) -> Found:
    return _rows(segment, dataset_texts(segment.path, segment.start, segment.stop, reading))


def _rows(segment: Segment, texts: Iterator[str | DocumentError]) -> Found:
    row = segment.start
    try:
        for text in texts:
            row += 1
            if isinstance(text, DocumentError):
                yield Rejection(segment.path, row, None, text.reason, text.remedy)
            else:
                share = (row - segment.start) / (segment.stop - segment.start)
                yield text, int(segment.weight * share), row, None
        if row < segment.stop:
            raise Damage(f"the rows from here to {segment.stop} are missing")
    except Damage as damage:
        yield Rejection(segment.path, row + 1, None, str(damage), damage.remedy)


def _emptiness(path: Path, is_table: bool = False) -> Rejection:
    return Rejection(path, 1, None if is_table else 0, "is empty", "fill it or leave it out")


def _rejection(
    path: Path, line: int, begin: int, error: DocumentError, kind: Kind | None = None
) -> Rejection:
    """The rejection for `error`, or for a file of another kind."""
    if kind is not None:
        return Rejection(path, line, begin, f"the file is {kind.name}", kind.remedy)
    return Rejection(path, line, begin + error.at, error.reason, error.remedy)


_READERS: dict[str, Callable[[Segment, ReadOptions], Found]] = {
    ".jsonl": _plain_lines,
    ".jsonl.gz": _packed_lines,
    ".jsonl.zst": _packed_lines,
    ".txt": _whole_file,
    ".parquet": _parquet_rows,
    DATASET: _dataset_rows,
}
