"""The garbage collector is frozen only during a run; long silences are announced."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.checkpoint.resume import TrainState
from minimind.checkpoint.saver import Saver
from minimind.config.parse import parse_flags
from minimind.engine.engine import StepResult
from minimind.errors import StorageError
from minimind.report import run_logger
from minimind.report.run_logger import RunLogger
from minimind.train.loop import (
    GC_WARMUP_STEPS,
    advance_progress,
    freeze_gc,
    is_due,
    log_step,
    poll_save,
)
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "eval_rows": 0},
    **{"save_interval": 100, "deepspeed_config": "none"},
}


def test_state_counts_and_the_last_step_is_always_due():
    assert TrainState().after(512).after(512) == TrainState(2, 1024)
    assert [s for s in range(1, 8) if is_due(s, 3, 7)] == [3, 6, 7]


@pytest.mark.usefixtures("thawed")
def test_live_objects_are_frozen_after_warmup_until_the_run_ends(tmp_path: Path):
    logger = RunLogger(tmp_path, 9, torch.device("cpu"), is_rank_0=True, is_profiling=False)
    with ExitStack() as cleanup:
        cleanup.callback(logger.close)
        context: Any = SimpleNamespace(logger=logger, cleanup=cleanup)
        freeze_gc(context)
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_objects_that_python_3_12_freezes_at_its_start_are_not_those_of_a_notebook(monkeypatch):
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    context: Any = SimpleNamespace(logger=SimpleNamespace(pausing=nullcontext), cleanup=ExitStack())
    freeze_gc(context)
    assert frozen


@pytest.mark.usefixtures("thawed")
def test_objects_frozen_by_a_notebook_stay_frozen(corpus: Path, tmp_path: Path):
    flags = {**FLAGS, "data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    gc.freeze()
    assert train({**flags, "max_steps": GC_WARMUP_STEPS + 1}, out_dir=str(tmp_path / "out")) == 0
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    assert train({**flags, "max_steps": GC_WARMUP_STEPS + 1}, out_dir=str(tmp_path / "again")) == 0
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("seconds", "interval", "output"),
    [
        (
            40.0,
            100,
            "warning  no step line for 1:06:40: a step takes 40.0 s and --log_interval is 100",
        ),
        (40.0, 10, ""),
        (35.0, 100, ""),
        (
            40.0,
            1000,
            "warning  no step line for 2:11:20: a step takes 40.0 s and --log_interval is",
        ),
    ],
)
def test_an_hour_without_a_step_line_is_stated_once_steps_are_timed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    interval: int,
    output: str,
):
    now = 1000.0
    monkeypatch.setattr(run_logger.time, "perf_counter", lambda: now)
    logger = RunLogger(tmp_path, 200, torch.device("cpu"), is_rank_0=True, is_profiling=False)
    run = parse_flags(["--log_interval", str(interval)])
    ends = SimpleNamespace(total_steps=200)
    context: Any = SimpleNamespace(
        logger=logger,
        plan=SimpleNamespace(fit=None),
        run=run,
        schedule=ends,
        progress=SimpleNamespace(step=0),
    )
    logger.begin(0)
    for step in range(1, 9):
        now += seconds if step > 1 else 900.0  # which compiles
        advance_progress(context, TrainState(step), step)
        now += 500.0
        logger.add_pause("evaluate", 500e3)
    assert context.progress.step == 8
    logger.close()
    found = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(found) == bool(output)
    assert output in "".join(found)


@pytest.mark.parametrize(
    ("grad_clip", "norm", "clipped"),
    [
        (1.0, 1.5, True),
        (1.0, 0.5, False),
        (1.0, float("inf"), False),  # skipped
        (1.0, None, False),  # not known
        (0.0, 1.5, False),  # off
    ],
)
def test_a_step_is_clipped_if_its_norm_is_above_the_limit(
    grad_clip: float, norm: float | None, clipped: bool
):
    lines: list[dict[str, Any]] = []
    engine = SimpleNamespace(
        sum_over_ranks=lambda values: values,
        take_update_change=lambda: "",
        compiling=SimpleNamespace(take=lambda: 0.0),
    )
    order = SimpleNamespace(positions=lambda step: range(8, 16), stage_of=lambda step: {})
    context: Any = SimpleNamespace(
        run=parse_flags(["--grad_clip", str(grad_clip)]),
        engine=engine,
        batches=SimpleNamespace(order=order),
        logger=SimpleNamespace(step=lines.append),
        hooks=None,
    )
    sums, targets = (torch.tensor(12.0),), (torch.tensor(4),)
    log_step(context, TrainState(2), StepResult(sums, targets, norm, 1e-3, 0, False))
    (line,) = lines
    assert (line["clipped"], line["grad_norm"], line["loss"]) == (clipped, norm, 3.0)


def test_the_wait_for_the_last_save_is_a_pause(
    cached: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = Saver._write_own_files

    def slow(*args: Any) -> Any:
        time.sleep(0.5)
        return write(*args)

    monkeypatch.setattr(Saver, "_write_own_files", slow)
    assert train({**FLAGS, **cached, "max_steps": 3}, out_dir=str(tmp_path)) == 0
    lines = [*events(tmp_path, "step"), *events(tmp_path, "exit")]
    assert sum(line.get("checkpoint_ms", 0.0) for line in lines) > 500


def test_a_save_is_reported_and_mirrored_before_a_validation_that_failed_ends_the_run():
    done: list[str] = []

    def fail() -> None:
        raise StorageError("validation.json: No space left on device")

    saved = {"step": 7, "path": "p", "bytes": 1}
    saver = SimpleNamespace(
        prune_error=lambda: "",
        poll=lambda wait: saved,
        wait_for_validations=fail,
        prune=lambda: done.append("prune"),
        good=None,
    )
    logger = SimpleNamespace(event=lambda name, **rest: done.append(name), print=lambda line: None)
    mirror = SimpleNamespace(report=lambda: None, offer=lambda *rest: done.append("offer"))
    context: Any = SimpleNamespace(saver=saver, logger=logger, mirror=mirror)
    with pytest.raises(StorageError, match=r"validation\.json"):
        poll_save(context, wait=True)
    assert done == ["checkpoint_saved", "offer"]
