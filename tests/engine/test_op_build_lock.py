"""Locks beside compiled ops: the dead go, the living are waited for, and nobody waits forever."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension, file_baton

from minimind.engine import op_build_lock as build_lock
from minimind.engine.op_build_lock import (
    MonitoredBaton,
    describe_builder,
    is_stale_lock,
    monitored_builds,
)
from minimind.errors import StorageError, UsageError
from tests.conftest import ROOT

FILE = "ds.json"
# As torch takes it; from the file alone, because importing torch takes seconds.
TAKE = """
import runpy, sys, time
baton = runpy.run_path(sys.argv[1])["FileBaton"](sys.argv[2])
assert baton.try_acquire()
print("taken", flush=True)
time.sleep(600)
"""
RACE = """
import os, sys
from minimind.engine.op_build_lock import MonitoredBaton
(answers, answer), (end, keep) = os.pipe(), os.pipe()
for rank in range(4):
    if os.fork() == 0:
        os.close(keep)
        os.write(answer, b"1" if MonitoredBaton(sys.argv[1]).try_acquire() else b"0")
        os.read(end, 1)  # a winner that has ended would leave a dead lock to the next
        os._exit(0)
print(sum(int(os.read(answers, 1)) for rank in range(4)))
os.close(keep)
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build_lock, "RECHECK_DELAY", 0.05)
    monkeypatch.setattr(build_lock, "POLL_INTERVAL", 0.05)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


@pytest.fixture
def holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has taken the lock."""
    command = [sys.executable, "-c", TAKE, str(file_baton.__file__), str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def test_a_lock_whose_owner_was_killed_is_taken_over(holder, lock):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock.exists()
    assert is_stale_lock(lock)
    baton = MonitoredBaton(str(lock))
    assert baton.try_acquire()
    assert describe_builder(lock) == f"process {os.getpid()}"
    assert not MonitoredBaton(str(lock)).try_acquire()
    baton.release()
    assert not lock.exists()


def test_a_lock_whose_owner_lives_is_waited_for_with_one_message(holder, lock, capsys):
    baton = MonitoredBaton(str(lock))
    assert not baton.try_acquire()
    timer = threading.Timer(0.6, lock.unlink)
    timer.start()
    baton.wait()
    timer.join()
    assert capsys.readouterr().out == (
        f"waiting for process {holder.pid} to compile cpu_adam ({lock})\n"
    )


def test_the_other_ranks_of_a_host_wait_without_a_word(holder, lock, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    baton = MonitoredBaton(str(lock))
    timer = threading.Timer(0.3, lock.unlink)
    timer.start()
    baton.wait()
    timer.join()
    assert capsys.readouterr().out == ""


def test_an_owner_that_dies_while_it_is_waited_for_ends_the_wait(holder, lock):
    baton = MonitoredBaton(str(lock))
    assert not baton.try_acquire()
    threading.Timer(0.3, holder.kill).start()
    with pytest.raises(StorageError, match=r"cpu_adam/lock: the process that .* died; run"):
        baton.wait()


def test_patience_ends_and_the_lock_and_its_owner_are_named(holder, lock, monkeypatch):
    monkeypatch.setattr(build_lock, "MAX_WAIT", 0.2)
    with pytest.raises(StorageError) as caught:
        MonitoredBaton(str(lock)).wait()
    assert f"{lock}: process {holder.pid} has been compiling" in str(caught.value)
    assert "TORCH_EXTENSIONS_DIR" in str(caught.value)


def test_a_compiler_that_outlives_its_owner_is_waited_for(lock, tmp_path):
    lock.touch()
    sleep = shutil.which("sleep")
    assert sleep
    shutil.copy(sleep, tmp_path / "ninja")
    with subprocess.Popen([tmp_path / "ninja", "600"], cwd=lock.parent) as ninja:
        try:
            # Linux names a process after exec has closed the pipe that Popen waits for.
            while Path(f"/proc/{ninja.pid}/comm").read_text() != "ninja\n":
                time.sleep(0.01)
            assert describe_builder(lock) == f"process {ninja.pid}"
            assert not MonitoredBaton(str(lock)).try_acquire()
        finally:
            ninja.kill()
    assert MonitoredBaton(str(lock)).try_acquire()


@pytest.mark.parametrize(
    ("made_by", "builder"),
    [
        ("another-host 12", "process 12 on another-host"),
        (f"{socket.gethostname()} 999999999", None),
        ("", None),
    ],
)
def test_a_lock_from_another_host_is_not_ours_to_judge(lock, made_by, builder):
    lock.write_text(made_by)
    assert describe_builder(lock) == builder
    assert is_stale_lock(lock) is (builder is None)


def test_where_nothing_can_be_seen_the_owner_counts_as_alive(lock, monkeypatch):
    lock.touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert describe_builder(lock) == f"a process of user {os.getuid()}"


def test_a_lock_that_was_taken_between_two_looks_is_not_abandoned(lock, monkeypatch):
    lock.touch()
    looks = []

    def look(path: Path) -> None:  # sees nobody, as in the moment between creating and opening
        looks.append(path)
        if len(looks) == 1:
            path.unlink()
            path.with_name("keeps the inode").touch()
            path.touch()

    monkeypatch.setattr(build_lock, "describe_builder", look)
    assert not is_stale_lock(lock)
    assert len(looks) == 2


def test_of_many_that_find_a_dead_lock_one_gets_it(lock):
    lock.touch()
    command = [sys.executable, "-c", RACE, str(lock)]
    winners = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert winners.stdout == "1\n", winners.stderr


def test_an_extensions_folder_that_cannot_be_written_is_reported(lock):
    shutil.rmtree(lock.parent)
    with pytest.raises(StorageError, match="TORCH_EXTENSIONS_DIR"):
        MonitoredBaton(str(lock)).try_acquire()


class Op:
    """What of DeepSpeed's class of ops matters here."""

    name, fault = "fused_adam", Exception()

    def jit_load(self) -> None:
        raise self.fault


