"""The sandbox of chat templates: Jinja as transformers sets it up, without a clock and chance.

transformers renders by the clock of the host and without limits. Here the date is given, what is
written is bounded, and names that are random are missing: the tokens of a run depend on neither.
`main` renders chats under limits of time and memory (`minimind.runtime.limited`), for which the
module imports nothing but Jinja.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import product
from threading import Lock
from typing import Any, NoReturn

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Span = tuple[int, int]  # characters of the rendered text, from and up to

LONGEST = 2**24  # characters that a chat may get beside what is said in it
PER_CHARACTER = 16  # and for each character that is said


class TooLong(Exception):
    """A template writes without bounds."""


class Sandbox:
    """A compiled template; raises what Jinja raises for a wrong one."""

    def __init__(self, source: str, date: datetime) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        del environment.filters["random"], environment.globals["lipsum"]
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": date.strftime,
            "dict": _Dictionary(),
            "namespace": _Namespace,
        }
        self._template = environment.from_string(source)
        self._lock = Lock()
        self._marks: _Marks = environment.extensions[_Generation.identifier].marks  # pyright: ignore[reportAttributeAccessIssue] (of our own extension)

    def render(
        self,
        chat: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tokens: Mapping[str, str],
    ) -> tuple[str, list[Span]]:
        """The text of a chat and the spans of `{% generation %}`; TooLong if it has no end."""
        most = LONGEST + PER_CHARACTER * sum(len(turn["content"]) for turn in chat)
        values = {
            "messages": [dict(turn) for turn in chat],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **tokens,
        }
        blocks: list[str] = []
        with self._lock:  # what is written so far is of one chat
            self._marks.written, self._marks.spans = 0, []
            for block in self._template.generate(values):
                blocks.append(block)
                self._marks.written += len(block)
                if self._marks.written > most:
                    raise TooLong(f"it writes more than {most:,} characters for one conversation")
            return "".join(blocks), self._marks.spans


class _Marks:
    """Characters written so far, and spans of `{% generation %}` within them."""

    written = 0
    spans: list[Span]


class _Generation(Extension):
    """`{% generation %}`, around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.marks = _Marks()

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text = caller()
        begin = self.marks.written
        self.marks.spans.append((begin, begin + len(text)))
        return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter writes."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _Dictionary:
    """`dict`, without the attributes of a class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without the names by which Python's internals are reached."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may name a value `self`
        values = dict(*args[1:], **values)
        _require_public(values)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public((name,))
        super().__setitem__(name, value)


def _require_public(names: Iterable[Any]) -> None:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no {name}: names do not begin with _")


def main(request: Mapping[str, Any]) -> None:
    """Render the chats of a request, whatever the template raises: it is raised again, and
    reported, where it is rendered without limits.
    """
    try:
        sandbox = Sandbox(request["source"], datetime.min)
        for chat, is_asked in product(request["chats"], (False, True)):
            with suppress(TemplateError):  # the template may refuse a chat
                sandbox.render(chat, is_asked, request["tokens"])
    except MemoryError:
        raise
    except Exception:
        return
