"""The words beside a plot, where none covers another: of marks above, of lines at the right."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from minimind.report.charts import Chart, Mark, Scale

WIDE, NARROW = 480.0, 290.0  # pixels of the narrowest plot on a screen, and on a phone
LETTER = 6.4  # pixels
ROWS = 3  # of labels above each other
END_GAP = 0.055  # of the height, between names at the ends of lines


def end_labels(chart: Chart, scale: Scale) -> str:
    """The names of lines at their right ends, moved apart where they would overlap."""
    named = [(line, line.y[np.isfinite(line.y)]) for line in chart.lines if line.end]
    tops = [(1 - float(scale.at(y[-1:])[0]), line) for line, y in named if len(y)]
    spans, free = [], -1.0
    for top, line in sorted(tops, key=lambda one: one[0]):
        free = max(top, free + END_GAP)
        spans.append(
            f'<span class="end {line.tone}" style="top:{free:.2%}">{escape(line.end)}</span>'
        )
    return "".join(spans)


def mark_labels(chart: Chart) -> str:
    """The words of the marks, in rows above the plot; on a phone they stand in other rows."""
    marks = sorted(chart.marks, key=lambda mark: mark.x)
    wide, narrow = (_rows(chart, marks, pixels) for pixels in (WIDE, NARROW))
    spans = []
    for mark, row, row_narrow in zip(marks, wide, narrow, strict=True):
        left = float(chart.at(np.array(mark.x)))
        side = " left" if left > 0.5 else ""
        hidden = (" no-wide" if row < 0 else "") + (" no-narrow" if row_narrow < 0 else "")
        spans.append(
            f'<span class="label {mark.kind}{side}{hidden}"'
            f' style="left:{left:.2%};--w:{max(0, row)};--n:{max(0, row_narrow)}">'
            f"{escape(mark.label)}</span>"
        )
    sizes = f"--w:{max(wide, default=-1) + 1};--n:{max(narrow, default=-1) + 1}"
    return f'<div class="labels" style="{sizes}">{"".join(spans)}</div>'


def _rows(chart: Chart, marks: Sequence[Mark], pixels: float) -> list[int]:
    """The row of each label, the first in which it hits no other; -1 where there is none."""
    taken: list[list[tuple[float, float]]] = [[] for _ in range(ROWS)]
    found = []
    for mark in marks:
        at, size = float(chart.at(np.array(mark.x))) * pixels, len(mark.label) * LETTER + 14
        begin = at - size if at > pixels / 2 else at
        free = [
            row
            for row, spans in enumerate(taken)
            if all(begin > high or begin + size < low for low, high in spans)
        ]
        found.append(free[0] if free and begin > -30 and begin + size < pixels + 30 else -1)
        if found[-1] >= 0:
            taken[found[-1]].append((begin, begin + size))
    return found
