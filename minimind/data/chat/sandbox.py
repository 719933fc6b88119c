"""The sandbox of chat templates: Jinja as transformers sets it up, without a clock and chance.

The date is given, and names that are random are missing: the tokens of a run depend on neither. A
template may be a stranger's, and what an operator of Python computes cannot be stopped within a
process. So `BoundedSandbox` renders in a process with limits of time and memory, which runs `load`
(`minimind.runtime.limited`). The module imports little but Jinja, so that this process starts soon.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from functools import cached_property, lru_cache
from itertools import accumulate
from threading import Lock
from typing import Any, NoReturn

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from minimind.runtime import limited

Span = tuple[int, int]  # characters of the rendered text, from and up to
Asked = tuple[int, bool]  # how many turns, and whether an answer is asked for after them
Rendered = tuple[str, list[Span]]

LONGEST = 2**24  # characters that a chat may get in addition to what is said in it
PER_CHARACTER = 16  # added for each character that is said
# CPU time and memory of a conversation, and of compiling a template.
MAX_SECONDS, MAX_BYTES = 2.0, 2**29
AT_ONCE = 2**20  # characters that are said in all beginnings of a request
PROCESSES = 4  # that are kept for templates which nothing holds


class Refused(Exception):
    """The template refuses the conversation, by `raise_exception`."""


class Invalid(Exception):
    """It is no Jinja template."""


class Failed(Exception):
    """It cannot be rendered: the name of an error, and its words."""


class Exceeded(Exception):
    """It takes too much time or memory."""


class _Environment(ImmutableSandboxedEnvironment):
    # Jinja computes constants when it compiles, but for these: a template that computes for ever in
    # some conversations can be used for the others.
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)


class Sandbox:
    """A template, rendered in this process.

    `today` is its date, by default that of each rendering: a server may run for days.
    """

    def __init__(self, source: str, today: date | None = None) -> None:
        self._source, self._today, self._lock = source, today, Lock()

    @cached_property
    def _environment(self) -> Environment:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        del environment.filters["random"], environment.globals["lipsum"]
        environment.filters["tojson"] = _to_json

        def told(form: str) -> str:
            return datetime.combine(self._today or date.today(), time()).strftime(form)

        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": told,
            "dict": _Dictionary(),
            "namespace": _Namespace,
        }
        return environment

    @cached_property
    def _template(self) -> Any:
        return self._environment.from_string(self._source)

    def render(
        self,
        chat: Sequence[Mapping[str, Any]],
        asked: Sequence[Asked],
        values: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
    ) -> Iterator[Rendered]:
        """Yield the texts of beginnings of a chat, each with its spans of `{% generation %}`.

        `values` are the tokens and variables that the template has by name. Raise Refused, Invalid
        or Failed.
        """
        for turns, is_asked in asked:
            yield self._render(chat[:turns], is_asked, values, tools)

    def _render(
        self,
        chat: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        values: Mapping[str, Any],
        tools: Sequence[Any] | None,
    ) -> Rendered:
        most = LONGEST + PER_CHARACTER * sum(map(_said, (*chat, *(tools or ()))))
        values = {
            "messages": [dict(turn) for turn in chat],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **values,
        }
        blocks: list[str] = []
        try:
            with self._lock:  # what is written so far is of one chat
                extension = self._environment.extensions[_Generation.identifier]
                marks: _Marks = extension.marks  # pyright: ignore[reportAttributeAccessIssue] (of our own extension)
                marks.written, marks.spans = 0, []
                for block in self._template.generate(values):
                    blocks.append(block)
                    marks.written += len(block)
                    if marks.written > most:
                        raise Failed(
                            f"TooLong: it writes more than {most:,} characters for one conversation"
                        )
                return "".join(blocks), marks.spans
        except TemplateSyntaxError as error:
            raise Invalid(f"{_words(error)}, line {error.lineno}") from error
        except (Failed, MemoryError):
            raise
        except Exception as error:  # a template is a program, which may raise anything
            if type(error) is TemplateError:  # of `raise_exception`; others are subclasses
                raise Refused(_words(error)) from error
            raise Failed(f"{type(error).__name__}: {_words(error)}") from error


SHOWN_CHARACTERS = 200  # characters of a template's own message


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:SHOWN_CHARACTERS]


def _said(value: Any) -> int:
    """Characters of the texts in a decoded JSON value."""
    if isinstance(value, Mapping):
        return sum(map(_said, value.values()))
    if isinstance(value, list):
        return sum(map(_said, value))
    return len(value) if isinstance(value, str) else 1


def _common_length(text: str, other: str) -> int:
    """Characters that two texts have in common at their start."""
    least, most = 0, min(len(text), len(other))
    while least < most:
        length = (least + most + 1) // 2
        least, most = (length, most) if other.startswith(text[:length]) else (least, length - 1)
    return least


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _decoded(content: bytes) -> Any:
    return json.loads(content.decode(errors="surrogatepass"))


ERRORS = {error.__name__: error for error in (Refused, Invalid, Failed)}


def load(given: Mapping[str, Any]) -> tuple[None, Callable[[bytes], bytes]]:
    """Return what answers requests of `BoundedSandbox` in a limited process."""
    today = date.fromisoformat(given["today"]) if given["today"] else None
    sandbox = Sandbox(given["source"], today)

    def answer(request: bytes) -> bytes:
        try:
            rendered = [*sandbox.render(*_decoded(request))]
        except tuple(ERRORS.values()) as error:
            return _encoded({"error": [type(error).__name__, str(error)]})
        whole = rendered[0][0]
        parts = []
        for text, spans in rendered:
            common = _common_length(text, whole)
            parts.append([common, text[common:], spans])
        return _encoded({"whole": whole, "rendered": parts})

    return None, answer


@contextmanager
def _saying_limits() -> Iterator[None]:
    try:
        yield
    except limited.Exceeded:
        size = f"{MAX_BYTES / 2**20:,.0f} MiB"
        raise Exceeded(
            f"takes more than {MAX_SECONDS:g} s or {size} for one conversation"
        ) from None


class _Process:
    """A limited process that renders one template."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.pid = os.getpid()
        with _saying_limits():
            self._server = limited.LimitedServer(__file__, given, MAX_SECONDS, MAX_BYTES)
        self._worker = self._server.worker()

    def ask(self, request: bytes) -> bytes:
        """The answer to a request; raise Exceeded where it takes too much time or memory."""
        try:
            with _saying_limits():
                try:
                    return self._worker.ask(request, MAX_SECONDS, MAX_BYTES)
                except OSError:  # something has killed it, or a second Ctrl-C has closed it, before
                    self._worker.close()
                    self._worker = self._server.worker()
                return self._worker.ask(request, MAX_SECONDS, MAX_BYTES)
        finally:
            if self._worker.is_spent:
                self._worker.close()
                self._worker = self._server.worker()

    def close(self) -> None:
        """End the process, if this is the process that has started it, and not a fork."""
        if self.pid == os.getpid():
            self._worker.close()
            self._server.close()


