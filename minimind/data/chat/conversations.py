"""Read a record as a conversation, or raise DocumentError.

A record is a list of turns (nanochat), or a JSON object with the keys of one of `FORMS`: turns, or
a question and its answer, which are texts, turns, or lists of turns. A turn has "role" and
"content" (OpenAI, MiniMind) or "from" and "value" (ShareGPT), and the keys of `TURN_KEYS`. A weight
of 0 or 1 says whether it is trained on. All of it reaches the template as it is written.

A key beside the turns that is in a table of names (`LOST`, `WEIGHT`) has text of the conversation,
media, or a weight in the loss, which would be lost: it is refused. Other keys, such as "id", are
ignored, and named to whoever reads. A key without a value (null, "", [], {}, also as text) counts
as absent: the row of a table has its columns as keys, and gives every key to every turn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from math import isfinite
from types import MappingProxyType
from typing import Any, NamedTuple

from minimind.config.template_variables import FIXED_VARIABLES
from minimind.data.text.documents import (
    PLAIN_DIGITS,
    DocumentError,
    JsonCell,
    LongInteger,
    ReadOptions,
    Records,
    decode_utf8,
    explain_line,
    is_list_of_turns,
    json_type,
    parse_line,
    require_usable,
    usable_size,
)

Pairs = tuple[tuple[str, Any], ...]  # a JSON object as `parse_line` decodes it

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of what an answer begins with
CALLS, CALL_ID, TOOLS = "tool_calls", "tool_call_id", "tools"
VARIABLES = "chat_template_kwargs"  # transformers' name for the variables of a template


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

    def with_turns(self, messages: Iterable[Message]) -> Conversation:
        """The same tools and variables with other turns."""
        return Conversation(messages, self.tools, self.variables)


def as_conversation(messages: Iterable[Message]) -> Conversation:
    """Wrap bare messages in a Conversation."""
    return messages if isinstance(messages, Conversation) else Conversation(messages)


def turn_of(message: Message) -> dict[str, Any]:
    """The turn of a message as templates have it."""
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named, **message.more}


def canonical_text(messages: Iterable[Message]) -> str:
    """Return a conversation as compact JSON, the same text for every form of a record.

    It is a list of turns, or an object if tools or variables stand beside them.
    """
    conversation = as_conversation(messages)
    turns = [
        turn_of(message) if message.is_trained else {**turn_of(message), "weight": 0}
        for message in conversation
    ]
    whole: Any = turns
    if conversation.tools is not None or conversation.variables:
        beside = {TOOLS: conversation.tools, VARIABLES: dict(conversation.variables)}
        whole = {"messages": turns, **{key: value for key, value in beside.items() if value}}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


# The forms of a record: the key of its turns, or the keys of a question and of its answer. The
# first whose keys have a value counts.
LISTS = (("conversations",), ("messages",))
FORMS = (
    *LISTS,
    ("prompt", "completion"),
    ("prompt", "chosen"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("input", "output"),
    ("chosen",),
)
WHOLE = (*LISTS, ("prompt", "completion"))  # a record has only one of these
PASSAGES = ("input", "context")  # what an instruction is about, written in the line below it
HISTORY = "history"  # pairs of texts before a question
CHOSEN, REJECTED = "chosen", "rejected"  # "chosen" may answer the last of the turns
SYSTEM_KEYS = ("system", "system_prompt", "system_message")  # the first turn, beside the others
READ = {*chain(*FORMS), *PASSAGES, HISTORY, TOOLS, VARIABLES, *SYSTEM_KEYS}

EXAMPLE = (
    '{"conversations": [{"role": "user", "content": "..."},'
    ' {"role": "assistant", "content": "..."}]}'
)
TOOLS_EXAMPLE = '[{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
CALL_EXAMPLE = '[{"name": "...", "arguments": {...}}]'

# Names of keys beside the turns, as `plain_name` makes them, whose value would be lost.
LOST_TEXT = frozenset(
    "instruction history chathistory previousturn pastdialogue context document retrieveddocument"
    " passage fact evidence article knowledge background query input output response".split()
)
LOST_UNLESS_SWITCH = frozenset(  # a text that only switches something is none
    "system systemprompt systemmessage systeminstruction systemtext systemcontent sysprompt sysmsg"
    " defaultsystemprompt developer developerprompt developermessage custominstruction persona"
    " botpersona preamble character scenario guideline rule metaprompt initialprompt"
    " tool toolcall toolschema tooldefinition toolslist availabletool function functioncall"
    " functionschema functiondefinition api apilist availableapi plugin mcpserver"
    " reasoning reasoningcontent reasoningtext reasoningtrace thinking thought cot"
    " image imagepath imageurl imagedata picture photo screenshot figure frame video videopath"
    " videourl videoframe audio audiopath audiourl audiofile speech media attachment".split()
)
JUDGEMENTS = frozenset(  # numbers count, too
    "chosen chosenresponse chosenanswer ischosen rejected rejectedresponse rejectedanswer"
    " rejectedmessage isrejected negative"
    " label ktotag ktolabel desirable isdesirable undesirable isundesirable".split()
)
LOST = LOST_TEXT | LOST_UNLESS_SWITCH | JUDGEMENTS
# How much a turn, or a conversation, counts in the loss.
WEIGHT = frozenset(
    "weight lossweight sampleweight samplingweight taskweight exampleweight instanceweight"
    " trainweight trainingweight lossscale lossmask trainmask trainingmask train istrain dotrain"
    " trained istrained training istraining trainable istrainable loss isloss useloss".split()
)
VARIABLE_KEYS = frozenset("chattemplatekwarg templatekwarg chattemplatearg templatearg".split())
NAMES = LOST | WEIGHT | VARIABLE_KEYS
SWITCHES = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}
ABSENT = re.compile(r"\s*(null|None|\[\s*\]|\{\s*\})?\s*")  # text that stands for no value


@lru_cache(2**10)
def plain_name(key: str) -> str:
    """A key in lower case, without what separates its words, and in the singular."""
    name = re.sub(r"[\W_]+", "", key).lower()
    return name if name.endswith("ss") else name.removesuffix("s")


def is_known(key: str) -> bool:
    """Whether a key beside the turns is read, or would be lost."""
    return key in READ or plain_name(key) in NAMES


def is_absent(value: Any) -> bool:
    """Whether a decoded value is none: null, blank, or a list or object without any value."""
    if isinstance(value, str):
        return ABSENT.fullmatch(value) is not None
    if isinstance(value, list):
        return all(map(is_absent, value))
    return value is None or (isinstance(value, tuple) and all(is_absent(one) for _, one in value))


def is_switch(value: Any) -> bool:
    """Whether a value is a text that switches something, and says nothing itself."""
    return isinstance(value, str) and value.strip().lower() in (*SWITCHES, "none")


def is_lost(key: str, value: Any, messages: Sequence[Message]) -> bool:
    """Whether a key beside the turns has what would be lost: no turn says it."""
    name = plain_name(key)
    if name in WEIGHT:
        return weight_of(value) != 1 and value != "train"
    if name not in LOST or (name in LOST_UNLESS_SWITCH and is_switch(value)):
        return False
    if isinstance(value, str):
        return all(value.strip() not in message.content for message in messages)
    return name in JUDGEMENTS or isinstance(value, list | tuple)


def weight_of(value: Any) -> Any:
    """The number that a weight means, also as a text or a switch; None for none."""
    if not isinstance(value, str):
        return value
    if (word := value.strip().lower()) in SWITCHES:
        return SWITCHES[word]
    with suppress(ValueError):
        return float(word)
    return None


def shown(key: str) -> str:
    """Return a key for an error message, quoted and at most 40 characters long."""
    return json.dumps(key[:40])


def fields_of(pairs: Pairs) -> dict[str, Any]:
    """The pairs of an object as a dictionary; raise DocumentError if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        key, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise DocumentError(f"has {shown(key)} {times} times", "keep the one that is meant")
    return fields


