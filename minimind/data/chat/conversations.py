"""Parse a record into the messages of a conversation, or raise DocumentError.

A record is a list of turns (nanochat), or a JSON object with one of

    "conversations": turns with "role" and "content" (MiniMind), or "from" and "value" (ShareGPT)
    "messages": turns with "role" and "content" (OpenAI); content may be a list of text parts
    a question and its answer, a pair of `PAIRS`: two strings, or lists of turns, of which those
        of the question are not trained on
    "chosen": turns, or an answer to "prompt" or to the last turn; "rejected" is not read

An assistant turn may have thoughts ("reasoning_content") and "tool_calls", as a list or as its
JSON; "function_call" as who speaks is a call too (ShareGPT). "tools" stand beside the turns, or in
the system turn (MiniMind), "system" and "chat_template_kwargs" beside them. A weight of 0 or 1 says
whether a turn is trained on. All of it reaches the template as it is written.

A key beside them that is in a table of names (`LOST`) carries text of the conversation, media, or a
weight in the loss, which would be lost: it is refused. Others, such as "id", are ignored, and named
to whoever reads. A key without a value (null, "", [], {}, also as text) counts as absent: the row
of a table has its columns as keys, and gives every key to every turn. Ignored as well are a weight
of 1, a switch ("off", "none") in place of a system prompt, tools, media or reasoning, a number in
place of a text, and a text that a turn contains.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any

from minimind.config.template_variables import FIXED_VARIABLES
from minimind.data.text.documents import (
    DocumentError,
    JsonCell,
    NonFinite,
    ReadOptions,
    Records,
    decode_utf8,
    explain_line,
    is_list_of_turns,
    json_type,
    parse_line,
    too_long_document,
    usable_size,
)

Pairs = tuple[tuple[str, Any], ...]  # a JSON object as `parse_line` decodes it

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of what an answer begins with
CALLS, CALL_ID, TOOLS = "tool_calls", "tool_call_id", "tools"
TOOLS_REMEDY = 'write "tool_calls", a list of calls, or remove the conversation'
VARIABLES = "chat_template_kwargs"  # transformers' name for the variables of a template
TOOLS_EXAMPLE = '[{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
CALL_EXAMPLE = '[{"name": "...", "arguments": {...}}]'
PART_KEYS = {"type", "text", "index", "cache_control"}  # keys of a part of the content
ABSENT = re.compile(r"\s*(null|None|\[\s*\]|\{\s*\})?\s*")  # text that stands for no value
# Keys of a turn that carry neither text nor a weight in the loss.
HARMLESS = re.compile(
    r"(\w*_)?(id|idx|index|uuid)|turn|(\w*_)?(timestamp|time|date)|created(_at)?|model|lang(uage)?"
)
# How much a turn, or a conversation, counts in the loss.
WEIGHT = frozenset(
    "weight lossweight sampleweight samplingweight taskweight exampleweight instanceweight"
    " trainweight trainingweight lossscale lossmask trainmask trainingmask train istrain dotrain"
    " trained istrained training istraining trainable istrainable loss isloss useloss".split()
)

SWITCHES = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; the role is one of `ROLES`.

    `more` holds its thoughts, calls and the id of a call by their keys, as a template reads them.
    """

    role: str
    content: str
    name: str = ""  # who speaks, for a template that writes it
    more: Mapping[str, Any] = field(default_factory=dict)
    is_trained: bool = True


class Conversation(tuple[Message, ...]):
    """The turns, with the tools that are offered and the variables of the template beside them."""

    tools: list[Any] | None
    variables: Mapping[str, Any]

    def __new__(
        cls,
        messages: Iterable[Message],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Conversation:
        self = super().__new__(cls, messages)
        self.tools, self.variables = tools, variables
        return self

    def of(self, messages: Iterable[Message]) -> Conversation:
        """Other turns with the same beside them."""
        return Conversation(messages, self.tools, self.variables)


def as_conversation(messages: Iterable[Message]) -> Conversation:
    """The same; turns alone have nothing beside them."""
    return messages if isinstance(messages, Conversation) else Conversation(messages)


def turn_of(message: Message) -> dict[str, Any]:
    """The turn of a message as templates have it."""
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named, **message.more}


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
        "function_call": ASSISTANT,
    },
)


