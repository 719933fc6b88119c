"""Finished runs whose losses follow a known law, written as out_dirs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from minimind.architecture.shape import Shape
from minimind.model.sizes import feed_forward_width
from minimind.sweep.law import Law
from tests.report.made import end, evaluation, run_start, step_line, write_run

LAW = Law(1.7, 406.4, 0.34, 410.7, 0.28)
DIMS = (128, 256, 384, 512)
TOKENS = (4e7, 2e8, 1e9, 5e9)
TOKENS_PER_STEP = 1024


def shape_of_dim(dim: int) -> Shape:
    return Shape(dim, 4, 8, 2, feed_forward_width(dim), 4096, 256)


def write_point(
    place: Path, dim: int, tokens: float, noise: float = 0.0, more: Iterable[Any] = (), **flags: Any
) -> Path:
    """A run of LAW whose log loss is `noise` off; `more` are lines before its end."""
    shape = shape_of_dim(dim)
    steps = round(tokens / TOKENS_PER_STEP)
    loss = float(LAW.loss(shape.parameters, steps * TOKENS_PER_STEP) * np.exp(noise))
    start = run_start(
        parameters=shape.parameters,
        tokens_per_step=TOKENS_PER_STEP,
        rows_per_epoch=10**9,
        init_from=None,
        total_steps=steps,
    )
    lines = [
        start,
        evaluation(steps // 2, loss + 1),
        step_line(steps, tokens=steps * TOKENS_PER_STEP),
        evaluation(steps, loss),
        *more,
        end(steps),
    ]
    write_run(place, lines)
    content = {
        **{"dim": dim, "n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "max_seq_len": 256},
        **{"vocab_size": 4096, "data_path": ["text.jsonl"], "out_dir": str(place), **flags},
    }
    (place / "config.yaml").write_text(yaml.safe_dump(content))
    return place


def write_grid(
    place: Path, dims: Iterable[int] = DIMS, tokens: Iterable[float] = TOKENS, sigma: float = 0.0
) -> Path:
    """A folder of a run for each size and number of tokens."""
    random = np.random.default_rng(7)
    for dim in dims:
        for one in tokens:
            noise = sigma * random.standard_normal()
            write_point(place / f"d{dim}-{one:.0e}", dim, one, float(noise))
    return place