def plain(value: Any) -> Any:
    """A decoded value with dictionaries in place of pairs; raise DocumentError.

    A key may not stand twice in an object, and every number and text must be valid JSON.
    """
    if isinstance(value, float) and not isfinite(value):
        raise DocumentError(f"{json.dumps(value)} is not JSON", "write a number or null")
    if isinstance(value, LongInteger):
        raise DocumentError(f"a number has more than {PLAIN_DIGITS} digits", "shorten it")
    if isinstance(value, str):
        usable_size(value)
    if isinstance(value, tuple):
        return {plain(key): plain(inner) for key, inner in fields_of(value).items()}
    return [*map(plain, value)] if isinstance(value, list) else value


def from_json(value: Any, key: str, example: str) -> Any:
    """A decoded value, or what the JSON in a text is, as `plain`; raise DocumentError."""
    if isinstance(value, str):
        try:
            value = parse_line(value.removeprefix("\ufeff"), example)
        except DocumentError as error:
            reason = f'"{key}" {error.reason}'
            raise DocumentError(reason, f"write {example}, or remove it") from None
    return plain(value)


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a decoded JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    for inner in value if isinstance(value, list) else ():
        yield from texts_in(inner)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        yield from texts_in(inner)


def text_of(value: Any, key: str) -> str:
    """Return a value if it is a text; raise DocumentError."""
    if not isinstance(value, str):
        reason = f'"{key}" is {json_type(value)}, not a string'
        raise DocumentError(reason, "write its text, or remove the conversation")
    usable_size(value)
    return value


