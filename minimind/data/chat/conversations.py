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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from minimind.data.text.documents import (
    DocumentError,
    JsonCell,
    ReadOptions,
    decode_utf8,
    explain_line,
    json_type,
    parse_line,
    too_long_document,
    usable_size,
)

Pairs = tuple[tuple[str, Any], ...]  # a JSON object as `parse_line` decodes it

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)
TOOL_KEYS = {"tool_calls", "tool_call_id", "function_call"}
TOOLS_REMEDY = "write the call into the content, or remove the conversation"
PART_KEYS = {"type", "text", "index", "cache_control"}  # keys of a part of the content
ABSENT = re.compile(r"\s*(null|None|\[\s*\]|\{\s*\})?\s*")  # text that stands for no value
# Keys of a turn that carry neither text nor a weight in the loss.
HARMLESS = re.compile(
    r"(\w*_)?(id|idx|index|uuid)|turn|(\w*_)?(timestamp|time|date)|created(_at)?|model|lang(uage)?"
)
# How much a turn, or a conversation, counts in the loss.
WEIGHT = re.compile(
    r"(loss|sample|sampling|task|example|instance|train|training)?_?weights?|loss_?scales?"
    r"|(loss|train|training)_?masks?"
    r"|(is_|do_)?(train|trained|training|trainable|loss)"
)

SWITCHES = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; the role is one of `ROLES`."""

    role: str
    content: str
    name: str = ""  # who speaks, for a template that writes it


def turn_of(message: Message) -> dict[str, str]:
    """The turn of a message as templates and canonical texts have it."""
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named}


@dataclass(frozen=True)
class Spelling:
    """The keys of a turn and its names of the roles."""

    role: str
    content: str
    roles: dict[str, str]

    def example(self, role: Any = None) -> str:
        """An example of a valid turn, with the role as it is spelled in a turn, or of the user."""
        user = next(name for name, meant in self.roles.items() if meant == USER)
        is_known = isinstance(role, str) and role in self.roles
        return json.dumps({self.role: role if is_known else user, self.content: "..."})


OPENAI = Spelling("role", "content", {role: role for role in ROLES})
SHAREGPT = Spelling(
    "from",
    "value",
    {
        "human": USER,
        "user": USER,
        "gpt": ASSISTANT,
        "chatgpt": ASSISTANT,
        "assistant": ASSISTANT,
        "system": SYSTEM,
        "tool": TOOL,
        "observation": TOOL,
    },
)


def is_absent(value: Any) -> bool:
    """Whether a decoded value is none: null, blank, or a list or object without any value."""
    if isinstance(value, str):
        return ABSENT.fullmatch(value) is not None
    if isinstance(value, list):
        return all(map(is_absent, value))
    return value is None or (isinstance(value, tuple) and all(is_absent(one) for _, one in value))


def snake_case(key: str) -> str:
    """A key in lower case, with underscores between its words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[\W_]+", "_", key).lower()


def message_of_turn(turn: Any, spelling: Spelling, ignored: set[str]) -> Message:
    """Return the message of a decoded turn; raise DocumentError.

    Keys that say nothing about the text are added to `ignored`. The content of a system turn may be
    empty.
    """
    if not isinstance(turn, tuple):
        raise DocumentError(f"is {json_type(turn)}, not an object", f"write {spelling.example()}")
    fields = dict(turn)
    if len(fields) != len(turn):
        require_single(turn)
    if fields.keys() != {spelling.role, spelling.content}:
        _require_keys(fields, spelling, ignored)
    role = fields[spelling.role]
    if not isinstance(role, str):
        reason = f'"{spelling.role}" is {json_type(role)}, not a string'
        raise DocumentError(reason, f"write {spelling.example()}")
    if role not in spelling.roles:
        raise _unknown_role(role, spelling)
    content = fields[spelling.content]
    if isinstance(content, list) and spelling is OPENAI:
        content = "".join(_text_of_part(part, number) for number, part in enumerate(content, 1))
    name = "" if is_absent(fields.get("name")) else fields["name"]
    is_blank = content is None or (isinstance(content, str) and not content.strip())
    if spelling.roles[role] == SYSTEM and is_blank:
        return Message(SYSTEM, "")
    return Message(spelling.roles[role], require_content(content, spelling.content), name)


