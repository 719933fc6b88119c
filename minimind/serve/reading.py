"""Read a request into token ids. Done in a process with limits (`minimind.runtime.limited`).

A chat template is a program and a tokenizer a set of patterns, which may be a stranger's and take
any time for a text that another stranger sends. So the server renders and encodes nothing itself.
The module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from minimind.data.chat.conversations import ASSISTANT, USER, Conversation, Message
from minimind.data.chat.template import ChatTemplate, asks_for_thought
from minimind.data.text.documents import DocumentError
from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from minimind.errors import DataError, RunError, UsageError
from minimind.inference.prompts import encode_prompt, latest, room_for_answer
from minimind.runtime.checked_json import shown
from minimind.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Refusal,
    Request,
    call_form,
    conversation_of_request,
    no_such_model,
    parse,
)

Json = dict[str, Any]
CHAT, TEXT = b"c", b"t"  # the first byte of a request: what its body asks for
MOST_TRIED = 2**14  # turns of a conversation that is rendered once at the start
TOO_LONG = "context_length_exceeded"


class Reader:
    """A tokenizer and a template, and what requests are compared with.

    `positions` are the model's, `most_tokens` the bound of an answer, `usual_tokens` the same where
    a chat names none, and `most_texts` the bound of the texts of a request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        name: str,
        positions: int,
        most_tokens: int,
        usual_tokens: int,
        most_texts: int,
    ) -> None:
        self._name, self._tokenizer, self._template = name, tokenizer, template
        self._positions, self._most_tokens, self._most_texts = positions, most_tokens, most_texts
        self._usual_tokens = usual_tokens
        self._call_form = call_form(template) if template else None
        self._most_turns = positions if template and self._writes_each_turn(template) else None
        names = tokenizer.special_tokens()
        self._longest = None  # characters that a token stands for; None where that is not known
        if tokenizer.is_lossless:
            self._longest = max(int(tokenizer.piece_bytes().max()), *map(len, names), 1)

    def _writes_each_turn(self, template: ChatTemplate) -> bool:
        """Whether a conversation with more turns than positions cannot fit: each has a token.

        Some templates leave earlier turns out, or write no special token for each.
        """
        turns = [
            Message((USER, ASSISTANT)[n % 2], f"turn {n}.") for n in range(self._positions + 1)
        ]
        if len(turns) > MOST_TRIED:
            return False
        try:
            text = template.render(turns)
        except (DocumentError, UsageError):
            return False
        names = self._tokenizer.special_tokens()
        is_whole = all(turn.content in text for turn in turns)
        return is_whole and sum(map(text.count, names)) >= len(turns)

    def chat(self, body: bytes) -> Json:
        """What a body of /v1/chat/completions asks for; raise Refusal."""
        request = parse(body, ChatRequest)
        self._require_answerable(request)
        template = self._template
        if template is None or self._call_form is None:
            raise Refusal(
                400,
                f"{self._name} has no chat template; ask /v1/completions to continue a text, or"
                " serve a model that was fine-tuned with --task sft, or give --chat_template",
                "no_chat_template",
            )
        is_cut = request.truncation == "auto"
        if not is_cut:  # before all is read
            self._require_few(one.get("role") for one in request.messages)
        try:
            conversation = conversation_of_request(request, template, self._call_form)
            turns = len(conversation)
            if is_cut:
                conversation = self._latest(request, conversation, template)
            text, ids = self._prompt(conversation, template, room=1)
        except (DocumentError, UsageError, DataError) as error:
            remedy = f"; {error.remedy}" if isinstance(error, DocumentError) else ""
            raise Refusal(400, f"{error}{remedy}", "invalid_value", "messages") from None
        more: Json = {"is_thought": asks_for_thought(text), "has_tools": bool(conversation.tools)}
        if is_cut:
            more["dropped"] = turns - len(conversation)
        return {"settings": request.settings(), "prompts": [[ids, ""]], **more}

    def _latest(
        self, request: ChatRequest, conversation: Conversation, template: ChatTemplate
    ) -> Conversation:
        """The conversation without what `minimind chat` would drop, too."""
        asked = self._usual_tokens if request.most_new is None else request.most_new
        room = room_for_answer(asked, self._positions)

        def fits(messages: Iterable[Message]) -> bool:
            try:
                self._prompt(conversation.with_turns(messages), template, room)
            except Refusal:
                return False
            return True

        return conversation.with_turns(latest(conversation, fits))

    def _prompt(
        self, conversation: Conversation, template: ChatTemplate, room: int
    ) -> tuple[str, list[int]]:
        """A conversation's text and its ids; raise Refusal where they leave less room."""
        self._require_few(turn.role for turn in conversation)
        text = template.asked(conversation)
        self._require_short(text, "the conversation", "messages")
        ids = template.ids(text)
        if len(ids) > self._positions - room:
            raise self._too_long(f"the conversation has {len(ids)} tokens", "messages")
        return text, ids

    def _require_few(self, roles: Iterable[Any]) -> None:
        """Raise Refusal for more turns than positions, if each has a token."""
        turns = sum(role in (USER, ASSISTANT) for role in roles)
        if self._most_turns is not None and turns > self._most_turns:
            raise self._too_long(f"the conversation has {turns:,} turns", "messages")

    def complete(self, body: bytes) -> Json:
        """What a body of /v1/completions asks for; raise Refusal."""
        request = parse(body, CompletionRequest)
        self._require_answerable(request)
        # A text that is not continued needs no position after it.
        room = self._positions + (request.most_new == 0)
        prompts = []
        for number, prompt in enumerate(request.prompts(self._most_texts), 1):
            if isinstance(prompt, str):
                ids = self._ids(prompt, number, room)
                prompts.append([ids, prompt if request.echo else ""])
                continue
            size = self._tokenizer.vocab_size
            if (wrong := next((i for i in prompt if not 0 <= i < size), None)) is not None:
                reason = f"prompt {number} has the id {shown(wrong)}, and ids are below"
                reason += f" {size}; send ids of this model's tokenizer"
                raise Refusal(400, reason, "invalid_value", "prompt")
            if len(prompt) >= room:
                raise self._too_long(f"prompt {number} has {len(prompt)} tokens", "prompt")
            prompts.append([prompt, self._tokenizer.decode(prompt) if request.echo else ""])
        return {"settings": request.settings(), "prompts": prompts}

    def _ids(self, prompt: str, number: int, room: int) -> list[int]:
        self._require_short(prompt, f"prompt {number}", "prompt", room)
        try:
            return encode_prompt(prompt, number, self._tokenizer, room)
        except UsageError as error:
            raise Refusal(400, str(error), TOO_LONG, "prompt") from None
        except DataError as error:
            raise Refusal(400, str(error), "invalid_value", "prompt") from None

    def _require_answerable(self, request: Request) -> None:
        """Raise Refusal for the name of another model, and for more tokens than the bound."""
        if (name := request.model) and name != self._name:
            raise no_such_model(name, self._name)
        if (request.most_new or 0) > self._most_tokens:
            reason = f"is {request.most_new}, more than the {self._most_tokens} tokens that an"
            reason += " answer here"
            raise Refusal(400, f"max_tokens {reason} may have; ask for fewer", param="max_tokens")

    def _require_short(self, text: str, what: str, param: str, room: int | None = None) -> None:
        """Raise Refusal for a text that has too many tokens, whichever they are."""
        room = self._positions if room is None else room
        if self._longest is not None and len(text) > room * self._longest:
            least = f"at least {-(-len(text) // self._longest):,} tokens"
            raise self._too_long(f"{what} has {len(text):,} characters, {least},", param)

    def _too_long(self, what: str, param: str) -> Refusal:
        reason = f"{what} and the model {self._positions} positions; shorten it"
        return Refusal(400, reason, TOO_LONG, param)

    def template_facts(self) -> Json | None:
        """What the server has to know of the template; None if there is none."""
        if (template := self._template) is None:
            return None
        return {
            "ends_of_turns": template.ends_of_turns,
            "text_ends": template.text_ends,
            "keys_of_thoughts": [*template.keys_of_thoughts],
        }