def require_content(content: Any, key: str) -> str:
    """Return the content if it is text to train on; raise DocumentError."""
    if not text_of(content, key).strip():
        state = "blank" if content else "empty"
        raise DocumentError(f'"{key}" is {state}', "write its text, or remove the conversation")
    return content


def calls_of(value: Any, key: str) -> list[Any]:
    """The calls of tools in a decoded value, or in its JSON; raise DocumentError for others."""
    calls = from_json(value, key, CALL_EXAMPLE)
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            reason = f'"{key}" has a call without a "name"'
            raise DocumentError(reason, f"write {CALL_EXAMPLE}, or remove the conversation")
    return calls


def tools_of(value: Any) -> list[Any]:
    """The tools of a decoded list of objects, or of its JSON; raise DocumentError for others."""
    tools = [] if is_switch(value) else from_json(value, TOOLS, TOOLS_EXAMPLE)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        reason = f'"{TOOLS}" is not a list of objects'
        raise DocumentError(reason, f"write {TOOLS_EXAMPLE}, or remove it")
    return tools


def _tools_as_written(value: Any, _: str) -> Any:
    tools_of(value)
    return plain(value)  # some templates read them in the system turn, as JSON


# The keys of a turn beside who speaks and what: how they are read, and the roles that have them.
TURN_KEYS: dict[str, tuple[Callable[[Any, str], Any], tuple[str, ...]]] = {
    "name": (text_of, ROLES),
    **dict.fromkeys(THOUGHTS, (text_of, (ASSISTANT,))),
    CALLS: (calls_of, (ASSISTANT,)),
    CALL_ID: (text_of, (TOOL,)),
    TOOLS: (_tools_as_written, (SYSTEM,)),
}
# Other keys of a turn that carry neither text nor a weight in the loss.
HARMLESS = re.compile(
    r"(\w*_)?(id|idx|index|uuid)|turn|(\w*_)?(timestamp|time|date)|created(_at)?|model|lang(uage)?"
)
PART_KEYS = {"type", "text", "index", "cache_control"}  # keys of a part of the content


