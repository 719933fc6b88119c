"""Parse a JSON line, a text file or a table cell into a document, or raise DocumentError.

A document is a text, or a record of several fields; advice says which field of a record is none.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import Any

from minimind.errors import UsageError
from minimind.runtime.file_kinds import is_error_of_server


@dataclass(frozen=True)
class Records:
    """Readers of records; each raises DocumentError.

    `of_line` and `of_row` give the text of a document. The row of a table is a dictionary of its
    columns, in which strings are bytes and a value that is not given is None. `columns` selects
    those to read from all names of columns.
    """

    of_line: Callable[[bytes | bytearray], str]
    of_row: Callable[[dict[str, Any]], str]
    columns: Callable[[Sequence[str]], list[str]]
    around_text: bool = False  # of the text field, which a table must have; times are text


KEYS_SHOWN, KEY_LENGTH_SHOWN = 3, 40
# Fields of fine-tuning data, as MiniMind, ShareGPT, OpenAI and TRL name them.
CONVERSATIONS = ("conversations", "messages", "chosen")
SPEAKERS = ("role", "from")  # keys of a turn
PLAIN = re.compile(rf"[\w.:][\w.: -]{{,{KEY_LENGTH_SHOWN - 1}}}")  # safe to print and to type


def missing_in_line(pairs: Sequence[tuple[str, Any]], field: str, example: str) -> tuple[str, str]:
    """Problem and remedy for a JSON object without `field`, which `example` has."""
    name, example = json.dumps(field), f"write {example}"
    if problem := _conversation([key for key, value in pairs if isinstance(value, list)], name):
        return problem, f"fine-tune on it with --task sft, or {example}, plain text"
    texts = [*_names_of_texts(pairs)]
    shown = [json.dumps(key[:KEY_LENGTH_SHOWN]) for key, _ in pairs[:KEYS_SHOWN]]
    more = ["..."] if len(pairs) > KEYS_SHOWN else []
    there = f" but {', '.join(shown + more)}" if shown else ""
    way = f"{_way(texts, 'field')}, or {example}" if texts else example
    if is_error_of_server(pairs):
        again = "if it is the answer of a server, remove it or download its text again"
        way = f"{again}; else {_way(texts, 'field') if texts else example}"
    return f"has no {name}{there}", way


def _names_of_texts(pairs: Sequence[tuple[str, Any]], above: str = "") -> Iterator[str]:
    """The names of the strings of a JSON object, and of those in its objects."""
    for key, value in pairs:
        if isinstance(value, str):
            yield f"{above}{key}"
        elif isinstance(value, tuple) and not above:
            yield from _names_of_texts(value, f"{key}.")


def missing_in_table(columns: Sequence[str], texts: Sequence[str], field: str) -> tuple[str, str]:
    """Problem and remedy for a table with these columns; `texts` hold strings."""
    name = json.dumps(field)
    if problem := _conversation([column for column in columns if column not in texts], name):
        return (
            problem,
            "fine-tune on it with --task sft, or give a table with a column of plain text",
        )
    there = f" but {', '.join(map(json.dumps, columns))}" if columns else " and no other"
    return f"has no column {name}{there}", _way(texts, "column")


def _conversation(lists: Sequence[str], name: str) -> str:
    """The problem of fine-tuning data, if a list field looks like conversations."""
    keys = [json.dumps(key) for key in lists if key in CONVERSATIONS]
    return f"has {keys[0]}, a conversation to fine-tune on, and no {name}" if keys else ""


def is_list_of_turns(value: Any) -> bool:
    """Whether a decoded line is the list of turns itself, as in nanochat's files."""
    turns = value if isinstance(value, list) else []
    return any(
        isinstance(turn, tuple) and not dict(turn).keys().isdisjoint(SPEAKERS) for turn in turns
    )


def _way(texts: Sequence[str], what: str) -> str:
    names = list(dict.fromkeys(texts))
    if len(names) == 1 and PLAIN.fullmatch(names[0]):
        return f"give --text_field {shlex.quote(names[0])}"
    return f"give --text_field and the {what} with the text"


