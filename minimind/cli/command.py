"""A command of `minimind` as a class: its fields are its arguments, its docstring is its help."""

from __future__ import annotations

import argparse
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

from minimind.config.command_line import Parser
from minimind.config.flags import (
    FLAGS,
    LIMITS,
    Flag,
    as_words,
    docstrings,
    format_default,
    meets,
    type_of,
)
from minimind.config.names import is_utf8, utf8_fault
from minimind.config.template_variables import template_variables
from minimind.errors import RunError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import require_writable, storing, why_unwritable

NUMBERS: dict[str, type] = {"int": int, "float": float}
MOST_READ = 2**24  # characters of a file that may be replaced
MOST_BYTES = 2**50  # of an amount; a number of bytes in place of GiB is more


@dataclass(frozen=True)
class Argument(Flag):
    """An argument of a command. Without a default it is required."""

    parse: Callable[[str], Any] | None = None  # a text as the value, in place of the type's own
    nargs: str | None = None
    const: Any = None  # the value of a flag without one, with nargs "?"
    is_positional: bool = False
    options: tuple[str, ...] = ()  # its spellings, where they are not the name of the field
    shared: str = ""  # the run's flag with this help, where the field has no docstring
    of_choices: Mapping[str, str] = field(default_factory=dict)  # help of each, in place of one

    @property
    def docstring(self) -> str:
        """The text below its line, in the command or in a base; else the help of its choices, or
        of the run's flag.
        """
        classes = self.owner.__mro__
        for owner in classes[: classes.index(Command) + 1]:
            if text := docstrings(owner.__module__).get((owner.__name__, self.name)):
                return text
        if self.of_choices:
            return "; ".join(f"{choice}: {text}" for choice, text in self.of_choices.items())
        return FLAGS[self.shared].help


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
    origins: ClassVar[Mapping[str, type[RunError]]] = {}  # where `config.paths.ORIGINS` has others
    adds_help: ClassVar[bool] = True
    # Whether the fields that this class itself declares name what the command acts on, and so are
    # first in its help, those of a base before those of its subclass.
    is_subject: ClassVar[bool] = False
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
        """Raise UsageError for arguments that need others, or cannot be used together."""
        arguments = arguments_of(type(self))
        given = [row for name, row in arguments.items() if meets(self, arguments, name)]
        for row in given:
            for condition, reason in row.excludes.items():
                if meets(self, arguments, condition):
                    other = arguments[condition.partition("=")[0]]
                    called = other.metavar if other.is_positional else as_words(condition)
                    typed = as_words(f"no-{row.name}" if row.default is True else row.name)
                    raise UsageError(
                        f"{typed} and {called} cannot be used together: {reason}; remove one of"
                        " them"
                    )
        for row in given:
            if row.needs and not meets(self, arguments, row.needs):
                needed = as_words(row.needs)
                raise UsageError(
                    f"--{row.name} has no effect without {needed}; add {needed}, or remove"
                    f" --{row.name}"
                )


@dataclass(kw_only=True)
class OfRunFlags(Command):
    """A command that takes the flags of a run besides its own."""

    run_flags: list[str] = field(init=False)  # the words that are none of its own


def non_empty(text: str) -> str:
    """Return the text; raise if it is empty, which would mean the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, as from a variable that is not set")
    return text


# Attributes of `place`, for a command that describes it in other words.
PLACE: dict[str, Any] = {"parse": non_empty, "nargs": "?", "metavar": "RUN", "is_positional": True}
PLACES: dict[str, Any] = {**PLACE, "nargs": "*"}


@dataclass(kw_only=True)
class OfPlace(Command):
    """A command on a run or on one of its checkpoints, as RUN or as --checkpoint RUN."""

    is_subject: ClassVar = True
    other_than_place: ClassVar[str] = ""  # the argument that may be given instead
    or_text: ClassVar[str] = ""  # what a word may be meant for that is not the place
    place: Any = argument(None, **PLACE)
    """a run's out_dir, out_dir/best, or a step_ directory"""
    checkpoint: Any = argument(None, parse=non_empty, metavar="RUN")
    """same as RUN without a flag"""

    def __post_init__(self) -> None:
        """Let `checkpoint` be the place that is given in either way; raise UsageError for both."""
        if self.place and self.checkpoint:
            place, checkpoint = map(format_default, (self.place, self.checkpoint))
            raise UsageError(
                f"{place} and --checkpoint {checkpoint} both name a run; remove one of"
                f" them{self.or_text}"
            )
        self.checkpoint = self.checkpoint or self.place
        given = [self.checkpoint] if isinstance(self.checkpoint, str) else self.checkpoint or ()
        if any(Path(one).name == "best" for one in given):
            from minimind.checkpoint.retention import with_best  # not for other places: it is slow

            paths = [(one, with_best(Path(one))) for one in given]
            found = [one if path == Path(one) else str(path) for one, path in paths]
            self.checkpoint = found[0] if isinstance(self.checkpoint, str) else found

    @property
    def typed(self) -> str:
        """What precedes the place on the command line."""
        return "" if self.place else "--checkpoint "

    def require_combined(self) -> None:
        """Raise UsageError also if there is no place, and nothing instead of it."""
        super().require_combined()
        if not self.checkpoint and getattr(self, self.other_than_place, None) is None:
            one = arguments_of(type(self))["place"].docstring
            other = f", or --{self.other_than_place} DIR" if self.other_than_place else ""
            raise UsageError(f"no RUN is given; give {one}{other}")