class Spelling(NamedTuple):
    """The keys of who speaks and of what is said, and the names of the roles."""

    role: str
    content: str
    roles: Mapping[str, str]

    @property
    def example(self) -> str:
        return json.dumps({self.role: "user", self.content: "..."})


OPENAI = Spelling("role", "content", {role: role for role in ROLES})
SHAREGPT_ROLES = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "observation": TOOL}
SHAREGPT_ROLES |= {"function_call": ASSISTANT, **OPENAI.roles}
SHAREGPT = Spelling("from", "value", SHAREGPT_ROLES)


def message_of_turn(turn: Any, spelling: Spelling, unread: set[str]) -> Message:
    """Return the message of a decoded turn; raise DocumentError.

    Keys that say nothing about the text are added to `unread`. The content of a system turn may be
    empty.
    """
    if not isinstance(turn, tuple):
        raise DocumentError(f"is {json_type(turn)}, not an object", f"write {spelling.example}")
    fields = fields_of(turn)
    if spelling.role not in fields:
        raise DocumentError(f'has no "{spelling.role}"', f"write {spelling.example}")
    speaker, content = fields[spelling.role], fields.get(spelling.content)
    if not isinstance(speaker, str) or speaker not in spelling.roles:
        written = shown(speaker) if isinstance(speaker, str) else json_type(speaker)
        remedy = f"write one of {', '.join(spelling.roles)}"
        raise DocumentError(f'"{spelling.role}" is {written}', remedy)
    role = spelling.roles[speaker]
    if speaker == "function_call":  # a turn of its own: ShareGPT has no form of the list
        fields[CALLS] = [
            call if "function" in call else {"type": "function", "function": call}
            for call in calls_of(content, spelling.content)
        ]
        content = ""

    more: dict[str, Any] = {}
    if role == ASSISTANT and fields.get(THOUGHTS[0]) is not None:
        more[THOUGHTS[0]] = ""  # tells some templates not to look for thoughts in the content
    given = {key: value for key, value in fields.items() if not is_absent(value)}
    given.pop(spelling.role)
    given.pop(spelling.content, None)
    for key, (read, roles) in TURN_KEYS.items():
        if key in given and role not in roles:
            raise DocumentError(f'has "{key}", which only {roles[0]} turns have', "remove it")
        if key in given:
            more[key] = read(given.pop(key), key)
    thoughts = {key: more[key].strip() for key in THOUGHTS if more.get(key)}
    if len({*thoughts.values()}) > 1:  # a template writes one of them
        raise DocumentError(
            f"has different text in {' and in '.join(thoughts)}", "keep one of them"
        )
    is_trained = True
    for key, value in given.items():
        if HARMLESS.fullmatch(key.lower()):
            unread.add(f"{key} of turns")
        elif plain_name(key) in WEIGHT and (weight := weight_of(value)) in (0, 1):
            is_trained &= weight == 1 or role != ASSISTANT
        else:
            state = "neither 0 nor 1" if plain_name(key) in WEIGHT else "not supported"
            known = ", ".join((spelling.role, spelling.content, *TURN_KEYS, "weight"))
            reason = f"has {shown(key)}, which is {state}"
            raise DocumentError(reason, f"remove it, or write one of {known}")

    name = more.pop("name", "")
    if spelling.content not in fields and CALLS not in more:
        raise DocumentError(f'has no "{spelling.content}"', f"write {spelling.example}")
    if isinstance(content, list) and spelling is OPENAI:
        content = "".join(_text_of_part(part, number) for number, part in enumerate(content, 1))
    is_blank = content is None or (isinstance(content, str) and not content.strip())
    if is_blank and (role in (SYSTEM, TOOL) or any(more.values())):
        text = content if isinstance(content, str) and role != SYSTEM else ""
    else:
        text = require_content(content, spelling.content)
    return Message(role, text, name, more, is_trained)


