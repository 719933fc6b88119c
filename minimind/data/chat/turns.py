"""Parse one turn of a conversation; a DocumentError says what is wrong with it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from minimind.data.text.documents import DocumentError, json_type, usable_size

Pairs = tuple[tuple[str, Any], ...]  # a JSON object as `parse_line` decodes it

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)
TOOL_KEYS = {"tool_calls", "tool_call_id", "function_call"}
TOOLS_REMEDY = "write the call into the content, or remove the conversation"
PART_KEYS = {"type", "text", "index", "cache_control"}  # of a part of the content
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
        what = f'"{spelling.role}" is {json_type(role)}, not a string'
        raise DocumentError(what, f"write {spelling.example()}")
    if role not in spelling.roles:
        raise _unknown_role(role, spelling)
    content = fields[spelling.content]
    if isinstance(content, list) and spelling is OPENAI:
        content = _joined(content)
    name = "" if is_absent(fields.get("name")) else fields["name"]
    is_blank = content is None or (isinstance(content, str) and not content.strip())
    if spelling.roles[role] == SYSTEM and is_blank:
        return Message(SYSTEM, "")
    return Message(spelling.roles[role], require_content(content, spelling.content), name)


def require_single(pairs: Pairs, names: Iterable[str] | None = None) -> None:
    """Raise DocumentError if one of `names`, by default any key, occurs twice."""
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1 and (names is None or key in names):
            what = f"has {shown(key)} {times} times"
            raise DocumentError(what, "keep the one that is meant")


def require_content(content: Any, name: str) -> str:
    """Return the content if it is text to train on; raise DocumentError."""
    if not isinstance(content, str):
        what = f'"{name}" is {json_type(content)}, not a string'
        raise DocumentError(what, f"write {json.dumps({name: '...'})}, or remove the turn")
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
            what = f'has "{key}", but the conversation is written with "{spelling.role}"'
            raise DocumentError(f'{what} and "{spelling.content}"', f"write {example}")
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
            what = f"has {shown(key)}, which is not supported"
            raise DocumentError(what, f"remove it, or write {example}")
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


def _joined(parts: list[Any]) -> str:
    """Return the text of content that is a list of parts; raise DocumentError."""
    return "".join(_text_of_part(part, number) for number, part in enumerate(parts, 1))


def _text_of_part(part: Any, number: int) -> str:
    example = '{"type": "text", "text": "..."}'
    if not isinstance(part, tuple):
        what = f"part {number} of its content is {json_type(part)}, not an object"
        raise DocumentError(what, f"write {example}")
    require_single(part)
    fields = dict(part)
    extra = [key for key, value in part if key not in PART_KEYS and not is_absent(value)]
    if fields.get("type") == "text" and extra:
        what = f"part {number} of its content has {shown(extra[0])}, which is not supported"
        raise DocumentError(what, f"remove it, or write {example}")
    if fields.get("type") != "text":
        kind = fields.get("type")
        name = shown(kind) if isinstance(kind, str) else "without a type"
        what = f"part {number} of its content is {name}, and only text is supported"
        raise DocumentError(what, f"write {example}, or remove the conversation")
    text = fields.get("text")
    if not isinstance(text, str):
        what = f'"text" of part {number} of its content is {json_type(text)}, not a string'
        raise DocumentError(what, f"write {example}")
    return text
