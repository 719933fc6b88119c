"""Two processes under DeepSpeed take the decisions of one without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from tests.conftest import SHAPE, Launcher

train: Any = training  # a package that is called like a function
# So low a factor that common steps are spikes, and the run goes back.
FLAGS = (
    f"{SHAPE} --max_steps 48 --log_interval 1 --device cpu --dtype float32 --learning_rate 2e-3"
    " --save_interval 8 --keep_last 9 --eval_rows 0 --val_fraction 0.05 --accumulation_steps 1"
    " --spike_guard --spike_window 16 --spike_factor 0.2 --max_rollbacks 20"
)


def course(out_dir: Path) -> tuple[list[list[Any]], dict[int, float]]:
    """Decisions of the guard, with the row of the highest loss, and the loss by step."""
    decisions: list[list[Any]] = []
    losses: dict[int, float] = {}
    for text in (out_dir / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["event"] == "step":
            losses[line["step"]] = line["loss"]
        elif line["event"] in ("spike", "spike_skipped"):
            decisions.append([line["event"], line["step"], line["rows"][0]["row"]])
        elif line["event"] == "rolled_back":
            decisions.append([line["event"], line["step"], line["to"], line["steps"], line["rows"]])
    return decisions, losses


@pytest.mark.launch
def test_two_ranks_decide_like_one_process(launch: Launcher, tmp_path: Path):
    run = launch.run(tmp_path / "two", f"{FLAGS} --batch_size 4")
    assert run.status == 0, run.stderr
    words = f"{FLAGS} --batch_size 8 --deepspeed_config none --data_path {launch.corpus}".split()
    places = ["--cache_dir", str(launch.cache), "--out_dir", str(tmp_path / "one")]
    from minimind.launch.train_pretrain import main

    assert main([*words, *places]) == 0
    decisions, curves = zip(*map(course, (tmp_path / "one", run.out_dir)), strict=True)
    assert "rolled_back" in [decision[0] for decision in decisions[0]]
    assert decisions[0] == decisions[1]
    assert curves[1] == pytest.approx(curves[0], rel=2e-6)
