"""The end of a process: everything is written, and modules are not torn down."""

from __future__ import annotations

import os
import pstats
import signal as signals
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.exc import InductorError

from minimind.cli import main as cli
from minimind.launch import train_pretrain
from minimind.runtime.exit import Ending
from minimind.runtime.process import Progress
from tests.conftest import ROOT

WORK = """
import atexit, logging, logging.handlers, sys, threading, time, weakref
from concurrent.futures import ThreadPoolExecutor
from minimind.runtime.exit import leave

class Part:
    def __del__(self):
        print("torn down", flush=True)

def write(word):
    while not threading._SHUTTING_DOWN:
        time.sleep(0.01)
    print(word + "\\n", end="")

part = Part()
atexit.register(print, "handler")
weakref.finalize(leave, print, "finalizer")
threading.Thread(target=write, args=("thread",)).start()
pool = ThreadPoolExecutor(1)
for word in ("task 1", "task 2"):
    pool.submit(write, word)
shown = logging.StreamHandler(sys.stdout)
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=shown))
logging.getLogger().warning("record")
print("x" * 1_000_000)
"""


def python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    ("call", "status", "written"),
    [
        ("leave(0)", 0, {"thread", "task 1", "task 2", "handler", "finalizer", "record"}),
        ("leave(4)", 4, {"thread", "task 1", "task 2", "handler", "finalizer", "record"}),
        ("leave(7, at_once=True)", 7, {"record"}),
    ],
)
def test_what_is_under_way_is_written_and_nothing_is_torn_down(call, status, written):
    done = python(WORK + call)
    assert (done.returncode, done.stderr) == (status, "")
    long, *lines = sorted(done.stdout.splitlines(), reverse=True)
    assert (long, {*lines}) == ("x" * 1_000_000, written)


FULL = "standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("where", "call", "status", "told"),
    [
        ("| true", "leave(0)", 120, ""),  # as Python ends
        ("| true", "leave(7, at_once=True)", 7, ""),
        ("> /dev/full", "leave(0)", 120, FULL),
        ("> /dev/full", "leave(5)", 5, ""),
        (">&-", "leave(0)", 0, ""),
        ("2>&-", "leave(0)", 0, ""),
    ],
)
def test_output_that_cannot_be_written_has_the_status_that_python_gives(where, call, status, told):
    program = "import sys, time; from minimind.runtime.exit import leave;"
    program += f" sys.stdout and print('line'); time.sleep(0.2); {call}"
    line = f'"$0" -c "$1" {where}; exit ${{PIPESTATUS[0]}}'
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["bash", "-c", line, sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert (done.returncode, done.stderr) == (status, told)


@pytest.mark.parametrize(("signal", "status"), [("SIGTERM", 75), ("", 70)])
def test_a_compiler_that_the_signal_has_ended_too_is_no_bug(
    signal: str, status: int, monkeypatch, capsys
):
    """Launchers and terminals send it to g++ as well, whose end torch raises."""
    monkeypatch.delenv("MINIMIND_STATUS_FILE", raising=False)
    progress = Progress(step=3, is_training=True)
    if signal:
        progress.stop.record_signal(getattr(signals, signal))
    error = InductorError(RuntimeError("C++ compile error\n\nCommand:\ng++"), None)
    assert Ending(progress, debug=False).report(error) == status
    lines = capsys.readouterr().err.splitlines()
    stopped = "stopped on SIGTERM while the model was compiled (RuntimeError: C++ compile error), "
    assert lines[-1].startswith(f"train_pretrain: {stopped}") == bool(signal)
    assert len(lines) == 1 or not signal


RUN = """
try:
    import runpy; runpy.run_path({!r}, run_name="__main__")
finally:
    print("after it")
"""


@pytest.mark.parametrize(
    ("environ", "words", "status", "after"),
    [
        ({}, ["{program}"], 3, []),
        ({}, ["-m", "program"], 3, []),
        ({}, ["-c", "import program"], 3, ["torn down"]),
        ({}, ["-c", RUN], 3, ["after it", "torn down"]),  # as a notebook's %run and profilers do
        ({}, ["-m", "cProfile", "-o", "{found}", "{program}"], 0, ["torn down"]),  # of cProfile
        ({"PYTHONINSPECT": "1"}, ["{program}"], 1, ["torn down"]),  # of the shell without input
        ({"NVTX_INJECTION64_PATH": "tool.so"}, ["{program}"], 3, ["torn down"]),
    ],
)
def test_what_goes_on_after_a_program_gets_its_status(
    environ, words, status, after, tmp_path: Path
):
    program, found = tmp_path / "program.py", tmp_path / "found"
    program.write_text(f"{WORK}leave(3)")
    words = [word.format(str(program), program=program, found=found) for word in words]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        input="",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status
    assert [line for line in done.stdout.splitlines() if line in after] == after
    assert ("torn down" in done.stdout) == ("torn down" in after)
    assert not found.exists() or pstats.Stats(str(found)).get_stats_profile().func_profiles
    assert found.exists() == ("cProfile" in words)


@pytest.mark.parametrize(("status", "at_once"), [(0, False), (7, True), (75, True)])
def test_the_entry_points_end_by_it_and_what_they_call_does_not(status, at_once, monkeypatch):
    ends = []
    monkeypatch.setattr(train_pretrain, "main", lambda flags: status)
    for module in (train_pretrain, cli):
        monkeypatch.setattr(module, "leave", lambda *given, **named: ends.append((given, named)))
    train_pretrain.run([])
    monkeypatch.setattr(sys, "argv", ["minimind", "train", "--model", "tiny"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    cli.run()
    monkeypatch.setattr(sys, "argv", ["minimind", "nothing"])
    cli.run()
    monkeypatch.setattr(sys, "argv", ["minimind", "--version"])
    cli.run()
    assert end.value.code == status
    assert ends == [
        ((status,), {"at_once": at_once}),
        ((status, at_once), {}),
        ((2, False), {}),
        ((0, False), {}),
    ]
