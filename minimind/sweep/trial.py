"""A trial: an ordinary run as a process, and what its folder tells of it.

The folder has trial.json, which the sweep writes before the process starts and at its end; the
validations are those of metrics.jsonl.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from minimind.checkpoint.run_folder import METRICS
from minimind.config.parse import words_of
from minimind.errors import DataError, MemoryFull, NumericError, RunError, StorageError, UsageError
from minimind.report import formats
from minimind.report.history import COLUMNS, Run, number
from minimind.runtime import disk
from minimind.runtime.durable_files import read_small_text, write_whole
from minimind.runtime.environment import module_path, usable_cores
from minimind.runtime.process import SWEEP_PID, kill_tree
from minimind.runtime.terminal import aligned, printable, shorten_line
from minimind.runtime.urls import masked
from minimind.sweep.sweep_file import Checked, Sweep

# Ends that the flags of a trial cause, by exit status: with these flags it would end so again. A
# trial that ends otherwise, as by a signal or for a disk, a peer or a lock, goes on.
FAILED = (UsageError.status, DataError.status, RunError.status)  # the latter: came upon a bug
DIVERGED = (NumericError.status, MemoryFull.status)
PREFIX = "trial-"  # prefix of folders
RECORD = "trial.json"
LOG = "log.txt"  # file in the folder of a trial with everything its process prints
TAIL = 4000  # bytes of the log that are searched for the last line
WARM_UP = 4  # steps that no median of steps counts: in the first ones the model is compiled
POLL = 0.2  # seconds between two looks at a process


@dataclass(frozen=True)
class Trial:
    """A run to be started in a folder of its own."""

    folder: str
    parameters: dict[str, Any]  # what the table shows of it
    flags: dict[str, Any]
    refusal: str = ""  # why it cannot be trained
    environment: dict[str, str] = field(default_factory=dict)  # variables of its own
    seconds: float = math.inf  # after which it is stopped, and killed after GRACE


class Result(Checked):
    """What the folder of a trial tells."""

    folder: str
    parameters: dict[str, str | int | float]
    state: Literal["running", "interrupted", "done", "pruned", "failed"] = "running"
    reason: str = "interrupted"  # the end in words
    exit_status: int = 0  # also of a trial that was refused without a start
    is_over: bool = False  # it is not run again
    curve: dict[int, float] = Field(default={})  # metric of each validation by step, perhaps NaN
    steps: int = 0  # step of the newest step line or validation
    seconds: float = 0.0  # that all of its starts took, if the trial has a time limit

    @property
    def metric(self) -> float:
        """The newest value that is finite; NaN if there is none."""
        return next(reversed(self.finite.values()), math.nan)

    @property
    def finite(self) -> dict[int, float]:
        """The validations with a finite value."""
        return {step: value for step, value in self.curve.items() if math.isfinite(value)}

    def write(self, place: Path) -> None:
        """Write trial.json in the folder of the trial; a kill leaves the old file or the new."""
        (place / self.folder).mkdir(parents=True, exist_ok=True)
        content = self.model_dump_json(exclude={"folder", "curve", "steps"})
        write_whole(place / self.folder / RECORD, content.encode())


class Progress:
    """The validations of a run, read on as it appends them to metrics.jsonl.

    Of a metric of steps, the curve is their median up to the newest one, after the warm-up.
    """

    def __init__(self, run_dir: Path, metric: str) -> None:
        self._run, self._metric = Run(run_dir), metric
        self.curve: dict[int, float] = {}
        self.steps = 0
        self.exit_status = -1  # that the newest start recorded; -1 if it recorded none
        self.exit_reason = ""
        self.read()

    @property
    def value(self) -> float:
        """The newest value; NaN if there is none, or it is not finite."""
        return next(reversed(self.curve.values()), math.nan)

    def read(self) -> None:
        """Read what was appended."""
        run = self._run
        if run.read():
            events = run.events("eval")
            self.curve = {event["step"]: number(event.get(self._metric)) for event in events}
            if self._metric in COLUMNS:
                values = run.column(self._metric)[run.column("step") > WARM_UP]
                self.curve = {int(run.last_step): float(np.median(values))} if len(values) else {}
            self.steps = int(max(run.last_step, *self.curve, 0))
            end = (run.starts[-1].end if run.starts else None) or {}
            self.exit_status = int(number(end.get("status"), -1))
            self.exit_reason = end.get("reason", "")


def read_results(place: Path, metric: str) -> dict[str, Result]:
    """The trials in the folder of a sweep, by folder; raise StorageError for a damaged one."""
    results = {}
    for run_dir in sorted(disk.matching(place, f"{PREFIX}*")):
        if not run_dir.name.removeprefix(PREFIX).isdecimal():  # such as a copy
            continue
        path, metrics = run_dir / RECORD, run_dir / METRICS
        if not disk.lexists(path) and not disk.lexists(metrics):  # killed before it wrote them
            continue
        progress = Progress(run_dir, metric)
        read = {"folder": run_dir.name, "curve": progress.curve, "steps": progress.steps}
        try:
            found = Result(**read, **json.loads(read_small_text(path)))
        except (ValueError, TypeError, FileNotFoundError, IsADirectoryError) as error:
            raise damaged(path) from error
        if found.state == "done" and not found.finite:
            raise damaged(metrics)
        results[run_dir.name] = found
    return results


def damaged(path: Path) -> StorageError:
    """For a file of a trial without which its result is not known."""
    return StorageError(
        f"{path}: is missing, or not as the trial left it; remove {path.parent}, and the trial is"
        " run again"
    )


def end_of(status: int, progress: Progress, last_line: Callable[[], str]) -> dict[str, Any] | None:
    """The fields of a Result that its flags caused; None for any other end."""
    state, text = "pruned", f"diverged by step {progress.steps:,}"
    if status == 0 and not progress.curve:
        state, text = "failed", "no validation is recorded; hold out text with val_fraction"
        status = DataError.status
    elif status == 0 and math.isfinite(progress.value):
        state, text = "done", progress.exit_reason or "done"
    elif status == 0:
        status = NumericError.status
    elif status == MemoryFull.status:
        text = "out of memory"
    elif status in FAILED:
        state, text = "failed", f"status {status}: {last_line()}"
    elif status not in DIVERGED:
        return None
    return {"state": state, "reason": text, "exit_status": status}


def command_line(flags: Mapping[str, Any]) -> str:
    """The command that a user types for a run with these flags."""
    return shlex.join(["minimind", "train", *map(masked, words_of(flags))])


class TrialProcess:
    """`minimind PROGRAM` with `flags` in processes of its own, which end if this one is killed.

    The log is its standard output, locked as long as the process lives.
    """

    def __init__(
        self, flags: Mapping[str, Any], environment: Mapping[str, str], program: str = "train"
    ) -> None:
        self._log = Path(flags["out_dir"], LOG)
        words = [sys.executable, "-m", "minimind.cli.main", program, *words_of(flags)]
        # A run ends soon after the process of that variable.
        variables = {**os.environ, **module_path(), **environment, SWEEP_PID: str(os.getpid())}
        with open(self._log, "ab") as log:
            with suppress(BlockingIOError):  # an older process: the run will say that it is there
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = subprocess.Popen(
                words, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to save and exit with status 75, as a user does."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it with its workers, which may hang."""
        kill_tree(self._process.pid)

    def last_line(self) -> str:
        with open(self._log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            lines = log.read().decode(errors="replace").split("\n")
        return printable(next((line.strip() for line in reversed(lines) if line.strip()), ""))


def wait_for_end(run_dir: Path, seconds: float) -> None:
    """Wait until the process of a killed sweep has ended, which holds the lock of its folder."""
    deadline = time.monotonic() + seconds
    with suppress(FileNotFoundError), open(run_dir / LOG, "rb") as log:
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                return fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(POLL)


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


ORDER = ("done", "pruned", "interrupted", "failed")  # sorted by what is known of the metric
MAX_REASON = 60  # characters


def best_first(results: Iterable[Result]) -> list[Result]:
    """Finished trials by metric, then pruned ones by their last validation, then the others."""

    def rank(one: Result) -> tuple[int, float, str]:
        return ORDER.index(one.state), one.metric if one.finite else math.inf, one.folder

    return sorted(results, key=rank)


def best_of(results: Iterable[Result]) -> Result | None:
    """The finished trial with the lowest metric; None if none has finished."""
    return next((one for one in best_first(results) if one.state == "done"), None)


def best_command(sweep: Sweep, best: Result, place: Path) -> str:
    """The command line that trains the best trial again, in a folder of its own."""
    return command_line({**sweep.flags_of(best.parameters), "out_dir": str(place / "best")})


def value_text(value: Any) -> str:
    """A parameter in a table: floats with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """`learning_rate 0.0012, dim 64`."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in parameters.items())


def table(results: Iterable[Result], metric: str, names: Iterable[str]) -> list[list[str]]:
    """The names of the columns, and the cells of each trial; `names` are of parameters."""
    body = [
        [
            one.folder,
            formats.figure(one.metric),
            *(value_text(one.parameters.get(name, "")) for name in names),
            f"{one.steps:,}",
            one.reason,
        ]
        for one in best_first(results)
    ]
    return [["trial", metric, *names, "steps", "status"], *body]


def table_text(cells: list[list[str]]) -> str:
    """The trials for a terminal, a line each."""
    rows = [[*row[:-1], shorten_line(row[-1], MAX_REASON)] for row in cells]
    return aligned(rows, f"<{'>' * (len(rows[0]) - 2)}<")
