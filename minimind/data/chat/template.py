"""Encode a conversation with a chat template, and say which of its tokens are trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import cache, cached_property
from itertools import dropwhile, takewhile, zip_longest
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
from tokenizers import AddedToken

from minimind.config.run_config import TEMPLATES, files_by_name
from minimind.data.chat.conversations import (
    ASSISTANT,
    CALLS,
    SYSTEM,
    THOUGHTS,
    TOOL,
    TOOLS,
    USER,
    Conversation,
    Message,
    as_conversation,
    texts_in,
    turn_of,
)
from minimind.data.chat.sandbox import (
    Asked,
    BoundedSandbox,
    Exceeded,
    Failed,
    Invalid,
    Refused,
    Rendered,
    Sandbox,
    Span,
    bounded,
)
from minimind.data.chat.turns import TAG, THOUGHT, Turns, Unbounded, forms_of
from minimind.data.text.documents import DocumentError
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.load import Tokenizer
from minimind.data.tokenizer.lossless import TextLoss
from minimind.data.tokenizer.vocabulary import TEMPLATE_NAME
from minimind.errors import UsageError
from minimind.runtime.durable_files import read_small_text
from minimind.runtime.terminal import shorten_line

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"  # the name by which a template asks for the date
DATE = "2024-07-26"  # the date that a run uses if it gives none
PROBE = Conversation([Message(USER, " a b "), Message(ASSISTANT, " c d ")])
PROBES = (PROBE, (Message(SYSTEM, " e f "), *PROBE), (*PROBE, Message(TOOL, " g h "), *PROBE[1:]))
ANSWER_WITH_THOUGHT = Message(ASSISTANT, "<think>\nx y\n</think>\n\nc d")
CALLS_REMEDY = (
    'it may read calls of another form: {"type": "function", "function": {"name": "...",'
    ' "arguments": {...}}}, or arguments as JSON text'
)


def date_of(source: str, given: str | None) -> str | None:
    """The date that a template is told in a run, which is part of its tokens; None if it asks for
    none.
    """
    return date.fromisoformat(given or DATE).isoformat() if CLOCK in source else None


def reads(source: str, variable: str) -> bool:
    """Whether a template has the name of a variable."""
    return re.search(rf"\b{variable}\b", source) is not None


def require_read(variables: Iterable[str], source: str, name: str) -> None:
    """Raise UsageError for a variable of --chat_template_kwargs that a template does not read."""
    if unread := [variable for variable in variables if not reads(source, variable)]:
        raise UsageError(f"--chat_template_kwargs: {name} does not read {unread[0]}; remove it")


class Renderer:
    """A template's source and the names of tokens that it may use, such as `bos_token`.

    `name` stands for it in error messages, `today` is its date (default: that of each rendering),
    and `variables` are what it reads. A template that is not ours is rendered in a process with
    limits, unless the process that asks has limits (`is_limited`).
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        name: str,
        today: date | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        is_limited: bool = False,
    ) -> None:
        self.source = source
        self.name = name
        self._today, self._is_limited = today, is_limited
        self.marks_generation = GENERATION.search(source) is not None
        self._values = {**tokens, **variables}

    def render(self, messages: Iterable[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of the messages; raise DocumentError if the template refuses them."""
        conversation = as_conversation(messages)
        asked = [(len(conversation), add_generation_prompt)]
        ((text, _),) = self.beginnings(conversation, asked)
        return text

    @cached_property
    def _sandbox(self) -> Sandbox | BoundedSandbox:
        if self._is_limited or self.source in shipped_templates():
            return Sandbox(self.source, self._today)
        return bounded(self.source, self._today)

    def probed(self) -> list[str]:
        """The texts of short chats with the prompt after each, without what the template refuses.

        It may refuse system messages, or tools.
        """
        texts = []
        for probe in PROBES:
            with suppress(DocumentError):
                texts.append(self.render(probe, add_generation_prompt=True))
        return texts

    def beginnings(self, conversation: Conversation, asked: Sequence[Asked]) -> Iterator[Rendered]:
        """Yield the texts and spans of beginnings of a conversation; see `render`."""
        values = {**self._values, **conversation.variables}
        try:
            turns = list(map(turn_of, conversation))
            yield from self._sandbox.render(turns, asked, values, conversation.tools)
        except Invalid as error:
            reason = f"{self.name} is not a Jinja template ({error})"
            raise UsageError(f"{reason}; correct it, or give another") from error
        except Refused as error:
            reason = f"{self.name} refuses the conversation ({error})"
            raise DocumentError(reason, "change it, or give another template") from error
        except Exceeded as error:
            raise Unbounded(f"{self.name} {error}; give another template") from error
        except Failed as error:
            has_calls = any(CALLS in message.more for message in conversation)
            remedy = CALLS_REMEDY if has_calls else "correct it, or give another"
            raise UsageError(f"{self.name} cannot be rendered ({error}); {remedy}") from error


@cache
def shipped_templates() -> frozenset[str]:
    """Sources of the templates that this package has."""
    return frozenset(map(read_small_text, files_by_name(TEMPLATES).values()))


def spans_by_piece(
    pieces: Sequence[str], spans: Sequence[Span]
) -> Iterator[tuple[str, list[Span]]]:
    """Yield each piece of a text with the parts of the spans within it, relative to its start.

    Neither pieces nor spans overlap, and both are in order.
    """
    begin = first = 0
    for piece in pieces:
        end = begin + len(piece)
        while first < len(spans) and spans[first][1] <= begin:
            first += 1
        within = takewhile(lambda span, end=end: span[0] < end, spans[first:])
        parts = [(max(start, begin) - begin, min(stop, end) - begin) for start, stop in within]
        yield piece, [part for part in parts if part[0] < part[1]]
        begin = end


TrainOn = Literal["assistant", "last", "all"]
Written = tuple[str, list[Span]]  # what a template writes, and where it is trained on
Encoded = tuple[np.ndarray, np.ndarray]  # ids, and whether each is trained on

SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
DEFAULT_NAME = "thoughts_and_tools"  # as --chat_template takes it
DEFAULT_TEMPLATE = (TEMPLATES / f"{DEFAULT_NAME}.jinja").read_text(encoding="utf-8")
# What a special token looks like in a rendered text, also if the tokenizer does not have it.
SPECIAL_LOOK = re.compile(r"<[|\uff5c][^\s<>]+?[|\uff5c]>")
NAME_IN_SOURCE = re.compile(r"<[|\uff5c][^\s<>'\"+{}]+?[|\uff5c]>")  # not of an expression


def special_names(source: str, tokenizer: Tokenizer | None, name: str) -> list[str]:
    """Names of the special tokens that a template needs which is given to a tokenizer.

    None of its own template, for what that writes and it lacks is text: the model has been trained
    with that. Raise UsageError if the template is not valid; `name` is what messages call it.
    """
    if tokenizer is not None and is_own(source, tokenizer):
        return []
    tokens = named_tokens(tokenizer) if tokenizer else {"bos_token": "<s>", "eos_token": "</s>"}
    tags = SPECIAL_TOKENS if source == DEFAULT_TEMPLATE else tags_of(source, tokens, name)
    return [tag for tag in tags if tokenizer is None or not is_matched(tag, tokenizer)]


def is_matched(tag: str, tokenizer: Tokenizer) -> bool:
    """Whether a tag in a text is a token by itself, though not special: one that a user defined."""
    token = tokenizer.piece_id(tag)
    return token is not None and token in tokenizer.encode(f"a{tag}a")


def tags_of(source: str, tokens: Mapping[str, str], name: str) -> list[str]:
    """Names in the form of special tokens that a template has in its source or writes.

    It may build them from roles. `tokens` are those of `named_tokens`. Raise UsageError if it is
    not valid.
    """
    names = NAME_IN_SOURCE.findall(source)
    for text in Renderer(source, tokens, name).probed():
        names += SPECIAL_LOOK.findall(text)
    return [*dict.fromkeys(names)]


TURN_TAG = re.compile(f"{TAG.pattern}|{THOUGHT.pattern}")  # a tag within a turn, which may be said
TAG_LOOK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")  # a tag in a rendered text


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """What matches one of these names, the longest, in a group."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def is_own(source: str, tokenizer: Tokenizer) -> bool:
    """Whether a template is one of those beside a tokenizer."""
    return source in tokenizer.templates.by_name.values()


def named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Tokens that a template may use by name, such as bos_token."""
    names = {i: token for token, i in tokenizer.special_tokens().items()}
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    known = {role: names[i] for role, i in roles.items() if i in names}
    return known | tokenizer.token_names


def asks_for_thought(prompt: str) -> bool:
    """Whether the text of a prompt ends within a thought."""
    return prompt.rstrip().endswith("<think>")


def own_template(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Source of a tokenizer's chat template, and its name in messages; None without one.

    Raise UsageError if none of several is the default.
    """
    templates = tokenizer.templates
    if not templates.by_name:
        return None
    path = tokenizer.path.parent / templates.origin
    if templates.default is None:
        raise UsageError(
            f"{path}: has the chat templates {', '.join(sorted(templates.by_name))}, and none is"
            " named default; name a file with one of them (--chat_template)"
        )
    return templates.default, f"the chat template of {path}"


def _stripped(parts: Sequence[str], tokens: Sequence[AddedToken]) -> list[str]:
    """The text between tokens without the whitespace that belongs to these, by their flags."""
    found = [*parts]
    for at, token in enumerate(tokens):
        if token.lstrip:
            found[at] = found[at].rstrip()
        if token.rstrip:
            found[at + 1] = found[at + 1].lstrip()
    return found


class ChatTemplate:
    """A Jinja chat template with a tokenizer that has its special tokens.

    Special tokens in the rendered text become their ids. A SentencePiece model encodes the text
    between them by itself, a tokenizer.json the whole as AutoTokenizer does. Tags that the
    tokenizer lacks are text if the template is its own, as the model was trained with them, and an
    error otherwise. Raise UsageError if the template is not valid, or does not fit the tokenizer;
    `name` is what messages call it. `today` is the date that the template reads (default: the date
    of each prompt); `variables` are other values that it reads; `is_limited` is as in `Renderer`.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        name: str = "the chat template",
        today: date | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        is_limited: bool = False,
    ) -> None:
        self.source = source
        self.name = name
        self._tokenizer = tokenizer
        self._special = tokenizer.special_tokens()
        matched: dict[str, int] = {}
        if isinstance(tokenizer, HuggingFaceTokenizer):
            matched = {token.content: i for i, token in tokenizer.matched.items()}
        self._special_name, self._matched_name = _any_of(self._special), _any_of(matched)
        names = named_tokens(tokenizer)
        self._renderer = Renderer(source, names, name, today, variables, is_limited)
        texts = self._renderer.probed()
        # Special tokens, and other tokens that only a template should write.
        self._tokens = {**self._special, **matched, **self._tokens_in_text(texts)}
        self._token_name = _any_of(self._tokens)
        # A template that is given can be given with a token at the end of an answer.
        ends_in_text = is_own(source, tokenizer)
        self._turns = Turns(self._renderer.beginnings, self._token_name, name, ends_in_text)
        self._special_ids = {token: np.array([i], np.int32) for token, i in self._special.items()}
        self._sizes = tokenizer.piece_bytes()
        self._require_fit(texts)

    @cached_property
    def end_of_turn(self) -> int | None:
        """Id that ends an assistant turn: the first token after its content that is a tag.

        None if a text alone does (`text_ends`). Raise UsageError if there is none: an answer would
        not end.
        """
        special = set(self._tokens.values())
        for probe in (PROBE, PROBE * 2):  # an answer may be ended by the next turn alone
            ids, targets = self.encode(probe)
            if probe == PROBE:
                targets[int(np.argmax(targets)) :] = True  # the end need not be trained on
            written = ids[targets].tolist()
            # A header may be trained on too.
            content = dropwhile(lambda token: token in special, written)
            if (end := next((token for token in content if token in special), None)) is not None:
                return end
        if self.text_ends:
            return None
        raise UsageError(
            f"{self.name} writes no special token after an answer, so that no answer would end; end"
            " it with eos_token, or with a token such as <|end|>"
        )

    @cached_property
    def text_ends(self) -> list[str]:
        """Text that ends an assistant turn, if the tokenizer has no token for it; as `stop`."""
        try:
            end = self._turns.text_end
        except DocumentError:  # what it does to texts is known by its {% generation %} alone
            return []
        return [end] if end else []

    @property
    def ends_of_turns(self) -> list[int]:
        """Ids that end assistant turns: of answers, and of calls."""
        ends = [] if self._renderer.marks_generation else self._turns.ends
        ids = (self.end_of_turn, *map(self._tokens.__getitem__, ends))
        return [*dict.fromkeys(end for end in ids if end is not None)]

    def render(self, messages: Iterable[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of the messages; raise DocumentError if the template refuses them."""
        return self._renderer.render(messages, add_generation_prompt)

    def prompt(self, messages: Iterable[Message]) -> list[int]:
        """Return the ids after which the assistant writes its next turn."""
        return self.ids(self.asked(messages))

    def asked(self, messages: Iterable[Message]) -> str:
        """Return the text after which the assistant writes its next turn."""
        messages = as_conversation(messages)
        self._require_no_special(messages)
        return self.render(messages, add_generation_prompt=True)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text that the template has written."""
        return self._encoded((text, []))[0].tolist()

    def encode(self, messages: Sequence[Message], train_on: TrainOn = "assistant") -> Encoded:
        """Return the ids, int32, and whether each is trained on, bool.

        `assistant` trains on what the assistant writes, with the token that ends its turn, `last`
        on the last of its turns, `all` on everything; turns with a weight of 0 are left out. A
        token is trained on if any of its characters is; the first never, as nothing predicts it.
        Raise DocumentError for content that contains the name of a special token: it could forge a
        turn.
        """
        return self._encoded(self.write(messages, train_on))

    def _encoded(self, written: Written) -> Encoded:
        (encoded,) = self.encode_written([written])
        if isinstance(encoded, DocumentError):
            raise encoded
        return encoded

    def write(self, messages: Sequence[Message], train_on: TrainOn = "assistant") -> Written:
        """Return the text of a conversation, and where it is trained on; see `encode`."""
        if train_on not in get_args(TrainOn):
            raise ValueError(f"train_on is {train_on!r}, not one of {get_args(TrainOn)}")
        conversation = as_conversation(messages)
        self._require_no_special(conversation)
        turns = [at for at, one in enumerate(conversation) if one.role == ASSISTANT]
        is_trained = [at for at in turns if conversation[at].is_trained]
        if train_on == "all":  # but the answers with a weight of 0
            sought = [at for at in turns if at not in is_trained]
        else:
            last = turns[-1:] if train_on == "last" else turns
            sought = [at for at in last if at in is_trained]
            if turns and not sought:
                raise DocumentError("its last answer has a weight of 0", "remove the conversation")
        text, spans = self._text_and_spans(conversation, turns, sought)
        if train_on == "all":
            spans = spans if sought else []
            edges = [0, *(edge for span in sorted(spans) for edge in span), len(text)]
            spans = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
        elif all(begin == end for begin, end in spans):
            raise self._nothing_to_train_on(conversation, text)
        self._require_written(conversation, text)
        return text, spans

    def _text_and_spans(
        self, conversation: Conversation, turns: Sequence[int], sought: Sequence[int]
    ) -> Written:
        """The text, and where those of the assistant's turns are that are sought.

        By `{% generation %}` if there is any, else by the prompts for them.
        """
        if not self._renderer.marks_generation:
            return self._turns.text_and_spans(conversation, sought)
        ((text, marked),) = self._renderer.beginnings(conversation, [(len(conversation), False)])
        if not sought and turns:
            return text, []
        if sought == turns:
            return text, marked
        if len(marked) == len(turns):
            return text, [span for at, span in zip(turns, marked, strict=True) if at in sought]
        if sought == turns[-1:]:
            before = [(turns[-1], False)] if turns[-1] else []
            earlier = [
                span
                for _, spans in self._renderer.beginnings(conversation, before)
                for span in spans
            ]
            return text, marked[len(earlier) :]
        raise DocumentError(
            f"has turns with a weight of 0, and {self.name} marks {len(marked)} spans for"
            f" {len(turns)} answers",
            "remove the weights, or put one {% generation %} around each answer",
        )

    def encode_written(
        self, texts: Sequence[Written], threads: int = 1, loss: TextLoss | None = None
    ) -> list[Encoded | DocumentError]:
        """Encode what `write` returns, up to twice as fast; return the error of a bad one.

        The text between special tokens is added to `loss`.
        """
        tokenizer = self._tokenizer
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return [self._as_a_whole(tokenizer, text, spans, loss) for text, spans in texts]
        split = [self._special_name.split(text) for text, _ in texts]  # every second is special
        parts = [part for pieces in split for part in pieces[::2] if part]
        part_ids = self._tokenizer.encode_arrays(parts, threads)
        if loss is not None:
            loss.count(self._tokenizer, self._sizes, parts, part_ids)
        arrays = iter(part_ids)
        encoded: list[Encoded | DocumentError] = []
        for pieces, (_, spans) in zip(split, texts, strict=True):
            ids, targets = [np.empty(0, np.int32)], [np.empty(0, bool)]
            for number, (piece, within) in enumerate(spans_by_piece(pieces, spans)):
                if piece:
                    ids.append(self._special_ids[piece] if number % 2 else next(arrays))
                    targets.append(self._targets(piece, ids[-1], within))
            marks = np.concatenate(targets)
            marks[:1] = False  # nothing predicts the first token
            encoded.append((np.concatenate(ids), marks))
        return encoded

    def _targets(self, piece: str, ids: np.ndarray, spans: list[Span]) -> np.ndarray:
        """Whether each token of a piece has a character within the spans."""
        if not spans:
            return np.zeros(len(ids), bool)
        if spans == [(0, len(piece))]:
            return np.ones(len(ids), bool)
        sizes = self._sizes[ids]
        ends = sizes.cumsum()
        is_lossless = ends[-1] == len(piece.encode())
        targets = np.zeros(len(ids), bool)
        for begin, end in spans:
            first, last = (self._bytes(piece[:at], is_lossless) for at in (begin, end))
            targets |= (ends > first) & (ends - sizes < last)
        return targets

    def _bytes(self, text: str, is_lossless: bool) -> int:
        """Bytes of the tokens of a text; the tokenizer may normalize it to another size."""
        if is_lossless:
            return len(text.encode())
        return int(self._sizes[self._tokenizer.encode(text)].sum())

    def _as_a_whole(
        self,
        tokenizer: HuggingFaceTokenizer,
        text: str,
        spans: Sequence[Span],
        loss: TextLoss | None,
    ) -> Encoded | DocumentError:
        """A text as AutoTokenizer of transformers encodes it, with the targets of its spans.

        An error if a special token is matched that nobody has written: text may become one when it
        is normalized.
        """
        ids, places = tokenizer.encode_written(text)
        is_special = np.isin(ids, [*tokenizer.matched])
        matched = [tokenizer.matched[i] for i in ids[is_special].tolist()]
        names = [token.content for token in matched]
        pieces = self._matched_name.split(text)
        if pieces[1::2] != names:
            pairs = zip_longest(pieces[1::2], names)
            odd = next(written or found for written, found in pairs if written != found)
            return DocumentError(
                f"{self.name} writes text in which {tokenizer.path} finds special tokens that the"
                f" template did not write, such as {odd!r}",
                "change it, or give another tokenizer",
            )
        if loss is not None:
            edges = np.flatnonzero(is_special)
            parts = np.split(ids, edges)
            own = [part[1:] if number else part for number, part in enumerate(parts)]
            loss.count(tokenizer, self._sizes, _stripped(pieces[::2], matched), own)
        targets = np.zeros(len(ids), bool)
        for begin, end in spans:
            targets |= (places[:, 1] > begin) & (places[:, 0] < end)
        targets[:1] = False  # nothing predicts the first token
        return ids, targets

    def require_no_special(self, text: str) -> None:
        """Raise DocumentError for a text with the name of a token that a template writes."""
        if match := self._token_name.search(text):
            kind = "special token" if match[0] in self._special else "token"
            raise DocumentError(
                f'contains "{match[0]}", a {kind} of the tokenizer, which could forge a turn',
                "write it in another way, or remove the conversation",
            )

    def _require_no_special(self, conversation: Conversation) -> None:
        for number, message in enumerate(conversation, 1):
            try:
                text = f"{message.content}\n{message.name}"
                if message.more:
                    text = "\n".join((text, *texts_in(message.more)))
                if message.role == ASSISTANT:  # tags of thoughts and calls may be tokens
                    text = OWN_TAG.sub("", text)
                self.require_no_special(text)
            except DocumentError as error:
                raise DocumentError(f"turn {number}: {error.reason}", error.remedy) from None
        if conversation.tools or conversation.variables:
            beside = [conversation.tools, dict(conversation.variables)]
            self.require_no_special("\n".join(texts_in(beside)))

    def _require_written(self, conversation: Conversation, text: str) -> None:
        """Raise DocumentError for what the template leaves out: names, thoughts, calls, tools."""
        for at, message in enumerate(conversation):
            self._require_content_written(message, text, at)
            for key in filter(message.more.get, THOUGHTS):
                if key not in self.keys_of_thoughts:
                    raise self._left_out(f'turn {at + 1}: has "{key}"', "write it into the content")
        for name, value in conversation.variables.items():
            if any(texts_in(value)) and not reads(self.source, name):
                what = f'has "{name}" beside the turns'
                raise self._left_out(what, "write it into a turn", "FILE")
        for refusal, less in self._lessened(conversation):
            try:
                without = self.render(less)
            except Unbounded:
                raise
            except (DocumentError, UsageError):  # a template may want one call, or content
                continue
            if without == text:
                raise refusal

    def _lessened(self, conversation: Conversation) -> Iterator[tuple[DocumentError, Conversation]]:
        """Yield what a template may leave out, as the error if it does, and the rest."""

        def changed(at: int, **changes: Any) -> Conversation:
            turn = replace(conversation[at], **changes)
            return conversation.with_turns([*conversation[:at], turn, *conversation[at + 1 :]])

        for at, message in enumerate(conversation):
            if message.name and message.role != TOOL:
                what = f'turn {at + 1}: has "name"'
                refusal = self._left_out(what, "write it into the content", "FILE")
                yield refusal, changed(at, name="")
            calls = message.more.get(CALLS, [])
            for number in range(len(calls)):
                what = f'turn {at + 1}: has "{CALLS}"'
                refusal = self._left_out(what, "write them into the content")
                others = [*calls[:number], *calls[number + 1 :]]
                yield refusal, changed(at, more={**message.more, CALLS: others})
        if conversation.tools:
            turns = [
                replace(one, more={key: value for key, value in one.more.items() if key != TOOLS})
                for one in conversation
            ]
            refusal = self._left_out('has "tools"', "write them into the system message")
            yield refusal, Conversation(turns, None, conversation.variables)

    def _require_content_written(self, message: Message, text: str, at: int) -> None:
        """Raise DocumentError for content, or a thought in it, that the template leaves out."""
        said = message.content.strip()
        if message.role == ASSISTANT and said.startswith("<think>") and "</think>" in said:
            if "" not in self.keys_of_thoughts:
                raise self._left_out(f"turn {at + 1}: has <think>", "remove it")
            said = said.partition("</think>")[2].strip()  # earlier thoughts may be dropped
        if said not in text and not any(one in text for one in forms_of(said)):
            raise self._left_out(f"turn {at + 1}: has content", "remove it")

    def writes_tools(self, tools: list[Any]) -> bool:
        """Whether tools change what the template writes."""
        return self.render(Conversation(PROBE[:1], tools)) != self.render(PROBE[:1])

    def _left_out(self, what: str, remedy: str, example: str = DEFAULT_NAME) -> DocumentError:
        """The error of what the template leaves out; `example` is a template that writes it."""
        return DocumentError(
            f"{what}, which {self.name} leaves out",
            f"{remedy}, or give a template that includes it (--chat_template {example})",
        )

    @cached_property
    def keys_of_thoughts(self) -> set[str]:
        """Keys whose thoughts the template writes in a last answer; it may drop earlier ones.

        The empty key stands for a thought in the content.
        """
        question, answer = PROBE
        answers = {key: replace(answer, more={key: " x y "}) for key in THOUGHTS}
        found = set()
        for key, thinks in {**answers, "": ANSWER_WITH_THOUGHT}.items():
            with suppress(DocumentError):  # the template refuses it
                found |= {key} if "x y" in self.render([question, thinks]) else set()
        return found

    def _nothing_to_train_on(self, messages: Sequence[Message], text: str) -> Exception:
        if all(message.role != ASSISTANT for message in messages):
            return DocumentError("has no assistant turn", "add the answer, or remove it")
        if all(message.content.strip() not in text for message in messages):
            return UsageError(
                f"{self.name} leaves out the content of messages; give a Jinja template that writes"
                " the content of each message"
            )
        return UsageError(
            f"{self.name} marks no text of the assistant; put {{% generation %}} and"
            " {% endgeneration %} around what the assistant writes"
        )

    def _require_fit(self, texts: Iterable[str]) -> None:
        """Raise UsageError for a template that fails on a short chat or lacks a special token.

        `texts` are what it writes of short chats.
        """
        tokenizer = self._tokenizer
        if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.drops_unknown:
            raise UsageError(
                f"{tokenizer.path}: drops characters that it has no piece for, so that which tokens"
                " an answer has is not known; give a tokenizer with byte pieces"
            )
        for text in texts:
            self._require_special(text)
            try:
                self.ids(text)
            except DocumentError as error:
                raise UsageError(f"{error.reason}; give another tokenizer") from error
        self._require_answer()
        try:
            _ = self.end_of_turn
        except DocumentError as error:
            raise UsageError(
                f"{error.reason.partition(': ')[2]}; put {{% generation %}} and"
                " {% endgeneration %} around what the assistant writes"
            ) from error

    def _require_answer(self) -> None:
        """Raise UsageError unless an answer begins where the generation prompt ends."""
        answer = PROBE[1]
        try:
            asked = [(2, False), (1, True), (1, False)]
            (text, _), (prompt, _), (bare, _) = self._renderer.beginnings(PROBE, asked)
        except DocumentError as error:
            raise UsageError(f"{error}, a question and its answer; give another") from error
        before = text.partition(answer.content.strip())[0]
        header = before.removeprefix(bare).strip()
        if prompt == bare and before.startswith(bare) and header:
            raise UsageError(
                f"{self.name} writes {shorten_line(header)!r} before an answer, but not with"
                " add_generation_prompt; end it with {% if add_generation_prompt %}, this text,"
                " and {% endif %}"
            )

    def _tokens_in_text(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of the tags in texts that are tokens but not special, as user-defined ones."""
        found = {}
        for tag in TAG_LOOK.findall("\n".join(texts)):
            if is_matched(tag, self._tokenizer) and not TURN_TAG.fullmatch(tag):
                found[tag] = self._tokenizer.piece_id(tag)
        return found

    def _require_special(self, text: str) -> None:
        if is_own(self.source, self._tokenizer):
            return
        missing = [name for name in SPECIAL_LOOK.findall(text) if name not in self._tokens]
        if missing:
            raise UsageError(
                f"{self.name} writes {missing[0]}, which is not a special token of the tokenizer"
                f" {self._tokenizer.path}; give a tokenizer that has it (train one with"
                " --special_tokens), give another template, or, if the model was trained with it"
                f" as text, put the template beside that file ({TEMPLATE_NAME})"
            )


# Tags around thoughts and calls, which a tokenizer may have as tokens. They begin no turn.
OWN_TAG = re.compile(r"</?(think|tool_call)>")


OPEN, CLOSE = "[[", "]]"


def readable(tokenizer: Tokenizer, ids: np.ndarray, targets: np.ndarray) -> str:
    """Return the text of some token ids; `targets` are the ones that are trained on."""
    names = {i: name for name, i in tokenizer.special_tokens().items()}
    special = np.isin(ids, [*names])
    changes = np.flatnonzero((targets[1:] != targets[:-1]) | special[1:] | special[:-1]) + 1
    text, was_target = "", False
    for part, marks in zip(np.split(ids, changes), np.split(targets, changes), strict=True):
        is_target = bool(marks.any())
        if is_target != was_target:
            text += OPEN if is_target else CLOSE
        text += names.get(int(part[0])) or tokenizer.decode(part.tolist()) if len(part) else ""
        was_target = is_target
    return text + (CLOSE if was_target else "")
