"""What a worker process owes its launcher: its stderr, its end, its signals and its exit status."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# run_accelerate.sh exports these; under any other launcher they are simply not there.
STATUS_FILE = "MINIMIND_STATUS_FILE"
STDERR_ON_STDIN = "MINIMIND_STDERR_ON_STDIN"
SCRIPT_PID = "MINIMIND_SCRIPT_PID"

# What asks a run to save and stop.
CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def take_back_stderr() -> None:
    """Write to the user's terminal again, past the launcher's log.

    run_accelerate.sh sends the launcher's stderr (its own tracebacks and failure tables) to a file.
    Workers inherit that, and every other descriptor but 0, 1 and 2 is closed on the way, so the
    script hands the real stderr down as descriptor 0, which training never reads.
    """
    if os.environ.pop(STDERR_ON_STDIN, None):
        os.dup2(0, 2)


def watch_launchers(poll_seconds: float = 1.0) -> None:
    """End this process soon after any launcher above it is gone, so that none is left behind.

    Also while the main thread waits in a collective: hence a thread, and os._exit.
    """
    parent = os.getppid()
    script = int(os.environ.get(SCRIPT_PID, "0"))

    def watch() -> None:
        while os.getppid() == parent and (not script or _is_alive(script)):
            time.sleep(poll_seconds)
        os._exit(70)

    threading.Thread(target=watch, daemon=True, name="watch-launchers").start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, under another user
        return True
    return True


@dataclass
class Progress:
    """Where a run is, for whoever has to tell of its end."""

    rank: int = 0
    step: int = 0
    out_dir: Path | None = None  # once it is this run's


class StopRequest:
    """Remembers that this process was asked to stop; the loop looks after every step.

    Made once the engine stands. Until then a signal ends the process at once, as it should: there
    is nothing to save, and a handler in Python would not run while a rank waits for its peers.
    """

    def __init__(self) -> None:
        self.reason = ""
        for number in CAUGHT:
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name


def claim_status(status: int, rank: int) -> int:
    """The rank whose ending is the run's exit status: ours when we are the first to claim it.

    run_accelerate.sh reads the file, because torchrun answers 1 whatever happened.
    """
    path = os.environ.get(STATUS_FILE)
    if not path:
        return rank
    draft = f"{path}.{rank}"
    try:
        with open(draft, "w", encoding="ascii") as file:
            file.write(f"{status} {rank}\n")
        os.link(draft, path)  # the first one wins, and nobody sees it half written
    except FileExistsError:
        with open(path, encoding="ascii") as file:
            return int(file.read().split()[1])
    except FileNotFoundError:  # the script was ended by force: nobody is left to read it
        return rank
    except OSError as error:
        print(f"cannot record the exit status in {path}: {error.strerror}", file=sys.stderr)
    return rank
