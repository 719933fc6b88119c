"""Liveness of the other ranks, and the worker processes of this host: which failed, and how.

A stopped or stuck process is silent, and ranks that wait for it only see a timeout. So every rank
writes heartbeats to the process group's store, beside the collectives: its step, and whether a
collective failed on it. A rank whose own collectives have not
failed is the one the others wait for.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from minimind.errors import PREEMPTED, PeerError, RunError, Stopped
from minimind.runtime.process import CAUGHT, STATUS_FILE, Progress, stop_reason


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
    started: str  # empty if it is gone
    place: str = field(default_factory=machine_id)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def is_here(self) -> bool:
        """Whether it runs on this machine: hosts and containers may share a name."""
        return (self.host, self.place) == (socket.gethostname(), machine_id())

    def state(self) -> str:
        """`running`, `stopped` (SIGSTOP) or `gone`, for a process of this host."""
        state, started = _look(self.pid)
        if state == "gone" or started != self.started:
            return "gone"
        return "stopped" if state == "stopped" else "running"

    def kill(self) -> None:
        """Send SIGKILL unless it is gone."""
        if self.state() != "gone":
            os.kill(self.pid, signal.SIGKILL)


def this_worker(rank: int) -> Worker:
    """This process."""
    return Worker(rank, socket.gethostname(), os.getpid(), _look(os.getpid())[1])


def _look(pid: int) -> tuple[str, str]:
    """State (psutil's, or `gone`) and start time of a process."""
    import psutil  # imported late: most commands look at no process

    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        state = process.status()
        if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone", ""
        if not psutil.LINUX:
            return state, str(process.create_time())
        # In ticks since the boot: psutil's time of day moves when the clock of Linux is set.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return state, stat.rpartition(")")[2].split()[19]  # the name may contain anything
    return "gone", ""


def is_alive(pid: int) -> bool:
    """Whether the process exists; zombies do not count."""
    return _look(pid)[0] != "gone"


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
    split_unit: int = 0  # divides the batches of stages, which count over all workers; 0: none


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


HEARTBEAT_INTERVAL = 2.0  # seconds
GONE_GRACE = 5.0  # seconds; ranks in a collective with a dead one get an error sooner
VERDICT_TIMEOUT = 6.0  # seconds for the others to report that they gave up: three heartbeats
RUN_AGAIN = "; run the same command again"


class Store(Protocol):
    """The part of torch.distributed.Store that heartbeats use."""

    def set(self, key: str, value: str) -> Any: ...

    def multi_get(self, keys: list[str]) -> Sequence[bytes | str]:
        """Return the values of the keys; waits for missing ones."""
        ...


@dataclass(frozen=True)
class FailedRank:
    """The rank that ended the run, a description, and the run's exit status."""

    rank: int
    description: str
    status: int = PeerError.status
    worker: Worker | None = None  # if still alive

    def error(self) -> RunError:
        error_class = Stopped if self.status == PREEMPTED else PeerError
        what = self.description.removesuffix(RUN_AGAIN)  # a rank that ended has said so already
        return error_class(f"{what}{RUN_AGAIN}", cause_rank=self.rank)


@dataclass
class PeerState:
    """State of another rank, with the seconds that each condition has lasted."""

    worker: Worker
    gone_seconds: float = 0.0
    stopped_seconds: float = 0.0
    silent_seconds: float = 0.0
    unmoved_seconds: float = 0.0
    beat: dict[str, Any] | None = None

    def update(self, beat: dict[str, Any] | None, seconds: float) -> None:
        """Update with the latest heartbeat, `seconds` after the last update."""
        state = self.worker.state() if self.worker.is_here() else "elsewhere"
        self.gone_seconds = self.gone_seconds + seconds if state == "gone" else 0.0
        self.stopped_seconds = self.stopped_seconds + seconds if state == "stopped" else 0.0
        before, self.beat = self.beat, beat
        is_new = before is None or (beat or before)["count"] != before["count"]
        self.silent_seconds = 0.0 if is_new else self.silent_seconds + seconds
        has_moved = before is None or (beat or before)["at"] != before["at"]
        self.unmoved_seconds = 0.0 if has_moved else self.unmoved_seconds + seconds


class Peers:
    """Monitors the other ranks, for the watch thread and for a rank that lost a peer."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.me = this_worker(progress.rank)
        self.timeout = 120.0  # --dist_timeout
        self._watched: dict[int, PeerState] = {}
        self._own_state = PeerState(self.me)
        self._store: Store | None = None
        self._beats: dict[int, dict[str, Any]] = {}
        self._count = 0
        self._gave_up = False
        self._verdict: FailedRank | None = None
        self._wake, self._received, self._closed = (threading.Event() for _ in range(3))
        self._thread: threading.Thread | None = None
        register(self.me)

    def set_peers(self, everyone: Sequence[Worker], store: Store) -> None:
        """Set the peers and write the first heartbeat; call `start` once all ranks have."""
        self._watched = {w.rank: PeerState(w) for w in everyone if w.rank != self.me.rank}
        self._store = store
        store.set(str(self.me.rank), self._heartbeat())

    def start(self) -> None:
        """Send heartbeats until `close`."""
        self._thread = threading.Thread(target=self._send_heartbeats, daemon=True, name="beat")
        self._thread.start()

    def close(self) -> None:
        """Stop monitoring: the ranks end normally."""
        self._closed.set()
        self._wake.set()
        if self._thread:
            self._thread.join(timeout=2 * HEARTBEAT_INTERVAL)

    def announce(self, lost: FailedRank) -> None:
        """Publish the verdict to all ranks through the store, if it can be reached.

        Ranks without the shared status file learn it from the store. Wait one heartbeat for them,
        because the store may end with this process.
        """
        self._verdict = lost
        self._exchange()
        has_file = STATUS_FILE in os.environ
        if any(not (has_file and other.worker.is_here()) for other in self._watched.values()):
            self._closed.wait(1.25 * HEARTBEAT_INTERVAL)

    def _send_heartbeats(self) -> None:
        assert self._store is not None
        ranks = sorted(self._watched)
        while not self._closed.is_set():
            self._wake.clear()
            try:
                self._store.set(str(self.me.rank), self._heartbeat())
                texts = self._store.multi_get([str(rank) for rank in ranks])
            except RuntimeError:  # the process of the store is gone: all ranks become silent
                return
            self._beats = {r: json.loads(text) for r, text in zip(ranks, texts, strict=True)}
            self._received.set()
            self._wake.wait(HEARTBEAT_INTERVAL)

    def _heartbeat(self) -> str:
        self._count += 1
        clock, step = self.progress.clock, self.progress.step
        lost = self._verdict
        return json.dumps(
            {
                "count": self._count,
                "at": [step, clock.passed if clock else 0],
                "phase": clock.phase if clock and self.progress.is_training else "",
                "where": main_thread_location(),
                "gave_up": self._gave_up,
                "verdict": lost and [lost.rank, lost.description, lost.status],
            }
        )

    def _exchange(self, seconds: float = 1.0) -> None:
        """Send a heartbeat now and wait for those of the others."""
        if self._thread and self._thread.is_alive():
            self._received.clear()
            self._wake.set()
            self._received.wait(seconds)

    def check(self, seconds: float) -> FailedRank | None:
        """Return a failed rank, if any; `seconds` is the time since the last call.

        Failed is a process that exited, one that was stopped or silent for `timeout`, or one that
        is behind this rank while neither has moved for longer.
        """
        if self._closed.is_set():
            return None
        self._add_registered()
        self._own_state.update(json.loads(self._heartbeat()), seconds)
        for rank, other in list(self._watched.items()):
            other.update(self._beats.get(rank), seconds)
            if other.gone_seconds > GONE_GRACE:
                return _died(other.worker)
            if other.stopped_seconds > self.timeout:
                return _stopped(other.worker)
            if self._store and other.silent_seconds > self.timeout:
                return FailedRank(
                    rank, f"{other.worker} sent no heartbeat for {other.silent_seconds:.0f} s"
                )
        late = self.timeout + GONE_GRACE  # collectives time out before
        if self.progress.is_training and self._own_state.unmoved_seconds > late:
            behind = [
                o for o in self._watched.values() if o.unmoved_seconds > late and self._is_behind(o)
            ]
            return _stuck(behind[0]) if behind else None
        return None

    def _add_registered(self) -> None:
        """Add the ranks registered on this host; no-op after `set_peers`."""
        for worker in registered_workers() if self._store is None else ():
            if worker.rank != self.me.rank:
                self._watched.setdefault(worker.rank, PeerState(worker))

    def _is_behind(self, other: PeerState) -> bool:
        mine = self._own_state.beat
        return bool(other.beat and mine and other.beat["at"] < mine["at"])

    def gone(self) -> FailedRank | None:
        """Return a rank of this host that ended, without waiting for its report."""
        self._add_registered()
        others = [other.worker for other in self._watched.values()]
        dead = [w for w in others if w.is_here() and w.state() == "gone"]
        return _died(dead[0]) if dead else None

    def find_culprit(self, is_reported: Callable[[], bool]) -> FailedRank | None:
        """Return the rank that made a collective fail; None if unknown or `is_reported()`.

        A peer that died or is stopped is found at once. Otherwise the others have VERDICT_TIMEOUT
        to report that they gave up too; the one that does not is responsible.
        """
        self._gave_up = True
        deadline = time.monotonic() + (VERDICT_TIMEOUT if self._store else 1.0)
        while self._watched and not is_reported():
            self._exchange()
            if culprit := self._verdict_of_others() or self.gone() or self._stopped_peer():
                return None if is_reported() else culprit
            if self._store and all(self._has_given_up(rank) for rank in self._watched):
                return None  # nobody is stuck: the connection failed
            if time.monotonic() >= deadline:
                return self._most_likely_culprit()
            time.sleep(0.1)
        return None

    def _has_given_up(self, rank: int) -> bool:
        return bool(self._beats.get(rank, {}).get("gave_up"))

    def _verdict_of_others(self) -> FailedRank | None:
        verdicts = [beat["verdict"] for beat in list(self._beats.values()) if beat["verdict"]]
        return FailedRank(*verdicts[0]) if verdicts else None

    def _stopped_peer(self) -> FailedRank | None:
        others = [other.worker for other in self._watched.values()]
        stopped = [w for w in others if w.is_here() and w.state() == "stopped"]
        return _stopped(stopped[0]) if stopped else None

    def _most_likely_culprit(self) -> FailedRank | None:
        if self._store is None:
            return None
        remaining = [other for rank, other in self._watched.items() if not self._has_given_up(rank)]
        for other in remaining:
            other.beat = self._beats.get(other.worker.rank)
        silent = [
            o
            for o in remaining
            if not o.worker.is_here() and o.silent_seconds > 2 * HEARTBEAT_INTERVAL
        ]
        if silent:
            return FailedRank(
                silent[0].worker.rank, f"{silent[0].worker} died or cannot be reached"
            )
        with_heartbeat = [o for o in remaining if o.beat]
        return (
            _stuck(min(with_heartbeat, key=lambda o: (o.beat or {})["at"]))
            if with_heartbeat
            else None
        )


def _died(worker: Worker) -> FailedRank:
    how, status = describe_end(read_end(worker.pid, wait_seconds=1.0))
    return FailedRank(worker.rank, f"{worker} {how}", status)


def _stopped(worker: Worker) -> FailedRank:
    return FailedRank(worker.rank, f"{worker} is stopped (SIGSTOP)", worker=worker)


def _stuck(other: PeerState) -> FailedRank:
    beat = other.beat or {}
    phase = f", phase {beat['phase']}" if beat["phase"] else ""
    description = (
        f"{other.worker} has not moved since step {beat['at'][0]}{phase} ({beat['where']})"
    )
    return FailedRank(
        other.worker.rank, description, worker=other.worker if other.worker.is_here() else None
    )


def main_thread_location() -> str:
    """Innermost line of this package in the main thread: `in FUNCTION, FILE:LINE`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and not frame.f_globals.get("__name__", "").startswith("minimind"):
        frame = frame.f_back
    if frame is None:
        return "outside of the training code"
    name = frame.f_globals["__name__"].replace(".", "/")
    return f"in {frame.f_code.co_name}, {name}.py:{frame.f_lineno}"
