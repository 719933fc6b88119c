"""A chart as HTML: curves in an SVG that stretches with the page, text beside it that does not.

The drawing is 1000 x 1000 whatever the screen; `data-x0` to `data-y1` say what its edges stand for,
so that every drawn value can be read back from the path.
"""

from __future__ import annotations

import math
from html import escape

import numpy as np

from minimind.report.charts import Chart, Line, Scale, scale_of
from minimind.report.labels import end_labels, mark_labels
from minimind.report.numbers import linear_ticks, log_ticks, tick_labels
from minimind.report.thin import extremes

SIZE = 1000
X_TICKS, Y_TICKS = 6, 5


def drawn(chart: Chart) -> str:
    """The chart as a <figure>."""
    stacked = sum((layer.heights for layer in chart.layers), np.zeros(len(chart.ends)))
    heights = [line.y for line in chart.lines] + [stacked]
    scale = scale_of(np.concatenate(heights), chart.from_zero, chart.may_be_log)
    inside = [
        _grid(chart, scale),
        *(
            f'<rect class="band" {_across(chart, *band)} y="0" height="{SIZE}"/>'
            for band in chart.bands
        ),
        *_stack(chart, scale),
        *(_feet(chart, tone, x) for _, tone, x in chart.ticks_below),
        *(f'<path class="mark {m.kind}" d="M{_x(chart, m.x):.1f} 0V{SIZE}"/>' for m in chart.marks),
        *(_curve(chart, scale, line) for line in chart.lines),
    ]
    edges = {"x0": chart.span[0], "x1": chart.span[1], "y0": scale.low, "y1": scale.high}
    data = " ".join(f'data-{name}="{value!r}"' for name, value in edges.items())
    ends = end_labels(chart, scale)
    flags = {"wide": chart.is_wide, "stacked": chart.layers, "ended": ends}
    kinds = " ".join(["chart", *(name for name, is_so in flags.items() if is_so)])
    cut = f", cut off: up to {chart.form(scale.highest)}" if math.isfinite(scale.highest) else ""
    unit = escape(f"{chart.unit}{', log scale' if scale.is_log else ''}{cut}")
    return (
        f'<figure class="{kinds}" id="{chart.key}" {data} data-log="{int(scale.is_log)}"'
        f' data-form="{chart.form.__name__}">'
        f'<figcaption><h3>{escape(chart.title)}</h3><span class="unit">{unit}</span>'
        f'<span class="legend">{_legend(chart)}</span></figcaption>'
        f"{mark_labels(chart) if chart.has_labels else ''}"
        f'<div class="plot"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(chart.title)}, {unit}">{"".join(inside)}</svg>'
        f"{_y_labels(chart, scale)}{_signs(chart, scale)}{ends}"
        '<div class="cursor"></div></div>'
        f'<div class="across">{_x_labels(chart)}</div></figure>'
    )


def _x(chart: Chart, value: float) -> float:
    return float(chart.at(np.array(value))) * SIZE


def _across(chart: Chart, begin: float, end: float) -> str:
    x = _x(chart, begin)
    return f'x="{x:.1f}" width="{max(0.5, _x(chart, end) - x):.1f}"'


def _grid(chart: Chart, scale: Scale) -> str:
    lines = "".join(f"M0 {y * SIZE:.1f}H{SIZE}" for y, _ in _y_ticks(chart, scale))
    return f'<path class="grid" d="{lines}"/>'


def _y_ticks(chart: Chart, scale: Scale) -> list[tuple[float, str]]:
    """Share of the height from the top, and label."""
    pick = log_ticks if scale.is_log else linear_ticks
    ticks = pick(scale.low, scale.high, Y_TICKS)
    at = 1 - scale.at(np.array(ticks, dtype=float))
    texts = [chart.tick_form(t) for t in ticks] if chart.tick_form else tick_labels(ticks)
    return list(zip(at.tolist(), texts, strict=True))


def _y_labels(chart: Chart, scale: Scale) -> str:
    return "".join(
        f'<span class="y" style="top:{at:.2%}">{text}</span>' for at, text in _y_ticks(chart, scale)
    )


def _x_labels(chart: Chart) -> str:
    ticks = linear_ticks(*chart.span, X_TICKS)
    texts = tick_labels(ticks)
    spans = [
        f'<span class="x{_side(chart, t)}" style="left:{_x(chart, t) / SIZE:.2%}">{text}</span>'
        for t, text in zip(ticks, texts, strict=True)
    ]
    return "".join(spans) + f'<span class="x-name">{escape(chart.x_name)}</span>'


