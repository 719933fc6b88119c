"""The plotly figures of a page. This module alone imports plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from minimind.report.downsample import downsample, group_lines, group_means, pixel_columns, smooth
from minimind.report.formats import format_count, format_ms, format_number, format_percent
from minimind.report.records import MAX_EXPERTS, PAUSES, PHASES, number
from minimind.report.runs import Run
from minimind.report.summary import NOUNS, smoothed_loss, window_of

# Light and dark, after Okabe and Ito (2008), whose colors differ for every kind of color vision.
PALETTE = {
    **{"paper": ("#ffffff", "#14181d"), "ink": ("#1d2733", "#e4e8ec")},
    **{"soft": ("#5c6773", "#97a3af"), "rule": ("#dfe3e8", "#2c343d")},
    **{"bad": ("#c0392b", "#ff7b6b"), "good": ("#00795a", "#2fc99b")},
    **{"run0": ("#0072b2", "#56b4e9"), "run1": ("#d55e00", "#f08b43")},
    **{"run2": ("#009e73", "#2fc99b"), "run3": ("#b0578d", "#d98cba")},
    **{"run4": ("#b8860b", "#e6b422"), "run5": ("#3a9bd9", "#9ad0f5")},
    **{"run6": ("#6b5b95", "#b3a1e0"), "run7": ("#555555", "#b5b5b5")},
    **{"data": ("#e69f00", "#e6b422"), "forward": ("#7cc4ec", "#a5d8f5")},
    **{"backward": ("#2f7fb8", "#3f8fc8"), "optimizer": ("#1fa27c", "#1fa27c")},
    **{"evaluate": ("#cc79a7", "#cc79a7"), "checkpoint": ("#7b4fa0", "#b08fd4")},
    **{"sample": ("#999999", "#999999"), "trace": ("#cccccc", "#cccccc"), "gc": ("#8c6d46",) * 2},
}
COLORS, DASHES = 8, ("solid", "dash", "dot")  # of runs
MAX_POINTS = 4000  # pixel columns of all curves of a chart together
MAX_BARS, MAX_MARKS = 500, 200
NOISY = 300  # lines from which a noisy curve is drawn with its moving mean
CLEAR = "rgba(0,0,0,0)"
FAINT = {"width": 1, "opacity": 0.45}
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
    is_wide: bool = False


def color(name: str) -> str:
    """The light color; the page's script exchanges it for the dark one."""
    return PALETTE[name][0]


