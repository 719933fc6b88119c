"""100,000 documents are filtered in the memory of 10,000 and a few bytes a document."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from minimind.config.run_config import PROJECT
from tests.data.quality.test_rules import words

FEW, MANY = 10_000, 100_000
# Tasks are bounded; what grows are the lists of what is removed, and clusters of --minhash.
BYTES_PER_DOCUMENT = {"": 220, "--minhash": 300}
PEAK = """
import sys
from minimind.cli.main import main
from minimind.runtime.environment import peak_bytes
assert main(sys.argv[1:]) == 0
print(peak_bytes())
"""


def a_text(path: Path, documents: int) -> Path:
    """Of the documents every tenth one repeats the one before it."""
    rng, text = random.Random(0), ""
    known = words(rng, 5000)
    with path.open("w") as file:
        for number in range(documents):
            if number % 10 < 9:
                text = " ".join([*rng.choices(known, k=60), "the", "of", "and."])
            file.write(json.dumps({"url": f"https://x.org/{number}", "text": text}) + "\n")
    return path


def peak(out: Path, text: Path, *flags: str) -> int:
    """Bytes of memory that a process takes at most for the filters."""
    given = ["data", "filter", str(text), "--out", str(out), "--exact_dedup", *flags]
    command = [sys.executable, "-c", PEAK, *given, "--rules", "gopher", "--rules_words", "plain"]
    environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    report = json.loads((out / "report.json").read_text())
    read = report["read"]["documents"]
    assert report["removed"]["exact_duplicate"]["documents"] == read // 10
    assert report["kept"]["documents"] > 0.8 * read
    return int(done.stdout.split()[-1])


@pytest.mark.long
@pytest.mark.parametrize("step", [*BYTES_PER_DOCUMENT])
def test_memory_grows_by_a_few_bytes_a_document(step: str, tmp_path: Path):
    few, many = (
        peak(tmp_path / str(count), a_text(tmp_path / f"{count}.jsonl", count), *step.split())
        for count in (FEW, MANY)
    )
    assert many < few + BYTES_PER_DOCUMENT[step] * (MANY - FEW)
