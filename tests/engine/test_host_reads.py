"""Nothing of ours waits for the device between two reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.report import run_logger
from tests.conftest import ROOT
from tests.train.terminal import Terminal
from tools.host_reads import counted

train: Any = training  # a package that is called like a function
BASE: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "accumulation_steps": 2, "device": "cpu"},
    **{"log_interval": 100, "eval_rows": 0, "save_interval": 100, "deepspeed_config": "none"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("profile", "at_terminal"), [(False, False), (True, False), (False, True)])
def test_a_step_without_deepspeed_reads_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: bool, at_terminal: bool
):
    if at_terminal:
        monkeypatch.setattr(sys, "stderr", Terminal())
        for name in (
            "REDRAW_INTERVAL",
            "MICRO_BATCH_INTERVAL",
        ):  # redrawn at every step and micro-batch
            monkeypatch.setattr(run_logger, name, 0.0)
    found: list[Counter[str]] = []
    for steps in (4, 10):
        places = {"data_path": [str(corpus)], "out_dir": str(tmp_path / str(steps))}
        with counted() as reads:
            train(
                **BASE,
                **places,
                cache_dir=str(tmp_path / "cache"),
                max_steps=steps,
                profile=profile,
            )
        found.append(reads)
    few, many = found
    assert few["minimind: check"] == 1  # whether a step was skipped: of all, at the report
    each_step = {place: (many[place] - few[place]) / 6 for place in many}
    assert not any(each_step.values()), each_step


@pytest.mark.long
@pytest.mark.launch
def test_under_deepspeed_only_it_reads(tmp_path: Path):
    out = tmp_path / "reads.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.host_reads", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    norm, overflow = "deepspeed: is_invalid_grad_norm", "deepspeed: has_overflow"
    for stage in (1, 2):
        assert found[f"stage {stage}, bfloat16"] == {norm: 1.0}
        assert found[f"stage {stage}, float32"] == {norm: 1.0}
    # Per step, not per micro-batch.
    assert found["stage 2, bfloat16, 4 micro-batches"] == {norm: 1.0}
    assert found["stage 2, bfloat16, no clipping"] == {norm: 1.0}
    assert found["stage 2, bfloat16, no norm"] == {overflow: 1.0}
    ours = {
        case: count
        for case, reads in found.items()
        for place, count in reads.items()
        if place.startswith("minimind")
    }
    # Where DeepSpeed does not look, and where it would read a number of each weight, we do.
    assert ours == {"stage 0, float32": 1.0, "stage 0, bfloat16": 1.0}
    assert sum(found["stage 0, bfloat16"].values()) == 1
    assert sum(found["stage 0, bfloat16, by DeepSpeed"].values()) > 20  # weights of the model


@pytest.mark.parametrize("way", ["item", "__bool__", "tolist", "numpy", "cpu", "nonzero"])
def test_every_way_to_wait_for_a_value_is_counted(way: str):
    with counted() as found:
        getattr(torch.ones(1), way)()
    assert sum(found.values()) == 1


def test_a_mask_as_an_index_waits_and_a_place_does_not():
    with counted() as found:
        x = torch.ones(3)
        _ = x[torch.tensor([0, 2])], x[1]
        assert not found
        x[x > 3] = 0.0
        assert not found
        _ = x[x > 0]
        x[x > 0] = torch.zeros(3)
    assert sum(found.values()) == 2
