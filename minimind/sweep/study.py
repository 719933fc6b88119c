"""The study of a sweep in DIR/sweep.db, and its trials as a table.

A trial of a sweep is a folder. Optuna's record of one that was interrupted is closed as failed, and
a new one with the same parameters and folder is put into its queue. Parameters of a grid are an
attribute of the trial, since Optuna's choices cannot grow.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from minimind.errors import CURES, RunError, StorageError, UsageError
from minimind.report import formats
from minimind.runtime.terminal import aligned, shorten_line
from minimind.runtime.urls import masked_values
from minimind.sweep.sweep_file import Dimension, Range, Sweep, changed_fields, points
from minimind.sweep.trial import command_line

DATABASE = "sweep.db"
NAME = "sweep"
# What helps against an error of the database, by a word of its message.
CURES_OF_DATABASE = {
    "full": CURES[errno.ENOSPC],
    **dict.fromkeys(("readonly", "unable to open"), CURES[errno.EACCES]),
}
LIBRARIES = ("optuna", "sqlalchemy", "alembic", "sqlite3")
PREFIX = "trial-"  # prefix of folders
# Attributes of a study and of its trials.
CONTENT, FOLDER, PID, STEPS, STATUS = "sweep", "folder", "pid", "steps", "status"
EXIT_STATUS = "exit_status"
POINT = "point"  # parameters of a trial of a grid


@dataclass(frozen=True)
class Row:
    """What is known of a trial."""

    folder: str
    parameters: dict[str, Any]
    metric: float  # final, or of the last validation; NaN if there is none
    curve: dict[int, float]  # metric of each validation by step
    steps: int
    kind: str  # done, pruned, failed or interrupted
    status: str
    exit_status: int = 0  # also of a trial that was refused without a start


@contextmanager
def recording(place: Path) -> Iterator[None]:
    """Convert an error of the database inside the block into StorageError."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        # A damaged database raises errors of any kind where its texts and numbers are read: in
        # the libraries, or in this module, of which this function is one frame.
        frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
        is_ours = frames.count(__name__) > 1 and isinstance(error, ValueError | LookupError)
        if not is_ours and not any(name.split(".")[0] in LIBRARIES for name in frames):
            raise
        cause = error if isinstance(error, DBAPIError) else error.__cause__
        reason = getattr(cause, "orig", None) or cause or error
        cures = (cure for word, cure in CURES_OF_DATABASE.items() if word in str(reason))
        first = next((f"{cure}, or " for cure in cures), "")
        raise StorageError(f"{place / DATABASE}: {reason}; {first}give another --out") from error


def _url(path: Path) -> str:
    """URL of a database for optuna, which fills fields in braces."""
    url = URL.create("sqlite", database=str(path.absolute())).render_as_string()
    return url.replace("{", "%7B").replace("}", "%7D")


