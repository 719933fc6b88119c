"""Two agents of torchrun, as on two hosts, with a rendezvous by c10d on the loopback interface."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Launcher, Run
from tests.distributed.conftest import FP32, LONGER, STEPS
from tests.distributed.test_launchers import NAMED, SCRIPT, environment
from tools.forking import free_port
from tools.runs import kill_all, left_over, wait_for, workers

pytestmark = [pytest.mark.launch, pytest.mark.long]
Agents = list[subprocess.Popen[str]]


@pytest.fixture
def start(launch: Launcher, tmp_path: Path) -> Iterator[Callable[[str], Agents]]:
    """The command of docs/launching.md for each of two hosts with one process each."""
    started: Agents = []

    def run(flags: str) -> Agents:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc_per_node", "1", "--local_addr", "127.0.0.1", "--rdzv_id", "mine"]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
        command += ["--max-restarts", "1", SCRIPT]
        command += [*launch.command(tmp_path / "out", f"{FP32} {flags}")[2:], *NAMED]
        options: dict[str, Any] = {"env": environment(), "cwd": ROOT, "start_new_session": True}
        for host in range(2):
            with (tmp_path / f"{host}.err").open("w") as output:
                streams = {"stdout": subprocess.DEVNULL, "stderr": output, "text": True}
                started.append(subprocess.Popen(command, **options, **streams))
        return started

    yield run
    for one in started:
        if one.poll() is None:
            kill_all(one)


def ended(agents: Agents, place: Path, status: int) -> Run:
    statuses = [agent.wait(timeout=200) for agent in agents]
    report = "".join(path.read_text() for path in sorted(place.glob("*.err")))
    assert statuses == [status, status], report
    assert left_over(place / "out") == []
    return Run(place / "out", status, "", report)


@pytest.fixture(scope="module")
def one_host(forked: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return forked.run(tmp_path_factory.mktemp("one") / "out", f"{FP32} {LONGER}")


def check_the_same_run(run: Run, one_host: Run) -> None:
    """Two processes throughout, started twice, and every step that of one host bit for bit."""
    first, second = run.events("run_start")
    assert (first["world_size"], second["world_size"]) == (2, 2)
    assert second["step"] in range(6, STEPS, 6)
    expected = {step[0]: step for step in one_host.curve()}
    assert all(step == expected[step[0]] for step in run.curve())
    assert {step[0] for step in run.curve()} == {*expected}


@pytest.mark.parametrize("host", [0, 1])  # one of them has rank 0, and the store of the start
def test_after_a_killed_worker_both_start_again_and_the_run_is_that_of_one_host(
    host: int, start: Callable[[str], Agents], one_host: Run, tmp_path: Path
):
    agents = start(LONGER)
    wait_for(agents[host], tmp_path / "out", '"step": 8,')
    (worker,) = workers(agents[host].pid).values()
    os.kill(worker.pid, signal.SIGKILL)
    check_the_same_run(ended(agents, tmp_path, 0), one_host)


def test_a_stop_starts_again(start: Callable[[str], Agents], one_host: Run, tmp_path: Path):
    run = ended(start(f"{LONGER} --stop_at_step 12"), tmp_path, 0)
    assert [event["status"] for event in run.events("exit")] == [75, 0]
    check_the_same_run(run, one_host)


def test_an_error_starts_again_and_ends_with_1(start: Callable[[str], Agents], tmp_path: Path):
    run = ended(start("--data_path nowhere.jsonl"), tmp_path, 1)
    assert "exitcode  : 3 " in run.stderr
    assert run.stderr.count("failed (exitcode: 3)") == 4  # on each host, twice


def test_a_signal_to_both_hosts_saves_and_does_not_start_again(
    start: Callable[[str], Agents], tmp_path: Path
):
    agents = start("--max_steps 90000 --save_minutes 60")
    wait_for(agents[0], tmp_path / "out", '"step": 3,')
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    run = ended(agents, tmp_path, 1)
    assert len(run.events("run_start")) == 1
    assert run.events("exit")[-1]["status"] == 75
    (saved,) = run.events("checkpoint_saved")
    assert saved["step"] == run.events("exit")[-1]["step"]
