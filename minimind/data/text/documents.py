"""Parse a JSON line, a text file or a table cell into a document, or raise Flaw."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from minimind.data.text.missing_text import missing_in_line

BOM = b"\xef\xbb\xbf"
# JSON may escape a byte of text as six ("\u0001"); a line may have other fields.
LINE_BYTES_PER_TEXT_BYTE = 6
LINE_BYTES_BESIDE_TEXT = 2**16
# Fixed limits: Python's depend on version, environment and stack depth, and every rank must accept
# the same documents.
MOST_DIGITS = 4300
MOST_NESTED = 100


@dataclass(frozen=True)
class Reading:
    """Options for reading documents."""

    text_field: str = "text"
    max_document_bytes: int = 64 * 2**20

    @property
    def example(self) -> str:
        """An example of a valid line."""
        return json.dumps({self.text_field: "..."})

    @cached_property
    def opening(self) -> re.Pattern[str]:
        """The start of a line whose first field is the text, including the opening quote."""
        name = re.escape(json.dumps(self.text_field, ensure_ascii=False))
        return re.compile(rf'\{{[ \t]*{name}[ \t]*:[ \t]*"')


@dataclass(frozen=True)
class Rejection:
    """A rejected document: the reason and its position.

    `line` counts from 1. `byte` is the offset of the line in the (decompressed) file, or of the
    first invalid byte of text that is not UTF-8. For a row of a table `line` is the row and `byte`
    None.
    """

    path: Path
    line: int
    byte: int | None
    what: str
    remedy: str

    def __str__(self) -> str:
        place = f"row {self.line}" if self.byte is None else f"byte {self.byte}"
        return f"{self.path}:{self.line} ({place}): {self.what}; {self.remedy}"


class Flaw(Exception):
    """Raised for a bad document: reason, remedy, and offset in the line."""

    def __init__(self, what: str, remedy: str, at: int = 0) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.at = at


def is_too_long(line_bytes: int, backslashes: int, reading: Reading) -> bool:
    """Whether a line, or its beginning, is too long for a document within the limit.

    Only escaped characters take more bytes in JSON than in UTF-8, so a long line without
    backslashes is recognized after little more than `max_document_bytes`.
    """
    spared = line_bytes - (LINE_BYTES_PER_TEXT_BYTE - 1) * backslashes
    least_text = max(spared, line_bytes // LINE_BYTES_PER_TEXT_BYTE)
    return least_text > reading.max_document_bytes + LINE_BYTES_BESIDE_TEXT


def too_long_line(reading: Reading) -> Flaw:
    """The Flaw of a line that is too long to be read."""
    return Flaw(
        f"the line is longer than max_document_bytes = {reading.max_document_bytes} and"
        f" {LINE_BYTES_BESIDE_TEXT} bytes for other fields",
        "cut the document, or raise --max_document_bytes",
    )


def document_of_line(line: bytes | bytearray, reading: Reading) -> str:
    """Return the text of a line of JSON; raise Flaw."""
    try:
        text = _text_of(_decoded(line), reading)
    except Flaw:
        _explain(line)
        raise
    # Lone surrogates and NUL require a \u escape, and a text is no longer than its line.
    if not text or b"\\u" in line or len(line) > reading.max_document_bytes:
        require_usable(text, reading)
    return text


def _text_of(line: str, reading: Reading) -> str:
    text = _text_alone(line, reading)
    return _text_among(_parsed(line, reading), reading) if text is None else text


def _text_alone(line: str, reading: Reading) -> str | None:
    """Fast path: the text of a line whose only field is the text. None for any other line."""
    opened = reading.opening.match(line) if line.endswith(USUAL_END) else None
    if not opened:
        return None
    try:
        text, end = _STRING(line, opened.end(), True)
    except json.JSONDecodeError:
        return None
    return text if end == len(line) - len("}\n") else None


def _text_among(value: Any, reading: Reading) -> str:
    if not isinstance(value, tuple):
        raise Flaw(f"is {_kind(value)}, not an object", f"write {reading.example}")
    texts = [content for key, content in value if key == reading.text_field]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise _no_text(value, texts, reading)
    return texts[0]


def _explain(line: bytes | bytearray) -> None:
    """Raise Flaw for common errors that the decoder describes less clearly."""
    if line.startswith(BOM):
        raise _byte_order_mark()
    if b"\0" in line:
        raise Flaw("holds a NUL byte", "remove it, or write the line again if the disk was full")
    if line.isspace():
        raise Flaw("the line is blank", "remove it")


def _no_text(value: tuple[tuple[str, Any], ...], texts: list[Any], reading: Reading) -> Flaw:
    name = json.dumps(reading.text_field)
    if not texts:
        return Flaw(*missing_in_line(value, reading.text_field))
    if len(texts) > 1:
        return Flaw(f"has {name} {len(texts)} times", "keep the one that is meant")
    return Flaw(f"{name} is {_kind(texts[0])}, not a string", f"write {reading.example}")


def document_of_file(content: bytes, reading: Reading) -> str:
    """Return the text of a whole file; raise Flaw.

    `content` may be truncated after `max_document_bytes`.
    """
    if content.startswith(BOM):
        raise _byte_order_mark()
    nul = content.find(b"\0")
    if nul >= 0:
        begin = content.rfind(b"\n", 0, nul) + 1
        raise Flaw("holds a NUL byte", "remove it, or give text files only", begin)
    if len(content) > reading.max_document_bytes:
        raise Flaw(
            f"the document is longer than max_document_bytes = {reading.max_document_bytes}",
            "cut it into several files, or raise --max_document_bytes",
        )
    return _decoded(content)


def document_of_cell(content: bytes | None, reading: Reading) -> str:
    """Return the text of a table cell; raise Flaw."""
    if content is None:
        raise Flaw(f"{json.dumps(reading.text_field)} is null, not a string", "remove the row")
    text = _decoded(content)
    require_usable(text, reading)
    return text


def require_usable(text: str, reading: Reading) -> None:
    """Raise Flaw for text that is empty, too long or not Unicode."""
    if not text:
        raise Flaw("the document is empty", "remove it")
    if "\0" in text:
        raise Flaw("the text holds a NUL character", "remove it")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(text[error.start]):04x}"
        what = f"contains a lone surrogate ({lone})"
        raise Flaw(what, "write the pair or drop it") from None
    if size > reading.max_document_bytes:
        raise too_long_document(size, reading)


def too_long_document(size: int, reading: Reading) -> Flaw:
    """The Flaw of a document of `size` bytes."""
    limit = f"max_document_bytes = {reading.max_document_bytes}"
    return Flaw(
        f"the document has {size} bytes, more than {limit}",
        "cut it into several, or raise --max_document_bytes",
    )


def _byte_order_mark() -> Flaw:
    return Flaw("begins with a byte order mark", "save the file as UTF-8 without it")


def _decoded(content: bytes | bytearray) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 (0x{content[error.start]:02x}: {error.reason})"
        raise Flaw(what, "convert the file to UTF-8", error.start) from None


def _no_number(name: str) -> NoReturn:
    raise Flaw(f"{name} is not JSON", "write a number or null")


def _integer(digits: str) -> int:
    """Return 0, as numbers are unused; raise Flaw for too many digits."""
    if len(digits) > MOST_DIGITS:
        raise Flaw(f"holds a number with too many digits ({len(digits)})", "shorten it")
    return 0


# Objects become tuples of pairs, so that duplicate fields are detected.
_JSON = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=_no_number, parse_int=_integer)
_STRING = _JSON.parse_string  # pyright: ignore[reportAttributeAccessIssue] (stubs leave it out)
USUAL_END = '"}\n'  # of a line whose text is its last field


def _parsed(line: str, reading: Reading) -> Any:
    try:
        value = _decoded_json(line)
    except RecursionError:
        raise _nested_too_deep(reading) from None
    except json.JSONDecodeError as error:
        cut = error.pos >= len(line.rstrip()) or error.msg.startswith("Unterminated")
        state = "is cut off" if cut else "is not JSON"
        what = f"{state} ({re.sub(r' at$', '', error.msg)} at column {error.colno})"
        raise Flaw(what, f"write {reading.example} on one line") from None
    if len(line) > MOST_NESTED:  # counting takes time
        brackets = line.count("[") + line.count("{")
        if brackets > MOST_NESTED and _is_deep(value):
            raise _nested_too_deep(reading)
    return value


def _decoded_json(line: str) -> Any:
    """Decode like `_JSON.decode`, without its slow search for surrounding blanks."""
    if line.startswith("{"):
        value, end = _JSON.raw_decode(line)
        if line[end:] in ("\n", "\r\n", ""):
            return value
    return _JSON.decode(line)


def _nested_too_deep(reading: Reading) -> Flaw:
    return Flaw(f"is nested too deep (more than {MOST_NESTED})", f"write {reading.example}")


def _is_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level and depth <= MOST_NESTED:
        inner = [_inside(container) for container in level if isinstance(container, list | tuple)]
        level = [item for items in inner for item in items]
        depth += bool(inner)
    return depth > MOST_NESTED


def _inside(container: list[Any] | tuple[Any, ...]) -> list[Any]:
    if isinstance(container, list):
        return container
    return [content for _, content in container]


def _kind(value: Any) -> str:
    """Name the JSON type of a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {tuple: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
