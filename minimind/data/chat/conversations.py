"""Parse a record into the messages of a conversation, or raise DocumentError.

A record is a JSON object with one of

    "conversations": turns with "role" and "content" (MiniMind), or "from" and "value" (ShareGPT)
    "messages": turns with "role" and "content" (OpenAI); content may be a list of text parts
    "prompt" and "completion": two strings, a user and an assistant turn

Other keys, such as "id", are ignored, but not "system" and "tools": their text would be lost.
The row of a table has its columns as keys. It gives every key to every turn, so one without a value
counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minimind.data.chat.order import require_order
from minimind.data.chat.turns import (
    ASSISTANT,
    OPENAI,
    SHAREGPT,
    USER,
    Message,
    Pairs,
    Spelling,
    message_of_turn,
    require_content,
    require_single,
    shown,
)
from minimind.data.text.documents import (
    DocumentError,
    ReadOptions,
    decode_utf8,
    explain_line,
    json_type,
    parse_line,
    too_long_document,
)
from minimind.errors import DataError

EXAMPLE = (
    '{"conversations": [{"role": "user", "content": "..."},'
    ' {"role": "assistant", "content": "..."}]}'
)
LISTS = ("conversations", "messages")
PAIR = ("prompt", "completion")
LOST = ("system", "tools")  # text of a conversation outside of its turns
KEYS_SHOWN = 3
MAX_BYTES_PER_CHARACTER = 4


def require_records(files: Iterable[Path]) -> None:
    """Raise DataError for a file that cannot hold conversations."""
    for path in files:
        if path.suffix.lower() == ".txt":
            raise DataError(
                f"{path}: conversations are read from .jsonl, .jsonl.gz, .jsonl.zst, .parquet"
                " and datasets, not from .txt; write one conversation a line of a .jsonl file"
            )


def conversation_of_line(line: bytes | bytearray, reading: ReadOptions) -> str:
    """Return the conversation of a line of JSON as canonical text; raise DocumentError."""
    try:
        text = canonical_text(messages_of(parse_line(decode_utf8(line), EXAMPLE)))
    except DocumentError:
        explain_line(line)
        raise
    return _within_limit(text, reading)


def conversation_of_row(row: Mapping[str, Any], reading: ReadOptions) -> str:
    """Return the conversation of a row of a table as canonical text; raise DocumentError.

    Strings are bytes. The columns are those of `conversation_columns`.
    """
    given = tuple((key, _given(key, value)) for key, value in row.items() if value is not None)
    return _within_limit(canonical_text(messages_of(given)), reading)


def conversation_columns(names: Sequence[str]) -> list[str]:
    """Return which columns of a table a conversation is read from; raise DocumentError for none."""
    columns = tuple((name, None) for name in names)
    require_single(columns, (*LISTS, *PAIR, *LOST))
    if set(LISTS).isdisjoint(names) and not set(PAIR) <= set(names):
        raise _no_conversation(columns)
    return [name for name in names if name in (*LISTS, *PAIR, *LOST)]


def _given(key: str, value: Any) -> Any:
    """The value of a column as `parse_line` gives it; raise DocumentError for other than UTF-8."""
    if not isinstance(value, list):
        try:
            return _decoded(value)
        except DocumentError as error:
            raise DocumentError(f"{shown(key)} {error.reason}", error.remedy) from None
    turns = []
    for number, turn in enumerate(value, 1):
        try:
            turns.append(_decoded(turn))
        except DocumentError as error:
            raise _in_turn(number, error) from None
    return turns


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return decode_utf8(value)
    if isinstance(value, dict):
        return tuple((key, _decoded(inner)) for key, inner in value.items() if inner is not None)
    is_list = isinstance(value, list | tuple)  # tuples are in maps, and objects for `messages_of`
    return [_decoded(inner) for inner in value] if is_list else value


def _within_limit(text: str, reading: ReadOptions) -> str:
    limit = reading.max_document_bytes
    if len(text) * MAX_BYTES_PER_CHARACTER > limit and (size := len(text.encode())) > limit:
        raise too_long_document(size, reading)
    return text


def canonical_text(messages: Sequence[Message]) -> str:
    """Return the messages as compact JSON, the same text for every format of a record."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return json.dumps(turns, ensure_ascii=False, separators=(",", ":"))