def _side(chart: Chart, tick: float) -> str:
    """Labels near an edge stay within it."""
    at = _x(chart, tick) / SIZE
    return " first" if at < 0.03 else " final" if at > 0.97 else ""


def _curve(chart: Chart, scale: Scale, line: Line) -> str:
    kept = extremes(line.x, line.y, chart.columns, chart.span)
    x = chart.at(line.x[kept]) * SIZE
    y = (1 - scale.at(line.y[kept])) * SIZE
    if "dots" in line.look:
        pairs = zip(x.tolist(), y.tolist(), strict=True)
        path = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in pairs if math.isfinite(b))
    else:
        path = non_empty_path(x, y)
    name, alone = escape(line.name, quote=True), " dots" if np.isfinite(y).sum() == 1 else ""
    return f'<path class="line {line.look}{alone} {line.tone}" data-name="{name}" d="{path}"/>'


def non_empty_path(x: np.ndarray, y: np.ndarray) -> str:
    """`M.. ..L.. ..` through the points, broken where y is NaN; a lone one is a dot."""
    fine = np.isfinite(y)
    opens = fine & ~np.r_[False, fine[:-1]]
    alone = opens & ~np.r_[fine[1:], False]
    points = zip(x[fine].tolist(), y[fine].tolist(), opens[fine], alone[fine], strict=True)
    return "".join(
        f"{'M' if o else 'L'}{a:.1f} {b:.1f}{'h0' if d else ''}" for a, b, o, d in points
    )


def _stack(chart: Chart, scale: Scale) -> list[str]:
    """Each layer as steps over the stretches it tells of, on top of those before."""
    found = []
    base = np.zeros(len(chart.ends))
    x = chart.at(np.column_stack([chart.begins, chart.ends]).ravel()) * SIZE
    for layer in chart.layers:
        top = base + layer.heights
        low, high = (np.repeat((1 - scale.at(h)) * SIZE, 2) for h in (base, top))
        corners = [*zip(x, high, strict=True), *zip(x[::-1], low[::-1], strict=True)]
        path = "".join(f"{'L' if n else 'M'}{a:.1f} {b:.1f}" for n, (a, b) in enumerate(corners))
        name = escape(layer.name, quote=True)
        found.append(f'<path class="layer {layer.tone}" data-name="{name}" d="{path}Z"/>')
        base = top
    return found


def _feet(chart: Chart, tone: str, x: np.ndarray) -> str:
    at = np.unique(np.round(chart.at(x) * SIZE))
    path = "".join(f"M{a:.0f} {SIZE}v-30" for a in at.tolist())
    return f'<path class="foot {tone}" d="{path}"/>'


def _legend(chart: Chart) -> str:
    entries = [
        (line.name, line.tone, line.look, _said(chart, line))
        for line in chart.lines
        if line.in_legend
    ]
    entries += [(layer.name, layer.tone, "layer", layer.value) for layer in chart.layers]
    entries += [(name, tone, "foot", "") for name, tone, _ in chart.ticks_below]
    return "".join(
        f'<span class="key {tone}"><i class="{look}"></i>{escape(name)}'
        f'<b data-name="{escape(name, quote=True)}">{escape(value)}</b></span>'
        for name, tone, look, value in entries
    )


def _said(chart: Chart, line: Line) -> str:
    if line.value is not None:
        return line.value
    fine = line.y[np.isfinite(line.y)]
    return chart.form(float(fine[-1])) if len(fine) else ""


def _signs(chart: Chart, scale: Scale) -> str:
    spans = []
    for point in chart.points:
        top = 1 - float(scale.at(np.array([point.y]))[0])
        if math.isfinite(top):
            left = _x(chart, point.x) / SIZE
            spans.append(
                f'<i class="sign {point.kind} {point.tone}" style="left:{left:.2%};top:{top:.2%}"'
                f' title="{escape(point.label, quote=True)}"></i>'
            )
    return "".join(spans)


def values_drawn(chart: Chart) -> dict[str, list[list[float | None]]]:
    """Name -> x and y of the points drawn, for the reader's pointer; six digits are enough."""
    found = {}
    for line in chart.lines:
        if "lost" not in line.look and line.look not in ("limit", "joined"):
            kept = extremes(line.x, line.y, chart.columns, chart.span)
            found[line.name] = [_short(line.x[kept]), _short(line.y[kept])]
    for layer in chart.layers:
        found[layer.name] = [_short(chart.ends), _short(layer.heights)]
    return found


def _short(values: np.ndarray) -> list[float | None]:
    def told(value: float) -> float | None:
        if not math.isfinite(value):
            return None
        return int(value) if value == int(value) else float(f"{value:.6g}")

    return [told(value) for value in values.tolist()]
