"""What a request that was read becomes: texts for the scheduler, and OpenAI's objects."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from minimind.data.chat.conversations import ASSISTANT, CALLS, THOUGHTS, Message
from minimind.data.tokenizer.load import Tokenizer
from minimind.data.tokenizer.vocabulary import BYTE
from minimind.inference.chat import AnswerReading
from minimind.inference.text import CONTEXT, Likelihood, Sampling, Text
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
        self.most_tokens = most_tokens
        self.ends = frozenset((tokenizer.eos_id,))
        self.ends_of_turns = self.ends.union(template["ends_of_turns"] if template else ())
        names = {i: name for name, i in tokenizer.special_tokens().items()}
        self._pieces = [(names.get(i), one) for i, one in enumerate(tokenizer.pieces())]

    def token(self, token: int) -> tuple[str, bytes]:
        """A token's text, or name, and its bytes; texts of parts of a character are bytes."""
        name, piece = self._pieces[token]
        content = piece.content
        if name is not None:
            return name, name.encode()
        try:
            return content.decode(), content
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content

    def is_special(self, token: int) -> bool:
        """Whether it has a name in place of a text."""
        return self._pieces[token][0] is not None

    def is_byte(self, token: int) -> bool:
        """Whether the tokens beside it decide what characters its bytes become."""
        name, content = self.token(token)
        return self._pieces[token][1].kind == BYTE or name.encode() != content

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


class Answer(ABC):
    """An answer to a request, whole or as chunks of a stream; its texts are those of `prompts`.

    `read` is what `Reader` makes of the request.
    """

    name: str
    chunk_name: str
    prefix: str
    is_prompt_scored = False

    def __init__(self, served: ServedModel, read: Json) -> None:
        self.served, self.settings = served, Settings(**read["settings"])
        self.id, self.created = f"{self.prefix}-{uuid4().hex}", int(time.time())
        self.top, choices = self.settings.top, self.settings.choices
        self.sampling = served.sampling(self.settings, self.default)
        self.prompts = [
            Prompt(ids, number * choices + choice, text)
            for number, (ids, text) in enumerate(read["prompts"])
            for choice in range(1, choices + 1)
        ]

    @property
    @abstractmethod
    def default(self) -> Sampling:
        """Settings of a request that gives none."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end its texts."""
        return self.served.ends

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
                top=self.top,
                is_prompt_scored=self.is_prompt_scored,
            )
            for prompt in self.prompts
        ]

    def whole(self, texts: Sequence[Text]) -> Json:
        """The object of an answer that is not streamed."""
        choices = [self._choice(n, text) for n, text in enumerate(texts)]
        return {**self._head(self.name), "choices": choices, "usage": self.usage(texts)}

    def chunk(self, *choices: Json, **more: Any) -> Json:
        """A chunk of a stream."""
        return {**self._head(self.chunk_name), "choices": [*choices], **more}

    def usage(self, texts: Sequence[Text]) -> Json:
        """Tokens of the prompts, and of the texts with those that end them."""
        choices = self.settings.choices
        asked = sum(len(text.prompt) for text in texts[::choices])
        new = sum(text.drawn for text in texts)
        return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}

    def _head(self, name: str) -> Json:
        return {"id": self.id, "object": name, "created": self.created, "model": self.served.name}

    @abstractmethod
    def _choice(self, index: int, text: Text) -> Json: ...

    @abstractmethod
    def stream(self, index: int, text: Text) -> ChoiceStream:
        """The stream of one choice."""


