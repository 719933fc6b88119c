"""The HTML file of a report: tables, and charts that plotly's inlined script draws."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from minimind.report.formats import (
    DASH,
    format_count,
    format_duration,
    format_mib,
    format_ms,
    format_number,
    format_percent,
    format_time,
)
from minimind.report.records import (
    PAUSES,
    PHASES,
    Configuration,
    flag_differences,
    number,
    read_configuration,
    read_records,
)
from minimind.report.runs import Run, name_runs
from minimind.report.summary import (
    NOUNS,
    Summary,
    backend_name,
    describe,
    describe_course,
    describe_results,
    describe_setbacks,
    rank_figures,
    summarize,
)
from minimind.runtime.durable_files import storing, write_whole

REPORT_NAME = "report.html"  # in the out_dir of a run
GENERATOR = '<meta name="generator" content="minimind report">'
MAX_STARTS = 60  # the first and last half of them
MAX_SAMPLES, MAX_CHARACTERS = 6, 600
FACTS = ("hardware", "device", "peak_tflops", "peak_source", "micro_batch_rows")


def write_report(run_dirs: Sequence[Path], out: Path, remedy: str) -> int:
    """Write the page of one or several runs to `out`; return its bytes. Raise StorageError."""
    now = time.time()
    runs = name_runs([read_records(run_dir) for run_dir in run_dirs])
    page = render_page(runs, [read_configuration(run_dir) for run_dir in run_dirs], now)
    content = page.encode(errors="backslashreplace")  # a path may not be UTF-8
    with storing(str(out), remedy, needed=len(content)):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, content)
    return len(content)


def render_page(runs: Sequence[Run], configurations: Sequence[Configuration], now: float) -> str:
    """The HTML of one run, or of several compared."""
    from plotly.offline import get_plotlyjs  # only here, as every training run imports this module

    from minimind.report.charts import PALETTE, Charts, run_style

    charts = Charts(runs, [one.grad_clip for one in configurations], now).draw()
    figures = ",".join(f'"{chart.key}":{chart.figure.to_json()}' for chart in charts)
    dark = json.dumps(dict(PALETTE.values()))
    plots = "".join(
        f'<figure class="{"wide" * chart.is_wide}" id="{chart.key}"><figcaption>'
        f'<h3>{escape(chart.title)}</h3><span class="unit">{escape(chart.unit)}</span>'
        '</figcaption><div class="plot"></div></figure>'
        for chart in charts
    )
    summaries = [summarize(run, now) for run in runs]
    tones = [run_style(n)[0] for n in range(len(runs))]
    opening = _opening(runs[0], summaries[0]) if len(runs) == 1 else ""
    unread = sum(run.records.unread_lines for run in runs)
    paths = ", ".join(f"<code>{escape(str(run.run_dir))}</code>" for run in runs)
    body = [
        opening or _comparison(runs, summaries, tones),
        "<noscript><p>The charts need JavaScript.</p></noscript>",
        f'<div class="charts">{plots}</div>',
        *(_details(run, now, len(runs) > 1) for run in runs),
        _flags_table(configurations[0]) if len(runs) == 1 else _differences(runs, configurations),
        f"<footer>Written {format_time(now)} by minimind report from metrics.jsonl in {paths}."
        + (f" {format_count(unread, 'line')} could not be read." if unread else "")
        + "</footer>",
    ]
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        generator=GENERATOR,
        nonce=secrets.token_urlsafe(),
        title=escape(f"{', '.join(run.name for run in runs)}: training report"),
        light=" ".join(f"--{name}: {colors[0]};" for name, colors in PALETTE.items()),
        dark=" ".join(f"--{name}: {colors[1]};" for name, colors in PALETTE.items()),
        body="\n".join(body),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        figures=f'{{"dark":{dark},"charts":{{{figures}}}}}'.replace("<", "\\u003c"),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """A table of cells that are HTML already; it scrolls by itself on a narrow screen."""
    names = [escape(name) for name in head]
    is_stacked = kind == "starts"  # on a phone: one line for each cell
    cells = [f'<td data-name="{name}">' if is_stacked else "<td>" for name in names]
    body = "".join(
        f"<tr>{''.join(f'{cell}{one}</td>' for cell, one in zip(cells, row, strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>'
        f"{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _opening(run: Run, summary: Summary) -> str:
    sentences = (describe_course(summary), describe_results(summary), describe_setbacks(summary))
    lead = " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)
    if not run.records.starts:
        lead = "Nothing is recorded yet."
    head = f'<h1>{escape(run.name)}</h1><p class="quiet">{escape(describe(run))}</p>'
    head += f'<p class="lead">{escape(lead)}</p>'
    if not run.records.starts:
        return head
    best, beside = summary.best or {}, ""
    if best:
        bits = best["val_bpb"]
        beside = f"step {best['step']:,.0f}"
        beside += f", {bits:.3f} bits/byte" if math.isfinite(bits) else ""
    steps = f"{summary.step:,} "
    steps += "steps" if summary.total_steps is None else f"of {summary.total_steps:,} steps"
    starts = f"in {summary.starts} starts" if summary.starts > 1 else "in one go"
    if summary.lost_steps and summary.starts > 1:
        starts += f", {format_count(summary.lost_steps, 'step')} lost"
    tiles = [
        ("loss", format_number(summary.loss), f"{format_number(summary.mean_loss)} smoothed"),
        ("best validation", format_number(best["val_loss"]) if best else "none", beside),
        ("tokens", f"{summary.tokens:,.0f}" if summary.tokens > 0 else "0", steps),
        (
            "tokens/s",
            format_number(summary.tokens_per_second),
            f"{format_ms(summary.step_ms)} a step",
        ),
        ("time", format_duration(summary.seconds), starts),
        ("memory", format_mib(summary.memory_mib), "peak of one process"),
    ]
    if math.isfinite(summary.mfu):
        tiles.append(("MFU", format_percent(summary.mfu), "of the stated peak"))
    shown = "".join(
        f'<div class="tile"><span>{name}</span><b>{value}</b><small>{escape(small)}</small></div>'
        for name, value, small in tiles
    )
    bar = f"<h3>Where the time went</h3>{_shares_bar(summary)}" if summary.shares else ""
    return f'{head}<div class="tiles">{shown}</div>{bar}<h2>Course</h2>'


def _comparison(runs: Sequence[Run], summaries: Sequence[Summary], tones: Sequence[str]) -> str:
    rows, bars = [], ""
    for run, one, tone in zip(runs, summaries, tones, strict=True):
        name, best = escape(run.name), one.best
        bars += f"<h3>{name}</h3>{_shares_bar(one)}" if one.shares else ""
        figures = (
            f'<span class="key" style="--c: var(--{tone})"><i></i>{name}</span>',
            f"{one.step:,}",
            format_number(one.tokens),
            format_number(one.mean_loss),
            f"{best['val_loss']:.4f} <small>at {best['step']:,.0f}</small>" if best else DASH,
            format_number(one.tokens_per_second),
            format_ms(one.step_ms),
            format_mib(one.memory_mib),
            format_duration(one.seconds),
            f"{one.resumes}",
            f"{one.crashes}",
            f'<span class="{one.kind}">{escape(one.ending)}</span>',
        )
        rows.append(figures)
    head = ("run", "steps", "tokens", "loss, smoothed", "best validation", "tokens/s", "step")
    table = _table((*head, "memory", "time", "resumes", "crashes", "end"), rows, "final")
    bars = f"<h2>Where the time went</h2>{bars}" if bars else ""
    return f"<h1>{format_count(len(runs), 'run')} compared</h1>{table}{bars}<h2>Course</h2>"


def _shares_bar(summary: Summary) -> str:
    """The shares of the measured time as a bar with a legend."""
    parts, keys = "", ""
    for name in (*PHASES, *PAUSES):
        share = summary.shares.get(name, 0.0)
        if share >= 0.0005:
            tone, noun = f"--c: var(--{name})", NOUNS.get(name, name)
            parts += f'<i style="{tone}; width: {share:.3%}" title="{noun}"></i>'
            keys += f'<span class="key" style="{tone}"><i></i>{noun}'
            keys += f' <b data-share="{name}">{format_percent(share)}</b></span>'
    return f'<div class="bar">{parts}</div><p>{keys}</p>'


def _details(run: Run, now: float, is_compared: bool) -> str:
    """Starts, ranks, versions and samples of a run."""
    parts: list[str] = []
    if run.records.starts:
        name = f": {escape(run.name)}" if is_compared else ""
        parts = [f"<h2>Starts{name}</h2>", _starts_table(run, now)]
    step, rows = rank_figures(run)
    if rows:
        cells = [(*row[:4], escape(f"rank {row[4]}")) for row in rows]
        parts += [f"<h2>Ranks, up to step {step:,.0f}</h2>"]
        parts += [_table(("", "least", "median", "largest", "of"), cells, "ranks")]
        parts += [
            '<p class="quiet">Each time is the median over the steps of a rank. Ranks wait for one'
            " another in the backward pass: a late rank shows a long forward pass, or little"
            " communication.</p>"
        ]
    versions = run.fact("versions")
    facts = [f"{k} {v}" for k, v in versions.items()] if isinstance(versions, dict) else []
    names = ("commit", *FACTS, "accumulation_steps")
    facts += [f"{name} {run.fact(name)}" for name in names if run.fact(name) is not None]
    if facts:
        pairs = " ".join(f"<span>{escape(fact)}</span>" for fact in facts)
        parts.append(f'<p class="pairs"><b>Versions and hardware</b> {pairs}</p>')
    samples = {str(event.get("number")): event for event in run.events("sample")}
    if samples:
        step = number([*samples.values()][-1].get("step"))
        parts.append(f"<h2>Samples at step {step:,.0f}</h2>")
    for event in [*samples.values()][:MAX_SAMPLES]:
        prompt, text = (str(event.get(name) or "") for name in ("prompt", "text"))
        shown = f"<b>{escape(prompt)}</b>{escape(text[:MAX_CHARACTERS])}"
        parts.append(f"<blockquote>{shown}</blockquote>")
    return "".join(parts)


def _starts_table(run: Run, now: float) -> str:
    rows: list[tuple[str, ...]] = []
    for segment, (kind, sentence) in zip(run.segments, run.outcomes(now), strict=True):
        start, facts = segment.start, segment.start.facts
        first, last = start.first_step, start.last_step
        steps = DASH if math.isinf(first) else f"{first:,.0f}"
        steps += f" to {last:,.0f}" if math.isfinite(last) else ""
        world, device = number(facts.get("world_size")), facts.get("device")
        size = format_count(int(world), "process", "processes") if math.isfinite(world) else ""
        backend = backend_name(facts.get("backend"), facts.get("zero_stage"))
        parts = (f"{size} ({device})" if size and device else size, backend)
        on = ", ".join(filter(None, (*parts, str(facts.get("dtype") or ""))))
        rows.append(
            (
                format_time(start.first_time),
                steps,
                format_duration(segment.seconds),
                "no run_start recorded" if start.is_implied else escape(on),
                f'<span class="{kind}">{escape(sentence)}</span>{_remarks(start.events)}',
                f"{segment.lost_steps:,}" if segment.lost_steps else "",
            )
        )
    if len(rows) > MAX_STARTS:
        half = MAX_STARTS // 2
        rest = (f"{len(rows) - MAX_STARTS} more", "", "", "", "", "")
        rows = [*rows[:half], rest, *rows[-half:]]
    return _table(("started", "steps", "time", "processes", "end", "steps lost"), rows, "starts")


def _remarks(events: Sequence[dict[str, Any]]) -> str:
    """Rejected checkpoints and allowed changes at a start."""
    remarks = []
    for event in events:
        if event["event"] == "checkpoint_rejected":
            problem = f"{event.get('file')} {event.get('reason')}"
            remarks.append(f"passed over {event.get('path')}: {problem}")
        elif event["event"] == "run_changed" and isinstance(event.get("changes"), list):
            remarks.append("changed " + "; ".join(map(str, event["changes"])))
    return "".join(f"<br><small>{escape(remark)}</small>" for remark in remarks[:10])


def _flags_table(one: Configuration) -> str:
    """Given flags with their sources; defaults and DeepSpeed's values as paragraphs."""
    if not one.flags:
        return '<h2>Configuration</h2><p class="quiet">No config.yaml lies beside metrics.jsonl.</p>'
    given = [(name, *both) for name, both in one.flags.items() if both[1] != "default"]
    defaults = {name: value for name, (value, source) in one.flags.items() if source == "default"}
    rows = [[_code(name), _code(value), _code(source)] for name, value, source in given]
    html = f"<h2>Configuration</h2>{_table(('flag', 'value', 'source'), rows, 'flags')}"
    for title, values in (("Defaults", defaults), ("DeepSpeed", one.deepspeed)):
        pairs = " ".join(f"<span>{escape(k)} {_code(v)}</span>" for k, v in values.items())
        html += f'<p class="pairs"><b>{title}</b> {pairs}</p>' if pairs else ""
    return html


def _code(text: str) -> str:
    kind = ' class="flag"' if text.startswith("--") and " " not in text else ""
    return f"<code{kind}>{escape(text)}</code>"


def _differences(runs: Sequence[Run], configurations: Sequence[Configuration]) -> str:
    rows = [[_code(x) for x in (name, *xs)] for name, xs in flag_differences(configurations)]
    table = _table(("flag", *(run.name for run in runs)), rows, "flags")
    same = '<p class="quiet">The runs were given the same flags.</p>'
    return f"<h2>What differs</h2>{table if rows else same}"
