"""The comparison of both READMEs has the same marks, and names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.docs.pages import PAGES, rows

NO = "\N{EN DASH}"
HEADS = {"README.md": "## Comparison\n", "README_zh.md": "## 与其他项目相比\n"}


def marks(name: str) -> list[list[str]]:
    """The marks of each row of a README's comparison."""
    found = rows((ROOT / name).read_text(encoding="utf-8"), HEADS[name])
    return [cells[1:] for cells in found]


def test_both_languages_have_the_same_marks():
    assert marks("README.md") == marks("README_zh.md")
    assert {mark for cells in marks("README.md") for mark in cells} == {"●", "◐", NO}


def test_each_mark_of_this_project_names_where_it_ran():
    ours = [cells for cells in marks("README.md") if cells[0] != NO]
    assert len(rows(PAGES["comparison.md"], "## What was run here\n")) == len(ours)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/\S+)`", PAGES["comparison.md"]))))
def test_a_test_that_is_named_exists(path: str):
    assert (ROOT / path).is_file()
