"""A trial: an ordinary run as a process, its command line, and the validations it records."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minimind.config.parse import words_of
from minimind.errors import DataError, MemoryFull, NumericError, RunError, UsageError
from minimind.report.history import number
from minimind.runtime.environment import module_path, usable_cores
from minimind.runtime.event_log import EventLog
from minimind.runtime.process import LAUNCHER_PID
from minimind.runtime.terminal import printable
from minimind.runtime.urls import masked

# Ends that the flags of a trial cause, by exit status: with these flags it would end so again. A
# trial that ends otherwise, as by a signal or for a disk, a peer or a lock, is queued again.
RESULTS = {
    0: "done",
    UsageError.status: "failed",
    DataError.status: "failed",
    NumericError.status: "diverged",
    MemoryFull.status: "diverged",
    RunError.status: "failed",  # internal: the program came upon these flags
}
LOG = "log.txt"  # file in the folder of a trial with everything its process prints
TAIL = 4000  # bytes of the log that are searched for the last line


def command_line(flags: Mapping[str, Any]) -> str:
    """The command that a user types for a run with these flags."""
    return shlex.join(["minimind", "train", *map(masked, words_of(flags))])


class TrialProcess:
    """`minimind train` with `flags` in a process of its own, which ends if this one is killed."""

    def __init__(self, flags: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.folder = Path(flags["out_dir"])
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "minimind.cli.main", "train", *words_of(flags)]
        # A run ends soon after the process of that variable.
        variables = {**os.environ, **module_path(), **environment, LAUNCHER_PID: str(os.getpid())}
        with open(self.folder / LOG, "ab") as log:
            self._process = subprocess.Popen(
                words, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to save and exit with status 75, as a user does."""
        self._process.send_signal(signal.SIGTERM)

    def last_line(self) -> str:
        with open(self.folder / LOG, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            lines = log.read().decode(errors="replace").split("\n")
        return printable(next((line.strip() for line in reversed(lines) if line.strip()), ""))


def signal_of(status: int) -> int:
    """The signal that ended a process, also one below a shell; 0 if none did."""
    number = -status if status < 0 else status - 128
    return number if number in {*signal.Signals} else 0


def environments_of(gpus: Sequence[str], parallel: int) -> list[dict[str, str]]:
    """Variables of each of `parallel` trials at once: a GPU each, or a part of the CPU's cores."""
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} for n in range(parallel)]
    if parallel == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * parallel
    return [{"OMP_NUM_THREADS": str(max(1, usable_cores() // parallel))}] * parallel


class Validations:
    """The `eval` events of a metrics.jsonl, read as the run appends them."""

    def __init__(self, run_dir: Path, metric: str) -> None:
        self._log, self._metric = EventLog(run_dir / "metrics.jsonl"), metric
        self.count = 0
        self.step = 0  # step of the newest step line or validation
        self.last = math.nan  # the newest value; NaN if there is none, or none that is finite

    def read_new(self) -> list[tuple[int, float]]:
        """Step and value of the validations since the last call; NaN for one that is not finite."""
        values = []
        for event in self._log.events("step", "eval"):
            self.step = event["step"]
            if event["event"] == "eval":
                self.count += 1
                self.last = number(event.get(self._metric))
                values.append((self.step, self.last))
        return values
