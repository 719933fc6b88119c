"""Runs of one process over rows that are poisoned on purpose, with and without the guard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, read_manifest
from minimind.config.run_config import MARGIN, PATIENCE
from minimind.data.rows.skip_rows import skip_rows_text
from minimind.data.shards.token_shards import TokenShards
from minimind.errors import NumericError
from minimind.recovery.step_rows import read_run
from minimind.report.figures import Summary
from minimind.report.history import read_runs
from minimind.report.run_logger import RunLogger
from minimind.train.rollback import write_rows
from tests.report.test_trackers import wandb_history

train: Any = training  # a package that is called like a function
BAD_STEPS = range(40, 50)  # counted from 0
BASE: dict[str, Any] = {
    **{"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 8, "max_steps": 70},
    **{"log_interval": 1, "eval_rows": 50, "eval_interval": 70, "device": "cpu"},
    **{"learning_rate": 5e-3, "dtype": "float32", "save_interval": 10, "keep_last": 20},
    **{"warmup_steps": 5, "save_minutes": 0, "deepspeed_config": "none"},
}
GUARD: dict[str, Any] = {"spike_guard": True, "spike_window": 32}


def events(out_dir: Path, *names: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in names]


def curve(out_dir: Path) -> dict[int, tuple[float, float, list[int]]]:
    """Loss, norm and positions by step, the last of each."""
    lines = events(out_dir, "step")
    return {line["step"]: (line["loss"], line["grad_norm"], line["rows"]) for line in lines}


def decisions(out_dir: Path) -> list[tuple[str, int]]:
    """The last event of each kind and step: what a report shows."""
    names = ("spike", "spike_skipped", "rolled_back")
    return sorted({(line["event"], line["step"]) for line in events(out_dir, *names)})


@pytest.fixture(scope="module")
def flags(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**BASE, "data_path": str(corpus), "cache_dir": cache}


@pytest.fixture(scope="module")
def clean(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on clean rows, with the guard."""
    out_dir = tmp_path_factory.mktemp("clean")
    assert train(flags, out_dir=str(out_dir), **GUARD) == 0
    return out_dir


@pytest.fixture(scope="module")
def bad_rows(clean: Path) -> list[int]:
    order = read_run(clean).at(1).order
    return order.rows_for(BAD_STEPS.start, 0, 1, len(BAD_STEPS)).tolist()