class Study:
    """Proposes trials and records them; `place` is the DIR of the sweep, locked by the caller."""

    def __init__(self, sweep: Sweep, place: Path, path: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep, self.place = sweep, place
        self._is_grid = sweep.sampler == "grid"
        sampled = {} if self._is_grid else sweep.dimensions
        self._distributions = {n: distribution_of(n, d) for n, d in sampled.items()}
        storage = optuna.storages.RDBStorage(
            _url(place / DATABASE),
            engine_kwargs={"poolclass": NullPool},  # no connection stays open between two uses
        )
        startup, warmup = sweep.pruner_startup_trials, sweep.pruner_warmup_steps
        is_pruning = sweep.pruner == "median"
        self._study = optuna.create_study(
            storage=storage,
            study_name=NAME,
            pruner=optuna.pruners.MedianPruner(startup, warmup)
            if is_pruning
            else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self._accept(path)

    def _accept(self, path: str) -> None:
        """Store the content of SWEEP.yaml; raise UsageError if DIR belongs to another one."""
        before = self._study.user_attrs.get(CONTENT)
        content = masked_values(self.sweep.model_dump(mode="json"))
        if before and (changed := changed_fields(json.loads(before), self.sweep)):
            raise UsageError(
                f"{', '.join(changed)} in {path} changed since --out {self.place} was started;"
                f" {self.sweep.changes}: restore it, or give another --out"
            )
        self._study.set_user_attr(CONTENT, json.dumps(content))

    def resume(self) -> list[tuple[str, int | None]]:
        """Queue the trials that were running when the sweep ended; return folders and processes."""
        trials = self._study.get_trials(deepcopy=False)
        queued = {t.user_attrs[FOLDER] for t in trials if t.state == TrialState.WAITING}
        interrupted = []
        for trial in trials:
            if trial.state == TrialState.RUNNING:
                folder = trial.user_attrs[FOLDER]
                if folder not in queued:  # otherwise it was killed between the two lines below
                    self._queue(_parameters_of(trial), folder)
                self._study.tell(trial.number, state=TrialState.FAIL)
                interrupted.append((folder, trial.user_attrs.get(PID)))
        return interrupted

    def requeue(self, trial: Trial | Row) -> None:
        """Queue a trial that has ended, to go on from its checkpoint if it has one."""
        self._queue(trial.parameters, trial.folder)

    def _queue(self, parameters: Mapping[str, Any], folder: str) -> None:
        attributes: dict[str, Any] = {FOLDER: folder}
        sampled = dict(parameters)
        if self._is_grid:
            attributes[POINT], sampled = sampled, {}
        self._study.enqueue_trial(sampled, user_attrs=attributes)

    def folders(self, points: Sequence[Mapping[str, Any]]) -> list[str]:
        """Folders of points of a grid: of their trials, and new ones for the others in this order.

        New ones follow those of all trials.
        """
        trials = self._study.get_trials(deepcopy=False)
        known = {frozenset(_parameters_of(t).items()): t.user_attrs[FOLDER] for t in trials}
        new = count(len({trial.user_attrs[FOLDER] for trial in trials}))
        keys = (frozenset(point.items()) for point in points)
        return [known.get(key) or f"{PREFIX}{next(new):04d}" for key in keys]

    def wants(self, folder: str) -> bool:
        """Whether the trial in `folder` is still one of the sweep: a grid may have changed."""
        return not self._is_grid or folder in self.folders(self.sweep.grid())

    def next_trial(self, aside: Collection[str] = ()) -> Trial | None:
        """The next trial: an interrupted one, or a new one; None if there are as many as wanted.

        Trials in the folders of `aside` stay queued.
        """
        trials = self._study.get_trials(deepcopy=False)
        if self._is_grid:
            points = self.sweep.grid()[: self.sweep.total]
            wanted = dict(zip(self.folders(points), points, strict=True))
        else:
            wanted = {f"{PREFIX}{n:04d}": {} for n in range(self.sweep.total)}
        wanted = {folder: point for folder, point in wanted.items() if folder not in aside}
        waiting = (t.user_attrs[FOLDER] for t in trials if t.state == TrialState.WAITING)
        folder = next((one for one in waiting if one in wanted), None)
        if folder is None:  # queued first, so that a trial has its folder from the beginning
            known = {trial.user_attrs[FOLDER] for trial in trials}
            folder = next((one for one in wanted if one not in known), None)
            if folder is None:
                return None
            self._queue(wanted[folder], folder)
        # Every trial has a seed of its own: a sweep that was killed proposes the same ones.
        number = int(folder.removeprefix(PREFIX))
        seed = int(np.random.SeedSequence([self.sweep.seed, number]).generate_state(1)[0])
        samplers = optuna.samplers
        sampler = samplers.TPESampler if self.sweep.sampler == "tpe" else samplers.RandomSampler
        self._study.sampler = sampler(seed=seed)
        while True:
            trial = Trial(self._study, self._study.ask(self._distributions))
            if trial.folder in wanted:
                return trial
            # Set aside, or a prediction, whose turn is after the runs of its law.
            self.requeue(trial)
            trial.interrupt()

    def rows(self) -> list[Row]:
        """The trials by folder, as far as they are recorded."""
        newest = {
            trial.user_attrs[FOLDER]: trial
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state != TrialState.WAITING
        }
        return [_row(folder, trial) for folder, trial in sorted(newest.items())]


class Trial:
    """A trial that runs: its parameters, and what is recorded of it."""

    def __init__(self, study: optuna.Study, trial: optuna.Trial) -> None:
        self._study, self._trial = study, trial
        self.folder: str = trial.user_attrs[FOLDER]
        self.parameters: dict[str, Any] = trial.user_attrs.get(POINT, trial.params)
        self._reported: set[int] = set()

    def record_process(self, pid: int) -> None:
        """Record the process, for a sweep that resumes while it is still ending."""
        self._trial.set_user_attr(PID, pid)

    def report(self, step: int, value: float) -> bool:
        """Record a validation; return whether the trial is to be pruned."""
        if step in self._reported or not math.isfinite(value):
            return False
        self._reported.add(step)
        self._trial.report(value, step)
        return self._trial.should_prune()

    def interrupt(self) -> None:
        """Close the record of a trial that was stopped and saved."""
        self._study.tell(self._trial, state=TrialState.FAIL)

    def finish(
        self, kind: str, status: str, steps: int, value: float = math.nan, exit_status: int = 0
    ) -> None:
        """Record the end: `done` with a value, `pruned`, `diverged` or `failed`.

        Samplers learn from a pruned or diverged trial, and ignore one that failed.
        """
        self._trial.set_user_attr(STATUS, status)
        self._trial.set_user_attr(EXIT_STATUS, exit_status)
        self._trial.set_user_attr(STEPS, steps)
        states = {"done": TrialState.COMPLETE, "failed": TrialState.FAIL}
        state = states.get(kind, TrialState.PRUNED)
        self._study.tell(self._trial, value if kind == "done" else None, state)


def distribution_of(name: str, dimension: Dimension) -> BaseDistribution:
    """Optuna's form of a dimension; choices are texts, as in SWEEP.yaml."""
    values = points(name, dimension)
    if not isinstance(dimension, Range):
        return CategoricalDistribution(values)
    low, high = values[0], values[-1]
    is_whole = isinstance(low, int)
    step = None if dimension.step is None else values[1] - low
    if is_whole:
        return IntDistribution(low, high, log=dimension.log, step=step or 1)
    return FloatDistribution(low, high, log=dimension.log, step=step)


def _parameters_of(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Parameters of a trial that runs, waits or has ended."""
    sampled = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    return trial.user_attrs.get(POINT, sampled)


def _row(folder: str, trial: optuna.trial.FrozenTrial) -> Row:
    curve = dict(sorted(trial.intermediate_values.items()))
    last = next(reversed(curve.values()), math.nan)
    status = trial.user_attrs.get(STATUS, "")
    kinds = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
    kind = kinds.get(trial.state, "interrupted") if status else "interrupted"
    return Row(
        folder=folder,
        parameters=_parameters_of(trial),
        metric=last if trial.value is None else trial.value,
        curve=curve,
        steps=trial.user_attrs.get(STEPS, next(reversed(curve), 0)),
        kind=kind,
        status=status or "interrupted",
        exit_status=trial.user_attrs.get(EXIT_STATUS, 0),
    )


ORDER = ("done", "pruned", "interrupted", "failed")  # sorted by what is known of the metric
MAX_STATUS = 60  # characters


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Finished trials by metric, then pruned ones by their last validation, then the others."""

    def rank(row: Row) -> tuple[int, float, str]:
        metric = row.metric if math.isfinite(row.metric) else math.inf
        return ORDER.index(row.kind), metric, row.folder

    return sorted(rows, key=rank)


def best_of(rows: Sequence[Row]) -> Row | None:
    """The finished trial with the lowest metric; None if none has finished."""
    ordered = best_first(rows)
    return ordered[0] if ordered and ordered[0].kind == "done" else None


def best_command(sweep: Sweep, best: Row, place: Path) -> str:
    """The command line that trains the best trial again, in a folder of its own."""
    return command_line({**sweep.flags_of(best.parameters), "out_dir": str(place / "best")})


def value_text(value: Any) -> str:
    """A parameter in a table: floats with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parameters_text(parameters: dict[str, Any]) -> str:
    """`learning_rate 0.0012, dim 64`."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in parameters.items())


def cells_of(sweep: Sweep, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the cells of each trial."""
    head = ["trial", sweep.metric, *sweep.dimensions, "steps", "status"]
    body = [
        [
            row.folder,
            formats.figure(row.metric),
            *(value_text(row.parameters.get(name, "")) for name in sweep.dimensions),
            f"{row.steps:,}",
            row.status,
        ]
        for row in best_first(rows)
    ]
    return head, body


def table_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The trials for a terminal, a line each."""
    head, body = cells_of(sweep, rows)
    body = [[*row[:-1], shorten_line(row[-1], MAX_STATUS)] for row in body]
    return aligned([head, *body], f"<{'>' * (len(head) - 2)}<")
