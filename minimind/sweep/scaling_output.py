"""The answer of `minimind scaling` as text, JSON and a page."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from minimind.report import formats
from minimind.report.charts import TEMPLATE, Chart, run_style
from minimind.report.page import fill_page, html_table, plots
from minimind.report.palette import LIGHT
from minimind.runtime.durable_files import storing, write_whole
from minimind.sweep.law import LEVEL
from minimind.sweep.scaling import Answer, Interval, Optimum, command_of, interval_of

FORMULAS = {
    "both": "L(N, D) = E + A / N^alpha + B / D^beta",
    "parameters": "L(N) = E + A / N^alpha",
    "tokens": "L(D) = E + B / D^beta",
}
UNITS = "L nats per token, N parameters (all of them; a tied embedding counts once), D tokens"
LABELS = {"a": "a of N ~ C^a", "b": "b of D ~ C^b"}  # sizes of the optimum of C FLOPs
CURVE, BAND = 80, 25  # points of a curve, and of a band, which is one interval each
MARGIN = 1.5  # factor by which curves go beyond what is drawn
MOST_CURVES = 8


def constants_cells(found: Answer) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and a row per constant."""
    rows = [
        [
            LABELS.get(name, name),
            formats.figure(value),
            f"{formats.figure(low)} to {formats.figure(high)}",
        ]
        for name, (value, low, high) in found.constants().items()
    ]
    return ["constant", "value", f"{LEVEL:.0%} interval"], rows


def optima_cells(found: Answer) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and a row per budget."""
    head = ["budget", "parameters", "tokens", "tokens/parameter", "FLOPs", "loss", "reach"]
    rows = [
        [
            one.budget,
            *(_ranged(value) for value in (one.parameters, one.tokens)),
            f"{one.tokens[0] / one.parameters[0]:.3g}",
            f"{one.flops[0]:.3g}",
            f"{one.loss[0]:.4f} ({one.loss[1]:.4f} to {one.loss[2]:.4f})",
            f"{one.beyond:.3g}x the runs" if one.beyond > 1 else "within the runs",
        ]
        for one in found.optima
    ]
    return head, rows


def runs_cells(found: Answer) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and a row per run."""
    rows = [
        [
            one.name,
            f"{one.parameters:,.0f}",
            f"{one.tokens:,.0f}",
            *(f"{value:.4f}" for value in (one.loss, fitted)),
            f"{100 * error:+.2f}%",
        ]
        for one, fitted, error in zip(
            found.points.used, found.fitted(), found.fit.residuals, strict=True
        )
    ]
    return ["run", "parameters", "tokens", "loss", "law", "error"], rows


def _ranged(one: Interval) -> str:
    value, low, high = map(formats.size, one)
    return value if low == high else f"{value} ({low} to {high})"


def as_text(found: Answer) -> str:
    """The answer for a terminal."""
    parts = [_aligned(*runs_cells(found))]
    if left := [f"  {name}: {reason}" for name, reason in found.points.left_out.items()]:
        parts.append("\n".join(["left out:", *left]))
    parts.append(f"{FORMULAS[found.fit.term]}: {UNITS}")
    parts.append(_aligned(*constants_cells(found)))
    if found.notes:
        parts.append("\n".join(f"note: {one}" for one in found.notes))
    if found.optima:
        parts.append(f"{_optima_title(found)}\n{_aligned(*optima_cells(found))}")
        parts += filter(None, map(_proposal, found.optima))
    return "\n\n".join(parts)


def _optima_title(found: Answer) -> str:
    return f"compute-optimal, where a run takes {found.cost:.3g} N D FLOPs:"


def _proposal(one: Optimum) -> str:
    if one.shape is None:
        return ""
    return f"{one.budget}, a shape of {formats.size(one.shape.parameters)}:\n{command_of(one)}"


