"""Claims of the exit status, requests to stop, and what ends a process from its watch thread."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from minimind.checkpoint.run_folder import lock_out_dir
from minimind.errors import CheckpointError, UsageError
from minimind.runtime.exit import Ending
from minimind.runtime.heartbeat import describe_end, is_alive
from minimind.runtime.process import (
    CAUGHT,
    ERROR_FILE,
    STATUS_FILE,
    Progress,
    StopRequest,
    claim_status,
    read_claim,
    record_stop,
    stop_reason,
)
from tests.conftest import ROOT
from tools.runs import MEETING


@pytest.fixture
def status_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "status"))
    return tmp_path / "status"


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in CAUGHT}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_claim_stands_and_the_second_learns_of_it(status_file: Path):
    assert read_claim() is None
    ours = claim_status(7, 3)
    assert (ours.status, ours.rank, ours.is_ours) == (7, 3, True)
    theirs = claim_status(75, 0)
    assert (theirs.status, theirs.rank, theirs.is_ours) == (7, 3, False)
    assert read_claim() == theirs
    assert status_file.read_text() == "7 3\n"


def test_without_the_script_or_with_its_folder_gone_every_claim_is_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv(STATUS_FILE, raising=False)
    assert claim_status(5, 1).is_ours
    assert claim_status(6, 0).is_ours
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "gone" / "status"))
    assert claim_status(5, 1).is_ours
    assert read_claim() is None


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", CAUGHT)
def test_a_signal_is_remembered_and_the_first_one_is_the_reason(number: signal.Signals):
    stop = StopRequest()
    stop.listen()
    assert stop.reason == ""
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)
    assert stop.reason == ("Ctrl-C" if number == signal.SIGINT else number.name)


def test_max_minutes_asks_by_the_clock_and_reports_it(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop = StopRequest()
    stop.limit(None)
    now[0] += 1e9
    assert stop.reason == ""
    stop = StopRequest()
    stop.limit(1.5)
    now[0] += 89
    assert stop.reason == ""
    now[0] += 1
    assert stop.reason == "--max_minutes 1.5"


@pytest.mark.usefixtures("handlers")
def test_training_begins_to_listen_also_where_no_one_did_before():
    progress = Progress()
    assert not progress.is_training
    stop = progress.begin()
    signal.raise_signal(signal.SIGUSR1)
    assert (progress.is_training, stop.reason) == (True, "SIGUSR1")


def test_training_in_another_thread_begins_without_handlers():
    """As in a worker of Ray, whose signals are its own."""
    before = [signal.getsignal(number) for number in CAUGHT]
    with ThreadPoolExecutor(1) as other:
        stop = other.submit(Progress().begin).result()
    assert stop.reason == ""
    assert [signal.getsignal(number) for number in CAUGHT] == before


STUCK = """
import os, sys, threading, time
import ctypes
from minimind.runtime.exit import Ending
from minimind.runtime.heartbeat import Peers
from minimind.runtime.process import Progress
progress = Progress(rank=1)
Ending(progress, debug=False).watch()
progress.peers = Peers(progress)
print("ready", flush=True)
while True:
    ctypes.CDLL(None).sleep(60)  # deep in C; Python's own sleep would run the handler