@dataclass(kw_only=True)
class OfPlaces(OfPlace):
    """A command on several of them."""

    place: Any = argument((), **PLACES)
    checkpoint: Any = argument((), parse=non_empty, nargs="+", metavar="RUN")


@dataclass(kw_only=True)
class OfRun(OfPlace):
    """A command on a run, not on one of its checkpoints."""

    origins: ClassVar = dict.fromkeys(("place", "checkpoint"), StorageError)
    place: Any = argument(None, **PLACE)
    """a run's out_dir"""


@dataclass(kw_only=True)
class Output(Command):
    """A command that writes --out."""

    out: Path = argument(metavar="DIR")
    """new output folder"""
    force: bool = argument(False)
    """replace an earlier output folder of this command"""


@dataclass(kw_only=True)
class OutputFile(Command):
    """A command that writes a file at --out, which each of them describes."""

    force: bool = argument(False, needs="out")
    """replace a file that this command wrote there"""

    def require_free(self, out: Path, is_ours: Callable[[str], bool]) -> None:
        """Raise UsageError if `out` exists, unless it is to be replaced and begins as `is_ours`."""
        if disk.is_dir(out):
            raise UsageError(f"--out {out} is a folder; give a file in it, or another one")
        if not disk.lexists(out):
            return
        if not self.force:
            raise UsageError(f"--out {out} exists; give another file, or --force to replace it")
        is_replaced = False
        if disk.is_file(out) and not disk.is_symlink(out):
            with (
                storing(str(out), "give another --out"),
                open(out, encoding="utf-8", errors="replace") as file,
            ):
                is_replaced = is_ours(file.read(MOST_READ))
        if not is_replaced:
            raise UsageError(
                f"--out {out} was not written by this command, and --force replaces nothing else;"
                " give another file"
            )

    def require_place(self, out: Path) -> None:
        """Raise StorageError if no file can be written at `out`."""
        if not disk.is_dir(out.parent):
            raise StorageError(
                f"--out {out}: there is no folder {out.parent}; make it, or give another"
            )
        try:
            require_writable(out)
        except OSError as error:
            reason = f"cannot be written ({why_unwritable(error)})"
            raise StorageError(f"--out {out}: {reason}; give another file") from error


@dataclass(kw_only=True)
class Cached(Command):
    """A command that fetches objects of storage; see `runtime.object_cache.open_cache`."""

    cache_dir: str = shared("cache_dir", metavar="DIR")
    """folder that caches what is fetched from URLs"""
    max_cache_gib: float | None = shared("max_cache_gib")


def arguments_of(command: type[Command]) -> dict[str, Argument]:
    """The arguments of a command, in the order of its help: its subject, its own, its bases'."""
    by_name = {f.name: f for f in fields(command) if f.init}
    subjects = [owner for owner in command.__mro__ if vars(owner).get("is_subject")]
    owners = [*reversed(subjects), *(owner for owner in command.__mro__ if owner not in subjects)]
    arguments: dict[str, Argument] = {}
    for owner in owners:
        for name in inspect.get_annotations(owner):
            if name in by_name and name not in arguments:
                f = by_name[name]
                item = type_of(str(f.type).removeprefix("list[")).rstrip("]")
                arguments[name] = Argument(name, command, item, f.default, **f.metadata)
    return arguments


@dataclass(frozen=True)
class Group:
    """Commands that follow a word, such as `minimind data`."""

    description: str
    example: str
    commands: Mapping[str, type[Command]]


def add_commands(subs: Any, commands: Mapping[str, type[Command] | Group]) -> None:
    """Add commands to the subparsers of `minimind` or of a group."""
    for name, command in commands.items():
        if isinstance(command, Group):
            words = " | ".join(command.commands)
            first, _, _ = command.description.partition(".")
            parser = subs.add_parser(
                name,
                help=f"{first} ({words})",
                description=command.description,
                example=command.example,
            )
            actions = parser.add_subparsers(
                dest="action", required=True, parser_class=Parser, metavar=words
            )
            add_commands(actions, command.commands)
        else:
            _add_command(subs, name, command)