def _aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is aligned to the left."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_object(found: Answer) -> dict[str, Any]:
    """The answer for --json."""
    errors = found.fit.residuals
    return {
        "law": FORMULAS[found.fit.term],
        "terms": found.fit.term,
        "level": LEVEL,
        "constants": {k: _listed(v) for k, v in found.constants().items()},
        "flops_per_parameter_and_token": found.cost,
        "notes": found.notes,
        "runs": [
            {"run": one.name, "parameters": one.parameters, "tokens": one.tokens, "loss": one.loss}
            | {"law": float(loss), "log_error": float(error)}
            for one, loss, error in zip(found.points.used, found.fitted(), errors, strict=True)
        ],
        "left_out": found.points.left_out,
        "optima": [
            {"budget": one.budget, "times_beyond_the_runs": one.beyond, "command": command_of(one)}
            | {k: _listed(getattr(one, k)) for k in ("flops", "parameters", "tokens", "loss")}
            for one in found.optima
        ],
    }


def _listed(one: Interval) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), one, strict=True))


def write_page(found: Answer, out: Path, remedy: str) -> int:
    """Write the page to `out`; return its bytes. Raise StorageError."""
    content = render(found).encode(errors="backslashreplace")
    with storing(str(out), remedy, needed=len(content)):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, content)
    return len(content)


def render(found: Answer) -> str:
    """The HTML of the page."""
    charts = draw(found)
    used = formats.count(len(found.points.used), "run")
    parts = ["<h1>Scaling law</h1>", f'<p class="lead">{escape(FORMULAS[found.fit.term])}</p>']
    parts.append(f'<p class="quiet">Fitted to {used}; {escape(UNITS)}.</p>')
    parts += [f"<p>Note: {escape(one)}.</p>" for one in found.notes]
    parts.append(_table(constants_cells(found)))
    if found.optima:
        title = _optima_title(found).rstrip(":")
        parts.append(f"<h2>Budgets</h2><p>{title[0].upper()}{title[1:]}.</p>")
        parts.append(_table(optima_cells(found)))
        for one in filter(command_of, found.optima):
            label, code = escape(one.budget), escape(command_of(one))
            parts.append(f'<p class="pairs"><b>{label}</b> <code>{code}</code></p>')
    parts += ["<h2>Plots</h2>", plots(charts, is_single=True)]
    parts.append(f"<h2>Runs</h2>{_table(runs_cells(found))}")
    if found.points.left_out:
        rows = [[escape(name), escape(why)] for name, why in found.points.left_out.items()]
        parts.append(f"<h2>Left out</h2>{html_table(('run', 'reason'), rows, 'final')}")
    parts.append(f"<footer>Written {formats.timestamp(time.time())} by minimind scaling</footer>")
    return fill_page("Scaling law", "\n".join(parts), charts, is_linked=False)


def _table(cells: tuple[Sequence[str], Iterable[Sequence[str]]]) -> str:
    head, rows = cells
    return html_table(head, [[*map(escape, row)] for row in rows], "ranks")


def draw(found: Answer) -> list[Chart]:
    """Loss over each fitted size, the optimum over budgets, and the errors."""
    over = [k for k in ("tokens", "parameters") if found.fit.term in (k, "both")]
    charts = [_over(found, name) for name in over]
    optimal = [_optimal(found)] if found.fit.term == "both" else []
    return [*charts, *optimal, _errors(found)]


def _chart(key: str, title: str, unit: str, traces: list[Any], x: dict, y: dict) -> Chart:
    layout = {"template": TEMPLATE, "hovermode": "closest", "xaxis": x, "yaxis": y}
    layout["showlegend"] = sum(trace.showlegend is not False for trace in traces) > 1
    return Chart(key, title, unit, go.Figure(traces, layout))


def _log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    ticks = formats.log_ticks(low, high)
    ticks = [tick for tick in ticks if low <= tick <= high] or ticks
    labels = [formats.size(tick) for tick in ticks]
    span = {"range": [float(np.log10(low)), float(np.log10(high))]}
    return {"title": title, "type": "log", "tickvals": ticks, "ticktext": labels, **span}


def _curve(x: Any, y: Any, tone: str, **style: Any) -> Any:
    line = {"color": LIGHT[tone], "width": 1.5, **style.pop("line", {})}
    return go.Scatter(x=x, y=y, mode="lines", line=line, **{"hoverinfo": "skip", **style})


