"""The comparison names tests that exist, and both READMEs have rows of it."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.docs.pages import PAGES, rows

NO = "\N{EN DASH}"
HEADS = {"README.md": "## Comparison\n", "README_zh.md": "## 与其他项目相比\n"}
ROWS = rows(PAGES["comparison.md"], "# Comparison\n")
MARKS = {name: marks for name, *marks in ROWS}


def rows_of(name: str) -> list[list[str]]:
    """The rows of a README's comparison."""
    return rows((ROOT / name).read_text(encoding="utf-8"), HEADS[name])


def test_both_readmes_have_rows_of_the_page():
    english, chinese = rows_of("README.md"), rows_of("README_zh.md")
    assert {name: marks for name, *marks in english}.items() <= MARKS.items()
    assert [marks for _, *marks in english] == [marks for _, *marks in chinese]
    assert f"All {len(ROWS)} rows" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"全部 {len(ROWS)} 行" in (ROOT / "README_zh.md").read_text(encoding="utf-8")


def test_each_mark_of_this_project_names_where_it_ran():
    assert {mark for marks in MARKS.values() for mark in marks} == {"●", "◐", NO}
    evidence = rows(PAGES["comparison.md"], "## Evidence\n")
    assert len(evidence) == len(MARKS)
    ours = [marks for marks in MARKS.values() if marks[0] != NO]
    assert sum(bool(here) for _, here, _ in evidence) == len(ours)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/\S+)`", PAGES["comparison.md"]))))
def test_a_test_that_is_named_exists(path: str):
    assert (ROOT / path).exists()
