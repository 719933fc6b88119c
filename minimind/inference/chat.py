"""A conversation with a model, by its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from minimind.data.chat.conversations import (
    ASSISTANT,
    CALLS,
    SYSTEM,
    THOUGHTS,
    TOOL,
    USER,
    Conversation,
    Message,
    calls_of,
    canonical_text,
    conversation_of_line,
    document_of,
    require_content,
    tools_of,
)
from minimind.data.chat.template import ChatTemplate, asks_for_thought, own_template, require_read
from minimind.data.prepare.chat_tokenizer import given_template
from minimind.data.text.documents import DocumentError, ReadOptions
from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import UsageError
from minimind.inference.engine import continue_ids
from minimind.inference.prompts import latest, room_for_answer
from minimind.inference.text import Sampling
from minimind.runtime import disk
from minimind.runtime.durable_files import write_whole
from minimind.runtime.installed import LAUNCH

OPEN, CLOSE = "<think>", "</think>"
CALL_OPEN = "<tool_call>"
CALL = re.compile(rf"{CALL_OPEN}\s*(.*?)\s*</tool_call>", re.DOTALL)


def template_of(
    tokenizer: Tokenizer,
    path: str | None,
    place: Path,
    today: date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """The template in a file, or the tokenizer's own; UsageError if there is none."""
    source, name = source_of(tokenizer, path, place, variables)
    return ChatTemplate(source, tokenizer, name, today, variables or {})


def source_of(
    tokenizer: Tokenizer, path: str | None, place: Path, variables: Iterable[str] | None
) -> tuple[str, str]:
    """The source of a template and its name in messages; see `template_of`."""
    template = given_template(path, tokenizer) if path else own_template(tokenizer)
    if template is None:
        raise UsageError(
            f"{place} has no chat template beside its tokenizer; fine-tune it"
            f" ({LAUNCH} --config sft --init_from RUN), give --chat_template, or use it on"
            " plain text (minimind generate, minimind eval)"
        )
    require_read(variables or (), *template)
    return template


def read_tools(path: Path) -> list[Any]:
    """The tools of a file with a JSON list of them; raise UsageError for another file."""
    try:
        return tools_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise UsageError(f"--tools {path}: {reason}; give a file with a JSON list") from error
    except DocumentError as error:
        raise UsageError(f"--tools {path}: {error.reason}; {error.remedy}") from error


@dataclass(frozen=True)
class AnswerReading:
    """How the text of an answer is read: `is_thought` if its prompt ends within a thought.

    `keys_of_thoughts` are the template's.
    """

    keys_of_thoughts: Collection[str]
    is_thought: bool
    has_tools: bool

    def message(self, text: str) -> Message:
        """The turn that a whole text is, with its thoughts and calls as the template reads them."""
        more: dict[str, Any] = {}
        thoughts, content = self._parted(text)
        if thoughts.strip():
            more[THOUGHTS[0]] = thoughts.strip("\n")
        if self.has_tools and (written := CALL.findall(content)):
            try:
                calls = [call for one in written for call in calls_of(one, CALLS)]
                if calls:
                    more[CALLS], content = calls, CALL.sub("", content).strip()
            except DocumentError:  # it stays as it was written
                pass
        return Message(ASSISTANT, content, "", more)

    def beginnings(self, text: str) -> tuple[str, str]:
        """What the thoughts and the content of any answer begin with that begins with `text`."""
        begun = text.lstrip()
        if len(begun) < len(OPEN) and OPEN.startswith(begun):
            return "", ""
        thoughts, content = self._parted(_without_start(text, CLOSE))
        if self.has_tools:
            content = _without_start(content, CALL_OPEN).partition(CALL_OPEN)[0].rstrip()
            if content[:1].isspace():  # blanks before a call are dropped
                content = ""
        return thoughts.strip("\n") if thoughts.strip() else "", content

    def _parted(self, text: str) -> tuple[str, str]:
        """Thoughts and content; a thought that is not closed is all of an answer."""
        begun = text.lstrip()
        if not (self.is_thought or begun.startswith(OPEN)):
            return "", text
        thoughts, _, content = begun.removeprefix(OPEN).partition(CLOSE)
        if thoughts.strip() and THOUGHTS[0] not in self.keys_of_thoughts:
            return "", text
        return thoughts, content.lstrip("\n")


