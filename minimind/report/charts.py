"""The plotly figures of a page. This module alone imports plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from minimind.report import formats
from minimind.report.formats import LIGHT
from minimind.report.history import MAX_EXPERTS, PAUSES, PHASES, Run, number
from minimind.report.placement import floors_of
from minimind.report.summary import (
    NOUNS,
    downsample,
    group_lines,
    group_means,
    pixel_columns,
    smooth,
    smoothed_loss,
    window_of,
)

AXIS = {"gridcolor": LIGHT["rule"], "zeroline": False, "exponentformat": "SI"}
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
TEMPLATE = go.layout.Template(
    layout={
        **{"barmode": "stack", "bargap": 0, "hovermode": "x unified", "legend": LEGEND},
        # Not transparent: plotly draws what it puts around the line at the pointer in this color.
        **{"paper_bgcolor": LIGHT["paper"], "plot_bgcolor": LIGHT["paper"]},
        "font": {"color": LIGHT["soft"], "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {
            **{"bgcolor": LIGHT["paper"], "bordercolor": LIGHT["rule"], "namelength": -1},
            "font": {"color": LIGHT["ink"]},  # otherwise that of the border
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": LIGHT["soft"]},
        "margin": {"l": 56, "r": 14, "t": 8, "b": 40},
        "xaxis": {
            **{**AXIS, "showgrid": False, "showline": True, "linecolor": LIGHT["soft"]},
            **{"hoverformat": ",.0f", "title": {"standoff": 4}},
            **{"spikecolor": LIGHT["soft"], "spikethickness": 1, "spikedash": "solid"},
        },
        "yaxis": AXIS,
    }
)
DASHES = ("solid", "dash", "dot")
# Column of an eval event: name, color of a single run, dash.
VALIDATIONS = {
    "val_loss": ("validation", "run1", "solid"),
    "ema_val_loss": ("validation of the average", "run2", "dot"),
}
MAX_POINTS = 4000  # pixel columns of all curves of a chart together
MAX_BARS, MAX_MARKS = 500, 200
FEW = 30  # points up to which each is drawn as a dot
NOISY = 300  # lines from which a noisy curve is drawn with its moving mean
FAINT: dict[str, Any] = {"width": 1, "opacity": 0.45}
LOST: dict[str, Any] = {"showlegend": False, "hoverinfo": "skip", "opacity": 0.6}
# Title, unit, format on hover, whether the axis begins at zero, factor.
FIGURES = {
    "tokens_per_second": ("Throughput", "tokens/s, without pauses", ",.0f", True, 1.0),
    "lr": ("Learning rate", "", ".3~g", True, 1.0),
    "grad_norm": ("Gradient norm", "before clipping", ".4~g", False, 1.0),
    "memory_mib": ("Memory", "peak so far of one process, GiB", ".3f", True, 1 / 1024),
    "mfu": ("MFU", "% of the stated peak", ".1f", True, 100.0),
}


@dataclass(frozen=True)
class Chart:
    """A figure with its heading; `key` is its id in the page."""

    key: str
    title: str
    unit: str
    figure: go.Figure


def run_style(n: int) -> tuple[str, str]:
    """Color name and dash of run `n`; 24 differ."""
    return f"run{n % 8}", DASHES[n // 8 % len(DASHES)]


class Charts:
    """Draws runs over one x axis: steps, or tokens where runs differ in tokens per step."""

    def __init__(self, runs: Sequence[Run], grad_clips: Sequence[float], now: float) -> None:
        self.runs, self.grad_clips, self.now = runs, grad_clips, now
        self.is_single, self.columns = len(runs) == 1, max(100, min(1000, MAX_POINTS // len(runs)))
        sizes = {number(s.facts.get("tokens_per_step")) for run in runs for s in run.starts}
        self.axis = "tokens" if sum(math.isfinite(size) for size in sizes) > 1 else "step"
        edges = [
            self.at(run, np.array([start.column("begins")[0], start.last_step]))
            for run in runs
            for start in run.starts
            if start.last_step > -math.inf
        ]
        low, high = (float(np.min(edges)), float(np.max(edges))) if edges else (0.0, 1.0)
        self.span = (low, high if high > low else low + 1)

    def draw(self) -> list[Chart]:
        """The loss, and a chart for each figure that any run recorded."""
        runs = [*enumerate(self.runs)]
        charts = [self._loss()]
        charts += [self._phases(n, run) for n, run in runs if run.has("step_ms")]
        charts += [self._figure(name) for name in FIGURES if any(r.has(name) for r in self.runs)]
        for has_chance in (True, False):
            if any(self._score_curves(run, has_chance) for run in self.runs):
                charts.append(self._scores(has_chance))
        charts += [self._experts(n, run) for n, run in runs if run.has("expert_most")]
        if self.is_single:
            self._mark_starts(charts, self.runs[0])
        return charts

    def at(self, run: Run, steps: np.ndarray) -> np.ndarray:
        """Positions of steps of `run` on the x axis."""
        return run.tokens_at(steps) if self.axis == "tokens" else steps

    def _chart(self, key: str, title: str, unit: str, traces: list[Any], **more: Any) -> Chart:
        """`more`: from_zero, may_be_log, form (of a value), yaxis (settings)."""
        curves = [np.asarray(t.y, float) for t in traces if t.type != "bar" and t.yaxis != "y2"]
        bars = [np.asarray(t.y, float) for t in traces if t.type == "bar"]
        values = np.concatenate([*curves, sum(bars) if bars else [], []])
        values = values[np.isfinite(values)]
        y_axis: dict[str, Any] = {"rangemode": "tozero" if more.get("from_zero") else "normal"}
        note = ""
        if len(values):
            low, high, usual = values.min(), values.max(), np.quantile(values, 0.98)
            if more.get("may_be_log") and low > 1e-30 and high > 12 * low:
                ticks = formats.log_ticks(float(low), float(high))
                labels = [f"{tick:g}" for tick in ticks]
                y_axis, note = {"type": "log", "tickvals": ticks, "ticktext": labels}, "log scale"
            elif more.get("from_zero") and high > 4 * usual > 0:
                y_axis = {"range": [min(0.0, float(low)), 1.4 * float(usual)]}
                note = f"cut off: up to {more.get('form', formats.figure)(float(high))}"
        hover_title = {"text": f"{self.axis} %{{x}}"}
        layout = {
            "xaxis": {"range": self.span, "title": self.axis, "unifiedhovertitle": hover_title},
            "yaxis": y_axis | more.get("yaxis", {}),
            "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            "showlegend": sum(trace.showlegend is not False for trace in traces) > 1,
        }
        unit = ", ".join(filter(None, (unit, note)))
        return Chart(key, title, unit, go.Figure(traces, {"template": TEMPLATE, **layout}))

    def _line(self, name: str, x: np.ndarray, y: np.ndarray, tone: str, **style: Any) -> Any:
        """A curve with a gap at each NaN; few points, or one without neighbors, also as dots."""
        kept = downsample(x, y, self.columns, self.span)
        x, y, known = x[kept], y[kept], np.isfinite(y[kept])
        is_dot = known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False]
        is_dot |= known & (known.sum() <= FEW)
        line = {"color": LIGHT[tone], **{k: style.pop(k) for k in ("width", "dash") if k in style}}
        dots = {"mode": "lines+markers", "marker": {"size": np.where(is_dot, 6, 0)}}
        dots["cliponaxis"] = False  # the last point is at the edge
        style = {"mode": "lines", **(dots if is_dot.any() else {}), **style}
        return go.Scatter(name=escape(name, quote=False), x=x, y=y, line=line, **style)

    def _ticks(self, name: str, run: Run, steps: np.ndarray, tone: str) -> list[Any]:
        """Strokes at the foot of a chart, at most one for each pixel column; none without steps."""
        x = self.at(run, steps)
        x = x[np.unique(pixel_columns(x, self.columns, self.span), return_index=True)[1]]
        marker = {"symbol": "line-ns", "size": 11, "line": {"width": 1.5, "color": LIGHT[tone]}}
        style = {"mode": "markers", "yaxis": "y2", "hoverinfo": "skip", "marker": marker}
        foot = go.Scatter(name=name, x=x, y=np.full(len(x), 0.02), cliponaxis=False, **style)
        return [foot] if len(x) else []

    def _lost(self, run: Run, column: str, tone: str, factor: float = 1.0) -> list[Any]:
        lost = [
            (self.at(run, start.column("step")[i]), factor * start.column(column)[i])
            for start, i in run.lost_lines()
        ]
        return [self._line("lost", x, y, tone, width=1, dash="dot", **LOST) for x, y in lost]

    def _loss(self) -> Chart:
        traces: list[Any] = []
        for n, run in enumerate(self.runs):
            (tone, dash), x = run_style(n), self.at(run, run.column("step"))
            names = (f"{run.name} loss", run.name, f"{run.name} ")
            group: dict[str, Any] = {"legendgroup": f"run{n}"}
            if self.is_single:
                mean = f"mean of {formats.count(window_of(len(x)), 'line')}"
                names, group = ("loss", mean, ""), {}
            faint = {"showlegend": self.is_single, "dash": dash, **FAINT, **group}
            traces += self._lost(run, "loss", tone)
            if window_of(len(x)) > 1:
                traces.append(self._line(names[0], x, run.column("loss"), tone, **faint))
            else:
                names = (names[0], "loss" if self.is_single else run.name, names[2])
            traces.append(self._line(names[1], x, smoothed_loss(run), tone, dash=dash, **group))
            for column, (noun, own_tone, style) in VALIDATIONS.items():
                look = {"dash": style, **group}
                shown_tone = own_tone if self.is_single else tone
                traces += self._validation(run, column, names[2] + noun, shown_tone, look)
        traces += self._floors(self.runs[0]) if self.is_single else []
        events = {
            **{"checkpoint": "checkpoint_saved", "skipped step": "step_skipped"},
            **{"skipped spike": "spike_skipped", "spike": "spike"},
            "corruption": "corruption",
        }
        for noun, event in events.items() if self.is_single else ():
            tone = "checkpoint" if noun == "checkpoint" else "bad"
            steps = np.array(self.runs[0].steps_of(event))
            traces += self._ticks(formats.count(len(steps), noun), self.runs[0], steps, tone)
        look: dict[str, Any] = {"may_be_log": True, "yaxis": {"hoverformat": ".4f"}}
        return self._chart("loss", "Loss", "nats per token", traces, **look)

    def _validation(
        self, run: Run, column: str, name: str, tone: str, look: dict[str, Any]
    ) -> list[Any]:
        """Validation losses as joined points; lost ones faint and alone."""
        traces = []
        style: dict[str, Any] = {"mode": "lines+markers", "showlegend": self.is_single, **look}
        for is_lost in (True, False):
            events = [e for e in run.events("eval", is_lost) if column in e]
            x = self.at(run, np.array([number(e["step"]) for e in events]))
            y = np.array([number(e[column]) for e in events])
            look = {**style, **LOST, "mode": "markers"} if is_lost else style
            shown = f"{name}, lost" if is_lost else name
            marker = {"size": 7}
            if events:
                traces.append(self._line(shown, x, y, tone, marker=marker, width=1, **look))
        return traces

    def _floors(self, run: Run) -> list[Any]:
        """What compressors and n-grams make of the held-out text, in the nats of its tokens."""
        evals = run.events("eval")
        loss, bits = (
            number(evals[-1].get(n)) if evals else math.nan for n in ("val_loss", "val_bpb")
        )
        if not bits > 0 or not math.isfinite(loss):
            return []
        style = {"width": 1, "dash": "dot", "mode": "lines"}
        x = np.array(self.span)
        return [
            self._line(
                f"{name} of the held-out text", x, np.full(2, floor * loss / bits), "soft", **style
            )
            for name, floor in floors_of(run).items()
        ]

    def _phases(self, n: int, run: Run) -> Chart:
        """Seconds of a step by phase and pause; a bar spans the steps since the line before."""
        begins, ends = (self.at(run, run.column(name)) for name in ("begins", "step"))
        left, right, group = group_lines(begins, ends, min(MAX_BARS, self.columns))
        bar = {"x": right, "width": right - left, "offset": left - right}
        means = {
            name: group_means(run.column(f"{name}_ms") / 1e3, run.column("taken"), group)
            for name in (*PHASES, *PAUSES, "comm")
        }
        traces: list[Any] = [
            go.Bar(
                **{"name": NOUNS.get(name, name), "y": means[name], "hovertemplate": "%{y}"},
                **{"marker": {"color": LIGHT[name], "line": {"width": 0}}, **bar},
            )
            for name in (*PHASES, *PAUSES)
            if means[name].any()
        ]
        if run.has("comm_ms"):
            style = {"width": 1.5, "dash": "dash"}
            traces.append(self._line("communication", right, means["comm"], "ink", **style))
        title = "Time of a step" if self.is_single else f"Time of a step: {run.name}"
        unit = "by phase; pauses between steps on top, communication within"
        y_axis = {"tickformat": "~s", "hoverformat": ".3~s", "ticksuffix": "s"}
        look: dict[str, Any] = {"from_zero": True, "yaxis": y_axis}
        look["form"] = lambda seconds: formats.milliseconds(1e3 * seconds)
        return self._chart(f"phases{n or ''}", title, unit, traces, **look)

    def _figure(self, column: str) -> Chart:
        title, unit, hover, from_zero, factor = FIGURES[column]
        traces: list[Any] = []
        for n, run in enumerate(self.runs):
            (tone, dash), x = run_style(n), self.at(run, run.column("step"))
            y, name = factor * run.column(column), title.lower() if self.is_single else run.name
            traces += self._lost(run, column, tone, factor) if self.is_single else []
            if len(x) > NOISY and column in ("grad_norm", "tokens_per_second", "mfu"):
                style = {"showlegend": False, "dash": dash, **FAINT}
                traces.append(self._line(f"{name}, each line", x, y, tone, **style))
                y, name = smooth(y, window_of(len(y))), name + ", smoothed" * self.is_single
            traces.append(self._line(name, x, y, tone, dash=dash))
        if column == "grad_norm":
            style = {"width": 1.25, "dash": "dash", "hoverinfo": "skip", "mode": "lines"}
            for limit in sorted({clip for clip in self.grad_clips if clip > 0}):
                x, y = np.array(self.span), np.full(2, limit)
                traces.append(self._line("--grad_clip", x, y, "soft", **style))
            clipped = self.runs[0].column("is_clipped") > 0
            if self.is_single and clipped.any():
                name = f"clipped in {formats.percent(float(clipped.mean()))} of the lines"
                steps = self.runs[0].column("step")[clipped]
                traces += self._ticks(name, self.runs[0], steps, "run1")
        look = {"from_zero": from_zero, "may_be_log": not from_zero}
        y_axis = {"hoverformat": hover, "exponentformat": "e" if column == "lr" else "SI"}
        return self._chart(column, title, unit, traces, yaxis=y_axis, **look)

    def _score_curves(self, run: Run, has_chance: bool) -> dict[str, list[tuple[float, float]]]:
        """Steps and values by task, of those with a chance and their average, or of the others."""
        curves: dict[str, list[tuple[float, float]]] = {}
        for event in run.events("scores"):
            for name, value, chance, *_ in formats.score_values(event):
                if (chance is not None) == has_chance:
                    curves.setdefault(name, []).append((number(event["step"]), value))
        return curves

    def _scores(self, has_chance: bool) -> Chart:
        """Tasks and their average; of several runs the averages, or the values of each task."""
        traces: list[Any] = []
        for n, run in enumerate(self.runs):
            curves = self._score_curves(run, has_chance)
            if not self.is_single and has_chance:
                curves = {name: points for name, points in curves.items() if name == "average"}
            for k, (name, points) in enumerate(curves.items()):
                steps, values = np.array(points).T
                (tone, dash), label = run_style(k), name
                if not self.is_single:
                    (tone, _), dash = run_style(n), DASHES[k % len(DASHES)]
                    label = f"{run.name} {name}"
                style = {"width": 3, "dash": "solid"} if name == "average" else {"dash": dash}
                traces.append(self._line(label, self.at(run, steps), values, tone, **style))
        y_axis = {"hoverformat": ".4f"}
        if has_chance:
            unit = "share of right answers; average: 0 by chance, 1 if all are right"
            return self._chart("scores", "Scores", unit, traces, yaxis=y_axis)
        return self._chart("other_scores", "Other scores", "", traces, yaxis=y_axis)

    def _experts(self, n: int, run: Run) -> Chart:
        names = {f"expert_{which}": f"{which} of any layer" for which in ("least", "most")}
        names |= {f"expert_{k}": f"expert {k}" for k in range(MAX_EXPERTS)}
        x = self.at(run, run.column("step"))
        tones = {key: f"run{key[-1]}" if key[-1].isdigit() else "soft" for key in names}
        traces = [
            self._line(name, x, run.column(key), tones[key], width=1)
            for key, name in names.items()
            if run.has(key)
        ]
        title = "Load of the experts" if self.is_single else f"Load of the experts: {run.name}"
        unit = "visits, as a multiple of an even share"
        return self._chart(f"experts{n or ''}", title, unit, traces, yaxis={"hoverformat": ".3f"})

    def _mark_starts(self, charts: Sequence[Chart], run: Run) -> None:
        """Lost steps as bands; resumes and ends as upright lines, with labels in the loss chart."""
        shapes: list[dict[str, Any]] = []
        labels: list[dict[str, Any]] = []
        for start in run.starts:
            if start.lost_steps:
                lost = np.array([max(start.cutoff, start.first_step), start.last_step])
                edges = dict(zip(("x0", "x1"), self.at(run, lost).tolist(), strict=True))
                band = {"fillcolor": LIGHT["soft"], "opacity": 0.13, "line": {"width": 0}}
                shapes.append({"type": "rect", **edges, **band})
        low, high = self.span
        for step, kind, label in sorted(run.marks(self.now), key=lambda mark: mark[0]):
            x, text = float(self.at(run, np.array(step))), escape(label, quote=False)
            if not low <= x <= high:
                continue
            is_bad = kind in ("crashed", "failed")
            tone, dash = LIGHT["bad" if is_bad else "soft"], "solid" if is_bad else "dash"
            line = {"color": tone, "width": 1, "dash": dash}
            shapes.append({"type": "line", "x0": x, "x1": x, "line": line})
            if not labels or x - labels[-1]["x"] > 0.025 * (high - low):
                position = {"x": x, "y": 1, "yref": "paper", "xanchor": "right", "yanchor": "top"}
                look = {"showarrow": False, "textangle": -90, "font": {"color": tone}}
                labels.append({"text": text, **position, **look})
            elif x == labels[-1]["x"] and len(labels[-1]["text"]) < 30:
                labels[-1]["text"] += f", {text}"
        shapes = [{**one, "yref": "paper", "y0": 0, "y1": 1, "layer": "below"} for one in shapes]
        for chart in charts:
            chart.figure.update_layout(shapes=shapes[-MAX_MARKS:])
        charts[0].figure.update_layout(annotations=labels)
