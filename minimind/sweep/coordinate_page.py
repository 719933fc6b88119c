"""The page of a coordinate check: changes of activations over widths, with and without muP."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from minimind.report.charts import TEMPLATE, Chart, run_style
from minimind.report.page import fill_page, html_table, plots
from minimind.report.palette import LIGHT
from minimind.runtime.durable_files import storing, write_whole
from minimind.sweep.coordinate_check import Coordinates

TITLE = "Coordinate check"


def write_coordinates(
    found: Mapping[str, Coordinates], steps: int, verdict: str, out: Path
) -> None:
    """Write the page of the coordinates by title."""
    content = render(found, steps, verdict).encode()
    with storing(str(out), "free some space, or give another --out", needed=len(content)):
        write_whole(out, content)


def render(found: Mapping[str, Coordinates], steps: int, verdict: str) -> str:
    """The HTML of the page."""
    charts = [
        chart_of(f"coordinates{n}", title, one) for n, (title, one) in enumerate(found.items())
    ]
    lead = f"Changes of activations in {steps} optimizer steps, root mean square: {verdict}."
    parts = [f"<h1>{TITLE}</h1>", f'<p class="lead">{escape(lead)}</p>', plots(charts, True)]
    for title, one in found.items():
        head = ["activation", *map(str, one.widths), "slope"]
        parts.append(f"<h2>{escape(title)}</h2>{html_table(head, one.rows(), 'final')}")
    return fill_page(TITLE, "\n".join(parts), charts, is_linked=False)


def chart_of(key: str, title: str, coordinates: Coordinates) -> Chart:
    """A line per kind of activation over the width, both axes logarithmic."""
    traces = []
    for n, (kind, values) in enumerate(coordinates.changes.items()):
        tone, dash = run_style(n)
        look = {"mode": "lines+markers", "line": {"color": LIGHT[tone], "dash": dash}}
        name = f"{kind}, slope {coordinates.slope(kind):+.2f}"
        traces.append(go.Scatter(name=name, x=[*coordinates.widths], y=[*values], **look))
    widths = [*coordinates.widths]
    x_axis = {"title": "width", "type": "log", "tickvals": widths, "ticktext": [*map(str, widths)]}
    y_axis = {"type": "log", "hoverformat": ".4f", "dtick": 1}
    layout = {"template": TEMPLATE, "xaxis": x_axis, "yaxis": y_axis, "showlegend": True}
    return Chart(key, title, "change, log scale", go.Figure(traces, layout))
