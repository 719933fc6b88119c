"""The parser of command lines, of runs and of subcommands: its dashes, its help, its completion."""

from __future__ import annotations

import argparse
import copy
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from minimind.config.flags import format_default
from minimind.config.names import suggest, suggest_choice, unknown_flag
from minimind.errors import UsageError

EXAMPLE = "example:"


MISSING = "the following arguments are required"  # so argparse begins


class MissingArgument(UsageError):
    """A required argument is not on the command line."""


class Formatter(argparse.HelpFormatter):
    """Help formatter with defaults and unwrapped examples."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = (action.help or "").strip()
        if "(default:" in text or not action.option_strings or action.default == argparse.SUPPRESS:
            return text
        default = format_default(action.default).replace("%", "%%")
        return f"{text} (default: {default})" if default else text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLE) else super()._fill_text(text, width, indent)


class PrintHelp(argparse.Action):
    """`--help`: print the flags that most runs need; `--help GROUP` those of a group, or `all`."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, common: Collection[str], **_: Any
    ) -> None:
        help = "print the flags of most runs, and end; --help all: every flag"
        super().__init__(option_strings, argparse.SUPPRESS, "?", metavar="GROUP", help=help)
        self.default = argparse.SUPPRESS
        self.common = common

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, _: object = None
    ) -> None:
        """Print them, by a pager if all are asked for on a terminal, and exit."""
        groups = self.groups(parser)
        titles = [f"{title} ({len(group._group_actions)})" for title, group in groups.items()]
        more = f"more: --help GROUP, or --help all; groups: {', '.join(titles)}"
        if values == "all":
            page(parser, parser.format_help())
        elif values is None:
            by_name = {action.dest: action for action in parser._actions}
            actions = [by_name[name] for name in self.common]
            page(parser, _help_of(parser, {"flags of most runs": actions}) + f"\n{more}\n", False)
        elif values in groups:
            page(parser, _help_of(parser, {values: groups[values]._group_actions}), False)
        else:
            raise UsageError(f"--help {values}: no such group; {suggest(values, [*groups], more)}")
        parser.exit()

    def groups(self, parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
        """Groups of flags by title, without the two that argparse has: positional, and options."""
        return {str(group.title): group for group in parser._action_groups[2:]}


def _help_of(parser: argparse.ArgumentParser, parts: Mapping[str, list[argparse.Action]]) -> str:
    """The help of some arguments by title."""
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, ())
    formatter.add_text(parser.description)
    for title, actions in parts.items():
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    formatter.add_text(parser.epilog)
    return formatter.format_help()


def page(parser: argparse.ArgumentParser, text: str, is_long: bool = True) -> None:
    """Print a text, a long one by the pager of the user where there is a terminal."""
    if is_long and sys.stdout.isatty():
        import pydoc

        pydoc.pager(text)
    else:
        parser._print_message(text, sys.stdout)  # an output that is closed is ignored