def require_single(pairs: Pairs, names: Iterable[str] | None = None) -> None:
    """Raise DocumentError if one of `names`, by default any key, occurs twice."""
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1 and (names is None or key in names):
            reason = f"has {shown(key)} {times} times"
            raise DocumentError(reason, "keep the one that is meant")


def require_content(content: Any, name: str) -> str:
    """Return the content if it is text to train on; raise DocumentError."""
    if not isinstance(content, str):
        reason = f'"{name}" is {json_type(content)}, not a string'
        raise DocumentError(reason, f"write {json.dumps({name: '...'})}, or remove the turn")
    if not content or content.isspace():
        state = "blank" if content else "empty"
        raise DocumentError(f'"{name}" is {state}', "write its text, or remove the conversation")
    usable_size(content)
    return content


def shown(key: str) -> str:
    """Return a key for an error message, quoted and at most 40 characters long."""
    return json.dumps(key[:40])


def weight_of(value: Any) -> Any:
    """The number that the value of a `WEIGHT` means, also as a text or a switch; None for none."""
    if not isinstance(value, str):
        return value
    if (word := value.strip().lower()) in SWITCHES:
        return SWITCHES[word]
    with suppress(ValueError):
        return float(word)
    return None


def _require_keys(fields: dict[str, Any], spelling: Spelling, ignored: set[str]) -> None:
    """Raise DocumentError for a missing key, or for one with a meaning that would be lost."""
    given = {key for key, content in fields.items() if not is_absent(content)}
    if given & TOOL_KEYS:
        key = min(given & TOOL_KEYS)
        raise DocumentError(f'has "{key}", and tool calls are not supported', TOOLS_REMEDY)
    role = fields.get(spelling.role)
    example = spelling.example(role)
    other = SHAREGPT if spelling is OPENAI else OPENAI
    for key in (other.role, other.content):
        if key in given:
            reason = f'has "{key}", but the conversation is written with "{spelling.role}"'
            raise DocumentError(f'{reason} and "{spelling.content}"', f"write {example}")
    for key in (spelling.role, spelling.content):
        if key not in fields:
            raise DocumentError(f'has no "{key}"', f"write {example}")
    if "name" in given and not isinstance(fields["name"], str):
        raise DocumentError(f'"name" is {json_type(fields["name"])}, not a string', "remove it")
    is_answer = isinstance(role, str) and spelling.roles.get(role) == ASSISTANT
    for key in sorted(given - {spelling.role, spelling.content, "name"}):
        name = snake_case(key)
        if HARMLESS.fullmatch(name):
            ignored.add(f"{key} of turns")
        elif not WEIGHT.fullmatch(name):
            reason = f"has {shown(key)}, which is not supported"
            raise DocumentError(reason, f"remove it, or write {example}")
        elif (weight := weight_of(value := fields[key])) != 1 and (is_answer or weight != 0):
            exact = json.dumps(value) if isinstance(value, int | float) else json_type(value)
            raise DocumentError(
                f"has {shown(key)} ({exact}), which is not supported: all answers count alike",
                "remove it, or the conversation; --train_on last trains on the last answer alone",
            )


def _unknown_role(role: str, spelling: Spelling) -> DocumentError:
    if spelling is SHAREGPT and role == "function_call":
        return DocumentError('is a "function_call", which is not supported', TOOLS_REMEDY)
    known = ", ".join(spelling.roles)
    return DocumentError(f'"{spelling.role}" is {shown(role)}', f"write one of {known}")


