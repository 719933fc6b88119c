"""Records around texts: read with them, and written again with what is left of the text.

The text stands where --text_field names it, that of a template in "text".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minimind.data.text.documents import (
    DocumentError,
    JsonCell,
    ReadOptions,
    Records,
    decode_utf8,
    document_of_cells,
    document_of_line,
)

OF_TEMPLATE = "text"
# A name in a JSON object, with what stands between it and the content before it.
_NAME = re.compile(r'[\s,{]*+("(?:[^"\\]|\\.)*+")\s*+:\s*+')
_CONTENT = json.JSONDecoder(parse_int=str)  # Python limits the digits of an int
_BROKEN = re.compile(r"\r?\n\s*+")  # strings of JSON have no newlines


class InRecord(str):
    """The text of a document, and the JSON object that it is of, on one line."""

    __slots__ = ("record",)
    record: str

    def __new__(cls, text: str, record: str) -> InRecord:
        document = super().__new__(cls, text)
        document.record = record
        return document


def with_records(reading: ReadOptions) -> ReadOptions:
    """Read the documents of lines and rows as `InRecord`."""
    composed = field_of(reading) not in reading.names

    def document(text: str, record: str) -> InRecord:
        if composed:
            if any(name == OF_TEMPLATE for name, _, _ in _fields(record)):
                raise DocumentError(
                    f'has "{OF_TEMPLATE}", where the text of --text_field {reading.text_field} is'
                    " written",
                    f"rename it, or write {{{OF_TEMPLATE}}} into the template",
                )
            record = f'{record[:-1]}, "{OF_TEMPLATE}": ""}}'
        return InRecord(text, record)

    def of_line(line: bytes | bytearray) -> str:
        text = document_of_line(line, reading)
        return document(text, _BROKEN.sub(" ", decode_utf8(line).strip()))

    def of_row(row: dict[str, Any]) -> str:
        cells = {name: _cell(row, name) for name in reading.names}
        text = document_of_cells(cells, reading)
        fields = (f"{json.dumps(name)}: {_json_of(name, row[name], reading)}" for name in row)
        return document(text, f"{{{', '.join(fields)}}}")

    def columns(names: Sequence[str]) -> list[str]:
        if twice := [name for name in names if names.count(name) > 1]:
            reason = f"has the column {json.dumps(twice[0])} {names.count(twice[0])} times"
            raise DocumentError(reason, "keep the one that is meant")
        return list(names)

    return replace(reading, records=Records(of_line, of_row, columns, around_text=True))


def field_of(reading: ReadOptions) -> str:
    """The field of the text in what is written."""
    return OF_TEMPLATE if re.search("[{}]", reading.text_field) else reading.text_field


def line_with(text: str, record: str, field: str) -> str:
    """The record with another text in a field that it has; all else stays as it is written."""
    line = _replaced(record, field, json.dumps(text, ensure_ascii=False))
    assert line is not None
    return line


def _replaced(record: str, field: str, new: str) -> str | None:
    """The object with a new content of a field, of the same one that is read; None without it."""
    fields = [*_fields(record)]
    head, _, rest = field.partition(".")
    above = head if rest and field not in [name for name, _, _ in fields] else None
    is_in, written = False, []
    for name, quoted, content in fields:
        changed = new if name == field else None
        if name == above and content.startswith("{"):
            changed = _replaced(content, rest, new)
        is_in = is_in or changed is not None
        written.append(f"{quoted}: {content if changed is None else changed}")
    return f"{{{', '.join(written)}}}" if is_in else None


def _fields(record: str) -> Iterator[tuple[str, str, str]]:
    """Each name of a JSON object, the same as it is written, and the content as it is written."""
    end = 0
    while found := _NAME.match(record, end):
        _, end = _CONTENT.raw_decode(record, found.end())
        yield json.loads(found[1]), found[1], record[found.end() : end]


def _cell(row: Mapping[str, Any], name: str) -> Any:
    """The cell of a column, or of a field in it, by the names around dots."""
    head, _, rest = name.partition(".")
    if name in row or not rest:
        return row[name]
    return None if row[head] is None else _cell(row[head], rest)


def _json_of(name: str, value: Any, reading: ReadOptions) -> str:
    """The JSON of a cell, in which times and decimals are text, and floats that JSON lacks null."""
    if isinstance(value, JsonCell):
        value.decoded(reading.example)
        content = value.content
        return _BROKEN.sub(" ", content if isinstance(content, str) else decode_utf8(content))
    if isinstance(value, bytes):
        try:
            value = decode_utf8(value)
        except DocumentError as error:
            remedy = "write it as text, or leave the field out"
            raise DocumentError(f"{json.dumps(name)} {error.reason}", remedy) from None
    if isinstance(value, dict):
        inner = (f"{json.dumps(k)}: {_json_of(f'{name}.{k}', value[k], reading)}" for k in value)
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_json_of(name, one, reading) for one in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    return json.dumps(value, ensure_ascii=False, default=str)
