"""A run as one history: which lines of its starts are kept, and which a crash has undone.

Each start resumes from a checkpoint. Lines of earlier starts after that step are lost: they took
time but have no part in the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minimind.report.records import LIMIT, PAUSES, PHASES, Records, Start, number

PREEMPTED = 75
SILENCE = 120.0  # seconds without a line after which a run of quick steps counts as ended


@dataclass(frozen=True)
class Segment:
    """A start and the last step whose line is kept."""

    start: Start
    cutoff: float

    @cached_property
    def steps(self) -> np.ndarray:
        """(lines,)."""
        return self.start.column("step")

    @cached_property
    def is_kept(self) -> np.ndarray:
        """bool (lines,)."""
        return self.steps <= self.cutoff

    def column(self, name: str) -> np.ndarray:
        """float64 (lines,); `taken`: steps since the line before, `begins`: the step of that."""
        if name not in ("taken", "begins"):
            return self.start.column(name)
        taken = np.diff(self.steps, prepend=min(self.start.first_step, LIMIT))
        taken = np.where(taken > 0, taken, 1.0)
        return taken if name == "taken" else self.steps - taken

    @property
    def seconds(self) -> float:
        """From its first line to its last."""
        span = self.start.last_time - self.start.first_time
        return span if math.isfinite(span) and span > 0 else 0.0

    @property
    def lost_steps(self) -> int:
        """Steps after the one from which a later start resumed."""
        last = self.start.last_step
        return 0 if last <= self.cutoff else int(last - max(self.cutoff, self.start.first_step))

    def milliseconds(self, only_lost: bool = False) -> dict[str, float]:
        """Time by phase and pause over all lines, with the pauses that `exit` records."""
        weight = self.column("taken") * (~self.is_kept if only_lost else 1.0)
        end = {} if only_lost and not self.lost_steps else self.start.end or {}
        return {
            name: float(np.nansum(self.start.column(f"{name}_ms") * weight))
            + max(0.0, number(end.get(f"{name}_ms"), 0.0))
            for name in (*PHASES, *PAUSES)
        }


@dataclass(frozen=True)
class Run:
    """All records of one out_dir."""

    name: str
    records: Records

    @property
    def run_dir(self) -> Path:
        """The out_dir."""
        return self.records.run_dir

    @cached_property
    def segments(self) -> list[Segment]:
        """One for each start, in order."""
        segments: list[Segment] = []
        cutoff = math.inf
        for start in reversed(self.records.starts):
            segments.insert(0, Segment(start, cutoff))
            cutoff = min(cutoff, start.first_step)
        return segments

    def column(self, name: str) -> np.ndarray:
        """float64 (kept lines,)."""
        parts = [segment.column(name)[segment.is_kept] for segment in self.segments]
        return np.concatenate(parts) if parts else np.empty(0)

    def has(self, name: str) -> bool:
        """Whether any line has a value of that name."""
        return any(np.isfinite(segment.column(name)).any() for segment in self.segments)

    def lost_lines(self) -> Iterator[tuple[Segment, np.ndarray]]:
        """Segments with lost lines, and the indices of these and of the line before them."""
        for segment in self.segments:
            lost = np.flatnonzero(~segment.is_kept)
            if len(lost):
                yield segment, np.r_[lost[0] - 1, lost] if lost[0] else lost

    def events(self, name: str, is_lost: bool = False) -> list[dict[str, Any]]:
        """Kept or lost events of that name; events without a step are left out."""
        return [
            event
            for segment in self.segments
            for event in segment.start.events
            if event["event"] == name
            and math.isfinite(step := number(event.get("step")))
            and (step > segment.cutoff) == is_lost
        ]

    def fact(self, name: str) -> Any:
        """`name` in the last run_start that has it, or None."""
        values = [start.facts.get(name) for start in reversed(self.records.starts)]
        return next((value for value in values if value is not None), None)

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Tokens trained on up to each step."""
        known, tokens = self.column("step"), self.column("tokens")
        finite = np.isfinite(tokens)
        if not finite.any():
            return steps * number(self.fact("tokens_per_step"), 1.0)
        return np.interp(steps, np.r_[0.0, known[finite]], np.r_[0.0, tokens[finite]])

    @property
    def last_step(self) -> float:
        """The step of the last kept line, or of the last run_start."""
        kept = self.column("step")
        starts = [start.first_step for start in self.records.starts]
        return kept[-1] if len(kept) else max(filter(math.isfinite, starts), default=0.0)

    def outcomes(self, now: float) -> list[tuple[str, str]]:
        """For each segment: done, stopped, failed, crashed, running or silent, and a sentence."""
        segments = self.segments
        return [_outcome(one.start, one is segments[-1], now) for one in segments]


def name_runs(records: list[Records]) -> list[Run]:
    """Name runs by the last parts of their paths, as many as differ; a single run by two."""
    parts = [one.run_dir.absolute().parts for one in records]
    depth = 2 if len(records) == 1 else 1
    while len({path[-depth:] for path in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(path[-depth:]).removeprefix("//") or "/" for path in parts]
    return [Run(name, one) for name, one in zip(names, records, strict=True)]


def _outcome(start: Start, is_last: bool, now: float) -> tuple[str, str]:
    if start.end is None:
        if not is_last:
            return "crashed", "crashed: no end recorded"
        times = start.column("time")[-2:]
        pace = float(times[1] - times[0]) if np.isfinite(times).sum() == 2 else 0.0
        is_recent = now - start.last_time < max(SILENCE, 3 * pace)
        return ("running", "still running") if is_recent else ("silent", "no end recorded")
    status, reason = start.end.get("status"), str(start.end.get("reason") or "")
    if status == 0:
        return "done", "done"
    if status == PREEMPTED:
        return "stopped", reason or "stopped and saved"
    return "failed", f"status {status}, {start.end.get('code')}: {reason}"
