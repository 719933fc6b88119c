"""Render a chat template, with the spans of the assistant's turns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from functools import cache, cached_property
from itertools import takewhile

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from minimind.data.chat import sandbox
from minimind.data.chat.sandbox import Sandbox, Span, TooLarge, TooLong
from minimind.data.chat.turns import ASSISTANT, SYSTEM, TOOL, USER, Message, turn_of
from minimind.data.text.documents import DocumentError
from minimind.errors import UsageError
from minimind.runtime.limited import tried_within

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"  # the name by which a template asks for the date
DATE = "2024-07-26"  # of runs that give none
SHOWN_CHARACTERS = 200  # of a template's own message
# Of the processor, and of memory, for all chats of `require_bounded`; templates take hundredths.
MAX_SECONDS, MAX_BYTES = 2.0, 2**29
PROBE = (Message(USER, " a b "), Message(ASSISTANT, " c d "))
PROBES = (PROBE, (Message(SYSTEM, " e f "), *PROBE), (*PROBE, Message(TOOL, " g h "), *PROBE[1:]))
LONG_PROBE = tuple(Message(one.role, one.content * 100) for one in PROBE * 16)


@cache
def require_bounded(source: str, name: str) -> None:
    """Raise UsageError for a template that takes too much time or memory for short chats.

    It may be a stranger's, and what it does cannot be stopped within a process: an operator of
    Python ends when it ends, and signals wait for it. So it is rendered in another one first.
    """
    request = {
        "source": source,
        "tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "chats": [list(map(turn_of, chat)) for chat in (*PROBES, LONG_PROBE)],
    }
    too_large = tried_within(sandbox.__file__, request, MAX_SECONDS, MAX_BYTES)
    if too_large:
        raise UsageError(f"{name} cannot be rendered ({too_large}); correct it, or give another")
    if too_large is None:
        raise UsageError(
            f"{name} takes more than {MAX_SECONDS:g} s or {MAX_BYTES / 2**20:,.0f} MiB for short"
            " conversations; give another template"
        )


def date_of(source: str, given: str | None) -> str | None:
    """The date that a template is told in a run, which is part of its tokens; None if it asks for
    none.
    """
    return date.fromisoformat(given or DATE).isoformat() if CLOCK in source else None


class Renderer:
    """A template's source and the names of tokens that it may use, such as `bos_token`.

    `name` is what error messages call the template, `today` the date that it is told.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], name: str, today: date | None = None
    ) -> None:
        self.source = source
        self.name = name
        self._today = datetime.combine(today or date.today(), time())
        self.marks_generation = GENERATION.search(source) is not None
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of the messages; raise DocumentError if the template refuses them."""
        return self._render(messages, add_generation_prompt)[0]

    def require_texts(self, messages: Sequence[Message], rendered: str) -> None:
        """Raise UsageError if what is said is not in `rendered`, and would be if given in parts."""

        def is_in(text: str) -> bool:
            return all(message.content.strip() in text for message in messages)

        parts = [[{"type": "text", "text": message.content}] for message in messages]
        chat = [{"role": m.role, "content": p} for m, p in zip(messages, parts, strict=True)]
        if is_in(rendered):
            return
        try:
            text = self._sandbox.render(chat, False, self._tokens)[0]
        except Exception:  # of a template that knows no parts
            return
        if is_in(text):
            raise UsageError(
                f"{self.name} is written for content in parts, as of images and text, and leaves"
                " out content that is a text; give one for texts (--chat_template)"
            )

    def with_spans(
        self, messages: Sequence[Message], last_only: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text and the spans of all assistant turns, or of the last one, in order.

        Spans are those of `{% generation %}`. For a template without it, a turn is the text after
        the generation prompt; raise UsageError if the messages before do not render to its prefix.
        """
        turns = [at for at, message in enumerate(messages) if message.role == ASSISTANT]
        wanted = turns[-1:] if last_only else turns
        if not self.marks_generation:
            text = self.render(messages)
            return text, [self._span_after_prompt(text, messages, at) for at in wanted]
        text, spans = self._render(messages)
        if not last_only:
            return text, spans
        if len(spans) == len(turns):
            return text, spans[-1:]
        before = self._render(messages[: turns[-1]])[1] if turns[-1:] > [0] else []
        return text, spans[len(before) :]

    def _span_after_prompt(self, text: str, messages: Sequence[Message], at: int) -> Span:
        before = self.render(messages[:at], add_generation_prompt=True)
        after = text if at + 1 == len(messages) else self.render(messages[: at + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise UsageError(
                f"{self.name} has no {{% generation %}}, and the text of the messages up to turn"
                f" {at + 1} is not the beginning of the whole; put {{% generation %}} and"
                " {% endgeneration %} around what the assistant writes"
            )
        return len(before), len(after)

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.source, self._today)

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            return self._sandbox.render(
                list(map(turn_of, messages)), add_generation_prompt, self._tokens
            )
        except TemplateSyntaxError as error:
            what = f"{self.name} is not a Jinja template ({_shown(error)}, line {error.lineno})"
            raise UsageError(f"{what}; correct it, or leave it out") from error
        except Exception as error:  # a template is a program, which may raise anything
            if type(error) is TemplateError:  # that of raise_exception; others are subclasses
                what = f"{self.name} refuses the conversation ({_shown(error)})"
                raise DocumentError(what, "change it, or give another template") from error
            if not isinstance(error, TooLarge | TooLong):
                self.require_texts(messages, "")
            what = f"{self.name} cannot be rendered ({type(error).__name__}: {_shown(error)})"
            raise UsageError(f"{what}; correct it, or give another") from error


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


def _shown(error: Exception) -> str:
    return " ".join(str(error).split())[:SHOWN_CHARACTERS]
