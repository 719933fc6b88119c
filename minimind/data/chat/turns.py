"""Parse one turn of a conversation; a DocumentError says what is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minimind.data.text.documents import DocumentError, json_type, usable_size

Pairs = tuple[tuple[str, Any], ...]  # a JSON object as `parse_line` decodes it

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)
KEYS_BESIDE = {"name", "id"}  # of a turn; other keys must be null
TOOL_KEYS = {"tool_calls", "tool_call_id", "function_call"}
TOOLS_REMEDY = "write the call into the content, or remove the conversation"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; the role is one of `ROLES`."""

    role: str
    content: str


@dataclass(frozen=True)
class Spelling:
    """The keys of a turn and its names of the roles."""

    role: str
    content: str
    roles: dict[str, str]

    @property
    def example(self) -> str:
        """An example of a valid turn."""
        user = next(name for name, role in self.roles.items() if role == USER)
        return json.dumps({self.role: user, self.content: "..."})


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


def message_of_turn(turn: Any, spelling: Spelling) -> Message:
    """Return the message of a decoded turn; raise DocumentError."""
    if not isinstance(turn, tuple):
        raise DocumentError(f"is {json_type(turn)}, not an object", f"write {spelling.example}")
    fields = dict(turn)
    if len(fields) != len(turn):
        require_single(turn)
    if fields.keys() != {spelling.role, spelling.content}:
        _require_keys(fields, spelling)
    role = fields[spelling.role]
    if not isinstance(role, str):
        what = f'"{spelling.role}" is {json_type(role)}, not a string'
        raise DocumentError(what, f"write {spelling.example}")
    if role not in spelling.roles:
        raise _unknown_role(role, spelling)
    content = fields[spelling.content]
    if isinstance(content, list) and spelling is OPENAI:
        content = _joined(content)
    return Message(spelling.roles[role], require_content(content, spelling.content))


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


def _require_keys(fields: dict[str, Any], spelling: Spelling) -> None:
    """Raise DocumentError for a missing key, or for one with a meaning that would be lost."""
    given = {key for key, content in fields.items() if content is not None}
    if given & TOOL_KEYS:
        key = min(given & TOOL_KEYS)
        raise DocumentError(f'has "{key}", and tool calls are not supported', TOOLS_REMEDY)
    other = SHAREGPT if spelling is OPENAI else OPENAI
    for key in (other.role, other.content):
        if key in given:
            what = f'has "{key}", but the conversation is written with "{spelling.role}"'
            raise DocumentError(f'{what} and "{spelling.content}"', f"write {spelling.example}")
    for key in (spelling.role, spelling.content):
        if key not in fields:
            raise DocumentError(f'has no "{key}"', f"write {spelling.example}")
    if unknown := sorted(given - KEYS_BESIDE - {spelling.role, spelling.content}):
        what = f"has {shown(unknown[0])}, which is not supported"
        raise DocumentError(what, f"remove it, or write {spelling.example}")


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
