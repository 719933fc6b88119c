"""A conversation with a model, by its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from minimind.data.chat.conversations import (
    ASSISTANT,
    SYSTEM,
    USER,
    Message,
    canonical_text,
    conversation_of_line,
    require_content,
)
from minimind.data.chat.template import ChatTemplate, own_template
from minimind.data.prepare.chat_tokenizer import read_template
from minimind.data.text.documents import DocumentError, ReadOptions
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.errors import UsageError
from minimind.inference.generate import Sampling, continue_ids
from minimind.inference.stored_template import no_template
from minimind.runtime.durable_files import write_whole


def template_of(
    tokenizer: AnyTokenizer, path: str | None, place: Path, today: date | None = None
) -> ChatTemplate:
    """The template in a file, or the tokenizer's own; UsageError if there is none."""
    template = own_template(tokenizer) if path is None else read_template(path)
    if template is None:
        raise no_template(place)
    source, name = template
    return ChatTemplate(source, tokenizer, name, today)


@dataclass
class Chat:
    """The turns so far, and the model that writes the next one."""

    model: Any
    tokenizer: AnyTokenizer
    template: ChatTemplate
    sampling: Sampling
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    asked: int = 0
    forgotten: int = 0  # turns that were dropped, as the model has no position for them

    def __post_init__(self) -> None:
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
        turns = [*self.messages, self._message(USER, text)]
        try:
            messages, ids = self._fitting(turns)
        except DocumentError as error:  # an error of an answer or of the template
            raise UsageError(f"{error}; begin another conversation") from error
        self.asked += 1
        result = continue_ids(
            self.model,
            self.tokenizer,
            {self.asked: ids},
            self.sampling,
            on_text,
            end_ids=[self.template.end_of_turn],
        )
        answer = result.texts[0]
        self.forgotten += len(self.messages) + 1 - len(messages)
        self.messages = [*messages, Message(ASSISTANT, answer)]
        return answer

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
        room = max(1, min(self.sampling.max_new_tokens, limit // 2))
        first = int(messages[0].role == SYSTEM)
        while len(ids := self.template.prompt(messages)) > limit - room:
            if len(messages) <= first + 1:
                what = "the system message and the turn have" if first else "the turn has"
                raise UsageError(
                    f"{what} {len(ids)} tokens, more than {limit - room}: the answer needs {room}"
                    f" of the model's {limit} positions; shorten it"
                )
            messages = [*messages[:first], *messages[first + 2 :]]  # a question and its answer
        return messages, ids

    def save(self, path: Path) -> None:
        """Write the conversation as a line of --task sft's data; raise UsageError if it is none."""
        if path.exists():
            raise UsageError(f"{path} exists; give another file")
        if all(message.role != ASSISTANT for message in self.messages):
            raise UsageError("there is no answer yet; ask something")
        line = f'{{"messages":{canonical_text(self.messages)}}}\n'.encode()
        try:
            conversation_of_line(line, ReadOptions())
            self.template.require_usable(self.messages)
        except DocumentError as error:
            raise UsageError(f"it could not be trained on: {error}; {error.remedy}") from error
        write_whole(path, line)