# What is wrong with a line, or with the first one of a table.
RETURNS = ("has \\r alone at the end of lines", "write \\n there (tr '\\r' '\\n')")
ONE_LINE = "write each object on a line of its own (jq -c .)"
RETURN_BETWEEN = re.compile(rb"\}[ \t]*\r[ \t]*\{")
BOM = b"\xef\xbb\xbf"
# JSON may escape a byte of text as six ("\u0001"); a line may have other fields.
LINE_BYTES_PER_TEXT_BYTE = 6
LINE_BYTES_BESIDE_TEXT = 2**16
# Fixed limits: Python's depend on version, environment and stack depth, and every rank must accept
# the same documents.
MAX_DIGITS = 4300
PLAIN_DIGITS = 640  # every Python converts so many, whatever its environment
MAX_DEPTH = 100


@dataclass(frozen=True)
class ReadOptions:
    r"""Options for reading documents; raise UsageError for a template that is none.

    `text_field` names a field ("text"), a field in a field ("data.text") unless a field has this
    name, or has several names in a template ("{title}\n{data.text}").
    """

    text_field: str = "text"
    max_document_bytes: int = 64 * 2**20
    records: Records | None = None  # documents are whole records and not the text of the field
    # Texts that are held out (sha256 -> name of the file); they are rejected.
    held_out: Mapping[bytes, str] = field(default_factory=dict, compare=False)
    # What readers say beside documents: files, and what follows the name of each.
    remarks: list[tuple[Path, str]] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        _pieces_of(self.text_field)

    @cached_property
    def _pieces(self) -> list[tuple[str, str | None]]:
        return _pieces_of(self.text_field)

    @cached_property
    def names(self) -> list[str]:
        """The names of the fields, each once."""
        return list(dict.fromkeys(name for _, name in self._pieces if name is not None))

    @property
    def required(self) -> list[str]:
        """The names of the columns that a table must have."""
        return self.names if self.records is None or self.records.around_text else []

    def text_of(self, content_of: Callable[[str], str]) -> str:
        """The text of a document, given the contents of its fields by name."""
        return "".join(
            text + ("" if name is None else content_of(name)) for text, name in self._pieces
        )

    @cached_property
    def example(self) -> str:
        fields: dict[str, Any] = {}
        for name in sorted(self.names, key=lambda name: -name.count(".")):
            *above, last = name.split(".")
            inner = fields
            for key in above:
                inner = inner.setdefault(key, {})
            inner.setdefault(last, "...")
        return json.dumps(fields)

    @cached_property
    def opening(self) -> re.Pattern[str] | None:
        """The start of a line whose first field is the text, including the opening quote."""
        if self._pieces != [("", self.text_field)]:
            return None
        name = re.escape(json.dumps(self.text_field, ensure_ascii=False))
        return re.compile(rf'\{{[ \t]*{name}[ \t]*:[ \t]*"')


def _pieces_of(text_field: str) -> list[tuple[str, str | None]]:
    """The text of a template and the name behind it; None if there is none."""

    def no_template(why: str) -> UsageError:
        return UsageError(
            f"--text_field {text_field}: is not a template of fields ({why}); write names in"
            " braces, as in '{title}\\n{text}', and other braces twice"
        )

    if not re.search("[{}]", text_field):
        return [("", text_field)]
    try:
        # A shell leaves a newline as it is typed.
        parsed = [*Formatter().parse(text_field.replace("\\n", "\n"))]
    except ValueError as error:
        raise no_template(str(error)) from error
    if any(
        name == "" or how or conversion or "[" in (name or "")
        for _, name, how, conversion in parsed
    ):
        raise no_template("its braces may hold only a name")
    if all(name is None for _, name, _, _ in parsed):
        raise no_template("it names no field")
    return [(text, name) for text, name, _, _ in parsed]


