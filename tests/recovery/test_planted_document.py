"""The row of a document that makes the loss spike is named."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.cli.main import main
from minimind.engine.engine import Engine
from minimind.errors import NumericError

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 8, "max_steps": 60, "warmup_steps": 5},
    **{"log_interval": 60, "eval_rows": 0, "device": "cpu", "dtype": "float32"},
    **{"learning_rate": 5e-3, "deepspeed_config": "none"},
    **{"spike_guard": True, "spike_window": 32, "spike_factor": 3.0},
}


def spikes_of(out_dir: Path) -> list[dict[str, Any]]:
    lines = (out_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"].startswith("spike")]


def test_the_row_of_a_planted_document_is_named(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = corpus.read_text().splitlines(keepends=True)
    text = tmp_path / "planted.jsonl"
    odd = "".join(random.Random(0).choices("^~|{}@&%$#", k=1200))
    text.write_text("".join([*lines[:200], json.dumps({"text": odd}) + "\n", *lines[200:]]))
    places = {"data_path": str(text), "cache_dir": str(tmp_path / "cache")}
    assert train({**FLAGS, **places}, out_dir=str(tmp_path / "out")) == 0
    spikes = spikes_of(tmp_path / "out")
    highest = max(spikes, key=lambda event: event["loss"] / event["loss_limit"])
    (row, *_) = highest["rows"]
    assert highest["row_loss"] == row["loss"] > highest["row_limit"]
    assert f" in row {row['row']}; `minimind data at` shows it" in capsys.readouterr().out
    words = ["data", "at", str(tmp_path / "out"), "--step", str(highest["step"]), "--json"]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    (found,) = (one for one in shown if one["row"] == row["row"])
    assert 201 in [part["line"] for part in found["parts"]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["weights", "norm", "not finite"])
def test_no_row_is_named_where_usual_rows_have_such_losses(
    case: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    step_of, at = Engine.step, 40

    def step(self: Engine, *given: Any) -> Any:
        found = step_of(self, *given)
        steps.append(found)
        if len(steps) != at:
            return found
        if case == "norm":  # of a clean step at its usual loss
            return replace(found, grad_norm=100 * float(found.grad_norm or 0))
        bad = 40.0 if case == "weights" else float("nan")
        for weight in self.model.parameters():  # as an update that goes wrong leaves them
            weight.data.mul_(bad)
        return found

    steps: list[Any] = []
    monkeypatch.setattr(Engine, "step", step)
    places = {"data_path": str(corpus), "cache_dir": str(tmp_path / "cache"), "max_steps": 44}
    flags = {**FLAGS, **places, "spike_factor": 8.0, "max_skipped": 9, "accumulation_steps": 2}
    ending = pytest.raises(NumericError) if case == "not finite" else nullcontext()
    with ending:  # such weights are not saved
        assert train(flags, out_dir=str(tmp_path / "out")) == 0
    spikes = spikes_of(tmp_path / "out")
    assert at + (case != "norm") in [event["step"] for event in spikes]
    assert all(event["rows"] == [] for event in spikes)
    out = capsys.readouterr().out
    assert out.count("no row stands out") == len(spikes)
    assert str(corpus) not in out.split("start ")[1]