"""


def stuck(tmp_path: Path, **environ: str) -> subprocess.Popen[str]:
    """A worker whose main thread is deep in C, watched."""
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STUCK)],
        env={**os.environ, STATUS_FILE: str(tmp_path / "status"), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


TRAINING = STUCK.replace("Ending(progress, debug=False)", "Ending(progress, False, ended_at_once)")
TRAINING = TRAINING.replace("progress.peers = Peers(progress)", "progress.begin()")
TRAINING = f"""from pathlib import Path
from minimind.checkpoint.directory import ended_at_once
{TRAINING}""".replace("Progress(rank=1)", "Progress(out_dir=Path(sys.argv[1]), step=15)")


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ([], "no checkpoint yet in {}"),
        ([6, 13], "the last checkpoint is step 13 of {}, later steps are lost"),
    ],
)
def test_a_second_ctrl_c_at_the_terminal_ends_a_run_in_one_process_with_130(
    saved: list[int], said: str, tmp_path: Path
):
    """Deep in C in its main thread. Where its input is no terminal, only the first one counts."""
    for step in saved:
        (tmp_path / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), str(tmp_path)]
    # Runs of other tests leave variables by which a process knows that it has a launcher.
    of_launcher = ("RANK", "ACCELERATE_")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(of_launcher)}
    keyboard, terminal = os.openpty()
    for standard_input, status in ((terminal, 130), (subprocess.DEVNULL, None)):
        started = subprocess.Popen(
            command,
            stdin=standard_input,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environ,
        )
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert started.poll() is None
        started.send_signal(signal.SIGINT)
        if status is None:
            with pytest.raises(subprocess.TimeoutExpired):
                started.wait(timeout=2)
            started.kill()
        _, report = started.communicate(timeout=60)
        if status:
            assert started.returncode == status
            end = f"ended at once by a second Ctrl-C; {said.format(tmp_path)}"
            assert report == f"train_pretrain: {end}\n"
            last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
            assert (last["code"], last["status"], last["reason"]) == ("INTERRUPTED", 130, end)
    os.close(keyboard)
    os.close(terminal)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_before_training_a_stop_ends_a_worker_deep_in_c_and_claims_75(
    number: signal.Signals, tmp_path: Path
):
    started = stuck(tmp_path)
    started.send_signal(number)
    started.send_signal(number)
    _, report = started.communicate(timeout=60)
    assert started.returncode == 75
    assert (tmp_path / "status").read_text() == "75 1\n"
    assert report == (
        f"train_pretrain: stopped on {number.name} before the first step, with nothing to save;"
        " run the same command again\n"
    )


def test_a_term_that_follows_the_death_of_a_peer_is_the_peers_death(tmp_path: Path):
    """What torchrun sends to the survivors."""
    with subprocess.Popen(["sleep", "600"]) as dead:
        stat = Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()
        (tmp_path / "worker-0").write_text(f"0 {dead.pid} {stat[19]}\n")
        started = stuck(tmp_path)
        (tmp_path / f"ended-{dead.pid}").write_text("-9\n")
        dead.kill()
        dead.wait()
        started.terminate()
        _, report = started.communicate(timeout=60)
    assert started.returncode == 7, report
    assert (tmp_path / "status").read_text() == "7 0\n"
    assert f"error[E_PEER] rank=1 step=0: rank 0 (process {dead.pid} on " in report
    assert "died: killed by SIGKILL, perhaps for lack of memory; run the same command" in report


def test_a_term_after_a_peers_report_prints_nothing_and_keeps_the_status(tmp_path: Path):
    started = stuck(tmp_path)
    (tmp_path / "status").write_text("3 0\n")
    started.terminate()
    _, report = started.communicate(timeout=60)
    assert (started.returncode, report) == (3, "")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "variable", [f"MINIMIND_{name}_PID" for name in ("LAUNCHER", "SCRIPT", "SWEEP")]
)
def test_a_worker_ends_when_a_launcher_is_gone_even_as_a_zombie(variable: str, tmp_path: Path):
    launcher = subprocess.Popen(["sleep", "600"])
    started = stuck(tmp_path, **{variable: str(launcher.pid)})
    launcher.kill()  # and not waited for yet
    _, report = started.communicate(timeout=60)
    launcher.wait()
    assert started.returncode == 7
    assert f"the launcher (process {launcher.pid}) was ended" in report


@pytest.mark.parametrize(
    ("environ", "goes_on"),
    [({}, True), ({"RANK": "0"}, False), ({"ACCELERATE_USE_CPU": "true"}, False)],
    ids=["plain", "torchrun", "accelerate"],
)
def test_a_run_outlives_the_shell_that_started_it_but_not_a_launcher(
    environ: dict[str, str], goes_on: bool, tmp_path: Path
):
    """As after `nohup ... &` and a logout, with the hang-up that follows."""
    plain = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    shell = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; "$0" -c "$1" 2> err & echo $!; wait', sys.executable, STUCK],
        env={**plain, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    assert shell.stdout.readline() == "ready\n"
    shell.kill()
    shell.wait()
    shell.stdout.close()
    os.kill(pid, signal.SIGHUP)
    try:
        assert is_over(pid, within=3 if goes_on else 60) != goes_on
        output = (tmp_path / "err").read_text()
        assert (f"the launcher (process {shell.pid}) was ended" in output) != goes_on
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_over(pid: int, within: float) -> bool:
    """Whether the process, which is no child of ours, ends within some seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_table_is_printed_above_the_one_line(capsys: pytest.CaptureFixture[str]):
    wrong = CheckpointError("x belongs to another run; give it back", table=["  a  b", "  1  2"])
    assert Ending(Progress(rank=0), debug=False).report(wrong) == 4
    assert capsys.readouterr().err.splitlines() == [
        "  a  b",
        "  1  2",
        "train_pretrain: error[E_CHECKPOINT] rank=0 step=0: x belongs to another run; give it back",
    ]


