"""Read lines of JSON, JSON lists, CSV and plain text; bad documents are yielded as rejections."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from minimind.data.text.documents import (
    CONVERSATIONS,
    LINE_BYTES_BESIDE_TEXT,
    ONE_LINE,
    RETURNS,
    SPEAKERS,
    DocumentError,
    Found,
    ReadOptions,
    Rejection,
    Segment,
    document_of_cells,
    document_of_file,
    document_of_line,
    is_too_long,
    missing_in_table,
    too_long_line,
)
from minimind.data.text.packed import BUFFER_BYTES, Damage, opened, reached_by
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.file_kinds import (
    JSON_LIST,
    JSON_TEXT,
    LOOKED_AT,
    Kind,
    kind_of_content,
    kind_of_file,
)

# The fewest lines of a long record, and how many times as long as a usual one it is.
LONG_RECORD, LONGER = 100, 10
OBJECTS_JOINED = re.compile(rb'[]}]\s*(?:\[\s*)?\{\s*"')  # in a string, the quote has a backslash
# The content of a line, or the error of one that is too long.
Line = bytes | bytearray | DocumentError
PIECE_BYTES = 2**20


def plain_lines(segment: Segment, reading: ReadOptions) -> Found:
    """Documents of the lines of JSON that begin in a segment of a file."""
    kinds: list[Kind | None] = []  # kind of the file, once a line of it is bad
    has_read = False
    with open(segment.path, "rb", buffering=BUFFER_BYTES) as file:
        first = _first_line_within(file, segment)
        lines = _lines(file, first, segment.stop, reading)
        for number, (begin, end, line) in enumerate(lines, 1):
            document = _document_or_error(line, reading)
            if isinstance(document, str):
                has_read = True
                yield document, end - segment.start, number, begin
            else:
                kinds = kinds or [kind_of_file(segment.path, JSON_TEXT)]
                kind = None if has_read else kinds[0]
                yield _rejection(segment.path, number, begin, document, kind)


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
) -> Iterator[tuple[int, int, Line]]:
    """Yield start, end and content of the lines that begin between `begin` and `stop`."""
    while begin < stop and (line := file.readline(PIECE_BYTES)):
        if len(line) < PIECE_BYTES or line.endswith(b"\n"):
            suspect = len(line) > reading.max_document_bytes  # counting takes time
            too_long = suspect and is_too_long(len(line), line.count(b"\\"), reading)
            whole = _too_long(line, reading) if too_long else line
            end = begin + len(line)
        else:
            whole, size = _long_line(file, line, reading)
            end = begin + size
        if isinstance(whole, DocumentError) and whole.documents > 1:
            whole.remedy = ONE_LINE
        yield begin, end, whole
        begin = end


def _long_line(file: BinaryIO, piece: bytes, reading: ReadOptions) -> tuple[Line, int]:
    """Return a line read in pieces, or its error, and its size in bytes."""
    line: Line = bytearray()
    size = backslashes = 0
    while piece:
        size += len(piece)
        if isinstance(line, bytearray):
            line += piece
            backslashes += piece.count(b"\\")
            if is_too_long(size, backslashes, reading):
                line = _too_long(line, reading)
        else:
            line.documents += len(OBJECTS_JOINED.findall(piece))
            line.bytes += piece.count(b"\0")
        if piece.endswith(b"\n"):
            break
        piece = file.readline(PIECE_BYTES)
    return line, size


def _too_long(line: bytes | bytearray, reading: ReadOptions) -> DocumentError:
    """The error of a line that begins like this; counts the documents and the NUL in it."""
    error = too_long_line(reading)
    error.documents = 1 + len(OBJECTS_JOINED.findall(line))
    error.bytes = line.count(b"\0")
    return error


def _document_or_error(line: Line, reading: ReadOptions) -> str | DocumentError:
    if isinstance(line, DocumentError):
        return line
    try:
        return reading.records.of_line(line) if reading.records else document_of_line(line, reading)
    except DocumentError as error:
        error.documents = _documents_in(line, reading)
        error.bytes = line.count(b"\0")  # text that a disk or a crash has replaced
        return error


def _documents_in(line: bytes | bytearray, reading: ReadOptions) -> int:
    """How many documents a bad line holds: several if it is no JSON, or a list of them.

    Lines may be joined, and a quote without its end lets an item of a list go on over others. Their
    fields are counted, and objects without a comma between them.
    """
    names = CONVERSATIONS if reading.records and not reading.records.around_text else reading.names
    fields = (re.escape(json.dumps(name.rpartition(".")[2]).encode()) for name in names)
    counts = [len(re.findall(rb"%s\s*:" % field, line)) for field in fields]
    documents = max(*counts, 1 + len(OBJECTS_JOINED.findall(line)))
    if documents > 1 or line.lstrip().startswith(b"["):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return documents
        items = value if isinstance(value, list) else []
        records = (one for one in items if isinstance(one, dict))
        return max(1, sum(one.keys().isdisjoint(SPEAKERS) for one in records))
    return 1


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


def streamed_lines(segment: Segment, reading: ReadOptions, may_be_list: bool = False) -> Found:
    """Documents of lines of JSON, or of the items of a list, in a file that is read as a whole."""
    with opened(segment.path) as (content, file):
        number = position = 0
        expected, has_read = [JSON_TEXT], False
        try:
            start = file.peek(LOOKED_AT)
            lines = _lines(file, 0, sys.maxsize, reading)
            if may_be_list and start.lstrip().startswith(b"["):
                lines, expected = _items(file, reading), [JSON_TEXT, JSON_LIST]
            for begin, end, line in lines:
                number, position = number + 1, end
                document = _document_or_error(line, reading)
                if isinstance(document, str):
                    has_read = True
                    yield document, reached_by(content, end), number, begin
                else:
                    document.bytes = reached_by(content, document.bytes)
                    kind = None if has_read else kind_of_content(start, *expected)
                    yield _rejection(segment.path, number, begin, document, kind)
            if not number:
                yield emptiness(segment.path)
        except Damage as damage:
            yield _rest(segment.path, number + 1, position, content, damage, reading)


def _rest(
    path: Path, line: int, begin: int, content: Any, damage: Damage, reading: ReadOptions
) -> Rejection:
    """The rejection for what follows in a file that cannot be read further; also a remark."""
    size = disk.stat(path).st_size
    lost = max(0, size - content.reached * begin // max(1, content.given))
    is_part = begin and lost
    some = f" ({lost:,} of {size:,} bytes of the file are not read)" if is_part else ""
    error = DocumentError(f"{damage}{some}", damage.remedy)
    lacking = damage.lacking * content.reached // max(1, content.given)
    error.bytes = size * (lost + lacking) // max(1, size + lacking)  # as a share of what it had
    rejection = _rejection(path, line, begin, error)
    reading.remarks.append((path, str(rejection).removeprefix(str(path))))
    return rejection


# Skip to the end of a string / to the next quote, bracket or comma.
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_BESIDE_STRINGS = re.compile(rb'[^"\[\]{},]*+')
_DEPTH = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


def _items(file: BinaryIO, reading: ReadOptions) -> Iterator[tuple[int, int, Line]]:
    """Yield start, end and content of the items of a JSON list, as `_lines` does of lines.

    Only brackets, commas and quotes are looked at; the decoder has the items. Raise Damage where
    the list itself is no JSON.
    """
    marks = _marks(file)
    blank, _ = next(marks)
    begin = position = len(blank) + len("[")
    item: bytearray | DocumentError = bytearray()
    depth, backslashes, closed, has_items = 1, 0, 0, False
    for part, mark in marks:
        position += len(part) + len(mark)
        if not depth and (part + mark).strip():
            raise Damage("text follows the list", "write one list")
        is_end = depth == 1 and mark in (b",", b"]")
        closed += depth == 2 and mark in (b"}", b"]")
        if isinstance(item, bytearray):
            item += part if is_end else part + mark
            backslashes += part.count(b"\\")
            if is_too_long(len(item), backslashes, reading):
                item = _too_long(item, reading)
        else:
            item.bytes += part.count(b"\0")
        if depth == 1 and mark == b"}":
            raise Damage("the list holds a } without its {", "correct it")
        if is_end:
            if isinstance(item, DocumentError):
                item.documents = max(1, closed)
                yield begin, position, item
                has_items = True
            elif has_items or mark == b"," or item.strip():
                yield begin + len(item) - len(item.lstrip()), position, item.strip() + b"\n"
                has_items = True
            item, begin, backslashes, closed = bytearray(), position, 0, 0
        depth += _DEPTH.get(mark, 0)
    if depth:
        if depth == 1:
            raise Damage("the list is cut off")
        what = "the list is cut off, or a quote or bracket of this item has no end"
        raise Damage(what, "copy the file again, or correct it")


def _marks(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Yield each bracket and comma outside of strings with the JSON before it.

    Both are pieces of bounded size: there is none (b"") at the end of what is read at once.
    """
    in_string, rest = False, b""
    while read := file.read(PIECE_BYTES):
        piece, rest, begin, at = rest + read, b"", 0, 0
        while at < len(piece):
            found = (_IN_STRING if in_string else _BESIDE_STRINGS).match(piece, at)
            at = found.end() if found else at
            mark = piece[at : at + 1]
            if mark == b"\\":  # what it escapes comes with the next piece
                piece, rest = piece[:at], mark
            elif mark == b'"':
                in_string, at = not in_string, at + 1
            elif mark:
                yield piece[begin:at], mark
                begin = at = at + 1
        yield piece[begin:], b""