class PrintCompletion(argparse.Action):
    """`--print_completion SHELL`: print the completion script of `command` and exit.

    `known` maps dest to choices that argparse does not validate itself. `of_run` are the commands
    that take the flags of `run` too.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        command: str,
        known: Mapping[str, Sequence[str]] | None = None,
        run: Callable[[], argparse.ArgumentParser] | None = None,
        of_run: Collection[str] = (),
        **_: Any,
    ) -> None:
        shells = ("bash", "zsh", "tcsh")
        help = "print the completion script for a shell, and end"
        super().__init__(option_strings, argparse.SUPPRESS, choices=shells, help=help)
        self.command, self.known = command, known or {}
        self.run, self.of_run = run, of_run

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, _: object = None
    ) -> None:
        """Print the script; options with a free value complete file names."""
        import shtab

        parser = copy.deepcopy(parser)  # others parse with this one
        for name, below in commands_of(parser):
            if self.run and name in self.of_run:
                if isinstance(below, Parser):
                    below.complete()
                for action in copy.deepcopy(self.run())._actions:
                    if not {*action.option_strings} & {*below._option_string_actions}:
                        below._add_action(action)
        for subparser in all_parsers(parser):
            for action in subparser._actions:
                action.choices = action.choices or self.known.get(action.dest)
                if isinstance(action, PrintHelp):
                    action.choices = [*action.groups(self.run() if self.run else parser), "all"]
                if action.nargs != 0 and not action.choices:
                    setattr(action, "complete", shtab.FILE)  # noqa: B010 (shtab's, not declared)
        parser.prog = self.command
        print(shtab.complete(parser, values))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """ArgumentParser that accepts `--a-b` for `--a_b` and raises UsageError.

    `example` is a command line shown below the options. `add_arguments` is called with the parser
    before its first use, so that a command line costs only the arguments of its own command.
    """

    takes_others = False  # flags of a run, besides its own

    def __init__(
        self,
        example: str = "",
        add_arguments: Callable[[Parser], None] | None = None,
        **options: Any,
    ) -> None:
        epilog = f"{EXAMPLE}\n  {example}" if example else None
        options = {"formatter_class": Formatter, "allow_abbrev": False, "epilog": epilog, **options}
        super().__init__(**options)
        self._add_arguments = add_arguments

    def complete(self) -> None:
        """Add the arguments, if that is still to be done."""
        add, self._add_arguments = self._add_arguments, None
        if add:
            add(self)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] (of two overloads)
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse as argparse does, with `--a-b` read as `--a_b`."""
        self.complete()
        words = sys.argv[1:] if args is None else list(args)
        end = words.index("--") if "--" in words else len(words)
        known = self._known()
        flags = [_with_known_dashes(w, known) for w in words[:end]]
        if self._get_positional_actions() and not self._subparsers:
            flags = self._positionals_first(flags)
        try:
            return super().parse_known_args(flags + words[end:], namespace)
        except MissingArgument:  # under another name, maybe
            for word in () if self._subparsers or self.takes_others else flags:
                if re.match(r"--\w", word) and word.partition("=")[0] not in known.values():
                    raise UsageError(unknown_argument(self, word)) from None
            raise

    def _positionals_first(self, words: Sequence[str]) -> list[str]:
        """Move the words that no flag takes to the front.

        argparse gives those before the first flag to all positionals, and has no use for the rest.
        """
        first, others, taken = [], [], 0.0
        for word in words:
            name, is_set, _ = word.partition("=")
            if action := self._option_string_actions.get(name):
                taken = 0 if is_set else {None: 1, "?": 1, 0: 0}.get(action.nargs, math.inf)
            elif re.match(r"-+[^\W\d]", word):  # a flag of a run, with its values
                taken = math.inf
            elif taken:
                taken -= 1
            else:
                first.append(word)
                continue
            others.append(word)
        return first + others

    def unknown_flags(self, words: Sequence[str]) -> list[str]:
        """Return one sentence per word that looks like a flag and is none of this parser."""
        known = self._known()
        return [
            unknown_flag(word, [*known.values()])
            for word in dict.fromkeys(words)
            if re.match(r"--?[A-Za-z]", word)
            and _with_known_dashes(word, known).split("=")[0] not in self._option_string_actions
        ]

    def error(self, message: str) -> NoReturn:
        is_answered = message.endswith("?")
        kind = MissingArgument if message.startswith(MISSING) else UsageError
        raise kind(message if is_answered else f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if hint := suggest_choice(value, [*map(str, action.choices or ())], ""):
                error.message += f"; {hint}"
            raise

    def _known(self) -> dict[str, str]:
        return {name.replace("-", "_"): name for name in self._option_string_actions}


def unknown_argument(parser: argparse.ArgumentParser, word: str) -> str:
    """Describe a word that a parser does not know, and suggest the closest of its flags."""
    name = word.partition("=")[0]
    names = [*parser._option_string_actions] if name.startswith("--") else []
    return f"unknown argument {name}; {suggest(name, names, f'see {parser.prog} --help')}"


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the commands below a parser with their parsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser and the parsers of all subcommands, with their arguments."""
    if isinstance(parser, Parser):
        parser.complete()
    yield parser
    for _, below in commands_of(parser):
        yield from all_parsers(below)


def parser_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the subcommand that the words of a command line name."""
    below = dict(commands_of(parser))
    for number, word in enumerate(words):
        if word in below:
            return parser_of(below[word], words[number + 1 :])
    return parser


def _with_known_dashes(word: str, known: Mapping[str, str]) -> str:
    """Rewrite a word that starts with a known option to the option's own dashes."""
    name, equals, value = word.partition("=")
    return known.get(name.replace("-", "_"), name) + equals + value if word[:2] == "--" else word
