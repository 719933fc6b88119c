"""Runs of one process with --verify_interval, in which bits flip."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import minimind.recovery.corruption as checking
import minimind.train as training
from minimind.config.parse import parse_flags
from minimind.engine.engine import Engine
from minimind.errors import CorruptionError
from minimind.recovery.corruption import CorruptionCheck
from minimind.report.figures import Summary
from minimind.report.history import read_runs

train: Any = training  # a package that is called like a function
BASE: dict[str, Any] = {
    **{"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 12, "max_steps": 12, "log_interval": 1, "eval_rows": 0},
    **{"device": "cpu", "dtype": "bfloat16", "learning_rate": 5e-3, "save_interval": 4},
    **{"save_minutes": 0, "deepspeed_config": "none"},
}


def events(out_dir: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


@pytest.fixture(scope="module")
def flags(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**BASE, "data_path": str(corpus), "cache_dir": cache}


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[Engine], Any]], None]:
    """Have something done to the engine once, before the check after a step."""

    def install(step: int, work: Callable[[Engine], Any]) -> None:
        true, steps = CorruptionCheck.check, [step]

        def check(self: CorruptionCheck, at: int, batches: Any) -> Any:
            if at in steps:
                steps.remove(at)
                work(self.engine)
            return true(self, at, batches)

        monkeypatch.setattr(CorruptionCheck, "check", check)

    return install


def flip_weight(engine: Engine) -> None:
    """Flip the lowest bit of one weight."""
    weight = next(iter(engine.model.parameters()))
    weight.detach().view(-1).view(torch.int16)[3] ^= 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float32", "accumulation_steps": 7},  # whole micro-batches
        {"use_moe": True, "n_layers": 2},
        {"ema": 0.9, "gradient_checkpointing": True, "loss": "chunked"},
    ],
    ids=str,
)
def test_a_clean_run_passes_and_trains_as_without_checks(
    changes: dict[str, Any], flags: dict[str, Any], tmp_path: Path
):
    for name, more in (("plain", {}), ("checked", {"verify_interval": 2})):
        assert train({**flags, **changes, **more}, out_dir=str(tmp_path / name)) == 0
    lines = [events(tmp_path / name, "step") for name in ("plain", "checked")]
    losses = [[(line["loss"], line["grad_norm"]) for line in one] for one in lines]
    assert losses[0] == losses[1]
    checks = events(tmp_path / "checked", "verified")
    assert [(one["step"], one["passed"]) for one in checks] == [
        (step, True) for step in range(2, 13, 2)
    ]
    assert (
        sum(line["verify_ms"] for line in lines[1])
        > 0
        == sum(line["verify_ms"] for line in lines[0])
    )


def test_a_flipped_weight_is_reported_and_the_run_goes_on(
    flags: dict[str, Any], tmp_path: Path, spoil: Any, capsys: pytest.CaptureFixture[str]
):
    spoil(8, flip_weight)
    out_dir = tmp_path / "out"
    assert train({**flags, "verify_interval": 4}, out_dir=str(out_dir)) == 0
    (event,) = events(out_dir, "corruption")
    (fault,) = event["faults"]
    assert (event["step"], fault["kind"], fault["ranks"]) == (8, "weights", [0])
    assert [one["passed"] for one in events(out_dir, "verified")] == [True, False, True]
    assert (
        f"warning: corruption at step 8: {fault['text']}; the run continues"
        in capsys.readouterr().out
    )
    (run,) = read_runs([out_dir])
    assert "corruption at 1 step" in Summary(run, now=0.0).setbacks()


def test_with_stop_the_run_ends_with_11_and_names_the_checkpoint(
    flags: dict[str, Any], tmp_path: Path, spoil: Any
):
    spoil(8, flip_weight)
    stop = {"verify_interval": 4, "on_corruption": "stop"}
    given = {**flags, **stop, "save_interval": 1, "keep_last": 1, "out_dir": str(tmp_path / "out")}
    with pytest.raises(CorruptionError) as raised:
        train(given)
    good = tmp_path / "out" / "checkpoints" / "step_00000004"
    words = f"continue from {good} (--resume), saved before the last check that passed, at step 4"
    assert words in str(raised.value)
    assert "model.embed_tokens.weight" in str(raised.value)
    assert (raised.value.status, raised.value.code) == (11, "E_CORRUPTION")
    assert events(tmp_path / "out", "corruption")[0]["step"] == 8
    # Pruning has kept the good one, although only one is kept; the same command goes on from it.
    names = sorted(path.name for path in good.parent.iterdir())
    assert names == ["abandoned-step_00000007", "step_00000004"]
    assert train(given) == 0
    assert events(tmp_path / "out", "run_start")[-1]["step"] == 4


def test_after_a_resume_the_checkpoint_of_the_start_is_named(
    flags: dict[str, Any], tmp_path: Path, spoil: Any
):
    given = {**flags, "verify_interval": 4, "on_corruption": "stop", "save_interval": 1}
    given["out_dir"] = str(tmp_path / "out")
    assert train(given, stop_at_step=5) == 75
    spoil(8, flip_weight)
    with pytest.raises(CorruptionError) as raised:
        train(given)
    start = tmp_path / "out" / "checkpoints" / "step_00000005"
    words = f"from {start} (--resume), saved before step 5, where this run started; no check has"
    assert words in str(raised.value)
    assert [path.name for path in start.parent.glob("step_*")] == ["step_00000005"]


@pytest.mark.parametrize(
    ("step", "more", "words"),
    [
        (4, {}, "step 0, where this run started; no check has passed since"),
        (8, {"save_interval": 9}, "no checkpoint is left from before the last check that passed"),
    ],
)
def test_without_such_a_checkpoint_it_says_so(
    step: int, more: dict[str, Any], words: str, flags: dict[str, Any], tmp_path: Path, spoil: Any
):
    spoil(step, flip_weight)
    given = {**flags, "save_interval": 2, "verify_interval": 4, "on_corruption": "stop", **more}
    with pytest.raises(CorruptionError, match=words):
        train({**given, "out_dir": str(tmp_path / "out")})
    assert not [*(tmp_path / "out" / "checkpoints").glob("step_*")]


def test_a_rollback_forgets_later_checks():
    engine: Any = None
    check = CorruptionCheck(parse_flags([]), engine, last_passed=400)
    check.go_back(375)
    assert (check.last_passed, check.good) == (None, 375)
    check.last_passed = 380
    check.go_back(380)
    assert check.good == 380


def test_rows_that_give_another_result_the_second_time_are_a_fault(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    true, passes = checking.replay, []

    def replay(engine: Engine, rows: torch.Tensor, *given: Any) -> Any:
        passes.append(rows)
        if len(passes) != 4:
            return true(engine, rows, *given)
        layer = engine.model.get_submodule("model.layers.0.mlp.down_proj")
        handle = layer.register_forward_hook(lambda module, given, output: output * 1.5)
        try:
            return true(engine, rows, *given)
        finally:
            handle.remove()

    monkeypatch.setattr(checking, "replay", replay)
    out_dir = tmp_path / "out"
    assert train({**flags, "verify_interval": 4}, out_dir=str(out_dir)) == 0
    (event,) = events(out_dir, "corruption")
    assert event["step"] == 8
    assert [(one["kind"], one["ranks"]) for one in event["faults"]] == [("computation", [0])]
    assert "computes another loss" in event["faults"][0]["text"]
    assert [len(rows) for rows in passes] == [2] * 6  # a sixth of 12


def test_the_rows_of_a_check_are_random_and_within_the_step():
    class OneRank:
        world_size = 1

    engine: Any = OneRank()
    for accumulation, rows in ((1, 1), (3, 2), (4, 5)):
        words = f"--batch_size 5 --accumulation_steps {accumulation} --verify_interval 1"
        run = parse_flags(words.split())
        check = CorruptionCheck(run, engine)
        seen = [check.rows_of_check(step, 5) for step in range(300)]
        assert {number for number, _, _ in seen} == {*range(accumulation)}
        parts = {(first, first + rows) for first in range(5 - rows + 1)}
        assert {(part.start, part.stop) for _, part, _ in seen} == parts
        assert {is_whole for _, _, is_whole in seen} == {rows == 5}
        assert seen == [CorruptionCheck(run, engine).rows_of_check(step, 5) for step in range(300)]
