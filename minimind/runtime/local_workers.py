"""The worker processes of this host: identity, state, and how they ended.

Under run_accelerate.sh workers register in its scratch folder, beside the status file, so that they
find one another before the process group exists. The launcher, as their parent, records there how
each of them ended (minimind/launch/accelerate_launch.py), and they record what they train, for a
restart on other processes (minimind/launch/restart.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from minimind.errors import PREEMPTED, PeerError
from minimind.runtime.process import CAUGHT, STATUS_FILE, stop_reason


def machine_id() -> str:
    """Identify this machine and PID namespace; empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Worker:
    """The process of a rank; its start time distinguishes it from a later process of its PID."""

    rank: int
    host: str
    pid: int
    started: str  # start time from /proc; empty without /proc
    place: str = field(default_factory=machine_id)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def is_here(self) -> bool:
        """Whether it runs on this machine: hosts and containers may share a name."""
        return (self.host, self.place) == (socket.gethostname(), machine_id())

    def state(self) -> str:
        """`running`, `stopped` (SIGSTOP) or `gone`, for a process of this host."""
        letter, started = _stat(self.pid)
        if not letter or started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter == "T" else "running"

    def kill(self) -> None:
        """Send SIGKILL unless it is gone."""
        if self.state() != "gone":
            os.kill(self.pid, signal.SIGKILL)


def this_worker(rank: int) -> Worker:
    """This process."""
    return Worker(rank, socket.gethostname(), os.getpid(), _stat(os.getpid())[1])


def _stat(pid: int) -> tuple[str, str]:
    """Return state letter and start time of a process; no letter if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        if Path("/proc/self/stat").exists():
            return "", ""
        return ("R" if is_alive(pid) else ""), ""  # no /proc
    fields = text.rpartition(")")[2].split()  # the name may contain anything
    return fields[0], fields[19]


def is_alive(pid: int) -> bool:
    """Whether the process exists; zombies do not count."""
    if Path("/proc/self/stat").exists():
        return _stat(pid)[0] not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, under another user
        return True
    return True


def folder() -> Path | None:
    """The shared folder of this host's workers; None without run_accelerate.sh."""
    path = os.environ.get(STATUS_FILE)
    return Path(path).parent if path else None


def register(worker: Worker) -> None:
    """Register this worker for the others."""
    here = folder()
    if here:
        text = f"{worker.rank} {worker.pid} {worker.started}\n"
        with suppress(FileNotFoundError):  # the script is gone, which the watch thread detects
            _write_atomically(here / f"worker-{worker.rank}", text)


@dataclass(frozen=True)
class Layout:
    """How the workers of a launch divide the rows of a step, and where their run is."""

    launch: str  # another one for every launch, the same on all its hosts
    out_dir: str
    world_size: int
    micro_batch_rows: int
    accumulation_steps: int
    batch_size: int
    split_batches: bool
    resume: str
    fixed_by: str  # the file that fixes accumulation_steps; empty if a flag can change it
    group_size: int = 1  # workers that read the same rows


def record_layout(rank: int, layout: Layout) -> None:
    """Record what this worker trains."""
    here = folder()
    if here:
        with suppress(FileNotFoundError):  # the script is gone, which the watch thread detects
            _write_atomically(here / f"layout-{rank}", json.dumps(asdict(layout)))


def read_layout(here: Path) -> Layout | None:
    """Return what a worker recorded in the folder of its launch; None before its first step."""
    path = next(here.glob("layout-*"), None)
    return Layout(**json.loads(path.read_text(encoding="ascii"))) if path else None


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f"draft-{path.name}")
    draft.write_text(text, encoding="ascii")
    os.replace(draft, path)


def registered_workers() -> list[Worker]:
    """Workers registered on this host."""
    here, workers = folder(), []
    for path in here.glob("worker-*") if here else ():
        with suppress(FileNotFoundError):  # the script is gone
            rank, pid, *started = path.read_text(encoding="ascii").split()
            workers.append(Worker(int(rank), socket.gethostname(), int(pid), "".join(started)))
    return workers


def record_end(here: Path, pid: int, status: int) -> None:
    """Record the exit status of a process, or the signal as a negative number."""
    _write_atomically(here / f"ended-{pid}", f"{status}\n")


def read_end(pid: int, wait_seconds: float = 0.0) -> int | None:
    """Return what `record_end` recorded; None if nothing within `wait_seconds`."""
    here, deadline = folder(), time.monotonic() + wait_seconds
    while here:
        try:
            return int((here / f"ended-{pid}").read_text(encoding="ascii"))
        except OSError:
            if time.monotonic() >= deadline:
                break
        time.sleep(0.02)
    return None


def describe_end(status: int | None) -> tuple[str, int]:
    """Return how a process ended, in words, and the exit status that the run gets from it."""
    if status is None:
        return "died, perhaps killed for lack of memory", PeerError.status
    if status >= 0:
        return f"left before the others, with exit status {status}", PeerError.status
    name = signal.Signals(-status).name
    if -status in CAUGHT:  # before it installed its handlers
        return f"was stopped by {stop_reason(-status)} while it started", PREEMPTED
    if name == "SIGKILL":
        return "died: killed by SIGKILL, perhaps for lack of memory", PeerError.status
    return f"died: crashed by {name}", PeerError.status
