"""What argparse is given to read a subcommand's words by."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from minimind.errors import UsageError

EXAMPLE = "example:"


class Formatter(argparse.HelpFormatter):
    """Help with each default behind its option, kinds as placeholders, and examples as typed."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told = (action.help or "").strip()
        if "(default:" in told or not action.option_strings:
            return told
        shown = shown_default(action.default).replace("%", "%%")
        return f"{told} (default: {shown})" if shown else told

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind: Any = action.type
        if isinstance(kind, Number):
            return kind.metavar
        return {size_in_bytes: "BYTES", count_of_bytes: "BYTES", path_of: "PATH"}.get(kind, "TEXT")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLE) else super()._fill_text(text, width, indent)


def shown_default(value: Any) -> str:
    """A default as it is typed; empty where there is none, or where a switch is off."""
    if value is None or value is False or value == [] or value == argparse.SUPPRESS:
        return ""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    return "on" if value is True else str(value)


class PrintCompletion(argparse.Action):
    """`--print_completion SHELL`: print what completes the words of `command` in it, and end.

    `known` has the choices, by dest, that argparse itself is not given.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        command: str,
        known: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> None:
        shells = ("bash", "zsh", "tcsh")
        told = "print the completion script for a shell, and end"
        super().__init__(option_strings, argparse.SUPPRESS, choices=shells, help=told)
        self.command, self.known = command, known or {}

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, _: object = None
    ) -> None:
        """Print it; every option that takes a value of no fixed choice completes file names."""
        import shtab

        for one in all_parsers(parser):
            for action in one._actions:
                action.choices = action.choices or self.known.get(action.dest)
                if action.nargs != 0 and not action.choices:
                    action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
        parser.prog = self.command
        print(shtab.complete(parser, values))
        parser.exit()


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser, and those of all its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from all_parsers(below)


class Parser(argparse.ArgumentParser):
    """argparse with help as `Formatter` writes it, either dash, and mistakes as a UsageError.

    `example` is a command line, shown below the options.
    """

    def __init__(self, example: str = "", **how: Any) -> None:
        epilog = f"{EXAMPLE}\n  {example}" if example else None
        how = {"formatter_class": Formatter, "allow_abbrev": False, "epilog": epilog, **how}
        super().__init__(**how)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] (of two overloads)
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As argparse does, with `--a-b` taken for `--a_b`."""
        words = sys.argv[1:] if args is None else list(args)
        end = words.index("--") if "--" in words else len(words)
        known = {name.replace("-", "_"): name for name in self._option_string_actions}
        return super().parse_known_args(
            [_spelled(w, known) for w in words[:end]] + words[end:], namespace
        )

    def error(self, message: str) -> NoReturn:
        """Raise it as a UsageError."""
        raise UsageError(f"{message}; see {self.prog} --help")


def _spelled(word: str, known: Mapping[str, str]) -> str:
    """A word that begins with a known option, written with the dashes that the option has."""
    name, equals, value = word.partition("=")
    return known.get(name.replace("-", "_"), name) + equals + value if word[:2] == "--" else word


class Number:
    """What argparse reads a number by: those that `limits` describes and `holds` is true of."""

    def __init__(self, kind: type, limits: str, holds: Callable[[float], bool], told: str = ""):
        self.__name__ = "whole number" if kind is int else "number"  # as argparse's messages say
        self.metavar = "INT" if kind is int else "FLOAT"
        self.limits = limits
        self._kind, self._holds, self._told = kind, holds, told or f"not {limits}"

    def __call__(self, text: str) -> float:
        """The number that `text` writes."""
        value = self._kind(text)
        if not self._holds(value):
            raise argparse.ArgumentTypeError(f"{text} is {self._told}")
        return value


def at_least(bound: float) -> Number:
    """Numbers from `bound` on."""
    limits, told = f"at least {bound}", f"below {bound}"
    return Number(type(bound), limits, lambda value: value >= bound, told)


share = Number(float, "above 0 and at most 1", lambda value: 0 < value <= 1)
fraction = Number(float, "from 0 to below 1", lambda value: 0 <= value < 1)
finite = Number(float, "0 or more and finite", lambda value: 0 <= value < float("inf"))
penalty = Number(float, "from 0.01 to 100", lambda value: 0.01 <= value <= 100)
positive = Number(float, "above 0 and finite", lambda value: 0 < value < float("inf"))


def add_model(added: argparse.ArgumentParser) -> None:
    """What `minimind.inference.load_model` is given, and where the model is asked."""
    add = added.add_argument
    add("--checkpoint", metavar="PLACE", help="a run's out_dir, or a step_ directory")
    exported = "what export wrote, or another directory of a Llama's or MiniMind2's weights"
    add("--model", metavar="DIR", help=exported)
    told = "tokenizer of --model (default: the one in DIR)"
    add("--tokenizer", type=filled, metavar="PATH", help=told)
    told = "auto takes a GPU where there is one"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=told)
    add("--debug", action="store_true", help="show tracebacks")


def size_in_bytes(text: str) -> int:
    """Bytes of `24GiB`, `24GB`, `24G`; a bare number is taken for bytes from a million on."""
    if re.fullmatch(r"[1-9]\d{6,15}", text.strip()):
        return int(text)
    found = re.fullmatch(r"(\d{1,12}(?:\.\d+)?) *([KMGT])(i?B)?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount such as 24GiB, 80G or 512MiB")
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    return int(float(found[1]) * base ** ("KMGT".index(found[2].upper()) + 1))


def count_of_bytes(text: str) -> int:
    """Of a bare number, or of one with a unit."""
    return int(text) if text.isdecimal() and int(text) else size_in_bytes(text)


def is_utf8(text: str) -> bool:
    """Whether a word of the command line was; Python has halves of characters where it was not."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def filled(text: str) -> str:
    """The text itself; an empty one would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, as of a variable that is not set")
    return text


def path_of(text: str) -> Path:
    """The path of a text that is not empty."""
    return Path(filled(text))


def utf8(text: str) -> str:
    """The text itself."""
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8")
    return text
