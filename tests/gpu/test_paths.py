"""The table of paths that differ on CUDA: its files, tests, lines of libraries and counts."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.gpu.parts import PARTS

PAGE = (ROOT / "tools" / "gpu" / "PATHS.md").read_text(encoding="utf-8")
HEAD = "| path | file | shown | a failure looks like |"
KINDS = ("run", "read", "stand-in", "pretended", "late", "H100", "not shown")
BY_TEST = re.compile(r"(run|stand-in|pretended|late): `(tests/[\w./]+\.py)`")
BY_LINE = re.compile(r"read: `((?:torch|deepspeed|accelerate)/[\w./]+):(\d+)` `([\w.-]+)`")
LIBRARIES = {"torch": "torch", "DeepSpeed": "deepspeed", "Accelerate": "accelerate"}


def table() -> list[list[str]]:
    """Cells of every row of the page's tables."""
    blocks = [block for block in PAGE.split("\n\n") if block.startswith(HEAD)]
    assert blocks
    lines = [line for block in blocks for line in block.splitlines()[2:]]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


ROWS = table()


def kind(shown: str) -> str:
    """How a row was shown."""
    return shown.partition(":")[0]


@cache
def source(path: str) -> list[str]:
    """Lines of a file of an installed library."""
    package, _, rest = path.partition("/")
    spec = find_spec(package)
    assert spec
    assert spec.origin
    return (Path(spec.origin).parent / rest).read_text(encoding="utf-8").splitlines()


def is_tested(path: str) -> bool:
    """Whether the installed library is of the version that the page names."""
    stated = re.search(r"Libraries: (.*?);", PAGE, re.DOTALL)
    assert stated
    versions = dict(part.split() for part in stated[1].split(", "))
    assert versions.keys() == LIBRARIES.keys()
    names = {package: name for name, package in LIBRARIES.items()}
    package = path.partition("/")[0]
    return version(package).partition("+")[0] == versions[names[package]]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_what_there_is(row: list[str]):
    path, file, shown, failure = row
    assert path
    assert failure
    assert (ROOT / file.strip("`")).is_file(), file
    if shown == "not shown":
        return
    if by_test := BY_TEST.fullmatch(shown):
        assert (ROOT / by_test[2]).is_file(), shown
        return
    if by_part := re.fullmatch(r"H100: `(\w+)`", shown):
        assert by_part[1] in PARTS, shown
        return
    by_line = BY_LINE.fullmatch(shown)
    assert by_line, f"{shown}: none of {', '.join(KINDS)}"
    name, number, word = by_line[1], int(by_line[2]), by_line[3]
    lines = source(name)
    # In another version the line has another number.
    assert word in (lines[number - 1] if is_tested(name) else "\n".join(lines)), shown


def test_the_counts_are_those_of_the_rows_and_no_row_is_there_twice():
    found = Counter(kind(shown) for _, _, shown, _ in ROWS)
    counts = ", ".join(f"{name} {found[name]}" for name in KINDS)
    assert f"\n{len(ROWS)} rows: {counts}.\n" in PAGE
    assert len({tuple(row[:2]) for row in ROWS}) == len(ROWS)