def run_style(n: int) -> tuple[str, str]:
    """Color name and dash of run `n`; 24 differ."""
    return f"run{n % COLORS}", DASHES[n // COLORS % len(DASHES)]


class Charts:
    """Draws runs over one x axis: steps, or tokens where runs differ in tokens per step."""

    def __init__(self, runs: Sequence[Run], grad_clips: Sequence[float], now: float) -> None:
        self.runs, self.grad_clips, self.now = runs, grad_clips, now
        self.is_single = len(runs) == 1
        sizes = {number(s.facts.get("tokens_per_step")) for r in runs for s in r.records.starts}
        self.axis = "tokens" if sum(math.isfinite(size) for size in sizes) > 1 else "step"
        self.columns = max(100, min(1000, MAX_POINTS // len(runs)))
        edges = [
            self.at(run, np.array([segment.column("begins")[0], segment.steps[-1]]))
            for run in runs
            for segment in run.segments
            if len(segment.steps)
        ]
        low, high = (float(np.min(edges)), float(np.max(edges))) if edges else (0.0, 1.0)
        self.span = (low, high if high > low else low + 1)

    def draw(self) -> list[Chart]:
        """The loss, and a chart for each figure that any run recorded."""
        runs = [*enumerate(self.runs)]
        charts = [self._loss()]
        charts += [self._phases(n, run) for n, run in runs if run.has("step_ms")]
        charts += [self._figure(name) for name in FIGURES if any(r.has(name) for r in self.runs)]
        charts += [self._experts(n, run) for n, run in runs if run.has("expert_most")]
        if self.is_single:
            for chart in charts:
                self._mark_starts(chart, self.runs[0])
        return charts

    def at(self, run: Run, steps: np.ndarray) -> np.ndarray:
        """Positions of steps of `run` on the x axis."""
        return run.tokens_at(steps) if self.axis == "tokens" else steps

    def _chart(self, key: str, title: str, unit: str, traces: list[Any], **more: Any) -> Chart:
        """`more`: is_wide, from_zero, may_be_log, form (of a value), yaxis (settings)."""
        lines = [np.asarray(t.y, float) for t in traces if t.type == "scatter" and t.yaxis != "y2"]
        stack = sum((np.asarray(t.y, float) for t in traces if t.type == "bar"), np.zeros(1))
        values = np.concatenate([*lines, stack if len(stack) > 1 else stack[:0]])
        values = values[np.isfinite(values)]
        y_axis: dict[str, Any] = {"rangemode": "tozero" if more.get("from_zero") else "normal"}
        if len(values):
            low, high, usual = values.min(), values.max(), np.quantile(values, 0.98)
            if more.get("may_be_log") and low > 1e-30 and high > 12 * low:
                y_axis, unit = {"type": "log", "dtick": "D2"}, f"{unit}, log scale"
            elif more.get("from_zero") and high > 4 * usual > 0:
                y_axis = {"range": [min(0.0, float(low)), 1.4 * float(usual)]}
                unit += f", cut off: up to {more.get('form', format_number)(float(high))}"
        axis = {"gridcolor": color("rule"), "zeroline": False, "exponentformat": "SI"}
        x_axis = {"range": self.span, "showgrid": False, "linecolor": color("soft")}
        x_axis |= {"title": {"text": self.axis, "standoff": 4}, "hoverformat": ",.0f"}
        x_axis |= {"unifiedhovertitle": {"text": f"{self.axis} %{{x}}"}}
        figure = go.Figure(traces)
        figure.update_layout(
            template=go.layout.Template(),
            barmode="stack",
            bargap=0,
            hovermode="x unified",
            hoverlabel={"bgcolor": color("paper"), "bordercolor": color("rule")},
            font={"color": color("soft"), "size": 12, "family": "system-ui, sans-serif"},
            modebar={"bgcolor": CLEAR, "color": color("soft"), "activecolor": color("ink")},
            margin={"l": 56, "r": 14, "t": 8, "b": 40},
            legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
            showlegend=sum(t.showlegend is not False for t in traces) > 1,
            paper_bgcolor=CLEAR,
            plot_bgcolor=CLEAR,
            xaxis=axis | x_axis,
            yaxis=axis | y_axis | more.get("yaxis", {}),
            yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            uirevision=key,
        )
        return Chart(key, title, unit, figure, more.get("is_wide", False))

    def _line(self, name: str, x: np.ndarray, y: np.ndarray, tone: str, **style: Any) -> Any:
        """A curve with a gap at each NaN, a point without neighbors as a dot."""
        kept = downsample(x, y, self.columns, self.span)
        x, y, known = x[kept], y[kept], np.isfinite(y[kept])
        is_alone = known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False]
        line = {"color": color(tone), **{k: style.pop(k) for k in ("width", "dash") if k in style}}
        dots = {"mode": "lines+markers", "marker": {"size": np.where(is_alone, 6, 0)}}
        style = {"mode": "lines", **(dots if is_alone.any() else {}), **style}
        return go.Scatter(name=escape(name, quote=False), x=x, y=y, line=line, **style)

    def _ticks(self, name: str, run: Run, steps: np.ndarray, tone: str) -> Any:
        """Strokes at the foot of a chart, at most one for each pixel column."""
        x = self.at(run, steps)
        x = x[np.unique(pixel_columns(x, self.columns, self.span), return_index=True)[1]]
        marker = {"symbol": "line-ns", "size": 11, "line": {"width": 1.5, "color": color(tone)}}
        style = {"mode": "markers", "yaxis": "y2", "hoverinfo": "skip", "marker": marker}
        return go.Scatter(name=name, x=x, y=np.full(len(x), 0.02), cliponaxis=False, **style)

    def _lost(self, run: Run, column: str, tone: str, factor: float = 1.0) -> list[Any]:
        style = {"width": 1, "dash": "dot", "showlegend": False, "hoverinfo": "skip"}
        return [
            self._line(
                "lost", self.at(run, s.steps[i]), factor * s.column(column)[i], tone, **style
            )
            for s, i in run.lost_lines()
        ]

    def _loss(self) -> Chart:
        traces: list[Any] = []
        for n, run in enumerate(self.runs):
            (tone, dash), x = run_style(n), self.at(run, run.column("step"))
            group = {} if self.is_single else {"legendgroup": f"run{n}"}
            name, mean = f"{run.name} loss", run.name
            if self.is_single:
                name, mean = "loss", f"mean of {format_count(window_of(len(x)), 'line')}"
            shown = {"showlegend": self.is_single, "dash": dash, **FAINT}
            traces += self._lost(run, "loss", tone)
            traces.append(self._line(name, x, run.column("loss"), tone, **shown, **group))
            traces.append(self._line(mean, x, smoothed_loss(run), tone, dash=dash, **group))
            traces += self._validation(run, tone, group)
            traces += self._ends(run, tone, group)
        events = {"checkpoint": "checkpoint_saved", "skipped step": "step_skipped"}
        for noun, event in events.items() if self.is_single else ():
            steps = np.array([number(e["step"]) for e in self.runs[0].events(event)])
            if len(steps):
                tone = "checkpoint" if noun == "checkpoint" else "bad"
                name = format_count(len(steps), noun)
                traces.append(self._ticks(name, self.runs[0], steps, tone))
        look: dict[str, Any] = {"may_be_log": True, "yaxis": {"hoverformat": ".4f"}}
        return self._chart("loss", "Loss", "nats per token", traces, is_wide=True, **look)

    def _validation(self, run: Run, tone: str, group: dict[str, str]) -> list[Any]:
        """Validation losses as joined points; lost ones faint."""
        name, tone = (f"{run.name} validation", tone) if group else ("validation", "run1")
        traces = []
        for is_lost in (True, False):
            events = run.events("eval", is_lost)
            x = self.at(run, np.array([number(e["step"]) for e in events]))
            y = np.array([number(e.get("val_loss")) for e in events])
            style: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 7}, "width": 1}
            if is_lost:
                style |= {"mode": "markers", "opacity": 0.4, "hoverinfo": "skip"}
            legend = {"showlegend": not is_lost and not group, **group}
            if events:
                shown = f"{name}, lost" if is_lost else name
                traces.append(self._line(shown, x, y, tone, **style, **legend))
        return traces

    def _ends(self, run: Run, tone: str, group: dict[str, str]) -> list[Any]:
        """Points where starts ended otherwise than done, with the reason on hover."""
        ends = []
        for segment, (kind, text) in zip(run.segments, run.outcomes(self.now), strict=True):
            loss = segment.column("loss")
            known = np.flatnonzero(np.isfinite(loss))
            if len(known) and kind in ("crashed", "failed", "stopped"):
                step = segment.steps[known[-1]]
                label = f"{run.name}, step {step:.0f}: {text}"
                symbol = "square" if kind == "stopped" else "x"
                ends.append((step, loss[known[-1]], escape(label, quote=False), symbol))
        if not ends:
            return []
        steps, losses, labels, symbols = zip(*ends[-MAX_MARKS:], strict=True)
        marker = {"symbol": symbols, "size": 9, "color": color(tone if group else "bad")}
        hover = {"text": labels, "hovertemplate": "%{text}<extra></extra>", "showlegend": False}
        place = {"x": self.at(run, np.array(steps)), "y": np.array(losses), "mode": "markers"}
        return [go.Scatter(name="ends", marker=marker, **place, **hover, **group)]

    def _phases(self, n: int, run: Run) -> Chart:
        """Seconds of a step by phase and pause; a bar spans the steps since the line before."""
        begins, ends = (self.at(run, run.column(name)) for name in ("begins", "step"))
        left, right, group = group_lines(begins, ends, max(60, min(MAX_BARS, self.columns)))
        taken = run.column("taken")
        traces: list[Any] = []
        for name in (*PHASES, *PAUSES):
            heights = group_means(run.column(f"{name}_ms") / 1e3, taken, group)
            if heights.any():
                bar = {"x": right, "width": right - left, "offset": left - right, "y": heights}
                look = {"color": color(name), "line": {"width": 0}}
                traces.append(go.Bar(name=NOUNS.get(name, name), marker=look, **bar))
        if run.has("comm_ms"):
            seconds = group_means(run.column("comm_ms") / 1e3, taken, group)
            style = {"width": 1.5, "dash": "dash"}
            traces.append(self._line("of which communication", right, seconds, "ink", **style))
        axis = {"tickformat": "~s", "hoverformat": ".3~s", "ticksuffix": "s"}
        look = {"from_zero": True, "is_wide": self.is_single, "yaxis": axis}
        look["form"] = lambda seconds: format_ms(1e3 * seconds)
        title = "Time of a step" if self.is_single else f"Time of a step: {run.name}"
        unit = "by phase; pauses between steps on top"
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
                y = smooth(y, window_of(len(y)))
                name = f"{name}, smoothed" if self.is_single else name
            traces.append(self._line(name, x, y, tone, dash=dash))
        if column == "grad_norm":
            traces += self._clipping()
        look = {"from_zero": from_zero, "may_be_log": not from_zero}
        return self._chart(column, title, unit, traces, yaxis={"hoverformat": hover}, **look)

    def _clipping(self) -> list[Any]:
        """The values of --grad_clip, and with one run the steps that were clipped."""
        style = {"width": 1.25, "dash": "dash", "hoverinfo": "skip"}
        traces = [
            self._line("--grad_clip", np.array(self.span), np.full(2, limit), "soft", **style)
            for limit in sorted({clip for clip in self.grad_clips if clip > 0})
        ]
        clipped = self.runs[0].column("is_clipped") > 0
        if self.is_single and clipped.any():
            name = f"clipped in {format_percent(float(clipped.mean()))} of the lines"
            steps = self.runs[0].column("step")[clipped]
            traces.append(self._ticks(name, self.runs[0], steps, "run1"))
        return traces

    def _experts(self, n: int, run: Run) -> Chart:
        names = {f"expert_{which}": f"{which} of any layer" for which in ("least", "most")}
        names |= {f"expert_{k}": f"expert {k}" for k in range(MAX_EXPERTS)}
        x = self.at(run, run.column("step"))
        traces = [
            self._line(name, x, run.column(key), f"run{key[-1]}" if key[-1].isdigit() else "soft")
            for key, name in names.items()
            if run.has(key)
        ]
        title = "Load of the experts" if self.is_single else f"Load of the experts: {run.name}"
        unit = "visits, as a multiple of an even share"
        return self._chart(f"experts{n or ''}", title, unit, traces, yaxis={"hoverformat": ".3f"})

    def _mark_starts(self, chart: Chart, run: Run) -> None:
        """Lost steps as bands; resumes and ends as upright lines, with labels in the loss chart."""
        shapes: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for segment in run.segments:
            if segment.lost_steps:
                lost = [max(segment.cutoff, segment.start.first_step), segment.start.last_step]
                x0, x1 = self.at(run, np.array(lost)).tolist()
                band = {"fillcolor": color("soft"), "opacity": 0.13, "line": {"width": 0}}
                shapes.append({"type": "rect", "x0": x0, "x1": x1, **band})
        last_x = -math.inf
        for x, kind, label in self.start_marks(run):
            is_bad = kind in ("crashed", "failed")
            tone, dash = color("bad" if is_bad else "soft"), "solid" if is_bad else "dash"
            line = {"color": tone, "width": 1, "dash": dash}
            shapes.append({"type": "line", "x0": x, "x1": x, "line": line})
            if chart.key == "loss" and x - last_x >= 0.025 * (self.span[1] - self.span[0]):
                last_x, text = x, escape(label, quote=False)
                place = {"xanchor": "right", "yanchor": "top", "yref": "paper", "y": 1}
                look = {"showarrow": False, "textangle": -90, "font": {"color": tone}}
                annotations.append({"x": x, "text": text, **place, **look})
        shapes = [{**one, "yref": "paper", "y0": 0, "y1": 1, "layer": "below"} for one in shapes]
        chart.figure.update_layout(shapes=shapes[-MAX_MARKS:], annotations=annotations)

    def start_marks(self, run: Run) -> list[tuple[float, str, str]]:
        """Position, kind and label of each resume and of each end other than done."""
        marks: list[tuple[float, str, str]] = []
        world = None
        for n, (segment, (kind, _)) in enumerate(
            zip(run.segments, run.outcomes(self.now), strict=True)
        ):
            start, size = segment.start, segment.start.facts.get("world_size")
            first, last = start.first_step, max(start.first_step, start.last_step)
            if n and math.isfinite(first) and not start.is_implied:
                verb = "resumed" if start.facts.get("resume_from") else "started anew"
                change = f", {world} → {size} processes" if world not in (None, size) else ""
                marks.append((first, "resume", f"{verb} at {first:,.0f}{change}"))
            world = start.facts.get("world_size", world)
            if kind in ("crashed", "failed", "stopped") and math.isfinite(last):
                word = f"failed ({(start.end or {}).get('code')})" if kind == "failed" else kind
                marks.append((last, kind, f"{word} at {last:,.0f}"))
        positions = self.at(run, np.array([step for step, _, _ in marks])).tolist()
        placed = [(x, kind, label) for x, (_, kind, label) in zip(positions, marks, strict=True)]
        return sorted(mark for mark in placed if self.span[0] <= mark[0] <= self.span[1])
