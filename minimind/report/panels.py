"""Which charts a page has: of one run with its phases and marks, of several overlaid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from minimind.report.charts import Chart, Layer, Line, Point
from minimind.report.figures import WORDS, smoothed_loss, window_of
from minimind.report.moments import Axis, axis_of, bands_of, marks_of, points_of
from minimind.report.numbers import count, exact, milliseconds, percent, short
from minimind.report.records import PAUSES, PHASES, SHOWN_EXPERTS, number
from minimind.report.runs import Run
from minimind.report.thin import bins, grouped_mean, smoothed

TONES = 8
STROKES = ("", " dashed", " dotted")
STACK_COLUMNS = 500
NOISY = 300  # lines from which a curve is drawn with its mean
FEW = 120  # points that still show one by one


def charts_of(runs: Sequence[Run], clips: Sequence[float], now: float) -> list[Chart]:
    """All charts for which there are figures; `clips` are the runs' --grad_clip, NaN unknown."""
    axis = axis_of(runs)
    is_alone = len(runs) == 1
    drawn = [_loss(runs, axis, now)]
    if any(run.has("step_ms") for run in runs):
        drawn += [_phases(run, axis, n, is_alone) for n, run in enumerate(runs)]
    simple: tuple[tuple[str, str, str, Callable[[float], str], bool], ...] = (
        ("tokens_per_second", "Throughput", "tokens/s, pauses apart", exact, True),
        ("lr", "Learning rate", "", exact, True),
        ("grad_norm", "Gradient norm", "before clipping", exact, False),
        ("memory_mib", "Memory", "peak so far of one process", exact, True),
        ("mfu", "MFU", "share of the stated peak", percent, True),
    )
    for name, title, unit, form, from_zero in simple:
        if any(run.has(name) for run in runs):
            chart = _simple(runs, axis, name, (title, unit, form, from_zero))
            drawn.append(_clipping(chart, runs, axis, clips) if name == "grad_norm" else chart)
    drawn += [
        _experts(run, axis, n, is_alone) for n, run in enumerate(runs) if run.has("expert_most")
    ]
    marks = marks_of(runs[0], axis, now) if is_alone else []
    bands = bands_of(runs[0], axis) if is_alone else []
    return [replace(chart, marks=marks, bands=bands) for chart in drawn]


def tone_of(number: int) -> str:
    """The colour of a run and its stroke: 24 are told apart, the 25th is drawn as the first."""
    return f"k{number % TONES}{STROKES[number // TONES % len(STROKES)]}"


def _base(axis: Axis, key: str, title: str, unit: str) -> Chart:
    return Chart(key, title, unit, axis.span, columns=axis.columns, x_name=axis.name)


def _loss(runs: Sequence[Run], axis: Axis, now: float) -> Chart:
    lines: list[Line] = []
    points: list[Point] = []
    feet: list[tuple[str, str, np.ndarray]] = []
    is_alone = len(runs) == 1
    for n, run in enumerate(runs):
        tone, x, loss = tone_of(n), axis.of(run, run.column("step")), run.column("loss")
        lines += _lost(run, axis, "loss", tone)
        name = "loss" if is_alone else f"{run.name} loss"
        lines.append(Line(name, tone, x, loss, "raw", in_legend=is_alone))
        words = f"mean of {count(window_of(len(x)), 'line')}" if is_alone else run.name
        end = "loss" if is_alone else run.name
        lines.append(Line(words, tone, x, smoothed_loss(run), end=end))
        lines += _validation(run, axis, tone, is_alone)
        points += points_of(run, axis, tone, now)
    if is_alone:
        found = {"checkpoint": "checkpoint_saved", "skipped step": "step_skipped"}
        places = {name: _places(runs[0], axis, event) for name, event in found.items()}
        shown = {name: x if len(x) <= FEW else x[:0] for name, x in places.items()}
        feet = [
            (count(len(x), name), name.split()[0], shown[name])
            for name, x in places.items()
            if len(x)
        ]
    chart = _base(axis, "loss", "Loss", "nats per token")
    chart = replace(chart, lines=lines, points=points, ticks_below=feet, may_be_log=True)
    return replace(chart, is_wide=True, has_labels=is_alone)


def _validation(run: Run, axis: Axis, tone: str, is_alone: bool) -> list[Line]:
    """Its points, joined; those that were lost faintly."""
    name, tone = ("validation", "val") if is_alone else (f"{run.name} validation", tone)
    lines = []
    for is_lost in (True, False):
        events = run.events("eval", is_lost)
        x = axis.of(run, np.array([number(e["step"]) for e in events]))
        y = np.array([number(e.get("val_loss")) for e in events])
        look = "dots" if len(x) <= FEW else "plain"
        if events and is_lost:
            lines.append(Line(f"{name}, lost", tone, x, y, f"{look} lost", in_legend=False))
        elif events:
            lines.append(Line(f"{name}, joined", tone, x, y, "joined", in_legend=False))
            end = "validation" if is_alone else ""
            lines.append(Line(name, tone, x, y, look, in_legend=is_alone, end=end))
    return lines