def test_what_is_built_inside_is_minded_and_nothing_else():
    builds: Any = cpp_extension
    torchs, build = getattr(builds, "FileBaton", None), Op.jit_load
    with monitored_builds(Op, FILE):
        assert torchs is None or builds.FileBaton is MonitoredBaton
        assert Op.jit_load is not build
    assert (getattr(builds, "FileBaton", None), Op.jit_load) == (torchs, build)
    with pytest.raises(ValueError, match="as it was"), monitored_builds(Op, FILE):
        raise ValueError("as it was")
    assert (getattr(builds, "FileBaton", None), Op.jit_load) == (torchs, build)


@pytest.mark.parametrize(
    ("name", "fault", "report"),
    [
        (
            "fused_adam",
            RuntimeError(
                "Error building extension 'fused_adam': [1/3] nvcc -MD -MF x.o.d -c x.cu\nFAILED:\n"
                "/bin/sh: 1: /cuda/bin/nvcc: not found\nninja: build stopped: subcommand failed.\n"
            ),
            '(/bin/sh: 1: /cuda/bin/nvcc: not found); write "torch_adam": true in optimizer.params:'
            " torch's needs no compiler",
        ),
        (
            "fused_adam",
            OSError("CUDA_HOME environment variable is not set. Please set it."),
            '(CUDA_HOME environment variable is not set. Please set it.); write "torch_adam": true'
            " in optimizer.params: torch's needs no compiler",
        ),
        (
            "async_io",
            RuntimeError("Unable to load async_io due to ninja not being installed."),
            "(Unable to load async_io due to ninja not being installed.); install what is missing,"
            " or do without it",
        ),
        ("cpu_lion", KeyError("12.9"), "('12.9'); install what is missing, or do without it"),
        ("cpu_lion", OSError(), "(no reason given); install what is missing, or do without it"),
    ],
)
def test_an_op_that_cannot_be_compiled_is_reported_in_one_line(monkeypatch, name, fault, report):
    monkeypatch.setattr(Op, "name", name)
    monkeypatch.setattr(Op, "fault", fault)
    report = f"ds.json: it needs DeepSpeed's {name}, which cannot be compiled here {report}"
    with pytest.raises(UsageError, match=f"^{re.escape(report)}$"), monitored_builds(Op, FILE):
        Op().jit_load()


def test_what_deepspeed_makes_of_a_failure_does_not_hide_its_cause(monkeypatch):
    monkeypatch.setattr(Op, "fault", RuntimeError("x.cu:3: fatal error: y.h: No such file"))

    def wrapped() -> None:
        try:
            Op().jit_load()
        except RuntimeError as error:
            raise RuntimeError("DeepSpeedCPUAdam requires the cpu_adam op") from error

    with (
        pytest.raises(UsageError, match=r"here \(x\.cu:3: fatal error"),
        monitored_builds(Op, FILE),
    ):
        wrapped()


def test_a_failure_that_deepspeed_does_without_is_none():
    with monitored_builds(Op, FILE), suppress(Exception):
        Op().jit_load()


def test_what_fails_for_another_reason_is_not_put_down_to_it():
    def done_without_and_then_failing() -> None:
        with suppress(Exception):
            Op().jit_load()
        raise KeyError("elsewhere")

    with pytest.raises(KeyError, match="elsewhere"), monitored_builds(Op, FILE):
        done_without_and_then_failing()


def test_known_errors_are_unchanged(monkeypatch):
    monkeypatch.setattr(Op, "fault", StorageError("lock: somebody ended too early"))
    with pytest.raises(StorageError, match="somebody"), monitored_builds(Op, FILE):
        Op().jit_load()
