"""README.md against what is there: flags, files, make targets; the list of packages, the speeds."""

import re
from collections import Counter
from pathlib import Path

from benchmarks.table import PAGE, written
from minimind.config.flags import FLAGS
from tests.packages import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README_zh.md").read_text(encoding="utf-8")


def test_it_is_read_in_a_minute():
    for text in (README, CHINESE):
        assert text.count("\n") <= 90


def test_the_design_lists_every_package_in_the_order_of_imports():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = design.split("## Packages")[1].split("```")[1]
    listed = re.findall(r"^(\w+) ", block, re.MULTILINE)
    assert listed == [*dict.fromkeys(name.split(".")[0] for name in PACKAGES)]


def test_every_flag_named_exists():
    beside = {
        "help",
        "checkpoint",
        "data",
        "prompt",
        "format",
        "out",
        "hours",
        "watch",
    }  # of minimind generate, eval, export, report and init, and argparse
    for name in re.findall(r"--(?:no-)?([a-z][a-z_0-9]+)", README):
        assert name in FLAGS or name in beside, name


def test_every_file_linked_exists():
    for text in (README, CHINESE):
        paths = re.findall(r"\]\(([\w/.]+)\)", text)
        assert len(paths) > 15
        assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)[ `]", README))
    assert len(named) > 4
    assert named <= targets


def test_the_chinese_one_has_all_that_this_one_has():
    assert CHINESE.count("\n## ") == README.count("\n## ")
    for pattern in (r"`(--[a-z_-]+)", r"\]\(([\w/.]+)\)", r"`(make [a-z-]+)`", r"^\|", r"^```"):
        texts = (text.replace("_zh.md", ".md") for text in (README, CHINESE))  # the same page
        counted = [Counter(re.findall(pattern, text, re.MULTILINE)) for text in texts]
        assert not counted[0] - counted[1], pattern
    blocks = "\n".join(README.split("```")[1::2])
    pattern = r"(?:\bbash|\.venv/bin/minimind|^make) [^\"#\n]+"
    commands = re.findall(pattern, blocks, re.MULTILINE)
    assert len(commands) > 5
    assert not [command for command in commands if command not in CHINESE]


def test_the_table_of_speeds_is_that_of_the_newest_results():
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text
