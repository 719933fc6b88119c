"""Two processes, of which one is out of memory: the start script starts both with less at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT, Launcher
from tools.runs import events

# In the workers: rank 1 holds micro-batches of at most MOST rows.
CARD = """
import os

if "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
    import torch
    from minimind.engine.engine import Engine

    whole = Engine.step

    def step(self, rows, *args):
        if self.rank == 1 and len(rows[0]) > int(os.environ["MOST"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return whole(self, rows, *args)

    Engine.step = step
"""
STEP = "--global_batch_size 16 --dtype float32 --max_steps 4 --log_interval 1 --eval_rows 0"


@pytest.mark.long
@pytest.mark.parametrize(("config", "resume"), [("zero2", "auto"), ("none", "none")])
def test_both_processes_go_on_with_smaller_micro_batches(
    config: str, resume: str, launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = f"{STEP} --deepspeed_config {config} --resume {resume}"
    begun = launch.run(tmp_path / "begun", f"{flags} --batch_size 2")
    assert begun.status == 0, begun.stderr
    (tmp_path / "sitecustomize.py").write_text(CARD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("MOST", "2")
    found = launch.run(tmp_path / "found", f"{flags} --batch_size auto")
    assert found.status == 0, found.stderr
    assert found.stderr.count("error[E_MEMORY]") == 2
    logged = [*events(tmp_path / "found")]
    halved = [one["most_rows"] for one in logged if one["event"] == "micro_batch_halved"]
    assert halved == [4, 2]
    starts = [one for one in logged if one["event"] == "run_start"]
    assert [one["micro_batch_rows"] for one in starts] == [8, 4, 2]
    losses = [
        [one["loss"] for one in events(tmp_path / name) if one["event"] == "step"]
        for name in ("begun", "found")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    again = launch.run(tmp_path / "found", f"{flags} --resume auto --batch_size auto")
    assert again.status == 0, again.stderr
    *_, last = (one for one in events(tmp_path / "found") if one["event"] == "run_start")
    assert (last["step"], last["micro_batch_rows"]) == (4, 2)
