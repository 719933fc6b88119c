"""Fine-tuning on two processes under ZeRO-2 is that on one, and goes on there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from tests.forking import Nursery
from tests.train.test_fine_tuning import BASE, conversations, write

train: Any = training  # a package that is called like a function
pytestmark = pytest.mark.launch
STEPS = 12


def losses(out_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def test_two_ranks_train_and_one_goes_on(nursery: Nursery, corpus: Path, tmp_path: Path):
    cache = str(tmp_path / "cache")
    base = {**BASE, "data_path": str(corpus), "cache_dir": cache, "max_steps": 3}
    assert train(base, out_dir=str(tmp_path / "base")) == 0
    talk = write(tmp_path / "talk.jsonl", conversations(300, seed=5))
    flags = {"task": "sft", "init_from": str(tmp_path / "base"), "data_path": str(talk)}
    flags |= {"cache_dir": cache, "device": "cpu", "dtype": "float32", "log_interval": 1}
    flags |= {"learning_rate": 5e-3, "max_steps": STEPS, "val_fraction": 0.05, "eval_rows": 8}
    one = {**flags, "batch_size": 4, "accumulation_steps": 2, "deepspeed_config": "none"}
    assert train(one, out_dir=str(tmp_path / "one")) == 0
    whole = losses(tmp_path / "one")
    assert len(whole) == STEPS

    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--deepspeed_config", str(DEFAULT_DEEPSPEED_CONFIG), "--batch_size", "2"]
    words += ["--accumulation_steps", "2", "--out_dir", str(tmp_path / "two")]
    stop = [*words, "--stop_at_step", "6"]
    statuses, _, text = nursery.run("train_pretrain", stop, tmp_path / "two")
    assert statuses == [75, 75], text
    assert losses(tmp_path / "two") == pytest.approx(
        {step: loss for step, loss in whole.items() if step <= 6}, rel=2e-6
    )
    assert train(one, out_dir=str(tmp_path / "two")) == 0
    assert losses(tmp_path / "two") == pytest.approx(whole, rel=2e-6)
