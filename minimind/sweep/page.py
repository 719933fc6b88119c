"""sweep.html: the trials over time, parallel coordinates, and the metric over each dimension."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from minimind.report import formats
from minimind.report.charts import TEMPLATE, Chart
from minimind.report.formats import LIGHT
from minimind.report.page import fill_page, html_table, plots
from minimind.runtime.durable_files import storing, write_whole
from minimind.sweep.study import ORDER, Row, best_command, best_of, cells_of, parameters_text
from minimind.sweep.sweep_file import Range, Sweep

PAGE_NAME = "sweep.html"
NOUNS = {"val_bpb": "bits per byte", "val_loss": "nats per token"}
# Color and symbol by kind of trial.
LOOKS = {"done": ("run0", "circle"), "pruned": ("run1", "x-thin-open")}
BANDS = ("run0", "run5", "sample")  # the best third of the finished trials, the second, the last


def write_page(sweep: Sweep, rows: Sequence[Row], folder: Path) -> Path:
    """Write the page of the sweep in `folder`; return its path."""
    out = folder / PAGE_NAME
    content = render(sweep, rows, folder).encode(errors="backslashreplace")
    with storing(str(out), "free some space", needed=len(content)):
        write_whole(out, content)
    return out


def render(sweep: Sweep, rows: Sequence[Row], folder: Path) -> str:
    """The HTML of the page."""
    charts = Charts(sweep, rows).draw()
    head, body = cells_of(sweep, rows)
    cells = [[escape(cell) for cell in line] for line in body]
    kinds = [(sum(row.kind == kind for row in rows), kind) for kind in ORDER]
    counts = ", ".join(f"{number} {kind}" for number, kind in kinds if number)
    lead = f"{len(rows)} of {formats.count(sweep.total, 'trial')}: {counts}."
    parts = [f"<h1>{escape(folder.absolute().name)}</h1>", f'<p class="lead">{lead}</p>']
    if best := best_of(rows):
        text = f"Best: {best.folder}, {sweep.metric} {formats.figure(best.metric)}"
        parts.append(f"<p>{escape(text)} with {escape(parameters_text(best.parameters))}.</p>")
        command = re.split(r" (?=--)", best_command(sweep, best, folder))
        words = " ".join(f"<span><code>{escape(word)}</code></span>" for word in command)
        parts.append(f'<p class="pairs">{words}</p>')
    parts += ["<h2>Plots</h2>", plots(charts, is_single=True)] if charts else []
    parts += [f"<h2>Trials</h2>{html_table(head, cells, 'final')}"]
    now, where = formats.timestamp(time.time()), escape(str(folder))
    parts.append(f"<footer>Written {now} by minimind sweep in <code>{where}</code></footer>")
    return fill_page(f"{folder.absolute().name}: sweep", "\n".join(parts), charts, is_linked=False)


class Charts:
    """Draws the trials that have a metric."""

    def __init__(self, sweep: Sweep, rows: Sequence[Row]) -> None:
        self.sweep = sweep
        self.rows = [row for row in rows if math.isfinite(row.metric)]
        self.axis: dict[str, Any] = {"title": sweep.metric, "hoverformat": ".4f"}
        finished = [row.metric for row in self.rows if row.kind == "done"]
        self.limits = np.quantile(finished, (1 / 3, 2 / 3)) if finished else np.array([0.0, 0.0])

    def draw(self) -> list[Chart]:
        """The history, the parallel coordinates and one chart for each dimension."""
        if not self.rows:
            return []
        over = [self._dimension(name) for name in self.sweep.dimensions]
        return [self._history(), self._parallel(), *over, self._curves()]

    def _chart(self, key: str, title: str, unit: str, traces: list[Any], **layout: Any) -> Chart:
        shown = {"template": TEMPLATE, "hovermode": "closest", "yaxis": self.axis, **layout}
        shown["xaxis"] = {**layout["xaxis"], "automargin": True}  # room for labels that are turned
        return Chart(key, title, unit, go.Figure(traces, shown))

    def _points(self, kind: str, x: Sequence[Any]) -> Any:
        """The trials of a kind as points over `x`, which has a value for each of them."""
        tone, symbol = LOOKS.get(kind, ("soft", "circle-open"))
        rows = [row for row in self.rows if row.kind == kind]
        marker = {"size": 9, "symbol": symbol, "color": LIGHT[tone], "line": {"width": 2}}
        marker["line"] = {"width": 2 if symbol != "circle" else 0, "color": LIGHT[tone]}
        texts = [hover_text(row, self.sweep.metric) for row in rows]
        style = {"mode": "markers", "marker": marker, "text": texts, "hoverinfo": "text"}
        return go.Scatter(name=kind, x=x, y=[row.metric for row in rows], **style)

    def _of_each_kind(self, x_of: Any) -> list[Any]:
        kinds = dict.fromkeys(row.kind for row in self.rows)
        return [
            self._points(kind, [x_of(row) for row in self.rows if row.kind == kind])
            for kind in sorted(kinds)
        ]

    def _history(self) -> Chart:
        traces = self._of_each_kind(_number)
        finished = [row for row in self.rows if row.kind == "done"]
        if finished:
            x, best = [*map(_number, finished)], np.minimum.accumulate([r.metric for r in finished])
            line = {"color": LIGHT["ink"], "width": 1.5, "shape": "hv"}
            style = {"mode": "lines", "line": line, "hoverinfo": "skip"}
            traces.insert(0, go.Scatter(name="best so far", x=x, y=best, **style))
        unit = f"{NOUNS[self.sweep.metric]}; of a pruned trial its last validation"
        ticks = {"dtick": 1} if max(map(_number, self.rows)) < 10 else {}  # otherwise whole anyway
        return self._chart("history", "History", unit, traces, xaxis={"title": "trial", **ticks})

    def _curves(self) -> Chart:
        """The validations of each trial, in the colors of the parallel coordinates."""
        traces = []
        for row in self._worst_first():
            text = [hover_text(row, self.sweep.metric)] * len(row.curve)
            points = {"x": [*row.curve], "y": [*row.curve.values()], "text": text}
            style = {"mode": "lines+markers", "marker": {"size": 4}, "hoverinfo": "text"}
            traces.append(go.Scatter(**points, **style, line=self._line(row), showlegend=False))
        unit = f"{NOUNS[self.sweep.metric]} at each step"
        return self._chart("curves", "Validations", unit, traces, xaxis={"title": "step"})

    def _worst_first(self) -> list[Row]:
        """Pruned trials, then finished ones; of each the best last, drawn on top."""
        return sorted(self.rows, key=lambda row: (row.kind == "done", -row.metric))

    def _line(self, row: Row) -> dict[str, Any]:
        is_done = row.kind == "done"
        band = int(np.searchsorted(self.limits, row.metric)) if is_done else len(BANDS) - 1
        line = {"color": LIGHT[BANDS[band]], "width": 1.25 if band else 2.5}
        return line if is_done else {**line, "dash": "dot"}

    def _dimension(self, name: str) -> Chart:
        dimension = self.sweep.dimensions[name]
        is_log = isinstance(dimension, Range) and dimension.log
        axis: dict[str, Any] = {"title": name, "hoverformat": ".4~g", "exponentformat": "e"}
        if is_log:
            values = [float(row.parameters[name]) for row in self.rows]
            ticks = formats.log_ticks(min(values), max(values))
            axis |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
        elif not isinstance(dimension, Range):
            axis |= {"type": "category", "categoryorder": "array", "categoryarray": dimension}
        traces = self._of_each_kind(lambda row: row.parameters[name])
        unit = NOUNS[self.sweep.metric] + (", log scale" if is_log else "")
        return self._chart(f"over-{name.replace('_', '-')}", name, unit, traces, xaxis=axis)

    def _parallel(self) -> Chart:
        """A line per trial over all dimensions and the metric; the best ones last, on top."""
        names = [*self.sweep.dimensions, self.sweep.metric]
        scales = [Scale(self.sweep, name, self.rows) for name in names]
        traces = []
        for row in self._worst_first():
            values = [*(row.parameters[name] for name in self.sweep.dimensions), row.metric]
            heights = [scale.height(value) for scale, value in zip(scales, values, strict=True)]
            text = [hover_text(row, self.sweep.metric)] * len(names)
            style = {"mode": "lines+markers", "marker": {"size": 4}, "hoverinfo": "text"}
            points = {"x": [*range(len(names))], "y": heights, "text": text}
            traces.append(go.Scatter(**points, **style, line=self._line(row), showlegend=False))
        labels = [label for n, scale in enumerate(scales) for label in scale.labels(n)]
        upright = {"type": "line", "y0": 0, "y1": 1, "line": {"color": LIGHT["soft"], "width": 1}}
        shapes = [{**upright, "x0": n, "x1": n, "layer": "below"} for n in range(len(names))]
        ticks = {"tickvals": [*range(len(names))], "ticktext": names, "showline": False}
        x_axis = {**ticks, "range": [-0.35, len(names) - 0.65]}
        layout = {"xaxis": x_axis, "yaxis": {"visible": False, "range": [-0.08, 1.08]}}
        unit = "a line per trial: the best third of the finished ones bold, pruned ones dotted"
        figure = self._chart("parallel", "Parallel coordinates", unit, traces, **layout)
        figure.figure.update_layout(annotations=labels, shapes=shapes)
        return figure


class Scale:
    """Places values of a dimension, or of the metric, between 0 and 1."""

    def __init__(self, sweep: Sweep, name: str, rows: Sequence[Row]) -> None:
        dimension = sweep.dimensions.get(name)
        self.choices = dimension if isinstance(dimension, list) else None
        self.is_log = isinstance(dimension, Range) and dimension.log
        if isinstance(dimension, list):
            self.values: list[Any] = [*dimension]
        else:
            is_metric = dimension is None
            self.values = [row.metric if is_metric else row.parameters[name] for row in rows]
            self.low, self.high = map(self._scaled, (min(self.values), max(self.values)))

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.is_log else float(value)

    def height(self, value: Any) -> float:
        """From 0 to 1; choices at equal distances."""
        if self.choices is not None:
            return (self.choices.index(value) + 0.5) / len(self.choices)
        span = self.high - self.low
        return (self._scaled(value) - self.low) / span if span else 0.5

    def labels(self, x: int) -> list[dict[str, Any]]:
        """The choices, or the lowest and the highest value, at the left of the axis."""
        ends = dict.fromkeys((min(self.values), max(self.values)))
        values = self.choices if self.choices is not None else ends
        look = {"showarrow": False, "xanchor": "right", "xshift": -6, "bgcolor": LIGHT["paper"]}
        return [
            {"x": x, "y": self.height(value), "text": escape(_short(value)), **look}
            for value in values
        ]


def hover_text(row: Row, metric: str) -> str:
    """`trial-0003, done`, the metric and the parameters, a line each."""
    lines = [f"{row.folder}, {row.status}", f"{metric} {row.metric:.4f}"]
    lines += [f"{name} {_short(value)}" for name, value in row.parameters.items()]
    return "<br>".join(map(escape, lines))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(row: Row) -> int:
    return int(row.folder.rpartition("-")[2])
