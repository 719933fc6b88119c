"""The plotly figures of a page. This module alone imports plotly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from minimind.report import formats
from minimind.report.figures import smooth, smoothed_loss, window_of
from minimind.report.formats import LIGHT, NOUNS, PAUSES, PHASES
from minimind.report.history import MAX_EXPERTS, Run
from minimind.report.placement import floors_of

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
# Events at the foot of the loss of a single run: noun, event, color.
STROKES = (
    *(("checkpoint", "checkpoint_saved", "checkpoint"), ("skipped step", "step_skipped", "bad")),
    *(("skipped spike", "spike_skipped", "bad"), ("spike", "spike", "bad")),
    ("corruption", "corruption", "bad"),
)
MAX_POINTS = 4000  # pixel columns of all curves of a chart together
MAX_BARS, MAX_MARKS = 500, 200
FEW = 30  # points up to which each is drawn as a dot
NOISY = 300  # lines from which a noisy curve is drawn with its moving mean
FAINT: dict[str, Any] = {"width": 1, "opacity": 0.45}
LOST: dict[str, Any] = {"showlegend": False, "hoverinfo": "skip", "opacity": 0.6}


@dataclass(frozen=True)
class Chart:
    """A figure with its heading; `key` is its id in the page."""

    key: str
    title: str
    unit: str
    figure: go.Figure


class Row(NamedTuple):
    """A chart of a column of the lines: how it is shown."""

    column: str
    title: str
    unit: str
    hover: str  # format
    from_zero: bool = True
    factor: float = 1.0
    is_noisy: bool = False  # a long curve has its moving mean


ROWS = (
    Row("tokens_per_second", "Throughput", "tokens/s, without pauses", ",.0f", is_noisy=True),
    Row("lr", "Learning rate", "", ".3~g"),
    Row("grad_norm", "Gradient norm", "before clipping", ".4~g", from_zero=False, is_noisy=True),
    Row("memory_mib", "Memory", "peak so far of one process, GiB", ".3f", factor=1 / 1024),
    Row("mfu", "MFU", "% of the stated peak", ".1f", factor=100.0, is_noisy=True),
)


class Axis(NamedTuple):
    """The x axis of all charts: steps, or tokens where runs differ in tokens per step."""

    name: str
    span: tuple[float, float]
    columns: int  # pixels of a curve

    def at(self, run: Run, steps: np.ndarray) -> np.ndarray:
        return run.tokens_at(steps) if self.name == "tokens" else steps

    def line(self, name: str, x: np.ndarray, y: np.ndarray, tone: str, **style: Any) -> Any:
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

    def level(self, name: str, y: float, tone: str, **style: Any) -> Any:
        """A line across the chart."""
        return self.line(name, np.array(self.span), np.full(2, y), tone, mode="lines", **style)

    def strokes(self, name: str, run: Run, steps: np.ndarray, tone: str) -> list[Any]:
        """Strokes at the foot of a chart, at most one for each pixel column; none without steps."""
        x = self.at(run, steps)
        x = x[np.unique(pixel_columns(x, self.columns, self.span), return_index=True)[1]]
        marker = {"symbol": "line-ns", "size": 11, "line": {"width": 1.5, "color": LIGHT[tone]}}
        style = {"mode": "markers", "yaxis": "y2", "hoverinfo": "skip", "marker": marker}
        foot = go.Scatter(name=name, x=x, y=np.full(len(x), 0.02), cliponaxis=False, **style)
        return [foot] if len(x) else []

    def lost(self, run: Run, column: str, tone: str, factor: float = 1.0) -> list[Any]:
        """What a crash undid, faint."""
        x, y = self.at(run, run.lines("step")), factor * run.lines(column)
        style = {"width": 1, "dash": "dot", **LOST}
        return [self.line("lost", x[i], y[i], tone, **style) for i in run.lost_lines()]

    def chart(
        self,
        key: str,
        title: str,
        unit: str,
        traces: list[Any],
        from_zero: bool = False,
        may_be_log: bool = False,
        form: Callable[[float], str] = formats.figure,
        **yaxis: Any,
    ) -> Chart:
        """`form` writes a value, `yaxis` has settings of plotly."""
        curves = [np.asarray(t.y, float) for t in traces if t.type != "bar" and t.yaxis != "y2"]
        bars = [np.asarray(t.y, float) for t in traces if t.type == "bar"]
        values = np.concatenate([*curves, sum(bars) if bars else [], []])
        values = values[np.isfinite(values)]
        y_axis, note = {"rangemode": "tozero" if from_zero else "normal"}, ""
        if len(values):
            low, high, usual = values.min(), values.max(), np.quantile(values, 0.98)
            if may_be_log and low > 1e-30 and high > 12 * low:
                ticks = formats.log_ticks(float(low), float(high))
                labels = [f"{tick:g}" for tick in ticks]
                y_axis, note = {"type": "log", "tickvals": ticks, "ticktext": labels}, "log scale"
            elif from_zero and high > 4 * usual > 0:
                y_axis = {"range": [min(0.0, float(low)), 1.4 * float(usual)]}
                note = f"cut off: up to {form(float(high))}"
        hover_title = {"text": f"{self.name} %{{x}}"}
        layout = {
            "xaxis": {"range": self.span, "title": self.name, "unifiedhovertitle": hover_title},
            "yaxis": y_axis | yaxis,
            "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            "showlegend": sum(trace.showlegend is not False for trace in traces) > 1,
        }
        unit = ", ".join(filter(None, (unit, note)))
        return Chart(key, title, unit, go.Figure(traces, {"template": TEMPLATE, **layout}))


def axis_of(runs: Sequence[Run]) -> Axis:
    """The axis that has all lines of the runs."""
    sizes = {s.facts.get("tokens_per_step") for run in runs for s in run.starts} - {None}
    axis = Axis("tokens" if len(sizes) > 1 else "step", (0, 1), 0)
    edges = [
        axis.at(run, np.r_[run.lines("begins")[start.first_line], start.last_step])
        for run in runs
        for start in run.starts
        if start.lines
    ]
    low, high = (float(np.min(edges)), float(np.max(edges))) if edges else (0.0, 1.0)
    span = (low, high if high > low else low + 1)
    return Axis(axis.name, span, max(100, min(1000, MAX_POINTS // len(runs))))


def draw(runs: Sequence[Run], grad_clips: Sequence[float], now: float) -> list[Chart]:
    """The loss, and a chart for each figure that any run recorded."""
    axis, is_single = axis_of(runs), len(runs) == 1
    numbered = [
        (f"{n or ''}", "" if is_single else f": {run.name}", run) for n, run in enumerate(runs)
    ]
    charts = [_loss(axis, runs)]
    charts += [_phases(axis, *one) for one in numbered if one[2].has("step_ms")]
    charts += [
        _column(axis, runs, row, grad_clips) for row in ROWS if any(r.has(row.column) for r in runs)
    ]
    for has_chance in (True, False):
        if any(_score_curves(run, has_chance) for run in runs):
            charts.append(_scores(axis, runs, has_chance))
    charts += [_experts(axis, *one) for one in numbered if one[2].has("expert_least")]
    if is_single:
        _mark_starts(axis, charts, runs[0], now)
    return charts


def run_style(n: int) -> tuple[str, str]:
    """Color name and dash of run `n`; 24 differ."""
    return f"run{n % 8}", DASHES[n // 8 % len(DASHES)]


def _loss(axis: Axis, runs: Sequence[Run]) -> Chart:
    traces: list[Any] = []
    is_single = len(runs) == 1
    for n, run in enumerate(runs):
        (tone, dash), x = run_style(n), axis.at(run, run.column("step"))
        window, prefix = window_of(len(x)), "" if is_single else f"{run.name} "
        mean = f"mean of {formats.count(window, 'line')}" if is_single else run.name
        group: dict[str, Any] = {} if is_single else {"legendgroup": f"run{n}"}
        traces += axis.lost(run, "loss", tone)
        if window > 1:
            faint = {"showlegend": is_single, "dash": dash, **FAINT, **group}
            traces.append(axis.line(f"{prefix}loss", x, run.column("loss"), tone, **faint))
        elif is_single:
            mean = "loss"
        traces.append(axis.line(mean, x, smoothed_loss(run), tone, dash=dash, **group))
        for column, (noun, own, style) in VALIDATIONS.items():
            look = {"showlegend": is_single, "dash": style, **group}
            traces += _validation(
                axis, run, column, prefix + noun, own if is_single else tone, look
            )
    if is_single:
        traces += _floors(axis, runs[0])
        for noun, event, tone in STROKES:
            steps = np.array(runs[0].steps_of(event), float)
            traces += axis.strokes(formats.count(len(steps), noun), runs[0], steps, tone)
    look = {"may_be_log": True, "hoverformat": ".4f"}
    return axis.chart("loss", "Loss", "nats per token", traces, **look)


def _validation(
    axis: Axis, run: Run, column: str, name: str, tone: str, look: dict[str, Any]
) -> Iterator[Any]:
    """Validation losses as joined points; lost ones faint and alone."""
    joined = {"mode": "lines+markers", "width": 1, "marker": {"size": 7}, **look}
    for is_lost, suffix, style in (
        (True, ", lost", {**joined, **LOST, "mode": "markers"}),
        (False, "", joined),
    ):
        events = [e for e in run.events("eval", is_lost) if column in e]
        x = axis.at(run, np.array([event["step"] for event in events], float))
        if events:
            yield axis.line(name + suffix, x, np.array([e[column] for e in events]), tone, **style)


def _floors(axis: Axis, run: Run) -> list[Any]:
    """What compressors and n-grams make of the held-out text, in the nats of its tokens."""
    for last in run.events("eval")[-1:]:
        if last["val_bpb"] > 0 and math.isfinite(last["val_loss"]):
            nats = last["val_loss"] / last["val_bpb"]  # of a bit
            return [
                axis.level(f"{name} of the held-out text", bits * nats, "soft", width=1, dash="dot")
                for name, bits in floors_of(run).items()
            ]
    return []


def _phases(axis: Axis, number: str, suffix: str, run: Run) -> Chart:
    """Seconds of a step by phase and pause; a bar spans the steps since the line before."""
    begins, ends = (axis.at(run, run.column(name)) for name in ("begins", "step"))
    left, right, group = group_lines(begins, ends, min(MAX_BARS, axis.columns))
    bar = {"x": right, "width": right - left, "offset": left - right, "hovertemplate": "%{y}"}
    means = {
        name: group_means(run.column(f"{name}_ms") / 1e3, run.column("taken"), group)
        for name in (*PHASES, *PAUSES, "comm")
    }
    traces: list[Any] = [
        go.Bar(name=noun, y=means[name], marker={"color": LIGHT[name], "line": {"width": 0}}, **bar)
        for name, noun in NOUNS.items()
        if means[name].any()
    ]
    if run.has("comm_ms"):
        style = {"width": 1.5, "dash": "dash"}
        traces.append(axis.line("communication", right, means["comm"], "ink", **style))
    unit = "by phase; pauses between steps on top, communication within"
    look: dict[str, Any] = {"tickformat": "~s", "hoverformat": ".3~s", "ticksuffix": "s"}
    look["form"] = lambda seconds: formats.milliseconds(1e3 * seconds)
    title = f"Time of a step{suffix}"
    return axis.chart(f"phases{number}", title, unit, traces, from_zero=True, **look)


def _column(axis: Axis, runs: Sequence[Run], row: Row, grad_clips: Sequence[float]) -> Chart:
    traces: list[Any] = []
    column, is_single = row.column, len(runs) == 1
    for n, run in enumerate(runs):
        (tone, dash), x = run_style(n), axis.at(run, run.column("step"))
        y, name = row.factor * run.column(column), row.title.lower() if is_single else run.name
        traces += axis.lost(run, column, tone, row.factor) if is_single else []
        if len(x) > NOISY and row.is_noisy:
            style = {"showlegend": False, "dash": dash, **FAINT}
            traces.append(axis.line(f"{name}, each line", x, y, tone, **style))
            y, name = smooth(y, window_of(len(y))), name + ", smoothed" * is_single
        traces.append(axis.line(name, x, y, tone, dash=dash))
    if column == "grad_norm":
        style = {"width": 1.25, "dash": "dash", "hoverinfo": "skip"}
        limits = sorted({clip for clip in grad_clips if clip > 0})
        traces += [axis.level("--grad_clip", limit, "soft", **style) for limit in limits]
        clipped = runs[0].column("is_clipped") > 0
        if is_single and clipped.any():
            name = f"clipped in {formats.percent(float(clipped.mean()))} of the lines"
            traces += axis.strokes(name, runs[0], runs[0].column("step")[clipped], "run1")
    look: dict[str, Any] = {
        "hoverformat": row.hover,
        "exponentformat": "e" if column == "lr" else "SI",
    }
    scale = {"from_zero": row.from_zero, "may_be_log": not row.from_zero}
    return axis.chart(column, row.title, row.unit, traces, **scale, **look)


def _score_curves(run: Run, has_chance: bool) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by task, of those with a chance and their average, or of the others."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in run.events("scores"):
        for name, value, chance, *_ in formats.score_values(event):
            if (chance is not None) == has_chance:
                curves.setdefault(name, []).append((event["step"], value))
    return curves


def _scores(axis: Axis, runs: Sequence[Run], has_chance: bool) -> Chart:
    """Tasks and their average; of several runs the averages, or the values of each task."""
    traces: list[Any] = []
    is_single = len(runs) == 1
    for n, run in enumerate(runs):
        curves = _score_curves(run, has_chance)
        if not is_single and has_chance:
            curves = {name: points for name, points in curves.items() if name == "average"}
        for k, (name, points) in enumerate(curves.items()):
            steps, values = np.array(points).T
            (tone, dash), label = run_style(k), name
            if not is_single:
                (tone, _), dash = run_style(n), DASHES[k % len(DASHES)]
                label = f"{run.name} {name}"
            style = {"width": 3, "dash": "solid"} if name == "average" else {"dash": dash}
            traces.append(axis.line(label, axis.at(run, steps), values, tone, **style))
    key, title, unit = "other_scores", "Other scores", ""
    if has_chance:
        key, title = "scores", "Scores"
        unit = "share of right answers; average: 0 by chance, 1 if all are right"
    return axis.chart(key, title, unit, traces, hoverformat=".4f")


def _experts(axis: Axis, number: str, suffix: str, run: Run) -> Chart:
    names = {f"expert_{which}": (f"{which} of any layer", "soft") for which in ("least", "most")}
    names |= {f"expert_{k}": (f"expert {k}", f"run{k}") for k in range(MAX_EXPERTS)}
    x = axis.at(run, run.column("step"))
    traces = [
        axis.line(name, x, run.column(key), tone, width=1)
        for key, (name, tone) in names.items()
        if run.has(key)
    ]
    title, unit = f"Load of the experts{suffix}", "visits, as a multiple of an even share"
    return axis.chart(f"experts{number}", title, unit, traces, hoverformat=".3f")


def _mark_starts(axis: Axis, charts: Sequence[Chart], run: Run, now: float) -> None:
    """Lost steps as bands; resumes and ends as upright lines, with labels in the loss chart."""
    shapes: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for start in run.starts:
        if start.lost_steps:
            lost = np.array([max(start.cutoff, start.first_step), start.last_step])
            edges = dict(zip(("x0", "x1"), axis.at(run, lost).tolist(), strict=True))
            band = {"fillcolor": LIGHT["soft"], "opacity": 0.13, "line": {"width": 0}}
            shapes.append({"type": "rect", **edges, **band})
    low, high = axis.span
    for step, kind, label in sorted(run.marks(now), key=lambda mark: mark[0]):
        x, text = float(axis.at(run, np.array(step))), escape(label, quote=False)
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


def downsample(x: np.ndarray, y: np.ndarray, columns: int, span: tuple[float, float]) -> np.ndarray:
    """Ascending indices of the points that draw the same curve in `columns` pixel columns.

    A column keeps its first, least, largest and last point (M4: Jugel et al. 2014), and a gap one
    NaN. `x` must not decrease.
    """
    if len(x) <= 4 * columns:
        return np.arange(len(x))
    known = np.flatnonzero(np.isfinite(y))
    gaps = np.flatnonzero(~np.isfinite(y) & np.r_[True, np.isfinite(y[:-1])])
    gaps = gaps[:: max(1, -(-len(gaps) // columns))]
    column = pixel_columns(x[known], columns, span)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.flatnonzero(np.diff(column, append=columns))
    group, heights = np.repeat(np.arange(len(first)), last + 1 - first), y[known]
    kept = [first, last]
    for extreme in (np.minimum, np.maximum) if len(first) else ():
        at = np.flatnonzero(heights == extreme.reduceat(heights, first)[group])
        kept.append(at[np.diff(group[at], prepend=-1) > 0])
    return np.union1d(known[np.concatenate(kept)], gaps)


def group_lines(
    begins: np.ndarray, ends: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Begin and end of at most `columns` groups of about equal length, and the group of a line."""
    if len(begins) <= columns:
        return begins, ends, np.arange(len(begins))
    column = pixel_columns(ends, columns, (float(begins[0]), float(ends[-1])))
    is_first, is_last = np.diff(column, prepend=-1) != 0, np.diff(column, append=columns) != 0
    return begins[is_first], ends[is_last], np.cumsum(is_first) - 1


def group_means(values: np.ndarray, weights: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Weighted mean of each group; 0 where no value is known."""
    weights = np.where(np.isfinite(values), weights, 0.0)
    size = int(group[-1]) + 1 if len(group) else 0
    total = np.bincount(group, np.nan_to_num(values) * weights, size)
    weight = np.bincount(group, weights, size)
    return np.divide(total, weight, out=np.zeros(size), where=weight > 0)


def pixel_columns(x: np.ndarray, columns: int, span: tuple[float, float]) -> np.ndarray:
    """The column of each x, from 0 to `columns` - 1."""
    scaled = (x - span[0]) / ((span[1] - span[0]) or 1.0) * columns
    return np.clip(scaled, 0, columns - 1).astype(np.int64)
