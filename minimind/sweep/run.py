"""Run trials: start them, follow their validations, stop those to be pruned, record the ends."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from minimind.checkpoint.run_folder import lock_out_dir
from minimind.config.flags import FIRST_EVAL_ROWS
from minimind.config.run_config import RunConfig
from minimind.errors import PREEMPTED, PeerError, RunError, StorageError, TooFewRows, UsageError
from minimind.report import formats
from minimind.runtime import disk
from minimind.runtime.drafts import A_DRAFT
from minimind.runtime.durable_files import read_small_text, write_whole
from minimind.runtime.heartbeat import describe_end
from minimind.runtime.process import StopRequest
from minimind.runtime.urls import masked_values
from minimind.sweep.sweep_file import (
    Sweep,
    changed_fields,
    first_config,
    read_sweep,
    rehearsed,
    settings_of,
)
from minimind.sweep.trial import (
    LOG,
    POLL,
    PREFIX,
    Progress,
    Result,
    Trial,
    TrialProcess,
    best_command,
    best_of,
    end_of,
    environments_of,
    parameters_text,
    read_results,
    signal_of,
    table,
    table_text,
    wait_for_end,
)
from minimind.train.inputs import require_inputs

ACCEPTED = "sweep.json"  # what the trials in the folder have in common
NOTED = 5.0  # seconds between two notes of the time that a trial has taken
GRACE = 15.0  # seconds in which a trial with a time limit ends once it is stopped
LOCK = ".lock"  # the file of lock_out_dir
ORPHAN_SECONDS = 20.0  # time in which the processes of a killed sweep end


class Command(NamedTuple):
    """What differs between the commands that run trials."""

    name: str
    max_failures: int  # trials in a row that may fail before it ends
    changes: str  # what may change in a folder
    other_runs: str  # the remedy where no trial has a metric
    is_launched: bool = False  # a trial is a `minimind launch`, on all GPUs
    end_of: Callable[[int, Progress, Callable[[], str]], dict[str, Any] | None] = end_of


SWEEP = Command(
    "minimind sweep",
    3,
    "only trials may grow",
    "change flags or dimensions, and give another --out_dir",
)


class Process(Protocol):
    """A TrialProcess, or a stand-in for it."""

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        ...

    def stop(self) -> None:
        """Ask it to save and exit with status 75."""
        ...

    def kill(self) -> None: ...
    def last_line(self) -> str: ...


@dataclass
class _Running:
    trial: Trial
    process: Process
    progress: Progress
    environment: dict[str, str]
    began: float
    noted: float  # up to then its seconds are recorded
    is_pruned: bool = False
    is_late: bool = False
    seen: set[int] = field(default_factory=set)  # steps of validations
    stopped: float = math.inf  # when it was asked to stop

    @property
    def is_stopped(self) -> bool:
        return math.isfinite(self.stopped)


class Runner:
    """Runs trials in the folder `place`, one for each of `environments` at a time.

    `results` has what the folders tell, of earlier commands too.
    """

    def __init__(
        self,
        command: Command,
        metric: str,
        place: Path,
        environments: Sequence[dict[str, str]],
        stop: StopRequest,
        start: Callable[[Mapping[str, Any], Mapping[str, str]], Process],
    ) -> None:
        self.command, self.metric, self.place = command, metric, place
        self.stop, self.start = stop, start
        self.results = read_results(place, metric)
        self._free = list(environments)
        self._running: list[_Running] = []
        self._again: deque[Trial] = deque()  # trials that ended without a result
        self._failed: list[Result] = []  # the last results, as far as they failed
        self._reached: dict[str, int] = {}  # step at which a trial last ended without a result
        self._aside: dict[str, tuple[str, int]] = {}  # trials that ended so again: why, and status
        self._is_stuck = False  # no trial is started any more

    def resume(self, wanted: Callable[[str], bool] = lambda folder: True) -> None:
        """Name the trials that ran when an earlier command was killed, and wait for their ends."""
        for folder, found in [*self.results.items()]:
            if found.state == "running":
                wait_for_end(self.place / folder, ORPHAN_SECONDS)
                progress = Progress(self.place / folder, self.metric)
                end = self.command.end_of(progress.exit_status, progress, str)
                if end and end["state"] != "failed":  # it ended before it could be recorded
                    self._end(folder, progress, end)
                    continue
                then = ", and continues" if wanted(folder) else ""
                print(f"{folder}: was interrupted{then}", flush=True)
                self._record(found, state="interrupted")

    def run(
        self,
        trials: Iterable[Trial],
        is_to_be_pruned: Callable[[dict[int, float]], bool] = lambda curve: False,
    ) -> int:
        """Run the trials that are not over; return 0, 75 if stopped, or a trial's status.

        The latter once `max_failures` trials in a row have failed, or one has ended again without
        a result and without a step more; if it crashed or was killed, once the others have ended.
        """
        rest = iter(trials)
        while True:
            if self.stop.reason or self._has_failed or self._is_stuck:
                for job in self._running:
                    self._ask_to_stop(job)
            else:
                while self._free and (trial := self._next(rest)):
                    self._begin(trial)
            if not self._running:
                break
            time.sleep(POLL)
            for job in tuple(self._running):
                self._look_at(job, is_to_be_pruned)
        if self.stop.reason:
            self._say(f"stopped on {self.stop.reason}; run the same command again to continue")
            return PREEMPTED
        for why, _ in self._aside.values():
            self._say(why)
        if self._has_failed:
            return self._failure()
        return [0, *(status for _, status in self._aside.values())][-1]

    def _say(self, text: str) -> None:
        print(f"{self.command.name}: {text}", file=sys.stderr)

    @property
    def _has_failed(self) -> bool:
        return len(self._failed) >= self.command.max_failures

    def _failure(self) -> int:
        last, count = self._failed[-1], len(self._failed)
        what = f"the last {count} trials" if count > 1 else last.folder
        for failed in self._failed:
            self._record(failed, is_over=False)
        self._say(f"{what} failed; {self._correction(last)}")
        return last.exit_status

    def _correction(self, result: Result) -> str:
        log = self.place / result.folder / LOG
        return f"correct what {log} says, and run the same command again"

    def without_result(self, results: Sequence[Result]) -> int:
        """Have those that failed run again, say why none is the best; return the status.

        It is that of the last trial that failed, else of the last that diverged, else of a refusal.
        """
        for one in results:
            if one.state == "failed":
                self._record(one, is_over=False)
        last = max(
            results, key=lambda one: (bool(one.exit_status), one.state == "failed", one.folder)
        )
        if last.state != "failed":
            why = f"{last.folder} {last.reason}; {self.command.other_runs}"
        elif last.exit_status:
            why = f"{last.folder} failed; {self._correction(last)}"
        else:
            why = f"{last.folder} was {last.reason}, and run the same command again"
        self._say(f"no trial finished with a {self.metric}: {why}")
        return last.exit_status or UsageError.status

    def _record(self, result: Result, **changes: Any) -> Result:
        result = result.model_copy(update=changes)
        result.write(self.place)
        self.results[result.folder] = result
        return result

    def _next(self, rest: Iterator[Trial]) -> Trial | None:
        """The next trial that is not over: one that ended without a result first."""
        if self._again:
            return self._again.popleft()
        known = self.results
        return next((t for t in rest if not (t.folder in known and known[t.folder].is_over)), None)

    def _begin(self, trial: Trial) -> None:
        known = self.results.get(trial.folder)
        seconds = known.seconds if known else 0.0
        found = Result(folder=trial.folder, parameters=trial.parameters, seconds=seconds)
        if trial.refusal:
            self._record(found, state="failed", reason=trial.refusal, is_over=True)
            print(f"{trial.folder}: {trial.refusal}", flush=True)
            return
        self._record(found)
        run_dir, environment = self.place / trial.folder, self._free.pop(0)
        variables = {**environment, **trial.environment}
        process = self.start({**trial.flags, "out_dir": str(run_dir)}, variables)
        progress = Progress(run_dir, self.metric)
        now = time.monotonic()
        self._running.append(_Running(trial, process, progress, environment, now, now))
        print(f"{trial.folder}: {parameters_text(trial.parameters)}", flush=True)

    @staticmethod
    def _ask_to_stop(job: _Running) -> None:
        if not job.is_stopped:
            job.stopped = time.monotonic()
            job.process.stop()

    def _look_at(self, job: _Running, is_to_be_pruned: Callable[[dict[int, float]], bool]) -> None:
        """Prune a trial by its new validations or its time, and record its end."""
        status = job.process.poll()  # before reading, so that nothing follows what is read
        now, has_limit = time.monotonic(), job.trial.seconds < math.inf
        if has_limit and (status is not None or now > job.noted + NOTED):
            found = self.results[job.trial.folder]
            self._record(found, seconds=found.seconds + now - job.noted)
            job.noted = now
        if has_limit and status is None and now > job.stopped + GRACE:
            job.process.kill()
        elif status is None and not job.is_stopped and now > job.began + job.trial.seconds:
            job.is_late = job.is_pruned = True
        job.progress.read()
        finite = {step: value for step, value in job.progress.curve.items() if math.isfinite(value)}
        for new in finite.keys() - job.seen if status is None and not job.is_stopped else ():
            curve = {step: value for step, value in finite.items() if step <= new}
            job.is_pruned = job.is_pruned or is_to_be_pruned(curve)
        job.seen |= {*finite}
        if job.is_pruned:
            self._ask_to_stop(job)
        if status is not None:
            self._running.remove(job)
            self._free.append(job.environment)
            self._finish(job, status)

    def _finish(self, job: _Running, status: int) -> None:
        end = self.command.end_of(status, job.progress, job.process.last_line)
        if job.is_pruned and end is None:  # it may not have listened to signals yet
            text = f"pruned at step {job.progress.steps:,}"
            end = {"state": "pruned", "reason": text, "exit_status": PREEMPTED}
        if job.is_late and (end is None or end["state"] != "done"):
            text = f"stopped after {job.trial.seconds:.0f} s, at step {job.progress.steps:,}"
            end = {"state": "pruned", "reason": text, "is_over": False}  # with more time it ends
        if end is None or (status and not job.is_pruned and self.stop.reason):
            self._interrupt(job, status)
        else:
            self._end(job.trial.folder, job.progress, end)

    def _end(self, folder: str, progress: Progress, end: dict[str, Any]) -> None:
        read = {"curve": progress.curve, "steps": progress.steps}
        ended = self._record(self.results[folder], **{"is_over": True, **end, **read})
        if ended.state == "failed":
            self._failed.append(ended)
        elif not self._has_failed:
            self._failed.clear()
        value = progress.value
        shown = f"{self.metric} {formats.figure(value)}, " if math.isfinite(value) else ""
        print(f"{folder}: {shown}{ended.reason}", flush=True)

    def _interrupt(self, job: _Running, status: int) -> None:
        """Have a trial go on that ended without a result, once at each step that it reaches."""
        folder, steps = job.trial.folder, job.progress.steps
        changes = {"state": "interrupted", "curve": job.progress.curve, "steps": steps}
        self._record(self.results[folder], **changes)
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
        if steps > self._reached.get(folder, -1):
            self._again.append(job.trial)
        else:
            remedy = f"see {self.place / folder / LOG}, and run the same command again"
            again = f"{folder} {how} at step {steps:,}, as before, which says nothing of its flags"
            self._aside[folder] = (f"{again}; {remedy}", status)
            # Crashed or killed, as for lack of memory: perhaps alone with its flags.
            is_alone = status == PeerError.status and number != 0
            self._is_stuck |= not is_alone or len(self._aside) >= self.command.max_failures
        self._reached[folder] = steps


def sweep(path: str, place: Path, parallel: int | None) -> int:
    """Run or continue the sweep of SWEEP.yaml `path` in the folder `place`; return the status."""
    from minimind.sweep.propose import Proposals

    content = read_sweep(path)
    first = first_config(content, path)
    common = content.model_dump(mode="json")
    with opened(SWEEP, content.metric, common, path, place, [first], parallel) as runner:
        proposals = Proposals(content, runner.results, place)
        runner.resume()
        trials = trials_of(content, path, runner.results, proposals.parameters)
        return conclude(content, runner, runner.run(trials, proposals.is_to_be_pruned))


def trials_of(
    sweep: Sweep, path: str, results: Mapping[str, Result], propose: Callable[[int], dict[str, Any]]
) -> Iterator[Trial]:
    """The trials that are not over, each proposed and checked when it is asked for."""
    grid = sweep.grid() if sweep.sampler == "grid" else None
    for n in range(sweep.total):
        known = results.get(folder := f"{PREFIX}{n:04d}")
        if known and known.is_over:
            continue
        parameters = known.parameters if known else grid[n] if grid else propose(n)
        flags, refusal = sweep.flags_of(parameters), ""
        try:
            run = settings_of(flags, sweep.metric, path)
            rehearsed(run, sweep.metric)
            if run.eval_rows is None:  # of auto, trials would be compared on different rows
                flags["eval_rows"] = FIRST_EVAL_ROWS
        except (UsageError, TooFewRows) as error:  # of dimensions, which no range excludes
            refusal = f"refused: {error}"
        except RunError:  # of files, which may be put back: the trial ends with it
            pass
        yield Trial(folder, parameters, flags, refusal)


@contextmanager
def opened(
    command: Command,
    metric: str,
    common: dict[str, Any],
    path: str,
    place: Path,
    runs: Sequence[RunConfig],
    parallel: int | None,
) -> Iterator[Runner]:
    """A runner in the folder `place`, which is locked meanwhile.

    Raise UsageError if the folder is of other trials: `common` is what they share, from the file
    `path`. Only a new folder needs the files of `runs`, the settings of trials.
    """
    gpus = [] if command.is_launched else _gpus(runs[0].device, parallel)
    environments = environments_of(gpus, parallel or max(1, len(gpus)))
    names = {path.name for path in disk.matching(place, "*")}
    if ACCEPTED not in names:
        # Not a file that is being written, as by a sweep that has just begun there.
        foreign = sorted(n for n in names if n != LOCK and not A_DRAFT.fullmatch(n))
        if foreign:
            raise UsageError(
                f"--out_dir {place} holds {foreign[0]!r} and no {ACCEPTED}: it is not a folder of a"
                " sweep; give another"
            )
        for run in runs:
            require_inputs(run)
    with lock_out_dir(place, "--out_dir"):
        accept(command, common, path, place)
        stop = StopRequest()
        stop.listen()
        start = partial(TrialProcess, program="launch") if command.is_launched else TrialProcess
        yield Runner(command, metric, place, environments, stop, start)


def accept(command: Command, common: dict[str, Any], path: str, place: Path) -> None:
    """Keep what the trials in a folder share; raise UsageError if it has changed."""
    accepted, common = place / ACCEPTED, masked_values({"command": command.name, **common})
    if disk.exists(accepted):
        try:
            changed = changed_fields(json.loads(read_small_text(accepted)), common)
        except (ValueError, AttributeError) as error:
            raise StorageError(
                f"{accepted}: is not as the command wrote it; give another --out_dir"
            ) from error
        if changed:
            raise UsageError(
                f"{', '.join(changed)} in {path} changed since --out_dir {place} was started;"
                f" {command.changes}: restore it, or give another --out_dir"
            )
    write_whole(accepted, json.dumps(common, indent=2).encode())


def conclude(sweep: Sweep, runner: Runner, status: int) -> int:
    """Print the table and the best command, write the page; return the status of the sweep."""
    from minimind.report.page import write_page
    from minimind.sweep.page import render

    results, place = [one for _, one in sorted(runner.results.items())], runner.place
    if results:
        cells = table(results, sweep.metric, sweep.dimensions)
        page = place / "sweep.html"
        write_page(render(sweep, results, place), page, "give another --out_dir")
        print(f"\n{table_text(cells)}\n\n{page}: plots")
    if best := best_of(results):
        print(f"best: {best.folder}\n{best_command(sweep, best, place)}")
    elif status == 0:
        return runner.without_result(results)
    return status


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
