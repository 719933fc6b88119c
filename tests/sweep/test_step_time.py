"""The time of a step of a model, and of several processes at once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minimind.config.parse import parse_flags
from minimind.errors import UsageError
from minimind.sweep import step_time
from minimind.sweep.step_time import measured_steps, step_seconds

LEAST: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "dtype": "float32"},
}


def test_a_step_lasts_until_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch):
    """Only the wait takes time here: without it a step would take none."""
    passed = [0.0]

    def wait() -> None:
        passed[0] += 0.5

    kind = SimpleNamespace(synchronize=wait, has_bf16=True)
    monkeypatch.setattr(step_time, "SECONDS", 1.0)
    monkeypatch.setattr(step_time, "device_kind", lambda name: kind)
    monkeypatch.setattr(step_time, "time", SimpleNamespace(perf_counter=lambda: passed[0]))
    words = [word for name, value in LEAST.items() for word in (f"--{name}", str(value))]
    assert step_seconds(parse_flags(words), "cpu") == 0.5
    assert passed[0] == 1.5  # the first step is not counted


@pytest.mark.long  # a process imports torch to measure what is measured above
def test_a_process_measures_steps_of_its_own():
    (seconds,) = measured_steps([LEAST], "cpu", 1, 1)
    assert seconds > 0


def test_the_slowest_of_processes_that_run_together_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first process prints its time once the second is there, and waits 20 s for it."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\ncd "{tmp_path}"\n'
        "mkdir first 2>/dev/null || { mkdir second; echo 2.5; exit; }\n"
        "for n in $(seq 2000); do [ ! -d second ] || { echo 1.5; exit; }; sleep 0.01; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert [*measured_steps([LEAST], "cpu", 2, 1)] == [2.5]


@pytest.mark.long  # for one sentence a process imports torch
def test_a_process_that_ends_is_told(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(UsageError, match="no step could be measured on cpu"):
        list(measured_steps([{**LEAST, "n_heads": 3}], "cpu", 1, 1))
    assert "n_heads" in capfd.readouterr().err
