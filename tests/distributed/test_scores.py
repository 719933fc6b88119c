"""Scores of runs on two ranks: those of any number of ranks, and no bit of the training changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minimind.config.tasks import OWN_TASKS
from tests.conftest import ROOT, Launcher, Run
from tests.distributed.conftest import FP32
from tools.runs import config_of_stage

# Each takes a minute; tests/train/test_scores.py has the batches of any number of ranks.
pytestmark = [pytest.mark.launch, pytest.mark.long]
TASKS = [*OWN_TASKS, str(ROOT / "examples" / "lm_eval" / "python_code")]
SCORED = f"--eval_tasks {','.join(TASKS)} --eval_tasks_interval 9 --eval_tasks_limit 10"


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))
        patch.chdir(ROOT)
        yield


def asked_again(checkpoint: Path, processes: int) -> dict[str, Any]:
    words = ["eval", "--checkpoint", str(checkpoint), "--device", "cpu", "--limit", "10", "--json"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={processes}", "-m", "minimind", *words, "--tasks", *TASKS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["tasks"]


def test_zero_2_stopped_and_resumed_scores_as_one_process(
    fp32: Run, launch: Launcher, tmp_path: Path
):
    flags = f"{FP32} --save_interval 9 --keep_last 3 {SCORED}"
    stopped = launch.run(tmp_path / "out", f"{flags} --stop_at_step 9")
    assert stopped.status == 75, stopped.stderr
    run = launch.run(tmp_path / "out", flags)
    assert run.status == 0, run.stderr
    assert run.curve() == fp32.curve()
    scores = {event["step"]: event["tasks"] for event in run.events("scores")}
    assert [*scores] == [9, 18, 20]
    for processes in (1, 2):
        checkpoint = tmp_path / "out" / "checkpoints" / "step_00000018"
        assert asked_again(checkpoint, processes) == scores[18]


def test_zero_3_scores_with_collective_forward_passes(launch: Launcher, tmp_path: Path, fp32: Run):
    config = config_of_stage(3, tmp_path)
    flags = f"{FP32} --deepspeed_config {config} --save_interval 9 {SCORED}"
    run = launch.run(tmp_path / "out", flags)
    assert run.status == 0, run.stderr
    assert run.losses() == pytest.approx(fp32.losses(), rel=1e-6)
    scores = {event["step"]: event["tasks"] for event in run.events("scores")}
    assert asked_again(tmp_path / "out" / "checkpoints" / "step_00000020", 1) == scores[20]
