"""The figures of a page as plotly.js reads them: dicts of `data` (its traces) and `layout`.

Its classes in Python would check each property, which takes longer than all else of a page;
tests/report has them check one of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from html import escape, unescape
from typing import Any, NamedTuple

import numpy as np

from minimind.report import formats
from minimind.report.axes import UNITS, kept_knots, lost_knots, lost_seconds
from minimind.report.figures import nats_of_a_bit, other_text, smooth, smoothed_loss, window_of
from minimind.report.formats import FLOORS, LIGHT, NOUNS, PAUSES, PHASES
from minimind.report.history import MAX_EXPERTS, Run
from minimind.report.placement import floors_of

AXIS = {"gridcolor": LIGHT["rule"], "zeroline": False, "exponentformat": "SI"}
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
TEMPLATE: dict[str, Any] = {
    "layout": {
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
}
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
BITS = "bits per byte"
DENSE, MOST_TOLD = 12, 8  # rows of a curve in a table of values; curves that are described


@dataclass(frozen=True)
class Chart:
    """A figure with its heading; `key` is its id in the page.

    By `meta`, which is also that of the figure, `templates/page.js` applies the controls of a page
    to charts of `draw`; it is empty in others. It has the `unit`, a `note` on the y axis, and the
    `base` (the unit of x). That of the first chart also has what holds for all: `axes` (`Knots`),
    `spans` and `marks` by unit, `has_bits` (whether bits per byte are known), `is_bits` (whether
    the loss is first shown in them). A trace's has `axis` (its knots; 0), `role` (`curve`, `raw`:
    may be smoothed, `mean`: of a raw one, `lost`, `level`, `strokes`), `nats` (of a bit per byte)
    or `bits` (the values in them), `means` (of a thinned raw one) and `label` (at its end).
    """

    key: str
    title: str
    unit: str
    figure: dict[str, Any]
    meta: dict[str, Any] = field(default_factory=dict)
    form: Callable[[float], str] = formats.figure  # writes a value

    def _traces(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        traces = self.figure["data"] if self.meta else ()
        return [(trace, trace["meta"]) for trace in traces]

    def curves(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Name, and x and y of the known points, of each curve and bar, in all units of y."""
        found: list[tuple[str, np.ndarray, np.ndarray]] = []
        for trace, meta in self._traces():
            if meta.get("role") in ("curve", "raw", "mean", None):
                x, y = trace["x"], trace["y"]
                found.append((name := unescape(trace["name"]), x, y))
                if "bits" in meta:
                    found.append((f"{name}, {BITS}", x, meta["bits"]))
                elif "nats" in meta:
                    found.append((f"{name}, {BITS}", x, y / meta["nats"]))
        known = [(name, x, y, np.isfinite(y)) for name, x, y in found]
        return [(name, x[is_known], y[is_known]) for name, x, y, is_known in known if any(is_known)]

    def description(self) -> str:
        """What the chart shows, for those who do not see it."""
        parts, curves = [f"{self.title}, {self.unit}".removesuffix(", ")], self.curves()
        for name, x, y in curves[:MOST_TOLD]:
            first, last, least = map(self.form, (y[0], y[-1], y.min()))
            at = f"{self.meta['base']} {x[y.argmin()]:,.0f}"
            parts.append(f"{name}: first {first}, last {last}, least {least} at {at}")
        more = len(curves) - MOST_TOLD
        return "; ".join([*parts, *([f"and {formats.count(more, 'curve')}"] if more > 0 else [])])

    def values(self) -> tuple[list[str], list[list[str]], str]:
        """Head and rows of a table, and what is drawn besides; no rows without curves.

        A dense curve has a row at `DENSE` of its points, at the same ones as others where it can;
        of other curves all points.
        """
        curves = self.curves()
        dense = [x for _, x, _ in curves if len(x) > DENSE]
        common = reduce(np.intersect1d, dense) if dense else np.empty(0)
        rows: set[float] = set()
        for _, x, _ in curves:
            some = common if len(x) > DENSE <= len(common) else x
            picked = np.linspace(0, len(some) - 1, min(DENSE, len(some))).round().astype(int)
            rows.update(some[picked].tolist())
        at = [dict(zip(x.tolist(), y.tolist(), strict=True)) for _, x, y in curves]
        cells = [
            [f"{x:,.0f}", *(self.form(one[x]) if x in one else "" for one in at)]
            for x in sorted(rows)
        ]
        return [self.meta.get("base", ""), *(name for name, *_ in curves)], cells, self._beside()

    def _beside(self) -> str:
        """`zlib of the held-out text 3.2104; 2 checkpoints: 10, 20`."""
        parts: list[str] = []
        for trace, meta in self._traces():
            name, role = unescape(trace["name"]), meta.get("role")
            if role == "level":
                parts.append(f"{name} {self.form(float(trace['y'][0]))}")
            elif role == "strokes":
                x = trace["x"]
                steps, more = [f"{step:,.0f}" for step in x[:DENSE]], len(x) - DENSE
                parts.append(f"{name}: {', '.join([*steps, *([f'{more} more'] * (more > 0))])}")
        return "; ".join(parts)


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
# Charts of several columns each, of a key, title and unit: column, name, dash.
USAGE = {
    ("utilisation", "Utilisation", "%"): (
        *(("cpu_percent", "CPU", "solid"), ("gpu_percent", "GPU", "dash")),
    ),
    ("used_memory", "Memory in use", "GiB"): (
        *(("host_memory_gib", "host", "solid"), ("gpu_memory_gib", "GPU", "dash")),
    ),
}