class _CsvLines:
    """The lines of a CSV file for `csv.reader`, and where the record that it reads begins."""

    def __init__(self, file: BinaryIO, reading: ReadOptions) -> None:
        # Each quote of a cell is written twice.
        self.longest = 2 * reading.max_document_bytes + LINE_BYTES_BESIDE_TEXT
        self.begin = self.end = 0  # bytes
        self.first, self.number = 1, 0  # lines
        self.records = self.lines_of_records = 0  # good ones
        self._long: list[tuple[int, str]] = []  # lines and remarks of those that were long so far
        self._file = file

    def begin_record(self) -> None:
        self.begin, self.first = self.end, self.number + 1

    def end_record(self) -> None:
        lines = self.number + 1 - self.first
        if self.has_long_record:
            remark = (
                f":{self.first}: one document is read from the {lines} lines up to {self.number};"
                " if it holds other rows, end the quotes of its first line"
            )
            self._long.append((lines, remark))
        self.records += 1
        self.lines_of_records += lines

    @property
    def has_long_record(self) -> bool:
        """Whether the record has so many more lines than usual that it may hold others."""
        is_long = self.number + 1 - self.first >= LONG_RECORD
        return is_long and self._usual_records >= LONGER

    @property
    def _usual_records(self) -> int:
        """How many records the lines of this one usually hold."""
        lines = self.number + 1 - self.first
        return lines * max(1, self.records) // max(1, self.lines_of_records)

    def remarks(self) -> list[str]:
        """Say which records have many more lines than the others so far."""
        lines = max(1, self.lines_of_records - sum(lines for lines, _ in self._long))
        others = max(1, self.records - len(self._long))
        return [remark for long, remark in self._long if long * others >= LONGER * lines]

    def lost_with(self, error: DocumentError) -> DocumentError:
        """Count the documents whose lines a bad record takes."""
        if self.number > self.first:
            lines = self.number + 1 - self.first
            error.reason += f", and the {lines} lines up to {self.number} are not read"
        error.documents = max(1, self._usual_records)
        return error

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(self.begin + self.longest - self.end + 1)
        if not line:
            raise StopIteration
        self.end, self.number = self.end + len(line), self.number + 1
        if self.end - self.begin > self.longest:
            raise Damage(
                f"the record is longer than {self.longest} bytes",
                "end its quotes, or raise --max_document_bytes",
            )
        text = line.decode(errors="surrogateescape")
        return text.removeprefix("\ufeff") if self.number == 1 else text