@dataclass(frozen=True)
class Rejection:
    """A rejected document: the reason and its position. `line` counts from 1, as rows of tables do.

    `byte` is the offset of the line in the decompressed file, or of the first byte not in UTF-8.
    Where the reader lost its place, `documents` are all that are lost with it, and `bytes` what is
    lost of the file besides, in which documents cannot be counted.
    """

    path: Path
    line: int
    byte: int | None
    what: str
    remedy: str
    documents: int = 1
    bytes: int = 0

    def __str__(self) -> str:
        place = f"row {self.line}" if self.byte is None else f"byte {self.byte}"
        return f"{self.path}:{self.line} ({place}): {self.what}; {self.remedy}"


@dataclass(frozen=True)
class Segment:
    """A part of an input that is read independently.

    `start` and `stop` are byte offsets in lines (a line belongs to the segment in which it begins),
    rows in tables, and 0 and the size for files read as a whole. `weight` is the approximate size
    on disk in bytes.
    """

    path: Path
    start: int
    stop: int
    weight: int


# A document: its text, the bytes of the segment read so far, its line or row, and its offset.
Found = Iterator[tuple[str, int, int, int | None] | Rejection]


class DocumentError(Exception):
    """Raised for a bad document: reason, remedy, and offset in the line.

    `documents` and `bytes` count what is lost, as in a Rejection.
    """

    def __init__(self, reason: str, remedy: str, at: int = 0, documents: int = 1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.at = at
        self.documents = documents
        self.bytes = 0


@dataclass(frozen=True)
class JsonCell:
    """A value of a table whose content is JSON; decoded with its row, which has its errors."""

    content: bytes | str

    def decoded(self, example: str) -> Any:
        """The value as `parse_line` gives it; raise DocumentError."""
        content = self.content
        return parse_line(content if isinstance(content, str) else decode_utf8(content), example)


def is_too_long(line_bytes: int, backslashes: int, reading: ReadOptions) -> bool:
    """Whether a line, or its beginning, is too long for a document within the limit.

    Only escaped characters take more bytes in JSON than in UTF-8, so a long line without
    backslashes is recognized after little more than `max_document_bytes`.
    """
    unescaped_bytes = line_bytes - (LINE_BYTES_PER_TEXT_BYTE - 1) * backslashes
    min_text_bytes = max(unescaped_bytes, line_bytes // LINE_BYTES_PER_TEXT_BYTE)
    return min_text_bytes > reading.max_document_bytes + LINE_BYTES_BESIDE_TEXT


def too_long_line(reading: ReadOptions) -> DocumentError:
    """The DocumentError of a line that is too long to be read."""
    return DocumentError(
        f"the line is longer than max_document_bytes = {reading.max_document_bytes} and"
        f" {LINE_BYTES_BESIDE_TEXT} bytes for other fields",
        "cut the document, or raise --max_document_bytes",
    )


def document_of_line(line: bytes | bytearray, reading: ReadOptions) -> str:
    """Return the text of a line of JSON; raise DocumentError."""
    try:
        decoded = decode_utf8(line)
        text = _text_fast_path(decoded, reading)
        if text is None:
            text = _text_of_fields(parse_line(decoded, reading.example), reading)
    except DocumentError:
        explain_line(line)
        raise
    # Lone surrogates and NUL require a \u escape, and a text is no longer than its line.
    if not text or b"\\u" in line or len(line) > reading.max_document_bytes:
        require_usable(text, reading)
    return text


def _text_fast_path(line: str, reading: ReadOptions) -> str | None:
    """Fast path: the text of a line whose only field is the text. None for any other line."""
    opening = reading.opening if line.endswith(USUAL_END) else None
    opened = opening and opening.match(line)
    if not opened:
        return None
    try:
        text, end = _STRING(line, opened.end(), True)
    except json.JSONDecodeError:
        return None
    return text if end == len(line) - len("}\n") else None


def _text_of_fields(value: Any, reading: ReadOptions) -> str:
    if not isinstance(value, tuple):
        if is_list_of_turns(value):
            remedy = f"fine-tune on it with --task sft, or write {reading.example}, plain text"
            raise DocumentError("is a list of turns, a conversation to fine-tune on", remedy)
        raise DocumentError(f"is {json_type(value)}, not an object", f"write {reading.example}")
    return reading.text_of(lambda name: _content_at(value, name, reading))


def _content_at(value: tuple[tuple[str, Any], ...], name: str, reading: ReadOptions) -> str:
    """The string of a JSON object by its name, or by names with dots between them.

    Raise DocumentError for another number of them than one.
    """
    contents = _contents(value, name)
    if len(contents) != 1 or not isinstance(contents[0], str):
        raise _no_text(value, contents, name, reading)
    return contents[0]


def _contents(pairs: tuple[tuple[str, Any], ...], name: str) -> list[Any]:
    """What a JSON object has by a name, or else by the names around its first dot."""
    contents = [content for key, content in pairs if key == name]
    head, _, rest = name.partition(".")
    if contents or not rest:
        return contents
    owners = [owner for owner in _contents(pairs, head) if isinstance(owner, tuple)]
    return [content for owner in owners for content in _contents(owner, rest)]


def explain_line(line: bytes | bytearray) -> None:
    """Raise DocumentError for common errors that the decoder describes less clearly."""
    if line.startswith(BOM):
        raise _byte_order_mark()
    if b"\0" in line:
        raise DocumentError(
            "holds a NUL byte", "remove it, or write the line again if the disk was full"
        )
    if line.isspace():
        raise DocumentError("the line is blank", "remove it")
    if line.strip() == b"{":
        raise DocumentError("is the first line of an object", ONE_LINE)
    if RETURN_BETWEEN.search(line):
        raise DocumentError(*RETURNS)


def _no_text(
    value: tuple[tuple[str, Any], ...], texts: list[Any], field: str, reading: ReadOptions
) -> DocumentError:
    name = json.dumps(field)
    if not texts:
        return DocumentError(*missing_in_line(value, field, reading.example))
    if len(texts) > 1:
        return DocumentError(f"has {name} {len(texts)} times", "keep the one that is meant")
    return DocumentError(
        f"{name} is {json_type(texts[0])}, not a string", f"write {reading.example}"
    )


def document_of_file(content: bytes, reading: ReadOptions) -> str:
    """Return the text of a whole file; raise DocumentError.

    `content` may be truncated after `max_document_bytes`.
    """
    if content.startswith(BOM):
        raise _byte_order_mark()
    nul = content.find(b"\0")
    if nul >= 0:
        begin = content.rfind(b"\n", 0, nul) + 1
        raise DocumentError("holds a NUL byte", "remove it, or give text files only", begin)
    if len(content) > reading.max_document_bytes:
        raise DocumentError(
            f"the document is longer than max_document_bytes = {reading.max_document_bytes}",
            "cut it into several files, or raise --max_document_bytes",
        )
    return decode_utf8(content)


def document_of_cells(cells: Mapping[str, bytes | JsonCell | None], reading: ReadOptions) -> str:
    """Return the text of a row, given its cells by the names of fields; raise DocumentError."""

    def content_of(name: str) -> str:
        content: Any = cells[name]
        if isinstance(content, bytes):
            return decode_utf8(content)
        if isinstance(content, JsonCell):
            content = content.decoded(reading.example)
        if not isinstance(content, str):
            reason = f"{json.dumps(name)} is {json_type(content)}, not a string"
            raise DocumentError(reason, "remove the row")
        return content

    text = reading.text_of(content_of)
    require_usable(text, reading)
    return text


def require_usable(text: str, reading: ReadOptions) -> None:
    """Raise DocumentError for text that is empty, too long or not Unicode."""
    if not text:
        raise DocumentError("the document is empty", "remove it")
    size = usable_size(text)
    if size > reading.max_document_bytes:
        raise too_long_document(size, reading)


def usable_size(text: str) -> int:
    """Return the size of a text in UTF-8; raise DocumentError for NUL and lone surrogates."""
    if "\0" in text:
        raise DocumentError("the text holds a NUL character", "remove it")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(text[error.start]):04x}"
        reason = f"contains a lone surrogate ({lone})"
        raise DocumentError(reason, "write the pair, or remove it") from None


def too_long_document(size: int, reading: ReadOptions) -> DocumentError:
    """The DocumentError of a document of `size` bytes."""
    limit = f"max_document_bytes = {reading.max_document_bytes}"
    return DocumentError(
        f"the document has {size} bytes, more than {limit}",
        "cut it into several, or raise --max_document_bytes",
    )


def _byte_order_mark() -> DocumentError:
    return DocumentError("begins with a byte order mark", "save the file as UTF-8 without it")


def decode_utf8(content: bytes | bytearray) -> str:
    """Decode UTF-8; raise DocumentError with the offset of the first invalid byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 (0x{content[error.start]:02x}: {error.reason})"
        raise DocumentError(reason, "convert the file to UTF-8", error.start) from None


class NonFinite(float):
    """NaN, Infinity or -Infinity: no JSON, but Python writes them, and most readers take them."""


class LongInteger(int):
    """An integer of more than `PLAIN_DIGITS`, whose value is not kept."""


def _check_integer(digits: str) -> int:
    """Return an integer; raise DocumentError for too many digits.

    How many digits Python itself converts depends on the environment.
    """
    if len(digits) > MAX_DIGITS:
        raise DocumentError(f"holds a number with too many digits ({len(digits)})", "shorten it")
    return int(digits) if len(digits) <= PLAIN_DIGITS else LongInteger()


# Objects become tuples of pairs, so that duplicate fields are detected.
_JSON = json.JSONDecoder(
    object_pairs_hook=tuple, parse_constant=NonFinite, parse_int=_check_integer
)
_STRING = _JSON.parse_string  # pyright: ignore[reportAttributeAccessIssue] (stubs leave it out)
USUAL_END = '"}\n'  # ends a line whose text is its last field


def parse_line(line: str, example: str) -> Any:
    """Decode JSON, objects as tuples of pairs; raise DocumentError that shows the `example`."""
    try:
        value = _decode_json(line)
    except RecursionError:
        raise _nested_too_deep(example) from None
    except json.JSONDecodeError as error:
        cut = error.pos >= len(line.rstrip()) or error.msg.startswith("Unterminated")
        state = "is cut off" if cut else "is not JSON"
        reason = f"{state} ({re.sub(r' at$', '', error.msg)} at column {error.colno})"
        remedy = ONE_LINE if error.msg == "Extra data" else f"write {example} on one line"
        raise DocumentError(reason, remedy) from None
    if len(line) > MAX_DEPTH:  # counting takes time
        brackets = line.count("[") + line.count("{")
        if brackets > MAX_DEPTH and _is_deep(value):
            raise _nested_too_deep(example)
    return value


def _decode_json(line: str) -> Any:
    """Decode like `_JSON.decode`, without its slow search for surrounding blanks."""
    if line.startswith("{"):
        value, end = _JSON.raw_decode(line)
        if line[end:] in ("\n", "\r\n", ""):
            return value
    return _JSON.decode(line)


def _nested_too_deep(example: str) -> DocumentError:
    return DocumentError(f"is nested too deep (more than {MAX_DEPTH})", f"write {example}")


def _is_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [_inside(container) for container in level if isinstance(container, list | tuple)]
        level = [item for items in inner for item in items]
        depth += bool(inner)
    return depth > MAX_DEPTH


def _inside(container: list[Any] | tuple[Any, ...]) -> list[Any]:
    if isinstance(container, list):
        return container
    return [content for _, content in container]


def json_type(value: Any) -> str:
    """Name the JSON type of a value."""
    if value is None or isinstance(value, bool | NonFinite):
        return json.dumps(value)
    names = {tuple: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
