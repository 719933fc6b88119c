"""How a worker ends: one message and one exit status, from the main or the watch thread.

The watch thread detects what the main thread cannot while it waits in a collective or in C code: a
dead launcher, a dead peer, a signal. Before the first step there is nothing to save and it ends the
process itself; later the training loop ends, after a step and a save.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from minimind.errors import (
    HALVED,
    PREEMPTED,
    Interrupted,
    MemoryFull,
    PeerError,
    RendezvousError,
    RunError,
    Stopped,
    is_of_compiler,
    known_error,
)
from minimind.runtime.console import Console
from minimind.runtime.durable_files import Metrics
from minimind.runtime.heartbeat import FailedRank, is_alive
from minimind.runtime.process import (
    CAUGHT,
    LAUNCHER_PID,
    SCRIPT_PID,
    STATUS_FILE,
    SWEEP_PID,
    Claim,
    Progress,
    claim_status,
    read_claim,
    write_torchrun_error,
)
from minimind.runtime.terminal import first_lines, one_line, traceback_text
from minimind.runtime.urls import masked_text

PROGRAM = "train_pretrain"
RUN_AGAIN = "run the same command again"
OTHER_END_TIMEOUT = 10.0  # seconds in which the end of another rank should reach this one
SAME_PRESS = 0.1  # seconds in which wrappers hand on the Ctrl-C that the terminal sends too
POLL = 1.0  # seconds between checks; also how long a stop waits for news of a dead peer
UNWRITTEN = 120  # Python's status where standard output or error cannot be flushed at the end
# Variables of tools such as Nsight Systems, which write their files as libraries are unloaded.
INJECTED = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


def leave(status: int, at_once: bool = False) -> NoReturn:
    """End the process once all is written, without the teardown of modules.

    With torch that teardown takes a second of CPU time, and writes nothing. Threads that are not
    daemons end first, and exit handlers run, unless `at_once`: in those of libraries, a failed rank
    would wait for its peers. Only for the entry point of a process. Raise SystemExit instead where
    a notebook, a profiler, a debugger or `python -i` continues after the program ends.
    """
    if not at_once:
        if _is_observed():
            sys.exit(status)
        # As multiprocessing ends its children; threads may need handlers of concurrent.futures.
        shutdown: Any = vars(threading)["_shutdown"]
        with suppress(KeyboardInterrupt):  # a second Ctrl-C: threads are not waited for
            shutdown()
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream and not stream.closed:  # None: closed by whoever started us
                stream.flush()
        except OSError as error:
            # A failed command has printed its error, and a broken pipe has no reader.
            if not status and stream is sys.stdout and not isinstance(error, BrokenPipeError):
                print(f"standard output: {error.strerror}", file=sys.stderr)
            status = status or UNWRITTEN
    os._exit(status)


def _is_observed() -> bool:
    """Whether another program runs this one, or a tool writes when libraries are unloaded."""
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    callers: set[str | None] = set()  # of the program, which Python or `python -m` calls
    while frame := frame and frame.f_back:
        callers.add(frame.f_globals.get("__name__"))
    is_called = not callers <= {"runpy"}
    return is_called or bool(sys.flags.inspect) or not os.environ.keys().isdisjoint(INJECTED)


def log_end(out_dir: Path, end: Mapping[str, Any], text: str, event: str = "exit") -> None:
    """Record an event, and in console.log the text that was printed."""
    with suppress(OSError):  # the disk is full
        with closing(Metrics(out_dir / "metrics.jsonl")) as metrics:
            metrics.write(event, **end)
        with closing(Console(out_dir)) as console:
            console.begin("end")
            console.write(text)


class Ending:
    """Reports the end of this process once, from whichever thread comes first."""

    def __init__(
        self, progress: Progress, debug: bool, ended_at_once: Callable[[Path], str] | None = None
    ) -> None:
        """ended_at_once: what a second Ctrl-C says of an out_dir; None: it has no effect."""
        self.progress = progress
        self._ended_at_once = ended_at_once
        self._interrupted = math.inf  # when Ctrl-C was first pressed
        self.debug = debug
        self._lock = threading.Lock()
        self._status: int | None = None
        # The launcher; without one the parent is a shell, which may exit before the run.
        is_launched = any(name == "RANK" or name.startswith("ACCELERATE_") for name in os.environ)
        self._parent = os.getppid() if is_launched else None
        named = (os.environ.get(name) for name in (LAUNCHER_PID, SCRIPT_PID, SWEEP_PID))
        # Values that are not numbers are refused later (minimind/runtime/environment.py).
        self._launchers = [int(pid) for pid in named if pid and pid.isdecimal()]
        self._over = 0.0  # seconds since another rank of this host reported its end

    def done(self, status: int) -> int:
        """Record the status of a run that is done, or stopped and saved; return it."""
        with self._lock:
            if self._status is None:
                claim_status(status, self.progress.rank)
                self._status = status
                if status == PREEMPTED:
                    step = self.progress.step
                    write_torchrun_error(
                        f"{PROGRAM}: stopped and saved at step {step}; {RUN_AGAIN} to continue"
                    )
            return self._status

    def report(self, error: Exception) -> int:
        """Print the error, record the end in metrics.jsonl, and return the exit status."""
        with self._lock:
            if self._status is None:
                self._status = self._report(error)
            return self._status

    def _report(self, error: Exception, lost: FailedRank | None = None) -> int:
        rank, peers = self.progress.rank, self.progress.peers
        known, stop = known_error(error), self.progress.stop.signal
        if known is None and stop and is_of_compiler(error):
            known = Stopped(
                f"stopped on {stop} while the model was compiled ({first_lines(error)}), without"
                f" another save; {RUN_AGAIN}"
            )
        is_bug = known is None
        reported = known or RunError(str(error) or type(error).__name__)
        is_peer = isinstance(reported, PeerError | RendezvousError) and reported.cause_rank is None
        if is_peer and peers and not lost:
            lost = peers.find_culprit(lambda: read_claim() is not None)
        reported = lost.error() if lost else reported
        cause = rank if reported.cause_rank is None else reported.cause_rank
        if cause != rank and not lost:  # raised on all ranks, reported by the rank that caused it
            claim = Claim(reported.status, cause, is_ours=False)
        else:
            claim = claim_status(reported.status, cause)
        if claim.is_ours and not self._is_reported_by_local_rank_0():
            trace = traceback_text(error) if self.debug or (is_bug and not lost) else ""
            self._print(reported, trace)
        elif claim.status != PREEMPTED and self.progress.out_dir:
            # Before out_dir is set all ranks raise the same error, and one reports it.
            print(f"{PROGRAM}: stopped because rank {claim.rank} failed", file=sys.stderr)
        if peers and claim.is_ours:
            peers.announce(
                lost
                or FailedRank(
                    rank, f"rank {rank} ended: {masked_text(str(reported))}", claim.status
                )
            )
        if lost and lost.worker:
            lost.worker.kill()  # otherwise the launcher waits for it
        return claim.status

    def _print(self, error: RunError, trace: str) -> None:
        progress, status = self.progress, error.status
        is_stop = status in (PREEMPTED, Interrupted.status)
        line = one_line(PROGRAM, error, f"rank={progress.rank} step={progress.step}")
        reason = masked_text(str(error))
        line = f"{PROGRAM}: {reason}" if is_stop else line
        write_torchrun_error(line)
        lines = [*trace.splitlines(), *map(masked_text, error.table), line]
        if isinstance(error, Interrupted) and sys.stderr.isatty():
            lines.insert(0, "")  # below the progress bar
        with suppress(OSError):  # stderr is closed
            print("\n".join(lines), file=sys.stderr, flush=True)
        end = {"code": error.code, "status": status, "reason": reason, "step": progress.step}
        end |= {} if progress.has_started else {"started": False}  # not the end of an earlier start
        locked = Path(progress.lock.name).parent if progress.lock else None
        out_dir = progress.out_dir or locked
        if out_dir and isinstance(error, MemoryFull) and error.halved:
            with suppress(OSError), closing(Metrics(out_dir / "metrics.jsonl")) as metrics:
                metrics.write(HALVED, step=progress.step, **error.halved)
        if out_dir:
            log_end(out_dir, end, "\n".join(lines))

    def _is_reported_by_local_rank_0(self) -> bool:
        """Whether local rank 0 reports the same error, where no status file decides who does.

        The launcher then ends this process; if it does not, the error is this rank's alone.
        """
        local, is_early = os.environ.get("LOCAL_RANK", "0"), self.progress.out_dir is None
        deadline = time.monotonic() + 3 * POLL
        has_peers = local != "0" and os.environ.get("WORLD_SIZE", "1") != "1"
        while has_peers and is_early and STATUS_FILE not in os.environ:
            if self.progress.stop.reason or time.monotonic() >= deadline:
                return bool(self.progress.stop.reason)
            time.sleep(0.1)
        return False

    def watch(self) -> None:
        """Start listening to signals and monitoring launchers and peers."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        self.progress.stop.listen()
        # Written as soon as a signal arrives, even while the main thread runs C code.
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(receiver,), daemon=True, name="watch").start()

    def _watch(self, receiver: int) -> None:
        last = time.monotonic()
        while self._status is None:
            if select.select([receiver], [], [], POLL)[0]:
                for number in os.read(receiver, 64):
                    if number in CAUGHT:
                        self.progress.stop.record_signal(number)
                    if number == signal.SIGINT and (at_once := self._interrupt()):
                        self._leave(at_once)
            now = time.monotonic()
            # Bounded: a machine that slept must not count that time as silence of its peers.
            end = self._check(min(now - last, 2 * POLL))
            last = now
            if end:
                self._leave(end)

    def _interrupt(self) -> Interrupted | None:
        """The end by a second Ctrl-C in training, at the terminal of a process without a launcher.

        A launcher, or a sweep, gets the key too, and decides.
        """
        is_second = time.monotonic() > self._interrupted + SAME_PRESS
        self._interrupted = min(self._interrupted, time.monotonic())
        out_dir, is_alone = self.progress.out_dir, self._parent is None and os.isatty(0)
        if is_second and is_alone and self._ended_at_once and out_dir and self.progress.is_training:
            return Interrupted(self._ended_at_once(out_dir))
        return None

    def _check(self, seconds: float) -> RunError | FailedRank | None:
        """Return what has ended the run, if anything."""
        progress = self.progress
        gone = [pid for pid in self._launchers if not is_alive(pid)]
        if self._parent not in (None, os.getppid()):
            gone.append(self._parent)
        if gone:
            message = f"the launcher (process {gone[0]}) was ended; {RUN_AGAIN}"
            return PeerError(message, cause_rank=progress.rank)
        claim = read_claim()
        is_over = claim is not None and claim.status != 0
        self._over = self._over + seconds if is_over else 0.0
        if self._over > OTHER_END_TIMEOUT:
            return PeerError(f"another rank ended; {RUN_AGAIN}")
        if progress.stop.signal and not progress.is_training:
            time.sleep(POLL)  # torchrun sends signals too when a peer died
            if progress.is_training:
                return None
            if is_over or (progress.peers and progress.peers.gone()):
                return PeerError(f"another rank ended; {RUN_AGAIN}")
            return Stopped(
                f"stopped on {progress.stop.signal} before the first step, with nothing to save;"
                f" {RUN_AGAIN}"
            )
        return progress.peers.check(seconds) if progress.peers and claim is None else None

    def _leave(self, end: RunError | FailedRank) -> None:
        # The wait has a timeout: the main thread may hold the lock while it is blocked on output.
        is_free = self._lock.acquire(timeout=10 * POLL)
        if is_free and self._status is None:
            is_lost = isinstance(end, FailedRank)
            error, lost = (end.error(), end) if is_lost else (end, None)
            self._status = self._report(error, lost)
        os._exit(self._status or PeerError.status)
