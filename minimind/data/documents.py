"""Text files to documents: one string each, or one sentence that says which line cannot be used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from minimind.errors import DataError

SUFFIXES = (".jsonl", ".txt")
BOM = b"\xef\xbb\xbf"
EXAMPLE = '{"text": "..."}'
# JSON may spell a byte of text in six ("\u0001"), and may carry other fields beside the text.
LINE_BYTES_PER_TEXT_BYTE = 6
LINE_BYTES_BESIDE_TEXT = 2**16


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The text files that `paths` name, in their order; a directory's files sorted, all depths.

    Hidden files in a directory are passed over: editors and file managers leave them there.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += _files_below(path)
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"{path}: there is no such file or directory; correct the path")
    for path in found:
        _require_text_file(path)
    return found


def _files_below(directory: Path) -> list[Path]:
    found = [
        path
        for path in sorted(directory.rglob("*"))
        if path.suffix in SUFFIXES
        and not path.is_dir()
        and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
    if not found:
        raise DataError(f"{directory}: holds no {' or '.join(SUFFIXES)} file; name one that does")
    return found


def _require_text_file(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path}: the suffix {path.suffix!r} is not {' or '.join(SUFFIXES)};"
            " convert the file, or rename it if it is one of these"
        )
    if not path.exists():  # a directory can hold a link to nothing
        raise DataError(f"{path}: is a link to a file that is not there; remove it")
    if not path.is_file():
        raise DataError(f"{path}: is a pipe or a device, not a file; write the text to a file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: is empty; fill it or leave it out")


def read_documents(path: str | Path, max_document_bytes: int) -> Iterator[str]:
    r"""The documents of a file: a line's "text" of .jsonl, the whole of .txt, newlines as they are.

    Every complaint is a DataError `FILE:LINE (byte N): what; what to do`. N is where the line
    begins, or for text that is not UTF-8 where the offending byte is. No more than a bounded part
    of a line is ever held: a file of one endless line is told like any other mistake.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            if path.suffix == ".txt":
                yield _whole_file(path, file, max_document_bytes)
            else:
                yield from _lines(path, file, max_document_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file") from error


def _whole_file(path: Path, file: BinaryIO, max_document_bytes: int) -> str:
    content = file.read(max_document_bytes + 1)
    document = _Place(path, 1, 0)
    _require_no_bom(content, document)
    nul = content.find(b"\0")
    if nul >= 0:
        before = content[:nul]
        line = _Place(path, 1 + before.count(b"\n"), before.rfind(b"\n") + 1)
        line.refuse("holds a NUL byte", "is this a binary file? remove it")
    if len(content) > max_document_bytes:
        document.refuse(
            f"the document is longer than max_document_bytes = {max_document_bytes}",
            "cut it into several files, or raise --max_document_bytes",
        )
    return _decoded(content, document)


def _lines(path: Path, file: BinaryIO, max_document_bytes: int) -> Iterator[str]:
    limit = LINE_BYTES_PER_TEXT_BYTE * max_document_bytes + LINE_BYTES_BESIDE_TEXT
    number, offset = 0, 0
    while line := file.readline(limit + 1):
        number += 1
        place = _Place(path, number, offset)
        offset += len(line)
        if len(line) > limit:
            place.refuse(
                f"the line is longer than {limit} bytes, so its document cannot be within"
                f" max_document_bytes = {max_document_bytes}",
                "cut the document, or raise --max_document_bytes",
            )
        yield _document(line, place, max_document_bytes)


class _Place:
    """A line of a file, for complaints."""

    def __init__(self, path: Path, line: int, byte: int) -> None:
        self.path = path
        self.line = line
        self.byte = byte

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise DataError(f"{self.path}:{self.line} (byte {self.byte}): {what}; {remedy}")


def _document(line: bytes, place: _Place, max_document_bytes: int) -> str:
    """The text of one line of JSON."""
    if place.byte == 0:
        _require_no_bom(line, place)
    if b"\0" in line:
        place.refuse("holds a NUL byte", "remove it, or write the line again if the disk was full")
    if not line.strip():
        place.refuse("the line is blank", "remove it")
    value = _parsed(_decoded(line, place), place)
    if not isinstance(value, dict):
        place.refuse(f"is {_kind(value)}, not an object", f"write {EXAMPLE}")
    if "text" not in value:
        place.refuse('has no "text"', f"write {EXAMPLE}")
    text = value["text"]
    if not isinstance(text, str):
        place.refuse(f'"text" is {_kind(text)}, not a string', f"write {EXAMPLE}")
    _require_usable(text, place, max_document_bytes)
    return text


def _require_usable(text: str, place: _Place, max_document_bytes: int) -> None:
    if not text:
        place.refuse("the document is empty", "remove the line")
    if "\0" in text:
        place.refuse("the text holds a NUL character", "remove it")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(text[error.start]):04x}"
        place.refuse(f"half a surrogate pair ({lone}) is no character", "write the pair or drop it")
    if size > max_document_bytes:
        place.refuse(
            f"the document has {size} bytes, more than max_document_bytes = {max_document_bytes}",
            "cut it into several lines, or raise --max_document_bytes",
        )


def _require_no_bom(content: bytes, place: _Place) -> None:
    if content.startswith(BOM):
        place.refuse("begins with a byte order mark", "save the file as UTF-8 without it")


def _decoded(content: bytes, place: _Place) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = place.line + content.count(b"\n", 0, error.start)
        bad = _Place(place.path, line, place.byte + error.start)
        bad.refuse(
            f"is not UTF-8 (0x{content[error.start]:02x}: {error.reason})",
            "convert the file to UTF-8",
        )


def _parsed(line: str, place: _Place) -> Any:
    def no_number(name: str) -> NoReturn:
        place.refuse(f"{name} is not JSON", "write a number or null")

    try:
        return json.loads(line, parse_constant=no_number)
    except RecursionError:
        place.refuse("is nested too deep", f"write {EXAMPLE}")
    except json.JSONDecodeError as error:
        cut = error.pos >= len(line.rstrip()) or error.msg.startswith("Unterminated")
        state = "is cut off" if cut else "is not JSON"
        what = re.sub(r" at$", "", error.msg)
        place.refuse(f"{state} ({what} at column {error.colno})", f"write {EXAMPLE} on one line")
    except ValueError:  # Python reads no integer of thousands of digits
        place.refuse("holds a number with too many digits", "shorten it")


def _kind(value: Any) -> str:
    """A JSON value in its own language."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
