"""Intervals of one pass over the text, and the validation before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, step_of
from minimind.config.checks import with_epoch
from minimind.config.parse import parse_flags
from minimind.errors import UsageError
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 128},
    **{"vocab_size": 600, "batch_size": 8, "device": "cpu", "log_interval": 1, "eval_rows": 4},
    **{"deepspeed_config": "none", "epochs": 3, "save_minutes": 0, "val_fraction": 0.1},
    **{"save_interval": "epoch", "eval_interval": "epoch", "keep_last": 9, "keep_best": 1},
    **{"eval_at_start": True, "dtype": "float32"},
}


def steps_of(out_dir: Path, name: str) -> list[int]:
    return [event["step"] for event in events(out_dir, name)]


def test_a_run_validates_at_its_start_and_after_every_pass_also_resumed(
    cached: dict[str, Any], tmp_path: Path
):
    out_dir = tmp_path / "out"
    flags = {**FLAGS, **cached, "out_dir": str(out_dir)}
    assert train(flags, stop_at_step=3) == 75
    (start,) = events(out_dir, "run_start")
    one = start["steps_per_epoch"]
    assert one * flags["batch_size"] <= start["rows_per_epoch"] < (one + 1) * flags["batch_size"]
    assert start["total_steps"] == 3 * one > 9
    assert train(flags) == 0
    assert steps_of(out_dir, "eval") == [0, one, 2 * one, 3 * one]
    saved = sorted(step_of(path) for path in published_checkpoints(out_dir / "checkpoints"))
    assert saved == [3, one, 2 * one, 3 * one]
    recorded = yaml.safe_load((out_dir / "config.yaml").read_text())
    assert recorded["save_interval"] == recorded["eval_interval"] == one


def test_intervals_of_epochs_are_compared_with_others_once_they_are_counted():
    run = parse_flags(["--keep_best", "1", "--save_interval", "epoch", "--eval_interval", "6"])
    assert run.per_epoch == ["save_interval"]
    assert with_epoch(run, 12).save_interval == 12
    with pytest.raises(UsageError, match=r"save_interval = 8 .* meet only every 24 steps"):
        with_epoch(run, 8)