def _text_of_part(part: Any, number: int) -> str:
    fields = fields_of(part) if isinstance(part, tuple) else {}
    others = [key for key in fields.keys() - PART_KEYS if not is_absent(fields[key])]
    text = fields.get("text")
    if fields.get("type") != "text" or not isinstance(text, str) or others:
        reason = f"part {number} of its content is not text, and only text is supported"
        remedy = 'write {"type": "text", "text": "..."}, or remove the conversation'
        raise DocumentError(reason, remedy)
    return text


# A chat begins with the user. Several tools may answer one assistant turn, and an assistant may go
# on after its own turn. A last turn without an answer is accepted: nothing is trained on it.
MAY_FOLLOW = {
    "": (SYSTEM, USER),  # before the first turn
    SYSTEM: (USER,),
    USER: (ASSISTANT,),
    ASSISTANT: (USER, TOOL, ASSISTANT),
    TOOL: (TOOL, ASSISTANT),
}


def require_order(messages: Sequence[Message]) -> None:
    """Raise DocumentError for an order of roles that no chat has, or without a trained answer.

    A system turn without text may stand anywhere, as if it were not there.
    """
    before = ""
    for number, message in enumerate(messages, 1):
        if message.role == SYSTEM and not message.content:
            continue
        if message.role not in MAY_FOLLOW[before]:
            place = f"follows a turn of {before}" if before else "begins the conversation"
            raise DocumentError(
                f"turn {number} ({message.role}) {place}",
                f"put a turn of {' or '.join(MAY_FOLLOW[before])} before it, join turns of the same"
                " role, or move the system turn to the beginning",
            )
        before = message.role
    answers = [message for message in messages if message.role == ASSISTANT]
    if not answers:
        reason = f"has no assistant turn among {len(messages)}"
        raise DocumentError(reason, "add the answer, or remove it")
    if not any(answer.is_trained for answer in answers):
        raise DocumentError("has no answer with a weight of 1", "remove the conversation")


def form_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that a record's conversation is read from; raise DocumentError for none or two."""
    forms = [form for form in FORMS if all(key in fields for key in form)]
    given = [form for form in forms if not all(is_absent(fields[key]) for key in form)]
    whole = [form for form in given if form in WHOLE]
    if len(whole) > 1:
        names = " and ".join(f'"{key}"' for key in chain(*whole))
        raise DocumentError(f"has {names}, more than one conversation", "keep one of them")
    if not forms:
        names = ", ".join([*map(shown, fields)][:3])
        raise DocumentError(
            f'has no "conversations" or "messages"{" but " if names else ""}{names}',
            f'write {EXAMPLE} or {{"prompt": "...", "completion": "..."}}, or remove --task sft,'
            " which is for conversations",
        )
    return (given or forms)[0]


