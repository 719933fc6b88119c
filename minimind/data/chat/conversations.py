"""Parse a record into the messages of a conversation, or raise DocumentError.

A record is a JSON object with one of

    "conversations": turns with "role" and "content" (MiniMind), or "from" and "value" (ShareGPT)
    "messages": turns with "role" and "content" (OpenAI); content may be a list of text parts
    "prompt" and "completion": two strings, a user and an assistant turn

A key beside them that carries text of the conversation, media, or a weight in the loss is refused
(`LOST`): it would be lost. Others, such as "id", are ignored, and named to whoever reads. A key
without a value (null, "", [], {}, also as text) counts as absent: the row of a table has its
columns as keys, and gives every key to every turn. Ignored as well are a weight of 1, a switch
("off", "none") in place of a system prompt, tools, media or reasoning, and counts and flags
("num_images": 2, "has_tools": "yes").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from minimind.data.chat.order import require_order
from minimind.data.chat.turns import (
    ASSISTANT,
    OPENAI,
    ROLES,
    SHAREGPT,
    SWITCHES,
    SYSTEM,
    USER,
    WEIGHT,
    Message,
    Pairs,
    Spelling,
    is_absent,
    message_of_turn,
    require_content,
    require_single,
    shown,
    snake_case,
    turn_of,
    weight_of,
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
    may_be_switch: bool = False  # text that only switches something counts as none
    said_by: tuple[str, ...] = ()  # roles; what a turn of theirs says too is not lost
    as_whole: bool = False  # as all that the turn says


_SYSTEM = r"(system|sys|developer)"
_MEDIA = r"(screenshot|figure|frame|image|img|picture|photo|video|audio|speech|pixelvalue)"
_FIRST_TURN = "write it as the first turn, with the role system, or remove it"
TEMPLATE_VALUES = Lost(re.compile(r"(chat_)?template_(kwargs|args)"), "remove it")
# Of other names within, as a template may write their text.
TEMPLATE_TEXT = Lost(
    re.compile(".*"),
    "write its text into a turn, or remove it",
    may_be_number=False,
    may_be_switch=True,
)
LOST = (
    Lost(
        re.compile(r"instructions?"),
        _FIRST_TURN,
        may_be_number=False,
        said_by=(SYSTEM, USER),
        as_whole=True,
    ),
    Lost(
        re.compile(
            rf"{_SYSTEM}|\w*{_SYSTEM}(prompt|message|msg|instruction|text|content)s?"
            r"|custom_?instructions?|(bot_)?persona|preamble|character|scenario|guidelines?|rules?"
            r"|(meta|initial)_prompts?"
        ),
        _FIRST_TURN,
        may_be_number=False,
        may_be_switch=True,
        said_by=(SYSTEM,),
        as_whole=True,
    ),
    Lost(
        re.compile(
            r"\w*(tool|function)s?(calls?|choice|definitions?|descriptions?|schemas?|list|specs?|json)?"
            r"|((available_)?apis?|plugins?|mcp_servers?)(_list)?"
        ),
        "write them into the system message, or remove the conversation",
        may_be_number=False,
        may_be_switch=True,
        said_by=ROLES,
    ),
    Lost(
        re.compile(r"(reasoning|thinking)(content|text|traces?)?|thoughts?|cot"),
        "write its text into a turn, or remove it",
        may_be_number=False,
        may_be_switch=True,
        said_by=ROLES,
    ),
    Lost(
        re.compile(
            r"\w*(history|contexts?|documents?|passages?)|(previous|past)_(turns|dialogues?|messages)"
            r"|facts?|evidences?|articles?|knowledge|background|quer(y|ies)|inputs?"
            r"|outputs?|responses?"
        ),
        "write its text into a turn, or remove it",
        may_be_number=False,
        said_by=ROLES,
    ),
    Lost(
        re.compile(
            rf"\w*{_MEDIA}s?(paths?|urls?|uris?|files?|filenames?|data|bytes|b64|base64|list|content)?"
            r"|media|attachments?"
        ),
        "remove the conversation, as a model of text cannot read it",
        may_be_number=False,
        may_be_switch=True,
    ),
    Lost(
        re.compile(r"(chosen|rejected|negative)(s|responses?|messages?|conversations?|answers?)?"),
        "keep the answer to train on as a turn, or the conversations with good ones, and remove it",
    ),
    Lost(
        re.compile(r"labels?|kto(tag|label)|(un)?desirable"),
        "keep the conversations with good answers alone, and remove it",
    ),
    Lost(WEIGHT, "remove it, or the conversation: all count alike"),
    TEMPLATE_VALUES,
)
# Keys that tell about a conversation, unless their value is more than this. Some are another
# spelling of a label or weight: is_rejected, use_loss.
COUNT = re.compile(r"^(?:(has|num|n)|(is|use))_")
SWITCH = re.compile(rf"\s*({'|'.join(SWITCHES)}|none)\s*", re.IGNORECASE)  # says nothing itself
COUNTED = re.compile(rf"{SWITCH.pattern}|\s*[\d.,]+\s*", re.IGNORECASE)
# Text within the values of a template that it does not write as it is.
TEMPLATE_SETTING = re.compile(r"(reasoning|thinking)_(effort|mode|level|budget)")
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
    names = {name, COUNT.sub("", name, count=1)}
    names |= {one.replace("_", "") for one in names}
    return next((one for one in LOST if any(map(one.names.fullmatch, names))), None)


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
    unread = set() if ignored is None else ignored
    if keys == PAIR:
        messages = _messages_of_pair(fields)
    else:
        messages = _messages_of_turns(fields[keys[0]], keys[0], unread)
    for key, given in fields.items():
        if key not in keys and not is_absent(given):
            _require_nothing_lost(key, given, lost_of(key), messages)
            unread.add(key)
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


def _require_nothing_lost(
    key: str, value: Any, lost: Lost | None, messages: Sequence[Message]
) -> None:
    """Raise DocumentError for a key whose value would be lost."""
    if lost in (TEMPLATE_VALUES, TEMPLATE_TEXT) and isinstance(inner := _object(value), tuple):
        for name, one in inner:
            if not (isinstance(one, str) and TEMPLATE_SETTING.fullmatch(snake_case(name))):
                within = lost_of(name) or TEMPLATE_TEXT
                _require_nothing_lost(f"{key}.{name}", one, within, messages)
    elif lost and not is_absent(value) and not _says_nothing_else(key, value, lost, messages):
        what = f"has {shown(key)} outside of the turns, which would be lost"
        raise DocumentError(what, lost.remedy)


def _object(value: Any) -> Any:
    """A value, or the JSON object that a text is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    with suppress(DocumentError):
        return parse_line(value, EXAMPLE)
    return value


def _says_nothing_else(key: str, value: Any, lost: Lost, messages: Sequence[Message]) -> bool:
    """Whether a value is that of every conversation, or repeats what a turn says."""
    if isinstance(value, list | tuple):
        return False
    is_text = isinstance(value, str)
    if count := COUNT.match(snake_case(key)):
        is_spelling = lost.may_be_number and count[2]
        if not is_spelling and (not is_text or COUNTED.fullmatch(value)):
            return True
    if lost.names is WEIGHT:
        return weight_of(value) == 1 or value == "train"
    if not is_text:
        return not lost.may_be_number
    if lost.may_be_switch and SWITCH.fullmatch(value):
        return True
    text = value.strip()
    said = [one.content for one in messages if one.role in lost.said_by]
    return any(text == one.strip() if lost.as_whole else text in one for one in said)


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
