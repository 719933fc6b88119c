"""sweep.html: the trials over time, parallel coordinates, and the metric over each dimension."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from minimind.report import formats
from minimind.report.charts import TEMPLATE, Chart
from minimind.report.formats import LIGHT
from minimind.report.page import fill_page, html_table, plots
from minimind.sweep.sweep_file import Dimension, Range, Sweep
from minimind.sweep.trial import (
    ORDER,
    Result,
    best_command,
    best_first,
    best_of,
    parameters_text,
    table,
    value_text,
)

NOUNS = {"val_bpb": "bits per byte", "val_loss": "nats per token"}


class Look(NamedTuple):
    """How the trials of a kind are drawn, in every chart."""

    tone: str
    width: float
    dash: str
    symbol: str


LOOKS = {
    "not finished": Look("soft", 1.0, "dot", "circle-open"),
    "finished": Look("run0", 1.0, "solid", "circle"),
    "best": Look("run1", 3.0, "solid", "diamond"),
}  # the last is drawn on top
MOST_TICKS = 4  # of an axis of the parallel coordinates
MOST_WHOLE = 10  # trials up to which each has a tick
MOST_STEPS = 12  # columns of the table of validations


def render(sweep: Sweep, rows: Sequence[Result], folder: Path) -> str:
    """The HTML of the page."""
    charts = draw(sweep, rows)
    head, *body = table(rows, sweep.metric, sweep.dimensions)
    kinds = [(sum(row.state == kind for row in rows), kind) for kind in ORDER]
    counts = ", ".join(f"{number} {kind}" for number, kind in kinds if number)
    lead = f"{len(rows)} of {formats.count(sweep.total, 'trial')}: {counts}."
    title = f"Sweep of {formats.listed([*sweep.dimensions])}"
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{lead}</p>']
    if best := best_of(rows):
        text = f"Best: {best.folder}, {sweep.metric} {formats.figure(best.metric)}"
        parts.append(f"<p>{escape(text)} with {escape(parameters_text(best.parameters))}.</p>")
        command = re.split(r" (?=--)", best_command(sweep, best, folder))
        words = " ".join(f"<span><code>{escape(word)}</code></span>" for word in command)
        parts.append(f'<p class="pairs">{words}</p>')
    if charts:
        note = "The values are in the tables Trials and Validations below."
        parts += ["<h2>Plots</h2>", f"<p>{note}</p>", plots(charts, is_single=True)]
    parts += [f"<h2>Trials</h2>{html_table(head, body, 'final')}"]
    if charts:
        parts += [f"<h2>Validations</h2>{html_table(*validations(rows), 'final')}"]
    now, where = formats.timestamp(time.time()), escape(str(folder))
    parts.append(f"<footer>Written {now} by minimind sweep in <code>{where}</code></footer>")
    title = f"{folder.absolute().name}: {title}"
    return fill_page(title, "\n".join(parts), charts, is_linked=False)


def validations(rows: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: the metric of each trial at each step, the best trial first.

    Of more than MOST_STEPS steps some are shown, the last among them.
    """
    measured = [row for row in best_first(rows) if row.finite]
    steps = sorted({step for row in measured for step in row.finite})
    steps = sorted(steps[:: -math.ceil(len(steps) / MOST_STEPS)])
    cells = [
        [row.folder, *(formats.figure(row.finite[s]) if s in row.finite else "" for s in steps)]
        for row in measured
    ]
    return ["trial", *(f"step {step:,}" for step in steps)], cells