def _text_of_part(part: Any, number: int) -> str:
    example = '{"type": "text", "text": "..."}'
    if not isinstance(part, tuple):
        reason = f"part {number} of its content is {json_type(part)}, not an object"
        raise DocumentError(reason, f"write {example}")
    require_single(part)
    fields = dict(part)
    extra = [key for key, value in part if key not in PART_KEYS and not is_absent(value)]
    if fields.get("type") == "text" and extra:
        reason = f"part {number} of its content has {shown(extra[0])}, which is not supported"
        raise DocumentError(reason, f"remove it, or write {example}")
    if fields.get("type") != "text":
        kind = fields.get("type")
        name = shown(kind) if isinstance(kind, str) else "without a type"
        reason = f"part {number} of its content is {name}, and only text is supported"
        raise DocumentError(reason, f"write {example}, or remove the conversation")
    text = fields.get("text")
    if not isinstance(text, str):
        reason = f'"text" of part {number} of its content is {json_type(text)}, not a string'
        raise DocumentError(reason, f"write {example}")
    return text


START = ""  # before the first turn
# A chat begins with the user; user and assistant alternate. Several tools may answer one assistant
# turn. A model is only ever asked to write after a user or a tool, so two assistant turns in a row
# would train on what never happens, as would a chat that begins with the assistant. A last turn
# without an answer is accepted: nothing is trained on it.
MAY_FOLLOW = {
    START: {SYSTEM, USER},
    SYSTEM: {USER},
    USER: {ASSISTANT},
    ASSISTANT: {USER, TOOL},
    TOOL: {TOOL, ASSISTANT},
}


def require_order(messages: Sequence[Message]) -> None:
    """Raise DocumentError for an order of roles that no chat has, or without an assistant turn.

    A system turn without text may stand anywhere, as if it were not there.
    """
    before = START
    for number, message in enumerate(messages, 1):
        if message.role == SYSTEM and not message.content:
            continue
        if message.role not in MAY_FOLLOW[before]:
            reason, remedy = _complaint(before, message.role)
            raise DocumentError(f"turn {number} {reason}", remedy)
        before = message.role
    if all(message.role != ASSISTANT for message in messages):
        raise DocumentError(
            f"has no assistant turn among {len(messages)}", "add the answer, or remove it"
        )


def _complaint(before: str, role: str) -> tuple[str, str]:
    """What is wrong with a turn of this role after one of `before`, and the remedy."""
    if role == SYSTEM:
        return "is a system message that is not first", "move it to the beginning, or join both"
    if before in (START, SYSTEM):
        where = "begins the conversation" if before == START else "follows the system message"
        return f"({role}) {where}, where a user turn belongs", "add or remove a turn"
    if before == role:
        return f"({role}) follows another {role} turn", "join both, or add the turn between them"
    wanted = " or ".join(sorted(MAY_FOLLOW[before]))
    return f"({role}) follows a turn of {before}", f"put a turn of {wanted} between them"


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
    as_whole: bool = False  # the value must be all that the turn says


_SYSTEM = r"(system|sys|developer)"
_MEDIA = r"(screenshot|figure|frame|image|img|picture|photo|video|audio|speech|pixelvalue)"
_FIRST_TURN = "write it as the first turn, with the role system, or remove it"
TEMPLATE_VALUES = Lost(re.compile(r"(chat_)?template_(kwargs|args)"), "remove it")
# Text under any other name there, as a template may write it.
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
    return [message for message in messages if message.role != SYSTEM or message.content]


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
        reason = f"has {shown(key)} outside of the turns, which would be lost"
        raise DocumentError(reason, lost.remedy)


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
        reason = 'has "chosen", a preference, and no conversation'
        return DocumentError(reason, f"write {EXAMPLE}")
    names = [*map(shown, keys[:KEYS_SHOWN]), *(["..."] if len(keys) > KEYS_SHOWN else [])]
    there = f" but {', '.join(names)}" if names else ""
    return DocumentError(f'has no "conversations" or "messages"{there}', f"write {EXAMPLE}")
