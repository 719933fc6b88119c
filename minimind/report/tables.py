"""The tables of a page: starts, final figures, configuration, ranks, samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from minimind.report.configuration import Configuration, differences
from minimind.report.figures import WORDS, Figures
from minimind.report.numbers import (
    DASH,
    count,
    duration,
    exact,
    mebibytes,
    milliseconds,
    moment,
    percent,
)
from minimind.report.panels import tone_of
from minimind.report.ranks import spreads
from minimind.report.records import PAUSES, PHASES, number
from minimind.report.runs import Run, how_it_ended
from minimind.report.words import backend_of

MOST_STARTS = 60  # of which the first and last are shown
SHOWN_SAMPLES, SHOWN_LETTERS = 6, 600


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A <table> of cells that are HTML already; on a phone it scrolls by itself."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    is_stacked = kind == "starts"  # on a phone, where each cell needs its name
    names = [f' data-name="{escape(name, quote=True)}"' if is_stacked else "" for name in head]
    body = "".join(
        f"<tr>{''.join(f'<td{n}>{c}</td>' for n, c in zip(names, row, strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def starts_table(run: Run, now: float) -> str:
    """One row for each start: when, from where, on what, how far, how it ended."""
    rows: list[tuple[str, ...]] = []
    for stretch in run.stretches:
        start, facts = stretch.start, stretch.start.facts
        kind, words = how_it_ended(stretch, stretch is run.stretches[-1], now)
        first, last = start.first_step, start.last_step
        steps = DASH if math.isinf(first) else f"{first:,.0f}"
        steps += f" to {last:,.0f}" if math.isfinite(last) else ""
        on = _processes(facts)
        if start.is_implied:
            on = "no run_start recorded"
        lost = f"{stretch.lost_steps:,}" if stretch.lost_steps else ""
        end = f'<span class="how {kind}">{escape(words)}</span>{_remarks(start.events)}'
        when, seconds = moment(start.first_time), duration(stretch.seconds)
        rows.append((when, steps, seconds, escape(on), end, lost))
    if len(rows) > MOST_STARTS:
        left = len(rows) - MOST_STARTS
        half = MOST_STARTS // 2
        rows = [*rows[:half], (f"{left} more", "", "", "", "", ""), *rows[-half:]]
    head = ("started", "steps", "time", "processes", "end", "steps lost")
    return table(head, rows, "starts")


def _processes(facts: dict[str, Any]) -> str:
    """`2 processes (cpu), DeepSpeed ZeRO-2, float32`."""
    world, device = number(facts.get("world_size")), facts.get("device")
    told = [count(int(world), "process", "processes")] if math.isfinite(world) else []
    told = [f"{told[0]} ({device})"] if told and device else told
    told += [
        backend_of(facts.get("backend"), facts.get("zero_stage")),
        str(facts.get("dtype") or ""),
    ]
    return ", ".join(one for one in told if one)


def _remarks(events: Sequence[dict[str, Any]]) -> str:
    """What was said at the start: checkpoints passed over, changes that were allowed."""
    told = []
    for event in events:
        if event["event"] == "checkpoint_rejected":
            why = f"{event.get('file')} {event.get('reason')}"
            told.append(f"passed over {event.get('path')}: {why}")
        elif event["event"] == "run_changed" and isinstance(event.get("changes"), list):
            told.append("changed " + "; ".join(map(str, event["changes"])))
    return "".join(f"<br><small>{escape(one)}</small>" for one in told[:10])


def final_table(runs: Sequence[Run], each: Sequence[Figures]) -> str:
    """A row for each run with the figures it came to."""
    rows = []
    for n, (run, f) in enumerate(zip(runs, each, strict=True)):
        best = f"{f.best.loss:.4f} <small>at {f.best.step:,}</small>" if f.best else DASH
        name = f'<span class="key {tone_of(n)}"><i></i>{escape(run.name)}</span>'
        end = f'<span class="how {f.kind}">{escape(f.ending)}</span>'
        losses = (f"{f.step:,}", exact(f.tokens), exact(f.mean_loss), best)
        costs = (exact(f.tokens_per_second), milliseconds(f.step_ms), mebibytes(f.memory_mib))
        course = (duration(f.seconds), f"{f.resumes}", f"{f.crashes}")
        rows.append((name, *losses, *costs, *course, end))
    head = ("run", "steps", "tokens", "loss, smoothed", "best validation", "tokens/s", "step")
    return table((*head, "memory", "time", "resumes", "crashes", "end"), rows, "final")


def shares_bar(figures: Figures) -> str:
    """Where the measured time went, as one bar and in words."""
    parts, words = [], []
    for name in (*PHASES, *PAUSES):
        share = figures.shares.get(name, 0.0)
        if share >= 0.0005:
            shown = escape(WORDS.get(name, name))
            parts.append(f'<i class="p-{name}" style="width:{share:.3%}" title="{shown}"></i>')
            told = f'<b data-share="{name}">{percent(share)}</b>'
            words.append(f'<span class="key p-{name}"><i class="layer"></i>{shown} {told}</span>')
    return f'<div class="bar">{"".join(parts)}</div><p class="legend">{"".join(words)}</p>'


def configuration_table(one: Configuration) -> str:
    """What was asked for with its source; what is a default in one paragraph."""
    if not one.flags:
        return '<p class="quiet">No config.yaml lies beside metrics.jsonl.</p>'
    asked = [flag for flag in one.flags if not flag.is_default]
    rows = [[_code(x) for x in (f.name, f.text, f.source)] for f in asked]
    left = [flag for flag in one.flags if flag.is_default]
    pairs = [f"<span>{escape(f.name)} <code>{escape(f.text)}</code></span>" for f in left]
    half = -(-len(rows) // 2) if len(rows) > 12 else len(rows)
    head = ("flag", "value", "source")
    halves = (table(head, part, "flags") for part in (rows[:half], rows[half:]) if part)
    text = f'<div class="halves">{"".join(halves)}</div>'
    text += f'<p class="pairs"><b>Defaults</b> {" ".join(pairs)}</p>' if pairs else ""
    keys = [f"<span>{escape(f.name)} <code>{escape(f.text)}</code></span>" for f in one.deepspeed]
    return text + (f'<p class="pairs"><b>DeepSpeed</b> {" ".join(keys)}</p>' if keys else "")


def _code(text: str) -> str:
    """As code; a flag is not broken behind its dashes."""
    kind = ' class="flag"' if text.startswith("--") and " " not in text else ""
    return f"<code{kind}>{escape(text)}</code>"


def differences_table(runs: Sequence[Run], each: Sequence[Configuration]) -> str:
    """The flags in which the runs differ."""
    found = differences(list(each))
    if not found:
        return '<p class="quiet">The runs were given the same flags.</p>'
    rows = [[f"<code>{escape(x)}</code>" for x in (name, *values)] for name, values in found]
    return table(("flag", *(run.name for run in runs)), rows, "flags")


def ranks_table(run: Run) -> str:
    """Least, median and largest over the ranks, of the last profile in which several told."""
    step, found = spreads(run)
    if not found:
        return ""
    rows = [
        [one.name, one.least, one.median, one.largest, escape(f"rank {one.rank}")] for one in found
    ]
    head = ("", "least", "median", "largest", "of")
    return (
        f"<h2>Ranks, up to step {step:,.0f}</h2>{table(head, rows, 'ranks')}"
        '<p class="quiet">Of times, each rank tells the median over its steps. Ranks wait for one'
        " another in the backward pass: a late one shows by its forward pass, or by how little it"
        " communicates.</p>"
    )


def samples_list(run: Run) -> str:
    """The last text drawn for each prompt."""
    newest = {str(event.get("number")): event for event in run.events("sample")}
    if not newest:
        return ""
    told = []
    for event in [*newest.values()][:SHOWN_SAMPLES]:
        prompt, text = str(event.get("prompt") or ""), str(event.get("text") or "")
        told.append(
            f"<blockquote><b>{escape(prompt)}</b>{escape(text[:SHOWN_LETTERS])}</blockquote>"
        )
    step = number([*newest.values()][-1].get("step"))
    return f"<h2>Samples at step {step:,.0f}</h2>{''.join(told)}"