def is_absent(value: Any) -> bool:
    """Whether a decoded value is none: null, blank, or a list or object without any value."""
    if isinstance(value, str):
        return ABSENT.fullmatch(value) is not None
    if isinstance(value, list):
        return all(map(is_absent, value))
    return value is None or (isinstance(value, tuple) and all(is_absent(one) for _, one in value))


@lru_cache(2**10)
def plain_name(key: str) -> str:
    """A key in lower case, without what separates its words, and in the singular."""
    name = re.sub(r"[\W_]+", "", key).lower()
    return name if name.endswith("ss") else name.removesuffix("s")


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
        known = ", ".join(spelling.roles)
        raise DocumentError(f'"{spelling.role}" is {shown(role)}', f"write one of {known}")
    meant, more = spelling.roles[role], {}
    if any(not is_absent(fields.get(key)) for key in EXTRA) or THOUGHTS[0] in fields:
        more = _more_of(fields, meant)
    content = fields.get(spelling.content)
    if role == "function_call":
        more, content = {CALLS: calls_of(content, spelling.content)}, ""
    if isinstance(content, list) and spelling is OPENAI:
        content = "".join(_text_of_part(part, number) for number, part in enumerate(content, 1))
    name = "" if is_absent(fields.get("name")) else fields["name"]
    usable_size(name)
    if meant == SYSTEM and not is_absent(fields.get(TOOLS)):
        more = {TOOLS: plain(fields[TOOLS])}  # some templates read them there
    is_blank = content is None or (isinstance(content, str) and not content.strip())
    may_be_blank = meant in (SYSTEM, TOOL) or more.get(CALLS) or any(map(more.get, THOUGHTS))
    if is_blank and may_be_blank:
        text = "" if meant == SYSTEM else str(content or "")
    else:
        text = require_content(content, spelling.content)
    for inner in texts_in(more):
        usable_size(inner)
    others = fields.keys() - {spelling.role, spelling.content, *EXTRA, "name", TOOLS}
    weights = [weight_of(fields[key]) for key in others if plain_name(key) in WEIGHT]
    is_trained = meant != ASSISTANT or 0 not in weights
    return Message(meant, text, name, more, is_trained)


EXTRA = (*THOUGHTS, CALLS, CALL_ID)


