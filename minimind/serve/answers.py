"""What a request that was read becomes: texts for the scheduler, and OpenAI's objects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from minimind.data.chat.conversations import ASSISTANT, CALLS, THOUGHTS, Message
from minimind.data.tokenizer.load import Tokenizer
from minimind.inference.chat import AnswerReading, AnswerStream
from minimind.inference.text import Likelihood, Sampling, Text
from minimind.serve.protocol import GIVEN, Settings, written_calls

Json = dict[str, Any]


class ServedModel:
    """The model that is served, and what its answers are written with.

    `template` is what `Readers` tells of one. `answers` and `texts` are the settings of
    requests that give none, and `most_tokens` the bound of an answer.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Tokenizer,
        template: Json | None,
        answers: Sampling,
        texts: Sampling,
        most_tokens: int,
    ) -> None:
        self.name, self.tokenizer, self.template = name, tokenizer, template
        self.created = int(time.time())
        text_ends = template["text_ends"] if template else ()
        self.answers, self.texts = replace(answers, stop=(*answers.stop, *text_ends)), texts
        self.positions: int = model.config.max_position_embeddings
        self.architecture: str = model.config.model_type
        self.parameters = sum(one.numel() for one in model.parameters())  # tied ones once
        self.most_tokens = most_tokens
        self.ends = frozenset((tokenizer.eos_id,))
        self.ends_of_turns = self.ends.union(template["ends_of_turns"] if template else ())
        names = {i: name for name, i in tokenizer.special_tokens().items()}
        self._pieces = [(names.get(i), one.content) for i, one in enumerate(tokenizer.pieces())]

    def token(self, token: int) -> tuple[str, bytes]:
        """A token's text, or name, and its bytes; texts of parts of a character are bytes."""
        name, content = self._pieces[token]
        if name is not None:
            return name, name.encode()
        try:
            return content.decode(), content
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content

    def sampling(self, settings: Settings, default: Sampling) -> Sampling:
        """How the answers to a request are drawn."""
        most_new = settings.most_new
        if most_new is None:
            most_new = min(default.max_new_tokens, self.most_tokens)
        given = {name: getattr(settings, name) for name in GIVEN}
        given = {name: value for name, value in given.items() if value is not None}
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])  # -1 keeps all tokens in vLLM
        given.setdefault("seed", uuid4().int >> 64)
        stop = (*default.stop, *settings.stop)
        return replace(default, max_new_tokens=most_new, stop=stop, **given)


@dataclass(frozen=True)
class Prompt:
    """Token ids, the number that seeds the text, and their own text, where it is echoed."""

    ids: list[int]
    number: int
    text: str = ""


class Answer:
    """An answer to a request, whole or as chunks of a stream; its texts are those of `prompts`.

    `read` is what `Reader` makes of the request, of /v1/chat/completions if `is_chat`.
    """

    def __init__(self, served: ServedModel, read: Json, is_chat: bool) -> None:
        self.served, self.settings = served, Settings(**read["settings"])
        self.is_chat, self.created, choices = is_chat, int(time.time()), self.settings.choices
        self._dropped = {"dropped_messages": read["dropped"]} if "dropped" in read else {}
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}"
        self.sampling = served.sampling(self.settings, served.answers if is_chat else served.texts)
        self.ends = served.ends_of_turns if is_chat else served.ends
        self.is_prompt_scored = self.settings.echo and self.settings.top is not None
        self.prompts = [
            Prompt(ids, number * choices + choice, text)
            for number, (ids, text) in enumerate(read["prompts"])
            for choice in range(1, choices + 1)
        ]
        if is_chat:
            assert served.template is not None
            keys = served.template["keys_of_thoughts"]
            self.reading = AnswerReading(keys, read["is_thought"], read["has_tools"])

    def texts(self) -> list[Text]:
        """Texts for the scheduler; the caller sets what they call."""
        served = self.served
        places = served.tokenizer, self.sampling, served.positions
        return [
            Text(
                prompt.ids,
                *places,
                self.sampling.generator(prompt.number),
                self.ends,
                top=self.settings.top,
                is_prompt_scored=self.is_prompt_scored,
            )
            for prompt in self.prompts
        ]

    def choice(self, index: int, text: Text) -> ChatChoice | TextChoice:
        """The choice that a text is, to be written whole or in parts."""
        return ChatChoice(self, index, text) if self.is_chat else TextChoice(self, index, text)

    def whole(self, texts: Sequence[Text]) -> Json:
        """The object of an answer that is not streamed."""
        choices = [self.choice(n, text).whole() for n, text in enumerate(texts)]
        head = self._head("chat.completion" if self.is_chat else "text_completion")
        return {**head, "choices": choices, "usage": self.usage(texts)}

    def chunk(self, *choices: Json, **more: Any) -> Json:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return {**head, "choices": [*choices], **more}

    def usage(self, texts: Sequence[Text]) -> Json:
        """Tokens of the prompts, and of the texts with those that end them."""
        asked = sum(len(text.prompt) for text in texts[:: self.settings.choices])
        new = sum(text.drawn for text in texts)
        return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}

    def _head(self, name: str) -> Json:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.served.name}
        return {**head, **self._dropped}


