"""docs/flags.md is what its command writes, and no flag of any --help is missing."""

from __future__ import annotations

import argparse
import re

import pytest

from minimind.cli import main as cli
from minimind.config.flags import FLAGS, LIMITS
from minimind.config.parse import build_parser
from scripts.flag_reference import (
    COMMAND,
    COMMON,
    FOREIGN,
    MARKED,
    PAGE,
    page,
    subcommands,
    with_tables,
)

TEXT = PAGE.read_text(encoding="utf-8")
TRAIN = "train_pretrain.py"
SUBCOMMANDS = {parser.prog: parser for parser in subcommands(cli.build_parser())}
PARSERS = {TRAIN: build_parser(), **SUBCOMMANDS}
RUN_FLAGS = ("minimind plan", "minimind train", "minimind launch")  # take COMMON as a run's flag


def rows_of(title: str) -> dict[str, str]:
    """The rows of a section, by each of the names in their first cell; on/off flags by two."""
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    (section,) = (part for part in sections if part.startswith(f"{title}\n"))
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = {name: row for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    pairs = {f"--no-{name[2:]}": row for name, row in named.items() if " | on/off | " in row}
    return named | pairs


def flags_in(parser: argparse.ArgumentParser) -> set[str]:
    """The flags that --help lists."""
    lines = re.findall(r"^  (-.*?)(?:  |$)", parser.format_help(), re.MULTILINE)
    names = {name for line in lines for name in re.findall(r"(?<![\w-])--[\w-]+", line)}
    return names - {"--help", "--version", "--print_completion"}


def test_the_page_is_what_its_command_writes():
    assert page() == TEXT, f"run: {COMMAND}"


def test_the_tables_of_other_projects_are_those_of_the_hints():
    text = FOREIGN.read_text(encoding="utf-8")
    assert with_tables(text) == text, f"run: {COMMAND}"
    assert MARKED.findall(text)


@pytest.mark.parametrize("title", PARSERS)
def test_every_flag_of_help_has_a_row_and_no_other(title: str):
    rows = rows_of(title)
    common = set() if title == TRAIN else {COMMON}
    assert {name for name in rows if name.startswith("--")} == flags_in(PARSERS[title]) - common
    for row in rows.values():
        _, value, _, description = re.split(r"(?<!\\) \| ", row.strip("| "))
        assert value
        assert description


def test_every_subcommand_has_the_flag_that_the_page_shows_once():
    assert f"Every command takes `{COMMON}`" in TEXT
    without = {prog for prog, one in SUBCOMMANDS.items() if COMMON not in flags_in(one)}
    assert without <= set(RUN_FLAGS)


def test_the_limits_of_a_flag_are_in_its_row():
    rows = rows_of(TRAIN)
    for name, spec in FLAGS.items():
        for key, (words, _) in LIMITS.items():
            if (bound := getattr(spec, key)) is not None:
                assert f"{words} {bound:.16g}" in rows[f"--{name}"]
        for choice in spec.choices:
            assert f"`{choice}`" in rows[f"--{name}"]
    assert "| int, at least 0 and at most 4294967295 | `42` |" in rows["--seed"]
    assert "at least 512" in rows_of("minimind tokenizer train")["--vocab_size"]