def test_a_run_that_fails_before_its_engine_is_there_records_the_end_in_the_folder_it_holds(
    tmp_path: Path,
):
    wrong = CheckpointError("x is damaged; give another")
    with lock_out_dir(tmp_path) as lock:
        assert Ending(Progress(lock=lock), debug=False).report(wrong) == 4
    (end,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (end["event"], end["code"], end["status"]) == ("exit", "E_CHECKPOINT", 4)
    assert end["started"] is False
    assert Ending(Progress(), debug=False).report(wrong) == 4  # nor is any folder its own


def test_the_line_of_an_ending_is_the_last_that_torchrun_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    wrong = UsageError("--dim 7 is odd; give an even one")
    assert Ending(Progress(rank=1), debug=False).report(wrong) == 2
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(path))
    *_, last, rule = str(ChildFailedError("train_pretrain.py", {1: failure})).splitlines()
    line = "train_pretrain: error[E_USAGE] rank=1 step=0: --dim 7 is odd; give an even one"
    assert last == f"  traceback : {line}"
    assert set(rule) == {"="}
    assert Ending(Progress(rank=0, step=4), debug=False).done(75) == 75
    assert "stopped and saved at step 4; run the same" in path.read_text()
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "gone" / "error.json"))
    assert Ending(Progress(), debug=False).report(wrong) == 2


@pytest.mark.usefixtures("status_file")
@pytest.mark.parametrize("place", ["monitor/loss.csv", None])
def test_a_disk_that_a_library_finds_full_is_storage_and_no_bug(place, capsys):
    full = OSError(errno.ENOSPC, "No space left on device", place)
    assert Ending(Progress(), debug=False).report(full) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert f": {place or 'a file that was being written'}: No space left on device; free" in line


def test_the_tutorials_name_of_the_script_runs_it_with_one_notice():
    command = [sys.executable, str(ROOT / "train_pretrain_accelerate.py"), "--epoch", "3"]
    for rank, lines in (("0", 2), ("1", 1)):
        environ = {"PATH": os.environ["PATH"], "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        environ |= MEETING
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        *notice, refusal = done.stderr.splitlines()
        assert len([*notice, refusal]) == lines
        assert set(notice) <= {"train_pretrain_accelerate.py runs train_pretrain.py"}
        assert "unknown flag --epoch; did you mean --epochs?" in refusal


@pytest.mark.usefixtures("handlers", "status_file")
@pytest.mark.parametrize("word", ["Ctrl-C", "SIGUSR1", "SIGHUP"])
def test_a_stop_that_was_passed_on_as_term_is_reported_as_what_it_was(word: str):
    record_stop(word)
    record_stop("SIGTERM")  # the first word stands
    stop = StopRequest()
    stop.listen()
    signal.raise_signal(signal.SIGTERM)
    assert stop.reason == word
    assert stop_reason(signal.SIGUSR1) == "SIGUSR1"  # sent to this very process
    assert describe_end(-signal.SIGTERM) == (f"was stopped by {word} while it started", 75)


WHILE_A_CODEC_IS_LOADED = """
import os, signal, sys
from minimind.runtime.process import record_stop, stop_reason

def at_exec(event, given):
    if event == "exec" and given[0].co_filename.endswith("ascii.py"):
        os.kill(os.getpid(), signal.SIGTERM)

def receive(number, frame):
    record_stop("Ctrl-C")
    print(stop_reason(number))

signal.signal(signal.SIGTERM, receive)
sys.addaudithook(at_exec)
open(os.devnull, encoding="ascii")
"""


def test_a_stop_is_recorded_while_a_codec_is_loaded(tmp_path: Path):
    words = [sys.executable, "-c", WHILE_A_CODEC_IS_LOADED]
    environ = {**os.environ, STATUS_FILE: str(tmp_path / "status")}
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Ctrl-C\n", "")