def conversation_of(record: Any, unread: set[str]) -> Conversation:
    """Return the conversation of a record as `parse_line` decodes it; raise DocumentError.

    The names of keys that are ignored are added to `unread`. A system turn without text is left
    out, unless tools stand in it.
    """
    record = ((LISTS[0][0], record),) if is_list_of_turns(record) else record
    if not isinstance(record, tuple):
        raise DocumentError(f"is {json_type(record)}, not an object", f"write {EXAMPLE}")
    fields = dict(record)
    if len(fields) != len(record):
        fields_of(tuple(pair for pair in record if is_known(pair[0])))
    form = form_of(fields)
    used = {*form}
    if len(form) == 2:
        messages = _question_and_answer(fields, form, used, unread)
    else:
        (key,) = form
        turns = fields[key]
        if not isinstance(turns, list) or not turns:
            state = "an empty list" if turns == [] else f"{json_type(turns)}, not a list"
            raise DocumentError(f'"{key}" is {state}', f"write {EXAMPLE}")
        messages = _said(turns, key, USER, 0, unread)
        is_asked = messages[-1].role == USER and key != CHOSEN
        if is_asked and not is_absent(answer := fields.get(CHOSEN)):
            messages += _said(answer, CHOSEN, ASSISTANT, len(messages), unread)
            used.add(CHOSEN)

    beside = {
        key: value for key, value in fields.items() if key not in used and not is_absent(value)
    }
    written = [message.more[TOOLS] for message in messages if TOOLS in message.more]
    offered = [tools for tools in map(tools_of, [*written, beside.pop(TOOLS, [])]) if tools]
    if any(tools != offered[0] for tools in offered):
        raise DocumentError(
            f'has "{TOOLS}" beside the turns, and different ones in a turn', "keep one of them"
        )
    tools = offered[0] if offered else None
    for key in SYSTEM_KEYS:
        if isinstance(beside.get(key), str) and not is_switch(beside[key]):
            messages = _with_system(key, beside.pop(key), messages)
    variables: dict[str, Any] = {}
    for key, value in beside.items():
        if plain_name(key) in VARIABLE_KEYS:
            variables.update(_variables_of(key, value))
        elif is_lost(key, value, messages) and not (key == REJECTED and CHOSEN in used):
            reason = f"has {shown(key)} outside of the turns, which would be lost"
            raise DocumentError(reason, "write it into a turn, or remove it or the conversation")
        else:
            unread.add(key)

    require_order(messages)
    is_first_kept = tools is not None and messages[0].role == SYSTEM and not messages[0].content
    kept = [message for message in messages if message.role != SYSTEM or message.content]
    return Conversation([*messages[:is_first_kept], *kept], tools, variables)


def _question_and_answer(
    fields: Mapping[str, Any], form: Sequence[str], used: set[str], unread: set[str]
) -> list[Message]:
    """The turns of a question and its answer; keys that are read besides are added to `used`."""
    messages: list[Message] = []
    if not is_absent(history := fields.get(HISTORY)):
        if not isinstance(history, list) or any(
            not isinstance(texts, list) or len(texts) != 2 for texts in history
        ):
            reason = f'"{HISTORY}" is not a list of questions with their answers'
            raise DocumentError(reason, 'write [["...", "..."]], or remove it')
        for number, text in enumerate(chain(*history)):
            messages += _said(text, HISTORY, (USER, ASSISTANT)[number % 2], number, unread)
    question, answer = (fields[key] for key in form)
    passage = next((key for key in PASSAGES if not is_absent(fields.get(key))), None)
    if form[0] == "instruction" and passage and isinstance(question, str):
        text = require_content(fields[passage], passage)
        question = f"{question}\n{text}" if question.strip() else text
        used.add(passage)
    asked = _said(question, form[0], USER, len(messages), unread)
    answered = _said(answer, form[1], ASSISTANT, len(messages) + len(asked), unread)
    if answered[0].role in (SYSTEM, USER):  # the whole conversation stands in the answer
        if isinstance(question, list) or all(one.content != question for one in answered):
            raise DocumentError(
                f'"{form[1]}" begins with a turn of {answered[0].role} that is not "{form[0]}"',
                "write the answer alone, or the conversation as messages",
            )
        return answered
    used.add(HISTORY)
    if isinstance(question, list):
        asked = [replace(message, is_trained=message.role != ASSISTANT) for message in asked]
    return [*messages, *asked, *answered]


def _said(value: Any, key: str, role: str, before: int, unread: set[str]) -> list[Message]:
    """The messages of a text that `role` says, of a turn, or of a list of turns.

    `before` turns come before them.
    """
    if isinstance(value, tuple):
        value = [value]
    if not isinstance(value, list) or not value:
        return _numbered(lambda text: Message(role, require_content(text, key)), [value], before)
    first = value[0] if isinstance(value[0], tuple) else ()
    names = {name for name, given in first if given is not None}
    may_be_sharegpt = key in ("conversations", CHOSEN) and OPENAI.role not in names
    spelling = SHAREGPT if may_be_sharegpt and names & {"from", "value"} else OPENAI
    return _numbered(lambda turn: message_of_turn(turn, spelling, unread), value, before)