class Axis(NamedTuple):
    """The x axis of all charts: steps, or tokens where runs differ in tokens per step."""

    name: str
    span: tuple[float, float]
    columns: int  # pixels of a curve

    def at(self, run: Run, steps: np.ndarray) -> np.ndarray:
        return run.tokens_at(steps) if self.name == "tokens" else steps

    def line(self, name: str, x: np.ndarray, y: np.ndarray, tone: str, **style: Any) -> Any:
        """A curve with a gap at each NaN; few points, or one without neighbors, also as dots.

        `meta` is that of `Chart`, with `bits` at each of x.
        """
        kept = downsample(x, y, self.columns, self.span)
        meta = {"role": "curve", **style.pop("meta", {})}
        if "bits" in meta:
            meta["bits"] = meta["bits"][kept]
        if meta["role"] == "raw" and len(kept) < len(x):
            ends, means = column_means(x, y, self.columns, self.span)
            meta["means"] = {"x": ends, "y": means}
        x, y, known = x[kept], y[kept], np.isfinite(y[kept])
        is_dot = known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False]
        is_dot |= known & (known.sum() <= FEW)
        line = {"color": LIGHT[tone], **{k: style.pop(k) for k in ("width", "dash") if k in style}}
        dots = {"mode": "lines+markers", "marker": {"size": np.where(is_dot, 6, 0).astype(np.int8)}}
        dots["cliponaxis"] = False  # the last point is at the edge
        style = {"mode": "lines", **(dots if is_dot.any() else {}), **style}
        look = {"name": escape(name, quote=False), "line": line, "meta": meta, **style}
        return {"type": "scatter", "x": x, "y": y, **look}

    def level(self, name: str, y: float, tone: str, **style: Any) -> Any:
        """A line across the chart."""
        style["meta"] = {"role": "level", **style.get("meta", {})}
        return self.line(name, np.array(self.span), np.full(2, y), tone, mode="lines", **style)

    def strokes(self, name: str, run: Run, steps: np.ndarray, tone: str) -> list[Any]:
        """Strokes at the foot of a chart, at most one for each pixel column; none without steps."""
        x = self.at(run, steps)
        x = x[np.unique(pixel_columns(x, self.columns, self.span), return_index=True)[1]]
        marker = {"symbol": "line-ns", "size": 11, "line": {"width": 1.5, "color": LIGHT[tone]}}
        style = {"mode": "markers", "yaxis": "y2", "hoverinfo": "skip", "marker": marker}
        style["meta"] = {"role": "strokes"}
        foot = {"type": "scatter", "name": name, "x": x, "y": np.full(len(x), 0.02), **style}
        return [{**foot, "cliponaxis": False}] if len(x) else []

    def lost(
        self, run: Run, column: str, tone: str, factor: float = 1.0, first: int = 1, **meta: Any
    ) -> list[Any]:
        """What a crash undid, faint; `first`: the knots of the first of them."""
        x, y = self.at(run, run.lines("step")), factor * run.lines(column)
        style = {"width": 1, "dash": "dot", **LOST}
        meta = {**meta, "role": "lost"}
        return [
            self.line("lost", x[i], y[i], tone, meta={**meta, "axis": n}, **style)
            for n, i in enumerate(run.lost_lines(), first)
        ]

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
        bars = [trace["y"] for trace in traces if trace["type"] == "bar"]
        curves = [t["y"] for t in traces if t["type"] != "bar" and t.get("yaxis") != "y2"]
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
        x_axis = {"range": self.span, "title": {"text": self.name}}
        layout: dict[str, Any] = {
            "template": TEMPLATE,
            "xaxis": {**x_axis, "unifiedhovertitle": hover_title},
            "yaxis": y_axis | yaxis,
            "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            "showlegend": sum(trace.get("showlegend", True) for trace in traces) > 1,
        }
        layout["meta"] = meta = {"unit": unit, "note": note, "base": self.name}
        unit = ", ".join(filter(None, (unit, note)))
        return Chart(key, title, unit, {"data": traces, "layout": layout}, meta, form)


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
    """The loss, and a chart for each figure that any run recorded; none before the first start."""
    if not any(run.starts for run in runs):
        return []
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
    charts += [
        _usage(axis, runs, *of_chart, lines)
        for of_chart, lines in USAGE.items()
        if any(run.has(column) for run in runs for column, *_ in lines)
    ]
    shared = _shared(axis, runs, now)
    if is_single:
        marks = shared["marks"][axis.name]
        for chart in charts:
            chart.figure["layout"]["shapes"] = marks["shapes"]
        charts[0].figure["layout"]["annotations"] = marks["annotations"]
    charts[0].meta.update(shared)
    return charts