def csv_rows(segment: Segment, reading: ReadOptions, delimiter: str = ",") -> Found:
    """Documents of the rows of a file of separated cells below their names.

    Blank lines are no rows, and a byte order mark is none of the first name, as in other readers.
    """
    path = segment.path
    csv.field_size_limit(sys.maxsize)  # `_CsvLines` has a limit
    with opened(path) as (content, file):
        lines = _CsvLines(file, reading)
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            columns, width = _csv_columns(path, rows, delimiter, file.peek(LOOKED_AT), reading)
            has_rows = False
            row = end = []  # this list itself stands for the end; blank lines give others
            while True:
                lines.begin_record()
                try:
                    row = next(rows, end)
                    if row is end:
                        break
                    if not row:
                        continue
                    document: str | DocumentError = _document_of_row(row, columns, width, reading)
                except csv.Error as error:
                    fix = "end the quotes of a cell, and write those within it twice"
                    document = lines.lost_with(_not_csv(error, fix))
                except DocumentError as error:
                    is_short = len(row) == width and not lines.has_long_record
                    document = error if is_short else lines.lost_with(error)
                    nul = sum(cell.count("\0") for cell in row)
                    document.bytes = reached_by(content, nul)
                has_rows = True
                if isinstance(document, str):
                    lines.end_record()
                    yield document, reached_by(content, lines.end), lines.first, lines.begin
                else:
                    document.at = 0  # of a cell
                    yield _rejection(path, lines.first, lines.begin, document)
            if not has_rows:
                yield emptiness(path)
        except Damage as damage:
            yield _rest(path, lines.first, lines.begin, content, damage, reading)
        reading.remarks.extend((path, remark) for remark in lines.remarks())


