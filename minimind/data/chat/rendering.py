"""Render a Jinja chat template as transformers does, with the spans of the assistant's turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from threading import Lock

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from minimind.data.chat.turns import ASSISTANT, Message, turn_of
from minimind.data.text.documents import DocumentError
from minimind.errors import UsageError

Span = tuple[int, int]  # characters of the rendered text, from and up to

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN_CHARACTERS = 200  # of a template's own message
# Raised by expressions of a template, as in Python.
EXPRESSION_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
_RENDER: Callable[..., tuple[list[str], list[list[Span]]]] = render_jinja_template  # pyright: ignore[reportAssignmentType] (it returns lists)
_LOCK = Lock()  # transformers compiles a source once, and tracks one rendering of it at a time


class Renderer:
    """A template's source and the names of tokens that it may use, such as `bos_token`.

    `name` is what error messages call the template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], name: str) -> None:
        self.source = source
        self.name = name
        self.marks_generation = GENERATION.search(source) is not None
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of the messages; raise DocumentError if the template refuses them."""
        return self._render(messages, add_generation_prompt, track=False)[0]

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
        text, spans = self._render(messages, False, track=True)
        if not last_only:
            return text, spans
        if len(spans) == len(turns):
            return text, spans[-1:]
        before = (
            self._render(messages[: turns[-1]], False, track=True)[1] if turns[-1:] > [0] else []
        )
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

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, track: bool
    ) -> tuple[str, list[Span]]:
        chat = [turn_of(message) for message in messages]
        options = {
            "return_assistant_tokens_mask": track,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        try:
            with _LOCK:
                texts, spans = _RENDER([chat], chat_template=self.source, **options)
        except TemplateSyntaxError as error:
            what = f"{self.name} is not a Jinja template ({_shown(error)}, line {error.lineno})"
            raise UsageError(f"{what}; correct it, or leave it out") from error
        except (TemplateError, *EXPRESSION_ERRORS) as error:
            if type(error) is TemplateError:  # that of raise_exception; others are subclasses
                what = f"{self.name} refuses the conversation ({_shown(error)})"
                raise DocumentError(what, "change it, or give another template") from error
            what = f"{self.name} cannot be rendered ({type(error).__name__}: {_shown(error)})"
            raise UsageError(f"{what}; correct it, or give another") from error
        return texts[0], spans[0] if track else []


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
