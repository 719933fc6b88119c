"""--keep_best and --keep_every in real runs, also killed between a save and its validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, step_of
from minimind.checkpoint.retention import kept, rules_of_run, saved_in, saved_of
from minimind.checkpoint.saver import Saver
from minimind.report.run_logger import RunLogger
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "log_interval": 1, "eval_rows": 8},
    **{"deepspeed_config": "none", "max_steps": 12, "save_minutes": 0, "val_fraction": 0.1},
    **{"save_interval": 1, "eval_interval": 2, "keep_last": 1, "keep_every": 5, "keep_best": 2},
    # So high that the loss rises again: the best is not the last.
    **{"learning_rate": 0.3, "schedule": "constant", "warmup_steps": 0},
}


def steps(out_dir: Path) -> list[int]:
    return [step_of(path) for path in published_checkpoints(out_dir / "checkpoints")]


@pytest.fixture(scope="module")
def flags(cached: dict[str, Any]) -> dict[str, Any]:
    return {**FLAGS, **cached}


@pytest.fixture(scope="module")
def unbroken(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("unbroken")
    assert train(flags, out_dir=str(out_dir)) == 0
    return out_dir


def test_the_best_and_every_fifth_are_kept_beside_the_last(unbroken: Path):
    losses = {event["step"]: event["val_loss"] for event in events(unbroken, "eval")}
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert steps(unbroken) == sorted({12, 10, 5, *best}, reverse=True)
    for path in published_checkpoints(unbroken / "checkpoints"):
        assert saved_of(path).val_loss == losses.get(step_of(path))
    rules = rules_of_run(unbroken)
    assert rules
    assert all(kept(saved_in(unbroken / "checkpoints"), rules).values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [2, 4, 8])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_at_a_validation_the_same_ones_are_kept(
    step: int,
    moment: str,
    unbroken: Path,
    flags: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Killed before the validation, or after it was logged and before it was recorded."""
    out_dir, log, validated = tmp_path / "out", RunLogger.event, Saver.validated

    def event(self: RunLogger, name: str, **fields: Any) -> None:
        if (moment, name, fields.get("step")) == ("before", "eval", step):
            raise InterruptedError
        log(self, name, **fields)

    def recorded(self: Saver, at: int, val_loss: float) -> None:
        if (moment, at) == ("after", step):
            raise InterruptedError
        validated(self, at, val_loss)

    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "event", event)
        patch.setattr(Saver, "validated", recorded)
        with pytest.raises(InterruptedError):
            train(flags, out_dir=str(out_dir), async_save=False)
    assert train(flags, out_dir=str(out_dir)) == 0
    assert steps(out_dir) == steps(unbroken)
    one, other = (saved_in(place / "checkpoints") for place in (out_dir, unbroken))
    assert one == other
    curves = (
        {e["step"]: e["loss"] for e in events(place, "step")} for place in (out_dir, unbroken)
    )
    assert next(curves) == next(curves)
