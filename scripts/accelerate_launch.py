"""`accelerate launch` for run_accelerate.sh: stopped once by whatever signal, and it says who died.

Called with the arguments of `accelerate launch`. torchrun, which this process becomes, passes TERM
on to its workers but not USR1, and a second TERM makes it leave them while they save. It alone is
told how a worker ended; it leaves word of that for the others
(minimind/runtime/local_workers.py). Where no worker lived to say how the run ended, it does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # also where the package is not installed
from minimind.errors import PREEMPTED, PeerError, RunError, Stopped
from minimind.runtime.local_workers import Worker, end_told, folder, record_end
from minimind.runtime.process import (
    CAUGHT,
    LAUNCHER_PID,
    claim_status,
    read_claim,
    record_stop,
    stop_reason,
)
from minimind.runtime.terminal import one_line

NAME = "run_accelerate.sh"
AGAIN = "run the same command again"


class StopOnce:
    """Ends torchrun in an orderly way at the first signal, and lets it wait for its workers."""

    def __init__(self) -> None:
        self.asked = ""
        for number in (*CAUGHT, signal.SIGHUP):
            signal.signal(number, self._stop)
        # It would put its own handlers in our place, for every signal that it is told of.
        os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked = stop_reason(number)
            record_stop(self.asked)
            raise SystemExit(PREEMPTED)  # on the way out torchrun tells its workers TERM


def record_ends(here: Path) -> None:
    """Leave word in `here` of how each child ended, before its parent's wait takes it away."""
    told: set[int] = set()
    while True:
        try:
            end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # none yet
            end = None
        if end and end.si_pid not in told:
            told.add(end.si_pid)
            is_exit = end.si_code == os.CLD_EXITED
            try:
                record_end(here, end.si_pid, end.si_status if is_exit else -end.si_status)
            except FileNotFoundError:  # the script is gone, and its folder
                return
        time.sleep(0.02)


def ending(asked: str, failure: Any) -> RunError:
    """How a run ended whose workers could not say; `failure` is torchrun's, if it has one."""
    if asked:
        return Stopped(f"stopped on {asked} before the first step, with nothing to save; {AGAIN}")
    if failure is None:
        return PeerError(f"all workers left before the end, with exit status 0; {AGAIN}")
    rank, first = failure.get_first_failure()
    how, status = end_told(first.exitcode)
    kind = Stopped if status == PREEMPTED else PeerError
    return kind(f"{Worker(rank, socket.gethostname(), first.pid, '')} {how}; {AGAIN}", rank)


def main(arguments: list[str]) -> int:
    """The launcher's own exit status; the run's is what was claimed."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    stop, here, failure = StopOnce(), folder(), None
    if here:
        threading.Thread(target=record_ends, args=(here,), daemon=True).start()
    try:
        # Only here: from the first line on a signal must find somebody.
        from accelerate.commands.launch import launch_command, launch_command_parser  # noqa: TID251 (it is what this script starts)
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            launch_command(launch_command_parser().parse_args(arguments))
        except ChildFailedError as error:
            failure = error
            traceback.print_exception(error)  # its table, for the log
    except SystemExit:
        if not stop.asked:
            raise
    if read_claim() is None:
        told = ending(stop.asked, failure)
        rank = told.cause_rank or 0
        claim_status(told.status, rank)
        is_asked = told.status == PREEMPTED
        line = f"{NAME}: {told}" if is_asked else one_line(NAME, told, rank)
        os.write(0, f"{line}\n".encode())  # where the script has put the real stderr
    return 1 if failure or stop.asked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
