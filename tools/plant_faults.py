"""Plant small mistakes in a copy of the package, one at a time, and see if the tests find them.

    python -m tools.plant_faults [--before] [--only WORDS ...]

The mistakes are the rows of `plant_faults.yaml`. They are planted in the last commit, or with
--before in the commit that its comment names, with the tests of that commit. A mistake is found if
a test fails with it; in the end these tests run without it. The status is 1 if a mistake is not
found or does not apply, or if such a test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tools.revisions import ROOT, unpack

BEFORE = "020674ce"
FOUND, MISSED, UNFIT, BROKEN = "found", "NOT FOUND", "DOES NOT APPLY", "NO TEST RAN"


def rows(is_before: bool) -> list[dict[str, Any]]:
    """The mistakes as they read in the commit; without those that it has no code for."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    listed = yaml.safe_load(text)
    if not is_before:
        return listed
    return [row | row.get("before", {}) for row in listed if row.get("before", {}) is not None]


def failures(tree: Path, paths: list[str], *options: str) -> tuple[bool, list[str]]:
    """Whether the tests pass in a tree, and those that fail; empty if none could run."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *options, *paths],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode == 0, failed


def plant(tree: Path, row: dict[str, Any]) -> tuple[str, str]:
    """Plant a mistake in a tree, run its tests, and take it back; return what came of it."""
    file = tree / "minimind" / row["file"]
    text = file.read_text(encoding="utf-8")
    if text.count(row["old"]) != 1:
        return UNFIT, row["file"]
    paths = [f"tests/{path}" for path in row["tests"].split()]
    paths = [path for path in paths if (tree / path).exists()]
    file.write_text(text.replace(row["old"], row["new"]), encoding="utf-8")
    try:
        passed, failed = failures(tree, paths, "-x")
    finally:
        file.write_text(text, encoding="utf-8")
    if passed:
        return MISSED, row["tests"]
    return (FOUND, failed[0]) if failed else (BROKEN, row["tests"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="rows with any of these in them")
    given = parser.parse_args()
    counts: dict[str, int] = dict.fromkeys((FOUND, MISSED, UNFIT, BROKEN), 0)
    with tempfile.TemporaryDirectory() as made:
        tree = unpack(BEFORE if given.before else "HEAD", Path(made))
        (tree / ".venv").symlink_to(ROOT / ".venv")
        found = []
        for row in rows(given.before):
            if given.only and not any(words in row["name"] for words in given.only):
                continue
            result, by = plant(tree, row)
            counts[result] += 1
            found += [by.partition("[")[0]] if result == FOUND else []  # ids may be cut at a blank
            print(f"{result:<16} {row['name']}\n                 {by}", flush=True)
        passed, broken = failures(tree, found) if found else (True, [])
    if not passed:
        print(f"tests that fail without a mistake, too: {' '.join(broken)}")
    print(", ".join(f"{count} {result.lower()}" for result, count in counts.items()))
    return int(not passed or counts[FOUND] < sum(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
