"""Chinese pages have a paragraph on one line: a break is shown as a space between characters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = sorted([*ROOT.glob("*_zh.md"), *(ROOT / "docs").glob("*_zh.md")])
# What begins a block, or is one by itself: a heading, a table's row, a comment, a picture, a list.
BEGINS = re.compile(r"\s*(#+ |\||<|!\[|[-*+] |\d+\. |>|:::|!!!)")
ALONE = re.compile(r"\s*(#+ |\||<!--|<|!\[)")


def hard_breaks(text: str) -> Iterator[str]:
    """Each line of prose that goes on with the paragraph or list item of the line before it."""
    before, is_code = "", False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            before, is_code = "", not is_code
            continue
        if is_code:
            continue
        if before.strip() and line.strip() and not BEGINS.match(line) and not ALONE.match(before):
            yield line
        before = line


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_paragraph_or_list_item_is_broken_over_lines(path: Path):
    assert list(hard_breaks(path.read_text(encoding="utf-8"))) == []


def test_a_break_is_found_in_a_paragraph_and_in_a_list_item_alone():
    assert len(PAGES) >= 3
    whole = "# 题\n一段。\n\n- 甲\n- 乙\n\n| a |\n|---|\n| 丙 |\n\n```\n两\n行\n```\n"
    assert list(hard_breaks(whole)) == []
    assert list(hard_breaks("一段\n两行\n\n- 甲\n  乙\n- 丙")) == ["两行", "  乙"]
