"""The worker processes of this host: who they are, whether they live, and how they ended.

Under run_accelerate.sh they leave their names in its scratch folder, beside the status file, so
that they know one another before the process group stands; and the launcher, which alone is told
how a child of its ended, leaves word there (scripts/accelerate_launch.py).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from minimind.errors import PREEMPTED, PeerError
from minimind.runtime.process import CAUGHT, STATUS_FILE, stop_reason


def this_place() -> str:
    """What tells this machine's processes from those of others of its name; empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Worker:
    """One rank's process; with its start time no other process can be taken for it."""

    rank: int
    host: str
    pid: int
    started: str  # as /proc has it; empty where there is none
    place: str = field(default_factory=this_place)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def is_here(self) -> bool:
        """Whether it is a process whose /proc is ours: hosts and containers may share a name."""
        return (self.host, self.place) == (socket.gethostname(), this_place())

    def state(self) -> str:
        """`running`, `stopped` (by SIGSTOP) or `gone`, of a process of this host."""
        letter, started = _stat(self.pid)
        if not letter or started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter == "T" else "running"

    def kill(self) -> None:
        """SIGKILL, which also ends what is stopped; nothing when it is gone already."""
        if self.state() != "gone":
            os.kill(self.pid, signal.SIGKILL)


def this_worker(rank: int) -> Worker:
    """This process."""
    return Worker(rank, socket.gethostname(), os.getpid(), _stat(os.getpid())[1])


def _stat(pid: int) -> tuple[str, str]:
    """(state letter, start time) of a process; an empty letter when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        if Path("/proc/self/stat").exists():
            return "", ""
        return ("R" if is_alive(pid) else ""), ""  # no /proc: all that can be known
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, ours or not; a zombie is none."""
    if Path("/proc/self/stat").exists():
        return _stat(pid)[0] not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, under another user
        return True
    return True


def folder() -> Path | None:
    """Where the workers of this host leave word for one another; None without run_accelerate.sh."""
    path = os.environ.get(STATUS_FILE)
    return Path(path).parent if path else None


def register(worker: Worker) -> None:
    """Leave this worker's name for the others, whole or not at all."""
    here = folder()
    if here:
        text = f"{worker.rank} {worker.pid} {worker.started}\n"
        with suppress(FileNotFoundError):  # the script is gone, and its folder; watched for
            _leave_word(here / f"worker-{worker.rank}", text)


def _leave_word(path: Path, text: str) -> None:
    draft = path.with_name(f"draft-{path.name}")
    draft.write_text(text, encoding="ascii")
    os.replace(draft, path)


def registered() -> list[Worker]:
    """The workers of this host that have left their names."""
    here, found = folder(), []
    for path in here.glob("worker-*") if here else ():
        with suppress(FileNotFoundError):  # the script is gone, and took it away
            rank, pid, *started = path.read_text(encoding="ascii").split()
            found.append(Worker(int(rank), socket.gethostname(), int(pid), "".join(started)))
    return found


def record_end(here: Path, pid: int, status: int) -> None:
    """Leave word of how a process ended: an exit status, or a signal as a negative number."""
    _leave_word(here / f"ended-{pid}", f"{status}\n")


def ended(pid: int, wait_seconds: float = 0.0) -> int | None:
    """What `record_end` left of a process; None where nobody told within `wait_seconds`."""
    here, deadline = folder(), time.monotonic() + wait_seconds
    while here:
        try:
            return int((here / f"ended-{pid}").read_text(encoding="ascii"))
        except OSError:
            if time.monotonic() >= deadline:
                break
        time.sleep(0.02)
    return None


def end_told(status: int | None) -> tuple[str, int]:
    """(how a process ended, in words, and the exit status that this means for the run)."""
    if status is None:
        return "died, perhaps killed for lack of memory", PeerError.status
    if status >= 0:
        return f"left before the others, with exit status {status}", PeerError.status
    name = signal.Signals(-status).name
    if -status in CAUGHT:  # before it could listen
        return f"was stopped by {stop_reason(-status)} while it started", PREEMPTED
    if name == "SIGKILL":
        return "died: killed by SIGKILL, perhaps for lack of memory", PeerError.status
    return f"died: crashed by {name}", PeerError.status
