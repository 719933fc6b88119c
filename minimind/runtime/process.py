"""What a worker process owes its launcher: its stderr, its signals and its exit status."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

# run_accelerate.sh exports these; under any other launcher they are simply not there.
STATUS_FILE = "MINIMIND_STATUS_FILE"
STDERR_ON_STDIN = "MINIMIND_STDERR_ON_STDIN"
SCRIPT_PID = "MINIMIND_SCRIPT_PID"
LAUNCHER_PID = "MINIMIND_LAUNCHER_PID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun and `accelerate launch` set it for each worker

# Beside the status file: what asked for a stop that run_accelerate.sh passes on as SIGTERM.
STOP_FILE = "stop"

# What asks a run to save and stop. A terminal that closes sends SIGHUP; under nohup it is ignored.
CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def take_back_stderr() -> None:
    """Write to the user's terminal again, past the launcher's log.

    run_accelerate.sh sends the launcher's stderr (its own tracebacks and failure tables) to a file.
    Workers inherit that, and every other descriptor but 0, 1 and 2 is closed on the way, so the
    script hands the real stderr down as descriptor 0, which training never reads.
    """
    if os.environ.pop(STDERR_ON_STDIN, None):
        os.dup2(0, 2)


def stop_reason(number: int) -> str:
    """What a message calls the cause of this signal: what was typed or sent, and to whomever."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    path = os.environ.get(STATUS_FILE)
    if number == signal.SIGTERM and path:
        with suppress(OSError):  # nobody left word: it was sent to this process
            if recorded := Path(path).with_name(STOP_FILE).read_text(encoding="ascii").strip():
                return recorded
    return signal.Signals(number).name


def record_stop(reason: str) -> None:
    """Leave word of why the workers of this host will be sent SIGTERM; the first word stands."""
    path = os.environ.get(STATUS_FILE)
    if path:
        place = Path(path).with_name(STOP_FILE)
        with suppress(OSError), open(place, "x", encoding="ascii") as file:
            file.write(f"{reason}\n")


class StopRequest:
    """Remembers that this process was asked to stop; the loop looks after every step."""

    def __init__(self) -> None:
        self._asked = ""
        self._limit = ""
        self._deadline = math.inf
        self._started = time.monotonic()

    @property
    def reason(self) -> str:
        """What asked: Ctrl-C, a signal or --max_minutes; empty as long as nothing did."""
        if not self._asked and time.monotonic() >= self._deadline:
            self._asked = self._limit
        return self._asked

    @property
    def signal(self) -> str:
        """The signal that asked, if one did: by the clock alone a run takes at least one step."""
        return "" if self._asked == self._limit else self._asked

    def listen(self) -> None:
        """Remember signals from now on, instead of dying of them; in the main thread."""
        for number in CAUGHT:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._remember)

    def limit(self, minutes: float | None) -> None:
        """Ask by the clock, so long after the process started."""
        if minutes is not None:
            self._limit = f"--max_minutes {minutes:g}"
            self._deadline = self._started + 60 * minutes

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.heard(number)

    def heard(self, number: int) -> None:
        """A signal came, as the watch thread may know before the main thread does."""
        self._asked = self._asked or stop_reason(number)


@dataclass
class Progress:
    """Where a run is, for whoever has to stop it or to tell of its end."""

    rank: int = 0
    step: int = 0
    out_dir: Path | None = None  # once it is this run's
    lock: IO[bytes] | None = None  # of out_dir; kept until the end has been told
    has_started: bool = False  # run_start is recorded
    is_training: bool = False  # from here on a request to stop is obeyed after a step and a save
    clock: Any = None  # the loop's PhaseClock
    peers: Any = None  # the Peers, where somebody watches them
    stop: StopRequest = field(default_factory=StopRequest)

    def begin(self) -> StopRequest:
        """The request to stop, which from now on waits for a step and a save."""
        self.is_training = True
        self.stop.listen()
        return self.stop


@dataclass(frozen=True)
class Claim:
    """The ending that is the run's exit status: the first one claimed on this host."""

    status: int
    rank: int  # whose ending it was
    is_ours: bool


def claim_status(status: int, rank: int) -> Claim:
    """Claim the run's exit status for the ending of `rank`; the first claim stands.

    run_accelerate.sh reads the file, because torchrun answers 1 whatever happened.
    """
    path = os.environ.get(STATUS_FILE)
    if not path:
        return Claim(status, rank, is_ours=True)
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="ascii") as file:
            file.write(f"{status} {rank}\n")
        try:
            os.link(draft, path)  # the first one wins, and nobody sees it half written
        finally:
            os.unlink(draft)  # which a second claim of ours would write through
    except FileExistsError:
        return read_claim() or Claim(status, rank, is_ours=True)
    except FileNotFoundError:  # the script was ended by force: nobody is left to read it
        return Claim(status, rank, is_ours=True)
    except OSError as error:
        print(f"cannot record the exit status in {path}: {error.strerror}", file=sys.stderr)
    return Claim(status, rank, is_ours=True)


def read_claim() -> Claim | None:
    """What another process has claimed, if any did."""
    path = os.environ.get(STATUS_FILE)
    try:
        status, rank = Path(path).read_text(encoding="ascii").split() if path else ("", "")
    except OSError:
        return None
    return Claim(int(status), int(rank), is_ours=False) if status else None


def tell_torchrun(line: str) -> None:
    """Leave `line` where torchrun looks for what a worker ended by.

    Below its own traceback, torchrun and `accelerate launch` print a table of the failed workers,
    and this line at its end, where they would otherwise link to a page of torch's documentation.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        told = {"py_callstack": line, "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": line, "extraInfo": told}})
        with suppress(OSError):  # the line has been printed; the launcher can do without
            Path(path).write_text(text, encoding="utf-8")