def _numbered(read: Callable[[Any], Any], turns: Iterable[Any], before: int = 0) -> list[Any]:
    """What `read` makes of each turn; its errors get the number of the turn."""
    made = []
    for number, turn in enumerate(turns, before + 1):
        try:
            made.append(read(turn))
        except DocumentError as error:
            raise DocumentError(f"turn {number}: {error.reason}", error.remedy) from None
    return made


def _with_system(key: str, text: str, messages: list[Message]) -> list[Message]:
    """The messages with the system message that stands beside them."""
    first = messages[0]
    if first.role != SYSTEM or not first.content:
        return [Message(SYSTEM, text_of(text, key)), *messages[first.role == SYSTEM :]]
    if first.content.strip() != text.strip():
        reason = f"has {shown(key)} and another system turn"
        raise DocumentError(reason, "keep one of them, or join both")
    return messages


def _variables_of(key: str, value: Any) -> dict[str, Any]:
    """Variables for the template of one conversation; raise DocumentError for others."""
    variables = from_json(value, key, '{"enable_thinking": false}')
    if not isinstance(variables, dict):
        raise DocumentError(f"{shown(key)} is not an object", "remove it")
    for name in variables:
        if name in FIXED_VARIABLES or not name.isidentifier():
            raise DocumentError(
                f"{key} has {shown(name)}, which is not a valid name of a variable", "remove it"
            )
    return {name: given for name, given in variables.items() if given is not None}


def conversation_of_line(line: bytes | bytearray, unread: set[str] | None = None) -> Conversation:
    """Return the conversation of a line of JSON; see `conversation_of`."""
    try:
        record = parse_line(decode_utf8(line), EXAMPLE)
        return conversation_of(record, set() if unread is None else unread)
    except DocumentError:
        explain_line(line)
        raise


def conversation_of_row(row: Mapping[str, Any], unread: set[str]) -> Conversation:
    """Return the conversation of a row of a table, in which strings are bytes.

    The columns are those of `conversation_columns`. See `conversation_of`.
    """
    given = ((key, _given(key, value)) for key, value in row.items() if value is not None)
    return conversation_of(tuple(given), unread)


def conversation_columns(names: Sequence[str], unread: set[str]) -> list[str]:
    """Return which columns of a table a conversation is read from; raise DocumentError for none.

    The names of the others are added to `unread`.
    """
    form_of(dict.fromkeys(names))
    read = [name for name in names if is_known(name)]
    fields_of(tuple((name, None) for name in read))
    unread.update(set(names).difference(read))
    return read


def _given(key: str, value: Any) -> Any:
    """The value of a column as `parse_line` gives it; raise DocumentError for other than UTF-8."""
    if (key,) in LISTS and isinstance(value, list):
        return _numbered(_decoded, value)
    try:
        return _decoded(value)
    except DocumentError as error:
        raise DocumentError(f"{shown(key)} {error.reason}", error.remedy) from None


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return decode_utf8(value)
    if isinstance(value, JsonCell):
        return value.decoded(EXAMPLE)
    if isinstance(value, dict):
        return tuple((key, _decoded(inner)) for key, inner in value.items() if inner is not None)
    is_list = isinstance(value, list | tuple)  # tuples are in maps, and objects for `plain`
    return [*map(_decoded, value)] if is_list else value


def document_of(conversation: Conversation, reading: ReadOptions) -> str:
    """Return the canonical text of a conversation; raise DocumentError if it is too long."""
    text = canonical_text(conversation)
    require_usable(text, reading)
    return text


def conversation_records(
    reading: ReadOptions,
    unread: set[str],
    text_of: Callable[[Conversation, ReadOptions], str] = document_of,
) -> Records:
    """Readers of conversations, whose document is `text_of(conversation, reading)`."""
    return Records(
        of_line=lambda line: text_of(conversation_of_line(line, unread), reading),
        of_row=lambda row: text_of(conversation_of_row(row, unread), reading),
        columns=lambda names: conversation_columns(names, unread),
    )
