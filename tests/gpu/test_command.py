"""`python -m tools.gpu --device cpu`: what a GPU is shown by, so that the command itself is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tools.gpu.parts import PARTS

pytestmark = [pytest.mark.launch, pytest.mark.long]


def ran(out: Path, *words: str) -> tuple[dict[str, Any], str]:
    """(results.json, what was printed) of the command, in which everything must hold."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu", "--device", "cpu", "--out", str(out), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-3000:]
    found = json.loads((out / "results.json").read_text())
    for name, part in found["parts"].items():
        assert part["status"] == "passed"
        assert f"== {name}: passed, " in done.stdout
        assert f"## {name}: passed" in (out / "results.md").read_text()
    return found, done.stdout


def test_kernels(tmp_path: Path):
    found, output = ran(tmp_path, "--parts", "kernels")
    assert [*found["parts"]] == ["kernels"]
    assert "flash_attention_for_cpu" in output


def test_the_whole_command(tmp_path: Path):
    found, _ = ran(tmp_path)
    assert [*found["parts"]] == [*PARTS]
    losses = found["parts"]["losses"]
    compared = [row for row in losses["findings"] if row["is_right"]]
    assert {row["what"].split(",")[0] for row in compared} == {
        "no DeepSpeed",
        *(f"ZeRO-{stage}" for stage in range(4)),
    }
    assert losses["not_run"] == {"ZeRO-2, float16": "float16 is for CUDA"}