def _lost(run: Run, axis: Axis, name: str, tone: str) -> list[Line]:
    found = []
    for stretch, indices in run.lost():
        x = axis.of(run, stretch.steps[indices])
        y = stretch.start.column(name)[indices]
        found.append(Line("lost", tone, x, y, "lost", None, False))
    return found


def _places(run: Run, axis: Axis, event: str) -> np.ndarray:
    return axis.of(run, np.array([number(e["step"]) for e in run.events(event)]))


def _phases(run: Run, axis: Axis, n: int, is_alone: bool) -> Chart:
    """Milliseconds of a step by phase, and of the pauses between steps."""
    begins, ends = run.column("begins"), run.column("step")
    begins, ends = axis.of(run, begins), axis.of(run, ends)
    left, right, group = bins(begins, ends, max(60, min(STACK_COLUMNS, axis.columns)))
    taken = run.column("taken")
    layers = []
    for name in (*PHASES, *PAUSES):
        values = run.column(f"{name}_ms")
        heights = grouped_mean(values, taken, group)
        if heights.any():
            fine = np.isfinite(values)
            mean = float(np.average(values[fine], weights=np.maximum(taken[fine], 1e-9)))
            layers.append(Layer(WORDS.get(name, name), f"p-{name}", heights, milliseconds(mean)))
    lines = []
    if run.has("comm_ms"):
        comm = grouped_mean(run.column("comm_ms"), taken, group)
        lines = [Line("of which communication", "comm", right, comm, "limit", "", True)]
    title = "Time of a step" if is_alone else f"Time of a step: {run.name}"
    chart = _base(axis, f"phases{n or ''}", title, "by phase; what lies between steps on top")
    return replace(
        chart,
        begins=left,
        ends=right,
        layers=layers,
        lines=lines,
        from_zero=True,
        is_wide=is_alone,
        form=milliseconds,
        tick_form=milliseconds,
    )


def _simple(
    runs: Sequence[Run],
    axis: Axis,
    column: str,
    told: tuple[str, str, Callable[[float], str], bool],
) -> Chart:
    title, unit, form, from_zero = told
    is_alone = len(runs) == 1
    lines: list[Line] = []
    for n, run in enumerate(runs):
        lines += _lost(run, axis, column, tone_of(n)) if is_alone else []
        x, y = axis.of(run, run.column("step")), run.column(column)
        name = title.lower() if is_alone else run.name
        if len(x) > NOISY and column in ("grad_norm", "tokens_per_second", "mfu"):
            lines.append(Line(f"{name}, each line", tone_of(n), x, y, "raw", in_legend=False))
            name, y = f"{name}, smoothed" if is_alone else name, smoothed(y, window_of(len(y)))
        lines.append(Line(name, tone_of(n), x, y))
    if column == "memory_mib":
        lines, unit = _in_gibibytes(lines, unit)
    chart = _base(axis, column, title, unit)
    ticks = form if form is percent else None
    chart = replace(chart, lines=lines, form=form, tick_form=ticks)
    return replace(chart, from_zero=from_zero, may_be_log=not from_zero)


def _in_gibibytes(lines: list[Line], unit: str) -> tuple[list[Line], str]:
    """The same, in MiB as they come where they are small."""
    if max((float(np.nanmax(line.y, initial=0.0)) for line in lines), default=0.0) < 4096:
        return lines, f"{unit}, MiB"
    return [replace(line, y=line.y / 1024) for line in lines], f"{unit}, GiB"


def _clipping(chart: Chart, runs: Sequence[Run], axis: Axis, clips: Sequence[float]) -> Chart:
    """The gradient norm with the limit, and where it was clipped."""
    lines = list(chart.lines)
    for limit in sorted({clip for clip in clips if clip > 0}):
        at = np.array(axis.span)
        lines.append(Line("--grad_clip", "limit", at, np.full(2, limit), "limit", short(limit)))
    if len(runs) > 1:
        return replace(chart, lines=lines)
    clipped = runs[0].column("is_clipped") > 0
    x = axis.of(runs[0], runs[0].column("step")[clipped])
    share = f"clipped in {percent(float(clipped.mean()))} of the lines" if len(clipped) else ""
    feet = [(share, "clipped", x)] if len(x) else []
    return replace(chart, lines=lines, ticks_below=feet)


def _experts(run: Run, axis: Axis, n: int, is_alone: bool) -> Chart:
    """Visits of each expert as a multiple of an even share, and the range over all layers."""
    x = axis.of(run, run.column("step"))
    lines = [
        Line(words, "range", x, run.column(f"expert_{which}"), "raw")
        for which, words in (("least", "least of any layer"), ("most", "most of any layer"))
    ]
    for expert in range(SHOWN_EXPERTS):
        if run.has(f"expert_{expert}"):
            tone = tone_of(expert)
            lines.append(Line(f"expert {expert}", tone, x, run.column(f"expert_{expert}")))
    title = "Load of the experts" if is_alone else f"Load of the experts: {run.name}"
    chart = _base(axis, f"experts{n or ''}", title, "visits, as a multiple of an even share")
    return replace(chart, lines=[line for line in lines if np.isfinite(line.y).any()])
