"""sweep.html: the trials over time, parallel coordinates, and the metric over each dimension."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState
from optuna.visualization import (
    plot_intermediate_values,
    plot_optimization_history,
    plot_parallel_coordinate,
    plot_slice,
)
from plotly.graph_objects import Figure

from minimind.report import formats
from minimind.report.charts import TEMPLATE, Chart
from minimind.report.formats import LIGHT
from minimind.report.page import fill_page, html_table, plots
from minimind.sweep.study import (
    ORDER,
    Row,
    best_command,
    best_of,
    cells_of,
    distribution_of,
    parameters_text,
)
from minimind.sweep.sweep_file import Range, Sweep

NOUNS = {"val_bpb": "bits per byte", "val_loss": "nats per token"}
BANDS = ("run0", "run5", "sample")  # the best third of the finished trials, the second, the last
UNFINISHED = {"symbol": "x-thin-open", "color": LIGHT["run1"], "size": 9, "line": {"width": 2}}
BEST = {"color": LIGHT["ink"], "width": 1.5, "shape": "hv"}


def render(sweep: Sweep, rows: Sequence[Row], folder: Path) -> str:
    """The HTML of the page."""
    charts = draw(sweep, rows)
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


def draw(sweep: Sweep, rows: Sequence[Row]) -> list[Chart]:
    """Optuna's figures of the trials that have a metric, in the look of the pages."""
    known = [row for row in rows if math.isfinite(row.metric)]
    if not known:
        return []
    study, metric, noun = recorded(sweep, rows), sweep.metric, NOUNS[sweep.metric]
    history = plot_optimization_history(study, target_name=metric)
    hover = "trial-%{x:04d}: %{y:.4f}<extra></extra>"
    looks = [
        {"name": "done", "marker": {"color": LIGHT["run0"], "size": 9}, "hovertemplate": hover},
        {"name": "best so far", "line": BEST, "hoverinfo": "skip"},
        {"name": "not finished", "marker": UNFINISHED, "hovertemplate": hover},
    ]
    traces: Any = history.data
    for trace, look in zip(traces, looks, strict=True):
        trace.update(look, showlegend=bool(np.isfinite(trace.y).any()))
    history.update_xaxes(title="trial", dtick=max(1, len(rows) // 10))
    parallel, curves = _lines(sweep, known)
    is_any_done = best_of(known) is not None
    lines = "a line per trial: the best third of the finished ones bold, others dotted"
    return [
        _chart("history", "History", f"{noun}; of other trials the last validation", history),
        _chart("parallel", "Parallel coordinates", lines, parallel),
        *(_slice(sweep, study, name) for name in sweep.dimensions if is_any_done),
        _chart("curves", "Validations", f"{noun} at each step", curves),
    ]


def _lines(sweep: Sweep, known: Sequence[Row]) -> tuple[Figure, Figure]:
    """Parallel coordinates and validations, a line per trial in both; the best ones on top."""
    ranked = sorted(known, key=lambda row: (row.kind == "done", -row.metric))
    # Optuna draws choices in the order in which trials have them: these come first, undrawn.
    choices = {n: d for n, d in sweep.dimensions.items() if not isinstance(d, Range)}
    in_order = [
        {name: values[min(n, len(values) - 1)] for name, values in choices.items()}
        for n in range(max(map(len, choices.values()), default=0))
    ]
    first = [replace(ranked[0], parameters=ranked[0].parameters | p, curve={}) for p in in_order]
    study = recorded(sweep, [*first, *ranked])
    parallel = plot_parallel_coordinate(study, target_name=sweep.metric)
    parallel.data = parallel.data[len(first) :][: len(ranked)]  # without the scale of colors
    parallel.update_annotations(font={"color": LIGHT["soft"]}, bgcolor=LIGHT["paper"])
    parallel.update_shapes(line={"color": LIGHT["soft"]})
    room = [-0.35, len(sweep.dimensions) + 0.35]  # for the names of the axes
    parallel.update_xaxes(showline=False, range=room)
    curves = plot_intermediate_values(study)
    hover = "step %{x}: %{y:.4f}<extra></extra>"
    curves.update_traces(hovertemplate=hover, marker={"size": 4})
    curves.update_layout(xaxis={"title": "step"}, yaxis={"title": sweep.metric})
    limits = np.quantile([row.metric for row in known if row.kind == "done"] or [0], (1 / 3, 2 / 3))
    drawn: Any = (
        *zip(parallel.data, ranked, strict=True),
        *zip(curves.data, [row for row in ranked if row.curve], strict=True),
    )
    for trace, row in drawn:
        is_done = row.kind == "done"
        band = int(np.searchsorted(limits, row.metric)) if is_done else len(BANDS) - 1
        dash, width = "solid" if is_done else "dot", 1.25 if band else 2.5
        line = {"color": LIGHT[BANDS[band]], "dash": dash, "width": width}
        text = f"{row.folder}, {trace.hovertemplate}"
        trace.update(line=line, opacity=1, hovertemplate=text)
    return parallel, curves


def recorded(sweep: Sweep, rows: Sequence[Row]) -> optuna.Study:
    """The trials as a study in memory.

    A trial that did not finish has its last validation as value, and breaks a constraint: Optuna
    draws infeasible trials apart from the others, but no pruned ones.
    """
    distributions = {n: distribution_of(n, d) for n, d in sweep.dimensions.items()}
    study = optuna.create_study()
    for row in rows:
        has_metric = math.isfinite(row.metric)
        trial = optuna.create_trial(
            state=TrialState.COMPLETE if has_metric else TrialState.FAIL,
            value=row.metric if has_metric else None,
            params=row.parameters,
            distributions={name: distributions[name] for name in row.parameters},
            intermediate_values=row.curve,
            constraints={"not finished": float(row.kind != "done")},
        )
        study.add_trial(trial)
    return study


def _slice(sweep: Sweep, study: optuna.Study, name: str) -> Chart:
    """The metric of finished trials over a dimension."""
    dimension = sweep.dimensions[name]
    figure = plot_slice(study, [name], target_name=sweep.metric)
    figure.data = figure.data[:1]  # the finished ones; of others the metric is an early one
    scale = [[0, LIGHT["rule"]], [1, LIGHT["run0"]]]
    look = {"size": 9, "colorscale": scale, "line": {"width": 1, "color": LIGHT["run0"]}}
    look["colorbar"] = {"title": "trial", "thickness": 10, "outlinewidth": 0, "xpad": 10}
    figure.update_traces(
        marker=look, hovertemplate="trial-%{marker.color:04d}, %{x}: %{y:.4f}<extra></extra>"
    )
    figure.update_xaxes(hoverformat=".4~g")
    is_log = isinstance(dimension, Range) and dimension.log
    if is_log:
        values = [trial.params[name] for trial in study.get_trials(states=[TrialState.COMPLETE])]
        ticks = formats.log_ticks(min(values), max(values))
        figure.update_xaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    elif not isinstance(dimension, Range):  # Optuna shows them in quotes
        figure.update_xaxes(tickvals=[*map(repr, dimension)], ticktext=[*map(escape, dimension)])
    unit = f"{NOUNS[sweep.metric]} of the finished trials{', log scale' if is_log else ''}"
    return _chart(f"over-{name.replace('_', '-')}", name, unit, figure)


def _chart(key: str, title: str, unit: str, figure: Figure) -> Chart:
    figure.layout.title = figure.layout.plot_bgcolor = None  # those of the page
    figure.update_layout(template=TEMPLATE, hovermode="closest")
    figure.update_xaxes(automargin=True)  # room for labels that are turned
    return Chart(key, title, unit, figure)
