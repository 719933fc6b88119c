"""What a start says of its long parts, with a timer that the test lets ring."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress

import pytest

from minimind.engine.compile import with_compile_message
from minimind.launch.plan import PROJECT, starting
from minimind.runtime import terminal as phases
from minimind.runtime.terminal import LONG, phase
from tests.train.terminal import scrollback


class Clock:
    """Stands for threading.Timer: nothing passes but what the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[Ringing] = []

    def timer(self, after: float, call: Callable[..., None], args: list[str]) -> Ringing:
        return Ringing(self, self.now + after, lambda: call(*args))

    def wait(self, timer: Ringing) -> None:
        self._waiting.append(timer)

    def forget(self, timer: Ringing) -> None:
        self._waiting = [waiting for waiting in self._waiting if waiting is not timer]

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        for timer in [waiting for waiting in self._waiting if waiting.at <= self.now]:
            self.forget(timer)
            timer.ring()


class Ringing:
    daemon = False

    def __init__(self, clock: Clock, at: float, ring: Callable[[], None]) -> None:
        self.clock, self.at, self.ring = clock, at, ring

    def start(self) -> None:
        assert self.daemon  # or it would keep a process that has ended
        self.clock.wait(self)

    def cancel(self) -> None:
        self.clock.forget(self)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(phases, "Timer", found.timer)
    monkeypatch.delenv("RANK", raising=False)
    return found


def test_a_phase_is_named_once_when_it_has_lasted_two_seconds(clock: Clock, capsys):
    with phase("reading the text"):
        clock.pass_by(LONG - 0.1)
        assert capsys.readouterr().err == ""
        clock.pass_by(0.2)
        with phase("training the tokenizer"):
            clock.pass_by(60)
    clock.pass_by(60)
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", ["reading the text ...", "training the tokenizer ..."])


def test_a_short_phase_prints_nothing_also_where_it_fails(clock: Clock, capsys):
    @phase("building the engine")
    def build() -> None:
        clock.pass_by(1)
        raise ValueError("no engine")

    for _ in range(2):  # a decorator counts each call anew
        with pytest.raises(ValueError, match="no engine"):
            build()
        clock.pass_by(60)
    assert capsys.readouterr().err == ""


def test_other_ranks_speak_only_of_what_they_do_for_all(
    clock: Clock, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "1")
    with phase("importing libraries"), phase("tokenizing the text", on_any_rank=True):
        clock.pass_by(60)
    assert capsys.readouterr().err == "tokenizing the text ...\n"


def test_the_first_call_of_a_compiled_model_is_named_and_no_later_one(clock: Clock, capsys):
    called = with_compile_message(clock.pass_by)
    called(60)
    assert capsys.readouterr().err == (
        "compiling the model, which takes tens of seconds unless torch has it cached ...\n"
    )
    called(60)
    assert capsys.readouterr().err == ""


def test_a_start_continues_where_its_stderr_is_closed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    closed = open("/dev/full", "w")
    monkeypatch.setattr(sys, "stderr", closed)
    with phase("reading the text"):
        clock.pass_by(60)
    with pytest.raises(OSError, match="No space left"):
        closed.close()


@pytest.mark.parametrize(
    ("hosts", "count", "gpus", "report"),
    [
        (1, 2, 0, "starting 2 processes on the CPU (configs/a.yaml"),
        (1, 1, 1, "starting 1 process on 1 GPU (configs/a.yaml"),
        (2, 8, 4, "starting 8 processes on 2 hosts, this one is host 1, 4 GPUs (configs/a.yaml"),
    ],
)
def test_the_first_line_reports_what_is_started(
    hosts: int, count: int, gpus: int, report: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(PROJECT)
    launched = {"num_processes": count, "num_machines": hosts, "machine_rank": 1}
    path = str(PROJECT / "configs" / "a.yaml")
    monkeypatch.setattr(sys, "prefix", str(PROJECT / ".venv"))
    assert starting(launched, gpus, path) == f"{report}) ..."
    monkeypatch.setattr(sys, "prefix", "/opt/conda")
    assert starting(launched, gpus, path) == f"{report}, {sys.executable}) ..."


BAR = "\rtokenizing: 100%|##########| 199k/199k [00:01<00:00, 119kB/s]"


@pytest.mark.parametrize("bar_of", ["another process", "this process", "this process, closing"])
def test_a_phase_line_never_lands_on_a_bar(bar_of: str):
    """At a terminal of 80 columns, with a bar of 60."""
    code = f"""
import sys, os
from tqdm import tqdm
from minimind.runtime.terminal import _print_phase, guarded
with guarded():
    if {bar_of!r} == "another process":
        sys.stderr.write({BAR!r}); sys.stderr.flush()
        _print_phase("reading the text")
        sys.stderr.write({BAR!r} + chr(10))
    else:
        bar = tqdm(total=9, desc="tokenizing", ncols=60, file=sys.stderr)
        bar.update(9)
        if {bar_of!r} == "this process, closing":  # tqdm forgets a bar before its last line
            tqdm._instances.remove(bar)
        _print_phase("reading the text")
        bar.close()
"""
    main, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    done = subprocess.Popen([sys.executable, "-c", code], stdout=end, stderr=end)
    os.close(end)
    written = b""
    with suppress(OSError):  # of a terminal that all have closed
        while piece := os.read(main, 4096):
            written += piece
    os.close(main)
    assert done.wait() == 0, written
    shown = scrollback(written.decode().replace("\r\n", "\n"))
    phases_shown = [line for line in shown if "reading" in line]
    assert phases_shown == ["reading the text ..."]
    assert [line for line in shown if "tokenizing" in line] == [shown[-2]]
    assert "100%" in shown[-2]
    assert all(len(line) < 80 for line in shown)
