"""What a rank knows of the others: whether they live, where they are, and who is to blame.

A stopped or stuck process says nothing, and those that wait for it only learn that something is
late. So every rank beats beside the collectives: it writes into the process group's store where it
is, and whether it gave up waiting. Of those that did not give up, one holds up the others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minimind.errors import PREEMPTED, PeerError, RunError, Stopped
from minimind.runtime.local_workers import (
    Worker,
    end_told,
    ended,
    register,
    registered,
    this_worker,
)
from minimind.runtime.process import STATUS_FILE, Progress

BEAT = 2.0  # seconds between two beats
GRACE = 5.0  # a rank that waits for a dead one is told by its own connection, sooner than by us
SEARCH = 6.0  # how long the others have to say that they gave up too: three beats


class Store(Protocol):
    """What beats need of a torch.distributed.Store."""

    def set(self, key: str, value: str) -> Any:
        """Write `value`."""
        ...

    def multi_get(self, keys: list[str]) -> Sequence[bytes | str]:
        """What the keys hold; waits for those that are not there."""
        ...


@dataclass(frozen=True)
class Lost:
    """Who ended the run, and how; `status` is what the run should answer."""

    rank: int
    told: str
    status: int = PeerError.status
    worker: Worker | None = None  # still there, though of no use

    def error(self) -> RunError:
        """The same, to be told."""
        kind = Stopped if self.status == PREEMPTED else PeerError
        return kind(f"{self.told}; run the same command again", cause_rank=self.rank)


@dataclass
class Watched:
    """Another rank, and for how many seconds it has been seen as it is."""

    worker: Worker
    gone: float = 0.0
    stopped: float = 0.0
    silent: float = 0.0
    unmoved: float = 0.0
    beat: dict[str, Any] | None = None

    def look(self, beat: dict[str, Any] | None, seconds: float) -> None:
        """Compare with the last look, `seconds` ago."""
        state = self.worker.state() if self.worker.is_here() else "elsewhere"
        self.gone = self.gone + seconds if state == "gone" else 0.0
        self.stopped = self.stopped + seconds if state == "stopped" else 0.0
        before, self.beat = self.beat, beat
        is_heard = before is None or (beat or before)["count"] != before["count"]
        self.silent = 0.0 if is_heard else self.silent + seconds
        has_moved = before is None or (beat or before)["at"] != before["at"]
        self.unmoved = 0.0 if has_moved else self.unmoved + seconds


class Peers:
    """The other ranks, as a watch thread and a rank that lost one of them see them."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.me = this_worker(progress.rank)
        self.patience = 120.0  # --dist_timeout
        self._watched: dict[int, Watched] = {}
        self._myself = Watched(self.me)
        self._store: Store | None = None
        self._beats: dict[int, dict[str, Any]] = {}
        self._count = 0
        self._gave_up = False
        self._verdict: Lost | None = None
        self._wake, self._heard, self._closed = (threading.Event() for _ in range(3))
        self._thread: threading.Thread | None = None
        register(self.me)

    def meet(self, everyone: Sequence[Worker], store: Store) -> None:
        """Know all ranks, and write the first beat; `begin` once every rank has."""
        self._watched = {w.rank: Watched(w) for w in everyone if w.rank != self.me.rank}
        self._store = store
        store.set(str(self.me.rank), self._beat())

    def begin(self) -> None:
        """Beat, until `close`."""
        self._thread = threading.Thread(target=self._beats_on, daemon=True, name="beat")
        self._thread.start()

    def close(self) -> None:
        """Watch no more: the ranks part in peace."""
        self._closed.set()
        self._wake.set()
        if self._thread:
            self._thread.join(timeout=2 * BEAT)

    def announce(self, lost: Lost) -> None:
        """Tell the ranks of all hosts what was found, if the store can be reached.

        Those that no file of this host tells it are given the time of a beat to hear it: the store
        may end with this process, and then they would take it for killed.
        """
        self._verdict = lost
        self._fresh()
        has_file = STATUS_FILE in os.environ
        if any(not (has_file and other.worker.is_here()) for other in self._watched.values()):
            self._closed.wait(1.25 * BEAT)

    def _beats_on(self) -> None:
        assert self._store is not None
        ranks = sorted(self._watched)
        while not self._closed.is_set():
            self._wake.clear()
            try:
                self._store.set(str(self.me.rank), self._beat())
                found = self._store.multi_get([str(rank) for rank in ranks])
            except RuntimeError:  # whoever kept the store is gone: silence, as of every other rank
                return
            self._beats = {r: json.loads(text) for r, text in zip(ranks, found, strict=True)}
            self._heard.set()
            self._wake.wait(BEAT)

    def _beat(self) -> str:
        self._count += 1
        clock, step = self.progress.clock, self.progress.step
        lost = self._verdict
        return json.dumps(
            {
                "count": self._count,
                "at": [step, clock.passed if clock else 0],
                "phase": clock.phase if clock and self.progress.is_training else "",
                "where": where_main_is(),
                "gave_up": self._gave_up,
                "verdict": lost and [lost.rank, lost.told, lost.status],
            }
        )

    def _fresh(self, seconds: float = 1.0) -> None:
        """Let a beat pass, so that the others hear of us and we of them."""
        if self._thread and self._thread.is_alive():
            self._heard.clear()
            self._wake.set()
            self._heard.wait(seconds)

    def look(self, seconds: float) -> Lost | None:
        """Whoever the run has certainly lost, looked at every now and then, `seconds` apart.

        Only what cannot be mere slowness: a process that is gone, one that stood still or was not
        heard of for `patience`, one that others wait for so long in a later phase of a step.
        """
        if self._closed.is_set():
            return None
        self._meet_registered()
        self._myself.look(json.loads(self._beat()), seconds)
        for rank, other in list(self._watched.items()):
            other.look(self._beats.get(rank), seconds)
            if other.gone > GRACE:
                return _died(other.worker)
            if other.stopped > self.patience:
                return _stopped(other.worker)
            if self._store and other.silent > self.patience:
                return Lost(rank, f"{other.worker} was not heard of for {other.silent:.0f} s")
        late = self.patience + GRACE  # a collective that gives up by itself does so before
        if self.progress.is_training and self._myself.unmoved > late:
            behind = [o for o in self._watched.values() if o.unmoved > late and self._is_behind(o)]
            return _stuck(behind[0]) if behind else None
        return None

    def _meet_registered(self) -> None:
        """Know the ranks of this host as they come, as long as not all are known."""
        for worker in registered() if self._store is None else ():
            if worker.rank != self.me.rank:
                self._watched.setdefault(worker.rank, Watched(worker))

    def _is_behind(self, other: Watched) -> bool:
        mine = self._myself.beat
        return bool(other.beat and mine and other.beat["at"] < mine["at"])

    def gone(self) -> Lost | None:
        """A rank of this host that ended, without waiting for what it has to say."""
        self._meet_registered()
        others = [other.worker for other in self._watched.values()]
        dead = [w for w in others if w.is_here() and w.state() == "gone"]
        return _died(dead[0]) if dead else None

    def guilty(self, is_told: Callable[[], bool]) -> Lost | None:
        """Who it was, for a rank whose waiting for the others came to nothing; None: not known.

        A peer that died or stands still is seen at once. Else the others get `SEARCH` seconds to
        say that they gave up as well; the one that does not is the one they waited for.
        """
        self._gave_up = True
        deadline = time.monotonic() + (SEARCH if self._store else 1.0)
        while self._watched and not is_told():
            self._fresh()
            if found := self._verdict_of_others() or self.gone() or self._standing():
                return None if is_told() else found
            if self._store and all(self._has_given_up(rank) for rank in self._watched):
                return None  # nobody is stuck: it is what lies between them
            if time.monotonic() >= deadline:
                return self._last_suspect()
            time.sleep(0.1)
        return None

    def _has_given_up(self, rank: int) -> bool:
        return bool(self._beats.get(rank, {}).get("gave_up"))

    def _verdict_of_others(self) -> Lost | None:
        told = [beat["verdict"] for beat in list(self._beats.values()) if beat["verdict"]]
        return Lost(*told[0]) if told else None

    def _standing(self) -> Lost | None:
        others = [other.worker for other in self._watched.values()]
        found = [w for w in others if w.is_here() and w.state() == "stopped"]
        return _stopped(found[0]) if found else None

    def _last_suspect(self) -> Lost | None:
        if self._store is None:
            return None
        left = [other for rank, other in self._watched.items() if not self._has_given_up(rank)]
        for other in left:
            other.beat = self._beats.get(other.worker.rank)
        silent = [o for o in left if not o.worker.is_here() and o.silent > 2 * BEAT]
        if silent:
            return Lost(silent[0].worker.rank, f"{silent[0].worker} died or cannot be reached")
        heard = [o for o in left if o.beat]
        return _stuck(min(heard, key=lambda o: (o.beat or {})["at"])) if heard else None


def _died(worker: Worker) -> Lost:
    how, status = end_told(ended(worker.pid, wait_seconds=1.0))
    return Lost(worker.rank, f"{worker} {how}", status)


def _stopped(worker: Worker) -> Lost:
    return Lost(worker.rank, f"{worker} is stopped (SIGSTOP)", worker=worker)


def _stuck(other: Watched) -> Lost:
    beat = other.beat or {}
    phase = f", phase {beat['phase']}" if beat["phase"] else ""
    told = f"{other.worker} has not moved since step {beat['at'][0]}{phase} ({beat['where']})"
    return Lost(other.worker.rank, told, worker=other.worker if other.worker.is_here() else None)


def where_main_is() -> str:
    """The innermost line of this package that the main thread is in: `in FUNCTION, FILE:LINE`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and not frame.f_globals.get("__name__", "").startswith("minimind"):
        frame = frame.f_back
    if frame is None:
        return "outside of the training code"
    name = frame.f_globals["__name__"].replace(".", "/")
    return f"in {frame.f_code.co_name}, {name}.py:{frame.f_lineno}"