class BoundedSandbox:
    """A template, rendered in a process with limits, with the interface of `Sandbox`."""

    def __init__(self, source: str, today: date | None = None) -> None:
        self._given = {"source": source, "today": today and today.isoformat()}
        self._lock = Lock()
        self._process: _Process | None = None

    def render(
        self,
        chat: Sequence[Mapping[str, Any]],
        asked: Sequence[Asked],
        values: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
    ) -> Iterator[Rendered]:
        """See `Sandbox.render`; raise Exceeded where it takes too much time or memory."""
        sizes = [0, *accumulate(map(_said, chat))]
        group: list[Asked] = []
        for one in asked:
            if group and sizes[one[0]] + sum(sizes[turns] for turns, _ in group) > AT_ONCE:
                yield from self._rendered(chat, group, values, tools)
                group = []
            group.append(one)
        if group:
            yield from self._rendered(chat, group, values, tools)

    def _rendered(
        self,
        chat: Sequence[Mapping[str, Any]],
        asked: Sequence[Asked],
        values: Mapping[str, Any],
        tools: Sequence[Any] | None,
    ) -> Iterator[Rendered]:
        request = _encoded([chat[: max(turns for turns, _ in asked)], asked, values, tools])
        with self._lock:
            if self._process is None or self._process.pid != os.getpid():
                self._process = _Process(self._given)
                weakref.finalize(self, self._process.close)
            answer = _decoded(self._process.ask(request))
        if error := answer.get("error"):
            name, words = error
            raise ERRORS[name](words)
        whole = answer["whole"]
        for common, rest, spans in answer["rendered"]:
            yield whole[:common] + rest, [(begin, end) for begin, end in spans]


@lru_cache(PROCESSES)
def bounded(source: str, today: date | None) -> BoundedSandbox:
    """The process of a template; those that were used least recently end."""
    return BoundedSandbox(source, today)


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


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


class _Dictionary:
    """`dict`, without the attributes of a class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without the names that reach Python's internals."""

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
