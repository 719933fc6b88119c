"""The trials of a sweep as a table, best first, and the command line of the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimind.report import formats
from minimind.runtime.terminal import shorten_line
from minimind.sweep.study import Row
from minimind.sweep.sweep_file import Sweep
from minimind.sweep.trial import command_line

ORDER = ("done", "pruned", "interrupted", "failed")  # by what is known of the metric
MAX_STATUS = 60  # characters


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Finished trials by metric, then pruned ones by their last validation, then the others."""
    known = [(ORDER.index(row.kind), _rank(row.metric), row.folder, row) for row in rows]
    return [row for *_, row in sorted(known, key=lambda one: one[:3])]


def _rank(metric: float) -> float:
    return metric if math.isfinite(metric) else math.inf


def best_of(rows: Sequence[Row]) -> Row | None:
    """The finished trial with the lowest metric; None if none has finished."""
    ordered = best_first(rows)
    return ordered[0] if ordered and ordered[0].kind == "done" else None


def best_command(sweep: Sweep, best: Row, place: Path) -> str:
    """The command line that trains the best trial again, in a folder of its own."""
    return command_line({**sweep.flags, **best.parameters, "out_dir": str(place / "best")})


def value_text(value: Any) -> str:
    """A parameter in a table: floats with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parameters_text(parameters: dict[str, Any]) -> str:
    """`learning_rate 0.0012, dim 64`."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in parameters.items())


def cells_of(sweep: Sweep, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the cells of each trial."""
    head = ["trial", sweep.metric, *sweep.dimensions, "steps", "status"]
    body = [
        [
            row.folder,
            formats.figure(row.metric),
            *(value_text(row.parameters.get(name, "")) for name in sweep.dimensions),
            f"{row.steps:,}",
            row.status,
        ]
        for row in best_first(rows)
    ]
    return head, body


def table_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The trials for a terminal, a line each."""
    head, body = cells_of(sweep, rows)
    body = [[*row[:-1], shorten_line(row[-1], MAX_STATUS)] for row in body]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *numbers, last = zip(cells, widths, strict=True)
        shown = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in numbers)]
        return "  ".join([*shown, last[0]]).rstrip()

    return "\n".join(map(line, [head, *body]))
