"""A trial: an ordinary run as a process, its command line, and the validations it records."""

from __future__ import annotations

import json
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
from minimind.runtime import disk
from minimind.runtime.environment import usable_cores
from minimind.runtime.process import LAUNCHER_PID
from minimind.runtime.terminal import printable
from minimind.runtime.urls import masked

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
        variables = {**os.environ, **environment, LAUNCHER_PID: str(os.getpid())}
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
        self._path, self._metric = run_dir / "metrics.jsonl", metric
        self._position = 0
        self.count = 0
        self.step = 0  # step of the newest step line or validation
        self.last = math.nan  # the newest value; NaN if there is none, or none that is finite

    def read_new(self) -> list[tuple[int, float]]:
        """Step and value of the validations since the last call; NaN for one that is not finite."""
        if not disk.is_file(self._path):
            return []
        with open(self._path, "rb") as file:
            file.seek(self._position)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]  # the last line may still be written
        self._position += len(whole)
        values = []
        for raw in whole.splitlines():
            if b'"eval"' in raw or b'"step"' in raw:
                values += self._read(raw)
        return values

    def _read(self, raw: bytes) -> list[tuple[int, float]]:
        try:
            event = json.loads(raw)
        except ValueError:  # torn by a crash
            return []
        if event.get("event") in ("step", "eval"):
            self.step = event["step"]
        if event.get("event") != "eval":
            return []
        self.count += 1
        value = event.get(self._metric)
        self.last = math.nan if value is None else float(value)
        return [(self.step, self.last)]