class ChoiceStream(ABC):
    """The choices of the chunks of one text, as it is generated."""

    def __init__(self, index: int, text: Text) -> None:
        self._index, self._text = index, text
        self._scored = 0  # tokens whose likelihoods have been sent

    @abstractmethod
    def begin(self) -> Iterator[Json]: ...

    @abstractmethod
    def go_on(self, more: str, scored: int) -> Iterator[Json]:
        """More of the text, and how many tokens have likelihoods."""

    @abstractmethod
    def end(self) -> Iterator[Json]: ...

    def _choice(self, logprobs: Json | None, end: str | None, **fields: Any) -> Json:
        return {"index": self._index, **fields, "logprobs": logprobs, "finish_reason": end}


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, served: ServedModel, read: Json) -> None:
        super().__init__(served, read)
        assert served.template is not None
        keys = served.template["keys_of_thoughts"]
        self.reading = AnswerReading(keys, read["is_thought"], read["has_tools"])

    @property
    def default(self) -> Sampling:
        return self.served.answers

    @property
    def ends(self) -> frozenset[int]:
        return self.served.ends_of_turns

    def parts(self, text: Text) -> tuple[Message, list[Json], str]:
        """The turn of a text, its calls in OpenAI's form, and why it ended."""
        message = self.reading.message(text.text)
        calls = written_calls(message.more.get(CALLS, ()), f"call_{uuid4().hex[:16]}")
        return message, calls, "tool_calls" if calls else text.end

    def logprobs(self, likelihoods: Sequence[Likelihood]) -> Json | None:
        if self.top is None:
            return None

        def entry(token: int, value: float) -> Json:
            name, content = self.served.token(token)
            return {"token": name, "logprob": value, "bytes": [*content]}

        content = [
            {**entry(one.token, one.value), "top_logprobs": [entry(*other) for other in one.top]}
            for one in likelihoods
            if one.token not in self.ends  # the end of the turn is no part of its content
        ]
        return {"content": content, "refusal": None}

    def _choice(self, index: int, text: Text) -> Json:
        turn, calls, end = self.parts(text)
        content = turn.content if turn.content or not calls else None
        message: Json = {"role": ASSISTANT, "content": content, "refusal": None}
        if thoughts := turn.more.get(THOUGHTS[0]):
            message[THOUGHTS[0]] = thoughts
        if calls:
            message[CALLS] = calls
        logprobs = self.logprobs(text.likelihoods)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": end}

    def stream(self, index: int, text: Text) -> ChoiceStream:
        return _ChatStream(self, index, text)


class _ChatStream(ChoiceStream):
    """Deltas of a turn: what is sent is what every turn begins with that begins with the text."""

    def __init__(self, answer: ChatAnswer, index: int, text: Text) -> None:
        super().__init__(index, text)
        self._answer = answer
        self._whole = ""
        self._sent = {THOUGHTS[0]: 0, "content": 0}  # characters

    def begin(self) -> Iterator[Json]:
        yield self._choice(None, None, delta={"role": ASSISTANT, "content": ""})

    def go_on(self, more: str, scored: int) -> Iterator[Json]:
        self._whole += more
        delta = self._delta(*self._answer.reading.beginnings(self._whole))
        if delta:
            yield self._choice(self._logprobs(scored), None, delta=delta)

    def end(self) -> Iterator[Json]:
        turn, calls, end = self._answer.parts(self._text)
        delta = self._delta(turn.more.get(THOUGHTS[0], ""), turn.content)
        if calls:
            delta[CALLS] = [{"index": number, **call} for number, call in enumerate(calls)]
        logprobs = self._logprobs(len(self._text.likelihoods))
        if delta or (logprobs and logprobs["content"]):
            yield self._choice(logprobs, None, delta=delta)
        yield self._choice(None, end, delta={})

    def _delta(self, thoughts: str, content: str) -> Json:
        delta = {}
        for key, text in ((THOUGHTS[0], thoughts), ("content", content)):
            if len(text) > self._sent[key]:
                delta[key] = text[self._sent[key] :]
                self._sent[key] = len(text)
        return delta

    def _logprobs(self, scored: int) -> Json | None:
        new = self._text.likelihoods[self._scored : scored]
        self._scored = scored
        return self._answer.logprobs(new)


