"""How a worker ends: in one line, with one status, by its main thread or by the one that watches.

The watch thread sees what the main thread cannot while it waits in a collective or works in C: a
launcher that is gone, a peer that is gone, and a signal. Before the first step there is nothing to
save, so that it ends the process itself; later the loop does, after a step and a save.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import closing, suppress
from pathlib import Path

from minimind.errors import PREEMPTED, PeerError, RendezvousError, RunError, Stopped, known_error
from minimind.runtime.durable_files import Metrics
from minimind.runtime.heartbeat import Lost
from minimind.runtime.local_workers import is_alive
from minimind.runtime.process import (
    CAUGHT,
    LAUNCHER_PID,
    SCRIPT_PID,
    STATUS_FILE,
    Claim,
    Progress,
    claim_status,
    read_claim,
    tell_torchrun,
)
from minimind.runtime.terminal import one_line

PROGRAM = "train_pretrain"
AGAIN = "run the same command again"
LATE = 10.0  # seconds; an ending of another rank should have reached us by then
POLL = 1.0  # seconds between two looks; also what a stop waits for news of a peer's death


class Ending:
    """The end of this process, told once whichever thread comes first."""

    def __init__(self, progress: Progress, debug: bool) -> None:
        self.progress = progress
        self.debug = debug
        self._lock = threading.Lock()
        self._status: int | None = None
        # A launcher; without one it is a shell, which may exit and leave the run to itself.
        is_launched = any(name == "RANK" or name.startswith("ACCELERATE_") for name in os.environ)
        self._parent = os.getppid() if is_launched else None
        named = (os.environ.get(name) for name in (LAUNCHER_PID, SCRIPT_PID))
        # What is not a number is refused in a moment (minimind/runtime/environment.py).
        self._launchers = [int(pid) for pid in named if pid and pid.isdecimal()]
        self._over = 0.0  # seconds since another rank of this host told its end

    def done(self, status: int) -> int:
        """The status of a run that came to its end, or stopped and saved."""
        with self._lock:
            if self._status is None:
                claim_status(status, self.progress.rank)
                self._status = status
                if status == PREEMPTED:
                    step = self.progress.step
                    tell_torchrun(f"{PROGRAM}: stopped and saved at step {step}; {AGAIN} to go on")
            return self._status

    def tell(self, error: Exception) -> int:
        """Print the one line, record the end in metrics.jsonl, and return the exit status."""
        with self._lock:
            if self._status is None:
                self._status = self._tell(error)
            return self._status

    def _tell(self, error: Exception, lost: Lost | None = None) -> int:
        rank, peers = self.progress.rank, self.progress.peers
        told = known_error(error)
        is_bug = told is None
        told = told or RunError(str(error) or type(error).__name__)
        is_peer = isinstance(told, PeerError | RendezvousError) and told.cause_rank is None
        if is_peer and peers and not lost:
            lost = peers.guilty(lambda: read_claim() is not None)
        told = lost.error() if lost else told
        cause = rank if told.cause_rank is None else told.cause_rank
        if cause != rank and not lost:  # what one rank met, and tells itself, is raised by all
            claim = Claim(told.status, cause, is_ours=False)
        else:
            claim = claim_status(told.status, cause)
        if claim.is_ours and not self._is_told_elsewhere():
            if self.debug or (is_bug and not lost):
                traceback.print_exception(error)
            self._print(told)
        elif claim.status != PREEMPTED and self.progress.out_dir:
            # Before that all ranks meet the same mistake, and one has told it.
            print(f"{PROGRAM}: stopped because rank {claim.rank} failed", file=sys.stderr)
        if peers and claim.is_ours:
            peers.announce(lost or Lost(rank, f"rank {rank} ended: {told}", claim.status))
        if lost and lost.worker:
            lost.worker.kill()  # or the launcher would wait for it
        return claim.status

    def _print(self, told: RunError) -> None:
        progress, status = self.progress, told.status
        is_asked = status == PREEMPTED
        line = one_line(PROGRAM, told, progress.rank, progress.step)
        line = f"{PROGRAM}: {told}" if is_asked else line
        tell_torchrun(line)
        lines = [*told.table, line]
        with suppress(OSError):  # nobody reads it any more
            print("\n".join(lines), file=sys.stderr, flush=True)
        end = {"code": told.code, "status": status, "reason": str(told), "step": progress.step}
        end |= {} if progress.has_started else {"started": False}  # no end of the start before it
        locked = Path(progress.lock.name).parent if progress.lock else None
        with suppress(OSError):  # where the disk is full, the line above has to do
            if place := progress.out_dir or locked:
                with closing(Metrics(place / "metrics.jsonl")) as metrics:
                    metrics.write("exit", **end)

    def _is_told_elsewhere(self) -> bool:
        """Whether the first rank of this host tells it too, where no file says who was first.

        The launcher then ends this one; if it does not, the mistake is this rank's alone.
        """
        local, is_early = os.environ.get("LOCAL_RANK", "0"), self.progress.out_dir is None
        deadline = time.monotonic() + 3 * POLL
        is_one_of_several = local != "0" and os.environ.get("WORLD_SIZE", "1") != "1"
        while is_one_of_several and is_early and STATUS_FILE not in os.environ:
            if self.progress.stop.reason or time.monotonic() >= deadline:
                return bool(self.progress.stop.reason)
            time.sleep(0.1)
        return False

    def watch(self) -> None:
        """Listen to signals, and look after launchers and peers, from now on."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        self.progress.stop.listen()
        # Written to as soon as a signal comes, also while the main thread is deep in C.
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(receiver,), daemon=True, name="watch").start()

    def _watch(self, receiver: int) -> None:
        last = time.monotonic()
        while self._status is None:
            if select.select([receiver], [], [], POLL)[0]:
                for number in os.read(receiver, 64):
                    if number in CAUGHT:
                        self.progress.stop.heard(number)
            now = time.monotonic()
            # A machine that slept must not take its own silence for that of the peers.
            found = self._look(min(now - last, 2 * POLL))
            last = now
            if found:
                self._leave(found)

    def _look(self, seconds: float) -> RunError | Lost | None:
        """What has ended the run, though the main thread may not know."""
        progress = self.progress
        gone = [pid for pid in self._launchers if not is_alive(pid)]
        if self._parent not in (None, os.getppid()):
            gone.append(self._parent)
        if gone:
            told = f"the launcher (process {gone[0]}) was ended; {AGAIN}"
            return PeerError(told, cause_rank=progress.rank)
        claim = read_claim()
        is_over = claim is not None and claim.status != 0
        self._over = self._over + seconds if is_over else 0.0
        if self._over > LATE:
            return PeerError(f"another rank ended; {AGAIN}")
        if progress.stop.signal and not progress.is_training:
            time.sleep(POLL)  # torchrun asks too, when a peer has died
            if progress.is_training:
                return None
            if is_over or (progress.peers and progress.peers.gone()):
                return PeerError(f"another rank ended; {AGAIN}")
            return Stopped(
                f"stopped on {progress.stop.signal} before the first step, with nothing to save;"
                f" {AGAIN}"
            )
        return progress.peers.look(seconds) if progress.peers and claim is None else None

    def _leave(self, found: RunError | Lost) -> None:
        # Not for ever: the main thread may hold the lock while it cannot write.
        is_free = self._lock.acquire(timeout=10 * POLL)
        if is_free and self._status is None:
            is_lost = isinstance(found, Lost)
            error, lost = (found.error(), found) if is_lost else (found, None)
            self._status = self._tell(error, lost)
        os._exit(self._status or PeerError.status)
