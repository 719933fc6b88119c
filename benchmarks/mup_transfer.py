"""The best learning rate over widths, with muP and without: does it stay put?

    python -m benchmarks.mup_transfer TEXT.jsonl --work DIR [--widths 64 128 256] [--steps 400]
        [--rates 0.001 0.002 ...] [--seed 42] [--page FILE.html] [--out FILE.json]

Trains a model of 2 layers for every width, rate and parametrization, each an ordinary run in a
folder of DIR, and prints the validation loss of its last step. The smallest width is the base of
muP, where both are the same model. The same command goes on after a stop: finished runs are read.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from benchmarks.record import arguments, record
from minimind.errors import NumericError
from minimind.report.charts import TEMPLATE, Chart, run_style
from minimind.report.formats import LIGHT
from minimind.report.page import fill_page, plots

HEAD_DIM = 16
RATES = [5e-4 * 2**n for n in range(8)]  # up to 0.064
KINDS = {"mup": "with muP", "plain": "without muP"}
FIXED = {
    **{"n_layers": 2, "vocab_size": 1024, "max_seq_len": 128, "batch_size": 16},
    **{"deepspeed_config": "none", "device": "cpu", "dtype": "float32", "val_fraction": 0.05},
    **{"eval_rows": 128, "save_interval": 10_000, "save_minutes": 0, "weight_decay": 0.1},
}
Losses = dict[str, dict[int, dict[float, float]]]  # by parametrization, width and rate


def loss_of_run(given: Any, kind: str, width: int, rate: float) -> float:
    """The last validation loss of a run, trained unless it has finished; inf if it diverged."""
    base, name = given.widths[0], given.text.stem
    folder = given.work / f"{name}-{kind}-{base}-{width}-{rate:g}-{given.steps}-{given.seed}"
    events = folder / "metrics.jsonl"
    if not (events.exists() and _of(events, "exit", "status") == 0):
        heads = width // HEAD_DIM
        flags = {
            **FIXED,
            **{"data_path": given.text, "cache_dir": given.work / "cache", "out_dir": folder},
            **{"dim": width, "n_heads": heads, "n_kv_heads": heads // 2, "learning_rate": rate},
            **{"max_steps": given.steps, "eval_interval": given.steps, "seed": given.seed},
            **({"mup_base_dim": base} if kind == "mup" else {}),
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "minimind", "train", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == NumericError.status:
            return math.inf
        if done.returncode:
            raise SystemExit(f"{folder}: status {done.returncode}\n{done.stderr[-2000:]}")
    loss = _of(events, "eval", "val_loss")
    return math.inf if loss is None else float(loss)  # null: not finite


def _of(events: Path, event: str, field: str) -> Any:
    """A field of the last event of that name; None without one."""
    lines = map(json.loads, events.read_text().splitlines())
    values = [line[field] for line in lines if line["event"] == event]
    return values[-1] if values else None


def page_of(losses: Losses, steps: int) -> str:
    """The HTML of a page: loss over rate, a curve for each width."""
    charts = []
    for kind, title in KINDS.items():
        traces = []
        for n, (width, by_rate) in enumerate(losses[kind].items()):
            finite = {rate: loss for rate, loss in by_rate.items() if math.isfinite(loss)}
            best = min(finite, key=lambda rate: finite[rate], default=math.nan)
            sizes = [13 if rate == best else 6 for rate in finite]
            look = {"mode": "lines+markers", "marker": {"size": sizes}}
            line = {"color": LIGHT[run_style(n)[0]]}
            name = f"width {width}, best {best:g}"
            curve = {"x": [*finite], "y": [*finite.values()], "name": name}
            traces.append(go.Scatter(**curve, **look, line=line))
        x_axis = {"title": "learning rate", "type": "log", "exponentformat": "e"}
        layout = {"template": TEMPLATE, "xaxis": x_axis, "yaxis": {"hoverformat": ".4f"}}
        figure = go.Figure(traces, {**layout, "showlegend": True})
        charts.append(Chart(kind, title, "validation loss, nats per token", figure.to_dict()))
    title = "Best learning rate over widths"
    lead = f'<p class="lead">AdamW, {steps} steps; the largest point is the best rate.</p>'
    body = f"<h1>{title}</h1>{lead}{plots(charts, is_single=True)}"
    return fill_page(title, body, charts, is_linked=False)


def row_of(width: int, by_rate: Mapping[float, float], rates: Sequence[float]) -> str:
    """Width, loss at each rate, best rate."""
    best = min(by_rate, key=lambda rate: by_rate[rate])
    return f"{width:>6}{''.join(f'{by_rate[rate]:>9.4f}' for rate in rates)}   best {best:g}"


def main() -> None:
    """Train what is missing, print the tables, write page and JSON."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    given.widths.sort()
    load, losses = os.getloadavg(), {}
    for kind, title in KINDS.items():
        print(f"{title}\n{'width':>6}{''.join(f'{rate:>9g}' for rate in given.rates)}")
        losses[kind] = {}
        for width in given.widths:
            if kind == "plain" and width == given.widths[0]:  # the same model as with muP
                by_rate = losses["mup"][width]
            else:
                by_rate = {rate: loss_of_run(given, kind, width, rate) for rate in given.rates}
            losses[kind][width] = by_rate
            print(row_of(width, by_rate, given.rates), flush=True)
    if given.page:
        given.page.write_text(page_of(losses, given.steps))
    record(given.out, "mup_transfer", load, losses=losses)


if __name__ == "__main__":
    main()
