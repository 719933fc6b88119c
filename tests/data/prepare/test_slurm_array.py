"""scripts/prepare.sbatch with a stand-in for sbatch, which runs what it is given at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minimind.cli.main import main
from tests.conftest import ROOT, sentences

# Each job of an array in turn; the id of the first array is 71, as `71;cluster`.
SBATCH = r"""#!/bin/bash
echo "$*" >>"$CALLS"
array=""
while [[ $1 == --* ]]; do
  case $1 in --array=*) array=${1#--array=0-} ;; esac
  shift
done
if [[ -n $array ]]; then
  for ((n = array; n >= 0; n--)); do
    SLURM_ARRAY_TASK_ID=$n SLURM_ARRAY_TASK_COUNT=1 bash "$@" >>"$CALLS.out" 2>&1 || exit
  done
  echo "71;cluster"
else
  bash "$@" >>"$CALLS.out" 2>&1 || exit
  echo 72
fi
"""


def submit(folder: Path, *words: str, shares: str = "3") -> subprocess.CompletedProcess[str]:
    stub = folder / "sbatch"
    stub.write_text(SBATCH)
    stub.chmod(0o755)
    (folder / "minimind.py").write_text("raise SystemExit('another checkout')")
    given = {"SHARES": shares, "PYTHON": sys.executable, "CALLS": str(folder / "calls")}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "prepare.sbatch"), *words],
        env={**os.environ, **given, "PATH": path, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.launch
def test_the_array_and_its_merge_write_the_folder_of_one_process(tmp_path: Path):
    text = tmp_path / "my text.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(1, 400)))
    words = ["prepare", str(text), "--vocab_size", "512", "--shard_bytes", "30000"]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    done = submit(tmp_path, *words[1:], "--out", str(tmp_path / "array"), shares="2")
    assert done.returncode == 0, done.stderr + (tmp_path / "calls.out").read_text()
    jobs = f"jobs 71 encode 2 shares, then job 72 merges them into {tmp_path / 'array'}\n"
    assert done.stdout == jobs
    array, merge = (tmp_path / "calls").read_text().splitlines()
    assert array.startswith("--parsable --array=0-1 ")
    assert merge.startswith("--parsable --dependency=afterok:71 ")
    shards = [
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*-0*")}
        for name in ("one", "array")
    ]
    assert shards[0] == shards[1]
    assert len(shards[0]) > 8


@pytest.mark.parametrize(
    ("words", "shares", "report"),
    [(["t.txt"], "2", "no --out DIR in: t.txt"), (["--out", "x"], "0", "SHARES=0 is no number")],
)
def test_nothing_is_submitted_without_a_folder_or_jobs(
    words: list[str], shares: str, report: str, tmp_path: Path
):
    done = submit(tmp_path, *words, shares=shares)
    assert done.returncode == 2
    assert report in done.stderr
    assert not (tmp_path / "calls").exists()
