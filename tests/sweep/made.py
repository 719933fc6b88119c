"""Sweeps over made-up runs: a process that writes validations of a known function."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from minimind.runtime.process import StopRequest
from minimind.sweep.propose import Proposals
from minimind.sweep.run import SWEEP, Runner, trials_of
from minimind.sweep.sweep_file import read_sweep
from minimind.sweep.trial import Result

STEPS, INTERVAL = 40, 10
CONTENT: dict[str, Any] = {
    "flags": {"max_steps": STEPS, "eval_interval": INTERVAL, "device": "cpu"},
    "dimensions": {
        "learning_rate": {"low": "1e-4", "high": "1e-1", "log": True},
        "batch_size": ["2", "4", "8"],
    },
    "trials": 6,
}


class Killed(BaseException):
    """Ends a sweep as SIGKILL does: nothing is cleaned up."""


class MadeProcess:
    """A run that validates once per look at it; the lower |log10(rate) + 2|, the better.

    Its folder keeps its step, as a checkpoint does.
    """

    kill_at: int | None = None  # looks until the sweep is killed
    statuses: Mapping[str, int] = {}  # by folder: ends with it at step 20
    refuses: Mapping[str, int] = {}  # by folder: ends with it at each start
    stop_status = 75  # -15: it is stopped before it listens to signals
    stops_itself: Sequence[str] = ()  # folders: ends with 75 at step 20, once
    starts: ClassVar[list[str]] = []  # folders in the order of their starts
    environments: ClassVar[list[Mapping[str, str]]] = []
    now, most = 0, 0  # processes running at the same time
    stop_after: StopRequest | None = None  # gets a SIGTERM once a process has validated

    def __init__(self, flags: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.place = Path(flags["out_dir"])
        self.place.mkdir(parents=True, exist_ok=True)
        self.distance = abs(math.log10(float(flags["learning_rate"])) + 2)
        lines = self._lines()
        self.step = lines[-1]["step"] if lines else 0
        self.first = self.step
        self.status: int | None = None
        cls = type(self)
        cls.starts.append(self.place.name)
        cls.environments.append(environment)
        cls.now += 1
        cls.most = max(cls.most, cls.now)

    def _lines(self) -> list[dict[str, Any]]:
        path = self.place / "metrics.jsonl"
        return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []

    def poll(self) -> int | None:
        cls = type(self)
        if cls.kill_at is not None:
            cls.kill_at -= 1
            if cls.kill_at < 0:
                raise Killed
        if refused := cls.refuses.get(self.place.name):
            self._end(refused)
        if self.status is None and self.step < STEPS:
            self.step += INTERVAL
            value = 1 + self.distance + 1 / self.step
            diverges = cls.statuses.get(self.place.name) == 0
            event = {"event": "eval", "step": self.step, "val_bpb": None if diverges else value}
            with open(self.place / "metrics.jsonl", "a") as file:
                file.write(json.dumps(event) + "\n")
            if cls.stop_after:
                cls.stop_after.record_signal(signal.SIGTERM)
        elif self.status is None:
            self._end(0)
        if self.step == 2 * INTERVAL and self.status is None:
            name = self.place.name
            if name in cls.stops_itself and self.first < self.step:
                self._end(75)
            elif cls.statuses.get(name):
                self._end(cls.statuses[name])
        return self.status

    def _end(self, status: int) -> None:
        if self.status is None:
            self.status = status
            type(self).now -= 1

    def stop(self) -> None:
        self._end(self.stop_status)

    def kill(self) -> None:
        self._end(-9)

    def last_line(self) -> str:
        return f"the last line of {self.place.name}"


def made_process(**attributes: Any) -> type[MadeProcess]:
    """A class of its own, whose counters begin at zero."""
    fresh = {"starts": [], "environments": [], "now": 0, "most": 0}
    return type("Made", (MadeProcess,), {**fresh, **attributes})


def write_sweep(place: Path, **changes: Any) -> Path:
    """SWEEP.yaml with CONTENT; a change of None removes the field."""
    place.mkdir(parents=True, exist_ok=True)
    content = {k: v for k, v in {**CONTENT, **changes}.items() if v is not None}
    path = place / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def sweep_in(
    place: Path,
    process: type[MadeProcess],
    parallel: int = 1,
    stop: StopRequest | None = None,
    **changes: Any,
) -> tuple[int, list[Result]]:
    """Run a sweep in `place` with `process`; return its status and its trials."""
    path = str(write_sweep(place.with_name(f"{place.name}-file"), **changes))
    sweep = read_sweep(path)
    slots = [{"SLOT": str(n)} for n in range(parallel)]
    runner = Runner(SWEEP, sweep.metric, place, slots, stop or StopRequest(), process)
    proposals = Proposals(sweep, runner.results, place)
    runner.resume()
    trials = trials_of(sweep, path, runner.results, proposals.parameters)
    status = runner.run(trials, proposals.is_to_be_pruned)
    return status, sorted(runner.results.values(), key=lambda one: one.folder)
