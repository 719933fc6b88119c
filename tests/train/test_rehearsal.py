"""What is known of a run before its start is what the run then trains."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import minimind.train as training
from minimind.config.parse import build_config
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.errors import DataError, UsageError
from minimind.train.start import Plan, rehearse
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"device": "cpu", "deepspeed_config": "none", "dtype": "float32", "log_interval": 1},
}
NAMES = ("vocab_size", "batch_size", "accumulation_steps", "learning_rate", "warmup_steps")


def rehearsed(**flags: Any) -> Plan:
    return rehearse(build_config(flags, "--{name}"))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 1000.0, "batch_size": 3},
        {"max_tokens": 1000.0},
        {"tokens_per_param": 0.1, "split_batches": True, "batch_size": 4},
        {"max_flops": 1e8, "accumulation_steps": 2},
        {"max_steps": 3, "batch_size": 2},
        {"epochs": 2, "batch_size": 16, "max_seq_len": 255},
        {"max_tokens": 2000.0, "stages": "STAGES", "batch_size": 4},
    ],
)
@pytest.mark.sample(3)
def test_the_tokens_and_the_numbers_are_those_that_the_run_has(
    prepared: Path, tmp_path: Path, changes: dict[str, Any]
):
    flags = {**FLAGS, "cache_dir": str(tmp_path / "cache"), **changes}
    if "stages" in flags:
        stages = tmp_path / "stages.yaml"
        own = [{"until": 500, "max_seq_len": 16, "batch_size": 7}, {"name": "rest"}]
        stages.write_text(yaml.safe_dump({"sources": {"a": str(prepared)}, "stages": own}))
        flags["stages"] = str(stages)
    else:
        flags["data_path"] = [str(prepared)]
    found = rehearsed(**flags)
    out_dir = tmp_path / "out"
    assert train(flags, out_dir=str(out_dir)) == 0
    assert found.tokens == events(out_dir, "step")[-1]["tokens"]
    configuration = yaml.safe_load((out_dir / "config.yaml").read_text())
    assert {name: getattr(found.run, name) for name in NAMES} == {
        name: configuration[name] for name in NAMES
    }


def test_the_length_of_a_run_over_raw_text_is_known_by_its_budget_only(corpus: Path):
    flags = {**FLAGS, "data_path": [str(corpus)], "vocab_size": 600, "batch_size": 4}
    assert (rehearsed(**flags).tokens, rehearsed(**flags).held_out) == (None, None)
    assert rehearsed(**flags, max_tokens=1000.0).tokens == 7 * 128


def test_a_checkpoint_in_the_default_folder_decides_nothing(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    flags = {**FLAGS, "data_path": [str(prepared)], "max_tokens": 2000.0}
    before = rehearsed(**flags)
    own = {"max_steps": 1, "max_tokens": None, "batch_size": 4}  # by the rule it is 16
    assert train(flags, out_dir=before.run.out_dir, **own) == 0
    after = rehearsed(**flags)
    assert (after.run, after.tokens) == (before.run, before.tokens)


def test_the_environment_stays_as_it_is(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    file = str(DEFAULT_DEEPSPEED_CONFIG)
    flags = {**FLAGS, "data_path": [str(prepared)], "max_tokens": 2000.0, "deepspeed_config": file}
    before = dict(os.environ)
    assert rehearsed(**flags).run.accumulation_steps == 2
    assert dict(os.environ) == before


def test_what_the_start_refuses_is_refused(prepared: Path, tmp_path: Path):
    flags = {**FLAGS, "data_path": [str(prepared)], "max_tokens": 1000.0}
    with pytest.raises(UsageError, match="is 1,000 tokens, less than the 1,280 of one step"):
        rehearsed(**flags, batch_size=40)
    with pytest.raises(UsageError, match=r"vocab_size = 700 .* has 600; remove one of them"):
        rehearsed(**flags, vocab_size=700)
    with pytest.raises(UsageError, match=r"warmup_steps = 100000 .* more than the .* of the whole"):
        rehearsed(**{**flags, "max_tokens": None, "epochs": 1}, warmup_steps=100_000)
    flags = {**flags, "max_tokens": 1e9}
    with pytest.raises(DataError, match="fewer than the 100,000 of one step") as caught:
        rehearsed(**flags, batch_size=100_000)
    advised = re.search(r"give --batch_size (\d+), or add text", str(caught.value))
    assert advised
    assert int(advised[1]) > 1
    rehearsed(**flags, batch_size=int(advised[1]))
    with pytest.raises(DataError, match="fewer than the"):
        rehearsed(**flags, batch_size=int(advised[1]) + 1)
    with pytest.raises(DataError, match="lower --batch_size, --accumulation_steps or --max_seq"):
        rehearsed(**flags, batch_size=1, accumulation_steps=100_000)
