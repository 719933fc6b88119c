"""Where a run began, ended, crashed and went on, on the axis that its charts share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minimind.report.charts import Mark, Point
from minimind.report.records import number
from minimind.report.runs import Run, how_it_ended

POINTS = 4000  # pixel columns of all curves of one chart together


@dataclass(frozen=True)
class Axis:
    """What all charts of a page are drawn over: steps, or tokens where steps differ in size."""

    is_tokens: bool
    span: tuple[float, float]
    columns: int

    @property
    def name(self) -> str:
        """As the axis is labelled."""
        return "tokens" if self.is_tokens else "step"

    def of(self, run: Run, steps: np.ndarray) -> np.ndarray:
        """Where steps of a run lie."""
        return run.tokens_at(steps) if self.is_tokens else steps


def axis_of(runs: Sequence[Run]) -> Axis:
    """The axis from the first line of any run to the last."""
    told = [s.start.facts.get("tokens_per_step") for run in runs for s in run.stretches]
    sizes = {number(size) for size in told if math.isfinite(number(size))}
    axis = Axis(len(sizes) > 1, (0.0, 1.0), max(100, min(1000, POINTS // len(runs))))
    low, high = [], []
    for run in runs:
        for stretch in run.stretches:
            if len(stretch.steps):
                first = stretch.steps[0] - stretch.taken[0]
                edges = axis.of(run, np.array([first, stretch.steps[-1]]))
                low.append(float(edges[0]))
                high.append(float(edges[1]))
    span = (min(low), max(high)) if low else (0.0, 1.0)
    return Axis(axis.is_tokens, span if span[1] > span[0] else (span[0], span[0] + 1), axis.columns)


def points_of(run: Run, axis: Axis, tone: str, now: float) -> list[Point]:
    """Where a start ended otherwise than done."""
    found = []
    for stretch in run.stretches:
        kind, words = how_it_ended(stretch, stretch is run.stretches[-1], now)
        loss = stretch.start.column("loss")
        known = np.flatnonzero(np.isfinite(loss))
        if len(known) and kind in ("crashed", "failed", "stopped"):
            step = stretch.steps[known[-1]]
            x = float(axis.of(run, np.array([step]))[0])
            told = f"{run.name}, step {step:.0f}: {words}"
            found.append(Point(x, float(loss[known[-1]]), kind, tone, told))
    return found


def marks_of(run: Run, axis: Axis, now: float) -> list[Mark]:
    """Where starts ended and the next ones began."""
    found: list[tuple[float, str, str]] = []
    world = None
    for n, stretch in enumerate(run.stretches):
        start = stretch.start
        is_last = stretch is run.stretches[-1]
        kind, _ = how_it_ended(stretch, is_last, now)
        if n and math.isfinite(start.first_step) and not start.is_implied:
            is_now = start.facts.get("world_size")
            changed = f", {world} → {is_now} processes" if world not in (None, is_now) else ""
            word = "begun anew" if start.facts.get("resume_from") is None else "resumed"
            label = f"{word} at {start.first_step:,.0f}{changed}"
            found.append((start.first_step, "resume", label))
        world = start.facts.get("world_size", world)
        if kind in ("crashed", "failed", "stopped"):
            known = [step for step in (start.first_step, start.last_step) if math.isfinite(step)]
            short_word = {"stopped": "stopped", "crashed": "crashed"}.get(kind)
            label = short_word or f"failed ({(start.end or {}).get('code')})"
            if known:
                found.append((max(known), kind, f"{label} at {max(known):,.0f}"))
    steps = axis.of(run, np.array([step for step, _, _ in found]))
    inside = (axis.span[0] <= steps) & (steps <= axis.span[1])
    marks = zip(steps.tolist(), found, inside.tolist(), strict=True)
    return [Mark(x, kind, label) for x, (_, kind, label), shown in marks if shown]


def bands_of(run: Run, axis: Axis) -> list[tuple[float, float]]:
    """The stretches that were lost and, most of them, taken again."""
    found = []
    for stretch in run.stretches:
        if stretch.lost_steps:
            begin = max(stretch.cutoff, stretch.start.first_step)
            edges = axis.of(run, np.array([begin, stretch.start.last_step]))
            found.append((float(edges[0]), float(edges[1])))
    return found
