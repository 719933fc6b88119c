"""--save_minutes: a checkpoint by the clock, at the same step on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from tests.conftest import PACE, SHAPE, Launcher
from tests.train.clocks import use_clock
from tools.forking import Nursery

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "eval_rows": 0, "log_interval": 1},
    **{"deepspeed_config": "none", "max_steps": 8},
}


def events(out_dir: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def saved_steps(out_dir: Path) -> list[int]:
    return [event["step"] for event in events(out_dir, "checkpoint_saved")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("minutes", "interval", "steps"),
    [
        (1.0, 100, [3, 6, 8]),
        (1.0, 2, [2, 4, 6, 8]),  # each save restarts the clock
        (1.0, 5, [3, 5, 8]),
        (0.0, 100, [8]),
    ],
)
def test_a_run_saves_by_the_clock_or_by_steps_whichever_comes_first(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float,
    interval: int,
    steps: list[int],
):
    use_clock(monkeypatch.setattr, seconds_per_step=25)
    places = {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    cadence = {"save_minutes": minutes, "save_interval": interval}
    assert train({**FLAGS, **places, **cadence}, out_dir=str(tmp_path / "out")) == 0
    assert saved_steps(tmp_path / "out") == steps


def test_saving_by_the_clock_changes_no_loss(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_clock(monkeypatch.setattr, seconds_per_step=25)
    places = {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    for minutes in (0.0, 1.0):
        out = str(tmp_path / str(minutes))
        assert train({**FLAGS, **places}, save_minutes=minutes, out_dir=out) == 0
    without, by_clock = (
        [step["loss"] for step in events(tmp_path / name, "step")] for name in ("0.0", "1.0")
    )
    assert without == by_clock


def test_the_clock_of_rank_0_decides_for_both_ranks(
    nursery: Nursery, launch: Launcher, tmp_path: Path
):
    out = tmp_path / "out"
    words = f"{SHAPE} {PACE} --max_steps 8 --save_interval 100 --save_minutes 1".split()
    words += ["--data_path", str(launch.corpus), "--cache_dir", str(launch.cache)]
    words += ["--out_dir", str(out), "--deepspeed_config", "none"]
    statuses, _, err = nursery.run("tests.train.clocks", words, tmp_path / "ranks")
    assert statuses == [0, 0], err
    assert saved_steps(out) == [3, 6, 8]
