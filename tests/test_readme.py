"""What README.md says against what is there: the packages, the flags, the make targets."""

import re
from collections import Counter
from pathlib import Path

from benchmarks.table import written
from minimind.config.run_config import FLAGS
from tests.packages import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README_zh.md").read_text(encoding="utf-8")


def test_the_tree_lists_every_package_and_nothing_that_is_not_there():
    packages = [*dict.fromkeys(name.split(".")[0] for name in PACKAGES)]
    for text, head in ((README, "## Where things are"), (CHINESE, "## 代码在哪里")):
        block = text.split(head)[1].split("```")[1]
        listed = re.findall(r"^  (\w+)/ ", block, re.MULTILINE)
        assert [*listed, "errors"] == packages  # in the order in which they may import
        assert [name for name in re.findall(r"^([\w.]+/?) ", block, re.MULTILINE)
                if not (ROOT / name).exists()] == []  # fmt: skip


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
    }  # of minimind generate, eval, export and report, and argparse
    for name in re.findall(r"--(?:no-)?([a-z][a-z_0-9]+)", README):
        assert name in FLAGS or name in beside, name


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+) ", README)) <= targets


def test_the_exit_statuses_are_the_errors_own():
    from minimind import errors

    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    known = {0, errors.PREEMPTED, *(k.status for k in kinds if issubclass(k, errors.RunError))}
    report = README.split("The exit status says how a run ended:")[1].split("run the same command")[
        0
    ]
    assert {int(n) for n in re.findall(r"\b(\d+) [a-z]", report)} <= known


def test_the_chinese_one_has_all_that_this_one_has():
    chinese = (ROOT / "README_zh.md").read_text(encoding="utf-8")
    assert chinese.count("\n## ") == README.count("\n## ")
    for pattern in (r"`(--[a-z_-]+)", r"\]\(([\w/.]+)\)", r"`(make [a-z-]+)`", r"^\|", r"^```"):
        counted = [Counter(re.findall(pattern, text, re.MULTILINE)) for text in (README, chinese)]
        assert not counted[0] - counted[1], pattern
    for block in README.split("```")[1::2]:
        for command in re.findall(r"^(?:bash|\.venv/bin/minimind) [^\"#\n]+", block, re.MULTILINE):
            assert command in chinese
    report = README.split("The exit status says")[1].split("run the same command")[0]
    assert re.findall(r"\d+", report) == re.findall(
        r"\d+", chinese.split("退出码说明")[1].split("请再次运行")[0]
    )


def test_the_table_of_speeds_is_that_of_the_newest_results():
    for name in ("README.md", "README_zh.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert written(text) == text
