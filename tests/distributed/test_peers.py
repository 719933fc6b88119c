"""Stops and lost peers in real runs: what is said, the exit status, and that nobody is left.

A fault is armed in the worker by a sitecustomize of ours; SIGUSR2 sets it off in the main thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Launcher, Run
from tools.runs import ENDLESS, left_over, wait_for, workers

pytestmark = pytest.mark.launch

FAULTS = """
import os, signal, time

def fault(number, frame):
    kind, _, status = os.environ["FAULT"].partition(" ")
    if kind == "exit":
        os._exit(int(status))
    if kind == "raise":
        raise ValueError("thrown by the test")
    time.sleep(1e6)

if "RANK" in os.environ and "FAULT" in os.environ:
    signal.signal(signal.SIGUSR2, fault)
"""


def is_importing(worker: psutil.Process) -> bool:
    """Whether it catches SIGTERM, as a worker does before it imports torch."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


def launcher(script: int) -> psutil.Process:
    children = psutil.Process(script).children()
    return next(c for c in children if "accelerate_launch.py" in " ".join(c.cmdline()[1:2]))


@pytest.fixture
def begin(launch: Launcher) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`launch.start`, with nothing left behind when a test fails."""
    runs: list[tuple[subprocess.Popen[str], Path]] = []

    def start(out_dir: Path, flags: str, *script: str) -> subprocess.Popen[str]:
        runs.append((launch.start(out_dir, flags, script=script), out_dir))
        return runs[-1][0]

    yield start
    for started, out_dir in runs:
        for process in psutil.process_iter(["cmdline"]):
            if str(out_dir) in (process.info["cmdline"] or []):
                process.kill()
        started.communicate()


@pytest.fixture
def faulty(
    begin: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], subprocess.Popen[str]]:
    """A run at its third step, with a fault armed."""

    def start(fault: str, flags: str) -> subprocess.Popen[str]:
        (tmp_path / "sitecustomize.py").write_text(FAULTS)
        path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setenv("FAULT", fault)
        started = begin(tmp_path / "out", f"{ENDLESS} {flags}")
        wait_for(started, tmp_path / "out", '"step": 3,')
        return started

    return start


def ended(started: subprocess.Popen[str], out_dir: Path) -> Run:
    _, report = started.communicate(timeout=300)
    assert left_over(out_dir) == []
    return Run(out_dir, started.returncode, "", report)


@pytest.mark.parametrize(
    ("fault", "timeout", "status", "words"),
    [
        pytest.param(
            "SIGKILL", 120, 7, "died: killed by SIGKILL, perhaps for lack of", id="kill",
            marks=pytest.mark.long,  # test_restarts.py kills one too
        ),
        pytest.param(
            "SIGSTOP", 8, 7, "is stopped (SIGSTOP)", id="stop", marks=pytest.mark.long
        ),
        pytest.param(
            "hang", 8, 7, "has not moved since step", id="hang", marks=pytest.mark.long
        ),
        pytest.param(
            "SIGSEGV", 120, 7, "died: crashed by SIGSEGV", id="segv", marks=pytest.mark.long
        ),
        pytest.param(
            "exit 0", 120, 7, "exited before the others, with status 0", id="exit 0",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "exit 3", 120, 7, "exited before the others, with status 3", id="exit 3",
            marks=pytest.mark.long,
        ),
        pytest.param("raise", 120, 70, "thrown by the test", id="raise", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_lost_rank_ends_the_run_and_is_named_first(
    fault: str, timeout: int, status: int, words: str, faulty, tmp_path: Path
):
    started = faulty(fault, f"--dist_timeout {timeout}")
    find_culprit = workers(started.pid)[1]
    find_culprit.send_signal(getattr(signal, fault, signal.SIGUSR2))
    run = ended(started, tmp_path / "out")
    assert run.status == status, run.stderr
    first = next(line for line in run.stderr.splitlines() if "error[" in line)
    assert words in first
    if status == 7:
        assert f": rank 1 (process {find_culprit.pid} on " in first
        assert first.startswith("train_pretrain: error[E_PEER] rank=0 step=")
    else:
        assert "stopped because rank 1 failed" in run.stderr
    (end,) = run.events("exit")
    assert end["status"] == status


@pytest.mark.long  # test_runs.py stops two ranks, test_run_folder.py keeps others out
def test_a_stop_signal_saves_once_with_75_and_meanwhile_no_one_else_gets_in(
    begin, forked: Launcher, tmp_path: Path
):
    """run_accelerate.sh, which runs a script of the user's, and the launcher get one each.

    Also: tables come at their own interval, between step lines that are further apart.
    """
    flags = "--max_steps 9000 --log_interval 4 --profile --profile_interval 2"
    program = "import sys, minimind\nprint('mine')\nsys.exit(minimind.train(sys.argv[1:]))\n"
    (tmp_path / "mine.py").write_text(program)
    started = begin(tmp_path, flags, str(tmp_path / "mine.py"))
    wait_for(started, tmp_path, '"step": 8,')
    intruder = forked.run(tmp_path, flags, processes=1)
    assert intruder.status == 8
    assert "in use by process" in intruder.stderr
    target = launcher(started.pid)
    os.kill(started.pid, signal.SIGUSR1)
    time.sleep(0.05)
    target.send_signal(signal.SIGUSR1)
    shown, output = started.communicate(timeout=300)
    assert left_over(tmp_path) == []
    stopped = Run(tmp_path, started.returncode, "", output)
    assert stopped.status == 75, output
    assert "mine\n" in shown
    assert "stopped on SIGUSR1, saved at step" in shown  # not the TERM that it is passed on as
    (saved,) = stopped.events("checkpoint_saved")
    (end,) = stopped.events("exit")
    assert (end["code"], end["step"]) == ("PREEMPTED", saved["step"])
    assert end["step"] - stopped.events("step")[-1]["step"] in range(4)  # none was lost
    assert [p["step"] for p in stopped.events("profile")[:3]] == [2, 4, 6]
    assert [s["step"] for s in stopped.events("step")[:2]] == [4, 8]
    assert "error[" not in output
    assert "Traceback" not in output


@pytest.mark.long  # in the test above one of the two goes to the script
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("who", ["launcher", "worker"])
def test_a_stop_requested_twice_saves_once_and_loses_no_step(
    who: str, number: signal.Signals, begin, tmp_path: Path
):
    started = begin(tmp_path, ENDLESS)
    wait_for(started, tmp_path, '"step": 3,')
    target = workers(started.pid)[1] if who == "worker" else launcher(started.pid)
    target.send_signal(number)
    time.sleep(0.05)
    target.send_signal(number)
    run = ended(started, tmp_path)
    assert run.status == 75, run.stderr
    (saved,) = run.events("checkpoint_saved")
    (end,) = run.events("exit")
    assert (end["code"], end["step"]) == ("PREEMPTED", saved["step"])
    assert end["step"] == run.events("step")[-1]["step"]
    assert "error[" not in run.stderr


@pytest.mark.parametrize(
    ("who", "number", "status", "words"),
    [
        ("worker", signal.SIGTERM, 75, "stopped on SIGTERM before the first step"),
        pytest.param(
            "worker", signal.SIGKILL, 7, "died: killed by SIGKILL", marks=pytest.mark.long
        ),
        pytest.param("launcher", signal.SIGUSR1, 75, "before the", marks=pytest.mark.long),
        pytest.param("script", signal.SIGUSR1, 75, "before the", marks=pytest.mark.long),
    ],
)
def test_at_the_start_a_stop_is_75_and_a_death_is_7(
    who: str, number: signal.Signals, status: int, words: str, begin, tmp_path: Path
):
    """While torch is imported: no process group stands, and the handlers of the loop neither."""
    started = begin(tmp_path, ENDLESS)
    deadline = time.monotonic() + 300
    while len(found := workers(started.pid)) < 2 or not all(map(is_importing, found.values())):
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    targets = {"worker": found[1], "script": psutil.Process(started.pid)}
    targets["launcher"] = launcher(started.pid)
    targets[who].send_signal(number)
    run = ended(started, tmp_path)
    assert run.status == status, run.stderr
    assert words in run.stderr
    assert not (tmp_path / "checkpoints").exists()