def _shared(axis: Axis, runs: Sequence[Run], now: float) -> dict[str, Any]:
    """What the `meta` of the first chart has for all."""
    axes = [kept_knots(run) for run in runs]
    axes += [knots for run in runs for knots in lost_knots(run)]
    has_tokens = all(run.has("tokens") or run.fact("tokens_per_step") for run in runs)
    units = [unit for unit in UNITS if all(unit in knots for knots in axes)]
    units = [unit for unit in units if unit != "tokens" or has_tokens]
    spans = {}
    for unit in units:
        ends = [end for knots in axes if knots[unit] for end in (knots[unit][0], knots[unit][-1])]
        low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
        spans[unit] = (low, high if high > low else low + 1)
    spans[axis.name] = axis.span
    marks = {}
    if len(runs) == 1:
        marks = {unit: _marks(runs[0], now, unit, span) for unit, span in spans.items()}
    has_bits = all(math.isfinite(value) for run in runs for value in nats_of_a_bit(run))
    found = {"axes": axes, "spans": spans, "marks": marks}
    return {**found, "is_bits": has_bits and other_text(runs), "has_bits": has_bits}


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
        nats = math.nan if run.own_loss else nats_of_a_bit(run)[0]
        meta = {"axis": n, **({"nats": nats} if math.isfinite(nats) else {})}
        raw, first_lost = (
            {**meta, "role": "raw"},
            len(runs) + sum(len(one.lost_lines()) for one in runs[:n]),
        )
        traces += axis.lost(run, "loss", tone, first=first_lost, **meta)
        if window > 1:
            faint = {"showlegend": is_single, "dash": dash, **FAINT, **group, "meta": raw}
            traces.append(axis.line(f"{prefix}loss", x, run.column("loss"), tone, **faint))
        elif is_single:
            mean = "loss"
        look = {"dash": dash, **group, "meta": {**meta, "role": "mean"} if window > 1 else raw}
        traces.append(axis.line(mean, x, smoothed_loss(run), tone, **look))
        for column, (noun, own, style) in VALIDATIONS.items():
            look = {"showlegend": is_single, "dash": style, **group, "meta": {"axis": n}}
            traces += _validation(
                axis, run, column, prefix + noun, own if is_single else tone, look
            )
    if is_single:
        traces += _floors(axis, runs[0])
        for noun, event, tone in STROKES:
            steps = np.array(runs[0].steps_of(event), float)
            traces += axis.strokes(formats.count(len(steps), noun), runs[0], steps, tone)
    look = {"may_be_log": True, "hoverformat": ".4f"}
    unit = "nats per token"
    if own := sorted({run.own_loss for run in runs if run.own_loss}):
        unit = f"training: {', '.join(own)}; validation: {unit}"
    return axis.chart("loss", "Loss", unit, traces, **look)


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
        bits = np.array([event.get(column.replace("loss", "bpb"), math.nan) for event in events])
        if events:
            meta = {**look["meta"], **({"bits": bits} if np.isfinite(bits).any() else {})}
            style = {**style, "meta": {**meta, **({"role": "lost"} if is_lost else {})}}
            yield axis.line(name + suffix, x, np.array([e[column] for e in events]), tone, **style)


def _floors(axis: Axis, run: Run) -> list[Any]:
    """What compressors and n-grams make of the held-out text, in the nats of its tokens."""
    nats, levels = nats_of_a_bit(run)[1], list[Any]()
    for name, bits in floors_of(run).items() if math.isfinite(nats) else ():
        tone, dash = FLOORS.get(name, ("soft", "dot"))
        look = {"width": 1.5, "dash": dash, "showlegend": False}
        look["meta"] = {"nats": nats, "label": name}
        levels.append(axis.level(f"{name} of the held-out text", bits * nats, tone, **look))
    return levels