def _more_of(fields: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Thoughts, calls and the id of a call of a turn; raise DocumentError for wrong ones."""
    more: dict[str, Any] = {}
    for key in THOUGHTS:
        value = fields.get(key)
        if role != ASSISTANT and not is_absent(value):
            raise DocumentError(f'has "{key}", which only an assistant turn has', "remove it")
        if role == ASSISTANT and value is not None:
            if not isinstance(value, str):
                reason = f'"{key}" is {json_type(value)}, not a string'
                raise DocumentError(reason, "write its text, or remove it")
            # An empty text tells some templates not to look for thoughts in the content.
            if key == THOUGHTS[0] or not is_absent(value):
                more[key] = "" if is_absent(value) else value
    said = {text.strip(): key for key, text in more.items() if text}
    if len(said) > 1:  # a template writes one of them
        one, other, *_ = said.values()
        raise DocumentError(f'has "{one}" and another "{other}"', "keep one of them")
    if not is_absent(calls := fields.get(CALLS)):
        if role != ASSISTANT:
            raise DocumentError(f'has "{CALLS}", which only an assistant turn has', "remove it")
        more[CALLS] = calls_of(calls, CALLS)
    if not is_absent(call_id := fields.get(CALL_ID)):
        if role != TOOL:
            raise DocumentError(f'has "{CALL_ID}", which only a tool turn has', "remove it")
        if not isinstance(call_id, str):
            raise DocumentError(f'"{CALL_ID}" is {json_type(call_id)}, not a string', "remove it")
        more[CALL_ID] = call_id
    return more


def calls_of(value: Any, key: str) -> list[Any]:
    """The calls of tools in a decoded value, or in its JSON; raise DocumentError for others."""
    calls = plain(from_json(value, key, CALL_EXAMPLE))
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            reason = f'"{key}" has a call without a "name"'
            raise DocumentError(reason, f"write {CALL_EXAMPLE}, or remove the conversation")
    if key != CALLS:  # a turn of its own: ShareGPT has no form of the list
        return [{"type": "function", "function": call} for call in calls]
    return calls


def from_json(value: Any, key: str, example: str) -> Any:
    """A decoded value, or what the JSON in a text is; raise DocumentError for other text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_line(value.removeprefix("\ufeff"), example)
    except DocumentError as error:
        raise DocumentError(f'"{key}" {error.reason}', f"write {example}, or remove it") from None


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a decoded JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    for inner in value if isinstance(value, list) else ():
        yield from texts_in(inner)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        yield from texts_in(inner)


def plain(value: Any) -> Any:
    """A decoded value with dictionaries in place of pairs; raise DocumentError for a key twice."""
    if isinstance(value, NonFinite):
        raise DocumentError(f"{json_type(value)} is not JSON", "write a number or null")
    if isinstance(value, tuple):
        require_single(value)
        return {key: plain(inner) for key, inner in value}
    return [*map(plain, value)] if isinstance(value, list) else value


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
    if "function_call" in given:
        raise DocumentError('has "function_call", which is not supported', TOOLS_REMEDY)
    role = fields.get(spelling.role)
    example = spelling.example(role)
    other = SHAREGPT if spelling is OPENAI else OPENAI
    for key in (other.role, other.content):
        if key in given:
            reason = f'has "{key}", but the conversation is written with "{spelling.role}"'
            raise DocumentError(f'{reason} and "{spelling.content}"', f"write {example}")
    for key in (spelling.role, spelling.content):
        if key not in fields and not (key == spelling.content and CALLS in given):
            raise DocumentError(f'has no "{key}"', f"write {example}")
    if "name" in given and not isinstance(fields["name"], str):
        raise DocumentError(f'"name" is {json_type(fields["name"])}, not a string', "remove it")
    meant = spelling.roles.get(role) if isinstance(role, str) else None
    read = {spelling.role, spelling.content, "name", *EXTRA, *([TOOLS] if meant == SYSTEM else [])}
    for key in sorted(given - read):
        if HARMLESS.fullmatch(key.lower()):
            ignored.add(f"{key} of turns")
        elif plain_name(key) not in WEIGHT:
            reason = f"has {shown(key)}, which is not supported"
            is_thought = lost_of(key) is lost_of(THOUGHTS[0])
            if is_thought and meant == ASSISTANT and isinstance(fields[key], str):
                raise DocumentError(reason, f'name it "{THOUGHTS[0]}", or remove it')
            raise DocumentError(reason, f"remove it, or write {example}")
        elif weight_of(value := fields[key]) not in (0, 1):
            exact = json.dumps(value) if isinstance(value, int | float) else json_type(value)
            reason = f"has {shown(key)} ({exact}), and a turn is trained on or not"
            raise DocumentError(reason, "write 1 or 0, or remove it")


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
# A chat begins with the user. Several tools may answer one assistant turn, and an assistant may go
# on after its own turn. A last turn without an answer is accepted: nothing is trained on it.
MAY_FOLLOW = {
    START: {SYSTEM, USER},
    SYSTEM: {USER},
    USER: {ASSISTANT},
    ASSISTANT: {USER, TOOL, ASSISTANT},
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
# A question and its answer; a record's are the first that it has.
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "chosen"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("input", "output"),
)
PASSAGES = ("input", "context")  # what an instruction is about, written in the line below it
HISTORY, CHOSEN, REJECTED = "history", "chosen", "rejected"
SYSTEM_KEYS = ("system", "system_prompt", "system_message")  # the first turn, beside the others


@dataclass(frozen=True)
class Lost:
    """Names of keys beside the turns whose value would be lost, and what to do about them.

    Names are as `plain_name` makes them.
    """

    names: Collection[str]
    remedy: str
    may_be_number: bool = True  # counts as lost; else only text, lists and objects do
    may_be_switch: bool = False  # text that only switches something counts as none


_FIRST_TURN = "write it as the first turn, with the role system, or remove it"
_INTO_A_TURN = "write its text into a turn, or remove it"
TEMPLATE_VALUES = Lost(
    ("chattemplatekwarg", "templatekwarg", "chattemplatearg", "templatearg"), "remove it"
)
LOST = (
    Lost(("instruction",), _FIRST_TURN, may_be_number=False),
    Lost(
        "system systemprompt systemmessage systeminstruction systemtext systemcontent sysprompt"
        " sysmsg defaultsystemprompt developer developerprompt developermessage custominstruction"
        " persona botpersona preamble character scenario guideline rule metaprompt"
        " initialprompt".split(),
        _FIRST_TURN,
        may_be_number=False,
        may_be_switch=True,
    ),
    Lost(
        "tool toolcall toolschema tooldefinition toolslist availabletool function functioncall"
        " functionschema functiondefinition api apilist availableapi plugin mcpserver".split(),
        "write them into the system message, or remove the conversation",
        may_be_number=False,
        may_be_switch=True,
    ),
    Lost(
        "reasoning reasoningcontent reasoningtext reasoningtrace thinking thought cot".split(),
        _INTO_A_TURN,
        may_be_number=False,
        may_be_switch=True,
    ),
    Lost(
        "history chathistory previousturn pastdialogue context document retrieveddocument passage"
        " fact evidence article knowledge background query input output response".split(),
        _INTO_A_TURN,
        may_be_number=False,
    ),
    Lost(
        "image imagepath imageurl imagedata picture photo screenshot figure frame video videopath"
        " videourl videoframe audio audiopath audiourl audiofile speech media attachment".split(),
        "remove the conversation, as a model of text cannot read it",
        may_be_number=False,
        may_be_switch=True,
    ),
    Lost(
        "chosen chosenresponse chosenanswer ischosen rejected rejectedresponse rejectedanswer"
        " rejectedmessage isrejected negative".split(),
        "keep the answer to train on as a turn, or the conversations with good ones, and remove it",
    ),
    Lost(
        "label ktotag ktolabel desirable isdesirable undesirable isundesirable".split(),
        "keep the conversations with good answers alone, and remove it",
    ),
    Lost(WEIGHT, "remove it, or the conversation: all count alike"),
    TEMPLATE_VALUES,
)
LOST_BY_NAME = {name: lost for lost in LOST for name in lost.names}
SWITCH = re.compile(rf"\s*({'|'.join(SWITCHES)}|none)\s*", re.IGNORECASE)  # says nothing itself
BESIDE = (TOOLS, VARIABLES, *SYSTEM_KEYS)
READ = {*LISTS, *chain(*PAIRS), *PASSAGES, HISTORY, *BESIDE}  # with all of their text
KEYS_SHOWN = 3
MAX_BYTES_PER_CHARACTER = 4


def conversation_of_line(line: bytes | bytearray, ignored: set[str] | None = None) -> Conversation:
    """Return the conversation of a line of JSON; raise DocumentError.

    The names of keys that are ignored are added to `ignored`.
    """
    try:
        return messages_of(parse_line(decode_utf8(line), EXAMPLE), ignored)
    except DocumentError:
        explain_line(line)
        raise


def conversation_of_row(row: Mapping[str, Any], ignored: set[str] | None = None) -> Conversation:
    """Return the conversation of a row of a table; raise DocumentError.

    Strings are bytes. The columns are those of `conversation_columns`.
    """
    given = tuple((key, _given(key, value)) for key, value in row.items() if value is not None)
    return messages_of(given, ignored)


def document_of(conversation: Conversation, reading: ReadOptions) -> str:
    """Return the canonical text of a conversation; raise DocumentError if it is too long."""
    return _within_limit(canonical_text(conversation), reading)


def conversation_records(
    reading: ReadOptions,
    ignored: set[str] | None = None,
    text_of: Callable[[Conversation, ReadOptions], str] = document_of,
) -> Records:
    """Readers of conversations, whose document is `text_of(conversation, reading)`."""
    return Records(
        of_line=lambda line: text_of(conversation_of_line(line, ignored), reading),
        of_row=lambda row: text_of(conversation_of_row(row, ignored), reading),
        columns=lambda names: conversation_columns(names, ignored),
    )


def conversation_columns(names: Sequence[str], ignored: set[str] | None = None) -> list[str]:
    """Return which columns of a table a conversation is read from; raise DocumentError for none.

    The names of the others are added to `ignored`.
    """
    columns = tuple((name, None) for name in names)
    keys = form_of(dict.fromkeys(names))
    is_list = keys is not None and keys[0] in LISTS
    own = {*LISTS, *PAIRS[0], *BESIDE} if is_list else {*(keys or ()), *BESIDE}
    read = [name for name in names if name in own or lost_of(name)]
    require_single(columns, read)
    if keys is None:
        raise _no_conversation(columns)
    if ignored is not None:
        ignored.update(set(names).difference(read))
    return read


def lost_of(key: str) -> Lost | None:
    """What would be lost with a key beside the turns; None for one that is ignored."""
    return LOST_BY_NAME.get(plain_name(key))


def _given(key: str, value: Any) -> Any:
    """The value of a column as `parse_line` gives it; raise DocumentError for other than UTF-8."""
    if key not in READ:
        return _decoded(value, errors="replace")  # only whether it has a value counts
    if key not in LISTS or not isinstance(value, list):
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


def canonical_text(messages: Iterable[Message]) -> str:
    """Return a conversation as compact JSON, the same text for every format of a record.

    It is a list of turns, or an object if tools or variables stand beside them.
    """
    conversation = as_conversation(messages)
    turns = [
        turn_of(one) if one.is_trained else {**turn_of(one), "weight": 0} for one in conversation
    ]
    whole: Any = turns
    if conversation.tools is not None or conversation.variables:
        beside = {TOOLS: conversation.tools, VARIABLES: dict(conversation.variables)}
        whole = {"messages": turns, **{key: value for key, value in beside.items() if value}}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def messages_of(value: Any, ignored: set[str] | None = None) -> Conversation:
    """Return the conversation of a record as `parse_line` decodes it; raise DocumentError.

    The names of keys that are ignored are added to `ignored`. A system turn without text is left
    out, unless tools stand in it.
    """
    value = ((LISTS[0], value),) if is_list_of_turns(value) else value
    if not isinstance(value, tuple):
        raise DocumentError(f"is {json_type(value)}, not an object", f"write {EXAMPLE}")
    fields = dict(value)
    if len(fields) != len(value):
        require_single(value, [key for key, _ in value if key in READ or lost_of(key)])
    keys = form_of(fields)
    if keys is None:
        raise _no_conversation(value)
    unread = set() if ignored is None else ignored
    tools: list[Any] = []
    used = {*keys}
    if len(keys) == 2:
        messages = _messages_of_pair(fields, keys, used, unread)
    else:
        messages, tools = _messages_of_turns(fields[keys[0]], keys[0], unread)
    if keys[0] in LISTS and messages[-1].role == USER and not is_absent(fields.get(CHOSEN)):
        messages += _said(fields[CHOSEN], CHOSEN, ASSISTANT, unread)
        used.add(CHOSEN)
    if CHOSEN in used and not is_absent(fields.get(REJECTED)):
        used.add(REJECTED)
        unread.add(REJECTED)
    variables: dict[str, Any] = {}
    for key, given in fields.items():
        if key in used or is_absent(given):
            continue
        if key == TOOLS:
            tools = _tools_beside(given, tools)
        elif key in SYSTEM_KEYS and isinstance(given, str) and not SWITCH.fullmatch(given):
            messages = _with_system(key, given, messages)
        elif lost_of(key) is TEMPLATE_VALUES:
            variables.update(_variables_of(key, given))
        else:
            _require_nothing_lost(key, given, lost_of(key), messages)
            unread.add(key)
    require_order(messages)
    if all(not one.is_trained for one in messages if one.role == ASSISTANT):
        raise DocumentError("has no answer with a weight of 1", "remove the conversation")
    is_first_kept = bool(tools) and messages[0].role == SYSTEM and not messages[0].content
    kept = [one for one in messages if one.role != SYSTEM or one.content]
    return Conversation([*messages[:is_first_kept], *kept], tools or None, variables)


def _tools_beside(value: Any, in_turn: list[Any]) -> list[Any]:
    """The tools that stand beside the turns; raise DocumentError for others than in a turn."""
    tools = tools_of(value)
    if tools and in_turn and in_turn != tools:
        raise DocumentError(f'has "{TOOLS}", and others in a turn', "keep one of them")
    return tools or in_turn


def tools_of(value: Any) -> list[Any]:
    """The tools of a decoded list of objects, or of its JSON; raise DocumentError for others."""
    if isinstance(value, str) and SWITCH.fullmatch(value):
        return []
    tools = plain(from_json(value, TOOLS, TOOLS_EXAMPLE))
    for text in texts_in(tools):
        usable_size(text)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DocumentError(
            f'"{TOOLS}" is no list of objects', f"write {TOOLS_EXAMPLE}, or remove it"
        )
    return tools


def _with_system(key: str, text: str, messages: list[Message]) -> list[Message]:
    """The messages with the system message that stands beside them."""
    first = messages[0]
    if first.role != SYSTEM or not first.content:
        usable_size(text)
        return [Message(SYSTEM, text), *messages[first.role == SYSTEM :]]
    if first.content.strip() != text.strip():
        raise DocumentError(
            f"has {shown(key)} and another system turn", "keep one of them, or join both"
        )
    return messages


def _variables_of(key: str, value: Any) -> dict[str, Any]:
    """Variables for the template of one conversation; raise DocumentError for others."""
    variables: Any = plain(from_json(value, key, '{"enable_thinking": false}'))
    if not isinstance(variables, dict):
        raise DocumentError(f"{shown(key)} is no object", "remove it")
    for name in variables:
        if name in FIXED_VARIABLES or not name.isidentifier():
            raise DocumentError(f"{key} has {shown(name)}, which no variable can be", "remove it")
    for text in texts_in(variables):
        usable_size(text)
    return {name: one for name, one in variables.items() if one is not None}


def _messages_of_turns(turns: Any, key: str, ignored: set[str]) -> tuple[list[Message], list[Any]]:
    """The messages, and the tools of the system turn."""
    if not isinstance(turns, list):
        raise DocumentError(f'"{key}" is {json_type(turns)}, not a list', f"write {EXAMPLE}")
    if not turns:
        raise DocumentError(f'"{key}" is an empty list', f"write {EXAMPLE}, or remove it")
    spelling = _spelling(turns[0], key)
    messages, tools = [], []
    for number, turn in enumerate(turns, 1):
        try:
            messages.append(message_of_turn(turn, spelling, ignored))
            given = dict(turn).get(TOOLS)
            if not is_absent(given):
                tools = _tools_beside(given, tools)
        except DocumentError as error:
            raise _in_turn(number, error) from None
    return messages, tools


def _spelling(first: Any, key: str) -> Spelling:
    """The keys of all turns, by those of the first."""
    turn = first if isinstance(first, tuple) else ()
    keys = {name for name, value in turn if value is not None}
    may_be = key in ("conversations", CHOSEN) and OPENAI.role not in keys
    return SHAREGPT if may_be and keys & {SHAREGPT.role, SHAREGPT.content} else OPENAI


def form_of(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The keys that a record's conversation is read from; raise DocumentError for more than one."""
    forms: list[tuple[str, ...]] = [(key,) for key in LISTS if key in fields]
    pairs = [pair for pair in PAIRS if all(key in fields for key in pair)]
    forms += [pair for pair in pairs if not forms or pair == PAIRS[0]]
    forms += [] if forms or CHOSEN not in fields else [(CHOSEN,)]
    given = [form for form in forms if not all(is_absent(fields[key]) for key in form)]
    # The first pair counts; other keys are read with it, or refused.
    of_lists = [form for form in given if len(form) == 1]
    given = [*of_lists, *[form for form in given if len(form) > 1][:1]]
    if len(given) > 1:
        names = " and ".join(f'"{key}"' for form in given for key in form)
        raise DocumentError(f"has {names}, more than one conversation", "keep one of them")
    return next(iter([*given, *forms]), None)


def _messages_of_pair(
    fields: dict[str, Any], keys: Sequence[str], used: set[str], ignored: set[str]
) -> list[Message]:
    """The turns of a question and its answer; keys that are read besides are added to `used`."""
    messages: list[Message] = []
    if not is_absent(history := fields.get(HISTORY)):
        rounds: list[Any] = history if isinstance(history, list) else [history]
        if not all(isinstance(one, list) and len(one) == 2 for one in rounds):
            reason = f'"{HISTORY}" is no list of questions with their answers'
            raise DocumentError(reason, 'write [["...", "..."]], or remove it')
        for text in chain(*rounds):
            role = ASSISTANT if messages and messages[-1].role == USER else USER
            messages.append(_numbered(len(messages), text, HISTORY, role, ignored)[0])
        used.add(HISTORY)
    question, answer = (fields[key] for key in keys)
    passage = next((key for key in PASSAGES if not is_absent(fields.get(key))), None)
    if keys[0] == "instruction" and passage and isinstance(question, str):
        passage_text = require_content(fields[passage], passage)
        question = f"{question}\n{passage_text}" if question.strip() else passage_text
        used.add(passage)
    asked = _numbered(len(messages), question, keys[0], USER, ignored)
    answered = _numbered(len(messages) + len(asked), answer, keys[1], ASSISTANT, ignored)
    if answered[0].role in (SYSTEM, USER):  # the whole conversation stands in the answer
        if isinstance(question, list) or all(one.content != question for one in answered):
            raise DocumentError(
                f'"{keys[1]}" begins with a turn of {answered[0].role} that is not "{keys[0]}"',
                "write the answer alone, or the conversation as messages",
            )
        return answered
    if isinstance(question, list):
        asked = [replace(one, is_trained=one.role != ASSISTANT) for one in asked]
    return [*messages, *asked, *answered]


def _numbered(before: int, value: Any, key: str, role: str, ignored: set[str]) -> list[Message]:
    """What `_said` returns; errors name a turn after those before."""
    try:
        return _said(value, key, role, ignored)
    except DocumentError as error:
        numbered = re.match(r"turn (\d+): ", error.reason)
        reason = error.reason[numbered.end() :] if numbered else error.reason
        number = before + (int(numbered[1]) if numbered else 1)
        raise _in_turn(number, DocumentError(reason, error.remedy)) from None


def _said(value: Any, key: str, role: str, ignored: set[str]) -> list[Message]:
    """The turns that a text, a turn or a list of turns is; raise DocumentError."""
    if isinstance(value, tuple):
        value = [value]
    if isinstance(value, list):
        return _messages_of_turns(value, key, ignored)[0]
    return [Message(role, require_content(value, key))]


def _in_turn(number: int, error: DocumentError) -> DocumentError:
    return DocumentError(f"turn {number}: {error.reason}", error.remedy)


def _require_nothing_lost(
    key: str, value: Any, lost: Lost | None, messages: Sequence[Message]
) -> None:
    """Raise DocumentError for a key whose value would be lost."""
    if lost and not _says_nothing_else(value, lost, messages):
        reason = f"has {shown(key)} outside of the turns, which would be lost"
        raise DocumentError(reason, lost.remedy)


def _says_nothing_else(value: Any, lost: Lost, messages: Sequence[Message]) -> bool:
    """Whether a value is that of every conversation, or repeats what a turn says."""
    if isinstance(value, list | tuple):
        return False
    if lost.names is WEIGHT:
        return weight_of(value) == 1 or value == "train"
    if not isinstance(value, str):
        return not lost.may_be_number
    is_switch = lost.may_be_switch and SWITCH.fullmatch(value) is not None
    return is_switch or any(value.strip() in message.content for message in messages)


def _no_conversation(value: Pairs) -> DocumentError:
    keys = [key for key, _ in value]
    for pair in PAIRS:
        for key, other in (pair, pair[::-1]):
            if key in keys:
                return DocumentError(f'has "{key}" and no "{other}"', "write both, as strings")
    if any({one.role, one.content} <= {*keys} for one in (OPENAI, SHAREGPT)):
        remedy = f"write the turns of a conversation together, as {EXAMPLE}"
        return DocumentError("is one turn", remedy)
    if "text" in keys:
        return DocumentError(
            'has "text" and no conversation',
            f"drop --task sft, which is for conversations, or write {EXAMPLE}",
        )
    names = [*map(shown, keys[:KEYS_SHOWN]), *(["..."] if len(keys) > KEYS_SHOWN else [])]
    there = f" but {', '.join(names)}" if names else ""
    return DocumentError(f'has no "conversations" or "messages"{there}', f"write {EXAMPLE}")