class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    name, chunk_name, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, served: ServedModel, read: Json) -> None:
        super().__init__(served, read)
        self.echo = self.settings.echo
        self.is_prompt_scored = self.echo and self.top is not None

    @property
    def default(self) -> Sampling:
        return self.served.texts

    def echoed(self, index: int) -> str:
        """What the text begins with."""
        return self.prompts[index].text if self.echo else ""

    def offsets(self, index: int, text: Text) -> Offsets:
        """Count offsets for the tokens of a text that have likelihoods."""
        if self.is_prompt_scored:
            return Offsets(self.served)
        return Offsets(self.served, text.prompt[-CONTEXT:], len(self.echoed(index)))

    def logprobs(self, text: Text, first: int, end: int, offsets: Offsets) -> Json | None:
        """Return the log-probabilities of tokens `first` to `end`; `offsets` is at token `first`.

        Tokens of a scored prompt come first, and the first of them has none. The token that ends
        the text is the last: lm-eval takes the last one for what was generated.
        """
        if self.top is None:
            return None
        ids = self.tokens(text)[first:end]
        known = [None] * self.is_prompt_scored + text.likelihoods
        known = known[first:end]
        return {
            "tokens": [self.served.token(token)[0] for token in ids],
            "token_logprobs": [one and one.value for one in known],
            "top_logprobs": [one and self._top(one) for one in known],
            "text_offset": [offsets.take(token) for token in ids],
        }

    def tokens(self, text: Text) -> list[int]:
        """The tokens that have likelihoods, and before them the first of a scored prompt."""
        first = text.prompt[: int(self.is_prompt_scored)]
        return [*first, *(one.token for one in text.likelihoods)]

    def _top(self, one: Likelihood) -> dict[str, float]:
        """The most likely tokens, and the token itself, which OpenAI has there too."""
        found: dict[str, float] = {}
        for token, value in (*one.top, (one.token, one.value)):
            found.setdefault(self.served.token(token)[0], value)  # the likeliest of a name
        return found

    def _choice(self, index: int, text: Text) -> Json:
        logprobs = self.logprobs(text, 0, len(text.likelihoods) + 1, self.offsets(index, text))
        whole = self.echoed(index) + text.text
        return {"index": index, "text": whole, "logprobs": logprobs, "finish_reason": text.end}

    def stream(self, index: int, text: Text) -> ChoiceStream:
        return _CompletionStream(self, index, text)


class Offsets:
    """Where each of some tokens begins in their text, `at` characters after its begin.

    The text is what the tokenizer decodes after `context`. A byte of an unfinished character is
    where that character is.
    """

    def __init__(self, served: ServedModel, context: Sequence[int] = (), at: int = 0) -> None:
        self._served, self._at = served, at
        self._begin(context)

    def _begin(self, context: Sequence[int]) -> None:
        self._ids = [*context]
        self._bytes = b""  # that follow the context
        self._before = len(self._served.tokenizer.decode(self._ids))

    def take(self, token: int) -> int:
        """Where the next token begins."""
        served = self._served
        if served.is_byte(token):
            content = served.token(token)[1]
            known = (self._bytes + content[:1]).decode(errors="replace")
            self._ids.append(token)
            self._bytes += content
            return self._at + len(known) - 1
        widths = (len(served.tokenizer.decode(ids)) for ids in (self._ids, [*self._ids, token]))
        at, end = (self._at + width - self._before for width in widths)
        if end > at or not served.is_special(token):  # else it has no text, and splits none
            self._at = end
            self._begin([token])
        return at


class _CompletionStream(ChoiceStream):
    """Pieces of a text."""

    def __init__(self, answer: CompletionAnswer, index: int, text: Text) -> None:
        super().__init__(index, text)
        self._answer = answer
        self._offsets = answer.offsets(index, text)

    def begin(self) -> Iterator[Json]:
        if echoed := self._answer.echoed(self._index):
            yield self._choice(None, None, text=echoed)

    def go_on(self, more: str, scored: int) -> Iterator[Json]:
        yield self._choice(self._logprobs(scored), None, text=more)

    def end(self) -> Iterator[Json]:
        logprobs = self._logprobs(len(self._text.likelihoods))
        yield self._choice(logprobs, self._text.end, text="")

    def _logprobs(self, scored: int) -> Json | None:
        end = scored + self._answer.is_prompt_scored
        found = self._answer.logprobs(self._text, self._scored, end, self._offsets)
        self._scored = end
        return found