def conversation_of(text: str) -> list[Message]:
    """Return the messages of a canonical text."""
    return [Message(**turn) for turn in json.loads(text)]


def messages_of(value: Any) -> list[Message]:
    """Return the messages of a record as `parse_line` decodes it; raise DocumentError."""
    if not isinstance(value, tuple):
        raise DocumentError(f"is {json_type(value)}, not an object", f"write {EXAMPLE}")
    fields = dict(value)
    if len(fields) != len(value):
        require_single(value, (*LISTS, *PAIR))
    _require_nothing_lost(fields)
    lists = [key for key in LISTS if key in fields]
    has_pair = all(key in fields for key in PAIR)
    if len(lists) + has_pair > 1:
        names = " and ".join(f'"{key}"' for key in [*lists, *(PAIR if has_pair else ())])
        raise DocumentError(f"has {names}, more than one conversation", "keep one of them")
    if lists:
        messages = _messages_of_turns(fields[lists[0]], lists[0])
    elif has_pair:
        messages = _messages_of_pair(fields)
    else:
        raise _no_conversation(value)
    require_order(messages)
    return messages


def _messages_of_turns(turns: Any, key: str) -> list[Message]:
    if not isinstance(turns, list):
        raise DocumentError(f'"{key}" is {json_type(turns)}, not a list', f"write {EXAMPLE}")
    if not turns:
        raise DocumentError(f'"{key}" is an empty list', f"write {EXAMPLE}, or remove it")
    spelling = _spelling(turns[0], key)
    messages = []
    for number, turn in enumerate(turns, 1):
        try:
            messages.append(message_of_turn(turn, spelling))
        except DocumentError as error:
            raise _in_turn(number, error) from None
    return messages


def _spelling(first: Any, key: str) -> Spelling:
    """The keys of all turns, by those of the first."""
    keys = {name for name, _ in first} if isinstance(first, tuple) else set()
    is_sharegpt = key == "conversations" and bool(keys & {SHAREGPT.role, SHAREGPT.content})
    return SHAREGPT if is_sharegpt and OPENAI.role not in keys else OPENAI


def _messages_of_pair(fields: dict[str, Any]) -> list[Message]:
    messages = []
    for number, (key, role) in enumerate(zip(PAIR, (USER, ASSISTANT), strict=True), 1):
        try:
            messages.append(Message(role, require_content(fields[key], key)))
        except DocumentError as error:
            raise _in_turn(number, error) from None
    return messages


def _in_turn(number: int, error: DocumentError) -> DocumentError:
    return DocumentError(f"turn {number}: {error.reason}", error.remedy)


def _require_nothing_lost(fields: dict[str, Any]) -> None:
    """Raise DocumentError for text of a conversation that stands outside of its turns."""
    if fields.get("system"):
        remedy = "write it as the first turn, with the role system"
        raise DocumentError('has "system" outside of the turns, which is not supported', remedy)
    if fields.get("tools"):
        remedy = "write them into the system message, or remove the conversation"
        raise DocumentError('has "tools", and tool calls are not supported', remedy)


def _no_conversation(value: Pairs) -> DocumentError:
    keys = [key for key, _ in value]
    for key, other in (PAIR, PAIR[::-1]):
        if key in keys:
            return DocumentError(f'has "{key}" and no "{other}"', "write both, as strings")
    if "text" in keys:
        return DocumentError(
            'has "text" and no conversation',
            f"drop --task sft, which is for conversations, or write {EXAMPLE}",
        )
    if "chosen" in keys:
        what = 'has "chosen", a preference, and no conversation'
        return DocumentError(what, f"write {EXAMPLE}")
    names = [*map(shown, keys[:KEYS_SHOWN]), *(["..."] if len(keys) > KEYS_SHOWN else [])]
    there = f" but {', '.join(names)}" if names else ""
    return DocumentError(f'has no "conversations" or "messages"{there}', f"write {EXAMPLE}")
