"""The progress bar at a terminal: it moves at every step, and step lines stay above it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.report import run_logger
from minimind.report.run_logger import RunLogger
from tests.train.terminal import Terminal, scrollback

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "eval_rows": 0, "log_interval": 4},
    **{"deepspeed_config": "none", "max_steps": 10, "save_interval": 5},
}


def use_terminal(monkeypatch: pytest.MonkeyPatch, is_redrawn_always: bool = True) -> Terminal:
    """A terminal behind standard output and standard error.

    Not a fixture: pytest sets both streams again before it calls the test.
    """
    found = Terminal()
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    if is_redrawn_always:
        monkeypatch.setattr(run_logger, "REDRAW_INTERVAL", 0.0)
        monkeypatch.setattr(run_logger, "MICRO_BATCH_INTERVAL", 0.0)
    return found


def without_times(line: str) -> str:
    return re.sub(r"[\d,]+ tokens/s|ETA [\d:]+", "", line)


def test_the_bar_moves_at_every_step_and_step_lines_are_those_of_a_pipe(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    terminal = use_terminal(monkeypatch)
    flags = {**FLAGS, "data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    flags["async_save"] = False  # its line would come when the disk is done
    out = str(tmp_path / "out")
    assert train(flags, out_dir=out) == 0
    drawn = re.findall(r"(\d+)/10 \[", terminal.getvalue())
    assert list(dict.fromkeys(drawn)) == [str(step) for step in range(11)]
    at_terminal = [line for line in scrollback(terminal.getvalue()) if line.startswith("step ")]
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    monkeypatch.setattr(sys, "stderr", piped)
    assert train(flags, out_dir=out, resume="none") == 0
    lines = [line for line in piped.getvalue().split("\n") if line.startswith("step ")]
    assert [line.split()[1] for line in lines if "/10 " in line] == ["4/10", "8/10", "10/10"]
    assert [*map(without_times, at_terminal)] == [*map(without_times, lines)]


def logger_at(tmp_path: Path) -> RunLogger:
    return RunLogger(tmp_path, 10, torch.device("cpu"), is_rank_0=True, is_profiling=False)


def test_within_a_long_step_the_bar_names_which_micro_batch_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    terminal = use_terminal(monkeypatch)
    logger = logger_at(tmp_path)
    logger.begin(0)
    rows = [torch.zeros(1) for _ in range(3)]
    followed = logger.track(rows)
    assert len(followed) == 3
    assert all(one is other for one, other in zip(followed, rows, strict=True))
    shown = re.findall(r"micro-batch \d/3", terminal.getvalue())
    assert shown == ["micro-batch 1/3", "micro-batch 2/3", "micro-batch 3/3"]
    logger.advance()
    assert "micro-batch" not in terminal.getvalue().rpartition("1/10")[2]
    logger.close()


def test_steps_that_are_quick_do_not_redraw_the_bar_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    terminal = use_terminal(monkeypatch, is_redrawn_always=False)
    logger = logger_at(tmp_path)
    logger.begin(0)
    before = len(terminal.getvalue())
    for _ in range(5):
        list(logger.track([torch.zeros(1)] * 4))
        logger.advance()
    assert len(terminal.getvalue()) == before
    logger.close()


def test_without_a_terminal_there_is_no_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logger = logger_at(tmp_path)
    logger.begin(0)
    rows = [torch.zeros(1)]
    assert logger.track(rows) is rows
    logger.advance()
    logger.close()
    assert capsys.readouterr() == ("", "")
