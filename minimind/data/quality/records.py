"""Records around texts: read with them, and written again as they were read.

The text stands where --text_field names it, that of a template in "text".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
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

TEXT_OF_TEMPLATE = "text"
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
            if TEXT_OF_TEMPLATE in json.loads(record):
                raise DocumentError(
                    f'has "{TEXT_OF_TEMPLATE}", where the text of --text_field'
                    f" {reading.text_field} is written",
                    f"rename it, or write {{{TEXT_OF_TEMPLATE}}} into the template",
                )
            content = json.dumps(text, ensure_ascii=False)
            record = f'{record[:-1]}, "{TEXT_OF_TEMPLATE}": {content}}}'
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
    return TEXT_OF_TEMPLATE if re.search("[{}]", reading.text_field) else reading.text_field


def record_around(text: str, field: str) -> str:
    """The record of a text that was read without one."""
    value: Any = text
    for name in reversed(field.split(".")):
        value = {name: value}
    return json.dumps(value, ensure_ascii=False)


def with_text(record: str, field: str, text: str) -> str:
    """The record with a text in its field: as it is if it has this text, else written anew."""
    fields = owner = json.loads(record)
    name = field
    while name not in owner and "." in name:
        head, _, name = name.partition(".")
        owner = owner[head]
    if owner[name] == text:
        return record
    owner[name] = text
    line = json.dumps(fields, ensure_ascii=False)
    return line.encode(errors="backslashreplace").decode()  # lone surrogates of other fields


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
