"""The command line of a trial, what it records, and the GPUs it may have."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import psutil
import pytest

from minimind.errors import RendezvousError
from minimind.runtime.hardware import parse_use
from minimind.sweep.trial import WARM_UP, Progress, TrialProcess, command_line, environments_of

SMI = "0, GPU-aaaa, 3\n1, GPU-bbbb, 40000\n2, GPU-cccc, [N/A]\n3, GPU-dddd, 900\n"


def test_flags_become_a_line_that_a_shell_reads():
    flags = {"data_path": ["a b", "c"], "init_from": "-x"}
    assert command_line(flags) == "minimind train --data_path 'a b' c --init_from=-x"


def test_validations_are_read_as_they_are_written(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    progress = Progress(tmp_path, "val_loss")
    path.write_text('{"event": "run_start", "step": 0}\n{"event": "eval", "step": 5, "val_lo')
    progress.read()
    assert (progress.steps, progress.curve, progress.exit_status) == (0, {}, -1)
    with open(path, "a") as file:
        file.write('ss": 3.5}\n{"event": "step", "step": 7}\ntorn "eval" line\n')
    progress.read()
    assert (progress.steps, progress.curve, progress.value) == (7, {5: 3.5}, 3.5)
    with open(path, "a") as file:
        file.write('{"event": "eval", "step": 10, "val_loss": null}\n')
        file.write('{"event": "exit", "step": 10, "status": 6}\n')
    progress.read()
    assert [*progress.curve] == [5, 10]
    assert math.isnan(progress.value)
    assert (progress.steps, progress.exit_status) == (10, 6)


def test_a_metric_of_steps_is_their_median_after_the_warm_up(tmp_path: Path):
    lines = ['{"event": "run_start", "step": 0}\n']
    lines += [f'{{"event": "step", "step": {n}, "step_ms": {n}.5}}\n' for n in range(1, 8)]
    progress = Progress(tmp_path, "step_ms")
    (tmp_path / "metrics.jsonl").write_text("".join(lines[: WARM_UP + 1]))
    progress.read()
    assert (progress.steps, progress.curve) == (WARM_UP, {})
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    progress.read()
    assert (progress.steps, progress.curve) == (7, {7: 6.5})


def test_a_trial_that_hears_no_signal_is_killed_with_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "python"
    hang = 'trap "" TERM; (sleep 600) & echo $! > child; mv child worker; while :; do wait; done'
    program.write_text(f'#!/bin/sh\ncd "{tmp_path}"\n{hang}\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    trial = TrialProcess({"out_dir": str(tmp_path)}, {}, "launch")
    while not (tmp_path / "worker").exists():
        time.sleep(0.01)
    worker = psutil.Process(int((tmp_path / "worker").read_text()))
    trial.stop()
    assert trial.poll() is None
    trial.kill()
    while trial.poll() is None:
        time.sleep(0.01)
    assert trial.poll() == -9
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, {"GPU-aaaa": True, "GPU-bbbb": False, "GPU-cccc": False, "GPU-dddd": True}),
        ("1, 3", {"GPU-bbbb": False, "GPU-dddd": True}),
        ("GPU-aa", {"GPU-aaaa": True}),
        ("", {}),
        ("-1", {}),
    ],
)
def test_free_gpus_are_those_without_the_memory_of_a_program(allowed, expected):
    assert parse_use(SMI, allowed) == expected


def test_a_malformed_list_of_gpus_is_no_search_on_the_cpu():
    with pytest.raises(RendezvousError, match=r"^CUDA_VISIBLE_DEVICES is '0;1', not numbers"):
        parse_use(SMI, "0;1")


def test_no_gpu_is_free_where_there_is_no_nvidia_smi():
    assert parse_use("", None) == {}


def test_trials_side_by_side_share_gpus_or_cores(monkeypatch: pytest.MonkeyPatch):
    names = [one["CUDA_VISIBLE_DEVICES"] for one in environments_of(["0", "3"], 3)]
    assert names == ["0", "3", "0"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    assert environments_of([], 1) == [{}]
    assert environments_of([], 4) == [{"OMP_NUM_THREADS": "1"}] * 4
    assert environments_of([], 2) == [{"OMP_NUM_THREADS": "3"}] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environments_of([], 2) == [{}, {}]