def _over(found: Answer, name: str) -> Chart:
    """The runs and the law over `name`, a curve for each value of the other size."""
    used = found.points.used
    other = "parameters" if name == "tokens" else "tokens"
    values = np.array([getattr(one, name) for one in used])
    low, high = values.min() / MARGIN, values.max() * MARGIN
    x = np.geomspace(low, high, CURVE)
    others = sorted({getattr(one, other) for one in used})
    if found.fit.term != "both":
        others = others[:1]
    shown = [
        others[round(n)] for n in np.linspace(0, len(others) - 1, min(len(others), MOST_CURVES))
    ]
    traces: list[Any] = []
    for n, value in enumerate(shown):
        tone, dash = run_style(n)
        near = [one for one in used if _nearest(shown, getattr(one, other)) == value]
        label = f"{formats.size(value)} {other}" if found.fit.term == "both" else "runs"
        sizes = {name: x, other: value}
        y = found.fit.law.loss(sizes["parameters"], sizes["tokens"])
        curve = {"line": {"dash": dash}, "showlegend": False, "name": f"law, {label}"}
        traces.append(_curve(x, y, tone, **curve))
        texts = [escape(f"{one.name}: {one.loss:.4f}") for one in near]
        marker = {"color": LIGHT[tone], "size": 9}
        dots = {"mode": "markers", "marker": marker, "text": texts, "hoverinfo": "text"}
        place = {"x": [getattr(one, name) for one in near], "y": [one.loss for one in near]}
        traces.append(go.Scatter(name=label, **place, **dots))
    unit = "nats per token; points are runs, curves the law"
    axes = _log_axis(name, float(low), float(high)), {"title": "loss", "hoverformat": ".4f"}
    return _chart(
        "loss" if name == "tokens" else "over-parameters", f"Loss over {name}", unit, traces, *axes
    )


def _nearest(values: Sequence[float], value: float) -> float:
    return min(values, key=lambda one: abs(np.log(one / value)))


def _optimal(found: Answer) -> Chart:
    """The optimal number of parameters over budgets, with its interval, and the runs."""
    used, cost = found.points.used, found.cost
    spent = np.array([cost * one.parameters * one.tokens for one in used])
    asked = [one.flops[0] for one in found.optima]
    low, high = min([*spent, *asked]) / MARGIN, max([*spent, *asked]) * MARGIN
    x = np.geomspace(low, high, BAND)
    bands = [interval_of(found.fit, lambda law, c=c: law.optimum(c, cost)[0]) for c in x]
    middle, below, above = np.array(bands).T
    band = {"fill": "tonexty", "line": {"width": 0}, "opacity": 0.5, "showlegend": True}
    traces = [
        _curve(x, below, "run5", name="lower end", line={"width": 0}, showlegend=False),
        _curve(x, above, "run5", name=f"{LEVEL:.0%} interval", **band),
        _curve(x, middle, "run0", name="optimum"),
    ]
    looks = (
        ("runs", spent, [one.parameters for one in used], "soft", "circle-open", used),
        ("budgets", asked, [one.parameters[0] for one in found.optima], "run1", "star", ()),
    )
    for name, flops, sizes, tone, symbol, runs in looks:
        texts = [escape(one.name) for one in runs] or [one.budget for one in found.optima]
        marker = {"color": LIGHT[tone], "symbol": symbol, "size": 9 if runs else 13}
        dots = {"mode": "markers", "marker": marker, "text": texts, "hoverinfo": "text"}
        if len(flops):
            traces.append(go.Scatter(name=name, x=flops, y=sizes, **dots))
    heights = [*above, *below, *(one.parameters for one in used)]
    y = _log_axis("parameters", min(heights) / MARGIN, max(heights) * MARGIN)
    x_axis, unit = _log_axis("FLOPs", low, high), "parameters over FLOPs, log scales"
    return _chart("optimum", "Compute-optimal size", unit, traces, x_axis, y)


def _errors(found: Answer) -> Chart:
    """How far each run lies from the law."""
    used, errors = found.points.used, 100 * found.fit.residuals
    texts = [escape(f"{p.name}: {e:+.2f}%") for p, e in zip(used, errors, strict=True)]
    marker = {"color": LIGHT["run0"], "size": 9}
    place = {"x": found.fitted(), "y": errors}
    dots = {"mode": "markers", "marker": marker, "text": texts, "hoverinfo": "text"}
    axes = {"title": "loss of the law"}, {"title": "error", "ticksuffix": "%", "zeroline": True}
    trace = go.Scatter(name="error", **place, **dots)
    return _chart("errors", "Errors", "measured against the law", [trace], *axes)
