"""The HTML file of a report: tables, and charts that plotly's inlined script draws."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from minimind.config.origin import DEFAULT
from minimind.config.run_record import NAME
from minimind.report import formats
from minimind.report.formats import PALETTE
from minimind.report.history import (
    PAUSES,
    PHASES,
    Configuration,
    Run,
    Start,
    number,
    read_configuration,
    read_runs,
)
from minimind.report.summary import NOUNS, STAGE_HEAD, Summary, describe, rank_figures, stage_rows
from minimind.runtime.drafts import remove_left
from minimind.runtime.durable_files import storing, write_whole

if TYPE_CHECKING:
    from minimind.report.charts import Chart

REPORT_NAME = "report.html"  # file in the out_dir of a run
GENERATOR = '<meta name="generator" content="minimind report">'
MAX_STARTS, MAX_SAMPLES, MAX_CHARACTERS = 60, 6, 600
FACTS = (
    *("commit", "hardware", "device", "peak_tflops", "peak_source"),
    *("micro_batch_rows", "accumulation_steps"),
)


def write_report(run_dirs: Sequence[Path], out: Path, remedy: str) -> int:
    """Write the page of one or several runs to `out`; return its bytes. Raise StorageError."""
    configurations = [*map(read_configuration, run_dirs)]
    return write_page(render_page(read_runs(run_dirs), configurations, time.time()), out, remedy)


def write_page(html: str, out: Path, remedy: str) -> int:
    """Write a page to `out`; return its bytes. Raise StorageError."""
    content = html.encode(errors="backslashreplace")  # a path may not be UTF-8
    with storing(str(out), remedy, needed=len(content)):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_left(out.parent, out.name)
        write_whole(out, content)
    return len(content)


def render_page(runs: Sequence[Run], configurations: Sequence[Configuration], now: float) -> str:
    """The HTML of one run, or of several compared."""
    return fill_page(*render_parts(runs, configurations, now), is_linked=True)


def render_parts(
    runs: Sequence[Run], configurations: Sequence[Configuration], now: float
) -> tuple[str, str, list[Chart]]:
    """Title, HTML and charts of the page."""
    from minimind.report.charts import Charts  # here, as every training run imports this module

    charts = Charts(runs, [one.grad_clip for one in configurations], now).draw()
    lines = sum(run.unread_lines for run in runs)
    unread = f" {formats.count(lines, 'line')} could not be read." if lines else ""
    unread += "".join(
        f" {escape(run.name)}: {NAME} {fault}." for run in runs if (fault := run.config_fault)
    )
    paths = ", ".join(f"<code>{escape(str(run.run_dir))}</code>" for run in runs)
    is_single = len(runs) == 1
    body = [
        _opening(Summary(runs[0], now)) if is_single else _comparison(runs, now),
        plots(charts, is_single),
        *(_details(run, now, "" if is_single else f": {escape(run.name)}") for run in runs),
        _flags(configurations[0]) if is_single else _differences(runs, configurations),
        f"<footer>Written {formats.timestamp(now)} by minimind report from metrics.jsonl in "
        f"{paths}.{unread}</footer>",
    ]
    title = f"{', '.join(run.name for run in runs)}: training report"
    return title, "\n".join(body), charts


def plots(charts: Sequence[Chart], is_single: bool) -> str:
    """Empty elements for the charts, in two columns; `is_single`: the first two take a row each."""
    figures = "".join(
        f'<figure id="{chart.key}"><figcaption><h3>{escape(chart.title)}</h3>'
        f'<span class="unit">{escape(chart.unit)}</span></figcaption><div class="plot"></div>'
        "</figure>"
        for chart in charts
    )
    return (
        "<noscript><p>The charts need JavaScript.</p></noscript>"
        f'<div id="charts" class="charts{" single" * is_single}">{figures}</div>'
    )


def figures(charts: Sequence[Chart]) -> str:
    """A JSON object: plotly figures by key.

    Each trace gets a `uid`, the same in every drawing of a chart: the letters of its name, as its
    figures change ("3 checkpoints"), and a count. Plotly writes it into a CSS selector.
    """
    for chart in charts:
        counts: Counter[str] = Counter()
        traces: Any = chart.figure.data
        for trace in traces:
            word = re.sub(r"s\b|[^a-z]+", "-", (trace.name or "").lower()).strip("-")
            counts[word] += 1
            trace.uid = f"trace-{word}-{counts[word]}"
    pairs = ",".join(f'"{chart.key}":{chart.figure.to_json(remove_uids=False)}' for chart in charts)
    return f"{{{pairs}}}"


def fill_page(
    title: str, body: str, charts: Sequence[Chart], is_linked: bool, is_live: bool = False
) -> str:
    """A whole HTML file from its body and the charts in it; linked ones share one x axis.

    A live one follows the server that it came from (`watch.py`).
    """
    from plotly.offline import get_plotlyjs

    facts = f'"dark":{json.dumps(dict(PALETTE.values()))},"isLinked":{json.dumps(is_linked)}'
    data = f'{{{facts},"charts":{figures(charts)}}}'
    folder = Path(__file__).parent
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    light, dark = (
        " ".join(f"--{name}: {colors[n]};" for name, colors in PALETTE.items()) for n in (0, 1)
    )
    return template.substitute(
        **{"generator": GENERATOR, "nonce": secrets.token_urlsafe(), "light": light, "dark": dark},
        title=escape(title),
        connect=" connect-src 'self';" if is_live else "",
        live='<p id="live"><b role="status"></b> <span></span></p>' if is_live else "",
        follow=(folder / "live.js").read_text(encoding="utf-8") if is_live else "",
        body=body,
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        data=data.replace("<", "\\u003c"),
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """A table of cells that are HTML already; it scrolls by itself on a narrow screen."""
    names = [escape(name) for name in head]
    cells = [f'<td data-name="{name}">' if kind == "starts" else "<td>" for name in names]
    body = "".join(
        f"<tr>{''.join(f'{cell}{one}</td>' for cell, one in zip(cells, row, strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>'
        f"{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _opening(summary: Summary) -> str:
    run, sentences = (
        summary.run,
        (*(summary.course(), summary.setbacks(), summary.verdict, summary.placed),),
    )
    lead = " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)
    lead = lead if run.starts else "Nothing is recorded yet."
    starts = f"in {formats.count(summary.starts, 'start')}"
    starts += f", {formats.count(summary.lost_steps, 'step')} lost" if summary.lost_steps else ""
    times = {"time": (formats.duration(summary.seconds), starts)}
    if math.isfinite(summary.step_ms):
        times["step"] = (formats.milliseconds(summary.step_ms), " on average")
    tiles = "".join(
        f'<div class="tile"><span>{name}</span><b>{value}</b>'
        f"<small>{escape(remark.lstrip(', '))}</small></div>"
        for name, (value, remark) in {**summary.figures(), **times}.items()
    )
    html = f'<h1>{escape(run.name)}</h1><p class="quiet">{escape(summary.description())}</p>'
    html += f'<p class="lead">{escape(lead)}</p>{_progress(summary)}'
    html += f'<div class="tiles">{tiles}</div>' if run.starts else ""
    return html + _shares_bar("Where the time went", summary) + "<h2>Course</h2>"


def _comparison(runs: Sequence[Run], now: float) -> str:
    from minimind.report.charts import run_style

    rows, bars = [], ""
    for n, run in enumerate(runs):
        one, tone = Summary(run, now), f"--c: var(--{run_style(n)[0]})"
        best = one.best
        bars += _shares_bar(run.name, one)
        bars += f'<p class="quiet">{escape(one.verdict)}</p>' if one.verdict else ""
        figures = (
            f'<span class="key" style="{tone}"><i></i>{escape(run.name)}</span>',
            f"{one.step:,}{_progress(one)}",
            *map(formats.figure, (one.tokens, one.mean_loss)),
            f"{best['val_loss']:.4f} <small>at {best['step']:,.0f}</small>"
            if best
            else formats.DASH,
            formats.figure(one.tokens_per_second),
            formats.milliseconds(one.step_ms),
            formats.memory(one.memory_mib),
            formats.duration(one.seconds),
            *(f"{one.resumes}", f"{one.crashes}"),
            f'<span class="{one.kind}">{escape(one.ending + one.time_left())}</span>',
        )
        rows.append(figures)
    head = ("run", "steps", "tokens", "loss, smoothed", "best validation", "tokens/s", "step")
    table = html_table((*head, "memory", "time", "resumes", "crashes", "end"), rows, "final")
    bars = f"<h2>Where the time went</h2>{bars}" if bars else ""
    return f"<h1>{formats.count(len(runs), 'run')} compared</h1>{table}{bars}<h2>Course</h2>"


def _progress(summary: Summary) -> str:
    """How much of a run is done, as a bar; empty for one that has ended well or has no end."""
    if not summary.total_steps or summary.kind == "done":
        return ""
    share = min(1.0, summary.step / summary.total_steps)
    return (
        f'<div class="progress" role="img" aria-label="{share:.0%} done">'
        f'<i style="width: {share:.2%}"></i><b>{share:.0%}</b></div>'
    )


def _shares_bar(title: str, summary: Summary) -> str:
    """The shares of the measured time as a bar with a legend."""
    parts, keys = "", ""
    for name in (*PHASES, *PAUSES):
        share = summary.shares.get(name, 0.0)
        if share >= 0.0005:
            tone, noun = f"--c: var(--{name})", NOUNS.get(name, name)
            parts += f'<i style="{tone}; width: {share:.3%}" title="{noun}"></i>'
            keys += f'<span class="key" style="{tone}"><i></i>{noun}'
            keys += f' <b data-share="{name}">{formats.percent(share)}</b></span>'
    return f'<h3>{escape(title)}</h3><div class="bar">{parts}</div><p>{keys}</p>' if parts else ""


def _details(run: Run, now: float, suffix: str) -> str:
    """Starts, ranks, versions and samples of a run."""
    html = ""
    if run.starts:
        ends = zip(run.starts, run.outcomes(now), strict=True)
        rows = [_start_row(start, *outcome) for start, outcome in ends]
        half = MAX_STARTS // 2
        if len(rows) > MAX_STARTS:
            more = (f"{len(rows) - MAX_STARTS} more", *[""] * 5)
            rows = [*rows[:half], more, *rows[-half:]]
        head = ("started", "steps", "time", "processes", "end", "steps lost")
        html = f"<h2>Starts{suffix}</h2>{html_table(head, rows, 'starts')}"
    if scored := run.events("scores"):
        head, *rows = formats.scores_table(scored[-1])
        cells = [tuple(map(escape, row)) for row in rows]
        took = formats.duration(sum(number(event.get("seconds"), 0.0) for event in scored))
        times = formats.count(len(scored), "time")
        html += f"<h2>Scores at step {number(scored[-1]['step']):,.0f}{suffix}</h2>"
        html += html_table(head, cells, "final")
        html += f'<p class="quiet">Scored {times}, in {took}.</p>'
    if stages := stage_rows(run):
        cells = [tuple(map(escape, row)) for row in stages]
        html += f"<h2>Stages{suffix}</h2>{html_table(STAGE_HEAD, cells, 'stages')}"
    step, ranks = rank_figures(run)
    if ranks:
        cells = [(*row[:4], escape(row[4])) for row in ranks]
        table = html_table(("", "least", "median", "largest", "of"), cells, "ranks")
        html += f"<h2>Ranks, up to step {step:,.0f}</h2>{table}"
        html += '<p class="quiet">Each time is the median over the steps of a rank. Ranks wait for'
        html += " one another in the backward pass: a late rank shows a long forward pass, or"
        html += " little communication.</p>"
    versions = run.fact("versions")
    facts = [f"{k} {v}" for k, v in versions.items()] if isinstance(versions, dict) else []
    facts += [f"{name} {run.fact(name)}" for name in FACTS if run.fact(name) is not None]
    html += _pairs("Versions and hardware", map(escape, facts))
    samples = [*{str(event.get("number")): event for event in run.events("sample")}.values()]
    if samples:
        html += f"<h2>Samples at step {number(samples[-1].get('step')):,.0f}</h2>"
    for event in samples[:MAX_SAMPLES]:
        prompt, text = (str(event.get(name) or "") for name in ("prompt", "text"))
        html += f"<blockquote><b>{escape(prompt)}</b>{escape(text[:MAX_CHARACTERS])}</blockquote>"
    return html


def _start_row(start: Start, kind: str, sentence: str) -> tuple[str, ...]:
    facts, first, last = start.facts, start.first_step, start.last_step
    steps = formats.DASH if math.isinf(first) else f"{first:,.0f}"
    steps += f" to {last:,.0f}" if math.isfinite(last) else ""
    remarks = []
    for event in start.events:
        if event["event"] == "checkpoint_rejected":
            remarks.append(formats.skipped(*map(event.get, ("path", "file", "reason"))))
        elif event["event"] == "mirror_failed":
            remarks.append(f"step {event.get('step')}: not mirrored: {event.get('reason')}")
        elif event["event"] == "checkpoint_fetched":
            remarks.append(f"fetched {event.get('url')}")
        elif event["event"] == "run_changed" and isinstance(event.get("changes"), list):
            remarks.append("changed " + "; ".join(map(str, event["changes"])))
    notes = "".join(f"<br><small>{escape(remark)}</small>" for remark in remarks[:10])
    return (
        formats.timestamp(start.first_time),
        steps,
        formats.duration(start.seconds),
        "no run_start recorded" if start.is_implied else escape(describe(facts)),
        f'<span class="{kind}">{escape(sentence)}</span>{notes}',
        f"{start.lost_steps:,}" if start.lost_steps else "",
    )


def _flags(config: Configuration) -> str:
    """Given flags with their sources; defaults and DeepSpeed's values as paragraphs."""
    given = [(name, *both) for name, both in config.flags.items() if both[1] != DEFAULT]
    table = html_table(("flag", "value", "source"), [[*map(_code, row)] for row in given], "flags")
    if not config.flags:
        table = '<p class="quiet">No config.yaml lies beside metrics.jsonl.</p>'
    defaults = {name: value for name, (value, by) in config.flags.items() if by == DEFAULT}
    html = f"<h2>Configuration</h2>{table}"
    for title, values in (("Defaults", defaults), ("DeepSpeed", config.deepspeed)):
        html += _pairs(title, (f"{escape(k)} {_code(v)}" for k, v in values.items()))
    return html


def _pairs(title: str, values: Iterable[str]) -> str:
    pairs = " ".join(f"<span>{value}</span>" for value in values)
    return f'<p class="pairs"><b>{title}</b> {pairs}</p>' if pairs else ""


def _code(text: str) -> str:
    attribute = ' class="flag"' if text.startswith("--") and " " not in text else ""
    return f"<code{attribute}>{escape(text)}</code>"


def _differences(runs: Sequence[Run], configurations: Sequence[Configuration]) -> str:
    """Flags whose values differ between runs; out_dir excepted."""
    names = dict.fromkeys(name for config in configurations for name in config.flags)
    rows = [(n, *(config.flags.get(n, ("",))[0] for config in configurations)) for n in names]
    rows = [[*map(_code, row)] for row in rows if row[0] != "out_dir" and len({*row[1:]}) > 1]
    table = html_table(("flag", *(run.name for run in runs)), rows, "flags")
    same = '<p class="quiet">The runs were given the same flags.</p>'
    return f"<h2>What differs</h2>{table if rows else same}"
