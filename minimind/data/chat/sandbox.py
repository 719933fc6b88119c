"""The sandbox of chat templates: Jinja as transformers sets it up, without a clock and chance.

transformers renders by the clock of the host and without limits. Here the date is given, what is
written is bounded, and names that are random are missing: the tokens of a run depend on neither.
Loops answer signals, but an operator or a method of Python ends when it ends. So the size of what
it gives is bounded before it is computed (`_Bounded`). What it is given may be large by itself: a
list of itself twice, sixty times over, takes no memory, and years to write, compare or hash.
`main` renders chats under limits of time and memory (`minimind.runtime.limited`), for which the
module imports nothing but Jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import date, datetime, time
from functools import wraps
from itertools import chain, product
from threading import Lock
from typing import Any, NoReturn

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace
from markupsafe import Markup

Span = tuple[int, int]  # characters of the rendered text, from and up to

LONGEST = 2**24  # characters that a chat may get in addition to what is said in it
PER_CHARACTER = 16  # added for each character that is said
REPEATED = 4  # times as many may be computed by numbers and by repeating, in all
MOST_BITS = 4096  # bits of an integer
LONGEST_NUMBER = 18  # digits of a width
FLOAT = 24  # characters of most that have no length
# A number as %, and as format, writes it: its width, and its precision.
OLD_FORMAT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
DIGITS = re.compile(r"\d+")
CONTAINER = 64  # counted for each list, tuple, set and dictionary, which takes as many bytes
VIEWS = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))
CONTAINERS = (list, tuple, set, frozenset, *VIEWS)
ATOMS = {str, int, bool, float, type(None)}  # they are small by themselves
# Filters, and tests, that neither write, compare nor hash what is in the value: others do.
SHALLOW = (
    "abs attr batch count d default filesizeformat first float int items last length list map"
    " reject rejectattr reverse round select selectattr slice"
).split()
SHALLOW_TESTS = (
    "boolean callable defined escaped false float integer iterable mapping none number sameas"
    " sequence string true undefined"
).split()


class TooLong(Exception):
    """A template writes without bounds."""


class TooLarge(Exception):
    """A template computes what has no bounds."""


class Sandbox:
    """A compiled template; raises what Jinja raises for a wrong one.

    `today` is its date, by default that of each rendering: a server may run for days.
    """

    def __init__(self, source: str, today: date | None = None) -> None:
        environment = _Bounded(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        del environment.filters["random"], environment.globals["lipsum"]
        environment.filters["tojson"] = _to_json
        environment.bound_filters_and_tests()

        def day() -> date:
            return date.today() if today is None else today

        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.combine(day(), time()).strftime(form),
            "dict": _Dictionary(),
            "namespace": _Namespace,
        }
        self._environment = environment
        self._template = environment.from_string(source)
        self._lock = Lock()
        self._marks: _Marks = environment.extensions[_Generation.identifier].marks  # pyright: ignore[reportAttributeAccessIssue] (of our own extension)

    def render(
        self,
        chat: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        values: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """The text of a chat and the spans of `{% generation %}`; TooLong if it has no end.

        `values` are the tokens and variables that the template has by name.
        """
        most = LONGEST + PER_CHARACTER * sum(map(_said, (*chat, *(tools or ()))))
        values = {
            "messages": [dict(turn) for turn in chat],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **values,
        }
        blocks: list[str] = []
        with self._lock:  # what is written so far is of one chat
            self._marks.written, self._marks.spans = 0, []
            self._environment.start(most)
            for block in self._template.generate(values):
                blocks.append(block)
                self._marks.written += len(block)
                if self._marks.written > most:
                    raise TooLong(f"it writes more than {most:,} characters for one conversation")
            return "".join(blocks), self._marks.spans


def _said(value: Any) -> int:
    """Characters of the texts in a decoded JSON value."""
    if isinstance(value, Mapping):
        return sum(map(_said, value.values()))
    if isinstance(value, list):
        return sum(map(_said, value))
    return len(value) if isinstance(value, str) else 1


class _Code(CodeGenerator):
    """Code in which `~`, comparisons, and keys of dictionaries are those of `_Bounded`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("(markup_join if context.eval_ctx.autoescape else str_join)(")
        self.write("environment.finalize((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        compared = [node.expr, *(one.expr for one in node.ops)]
        self.write("(")
        for one, other, by in zip(compared, compared[1:], node.ops, strict=False):
            # Two values are compared as far as the smaller one goes.
            write = self.visit if isinstance(other, nodes.Const) else self._visit_whole
            write(one, frame)
            self.write(f" {operators[by.op]} ")
        self.visit(compared[-1], frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.getitem(")
        self.visit(node.node, frame)
        self.write(", ")
        self._visit_whole(node.arg, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._visit_whole(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _visit_whole(self, node: nodes.Node, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.finalize(")
        self.visit(node, frame)
        self.write(")")


class _Bounded(ImmutableSandboxedEnvironment):
    """An environment that raises TooLarge before it computes a value that is too large.

    Bounded are each value, and for a chat what grows by a number or by repeating, as `'a' * 9`.
    """

    code_generator_class = _Code
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=self.whole)
        self.concat = self._concat
        self.start(LONGEST)

    def start(self, most: int) -> None:
        """Begin a chat, whose values have at most so many characters or items."""
        self._most, self._left = most, REPEATED * most

    def bound_filters_and_tests(self) -> None:
        for name, computes in [*self.filters.items()]:
            grown = _GROWN_BY_FILTER.get(name)
            self.filters[name] = self._bounded(computes, grown, name not in SHALLOW)
        self.filters["format"] = self._bounded_format(self.filters["format"])
        self.filters["sum"] = self._bounded_sum(self.filters["sum"])
        for name, computes in [*self.tests.items()]:
            if name not in SHALLOW_TESTS:
                self.tests[name] = self._bounded(computes)
        self.tests |= {
            "even": lambda value: self.call_binop(None, "%", value, 2) == 0,
            "odd": lambda value: self.call_binop(None, "%", value, 2) == 1,
            "divisibleby": lambda value, num: self.call_binop(None, "%", value, num) == 0,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if type(left) is type(right) is str and operator == "+":
            self._require_small(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = [abs(one).bit_length() for one in (left, right)]
            if operator == "**":
                bits.append(bits[0] * max(abs(right), 1) if abs(left) > 1 else 1)
            elif operator == "*":
                bits.append(sum(bits))
            if max(bits) > MOST_BITS:
                raise TooLarge(f"{operator} computes integers of more than {MOST_BITS:,} bits")
        elif isinstance(left, str | bytes) and operator == "%":
            self._grow(self._formatted(left, right))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(one, Sized):
                    self._grow(len(one) * times)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self._require_small(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **values: Any) -> Any:
        if isinstance(__obj, Macro):  # a macro does nothing with values by itself
            return super().call(__context, __obj, *args, **values)
        args = tuple(map(_listed, args))
        for one in (*args, *values.values()):
            __self.whole(one)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            grown = _GROWN_BY_METHOD.get(__obj.__name__)
            __self._grow(grown(owner, *args, **values) if grown else 0)
        return super().call(__context, __obj, *args, **values)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        is_markup = isinstance(text, Markup)
        formatter = _EscapeFormatter(self, escape=text.escape) if is_markup else _Formatter(self)
        if value.__name__ == "format_map":
            return lambda values: type(text)(formatter.vformat(text, (), values))
        return lambda *args, **values: type(text)(formatter.vformat(text, args, values))

    def formatted(self, value: Any, spec: str) -> None:
        """Count what a field of a format writes."""
        self._grow(self._size(value) + sum(map(_number, DIGITS.findall(spec))))

    def _formatted(self, text: str | bytes, values: Any) -> int:
        """The most characters that `text % values` gives."""
        written = text.decode("latin-1") if isinstance(text, bytes) else text
        asked = [*chain.from_iterable(OLD_FORMAT.findall(written))]
        given = values if isinstance(values, tuple) else (values,)
        stars = _numbers(given) if "*" in asked else 0
        size = self._size(values)
        if isinstance(values, Mapping):
            size *= written.count("%(")
        return len(text) + size + stars + sum(_number(one) for one in asked if one.isdigit())

    def _bounded(
        self,
        computes: Callable[..., Any],
        grown: Callable[..., int] | None = None,
        is_whole: bool = True,
    ) -> Callable[..., Any]:
        is_given_more = hasattr(computes, "jinja_pass_arg")  # e.g. the context, before the value

        @wraps(computes)
        def bounded(*given: Any, **values: Any) -> Any:
            more, args = (given[:1], given[1:]) if is_given_more else ((), given)
            if is_whole or grown:
                args = tuple(map(_listed, args))
            size = sum(map(self._size, (*args[not is_whole :], *values.values())))
            if grown:
                self._grow(grown(size, *args, **values))
            return computes(*more, *args, **values)

        return bounded

    def _bounded_format(self, computes: Callable[..., str]) -> Callable[..., str]:
        @wraps(computes)
        def bounded(value: Any, *args: Any, **values: Any) -> str:
            self._grow(self._formatted(str(value), values or args))
            return computes(value, *args, **values)

        return bounded

    def _bounded_sum(self, computes: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(computes)
        def bounded(_: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
            if not isinstance(start, list | tuple):
                return computes(self, iterable, attribute, start)
            get = make_attrgetter(self, attribute)
            items = [*iterable] if attribute is None else [*map(get, iterable)]
            self._require_small(sum(len(one) for one in items if isinstance(one, Sized)))
            for one in items:  # not by Python's own, which answers no signal
                start = self.call_binop(None, "+", start, one)
            return start

        return bounded

    def whole(self, value: Any) -> Any:
        """The value, if it is one to write, to compare or to hash."""
        if type(value) not in ATOMS:
            self._size(value)
        return value

    def _concat(self, parts: Iterable[str]) -> str:
        parts = [*parts]
        self._require_small(sum(map(len, parts)))
        return "".join(parts)

    def _size(self, value: Any) -> int:
        """Characters and items in a value and in all that it holds, each time that it does."""
        size, rest = 0, [value]
        while rest:
            one = rest.pop()
            if isinstance(one, str | bytes):
                size += len(one)
            elif isinstance(one, dict):
                size += CONTAINER + len(one)
                rest.extend(chain.from_iterable(one.items()))
            elif isinstance(one, CONTAINERS):
                size += CONTAINER + len(one)
                rest.extend(one)
            elif isinstance(one, Namespace):
                size += CONTAINER
                rest.append(one._Namespace__attrs)
            else:
                size += one.bit_length() // 3 if isinstance(one, int) else FLOAT
            if size > self._most:
                self._require_small(size)
        return size

    def _grow(self, size: int) -> None:
        self._require_small(size)
        self._left -= max(size, 0)
        if self._left < 0:
            raise TooLarge(f"it repeats more than {REPEATED * self._most:,} characters or items")

    def _require_small(self, size: int) -> None:
        if size > self._most:
            raise TooLarge(f"it computes more than {self._most:,} characters or items")


class _Formatter(SandboxedFormatter):
    _env: _Bounded

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion:  # it makes a text
            self._env.whole(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._env.formatted(value, format_spec)
        return super().format_field(value, format_spec)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


def _listed(value: Any) -> Any:
    """A value; an iterator becomes the list of all that it gives, except that of a loop."""
    if type(value) in ATOMS or isinstance(value, LoopContext) or not hasattr(value, "__next__"):
        return value
    return [*value]


def _number(digits: str) -> int:
    return int(digits or 0) if len(digits) <= LONGEST_NUMBER else LONGEST**2


def _numbers(values: Iterable[Any]) -> int:
    """The sum of the numbers among arguments, which are widths, or how often something is done."""
    return sum(abs(one) for one in values if isinstance(one, int))


def _widths(values: Iterable[Any]) -> int:
    """What is asked for as numbers, or as texts, also in a tuple."""
    pieces = [part for one in values for part in (one if isinstance(one, list | tuple) else (one,))]
    return _numbers(pieces) + _texts(pieces)


def _texts(values: Iterable[Any]) -> int:
    """Characters of what is written as it is."""
    return sum(len(str(one)) for one in values if type(one) is str or type(one) not in ATOMS)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list | tuple)]:
        depth += 1
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [*chain.from_iterable(inner)]
    return depth


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    return text.count(old) * max(len(new) - len(old), 0)


def _translated(text: Any, table: Any, *_: Any, **__: Any) -> int:
    values = table.values() if isinstance(table, dict) else table
    longest = max((len(one) for one in values if isinstance(one, str)), default=0)
    return len(text) * max(longest - 1, 0)


# What methods, and filters, add to what they are given, with the names that they give it.
_GROWN_BY_METHOD: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill", "to_bytes"),
        lambda _, *more, **named: _numbers((*more, *named.values())),
    ),
    "expandtabs": lambda text, tabsize=8: (
        text.count("\t" if isinstance(text, str) else b"\t") * tabsize
    ),
    "join": lambda text, items: len(text) * len(items),
    "replace": _replaced,
    "translate": _translated,
}
# What filters add; the size of all that is given comes before the value.
_GROWN_BY_FILTER: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        ("batch", "center", "slice"),
        lambda _, value, *more, **named: _numbers((*more, *named.values())),
    ),
    "indent": lambda _, s, width=4, *__, **___: (str(s).count("\n") + 2) * _widths((width,)),
    "join": lambda _, value, d="", *__, **___: len(str(d)) * len(value),
    "pprint": lambda size, value: size * _depth(value),
    "replace": lambda _, s, old, new, *__, **___: _replaced(str(s), str(old), str(new)),
    # A power of ten is computed.
    "round": lambda _, value, *more, **named: _numbers((*more, *named.values())) ** 2,
    "tojson": lambda size, value, *more, **named: (
        size * _widths((*more, *named.values())) * _depth(value)
    ),
    **dict.fromkeys(
        ("urlize", "wordwrap"),
        lambda size, value, *more, **named: size * _texts((*more, *named.values())),
    ),
}


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


def main(request: Mapping[str, Any]) -> str | None:
    """Render the chats of a request; return why one is too large.

    Whatever else the template raises is raised again, and reported, where it is rendered without
    limits.
    """
    try:
        sandbox = Sandbox(request["source"], date.min)
        for chat, is_asked, tools in product(
            request["chats"], (False, True), (None, request["tools"])
        ):
            try:
                sandbox.render(chat, is_asked, request["tokens"], tools)
            except (MemoryError, TooLarge, TooLong):
                raise
            except Exception:  # a template may raise anything; a real chat reports it
                continue
    except MemoryError:
        raise
    except TooLarge as error:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an invalid template; a real chat reports it
        return None