def _csv_columns(
    path: Path, rows: Iterator[list[str]], delimiter: str, start: bytes, reading: ReadOptions
) -> tuple[dict[str, int], int]:
    """Where the columns to read are, by name, and the number of all; raise DataError for none."""
    names: list[str] = []
    try:
        names = next(filter(None, rows), [])
        wanted = reading.records.columns(names) if reading.records else reading.names
        if missing := [name for name in [*reading.required, *wanted] if name not in names]:
            raise DocumentError(*missing_in_table(names, names, missing[0]))
        if twice := [name for name in wanted if names.count(name) > 1]:
            reason = f"has the column {json.dumps(twice[0])} {names.count(twice[0])} times"
            raise DocumentError(reason, "keep the one that is meant")
    except (csv.Error, DocumentError) as error:
        if kind := kind_of_content(start):
            raise DataError(f"{path}: is {kind.name}, not CSV; {kind.remedy}") from error
        line = start.partition(b"\n")[0].decode(errors="replace")
        other = max("\t;|,", key=line.count)
        if len(names) < 2 and line.count(other) > line.count(delimiter):
            problem = f'has "{SHOWN.get(other, other)}" between its cells'
            remedy = RENAMED.get(other, "write it with commas")
            shown = SHOWN.get(delimiter, delimiter)
            raise DataError(f'{path}: {problem}, not "{shown}"; {remedy}') from error
        if isinstance(error, DocumentError):
            raise DataError(f"{path}: {error.reason}; {error.remedy}") from error
        problem = _not_csv(error, "correct it")
        raise DataError(f"{path}: its first line {problem.reason}; {problem.remedy}") from error
    return {name: names.index(name) for name in wanted}, len(names)


def _not_csv(error: csv.Error, remedy: str) -> DocumentError:
    if str(error).startswith("new-line character seen in unquoted field"):
        return DocumentError(*RETURNS)
    return DocumentError(f"is not CSV ({error})", remedy)


SHOWN = {"\t": "\\t"}
RENAMED = {"\t": "name it .tsv", ",": "name it .csv"}


def _document_of_row(
    row: list[str], columns: dict[str, int], width: int, reading: ReadOptions
) -> str:
    if len(row) != width:
        reason = f"has {len(row)} cells, and the first row {width}"
        raise DocumentError(reason, "put a cell with a separator in quotes")
    cells = {name: row[at].encode(errors="surrogateescape") for name, at in columns.items()}
    return reading.records.of_row(cells) if reading.records else document_of_cells(cells, reading)


def whole_file(segment: Segment, reading: ReadOptions) -> Found:
    """A file as one document, with its newlines."""
    with opened(segment.path) as (_, file):
        try:
            content = file.read(reading.max_document_bytes + 1)
        except Damage as damage:
            error = DocumentError(str(damage), damage.remedy)
            yield _rejection(segment.path, 1, 0, error)
            return
    if not content:
        yield emptiness(segment.path)
        return
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


def emptiness(path: Path, is_table: bool = False) -> Rejection:
    """The rejection of an empty input."""
    return Rejection(path, 1, None if is_table else 0, "is empty", "fill it or leave it out")


def _rejection(
    path: Path, line: int, begin: int, error: DocumentError, kind: Kind | None = None
) -> Rejection:
    """The rejection for `error`, or for a file of another kind."""
    what, remedy, at = error.reason, error.remedy, error.at
    if kind is not None:
        what, remedy, at = f"the file is {kind.name}", kind.remedy, 0
    return Rejection(path, line, begin + at, what, remedy, error.documents, error.bytes)