def draw(sweep: Sweep, rows: Sequence[Result]) -> list[Chart]:
    """Figures of the trials that have a metric."""
    groups = dict(_groups(rows))
    if not groups:
        return []
    noun, dimensions = NOUNS[sweep.metric], sweep.dimensions
    lines = _parallel(sweep, groups)
    charts = [
        Chart("history", "History", noun, _history(groups).to_dict()),
        Chart("parallel", "Parallel coordinates", _told(groups), lines.to_dict()),
    ]
    for name in dimensions if best_of(rows) else ():
        figure = _points(groups, {row.folder: row.parameters.get(name) for row in rows})
        figure.update_xaxes(title=name, **_axis(dimensions[name]))
        charts.append(Chart(f"over-{name.replace('_', '-')}", name, noun, figure.to_dict()))
    curves = go.Figure()
    for kind, row, is_first in _each(groups):
        x, y = [*row.finite], [*row.finite.values()]
        curves.add_scatter(x=x, y=y, **_line(kind, is_first), **_hover([row], y))
    curves.update_xaxes(title="step")
    at_steps = f"{noun} at each step"
    return [*charts, Chart("curves", "Validations", at_steps, _laid_out(curves).to_dict())]


def _groups(rows: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """The trials that have a metric, by the names of `LOOKS`."""
    best = best_of(rows)
    kinds = {row.folder: "finished" if row.state == "done" else "not finished" for row in rows}
    kinds |= {best.folder: "best"} if best else {}
    for kind in LOOKS:
        if found := [row for row in rows if row.finite and kinds[row.folder] == kind]:
            yield kind, found


def _each(groups: dict[str, list[Result]]) -> Iterator[tuple[str, Result, bool]]:
    """Kind and trial, and whether it is the first of its kind, which the legend has."""
    for kind, found in groups.items():
        for row in found:
            yield kind, row, row is found[0]


def _told(groups: dict[str, list[Result]]) -> str:
    """What the lines are, for the caption."""
    words = {"best": "best: thick", "finished": "finished: thin", "not finished": "others: dotted"}
    return ", ".join(words[kind] for kind in reversed(LOOKS) if kind in groups)


def _line(kind: str, is_first: bool) -> dict[str, Any]:
    look = LOOKS[kind]
    return {
        **{"mode": "lines+markers", "name": kind, "legendgroup": kind, "showlegend": is_first},
        "line": {"color": LIGHT[look.tone], "width": look.width, "dash": look.dash},
        "marker": {"symbol": look.symbol, "size": 6},
    }


def _hover(rows: Sequence[Result], values: Sequence[float]) -> dict[str, Any]:
    """What is shown at the pointer: the trial and its parameters with each value."""
    rows = [*rows] * (len(values) if len(rows) == 1 else 1)
    texts = [
        f"{row.folder}: {formats.figure(y)}<br>{parameters_text(row.parameters)}"
        for row, y in zip(rows, values, strict=True)
    ]
    return {"text": texts, "hoverinfo": "text"}


def _points(groups: dict[str, list[Result]], places: dict[str, Any]) -> go.Figure:
    """The metric of the trials over a place of each, by folder; one without a place is left out."""
    figure = go.Figure()
    for kind, found in groups.items():
        look, rows = LOOKS[kind], [row for row in found if places[row.folder] is not None]
        marker = {"color": LIGHT[look.tone], "symbol": look.symbol, "size": 9}
        marker["line"] = {"width": 1.5, "color": LIGHT[look.tone]}
        x, y = [places[row.folder] for row in rows], [row.metric for row in rows]
        figure.add_scatter(x=x, y=y, name=kind, mode="markers", marker=marker, **_hover(rows, y))
    return _laid_out(figure)


def _history(groups: dict[str, list[Result]]) -> go.Figure:
    """The metric over the trials in their order, and the best so far of those that finished."""
    rows = sorted((row for found in groups.values() for row in found), key=lambda row: row.folder)
    at = {row.folder: int(row.folder.rpartition("-")[2]) for row in rows}
    figure, best, lowest = _points(groups, at), [], math.inf
    for row in rows:
        lowest = min(lowest, row.metric) if row.state == "done" else lowest
        best.append(lowest if math.isfinite(lowest) else None)
    line = {"color": LIGHT["run1"], "width": 1.5, "shape": "hv"}
    more = {"mode": "lines", "line": line, "hoverinfo": "skip"}
    figure.add_scatter(x=[*at.values()], y=best, name="best so far", **more)
    if max(at.values()) <= MOST_WHOLE:  # plotly would halve them
        figure.update_xaxes(dtick=1)
    return figure.update_xaxes(title="trial", tickformat="d")


def _axis(dimension: Dimension) -> dict[str, Any]:
    """Settings of the x axis of a dimension."""
    if not isinstance(dimension, Range):
        return {"type": "category", "categoryorder": "array", "categoryarray": [*dimension]}
    if not dimension.log:
        return {"exponentformat": "e"}
    ticks = formats.log_ticks(float(dimension.low), float(dimension.high))
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _parallel(sweep: Sweep, groups: dict[str, list[Result]]) -> go.Figure:
    """A line for each trial through an axis for the metric and for each dimension.

    The axes are drawn between 0 and 1; that of a logarithmic range is logarithmic.
    """
    metrics = [row.metric for found in groups.values() for row in found]
    whole = Range(low=repr(min(metrics)), high=repr(max(metrics)))
    axes = {sweep.metric: whole, **sweep.dimensions}
    figure = go.Figure()
    for kind, row, is_first in _each(groups):
        values = {sweep.metric: row.metric, **row.parameters}
        y = [_height(axis, values.get(name)) for name, axis in axes.items()]
        text = _hover([row], [row.metric])["text"] * len(y)
        look = {"text": text, "hoverinfo": "text", "connectgaps": True}
        figure.add_scatter(x=[*range(len(axes))], y=y, **_line(kind, is_first), **look)
    for n, axis in enumerate(axes.values()):
        figure.add_vline(x=n, line={"color": LIGHT["soft"], "width": 1})
        for label, value in _ticks(axis):
            at = {"x": n, "y": _height(axis, value), "text": label, "showarrow": False}
            look = {"bgcolor": LIGHT["paper"], "font": {"color": LIGHT["ink"], "size": 11}}
            figure.add_annotation(**at, **look, xanchor="left", xshift=3, borderpad=1)
    names = {"tickvals": [*range(len(axes))], "ticktext": [*axes], "showline": False}
    names["autotickangles"] = [0, -30, -60]  # the last name, too, has room to its left
    figure.update_xaxes(**names, range=[-0.1, len(axes) - 0.5])
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])
    return _laid_out(figure)


