"""Liveness of the other ranks, and the worker processes of this host: which failed, and how.

A stopped or stuck process is silent, and ranks that wait for it only see a timeout. So every rank
writes heartbeats to the process group's store, beside the collectives: its step, and whether one of
its collectives failed. If those of all other ranks have failed, they wait for this one.

Only rank 0 reads the heartbeats of all ranks. The others read its digest, whose size does not
depend on their number, and so they also see that rank 0 itself is silent or stuck.
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
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from minimind.errors import PREEMPTED, PeerError, RunError, Stopped
from minimind.runtime import disk
from minimind.runtime.process import CAUGHT, STATUS_FILE, Progress, stop_reason


@cache  # asked for every rank
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


def this_worker(rank: int, pid: int | None = None) -> Worker:
    """This process, or another one of this host."""
    pid = pid or os.getpid()
    return Worker(rank, socket.gethostname(), pid, _look(pid)[1])


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
    global_batch_size: int = 0  # rows of a step on any number of workers; 0: no flag says so
    paddable_rows: int = 0  # rows of a step that could have that flag; 0: it is given or refused


def record_layout(rank: int, layout: Layout) -> None:
    """Record what this worker trains."""
    here = folder()
    if here:
        with suppress(FileNotFoundError):  # the script is gone, which the watch thread detects
            _write_atomically(here / f"layout-{rank}", json.dumps(asdict(layout)))


def read_layout(here: Path) -> Layout | None:
    """Return what a worker recorded in the folder of its launch; None before its first step."""
    path = next(disk.matching(here, "layout-*"), None)
    return Layout(**json.loads(path.read_text(encoding="ascii"))) if path else None


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f"draft-{path.name}")
    draft.write_text(text, encoding="ascii")
    os.replace(draft, path)


def registered_workers(here: Path | None = None) -> list[Worker]:
    """Workers registered on this host, in the folder of this launch or of another one."""
    here, workers = here or folder(), []
    for path in disk.matching(here, "worker-*") if here else ():
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
        return f"exited before the others, with status {status}", PeerError.status
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

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> Any:
        """Replace the value of a key if it is `expected_value`."""
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
class LocalState:
    """State of the process of another rank on this machine, and how long it has lasted."""

    worker: Worker
    gone_seconds: float = 0.0
    stopped_seconds: float = 0.0

    def update(self, seconds: float) -> None:
        """Look at the process, `seconds` after the last time."""
        state = self.worker.state()
        self.gone_seconds = self.gone_seconds + seconds if state == "gone" else 0.0
        self.stopped_seconds = self.stopped_seconds + seconds if state == "stopped" else 0.0


@dataclass
class Pulse:
    """The latest heartbeat of a rank, how long it is the latest, and the rank has not moved."""

    beat: dict[str, Any]
    silent_seconds: float = 0.0
    unmoved_seconds: float = 0.0

    def update(self, beat: dict[str, Any], seconds: float) -> None:
        """Take the latest heartbeat, `seconds` after the last update."""
        before, self.beat = self.beat, beat
        is_new, has_moved = (beat[name] != before[name] for name in ("count", "at"))
        self.silent_seconds = 0.0 if is_new else self.silent_seconds + seconds
        self.unmoved_seconds = 0.0 if has_moved else self.unmoved_seconds + seconds


DIGEST, VERDICT = "digest", "verdict"  # keys of the store; the others are ranks
MOST_SILENT = 16  # ranks named in a digest: a reader passes over those of its own machine


@dataclass(frozen=True)
class Digest:
    """What rank 0 tells about all ranks."""

    # Heartbeats of three ranks: rank 0, the one furthest behind and the awaited one.
    beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    # The rank furthest behind of those that have not given up; None: all have, -1: not known.
    awaited: int | None = -1
    silent: tuple[int, ...] = ()  # ranks that have not given up and sent nothing for two intervals

    @classmethod
    def of(cls, beats: dict[int, dict[str, Any]], pulses: dict[int, Pulse]) -> Digest:
        """The digest of the heartbeats of all ranks."""

        def behind(ranks: list[int]) -> int | None:
            return min(ranks, key=lambda rank: (beats[rank]["at"], rank), default=None)

        waiting = [rank for rank, beat in beats.items() if not beat["gave_up"]]
        awaited = behind(waiting)
        named = {0, behind([*beats]), awaited}
        silent = (rank for rank in waiting if rank in pulses and _is_silent(pulses[rank]))
        return cls(
            {rank: beats[rank] for rank in named if rank is not None},
            awaited,
            tuple(islice(silent, MOST_SILENT)),
        )

    @classmethod
    def from_json(cls, text: bytes | str) -> Digest:
        beats, awaited, silent = json.loads(text)
        return cls({int(rank): beat for rank, beat in beats.items()}, awaited, tuple(silent))

    def to_json(self) -> str:
        return json.dumps([self.beats, self.awaited, self.silent])


def _is_silent(pulse: Pulse) -> bool:
    return pulse.silent_seconds > 2 * HEARTBEAT_INTERVAL


class Peers:
    """Monitors the other ranks, for the watch thread and for a rank that lost a peer."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.me = this_worker(progress.rank)
        self.timeout = 120.0  # --dist_timeout
        self._workers: dict[int, Worker] = {}  # the other ranks
        self._local: dict[int, LocalState] = {}  # those of them that run on this machine
        self._pulses: dict[int, Pulse] = {}  # of the ranks that this one hears of
        self._own: Pulse | None = None
        self._store: Store | None = None
        self._beats: dict[int, dict[str, Any]] = {}  # all on rank 0, elsewhere those of the digest
        self._digest = Digest()
        self._count = 0
        self._gave_up = False
        self._verdict: FailedRank | None = None  # of this rank
        self._heard_verdict: FailedRank | None = None
        self._heard_seconds = 0.0
        self._wake, self._received, self._closed = (threading.Event() for _ in range(3))
        self._thread: threading.Thread | None = None
        register(self.me)

    def set_peers(self, everyone: Sequence[Worker], store: Store) -> None:
        """Set the peers and write the first heartbeat; call `start` once all ranks have."""
        self._workers, self._local = {}, {}
        for worker in everyone:
            self._add(worker)
        self._store = store
        store.set(str(self.me.rank), json.dumps(self._heartbeat()))
        if self.me.rank == 0:
            store.set(DIGEST, self._digest.to_json())
            store.set(VERDICT, "")

    def _add(self, worker: Worker) -> None:
        if worker.rank != self.me.rank:
            self._workers.setdefault(worker.rank, worker)
            if worker.is_here():
                self._local.setdefault(worker.rank, LocalState(worker))

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
        if any(not (has_file and rank in self._local) for rank in [*self._workers]):
            self._closed.wait(1.25 * HEARTBEAT_INTERVAL)

    def _send_heartbeats(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            try:
                self._send_and_hear()
            except RuntimeError:  # the process of the store is gone: all ranks become silent
                return
            self._received.set()
            self._wake.wait(HEARTBEAT_INTERVAL)

    def _send_and_hear(self) -> None:
        store, beat, verdict = self._store, self._heartbeat(), self._verdict
        assert store is not None
        store.set(str(self.me.rank), json.dumps(beat))
        if verdict:  # the first one counts
            found = [verdict.rank, verdict.description, verdict.status]
            store.compare_set(VERDICT, "", json.dumps([self.me.rank, *found]))
        if self.me.rank == 0:
            ranks = [*self._workers]
            verdict, *texts = store.multi_get([VERDICT, *map(str, ranks)])
            self._beats = dict(zip(ranks, map(json.loads, texts), strict=True))
            self._digest = Digest.of({0: beat, **self._beats}, self._pulses)
            store.set(DIGEST, self._digest.to_json())
        else:
            verdict, text = store.multi_get([VERDICT, DIGEST])
            self._digest = Digest.from_json(text)
            self._beats = {r: b for r, b in self._digest.beats.items() if r != self.me.rank}
        if verdict:
            sender, *found = json.loads(verdict)
            self._heard_verdict = None if sender == self.me.rank else FailedRank(*found)

    def _heartbeat(self) -> dict[str, Any]:
        self._count += 1
        clock, step = self.progress.clock, self.progress.step
        return {
            "count": self._count,
            "at": [step, clock.passed if clock else 0],
            "phase": clock.phase if clock and self.progress.is_training else "",
            "where": main_thread_location(),
            "gave_up": self._gave_up,
        }

    def _exchange(self, seconds: float = 1.0) -> None:
        """Send a heartbeat now and wait for those of the others."""
        if self._thread and self._thread.is_alive():
            self._received.clear()
            self._wake.set()
            self._received.wait(seconds)

    def check(self, seconds: float) -> FailedRank | None:
        """Return a failed rank, if any; `seconds` is the time since the last call.

        Failed is a process of this machine that exited or was stopped for `timeout`, a rank that
        was silent for so long, one that is behind this rank while neither has moved for longer,
        and one that another rank has announced. Rank 0 watches all ranks, the others rank 0.
        """
        if self._closed.is_set():
            return None
        self._add_registered()
        for local in list(self._local.values()):
            local.update(seconds)
            if local.gone_seconds > GONE_GRACE:
                return _died(local.worker)
            if local.stopped_seconds > self.timeout:
                return _stopped(local.worker)
        self._heard_seconds += seconds if self._heard_verdict else 0.0
        if self._heard_seconds > GONE_GRACE:  # its own collectives fail sooner
            return self._heard_verdict
        own = self._own = _pulse(self._own, self._heartbeat(), seconds)
        beats, before = self._beats, self._pulses
        self._pulses = {r: _pulse(before.get(r), beat, seconds) for r, beat in beats.items()}
        for rank in beats if self.me.rank == 0 else {0} & {*beats}:
            if (silent := self._pulses[rank].silent_seconds) > self.timeout:
                return FailedRank(
                    rank, f"{self._workers[rank]} sent no heartbeat for {silent:.0f} s"
                )
        late = self.timeout + GONE_GRACE  # collectives time out before
        if self.progress.is_training and own.unmoved_seconds > late:
            behind = [
                rank
                for rank, pulse in self._pulses.items()
                if pulse.unmoved_seconds > late and pulse.beat["at"] < own.beat["at"]
            ]
            last = min(behind, key=lambda rank: beats[rank]["at"], default=None)
            return None if last is None else self._stuck(last, beats[last])
        return None

    def _add_registered(self) -> None:
        """Add the ranks registered on this host; no-op after `set_peers`."""
        for worker in registered_workers() if self._store is None else ():
            self._add(worker)

    def gone(self) -> FailedRank | None:
        """Return a rank of this host that ended, without waiting for its report."""
        self._add_registered()
        dead = (local.worker for local in list(self._local.values()))
        return next((_died(worker) for worker in dead if worker.state() == "gone"), None)

    def find_culprit(self, is_reported: Callable[[], bool]) -> FailedRank | None:
        """Return the rank that made a collective fail; None if unknown or `is_reported()`.

        A peer that died or is stopped is found at once. Otherwise the others have VERDICT_TIMEOUT
        to report that they gave up too; the one that does not is responsible.
        """
        self._gave_up = True
        deadline = time.monotonic() + (VERDICT_TIMEOUT if self._store else 1.0)
        while self._workers and not is_reported():
            self._exchange()
            if culprit := self._heard_verdict or self.gone() or self._stopped_peer():
                return None if is_reported() else culprit
            if self._store and self._digest.awaited is None:
                return None  # nobody is stuck: the connection failed
            if time.monotonic() >= deadline:
                return self._most_likely_culprit()
            time.sleep(0.1)
        return None

    def _stopped_peer(self) -> FailedRank | None:
        stopped = (local.worker for local in list(self._local.values()))
        return next((_stopped(worker) for worker in stopped if worker.state() == "stopped"), None)

    def _most_likely_culprit(self) -> FailedRank | None:
        beats, awaited = self._digest.beats, self._digest.awaited
        first = self._pulses.get(0)  # None on rank 0; if it is silent, its digest is old
        silent = (0,) if first and _is_silent(first) else self._digest.silent
        for rank in silent:
            if rank != self.me.rank and rank not in self._local:
                return FailedRank(rank, f"{self._workers[rank]} died or cannot be reached")
        if awaited is None or awaited not in beats or awaited == self.me.rank:
            return None
        return self._stuck(awaited, beats[awaited])

    def _stuck(self, rank: int, beat: dict[str, Any]) -> FailedRank:
        phase = f", phase {beat['phase']}" if beat["phase"] else ""
        where = f"step {beat['at'][0]}{phase} ({beat['where']})"
        is_here = rank in self._local
        description = f"{self._workers[rank]} has not moved since {where}"
        return FailedRank(rank, description, worker=self._workers[rank] if is_here else None)


def _pulse(pulse: Pulse | None, beat: dict[str, Any], seconds: float) -> Pulse:
    """The pulse of a rank with its latest heartbeat; a new one for a rank not heard of before."""
    if pulse is None:
        return Pulse(beat)
    pulse.update(beat, seconds)
    return pulse


def _died(worker: Worker) -> FailedRank:
    how, status = describe_end(read_end(worker.pid, wait_seconds=1.0))
    return FailedRank(worker.rank, f"{worker} {how}", status)


def _stopped(worker: Worker) -> FailedRank:
    return FailedRank(worker.rank, f"{worker} is stopped (SIGSTOP)", worker=worker)


def main_thread_location() -> str:
    """Innermost line of this package in the main thread: `in FUNCTION, FILE:LINE`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and not frame.f_globals.get("__name__", "").startswith("minimind"):
        frame = frame.f_back
    if frame is None:
        return "outside of the training code"
    name = frame.f_globals["__name__"].replace(".", "/")
    return f"in {frame.f_code.co_name}, {name}.py:{frame.f_lineno}"