class AnswerStream:
    """The parts of an answer as it comes: what is new of its thoughts and of its content."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reading, self._whole = reading, ""
        self._sent = {THOUGHTS[0]: 0, "content": 0}  # characters

    def go_on(self, more: str) -> dict[str, str]:
        """The new text that is certain by now, whatever follows."""
        self._whole += more
        return self._new(*self._reading.beginnings(self._whole))

    def end(self, turn: Message) -> dict[str, str]:
        """What is left of the whole turn."""
        return self._new(turn.more.get(THOUGHTS[0], ""), turn.content)

    def _new(self, thoughts: str, content: str) -> dict[str, str]:
        parts = {THOUGHTS[0]: thoughts, "content": content}
        found = {key: text[self._sent[key] :] for key, text in parts.items()}
        self._sent = {key: max(len(text), self._sent[key]) for key, text in parts.items()}
        return {key: text for key, text in found.items() if text}


def _without_start(text: str, tag: str) -> str:
    """The text without what the tag begins with at its end."""
    size = max((n for n in range(1, len(tag)) if text.endswith(tag[:n])), default=0)
    return text[: len(text) - size]


@dataclass
class Chat:
    """The turns so far, and the model that writes the next one."""

    model: Any
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: Sampling
    system: str | None = None
    tools: list[Any] | None = None
    shows_thoughts: bool = True
    messages: list[Message] = field(default_factory=list)
    asked: int = 0
    forgotten: int = 0  # turns that were dropped, as the model has no position for them

    def __post_init__(self) -> None:
        if self.tools and not self.template.writes_tools(self.tools):
            raise UsageError(
                f"--tools: {self.template.name} does not write tools; remove --tools, or give a"
                " template that writes them (--chat_template thoughts_and_tools)"
            )
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system message; raise UsageError for a bad one."""
        self.messages = [self._message(SYSTEM, self.system)] if self.system else []
        self.forgotten = 0

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> str:
        """Return the answer to a user turn, which `on_text` receives as it is generated.

        Raise UsageError for a text that is no turn, such as one with a special token, and if it
        alone is too long.
        """
        turns = [*self.messages, self._message(TOOL if self.called else USER, text)]
        try:
            messages, ids = self._fitting(turns)
            is_thought = asks_for_thought(self.template.render(self._conversation(messages), True))
        except DocumentError as error:  # an error of an answer or of the template
            raise UsageError(f"{error}; begin another conversation") from error
        self.asked += 1
        plain = AnswerReading((THOUGHTS[0],), is_thought, has_tools=False)
        stream = AnswerStream(plain)

        def show(parts: dict[str, str]) -> None:
            if on_text and (content := parts.get("content")):
                on_text(content)

        hides = on_text is not None and not self.shows_thoughts
        result = continue_ids(
            self.model,
            self.tokenizer,
            {self.asked: ids},
            replace(self.sampling, stop=(*self.sampling.stop, *self.template.text_ends)),
            (lambda more: show(stream.go_on(more))) if hides else on_text,
            end_ids=self.template.ends_of_turns,
        )
        answer = result.texts[0]
        if hides:
            show(stream.end(plain.message(answer)))
        self.forgotten += len(self.messages) + 1 - len(messages)
        reading = AnswerReading(self.template.keys_of_thoughts, is_thought, bool(self.tools))
        self.messages = [*messages, reading.message(answer)]
        return answer

    @property
    def called(self) -> list[str]:
        """Names of the tools that the last answer calls."""
        calls = self.messages[-1].more.get(CALLS, ()) if self.messages else ()
        return [call.get("function", call)["name"] for call in calls]

    def _conversation(self, messages: Iterable[Message]) -> Conversation:
        return Conversation(messages, self.tools)

    def _message(self, role: str, text: str) -> Message:
        """A message that could be trained on; raise UsageError for another."""
        try:
            require_content(text, "content")
            self.template.require_no_special(text)
        except DocumentError as error:
            what = "the system message" if role == SYSTEM else "the turn"
            raise UsageError(f"{what}: {error.reason}; write it in another way") from error
        return Message(role, text)

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The last of these messages that leave half of the positions to the answer, and ids."""
        limit = self.model.config.max_position_embeddings
        room = room_for_answer(self.sampling.max_new_tokens, limit)

        def ids_of(some: list[Message]) -> list[int]:
            return self.template.prompt(self._conversation(some))

        messages = latest(messages, lambda some: len(ids_of(some)) <= limit - room)
        if len(ids := ids_of(messages)) > limit - room:
            has_system = messages[0].role == SYSTEM
            what = "the system message and the turn have" if has_system else "the turn has"
            raise UsageError(
                f"{what} {len(ids)} tokens, more than {limit - room}: the answer needs {room}"
                f" of the model's {limit} positions; shorten it"
            )
        return messages, ids

    def save(self, path: Path) -> None:
        """Write the conversation as a line of --task sft's data; raise UsageError if it is none."""
        if disk.exists(path):
            raise UsageError(f"{path} exists; give another file")
        if all(message.role != ASSISTANT for message in self.messages):
            raise UsageError("there is no answer yet; ask something")
        conversation = self._conversation(self.messages)
        whole = json.loads(canonical_text(conversation))
        whole = whole if isinstance(whole, dict) else {"messages": whole}
        line = (json.dumps(whole, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        try:
            document_of(conversation_of_line(line), ReadOptions())
            self.template.write(conversation)
        except DocumentError as error:
            raise UsageError(f"it could not be trained on: {error}; {error.remedy}") from error
        write_whole(path, line)