def _phases(axis: Axis, number: str, suffix: str, run: Run) -> Chart:
    """Seconds of a step by phase and pause; a bar spans the steps since the line before."""
    begins, ends = (axis.at(run, run.column(name)) for name in ("begins", "step"))
    left, right, group = group_lines(begins, ends, min(MAX_BARS, axis.columns))
    bar = {"type": "bar", "x": right, "width": right - left, "offset": left - right}
    bar |= {"hovertemplate": "%{y}", "meta": (meta := {"axis": int(number or 0)})}
    means = {
        name: group_means(run.column(f"{name}_ms") / 1e3, run.column("taken"), group)
        for name in (*PHASES, *PAUSES, "comm")
    }
    no_line = {"width": 0}
    traces: list[Any] = [
        {**bar, "name": noun, "y": means[name], "marker": {"color": LIGHT[name], "line": no_line}}
        for name, noun in NOUNS.items()
        if means[name].any()
    ]
    if run.has("comm_ms"):
        style = {"width": 1.5, "dash": "dash", "meta": meta}
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
        meta = {"axis": n, "role": "raw" if row.is_noisy else "curve"}
        if len(x) > NOISY and row.is_noisy:
            style = {"showlegend": False, "dash": dash, **FAINT, "meta": meta}
            traces.append(axis.line(f"{name}, each line", x, y, tone, **style))
            y, name = smooth(y, window_of(len(y))), name + ", smoothed" * is_single
            meta = {**meta, "role": "mean"}
        traces.append(axis.line(name, x, y, tone, dash=dash, meta=meta))
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
            steps, values = np.array(points, float).T
            (tone, dash), label = run_style(k), name
            style: dict[str, Any]
            if not is_single:
                (tone, _), dash = run_style(n), DASHES[k % len(DASHES)]
                label = f"{run.name} {name}"
            style = {"width": 3, "dash": "solid"} if name == "average" else {"dash": dash}
            style["meta"] = {"axis": n}
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
        axis.line(name, x, run.column(key), tone, width=1, meta={"axis": int(number or 0)})
        for key, (name, tone) in names.items()
        if run.has(key)
    ]
    title, unit = f"Load of the experts{suffix}", "visits, as a multiple of an even share"
    return axis.chart(f"experts{number}", title, unit, traces, hoverformat=".3f")


def _usage(
    axis: Axis, runs: Sequence[Run], key: str, title: str, unit: str, columns: Sequence[Any]
) -> Chart:
    """What the host and the GPU of rank 0 were used, of each run as far as it is known."""
    is_single, traces = len(runs) == 1, []
    for n, run in enumerate(runs):
        for k, (column, name, dash) in enumerate(columns):
            if run.has(column):
                tone = run_style(k if is_single else n)[0]
                look = {"dash": dash, "meta": {"axis": n, "role": "raw"}}
                x = axis.at(run, run.column("step"))
                label = name if is_single else f"{run.name} {name}"
                traces.append(axis.line(label, x, run.column(column), tone, **look))
    return axis.chart(key, title, unit, traces, from_zero=True, hoverformat=".3~f")


def _marks(run: Run, now: float, unit: str, span: tuple[float, float]) -> dict[str, list[Any]]:
    """Lost steps as bands; resumes and ends as upright lines, with labels for the loss chart."""
    shapes: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []

    def at(step: float, seconds: float) -> float:
        if unit == "tokens":
            return float(run.tokens_at(np.array(step)))
        return seconds if unit == "time" else float(step)

    for start, begin in zip(run.starts, run.begins, strict=True):
        if start.lost_steps:
            lost = (max(start.cutoff, start.first_step), start.last_step)
            edges = map(at, lost, lost_seconds(run, start, begin))
            band = {"fillcolor": LIGHT["soft"], "opacity": 0.13, "line": {"width": 0}}
            shapes.append({"type": "rect", **dict(zip(("x0", "x1"), edges, strict=True)), **band})
    low, high = span
    for step, seconds, kind, label in sorted(run.marks(now), key=lambda mark: at(*mark[:2])):
        x, text = at(step, seconds), escape(label, quote=False)
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
    return {"shapes": shapes[-MAX_MARKS:], "annotations": labels}


def column_means(
    x: np.ndarray, y: np.ndarray, columns: int, span: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Last x and mean of the known y of each pixel column."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    column = pixel_columns(x, columns, span)
    is_first, is_last = np.diff(column, prepend=-1) != 0, np.diff(column, append=columns) != 0
    return x[is_last], group_means(y, np.ones(len(y)), np.cumsum(is_first) - 1)


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
