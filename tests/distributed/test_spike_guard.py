"""Two processes under DeepSpeed take the decisions of one without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from tests.conftest import Launcher

train: Any = training  # a package that is called like a function
# So low a factor that common steps are spikes, and the run goes back.
FLAGS: dict[str, Any] = {
    **{"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64},
    **{"vocab_size": 600, "max_steps": 96, "log_interval": 1, "device": "cpu"},
    **{"dtype": "float32", "learning_rate": 2e-3, "save_interval": 16, "keep_last": 9},
    **{"eval_rows": 0, "val_fraction": 0.05, "accumulation_steps": 1},
    **{"spike_window": 16, "spike_factor": 0.001, "max_rollbacks": 20},
}


def course(out_dir: Path) -> tuple[list[list[Any]], dict[int, float]]:
    """Decisions of the guard, with the row of the highest loss, and the loss by step."""
    decisions: list[list[Any]] = []
    losses: dict[int, float] = {}
    for text in (out_dir / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["event"] == "step":
            losses[line["step"]] = line["loss"]
        elif line["event"] in ("spike", "spike_skipped"):
            highest = [row["row"] for row in line["rows"]][:1]  # none for a checkpoint's last step
            decisions.append([line["event"], line["step"], *highest])
        elif line["event"] == "rolled_back":
            rows = Path(line["rows"]).read_text()
            decisions.append([line["event"], line["step"], line["to"], line["steps"], rows])
    return decisions, losses


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize(
    "more",
    [
        "--batch_size 4",
        "--batch_size 8 --tensor_parallel 2",
        "--batch_size 8 --sequence_parallel 2",
    ],
)
def test_two_ranks_decide_like_one_process(more: str, forked: Launcher, tmp_path: Path):
    words = " ".join(f"--{name} {value}" for name, value in FLAGS.items())
    run = forked.run(tmp_path / "two", f"{words} --spike_guard {more}")
    assert run.status == 0, run.stderr
    flags = {**FLAGS, "spike_guard": True, "batch_size": 8, "deepspeed_config": "none"}
    places = {"data_path": str(forked.corpus), "cache_dir": str(forked.cache)}
    assert train({**flags, **places}, out_dir=str(tmp_path / "one")) == 0
    decisions, curves = zip(*map(course, (tmp_path / "one", run.out_dir)), strict=True)
    assert "rolled_back" in [decision[0] for decision in decisions[0]]
    assert decisions[0] == decisions[1]
    assert curves[1] == pytest.approx(curves[0], rel=2e-6)
