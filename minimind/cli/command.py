"""A command of `minimind` as a class: its fields are its arguments, its docstring is its help."""

from __future__ import annotations

import argparse
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from minimind.config.arguments import Number, non_empty_path
from minimind.config.flags import FLAGS, LIMITS, Flag, as_words, meets, number, type_of
from minimind.errors import UsageError

NUMBERS: dict[str, type] = {"int": int, "float": float}


@dataclass(frozen=True)
class Argument(Flag):
    """An argument of a command. Without a default it is required."""

    parse: Callable[[str], Any] | None = None  # a text as the value, in place of the type's own
    metavar: str | None = None
    nargs: str | None = None
    const: Any = None  # the value of a flag without one, with nargs "?"
    is_positional: bool = False
    option: str = ""  # its spelling, where the name of the field is another
    shared: str = ""  # the run's flag with this help, where the field has no docstring

    @property
    def help(self) -> str:
        """Its docstring, else the help of the run's flag, after what it needs."""
        try:
            return super().help
        except KeyError:
            return FLAGS[self.shared].help

    @property
    def limits(self) -> str:
        """What numbers it takes: `at least 0, below 1`; empty for any."""
        bounds = ((words, getattr(self, limit)) for limit, (words, _) in LIMITS.items())
        return ", ".join(f"{words} {number(bound)}" for words, bound in bounds if bound is not None)


def argument(default: Any = MISSING, **attributes: Any) -> Any:
    """Return the dataclass field of an argument with these attributes of `Argument`."""
    return field(default=default, metadata=attributes)


def shared(name: str, **attributes: Any) -> Any:
    """Return the field of an argument that has default, limits and help of a run's flag.

    If the default is None, the run's default replaces it (`Command.in_force`).
    """
    flag = FLAGS[name]
    limits = {limit: getattr(flag, limit) for limit in (*LIMITS, "choices")}
    default = attributes.pop("default", flag.default)
    unset = flag.default if default is None else None
    return argument(default, **{"unset": unset, "shared": name, **limits, **attributes})


@dataclass(kw_only=True)
class Command(ABC):
    """Run a command."""  # each has a docstring of its own

    example: ClassVar[str]
    debug: bool = argument(False)
    """show tracebacks"""

    @abstractmethod
    def execute(self) -> int | None:
        """Do the work; return the exit status, None for 0."""

    def in_force(self, name: str) -> Any:
        """The value of an argument, or the one that holds where it is not given."""
        value = getattr(self, name)
        return arguments_of(type(self))[name].unset if value is None else value

    def require_combined(self) -> None:
        """Raise UsageError for arguments that need others, or exclude one another."""
        arguments = arguments_of(type(self))
        for name, row in arguments.items():
            if not meets(self, arguments, name):
                continue
            if row.needs and not meets(self, arguments, row.needs):
                needed = as_words(row.needs)
                raise UsageError(f"--{name} without {needed}; give {needed} too, or drop --{name}")
            for condition, reason in row.excludes.items():
                if meets(self, arguments, condition):
                    other = arguments[condition.partition("=")[0]]
                    called = other.metavar if other.is_positional else as_words(condition)
                    raise UsageError(
                        f"--{name} and {called} exclude one another: {reason}; drop one of them"
                    )


@dataclass(kw_only=True)
class Output(Command):
    """A command that writes --out."""

    out: Path = argument()
    """new output folder"""
    force: bool = argument(False)
    """replace an earlier --out"""


@dataclass(kw_only=True)
class Cached(Command):
    """A command that fetches objects of storage; see `runtime.object_cache.open_cache`."""

    cache_dir: str = shared("cache_dir")
    """cache of what is fetched from URLs"""
    max_cache_gib: float | None = shared("max_cache_gib")


def arguments_of(command: type[Command]) -> dict[str, Argument]:
    """The arguments of a command, in the order of its help: its own, then those of its bases."""
    by_name = {f.name: f for f in fields(command)}
    found: dict[str, Argument] = {}
    for owner in command.__mro__:
        for name in inspect.get_annotations(owner):
            if name in by_name and name not in found:
                f = by_name[name]
                found[name] = Argument(name, owner, type_of(f.type), f.default, **f.metadata)
    return found


def add_command(subs: Any, name: str, command: type[Command]) -> None:
    """Add a command to the subparsers of `minimind` or of a group of commands."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        for row in arguments_of(command).values():
            _add_argument(parser, row)

    first, _, _ = str(command.__doc__).partition("\n")
    text = " ".join(str(command.__doc__).split())
    parser = subs.add_parser(
        name,
        help=first.rstrip("."),
        description=text,
        example=command.example,
        add_arguments=add_arguments,
    )
    parser.set_defaults(command_class=command)


def command_of(args: argparse.Namespace) -> Command | None:
    """The command of parsed arguments, after `require_combined`; None for one without a class."""
    kind: type[Command] | None = getattr(args, "command_class", None)
    if kind is None:
        return None
    command = kind(**{name: getattr(args, name) for name in arguments_of(kind)})
    command.require_combined()
    return command


def _add_argument(parser: argparse.ArgumentParser, row: Argument) -> None:
    shown = f" (default: {row.unset})" if row.default is None and row.unset is not None else ""
    options: dict[str, Any] = {"help": (row.help + shown).replace("%", "%%")}
    if row.type == "bool":
        parser.add_argument(f"--{row.name}", action="store_true", **options)
        return
    options |= {"type": row.parse or _type_of(row), "metavar": row.metavar, "nargs": row.nargs}
    options |= {"choices": row.choices or None, "const": row.const}
    if row.repeats:
        options["action"] = "extend" if row.nargs else "append"
    if row.default is not MISSING:
        options["default"] = row.default
    if row.is_positional:
        parser.add_argument(row.name, **options)
    else:
        options |= {"dest": row.name, "required": row.default is MISSING}
        parser.add_argument(row.option or f"--{row.name}", **options)


def _type_of(row: Argument) -> Any:
    if row.type not in NUMBERS:
        return {"Path": non_empty_path}.get(row.type, str)
    limits, has_end = row.limits, not row.le is row.lt is None
    if row.type == "float" and not has_end:
        limits = f"{limits} and finite" if limits else "finite"
    is_least = row.type == "int" and row.ge is not None and not has_end
    fault = f"below {number(row.ge)}" if is_least else ""

    def is_valid(value: float) -> bool:
        return math.isfinite(value) and not row.unmet(value)

    return Number(NUMBERS[row.type], limits, is_valid, fault)
