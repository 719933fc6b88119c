"""Run a sweep: start trials, report their validations, stop those to be pruned, record the ends."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from minimind.checkpoint.run_folder import lock_out_dir
from minimind.config.flags import FIRST_EVAL_ROWS
from minimind.config.run_config import RunConfig
from minimind.errors import (
    PREEMPTED,
    DataError,
    MemoryFull,
    NumericError,
    PeerError,
    RunError,
    TooFewRows,
    UsageError,
)
from minimind.report import formats
from minimind.runtime import disk
from minimind.runtime.heartbeat import describe_end, is_alive
from minimind.runtime.process import StopRequest
from minimind.sweep.study import (
    DATABASE,
    Row,
    Study,
    Trial,
    best_command,
    best_of,
    parameters_text,
    recording,
    table_text,
)
from minimind.sweep.sweep_file import Sweep, first_config, read_sweep, rehearsed
from minimind.sweep.trial import LOG, RESULTS, TrialProcess, Validations, environments_of, signal_of
from minimind.train.inputs import require_inputs

LOCK = ".lock"  # the file of lock_out_dir
POLL = 0.2  # seconds between two looks at the trials
ORPHAN_SECONDS = 20.0  # time in which the processes of a killed sweep end


class Process(Protocol):
    """A TrialProcess, or a stand-in for it."""

    pid: int

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        ...

    def stop(self) -> None:
        """Ask it to save and exit with status 75."""
        ...

    def last_line(self) -> str: ...


@dataclass
class _Running:
    trial: Trial
    process: Process
    validations: Validations
    environment: dict[str, str]
    is_pruned: bool = False
    is_stopped: bool = False


class SweepRun:
    """Runs the trials of `study`, one for each of `environments` at a time."""

    def __init__(
        self,
        study: Study,
        path: str,
        environments: Sequence[dict[str, str]],
        stop: StopRequest,
        start: Callable[[Mapping[str, Any], Mapping[str, str]], Process],
    ) -> None:
        self.study, self.path, self.stop, self.start = study, path, stop, start
        self._free = list(environments)
        self._running: list[_Running] = []
        self._failed: list[tuple[Trial, int]] = []  # the last trials, as far as they failed
        self._reached: dict[str, int] = {}  # step at which a trial last ended without a result
        self._aside: dict[str, tuple[str, int]] = {}  # trials that ended so again: why, and status
        self._is_stuck = False  # no trial is started any more

    def run(self) -> int:
        """Run until all trials have ended; return 0, 75 if stopped, or a trial's status.

        The latter once `max_failures` trials in a row have failed, or one has ended again without
        a result and without a step more; if it crashed or was killed, once the others have ended.
        """
        for folder, pid in self.study.resume():
            then = ", and goes on" if self.study.wants(folder) else ""
            print(f"{folder}: was interrupted{then}", flush=True)
            _wait_for_end(pid)
        while True:
            if self.stop.reason or self._has_failed or self._is_stuck:
                for job in self._running:
                    self._ask_to_stop(job)
            else:
                self._start_trials()
            if not self._running:
                break
            time.sleep(POLL)
            for job in tuple(self._running):
                self._look_at(job)
        if self.stop.reason:
            end = f"stopped on {self.stop.reason}; run the same command again to go on"
            print(f"{self.study.sweep.command}: {end}", file=sys.stderr)
            return PREEMPTED
        for why, _ in self._aside.values():
            print(f"{self.study.sweep.command}: {why}", file=sys.stderr)
        statuses = [0, *(status for _, status in self._aside.values())]
        return self._failure() if self._has_failed else statuses[-1]

    @property
    def _has_failed(self) -> bool:
        return len(self._failed) >= self.study.sweep.max_failures

    def _failure(self) -> int:
        trial, status = self._failed[-1]
        count = len(self._failed)
        what = f"the last {count} trials" if count > 1 else trial.folder
        for failed, _ in self._failed:
            self.study.requeue(failed)
        remedy = _correction(self.study, trial.folder)
        print(f"{self.study.sweep.command}: {what} failed; {remedy}", file=sys.stderr)
        return status

    def _start_trials(self) -> None:
        while self._free:
            trial = self.study.next_trial(self._aside)
            if trial is None:
                return
            flags = self.study.sweep.flags_of(trial.parameters)
            try:
                run, _ = rehearsed(self.study.sweep, trial.parameters, self.path)
                if run.eval_rows is None:  # of auto, trials would be compared on different rows
                    flags["eval_rows"] = FIRST_EVAL_ROWS
            except (UsageError, TooFewRows) as error:  # of dimensions, which no range excludes
                trial.finish("failed", f"refused: {error}", 0)
                print(f"{trial.folder}: refused: {error}", flush=True)
                continue
            except RunError:  # of files, which may be put back: the trial ends with it
                pass
            out_dir = self.study.place / trial.folder
            environment = self._free.pop(0)
            process = self.start({**flags, "out_dir": str(out_dir)}, environment)
            trial.record_process(process.pid)
            validations = Validations(out_dir, self.study.sweep.metric)
            self._running.append(_Running(trial, process, validations, environment))
            print(f"{trial.folder}: {parameters_text(trial.parameters)}", flush=True)

    @staticmethod
    def _ask_to_stop(job: _Running) -> None:
        if not job.is_stopped:
            job.is_stopped = True
            job.process.stop()

    def _look_at(self, job: _Running) -> None:
        """Report the new validations of a trial, and record its end."""
        status = job.process.poll()  # before reading, so that nothing follows what is read
        for step, value in job.validations.read_new():
            should_prune = job.trial.report(step, value)
            if should_prune and status is None and not job.is_stopped:
                job.is_pruned = True
                self._ask_to_stop(job)
        if status is not None:
            self._running.remove(job)
            self._free.append(job.environment)
            self._finish(job, status)

    def _finish(self, job: _Running, status: int) -> None:
        metric, steps, value = self.study.sweep.metric, job.validations.step, job.validations.last
        kind = RESULTS.get(status)
        if job.is_pruned and kind is None:  # it may not have listened to signals yet
            kind, text, status = "pruned", f"pruned at step {steps:,}", PREEMPTED
        elif kind is None or (status and self.stop.reason):
            self._interrupt(job, status)
            return
        elif status == 0 and math.isfinite(value):
            text = "done"
        elif status == 0 and not job.validations.count:
            kind, status = "failed", DataError.status
            text = "no validation is recorded; hold out text with val_fraction"
        elif status == MemoryFull.status:
            text = "out of memory"
        elif status in (0, NumericError.status):
            kind, status = "diverged", NumericError.status
            text = f"diverged by step {steps:,}"
        else:
            text = f"status {status}: {job.process.last_line()}"
        if kind == "failed":
            self._failed.append((job.trial, status))
        elif not self._has_failed:
            self._failed.clear()
        job.trial.finish(kind, text, steps, value, status)
        shown = f"{metric} {formats.figure(value)}, " if math.isfinite(value) else ""
        print(f"{job.trial.folder}: {shown}{text}", flush=True)

    def _interrupt(self, job: _Running, status: int) -> None:
        """Queue a trial again that ended without a result, once at each step that it reaches."""
        folder, steps = job.trial.folder, job.validations.step
        self.study.requeue(job.trial)  # first, as in Study.resume
        job.trial.interrupt()
        number = signal_of(status)
        if job.is_stopped or status == PREEMPTED:
            how = "stopped"
        elif number:
            how, status = describe_end(-number)
        else:
            how = f"ended with status {status} ({job.process.last_line()})"
        print(f"{folder}: {how} at step {steps:,}", flush=True)
        if job.is_stopped:
            return
        if steps <= self._reached.get(folder, -1):
            remedy = f"see {self.study.place / folder / LOG}, and run the same command again"
            again = f"{folder} {how} at step {steps:,}, as before, which says nothing of its flags"
            self._aside[folder] = (f"{again}; {remedy}", status)
            # Crashed or killed, as for lack of memory: perhaps alone with its flags.
            is_alone = status == PeerError.status and number != 0
            self._is_stuck |= not is_alone or len(self._aside) >= self.study.sweep.max_failures
        self._reached[folder] = steps


def _correction(study: Study, folder: str) -> str:
    return f"correct what {study.place / folder / LOG} says, and run the same command again"


def sweep(path: str, place: Path, parallel: int | None) -> int:
    """Run or continue the sweep of SWEEP.yaml `path` in the folder `place`; return the status."""
    content = read_sweep(path)
    with opened(content, path, place, [first_config(content, path)], parallel) as trials:
        return conclude(trials.study, trials.run())


@contextmanager
def opened(
    content: Sweep, path: str, place: Path, runs: Sequence[RunConfig], parallel: int | None
) -> Iterator[SweepRun]:
    """The trials of `content` in the folder `place`, which is locked meanwhile.

    Only a new sweep needs the files of `runs`, the settings of trials.
    """
    gpus = _gpus(runs[0].device, parallel)
    environments = environments_of(gpus, parallel or max(1, len(gpus)))
    _require_own(place)
    if not disk.exists(place / DATABASE):
        for run in runs:
            require_inputs(run)
    with lock_out_dir(place, "--out"), recording(place):
        stop = StopRequest()
        stop.listen()
        yield SweepRun(Study(content, place, path), path, environments, stop, TrialProcess)


def conclude(study: Study, status: int) -> int:
    """Print the table and the best command, write the page; return the status of the sweep."""
    from minimind.report.page import write_page
    from minimind.sweep.page import render

    rows, sweep, place = study.rows(), study.sweep, study.place
    best = best_of(rows)
    if rows:
        page = place / "sweep.html"
        write_page(render(sweep, rows, place), page, "give another --out")
        print(f"\n{table_text(sweep, rows)}\n\n{page}: plots")
    if best:
        print(f"best: {best.folder}\n{best_command(sweep, best, place)}")
    elif status == 0:
        return without_result(study, rows)
    return status


def without_result(study: Study, rows: Sequence[Row]) -> int:
    """Queue the trials that failed, print why there is no best one; return the status of the sweep.

    It is that of the last trial that failed, else of the last that diverged, else of a refusal.
    """
    failed = [row for row in rows if row.kind == "failed"]
    for row in failed:
        study.requeue(row)
    last = max(rows, key=lambda row: (bool(row.exit_status), row.kind == "failed", row.folder))
    if last.kind != "failed":
        why = f"{last.folder} {last.status}; {study.sweep.other_runs}"
    elif last.exit_status:
        why = f"{last.folder} failed; {_correction(study, last.folder)}"
    else:
        why = f"{last.folder} was {last.status}, and run the same command again"
    none = f"no trial finished with a {study.sweep.metric}"
    print(f"{study.sweep.command}: {none}: {why}", file=sys.stderr)
    return last.exit_status or UsageError.status


def _require_own(place: Path) -> None:
    """Raise UsageError for a folder with other content."""
    if disk.is_dir(place) and not disk.exists(place / DATABASE):
        foreign = sorted(path.name for path in disk.entries(place) if path.name != LOCK)
        if foreign:
            raise UsageError(
                f"--out {place} holds {foreign[0]!r} and no {DATABASE}: it is no folder of a sweep;"
                " give another"
            )


def _gpus(device: str, parallel: int | None) -> list[str]:
    """The GPUs for the trials: free ones, or with --parallel all that are visible."""
    if device == "cpu" or shutil.which("nvidia-smi") is None:
        return []
    from minimind.runtime.hardware import visible_gpus  # torch

    gpus = visible_gpus(os.environ)
    free = [gpu for gpu, is_free in gpus.items() if is_free]
    if gpus and not free and not parallel:
        raise UsageError(
            f"none of the {len(gpus)} visible GPUs is free; end the other processes on them"
            " (nvidia-smi lists them), or share the GPUs with --parallel N"
        )
    return free or list(gpus)


def _wait_for_end(pid: int | None) -> None:
    """Wait until a trial of a killed sweep has ended, which holds the lock of its folder."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while pid is not None and is_alive(pid) and time.monotonic() < deadline:
        time.sleep(POLL)
