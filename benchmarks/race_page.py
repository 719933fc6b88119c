"""The page of benchmarks.time_to_loss: bits per byte over time and over tokens, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from minimind.report.charts import TEMPLATE, Chart, run_style
from minimind.report.formats import LIGHT
from minimind.report.page import fill_page, html_table, plots

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by contender, one of each seed


def write_page(
    out: Path, runs: Runs, table: Mapping[str, Any], reached: Sequence[Sequence[str]], lead: str
) -> None:
    """Write the page to `out`; `lead` is the sentence below its heading.

    `reached` is the table of the times until the value of a reference, with its head.
    """
    charts = [
        curves(runs, "seconds", 60, "minutes", "Over time"),
        curves(runs, "tokens", 1e6, "million tokens", "Over tokens"),
    ]
    moments = list(next(iter(table.values()))["bits"])
    head = ["", "learning rate", *(f"{moment} min" for moment in moments), "range at the end"]
    cells = []
    for name, row in table.items():
        bits = [f"{row['bits'][moment]['median']:.4f}" for moment in moments]
        low, high = (f"{value:.4f}" for value in row["bits"][moments[-1]]["range"])
        cells.append([name, rate_text(row["rate"]), *bits, f"{low} to {high}"])
    title = "Time to loss"
    body = [f"<h1>{title}</h1>", f'<p class="lead">{escape(lead)}</p>', "<h2>Curves</h2>"]
    body += [plots(charts, is_single=True), "<h2>Bits per byte</h2>"]
    body.append(html_table(head, cells, "final"))
    head, *lines = reached
    body += [f"<h2>Seconds {escape(head[0])}</h2>", html_table(["", *head[1:]], lines, "until")]
    out.write_text(fill_page(title, "\n".join(body), charts, is_linked=False), encoding="utf-8")


def rate_text(rate: float | None) -> str:
    """A learning rate for the tables."""
    return "own" if rate is None else f"{rate:g}"


def curves(runs: Runs, axis: str, unit: float, noun: str, title: str) -> Chart:
    """Medians over the seeds as lines over `axis`, with the range as a band."""
    traces = []
    for number, (name, own) in enumerate(runs.items()):
        color, dash = run_style(number)
        x = np.array([point[axis] for point in own[0]["curve"]]) / unit
        bits = np.array([[point["bits"] for point in run["curve"]] for run in own])
        band = {"x": [*x, *x[::-1]], "y": [*bits.max(0), *bits.min(0)[::-1]], "fill": "toself"}
        traces.append(
            go.Scatter(
                **band,
                **{"line": {"width": 0}, "fillcolor": LIGHT[color], "opacity": 0.2},
                **{"showlegend": False, "hoverinfo": "skip", "mode": "lines"},
            )
        )
        line = {"color": LIGHT[color], "dash": dash}
        style = {"mode": "lines+markers", "marker": {"size": 5}}
        traces.append(go.Scatter(name=escape(name), x=x, y=np.median(bits, 0), line=line, **style))
    y = {"title": "bits per byte", "type": "log", "hoverformat": ".4f"}
    layout = {"template": TEMPLATE, "xaxis": {"title": noun, "hoverformat": ".1f"}, "yaxis": y}
    figure = go.Figure(traces, layout).to_dict()
    return Chart(axis, title, "held-out bits per byte: median and range", figure)
