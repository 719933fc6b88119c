"""Where the lines of runs lie on each x axis of a page: at their step, tokens and time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minimind.report.history import Run, Start

UNITS = ("step", "tokens", "time")  # time: seconds of the starts, without those between them
MAX_KNOTS = 1000  # of a run, between which a page interpolates
Knots = dict[str, list[float]]  # ascending positions by unit; `time` is missing where it is unknown


def kept_knots(run: Run) -> Knots:
    """The kept lines, and where each start begins: its step is there twice, as time went on."""
    begins, kept = run.lines("begins"), run.is_kept
    rows, before = list[np.ndarray](), list[tuple[float, float]]()
    for start, begin in zip(run.starts, run.begins, strict=True):
        of_start = np.arange(start.first_line, start.first_line + start.lines)
        if (of_start := of_start[kept[of_start]]).size:
            rows.append(of_start)
            before.append((float(begins[of_start[0]]), begin))
    lines, seconds = run.lines("step"), run.lines("seconds")
    return _knots(
        run,
        [np.r_[first, lines[some]] for some, (first, _) in zip(rows, before, strict=True)],
        [np.r_[begin, seconds[some]] for some, (_, begin) in zip(rows, before, strict=True)],
    )


def lost_knots(run: Run) -> list[Knots]:
    """Those of each of `Run.lost_lines`."""
    steps, seconds = run.lines("step"), run.lines("seconds")
    return [_knots(run, [steps[some]], [seconds[some]]) for some in run.lost_lines()]


def _knots(run: Run, steps: Sequence[np.ndarray], seconds: Sequence[np.ndarray]) -> Knots:
    x, time = np.concatenate([*steps, []]), np.concatenate([*seconds, []])
    known = np.isfinite(time)
    has_time = bool(known[1:].any())
    if has_time:
        x, time = x[known], time[known]
    x, tokens = np.maximum.accumulate(x), np.maximum.accumulate(run.tokens_at(x))
    if len(x) > MAX_KNOTS:
        twice = np.flatnonzero(np.diff(x) == 0)
        evenly = np.linspace(0, len(x) - 1, MAX_KNOTS).astype(int)
        some = np.unique(np.r_[evenly, twice[:MAX_KNOTS], twice[:MAX_KNOTS] + 1])
        x, tokens, time = x[some], tokens[some], time[some]
    found = {"step": x, "tokens": tokens}
    if has_time:
        found["time"] = np.maximum.accumulate(time).round(2)
    return {unit: values.tolist() for unit, values in found.items()}


def lost_seconds(run: Run, start: Start, begin: float) -> tuple[float, float]:
    """When the steps of a start began that a later one took again, and when the start ended."""
    rows = slice(start.first_line, start.first_line + start.lines)
    steps, seconds = run.lines("step")[rows], run.lines("seconds")[rows]
    known = np.isfinite(seconds)
    if not known.any():
        return begin, begin + start.seconds
    x = np.r_[start.first_step, steps[known]]
    return float(np.interp(start.cutoff, x, np.r_[begin, seconds[known]])), begin + start.seconds
