"""Write docs/flags.md, off what --help is made of, and the tables of docs/coming_from.md.

python -m scripts.flag_reference
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minimind.cli import main as cli
from minimind.config.arguments import EXAMPLE, Number, count_of_bytes, non_empty_path, size_in_bytes
from minimind.config.foreign_flags import TABLES
from minimind.config.foreign_flags import rows as foreign_rows
from minimind.config.parse import kind_of
from minimind.config.run_config import FLAGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
FOREIGN = PAGE.with_name("coming_from.md")
COMMAND = "python -m scripts.flag_reference"
INTRODUCTION = f"""\
# Flags

Written by `{COMMAND}` from the fields and parsers that `--help` is made of; a change goes there,
and not into this page. Every `_` in a flag may be written `-`.

## train_pretrain.py

`run_accelerate.sh` and every launcher hand them on, and a `--config FILE.yaml` holds them without
their dashes. What is on is switched off by `--no-NAME`. `--version` prints the version, and
`--print_completion bash` (or `zsh`, `tcsh`) a script that completes flags in a shell; so does
`minimind`. A step is an optimizer step, over all processes.
"""
MARKED = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
HEAD = "| flag | value | default | what it says |\n|---|---|---|---|\n"
KINDS = {
    "int": "whole number",
    "float": "number",
    "bool": "on or off",
    "str": "text",
    "tuple": "one or more paths",
}
LIMITS = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
TYPES = {
    size_in_bytes: "bytes, such as 24GiB",
    count_of_bytes: "bytes, such as 4096 or 16MiB",
    non_empty_path: "path",
    Path: "path",
    float: "number",
}
MANY = {"+": ", one or more", "*": ", any number of them", "?": ""}
Row = tuple[str, str, str, str]


def page() -> str:
    """The whole page."""
    groups: dict[str, list[Row]] = {}
    for name, spec in FLAGS.items():
        groups.setdefault(spec.metadata["group"], []).append(_of_field(name, spec))
    parts = [INTRODUCTION]
    parts += [f"### {group}\n\n{_table(rows)}" for group, rows in groups.items()]
    for parser in subcommands(cli.build_parser()):
        rows = [_of_action(action) for action in parser._actions if action.dest != "help"]
        title, told = f"## {parser.prog}", _escaped(parser.description or "")
        example = (parser.epilog or "").removeprefix(EXAMPLE).strip()
        parts.append(f"{title}\n\n{told}\n\n```bash\n{example}\n```\n\n{_table(rows)}")
    return "\n".join(parts)


def with_tables(text: str) -> str:
    """docs/coming_from.md with the table of every project between its marks."""
    return MARKED.sub(lambda found: f"{found[1]}\n{_foreign_table(found[2])}\n{found[3]}", text)


def _foreign_table(project: str) -> str:
    def cell(names: Iterable[str]) -> str:
        return " ".join(f"`{name}`" for name in names)

    lines = [f"| {project} | here | |", "|---|---|---|"]
    lines += [
        f"| {cell(theirs)} | {cell(ours)} | {note} |".replace("|  |", "| |")
        for theirs, ours, note in foreign_rows(TABLES[project])
    ]
    return "\n".join(lines) + "\n"


def subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers below this one that have none below them."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for found in action.choices.values():
            yield from subcommands(found)


def _of_field(name: str, spec: Any) -> Row:
    """The row of a flag of train_pretrain.py."""
    kind, limits = kind_of(spec), spec.metadata
    shown = [f"--{name}", f"--no-{name}"] if kind == "bool" else [f"--{name}"]
    told = [
        KINDS[kind],
        *(f"{LIMITS[key]} {_number(limits[key])}" for key in LIMITS if key in limits),
    ]
    value = _one_of(limits["choices"]) if "choices" in limits else ", ".join(told)
    return _codes(shown), value, _default(spec.default), _escaped(limits["help"])


def _of_action(action: argparse.Action) -> Row:
    """The row of an argument of a subcommand."""
    names = action.option_strings or [_name_of(action)]
    needed = action.required and action.nargs != "*"
    default = "required" if needed else _default(action.default)
    return _codes(names), _value(action), default, _escaped(action.help or "")


def _value(action: argparse.Action) -> str:
    """What an argument takes, in words."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return KINDS["bool"]
    if action.nargs == 0:
        return "none"
    if action.choices:
        return _one_of(action.choices)
    kind: Any = action.type
    if isinstance(kind, Number):
        return f"{kind.__name__}, {kind.limits}"
    named = action.option_strings and action.metavar
    word = TYPES.get(kind) or (_codes([_name_of(action)]) if named else "text")
    return word + MANY.get(str(action.nargs), "")


def _name_of(action: argparse.Action) -> str:
    return str(action.metavar or action.dest)


def _default(value: Any) -> str:
    """A default as it would be typed; empty where there is none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, [], argparse.SUPPRESS):
        return ""
    return _codes([" ".join(value) if isinstance(value, tuple) else str(value)])


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_of(choices: Iterable[str]) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names).replace("|", r"\|")


def _escaped(text: str) -> str:
    """Help as Markdown in a cell of a table, with the flags it names as code."""
    parts = text.replace("%%", "%").split("`")
    for n, part in enumerate(parts[::2]):
        plain = part.replace("<", "&lt;").replace("*", r"\*")
        parts[2 * n] = re.sub(r"(?<![\w-])--[a-z][\w-]*", r"`\g<0>`", plain)
    return "`".join(parts).replace("|", r"\|")


def _table(rows: Iterable[Row]) -> str:
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    FOREIGN.write_text(with_tables(FOREIGN.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE, FOREIGN)