def _height(axis: Dimension, value: Any) -> float | None:
    """Where a value is on an axis, from 0 to 1; None for one that is not on it."""
    if not isinstance(axis, Range):
        if str(value) not in axis:
            return None
        return axis.index(str(value)) / (len(axis) - 1) if len(axis) > 1 else 0.5
    if value is None:
        return None
    scale = math.log if axis.log else float
    low, high = scale(float(axis.low)), scale(float(axis.high))
    return (scale(float(value)) - low) / (high - low) if high > low else 0.5


def _ticks(axis: Dimension) -> list[tuple[str, Any]]:
    """Labels of an axis and their values: choices, or the ends and some between."""
    if not isinstance(axis, Range):
        every = math.ceil(len(axis) / (2 * MOST_TICKS))
        return [(choice, choice) for choice in axis[::every]]
    low, high = float(axis.low), float(axis.high)
    if axis.log:
        decades = (10.0**n for n in range(math.ceil(math.log10(low)), math.ceil(math.log10(high))))
        between = [ten for ten in decades if 0.1 < (_height(axis, ten) or 0.0) < 0.9]
        values = [low, *between[:: math.ceil(len(between) / MOST_TICKS) or 1], high]
    else:
        shares = [n / (MOST_TICKS - 1) for n in range(MOST_TICKS)] if high > low else [0.0]
        values = [low + (high - low) * share for share in shares]
    return [(value_text(value), value) for value in values]


def _laid_out(figure: go.Figure) -> go.Figure:
    figure.update_layout(template=TEMPLATE, hovermode="closest")
    # Room for labels that are turned, and ticks of a logarithmic axis that are no whole numbers.
    return figure.update_xaxes(automargin=True, hoverformat="")
