"""docs/flags.md is what its command writes, and no flag of any --help is missing."""

from __future__ import annotations

import argparse
import re

import pytest

from minimind.cli import main as cli
from minimind.config.parse import build_parser
from minimind.config.run_config import FLAGS
from scripts.flag_reference import COMMAND, FOREIGN, MARKED, PAGE, page, subcommands, with_tables

TEXT = PAGE.read_text(encoding="utf-8")
PARSERS = {"train_pretrain.py": build_parser()}
PARSERS |= {parser.prog: parser for parser in subcommands(cli.build_parser())}


def rows_of(title: str) -> dict[str, str]:
    """The rows of a section, by each of the names in their first cell."""
    section = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    (own,) = (part for part in section if part.startswith(f"{title}\n"))
    rows = [line for line in own.splitlines() if line.startswith("| `")]
    return {name: row for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


def flags_in(parser: argparse.ArgumentParser) -> set[str]:
    """What --help lists."""
    listed = re.findall(r"^  (-.*?)(?:  |$)", parser.format_help(), re.MULTILINE)
    found = {name for line in listed for name in re.findall(r"(?<![\w-])--[\w-]+", line)}
    return found - {"--help", "--version", "--print_completion"}


def test_the_page_is_what_its_command_writes():
    assert page() == TEXT, f"run: {COMMAND}"


def test_the_tables_of_other_projects_are_those_of_the_hints():
    text = FOREIGN.read_text(encoding="utf-8")
    assert with_tables(text) == text, f"run: {COMMAND}"
    assert MARKED.findall(text)


@pytest.mark.parametrize("title", PARSERS)
def test_every_flag_of_help_has_a_row_and_no_other(title: str):
    rows = rows_of(title)
    assert {name for name in rows if name.startswith("--")} == flags_in(PARSERS[title])
    for row in rows.values():
        _, value, _, told = re.split(r"(?<!\\) \| ", row.strip("| "))
        assert value
        assert told


def test_the_limits_of_a_flag_are_in_its_row():
    rows = rows_of("train_pretrain.py")
    for name, spec in FLAGS.items():
        for key in ("at_least", "above", "at_most", "below"):
            if key in spec.metadata:
                bound = spec.metadata[key]
                shown = f"{bound:g}" if isinstance(bound, float) else bound
                assert f"{key.replace('_', ' ')} {shown}" in rows[f"--{name}"]
        for choice in spec.metadata.get("choices", ()):
            assert f"`{choice}`" in rows[f"--{name}"]
    assert "| whole number, at least 0, at most 4294967295 | `42` |" in rows["--seed"]
    assert "at least 512" in rows_of("minimind tokenizer train")["--vocab_size"]
