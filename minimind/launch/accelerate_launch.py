"""`accelerate launch` for launcher.py: any signal stops it once, and it records worker exits.

Run with the arguments of `accelerate launch`. torchrun, which this process becomes, forwards TERM
to its workers but not USR1, and a second TERM makes it abandon them while they save. As their
parent it alone learns how a worker ended, and records that for the other workers
(minimind/runtime/heartbeat.py). If no worker reported how the run ended, it does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

if not __package__:  # run as a script: the package is that of this folder, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import_module("minimind")
    del sys.path[0]
from minimind.errors import PREEMPTED, PeerError, RunError, Stopped
from minimind.runtime.environment import allow_connections
from minimind.runtime.exit import leave
from minimind.runtime.heartbeat import Worker, describe_end, folder, record_end
from minimind.runtime.process import (
    CAUGHT,
    LAUNCHER_PID,
    NAME,
    claim_status,
    read_claim,
    record_stop,
    stop_reason,
)
from minimind.runtime.terminal import one_line

AGAIN = "run the same command again"


class StopOnce:
    """Ends torchrun at the first signal; ignores later ones, so that it waits for its workers."""

    def __init__(self) -> None:
        self.reason = ""
        for number in (*CAUGHT, signal.SIGHUP):
            signal.signal(number, self._stop)
        # torchrun would replace these handlers, for every signal of this variable.
        os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.reason:
            self.reason = stop_reason(number)
            record_stop(self.reason)
            raise SystemExit(PREEMPTED)  # while it unwinds, torchrun sends TERM to its workers


def record_ends(here: Path) -> None:
    """Record in `here` how each child ended, before torchrun waits for it.

    Nothing on macOS before Python 3.13, which has no waitid: a peer then knows only that it ended.
    """
    waitid = getattr(os, "waitid", None)
    recorded: set[int] = set()
    while waitid:
        try:
            end = waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # none yet
            end = None
        if end and end.si_pid not in recorded:
            recorded.add(end.si_pid)
            is_exit = end.si_code == os.CLD_EXITED
            try:
                record_end(here, end.si_pid, end.si_status if is_exit else -end.si_status)
            except FileNotFoundError:  # the launcher is gone, and its folder
                return
        time.sleep(0.02)


def run_error(reason: str, failure: Any) -> RunError:
    """Return the error of a run whose workers reported none; `failure` is torchrun's, if any."""
    if reason:
        return Stopped(f"stopped on {reason} before the first step, with nothing to save; {AGAIN}")
    if failure is None:
        return PeerError(f"all workers exited with status 0 before the end of the run; {AGAIN}")
    rank, first = failure.get_first_failure()
    how, status = describe_end(first.exitcode)
    error_class = Stopped if status == PREEMPTED else PeerError
    return error_class(f"{Worker(rank, socket.gethostname(), first.pid, '')} {how}; {AGAIN}", rank)


def main(arguments: list[str]) -> int:
    """Launch; return the launcher's exit status. The run's status is in MINIMIND_STATUS_FILE."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    stop, here, failure = StopOnce(), folder(), None
    if here:
        threading.Thread(target=record_ends, args=(here,), daemon=True).start()
    try:
        # Imported after the signal handlers are set: the import takes seconds.
        import yaml
        from accelerate.commands.launch import launch_command, launch_command_parser
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        given = launch_command_parser().parse_args(arguments)
        if given.config_file:  # the first host's launcher has a store of all ranks
            launched = yaml.safe_load(Path(given.config_file).read_text(encoding="utf-8"))
            allow_connections(launched["num_processes"])
        try:
            launch_command(given)
        except ChildFailedError as error:
            failure = error
            traceback.print_exception(error)  # its table, for the log
    except SystemExit:
        if not stop.reason:
            raise
    if read_claim() is None:
        error = run_error(stop.reason, failure)
        rank = error.cause_rank or 0
        claim_status(error.status, rank)
        is_stop = error.status == PREEMPTED
        line = f"{NAME}: {error}" if is_stop else one_line(NAME, error, f"rank={rank} step=0")
        os.write(0, f"{line}\n".encode())  # the real stderr, by launcher.py
    return 1 if failure or stop.reason else 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
