"""What a step line says the processes of a run use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from minimind.report import usage
from minimind.report.run_logger import RunLogger
from minimind.runtime import heartbeat
from minimind.runtime.device import KINDS, Host
from minimind.runtime.process import STATUS_FILE

CPU = torch.device("cpu")
BUSY = "import time\nprint(flush=True)\nwhile True: time.process_time()"


def spend(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_the_cpu_time_of_a_line_is_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(usage, "usable_cores", lambda: 2)
    monkeypatch.setattr(usage.time, "perf_counter", iter([0.0, 1.0, 2.0]).__next__)
    used = usage.Usage(CPU)
    spend(0.3)
    assert used.since_last()["cpu_percent"] == pytest.approx(15, abs=2)  # ticks of 10 ms
    assert used.since_last()["cpu_percent"] < 2


def test_the_other_ranks_of_the_host_are_counted_until_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "status"))
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        for number, pid in enumerate((os.getpid(), other.pid, 2**22 + 1)):
            heartbeat.register(heartbeat.this_worker(number, pid))
        monkeypatch.setattr(usage.time, "perf_counter", iter([0.0, 1.0, 2.0]).__next__)
        used = usage.Usage(CPU)
        alone, rank = time.process_time(), psutil.Process(other.pid)
        enough = sum(rank.cpu_times()[:2]) + 0.3
        while sum(rank.cpu_times()[:2]) < enough:
            time.sleep(0.02)
        seconds = used.since_last()["cpu_percent"] * usage.usable_cores() / 100
        assert seconds > time.process_time() - alone + 0.2
        other.kill()
    used._last = (used._last[0], used._last[1] + 9)  # more than the rank had
    assert used.since_last()["cpu_percent"] == 0.0


def test_a_step_line_has_what_the_device_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Made(Host):
        def reserved_memory(self, device: torch.device) -> int | None:
            return 3 * 2**30

        def busy_percent(self, device: torch.device) -> int | None:
            return 75

    line = {"step": 1, "loss": 1.0, "lr": 1e-3, "tokens": 8}
    times = {"data": 1.0, "forward": 1.0, "backward": 1.0, "optimizer": 1.0, "step": 4.0}
    for kind in (Host(), Made()):
        monkeypatch.setitem(KINDS, "cpu", kind)
        logger = RunLogger(tmp_path, 2, CPU, is_rank_0=True, is_profiling=False)
        logger.begin(0)
        logger.add_phase_times([times])
        logger.step(line)
        logger.close()
    plain, made = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert 0.05 < plain["host_memory_gib"] < 64
    assert plain["cpu_percent"] >= 0.0
    assert not {"gpu_percent", "gpu_memory_gib"} & {*plain}
    assert (made["gpu_percent"], made["gpu_memory_gib"]) == (75, 3.0)
