"""A document that makes the loss spike is named with file and line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.recovery import spike_guard

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 8, "max_steps": 60, "warmup_steps": 5},
    **{"log_interval": 60, "eval_rows": 0, "device": "cpu", "dtype": "float32"},
    **{"learning_rate": 5e-3, "deepspeed_config": "none"},
    **{"spike_guard": True, "spike_window": 32, "spike_factor": 3.0},
}


@pytest.mark.parametrize("is_far", [False, True])
def test_a_planted_document_is_named_unless_it_is_far_into_its_file(
    is_far: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if is_far:
        monkeypatch.setattr(spike_guard, "MOST_BYTES", 1000)
    lines = corpus.read_text().splitlines(keepends=True)
    text = tmp_path / "planted.jsonl"
    odd = "".join(random.Random(0).choices("^~|{}@&%$#", k=1200))
    text.write_text("".join([*lines[:200], json.dumps({"text": odd}) + "\n", *lines[200:]]))
    places = {"data_path": str(text), "cache_dir": str(tmp_path / "cache")}
    assert train({**FLAGS, **places}, out_dir=str(tmp_path / "out")) == 0
    log = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    spikes = [event for event in map(json.loads, log) if event["event"].startswith("spike")]
    highest = max(spikes, key=lambda event: event["loss"] / event["loss_limit"])
    found = [(one["file"], one["line"]) for one in highest["rows"][0]["documents"]]
    assert ((str(text), 201) in found) == (not is_far)
    assert found[0] == (None, None) or not is_far
