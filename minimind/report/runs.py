"""A run as one history: which lines of its starts still hold, and which a crash has undone.

Each start begins at a checkpoint. What earlier ones did after that step is lost, be it taken again
or not: it was done, took its time, and is no part of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minimind.report.records import BEYOND, PAUSES, PHASES, Records, Start, number

PREEMPTED = 75
QUIET = 120.0  # seconds without a line after which a run is not called running, if it is quick


@dataclass(frozen=True)
class Stretch:
    """A start and the step up to which its lines still hold."""

    start: Start
    cutoff: float

    @cached_property
    def steps(self) -> np.ndarray:
        """Of its lines."""
        return self.start.column("step")

    @cached_property
    def taken(self) -> np.ndarray:
        """Steps that each line stands for: those since the line before."""
        taken = np.diff(self.steps, prepend=min(self.start.first_step, BEYOND))
        return np.where(taken > 0, taken, 1.0)

    @property
    def holds(self) -> np.ndarray:
        """Which lines still hold."""
        return self.steps <= self.cutoff

    @property
    def seconds(self) -> float:
        """From its first line to its last."""
        span = self.start.last_time - self.start.first_time
        return span if math.isfinite(span) and span > 0 else 0.0

    @property
    def lost_steps(self) -> int:
        """Those it took after the step from which a later start went on."""
        last = self.start.last_step
        return 0 if last <= self.cutoff else int(last - max(self.cutoff, self.start.first_step))

    def milliseconds(self, only_lost: bool = False) -> dict[str, float]:
        """By phase and pause, all its lines together, and the pauses after the last of them."""
        weight = self.taken * (~self.holds if only_lost else 1.0)
        names = (*PHASES, *PAUSES)
        spent = {n: float(np.nansum(self.start.column(f"{n}_ms") * weight)) for n in names}
        if only_lost and self.lost_steps == 0:
            return spent
        end = self.start.end or {}
        return {n: ms + max(0.0, number(end.get(f"{n}_ms"), 0.0)) for n, ms in spent.items()}


@dataclass(frozen=True)
class Run:
    """All that was recorded in one out_dir."""

    place: Path
    name: str
    records: Records

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Its starts in order."""
        found: list[Stretch] = []
        cutoff = math.inf
        for start in reversed(self.records.starts):
            found.insert(0, Stretch(start, cutoff))
            cutoff = min(cutoff, start.first_step)
        return found

    def column(self, name: str) -> np.ndarray:
        """float64 (lines that hold,): `begins` and `taken` too, the steps a line stands for."""
        parts = [_column(s, name)[s.holds] for s in self.stretches]
        return np.concatenate(parts) if parts else np.empty(0)

    def has(self, name: str) -> bool:
        """Whether any line has a figure of that name."""
        return any(np.isfinite(s.start.column(name)).any() for s in self.stretches)

    def lost(self) -> Iterator[tuple[Stretch, np.ndarray]]:
        """Stretches with lines that do not hold, and the indices of these and the one before."""
        for stretch in self.stretches:
            undone = np.flatnonzero(~stretch.holds)
            if len(undone):
                yield stretch, np.r_[undone[0] - 1, undone] if undone[0] else undone

    def events(self, name: str, is_lost: bool = False) -> list[dict[str, Any]]:
        """Events of that name which still hold, or the others; those without a step not at all."""
        return [
            event
            for stretch in self.stretches
            for event in stretch.start.events
            if event["event"] == name
            and math.isfinite(step := number(event.get("step")))
            and (step > stretch.cutoff) == is_lost
        ]

    def fact(self, name: str) -> Any:
        """What the last run_start that has it says of `name`."""
        told = [s.facts[name] for s in self.records.starts if s.facts.get(name) is not None]
        return told[-1] if told else None

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Tokens trained on up to each step."""
        known, tokens = self.column("step"), self.column("tokens")
        fine = np.isfinite(tokens)
        per_step = number(self.fact("tokens_per_step"), 1.0)
        if not fine.any():
            return steps * per_step
        return np.interp(steps, np.r_[0.0, known[fine]], np.r_[0.0, tokens[fine]])

    @property
    def last_step(self) -> float:
        """The one it stands at: of its last line that holds, or of its last run_start."""
        held = [
            stretch.steps[stretch.holds][-1] for stretch in self.stretches if stretch.holds.any()
        ]
        begun = [s.start.first_step for s in self.stretches if math.isfinite(s.start.first_step)]
        return float(held[-1]) if held else max(begun, default=0.0)


def runs_of(records: list[Records]) -> list[Run]:
    """Runs with names that tell them apart: the last parts of their paths, as many as it takes.

    A run alone has two: `sample/run`, as many are called `run`.
    """
    parts = [one.place.absolute().parts for one in records]
    depth = 2 if len(records) == 1 else 1
    while len({path[-depth:] for path in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(path[-depth:]).removeprefix("//") or "/" for path in parts]
    return [Run(one.place, name, one) for one, name in zip(records, names, strict=True)]


def how_it_ended(stretch: Stretch, is_last: bool, now: float) -> tuple[str, str]:
    """A kind (done, stopped, failed, crashed, running, silent) and the words for it."""
    end = stretch.start.end
    if end is None:
        if not is_last:
            return "crashed", "crashed: no end recorded"
        is_fresh = now - stretch.start.last_time < max(QUIET, 3 * _pace(stretch.start))
        return ("running", "still running") if is_fresh else ("silent", "no end recorded")
    status, reason = end.get("status"), str(end.get("reason") or "")
    if status == 0:
        return "done", "done"
    if status == PREEMPTED:
        return "stopped", reason or "stopped and saved"
    return "failed", f"status {status}, {end.get('code')}: {reason}"


def _pace(start: Start) -> float:
    """Seconds between its last two step lines."""
    times = start.column("time")[-2:]
    gap = float(times[1] - times[0]) if len(times) == 2 else 0.0
    return gap if math.isfinite(gap) else 0.0


def _column(stretch: Stretch, name: str) -> np.ndarray:
    if name == "taken":
        return stretch.taken
    if name == "begins":
        return stretch.steps - stretch.taken
    return stretch.start.column(name)
