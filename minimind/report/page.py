"""The page: one HTML file that needs nothing else, neither network nor scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from html import escape

from minimind.report.configuration import Configuration
from minimind.report.drawing import drawn, values_drawn
from minimind.report.figures import Best, Figures
from minimind.report.moments import axis_of
from minimind.report.numbers import count, duration, exact, mebibytes, milliseconds, moment, percent
from minimind.report.panels import charts_of
from minimind.report.runs import Run
from minimind.report.script import SCRIPT
from minimind.report.style import style
from minimind.report.tables import (
    configuration_table,
    differences_table,
    final_table,
    ranks_table,
    samples_list,
    shares_bar,
    starts_table,
)
from minimind.report.words import course, results, setbacks, what_it_is

GENERATOR = '<meta name="generator" content="minimind report">'


def page(
    runs: Sequence[Run], each: Sequence[Figures], given: Sequence[Configuration], now: float
) -> str:
    """The HTML of one run, or of several compared."""
    charts = charts_of(runs, [one.grad_clip for one in given], now)
    is_alone = " alone" if len(runs) == 1 else ""
    values = {chart.key: values_drawn(chart) for chart in charts}
    body = [
        _opening(runs, each),
        f'<div class="charts{is_alone}">{"".join(map(drawn, charts))}</div>',
        *_closing(runs, given, now),
        f"<footer>Written {moment(now)} by minimind report from metrics.jsonl in "
        f"{', '.join(f'<code>{escape(str(run.place))}</code>' for run in runs)}.{_unread(runs)}"
        "</footer>",
    ]
    title = escape(f"{', '.join(run.name for run in runs)}: training report")
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    data = json.dumps(values, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    axis = axis_of(runs).name
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style()}</style></head>\n"
        f'<body data-axis="{axis}"><main>\n{chr(10).join(body)}\n</main>\n'
        f'<script type="application/json" id="drawn">{data}</script>\n'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _opening(runs: Sequence[Run], each: Sequence[Figures]) -> str:
    if len(runs) > 1:
        bars = "".join(
            f"<h3>{escape(run.name)}</h3>{shares_bar(one)}"
            for run, one in zip(runs, each, strict=True)
            if one.shares
        )
        bars = f"<h2>Where the time went</h2>{bars}" if bars else ""
        title = f"<h1>{count(len(runs), 'run')} compared</h1>"
        return f"{title}{final_table(runs, each)}{bars}<h2>Course</h2>"
    run, one = runs[0], each[0]
    told = f'<p class="quiet">{escape(what_it_is(run))}</p>' if what_it_is(run) else ""
    lead = f'<h1>{escape(run.name)}</h1>{told}<p class="lead">{escape(_sentence(run, one))}</p>'
    if not run.records.starts:
        return lead
    bar = f"<h3>Where the time went</h3>{shares_bar(one)}" if one.shares else ""
    return f'{lead}<div class="tiles">{_tiles(one)}</div>{bar}<h2>Course</h2>'


def _sentence(run: Run, one: Figures) -> str:
    if not run.records.starts:
        return "Nothing is recorded yet."
    text = [course(one), results(one), setbacks(one)]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in text if part)


def _tiles(one: Figures) -> str:
    of = f"of {one.total_steps:,} steps" if one.total_steps is not None else "steps"
    best = one.best
    told = [
        ("loss", exact(one.loss), f"{exact(one.mean_loss)} smoothed"),
        ("best validation", exact(best.loss) if best else "none", _beside(best)),
        ("tokens", f"{one.tokens:,.0f}" if one.tokens > 0 else "0", f"{one.step:,} {of}"),
        ("tokens/s", exact(one.tokens_per_second), f"{milliseconds(one.step_ms)} a step"),
        ("time", duration(one.seconds), _interrupted(one)),
        ("memory", mebibytes(one.memory_mib), "peak of one process"),
    ]
    if math.isfinite(one.mfu):
        told.append(("MFU", percent(one.mfu), "of the stated peak"))
    return "".join(
        f'<div class="tile"><span>{name}</span><b>{value}</b><small>{escape(small)}</small></div>'
        for name, value, small in told
    )


def _beside(best: Best | None) -> str:
    if best is None:
        return ""
    is_known = math.isfinite(best.bits_per_byte)
    return f"step {best.step:,}" + (f", {best.bits_per_byte:.3f} bits/byte" if is_known else "")


def _interrupted(one: Figures) -> str:
    if one.starts < 2:
        return "in one go"
    lost = f", {count(one.lost_steps, 'step')} lost" if one.lost_steps else ""
    return f"in {one.starts} starts{lost}"


def _closing(runs: Sequence[Run], given: Sequence[Configuration], now: float) -> list[str]:
    """The tables below the charts."""
    found = []
    for run, one in zip(runs, given, strict=True):
        of = f": {escape(run.name)}" if len(runs) > 1 else ""
        if run.records.starts:
            found.append(f"<h2>Starts{of}</h2>{starts_table(run, now)}")
            found += [ranks_table(run), _versions(run, of)]
        found.append(samples_list(run))
        if not of:
            found.append(f"<h2>Configuration</h2>{configuration_table(one)}")
    if len(runs) > 1:
        found.append(f"<h2>What differs</h2>{differences_table(runs, given)}")
    return found


def _versions(run: Run, of: str) -> str:
    versions, commit = run.fact("versions"), run.fact("commit")
    told = [f"{k} {v}" for k, v in versions.items()] if isinstance(versions, dict) else []
    told += [f"commit {commit}"] if commit else []
    names = (
        "hardware",
        "device",
        "peak_tflops",
        "peak_source",
        "micro_batch_rows",
        "accumulation_steps",
    )
    told += [f"{name} {run.fact(name)}" for name in names if run.fact(name) is not None]
    if not told:
        return ""
    pairs = " ".join(f"<span>{escape(one)}</span>" for one in told)
    return f'<p class="pairs"><b>Versions and hardware</b> {pairs}</p>'


def _unread(runs: Sequence[Run]) -> str:
    unread = sum(run.records.unread_lines for run in runs)
    return f" {count(unread, 'line')} could not be read." if unread else ""