def _add_command(subs: Any, name: str, command: type[Command]) -> None:
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
        add_help=command.adds_help,
        add_arguments=add_arguments,
    )
    parser.set_defaults(command_class=command)
    parser.takes_others = issubclass(command, OfRunFlags)


def command_of(args: argparse.Namespace, run_flags: Sequence[str] = ()) -> Command:
    """The command of parsed arguments, after `require_combined`."""
    command_class: type[Command] = args.command_class
    command = command_class(**{name: getattr(args, name) for name in arguments_of(command_class)})
    if isinstance(command, OfRunFlags):
        command.run_flags = [word for word in run_flags if word != "--"]  # as before those of tune
    command.require_combined()
    return command


def _add_argument(parser: argparse.ArgumentParser, row: Argument) -> None:
    default = format_default(row.unset) if row.default is None else ""
    shown = f" (default: {default})" if default else ""
    options: dict[str, Any] = {"help": (row.help + shown).replace("%", "%%")}
    if row.type == "bool" and row.default:
        parser.add_argument(f"--{row.name}", action=argparse.BooleanOptionalAction, **options)
        parser.set_defaults(**{row.name: True})  # else Python before 3.13 adds its own to the help
        return
    if row.type == "bool":
        parser.add_argument(f"--{row.name}", action="store_true", **options)
        return
    options |= {"type": row.parse or _type_of(row), "nargs": row.nargs, "const": row.const}
    options |= {"metavar": row.metavar or None, "choices": row.choices or None}
    if row.repeats:
        options["action"] = "extend" if row.nargs else "append"
    if row.default is not MISSING:
        options["default"] = row.default
    if row.is_positional:
        parser.add_argument(row.name, **options)
        return
    if not (row.metavar or row.choices):
        options["metavar"] = METAVARS.get(row.parse or row.type, "TEXT")
    options |= {"dest": row.name, "required": row.default is MISSING}
    parser.add_argument(*(row.options or (f"--{row.name}",)), **options)


def _type_of(row: Argument) -> Callable[[str], Any]:
    """What makes a value of a text for argparse: a number within the limits, a path or the text."""
    if row.type not in NUMBERS:
        return {"Path": non_empty_path}.get(row.type, str)

    def within_limits(text: str) -> float:
        value = NUMBERS[row.type](text)
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        if requirement := row.unmet(value):
            raise argparse.ArgumentTypeError(f"{text} must be {requirement}")
        return value

    within_limits.__name__ = "whole number" if row.type == "int" else "number"
    return within_limits


# Values of `parse`.


def _amount(text: str, unit: str) -> int:
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?) *([KMGT]i?B?|B)?", text.strip(), re.IGNORECASE)
    number, unit = (match[1], (match[2] or unit).upper()) if match else ("0", "B")
    base = 1000 if re.fullmatch("[KMGT]B", unit) else 1024
    size = float(number) * base ** "BKMGT".index(unit[0])
    if not 1 <= size < MOST_BYTES or (unit == "B" and not size.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount such as 24GiB, 80G or 512MiB")
    return int(size)


def size_in_bytes(text: str) -> int:
    """Parse `24GiB`, `24GB` or `24G`; a bare number counts GiB."""
    return _amount(text, "GiB")


def count_of_bytes(text: str) -> int:
    """Parse the same; a bare number counts bytes."""
    return _amount(text, "B")


def non_empty_path(text: str) -> Path:
    """Convert a non-empty text to a Path."""
    return Path(non_empty(text))


def non_blank(text: str) -> str:
    """Return the text; raise if it is blank or not UTF-8."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is blank, as from a variable that is not set")
    return utf8(text)


def utf8(text: str) -> str:
    """Return the text; raise if it is not UTF-8."""
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"{text!a} {utf8_fault(text)}")
    return text


def iso_date(text: str) -> str:
    """Return the date as YYYY-MM-DD; raise if the text is none."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!a} is not a date such as 2024-07-26") from error


def json_variables(text: str) -> dict[str, Any]:
    """Parse the variables of a chat template; raise if the text has none."""
    try:
        return template_variables(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error


METAVARS: dict[Any, str] = {
    "int": "INT",
    "float": "FLOAT",
    "Path": "PATH",
    size_in_bytes: "SIZE",
    count_of_bytes: "BYTES",
    non_empty_path: "PATH",
}