def load(given: Json) -> tuple[Json, Callable[[bytes], bytes]]:
    """The facts of a template, or the error of one, and what answers requests; see `Readers`."""
    names = ("name", "positions", "most_tokens", "usual_tokens", "most_texts")
    try:
        tokenizer, template = load_tokenizer(given["tokenizer"]), None
        # The server decodes by itself; this fails here first if it takes too long.
        size, positions = len(tokenizer.pieces()), given["positions"]
        tokenizer.decode([n % size for n in range(positions)])
        if given["template"] is not None:
            source, name, variables = (given[key] for key in ("template", "called", "variables"))
            ChatTemplate(source, tokenizer, name, variables=variables, is_limited=True)
            # Errors name the template to clients: not by a path of this machine.
            template = ChatTemplate(source, tokenizer, variables=variables, is_limited=True)
        reader = Reader(tokenizer, template, **{key: given[key] for key in names})
    except RunError as error:
        return {"error": [type(error).__name__, str(error)]}, bytes
    return {"template": reader.template_facts()}, partial(answer, reader)


def answer(reader: Reader, request: bytes) -> bytes:
    """What a request asks for as JSON: its kind, and its body."""
    read = {CHAT: reader.chat, TEXT: reader.complete}[request[:1]]
    try:
        found = read(request[1:])
    except Refusal as refusal:
        fields = {"status": refusal.status, "message": str(refusal), "code": refusal.code}
        found = {"refusal": {**fields, "param": refusal.param}}
    return json.dumps(found).encode()