@pytest.fixture(scope="module")
def plain(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on clean rows, without the guard."""
    out_dir = tmp_path_factory.mktemp("plain")
    assert train(flags, out_dir=str(out_dir)) == 0
    return out_dir


@pytest.fixture(scope="module")
def poisoned(bad_rows: list[int], plain: Path) -> Iterator[None]:
    """From now on the rows of BAD_STEPS are the same token over and over."""
    read = TokenShards.read_rows

    def read_rows(self: TokenShards, places: np.ndarray, row_tokens: int) -> np.ndarray:
        rows = read(self, places, row_tokens).copy()
        if self._paths[0].name.startswith("train"):
            rows[np.isin(places, bad_rows)] = 599
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenShards, "read_rows", read_rows)
        yield


@pytest.fixture(scope="module")
def guarded(
    poisoned: None, flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run on the poisoned rows with the guard and two trackers, to its end."""
    out_dir = tmp_path_factory.mktemp("guarded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        trackers = {"report_to": "wandb,tensorboard"}
        assert train(flags, out_dir=str(out_dir), **GUARD, **trackers) == 0
    return out_dir


def test_a_clean_run_has_no_spike_and_is_the_run_without_the_guard(clean: Path, plain: Path):
    assert not decisions(clean)
    assert curve(clean) == curve(plain)


def test_spikes_are_skipped_and_many_of_them_left_out(
    guarded: Path, clean: Path, bad_rows: list[int]
):
    (rolled,) = events(guarded, "rolled_back")
    start = BAD_STEPS.start - MARGIN
    assert (rolled["to"], rolled["steps"]) == (30, [start + 1, BAD_STEPS.start + PATIENCE])
    positions = read_run(clean).at(1).order.positions
    last = BAD_STEPS.start + PATIENCE - 1
    assert rolled["positions"] == [positions(start).start, positions(last).stop]
    order, prepared = read_run(clean).at(1).order, read_run(clean).at(1).data
    rows = order.rows_for(start, 0, 1, last + 1 - start).tolist()
    file = skip_rows_text(rows, BASE["max_seq_len"] + 1, prepared["fingerprint"])
    assert Path(rolled["rows"]).read_text() == file
    spikes = events(guarded, "spike", "spike_skipped")
    assert [event["step"] for event in spikes[:PATIENCE]] == [
        step + 1 for step in range(BAD_STEPS.start, BAD_STEPS.start + PATIENCE)
    ]
    assert any(event["event"] == "spike_skipped" for event in spikes)
    assert all(event["rows"] for event in spikes[:PATIENCE])
    for event in spikes:
        assert {row["row"] for row in event["rows"]} <= set(bad_rows)
        assert event["loss"] > event["loss_limit"] or event["grad_norm"] > event["norm_limit"]
    # Before the jump the steps are the same, and after it the rows those behind the skipped ones.
    whole, after = curve(clean), curve(guarded)
    assert all(after[step] == whole[step] for step in range(1, start + 1))
    log = read_run(guarded)
    read = log.at(start + 1).order.rows_for(start, 0, 1).tolist()
    assert read == log.at(1).order.rows_for(BAD_STEPS.start + PATIENCE, 0, 1).tolist()


def test_trackers_show_the_steps_after_the_rollback(guarded: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = [(step, np.float32(one[0])) for step, one in curve(guarded).items()]
    found = EventAccumulator(str(guarded / "tensorboard")).Reload().Scalars("train/loss")
    assert [(one.step, np.float32(one.value)) for one in found] == expected
    (file,) = (guarded / "wandb").glob("offline-run-*/*.wandb")
    history = list(wandb_history(file))
    assert [step for step, _ in history] == sorted({step for step, _ in history})
    logged = [(line["step"], line["loss"]) for line in events(guarded, "step")]
    assert [(one["step"], one["train/loss"]) for _, one in history] == logged


def test_the_guarded_run_ends_like_the_clean_one_and_the_unguarded_one_does_not(
    guarded: Path, clean: Path, flags: dict[str, Any], tmp_path: Path
):
    assert train(flags, out_dir=str(tmp_path / "out")) == 0
    ends = [events(one, "eval")[-1]["val_loss"] for one in (clean, guarded, tmp_path / "out")]
    assert ends[1] < 1.03 * ends[0]
    assert ends[2] > 1.05 * ends[0], ends


@pytest.mark.long  # below it is saved and resumed amid spikes
def test_killed_at_any_decision_a_run_decides_alike(
    guarded: Path,
    flags: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    log, names = RunLogger.event, ("spike", "spike_skipped", "rolled_back")
    count = len(events(guarded, *names))
    assert count > PATIENCE
    # At the first spike, and when it goes back; with --long at every decision.
    is_long = request.config.getoption("--long")
    for number in range(count) if is_long else (0, PATIENCE):
        out_dir, left = tmp_path / f"killed{number}", iter(range(number))

        def event(self: RunLogger, name: str, left: Iterator[int] = left, **fields: Any) -> None:
            log(self, name, **fields)
            if name in names and next(left, None) is None:
                raise InterruptedError

        with monkeypatch.context() as patch:
            patch.setattr(RunLogger, "event", event)
            # Its saves have ended as if the process had: no thread writes beside the next run.
            with pytest.raises(InterruptedError):
                train({**flags, "async_save": False}, out_dir=str(out_dir), **GUARD)
        assert train(flags, out_dir=str(out_dir), **GUARD) == 0
        assert curve(out_dir) == curve(guarded)
        assert {one for one in decisions(guarded) if one[1] > 50} <= {*decisions(out_dir)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [41, 48])
def test_saved_and_resumed_amid_spikes_a_run_decides_alike(
    step: int, guarded: Path, flags: dict[str, Any], tmp_path: Path
):
    out_dir = tmp_path / "stopped"
    assert train(flags, out_dir=str(out_dir), stop_at_step=step, **GUARD) == 75
    state = read_manifest(published_checkpoints(out_dir / "checkpoints")[0])["spikes"]
    assert state["last"]["step"] == step - 1
    assert train(flags, out_dir=str(out_dir), **GUARD) == 0
    assert curve(out_dir) == curve(guarded)
    assert decisions(out_dir) == decisions(guarded)


def test_a_resume_after_a_rollback_goes_on_with_its_jump(
    guarded: Path, flags: dict[str, Any], tmp_path: Path
):
    out_dir = Path(shutil.copytree(guarded, tmp_path / "copy"))
    for path in published_checkpoints(out_dir / "checkpoints"):
        if path.name > "step_00000050":
            shutil.rmtree(path)
    assert train(flags, out_dir=str(out_dir), **GUARD) == 0
    assert curve(out_dir) == curve(guarded)
    manifest = read_manifest(published_checkpoints(out_dir / "checkpoints")[0])
    assert manifest["spikes"]["rollbacks"] == 1
    assert len(manifest["order"]["jumps"]) == 1


def test_a_checkpoint_before_the_spikes_is_kept(
    guarded: Path, flags: dict[str, Any], tmp_path: Path
):
    few = {**flags, "keep_last": 1}
    assert train(few, out_dir=str(tmp_path / "out"), stop_at_step=45, **GUARD) == 75
    assert train(few, out_dir=str(tmp_path / "out"), **GUARD) == 0
    (rolled,) = events(tmp_path / "out", "rolled_back")
    assert rolled["to"] == 30
    assert curve(tmp_path / "out") == curve(guarded)


def test_the_rows_of_two_rollbacks_that_end_at_the_same_step_are_both_kept(tmp_path: Path):
    prepared = SimpleNamespace(manifest={"fingerprint": "f"})
    ranks = SimpleNamespace(rank=0, from_rank_0=lambda value: value)
    run, saver = SimpleNamespace(out_dir=str(tmp_path)), SimpleNamespace(ranks=ranks)
    batches = SimpleNamespace(row_tokens=33)
    context: Any = SimpleNamespace(run=run, saver=saver, batches=batches, prepared=prepared)
    several = [np.arange(8), np.arange(8, 16), np.arange(8)]  # the last one is a repetition
    paths = [write_rows(context, rows, 48) for rows in several]
    assert [path.name for path in paths[:2]] == ["rolled_back-48.txt", "rolled_back-48-2.txt"]
    assert paths[2] == paths[0]
    assert [path.read_text() for path in paths] == [
        skip_rows_text(one.tolist(), 33, "f") for one in several
    ]


def test_after_a_change_the_window_starts_empty(guarded: Path, flags: dict[str, Any], tmp_path):
    out_dir = Path(shutil.copytree(guarded, tmp_path / "copy"))
    changed = {**flags, "learning_rate": 1e-3, "allow_change": "lr", "max_steps": 75}
    changed["allow_change"] = "lr,schedule"
    assert train(changed, out_dir=str(out_dir), **GUARD) == 0
    spikes = read_manifest(published_checkpoints(out_dir / "checkpoints")[0])["spikes"]
    assert len(spikes["losses"]) < 6


def test_rows_of_padding_are_never_named(
    guarded: Path, flags: dict[str, Any], bad_rows: list[int], tmp_path: Path
):
    """Eight rows as 3, 3, 2 and one of padding."""
    uneven = {**flags, "batch_size": 3, "global_batch_size": 8, "stop_at_step": 45, **GUARD}
    assert train(uneven, out_dir=str(tmp_path)) == 75
    for step in range(1, BAD_STEPS.start - MARGIN):
        assert curve(tmp_path)[step][0] == pytest.approx(curve(guarded)[step][0], rel=1e-3)
    found, expected = (events(out, "spike", "spike_skipped") for out in (tmp_path, guarded))
    assert len(found) == 4
    for one, other in zip(found, expected, strict=False):
        assert (one["event"], one["step"]) == (other["event"], other["step"])
        assert {row["row"] for row in one["rows"]} <= set(bad_rows)
        assert one["rows"]


def test_too_many_rollbacks_end_the_run_with_6(
    poisoned: None, flags: dict[str, Any], tmp_path: Path
):
    with pytest.raises(
        NumericError, match=r"steps, 41 to 48, after 0 rollbacks, and max_rollbacks"
    ):
        train(flags, out_dir=str(tmp_path / "out"), max_rollbacks=0, **GUARD)
    newest = published_checkpoints(tmp_path / "out" / "checkpoints")[0]
    assert newest.name == "step_00000040"  # the guard sets nothing aside then


def test_without_an_early_checkpoint_the_run_ends_with_6(
    poisoned: None, flags: dict[str, Any], tmp_path: Path
):
    with pytest.raises(NumericError, match="no checkpoint up to step 32"):
        train({**flags, "save_interval": 60}, out_dir=str(tmp_path / "out"), **GUARD)


def test_the_report_counts_it(guarded: Path):
    (run,) = read_runs([guarded])
    summary = Summary(run, now=0.0)
    values = {name: figure.value for name, figure in summary.figures.items()}
    assert (values["rollbacks"], values["resumes"], values["crashes"]) == (1, 0, 0)
    assert "1 rollback" in summary.setbacks()
    assert values["spikes"] == len({one["step"] for one in events(guarded, "spike_skipped")}) > 0
    assert ("rolled back at 30") in [label for *_, label in run.marks(0.0)]
    assert (guarded / "report.html").exists()
