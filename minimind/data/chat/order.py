"""Which role may follow which in a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from minimind.data.chat.turns import ASSISTANT, SYSTEM, TOOL, USER, Message
from minimind.data.text.documents import DocumentError

START = ""  # before the first turn
# A chat begins with the user and goes on in turn. Several tools may answer one assistant turn. A
# model is only ever asked to write after a user or a tool, so two assistant turns in a row would
# train on what never happens, as would a chat that begins with the assistant. A last turn without
# an answer is accepted: nothing is trained on it.
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
            what, remedy = _complaint(before, message.role)
            raise DocumentError(f"turn {number} {what}", remedy)
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
