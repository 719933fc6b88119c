"""A worker's interface to its launcher: stderr, signals and exit status."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

NAME = "run_accelerate.sh"  # in the messages of launch/launcher.py and below it
# Exported by launch/launcher.py only.
STATUS_FILE = "MINIMIND_STATUS_FILE"
STDERR_ON_STDIN = "MINIMIND_STDERR_ON_STDIN"
SCRIPT_PID = "MINIMIND_SCRIPT_PID"
LAUNCHER_PID = "MINIMIND_LAUNCHER_PID"
SWEEP_PID = "MINIMIND_SWEEP_PID"  # the command whose trial the run is
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun for each worker

# launcher.py writes it next to the status file: why it passes a stop on as SIGTERM.
STOP_FILE = "stop"

# Signals on which a run saves and stops. A closed terminal sends SIGHUP, which nohup ignores.
CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def restore_stderr() -> None:
    """Restore the user's stderr, which launcher.py passes as descriptor 0.

    It redirects the launcher's stderr (tracebacks and failure tables) to a file, which
    workers inherit; descriptors other than 0, 1 and 2 are closed on the way.
    """
    if os.environ.pop(STDERR_ON_STDIN, None):
        os.dup2(0, 2)


def stop_reason(number: int) -> str:
    """Name the cause of a signal as the user knows it: Ctrl-C, or the original signal."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    path = os.environ.get(STATUS_FILE)
    if number == signal.SIGTERM and path:
        with suppress(OSError):  # not recorded: the signal was sent to this process
            if recorded := Path(path).with_name(STOP_FILE).read_text(encoding="utf-8").strip():
                return recorded
    return signal.Signals(number).name


def record_stop(reason: str) -> None:
    """Record why the workers of this host get SIGTERM; the first record counts.

    In UTF-8, whose codec is always there: a signal may interrupt the import of another one.
    """
    path = os.environ.get(STATUS_FILE)
    if path:
        stop = Path(path).with_name(STOP_FILE)
        with suppress(OSError), open(stop, "x", encoding="utf-8") as file:
            file.write(f"{reason}\n")


def kill_tree(pid: int) -> None:
    """Kill a process and those below it, at the same time.

    Below first: workers print stacks of C++ when torchrun, which has their store, ends.
    """
    import psutil

    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [*top.children(recursive=True), top]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


class StopRequest:
    """Records a request to stop; the training loop checks it after every step."""

    def __init__(self) -> None:
        self._reason = ""
        self._limit = ""
        self._deadline = math.inf
        self._started = time.monotonic()

    @property
    def reason(self) -> str:
        """Ctrl-C, a signal or --max_minutes; empty without a request."""
        if not self._reason and time.monotonic() >= self._deadline:
            self._reason = self._limit
        return self._reason

    @property
    def signal(self) -> str:
        """The reason if it is a signal, else empty: after --max_minutes one step is still taken."""
        return "" if self._reason == self._limit else self._reason

    def listen(self) -> None:
        """Install the signal handlers; no other thread than the main one can, and they stay out."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in CAUGHT:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: self.record_signal(number))

    def limit(self, minutes: float | None) -> None:
        """Request a stop `minutes` after this object was created (None: never)."""
        if minutes is not None:
            self._limit = f"--max_minutes {minutes:g}"
            self._deadline = self._started + 60 * minutes

    def record_signal(self, number: int) -> None:
        """Record a signal; also called by the watch thread, which may see it first."""
        self._reason = self._reason or stop_reason(number)


@dataclass
class Progress:
    """Progress of a run, for the code that stops it or reports its end."""

    rank: int = 0
    step: int = 0
    out_dir: Path | None = None  # once it is locked by this run
    lock: IO[bytes] | None = None  # lock of out_dir; held until the end is reported
    has_started: bool = False  # run_start is recorded
    is_training: bool = False  # a request to stop now takes effect after a step and a save
    clock: Any = None  # the loop's PhaseClock
    peers: Any = None  # the Peers, if monitored
    stop: StopRequest = field(default_factory=StopRequest)

    def begin(self) -> StopRequest:
        """Start training: a request to stop now waits for a step and a save."""
        self.is_training = True
        self.stop.listen()
        return self.stop


@dataclass(frozen=True)
class Claim:
    """The exit status of the run: the first one claimed on this host."""

    status: int
    rank: int  # the rank that caused it
    is_ours: bool


def claim_status(status: int, rank: int) -> Claim:
    """Claim the exit status of the run for `rank`; the first claim counts.

    launcher.py reads the file, because torchrun always exits with 1.
    """
    path = os.environ.get(STATUS_FILE)
    if not path:
        return Claim(status, rank, is_ours=True)
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="ascii") as file:
            file.write(f"{status} {rank}\n")
        try:
            os.link(draft, path)  # atomic: the first one wins
        finally:
            os.unlink(draft)  # a hard link to the claim: reopening it would overwrite the claim
    except FileExistsError:
        return read_claim() or Claim(status, rank, is_ours=True)
    except FileNotFoundError:  # the script was killed
        return Claim(status, rank, is_ours=True)
    except OSError as error:
        print(f"cannot record the exit status in {path}: {error.strerror}", file=sys.stderr)
    return Claim(status, rank, is_ours=True)


def read_claim() -> Claim | None:
    """Return the claim of another process, if any."""
    path = os.environ.get(STATUS_FILE)
    try:
        status, rank = Path(path).read_text(encoding="ascii").split() if path else ("", "")
    except OSError:
        return None
    return Claim(int(status), int(rank), is_ours=False) if status else None


def write_torchrun_error(line: str) -> None:
    """Write `line` to torchrun's error file.

    torchrun and `accelerate launch` print a table of failed workers that ends with this line, where
    they would otherwise link to torch's documentation.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        info = {"py_callstack": line, "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": line, "extraInfo": info}})
        with suppress(OSError):  # the line was printed already
            Path(path).write_text(text, encoding="utf-8")