class ChatChoice:
    """A choice of /v1/chat/completions: whole, or begun, gone on with and ended in deltas."""

    def __init__(self, answer: Answer, index: int, text: Text) -> None:
        self._answer, self._index, self._text = answer, index, text
        self._stream = AnswerStream(answer.reading)
        self._scored = 0  # tokens whose likelihoods have been written

    def whole(self) -> Json:
        turn, calls, end = self._turn()
        content = turn.content if turn.content or not calls else None
        message: Json = {"role": ASSISTANT, "content": content, "refusal": None}
        if thoughts := turn.more.get(THOUGHTS[0]):
            message[THOUGHTS[0]] = thoughts
        if calls:
            message[CALLS] = calls
        return self._choice(self._logprobs(), end, message=message)

    def begin(self) -> Iterator[Json]:
        yield self._choice(None, None, delta={"role": ASSISTANT, "content": ""})

    def go_on(self, more: str, scored: int) -> Iterator[Json]:
        """More of the text, and how many tokens have likelihoods."""
        if delta := self._stream.go_on(more):
            yield self._choice(self._logprobs(scored), None, delta=delta)

    def end(self) -> Iterator[Json]:
        turn, calls, end = self._turn()
        delta: Json = self._stream.end(turn)
        if calls:
            delta[CALLS] = [{"index": number, **call} for number, call in enumerate(calls)]
        logprobs = self._logprobs()
        if delta or (logprobs and logprobs["content"]):
            yield self._choice(logprobs, None, delta=delta)
        yield self._choice(None, end, delta={})

    def _turn(self) -> tuple[Message, list[Json], str]:
        """The turn that the text is, its calls in OpenAI's form, and why it ended."""
        message = self._answer.reading.message(self._text.text)
        calls = written_calls(message.more.get(CALLS, ()), f"call_{uuid4().hex[:16]}")
        return message, calls, "tool_calls" if calls else self._text.end

    def _logprobs(self, scored: int | None = None) -> Json | None:
        """Log-probabilities of the tokens that came since; the end of a turn is no content."""
        new, self._scored = self._text.likelihoods[self._scored : scored], scored or 0
        if self._text.top is None:
            return None

        def entry(token: int, value: float) -> Json:
            name, content = self._answer.served.token(token)
            return {"token": name, "logprob": value, "bytes": [*content]}

        content = [
            {**entry(one.token, one.value), "top_logprobs": [entry(*other) for other in one.top]}
            for one in new
            if one.token not in self._text.ends
        ]
        return {"content": content, "refusal": None}

    def _choice(self, logprobs: Json | None, end: str | None, **fields: Any) -> Json:
        return {"index": self._index, **fields, "logprobs": logprobs, "finish_reason": end}


class TextChoice:
    """A choice of /v1/completions: whole, or begun, gone on with and ended in pieces."""

    def __init__(self, answer: Answer, index: int, text: Text) -> None:
        self._served, self._index, self._text = answer.served, index, text
        self._echoed = answer.prompts[index].text
        self._scored = 0  # tokens that have been written with their likelihoods

    def whole(self) -> Json:
        return self._choice(self._echoed + self._text.text, self._logprobs(), self._text.end)

    def begin(self) -> Iterator[Json]:
        if self._echoed:
            yield self._choice(self._echoed, None, None)

    def go_on(self, more: str, scored: int) -> Iterator[Json]:
        """More of the text, and how many tokens have likelihoods."""
        yield self._choice(more, self._logprobs(scored), None)

    def end(self) -> Iterator[Json]:
        yield self._choice("", self._logprobs(), self._text.end)

    def _logprobs(self, scored: int | None = None) -> Json | None:
        """Log-probabilities of the tokens that came since.

        Tokens of a scored prompt come first, and the first of them has none. The token that ends
        the text is the last: lm-eval takes the last one for what was generated.
        """
        text = self._text
        if text.top is None:
            return None
        begun = text.prompt[: int(text.is_prompt_scored)]
        end = None if scored is None else scored + len(begun)
        part = slice(self._scored, end)
        self._scored = end or 0
        known = [*(None for _ in begun), *text.likelihoods][part]
        ids = [*begun, *(one.token for one in text.likelihoods)][part]
        return {
            "tokens": [self._served.token(token)[0] for token in ids],
            "token_logprobs": [one and one.value for one in known],
            "top_logprobs": [one and self._top(one) for one in known],
        }

    def _top(self, one: Likelihood) -> dict[str, float]:
        """The most likely tokens, and the token itself, which OpenAI has there too."""
        found: dict[str, float] = {}
        for token, value in (*one.top, (one.token, one.value)):
            found.setdefault(self._served.token(token)[0], value)  # the likeliest of a name
        return found

    def _choice(self, text: str, logprobs: Json | None, end: str | None) -> Json:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": end}
