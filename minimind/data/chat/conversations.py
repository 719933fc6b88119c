"""Parse a record into the messages of a conversation, or raise DocumentError.

A record is a JSON object with one of

    "conversations": turns with "role" and "content" (MiniMind), or "from" and "value" (ShareGPT)
    "messages": turns with "role" and "content" (OpenAI); content may be a list of text parts
    "prompt" and "completion": two strings, a user and an assistant turn

A key beside them that carries text of the conversation, media, or a weight in the loss is refused
(`LOST`): it would be lost. Others, such as "id", are ignored, and named to whoever reads. A key
without a value (null, "", [], {}, also as text) counts as absent: the row of a table has its
columns as keys, and gives every key to every turn. A switch ("off", "none") and a weight of 1 are
ignored as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from minimind.data.chat.order import require_order
from minimind.data.chat.turns import (
    ASSISTANT,
    OPENAI,
    SHAREGPT,
    SYSTEM,
    USER,
    WEIGHT,
    Message,
    Pairs,
    Spelling,
    counts_fully,
    is_absent,
    message_of_turn,
    require_content,
    require_single,
    shown,
    snake_case,
    turn_of,
)
from minimind.data.text.documents import (
    DocumentError,
    JsonCell,
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


@dataclass(frozen=True)
class Lost:
    """Keys beside the turns whose value would be lost, and what to do about them.

    `names` matches them in lower case, without separators or with underscores.
    """

    names: re.Pattern[str]
    remedy: str
    may_be_number: bool = True  # counts as lost; else only text, lists and objects do
    may_repeat: bool = False  # text that a turn says too is not lost


_SYSTEM = r"(system|sys|developer)"
_MEDIA = r"(screenshot|figure|frame|image|img|picture|photo|video|audio|speech|pixelvalue)"
TEMPLATE_VALUES = Lost(re.compile(r"(chat_)?template_(kwargs|args)"), "remove it")
SYSTEM_PROMPTS = Lost(
    re.compile(
        rf"{_SYSTEM}|\w*{_SYSTEM}(prompt|message|msg|instruction|text|content)s?"
        r"|(custom)?instructions?|(bot_)?persona|preamble|character|scenario|guidelines?|rules?"
        r"|(meta|initial)_prompts?"
    ),
    "write it as the first turn, with the role system",
    may_be_number=False,
    may_repeat=True,
)
LOST = (
    SYSTEM_PROMPTS,
    Lost(
        re.compile(
            r"\w*(tool|function)s?(calls?|choice|definitions?|descriptions?|schemas?|list|specs?|json)?"
            r"|((available_)?apis?|plugins?|mcp_servers?)(_list)?"
        ),
        "write them into the system message, or remove the conversation",
        may_be_number=False,
        may_repeat=True,
    ),
    Lost(
        re.compile(
            r"\w*(history|contexts?|documents?|passages?)|(previous|past)_(turns|dialogues?|messages)"
            r"|facts?|evidences?|articles?|knowledge|background|quer(y|ies)|inputs?"
            r"|outputs?|responses?|(reasoning|thinking)(content|text|traces?)?|thoughts?|cot"
        ),
        "write its text into a turn, or remove it",
        may_be_number=False,
        may_repeat=True,
    ),
    Lost(
        re.compile(
            rf"\w*{_MEDIA}s?(paths?|urls?|uris?|files?|filenames?|data|bytes|b64|base64|list|content)?"
            r"|media|attachments?"
        ),
        "remove the conversation, as a model of text cannot read it",
        may_be_number=False,
    ),
    Lost(
        re.compile(r"(chosen|rejected|negative)(s|responses?|messages?|conversations?|answers?)?"),
        "keep the answer to train on as a turn, and remove it",
        may_be_number=False,
    ),
    Lost(
        re.compile(r"labels?|kto(tag|label)|(un)?desirable"),
        "keep the conversations with good answers alone, and remove it",
    ),
    Lost(WEIGHT, "remove it, or the conversation: all count alike"),
    TEMPLATE_VALUES,
)
COUNT = re.compile(r"(has|num|n|is|use)_")  # keys that tell about a conversation
SWITCH = re.compile(r"\s*(on|off|true|false|none|no|yes)\s*", re.IGNORECASE)  # says nothing itself
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
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


def conversation_of_line(
    line: bytes | bytearray, reading: ReadOptions, ignored: set[str] | None = None
) -> str:
    """Return the conversation of a line of JSON as canonical text; raise DocumentError.

    The names of keys that are ignored are added to `ignored`.
    """
    try:
        text = canonical_text(messages_of(parse_line(decode_utf8(line), EXAMPLE), ignored))
    except DocumentError:
        explain_line(line)
        raise
    return _within_limit(text, reading)


def conversation_of_row(
    row: Mapping[str, Any], reading: ReadOptions, ignored: set[str] | None = None
) -> str:
    """Return the conversation of a row of a table as canonical text; raise DocumentError.

    Strings are bytes. The columns are those of `conversation_columns`.
    """
    given = tuple((key, _given(key, value)) for key, value in row.items() if value is not None)
    return _within_limit(canonical_text(messages_of(given, ignored)), reading)


def conversation_columns(names: Sequence[str], ignored: set[str] | None = None) -> list[str]:
    """Return which columns of a table a conversation is read from; raise DocumentError for none.

    The names of the others are added to `ignored`.
    """
    columns = tuple((name, None) for name in names)
    read = [name for name in names if name in (*LISTS, *PAIR) or lost_of(name)]
    require_single(columns, read)
    if set(LISTS).isdisjoint(names) and not set(PAIR) <= set(names):
        raise _no_conversation(columns)
    if ignored is not None:
        ignored.update(set(names).difference(read))
    return read


@lru_cache(2**10)
def lost_of(key: str) -> Lost | None:
    """What would be lost with a key beside the turns; None for one that is ignored."""
    name = snake_case(key)
    if COUNT.match(name) and not WEIGHT.fullmatch(name):
        return None
    joined = name.replace("_", "")
    return next(
        (one for one in LOST if one.names.fullmatch(name) or one.names.fullmatch(joined)), None
    )


def _given(key: str, value: Any) -> Any:
    """The value of a column as `parse_line` gives it; raise DocumentError for other than UTF-8."""
    if key not in (*LISTS, *PAIR):
        return _decoded(value, errors="replace")  # only whether it has a value counts
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


def _decoded(value: Any, errors: str = "strict") -> Any:
    if isinstance(value, bytes):
        return decode_utf8(value) if errors == "strict" else value.decode(errors=errors)
    if isinstance(value, JsonCell):
        return value.decoded(EXAMPLE)
    if isinstance(value, dict):
        given = ((key, inner) for key, inner in value.items() if inner is not None)
        return tuple((key, _decoded(inner, errors)) for key, inner in given)
    is_list = isinstance(value, list | tuple)  # tuples are in maps, and objects for `messages_of`
    return [_decoded(inner, errors) for inner in value] if is_list else value


def _within_limit(text: str, reading: ReadOptions) -> str:
    limit = reading.max_document_bytes
    if len(text) * MAX_BYTES_PER_CHARACTER > limit and (size := len(text.encode())) > limit:
        raise too_long_document(size, reading)
    return text


def canonical_text(messages: Sequence[Message]) -> str:
    """Return the messages as compact JSON, the same text for every format of a record."""
    return json.dumps([*map(turn_of, messages)], ensure_ascii=False, separators=(",", ":"))


def conversation_of(text: str) -> list[Message]:
    """Return the messages of a canonical text."""
    return [Message(**turn) for turn in json.loads(text)]


def messages_of(value: Any, ignored: set[str] | None = None) -> list[Message]:
    """Return the messages of a record as `parse_line` decodes it; raise DocumentError.

    The names of keys that are ignored are added to `ignored`. A system turn without text is left
    out.
    """
    if not isinstance(value, tuple):
        raise DocumentError(f"is {json_type(value)}, not an object", f"write {EXAMPLE}")
    fields = dict(value)
    if len(fields) != len(value):
        require_single(value, [key for key, _ in value if key in (*LISTS, *PAIR) or lost_of(key)])
    forms = [(key,) for key in LISTS if key in fields]
    forms += [PAIR] if all(key in fields for key in PAIR) else []
    if len(forms) > 1:
        given = [form for form in forms if not all(is_absent(fields[key]) for key in form)]
        forms = given or forms[:1]
    if not forms:
        raise _no_conversation(value)
    if len(forms) > 1:
        names = " and ".join(f'"{key}"' for form in forms for key in form)
        raise DocumentError(f"has {names}, more than one conversation", "keep one of them")
    (keys,) = forms
    beside = {key: fields[key] for key in fields if key not in keys and not is_absent(fields[key])}
    unread = set() if ignored is None else ignored
    if beside:
        unread.update(_require_nothing_lost(beside, [fields[key] for key in keys]))
    if keys == PAIR:
        messages = _messages_of_pair(fields)
    else:
        messages = _messages_of_turns(fields[keys[0]], keys[0], unread)
    require_order(messages)
    return [one for one in messages if one.role != SYSTEM or one.content]


def _messages_of_turns(turns: Any, key: str, ignored: set[str]) -> list[Message]:
    if not isinstance(turns, list):
        raise DocumentError(f'"{key}" is {json_type(turns)}, not a list', f"write {EXAMPLE}")
    if not turns:
        raise DocumentError(f'"{key}" is an empty list', f"write {EXAMPLE}, or remove it")
    spelling = _spelling(turns[0], key)
    messages = []
    for number, turn in enumerate(turns, 1):
        try:
            messages.append(message_of_turn(turn, spelling, ignored))
        except DocumentError as error:
            raise _in_turn(number, error) from None
    return messages


def _spelling(first: Any, key: str) -> Spelling:
    """The keys of all turns, by those of the first."""
    turn = first if isinstance(first, tuple) else ()
    keys = {name for name, value in turn if value is not None}
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


def _require_nothing_lost(beside: dict[str, Any], turns: list[Any]) -> list[str]:
    """Return the keys that are ignored; raise DocumentError for one whose value would be lost."""
    unread = []
    for key, value in beside.items():
        lost = lost_of(key)
        if lost is TEMPLATE_VALUES and isinstance(value, tuple):
            inner = {name: one for name, one in value if not is_absent(one)}
            _require_nothing_lost(inner, turns)
            unread.append(key)
            continue
        if lost is None or _says_nothing_else(value, lost, turns):
            unread.append(key)
            continue
        what = f"has {shown(key)} outside of the turns, which would be lost"
        raise DocumentError(what, lost.remedy)
    return unread


def _says_nothing_else(value: Any, lost: Lost, turns: list[Any]) -> bool:
    """Whether a value is that of every conversation, or repeats what a turn says."""
    if isinstance(value, str):
        if lost.names is WEIGHT:
            return counts_fully(value) or value in SPLITS
        if not lost.may_be_number and SWITCH.fullmatch(value):
            return True
        if lost is SYSTEM_PROMPTS:
            return _is_system_turn(value.strip(), turns)
        return lost.may_repeat and _occurs(value.strip(), turns)
    if isinstance(value, list | tuple):
        return False
    return not lost.may_be_number or (lost.names is WEIGHT and counts_fully(value))


def _is_system_turn(text: str, turns: list[Any]) -> bool:
    """Whether a system turn says just this."""
    listed = [
        dict(turn)
        for one in turns
        if isinstance(one, list)
        for turn in one
        if isinstance(turn, tuple)
    ]
    systems = [turn for turn in listed if SYSTEM in (turn.get("role"), turn.get("from"))]
    said = [turn.get(key) for turn in systems for key in ("content", "value")]
    return any(isinstance(one, str) and one.strip() == text for one in said)


def _occurs(text: str, value: Any) -> bool:
    if isinstance(value, str):
        return text in value
    inner = (one for _, one in value) if isinstance(value, tuple) else value
    return isinstance(value, list | tuple) and any(_occurs(text, one) for one in inner)


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
