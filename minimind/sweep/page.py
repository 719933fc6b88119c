"""sweep.html: the trials over time, parallel coordinates, and the metric over each dimension."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

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
from minimind.report.page import fill_page, html_table, plots
from minimind.sweep.propose import distribution_of
from minimind.sweep.sweep_file import Sweep
from minimind.sweep.trial import ORDER, Result, best_command, best_of, parameters_text, table

NOUNS = {"val_bpb": "bits per byte", "val_loss": "nats per token"}


def render(sweep: Sweep, rows: Sequence[Result], folder: Path) -> str:
    """The HTML of the page."""
    charts = draw(sweep, rows)
    head, *body = table(rows, sweep.metric, sweep.dimensions)
    kinds = [(sum(row.state == kind for row in rows), kind) for kind in ORDER]
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
    parts += [f"<h2>Trials</h2>{html_table(head, body, 'final')}"]
    now, where = formats.timestamp(time.time()), escape(str(folder))
    parts.append(f"<footer>Written {now} by minimind sweep in <code>{where}</code></footer>")
    return fill_page(f"{folder.absolute().name}: sweep", "\n".join(parts), charts, is_linked=False)


def draw(sweep: Sweep, rows: Sequence[Result]) -> list[Chart]:
    """Optuna's figures of the trials that have a metric."""
    if not any(row.finite for row in rows):
        return []
    study, metric, noun = recorded(sweep, rows), sweep.metric, NOUNS[sweep.metric]
    charts = [
        _chart("history", "History", noun, plot_optimization_history(study, target_name=metric))
    ]
    parallel = plot_parallel_coordinate(study, target_name=metric)
    charts.append(_chart("parallel", "Parallel coordinates", noun, parallel))
    for name in sweep.dimensions if best_of(rows) else ():
        key = f"over-{name.replace('_', '-')}"
        charts.append(_chart(key, name, noun, plot_slice(study, [name], target_name=metric)))
    curves = plot_intermediate_values(study)
    return [*charts, _chart("curves", "Validations", f"{noun} at each step", curves)]


def recorded(sweep: Sweep, rows: Sequence[Result]) -> optuna.Study:
    """The trials as a study in memory.

    A trial that did not finish has its last validation as value, and breaks a constraint: Optuna
    draws infeasible trials apart from the others, but no pruned ones.
    """
    distributions = {n: distribution_of(n, d) for n, d in sweep.dimensions.items()}
    study = optuna.create_study()
    for row in rows:
        has_metric = bool(row.finite)
        trial = optuna.create_trial(
            state=TrialState.COMPLETE if has_metric else TrialState.FAIL,
            value=row.metric if has_metric else None,
            params=row.parameters,
            distributions={name: distributions[name] for name in row.parameters},
            intermediate_values=row.finite,
            constraints={"not finished": float(row.state != "done")},
        )
        study.add_trial(trial)
    return study


def _chart(key: str, title: str, unit: str, figure: Figure) -> Chart:
    figure.layout.title = figure.layout.plot_bgcolor = None  # those of the page
    figure.update_layout(template=TEMPLATE, hovermode="closest")
    # Room for labels that are turned, and ticks of a logarithmic axis that are no whole numbers.
    figure.update_xaxes(automargin=True, hoverformat="")
    return Chart(key, title, unit, figure)
