"""examples/README.md and docs/coming_from.md name tests, files and flags: each of them is there."""

from __future__ import annotations

import importlib
import re

import pytest

from minimind.config.flags import FLAGS
from tests.conftest import ROOT

EXAMPLES = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
WHERE = EXAMPLES.split("## What is where")[1].split("\n## ")[0]
TUTORIALS = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
PAGE = EXAMPLES + TUTORIALS.split("## From tutorials on Accelerate")[1]
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
DEFINED: dict[str, set[str]] = {}  # the files of tests, by the name of the test
for path in (ROOT / "tests").rglob("test_*.py"):
    for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
        DEFINED.setdefault(name, set()).add(path.stem)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_tests_that_exist_and_at_least_one(row: str):
    named = set(re.findall(r"`(test_\w+)`", row.rsplit(" | ", 1)[1]))
    assert named
    assert named <= DEFINED.keys()


@pytest.mark.parametrize("row", [row for row in ROWS if row in WHERE and "`examples/" in row])
def test_a_capability_is_shown_by_a_test_of_the_example_that_has_it(row: str):
    _, where, tests = row.split(" | ")
    examples = set(re.findall(r"examples/(\w+)\.", where))
    files = set().union(*(DEFINED[name] for name in re.findall(r"`(test_\w+)`", tests)))
    assert {f"test_{name}" for name in examples} <= files or files == {"test_tables"}


def test_every_path_named_is_there():
    paths = re.findall(r"(?:examples|configs|minimind)/[\w./]+\w", PAGE)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_example_is_in_the_tables():
    scripts = {path.name for path in (ROOT / "examples").glob("[!_]*.*")}
    shown = {name for name in scripts if f"examples/{name}" in PAGE}
    assert scripts - shown == {
        "stdlib_corpus.py",
        "stdlib_text.py",
        "stdlib_conversations.py",
        "load_export.py",
        "ray_train.py",
        "skypilot.yaml",
        "tour.ipynb",  # beside docs/tour.md
    }


def test_flags_beside_an_example_are_its_own_and_the_others_the_trainers():
    for row in (row for row in ROWS if row in WHERE):
        for cell in re.findall(r"`([^`]*--[^`]*)`", row.split(" | ")[1]):
            script, *flags = cell.split(" ") if cell.startswith("examples/") else ["", cell]
            text = (ROOT / script).read_text(encoding="utf-8") if script else ""
            for name in re.findall(r"--([a-z_]+)", " ".join(flags)):
                assert f'"--{name}"' in text if script else name in {*FLAGS, "help"}, (row, name)


def test_every_example_can_be_imported_without_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(ROOT / "examples")
    for path in (ROOT / "examples").glob("[!_]*.py"):
        module = importlib.import_module(path.stem)
        if path.stem != "stdlib_text":  # which the others read
            assert callable(module.main)
            assert path.read_text(encoding="utf-8").count('\nif __name__ == "__main__":\n') == 1
    assert capsys.readouterr().out == ""
