"""The HTML file of a report: tables, and charts that plotly's inlined script draws."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from minimind.config.origin import DEFAULT
from minimind.config.run_record import NAME
from minimind.report import formats
from minimind.report.charts import Chart, draw, run_style
from minimind.report.figures import (
    COLUMNS,
    STAGE_HEAD,
    TILES,
    Summary,
    describe,
    other_text,
    rank_figures,
    stage_rows,
)
from minimind.report.formats import PALETTE
from minimind.report.history import (
    Configuration,
    Run,
    Start,
    read_configuration,
    read_console,
    read_runs,
)
from minimind.runtime.drafts import remove_left
from minimind.runtime.durable_files import storing, write_whole

REPORT_NAME = "report.html"  # file in the out_dir of a run
GENERATOR = '<meta name="generator" content="minimind report">'
MAX_STARTS, MAX_SAMPLES = 60, 6
MAX_DIFFERING, MAX_NAME = 3, 60  # flags that name a run, and characters
START_HEAD = ("started", "steps", "time", "processes", "end", "steps lost")
FACTS = (
    *("commit", "hardware", "device", "peak_tflops", "peak_source"),
    *("micro_batch_rows", "accumulation_steps"),
)
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["percent"] = formats.percent
TEMPLATES.globals |= {"nouns": formats.NOUNS, "columns": COLUMNS, "tiles": TILES}


def write_report(run_dirs: Sequence[Path], out: Path, remedy: str) -> int:
    """Write the page of one or several runs to `out`; return its bytes. Raise StorageError."""
    configurations = [*map(read_configuration, run_dirs)]
    parts = render_parts(read_runs(run_dirs), configurations, time.time())
    return write_page(fill_page(*parts, is_linked=True), out, remedy)


def write_page(html: str, out: Path, remedy: str) -> int:
    """Write a page to `out`; return its bytes. Raise StorageError."""
    content = html.encode(errors="backslashreplace")  # a path may not be UTF-8
    with storing(str(out), remedy, needed=len(content)):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_left(out.parent, out.name)
        write_whole(out, content)
    return len(content)


def render_parts(
    runs: Sequence[Run], configurations: Sequence[Configuration], now: float
) -> tuple[str, str, list[Chart]]:
    """Title, HTML and charts of the page."""
    config, flags = configurations[0], [one.flags for one in configurations]
    names = dict.fromkeys(name for one in flags for name in one)
    rows = [(n, *(one.get(n, ("",))[0] for one in flags)) for n in names]
    differing = [row for row in rows if row[0] != "out_dir" and len({*row[1:]}) > 1]
    folders = [""] * len(runs)
    if named := _names(runs, differing):
        folders = [str(run.run_dir) for run in runs]
        for run, name in zip(runs, named, strict=True):
            run.name = name
    charts = draw(runs, [one.grad_clip for one in configurations], now)
    summaries = [Summary(run, now) for run in runs]
    faults = [f"{run.name}: {NAME} {run.config_fault}" for run in runs if run.config_fault]
    if lines := sum(run.unread_lines for run in runs):
        faults.insert(0, f"{formats.count(lines, 'line')} could not be read")
    given = config.flags.items()
    body = TEMPLATES.get_template("report.html").render(
        is_single=len(runs) == 1,
        summaries=summaries,
        lead=_lead(summaries[0]),
        compared=[_compared(one, run_style(n)[0], folders[n]) for n, one in enumerate(summaries)],
        charts=charts,
        shared=charts[0].meta if charts else {},
        has_other_text=other_text(runs),
        details=[_details(run, now) for run in runs],
        start_head=START_HEAD,
        stage_head=STAGE_HEAD,
        given=[(name, *both) for name, both in given if both[1] != DEFAULT],
        defaults=[(name, value) for name, (value, source) in given if source == DEFAULT],
        deepspeed=[*config.deepspeed.items()],
        names=[run.name for run in runs],
        differing=differing,
        written=formats.timestamp(now),
        faults=faults,
    )
    return f"{', '.join(run.name for run in runs)}: training report", body, charts


def plots(charts: Sequence[Chart], is_single: bool) -> Markup:
    """Empty elements for the charts, in two columns; `is_single`: the first two take a row each."""
    return _part("plots", charts, is_single)


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> Markup:
    """A table, which scrolls by itself on a narrow screen. A cell is text, or Markup."""
    return _part("table", head, rows, kind)


def _part(macro: str, *given: Any) -> Markup:
    return getattr(TEMPLATES.get_template("parts.html").module, macro)(*given)


def figures(charts: Sequence[Chart]) -> str:
    """A JSON object: plotly figures by key.

    Each trace gets a `uid`, the same in every drawing of a chart: the letters of its name, as its
    figures change ("3 checkpoints"), and a count. Plotly writes it into a CSS selector.
    """
    found: dict[str, Any] = {}
    for chart in charts:
        counts: Counter[str] = Counter()
        traces: list[dict[str, Any]] = []
        for trace in chart.figure["data"]:
            word = re.sub(r"s\b|[^a-z]+", "-", trace.get("name", "").lower()).strip("-")
            counts[word] += 1
            traces.append({**trace, "uid": f"trace-{word}-{counts[word]}"})
        found[chart.key] = _encoded({**chart.figure, "data": traces})
    return json.dumps(found, separators=(",", ":"), allow_nan=False)


def _encoded(value: Any) -> Any:
    """With arrays in base64, as plotly.js reads them, and null for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _encoded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(one) for one in value]
    if isinstance(value, np.ndarray):
        value = value if value.dtype == np.int8 else np.array(value, np.float64)
        return {"dtype": value.dtype.str[1:], "bdata": b64encode(value).decode()}
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fill_page(
    title: str, body: str, charts: Sequence[Chart], is_linked: bool, is_live: bool = False
) -> str:
    """A whole HTML file from the HTML of its body and its charts; linked ones share one x axis.

    A live one follows the server that it came from (`watch.py`).
    """
    from plotly.offline import get_plotlyjs

    facts = f'"dark":{json.dumps(dict(PALETTE.values()))},"isLinked":{json.dumps(is_linked)}'
    data = f'{{{facts},"charts":{figures(charts)}}}'
    light, dark = (
        " ".join(f"--{name}: {colors[n]};" for name, colors in PALETTE.items()) for n in (0, 1)
    )
    return TEMPLATES.get_template("frame.html").render(
        title=title,
        body=Markup(body),
        is_live=is_live,
        nonce=secrets.token_urlsafe(),
        generator=Markup(GENERATOR),
        light=light,
        dark=dark,
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
        data=Markup(data.replace("<", "\\u003c")),
    )


def _lead(summary: Summary) -> str:
    sentences = (summary.course(), summary.setbacks(), summary.verdict, summary.placed)
    if not summary.run.starts:
        return f"No run has started in {summary.run.run_dir} yet."
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)


def _names(runs: Sequence[Run], differing: Sequence[Sequence[str]]) -> list[str]:
    """A name for each run by the first flags that differ; empty where folders have other names.

    `differing`: rows of a flag and its value in each run.
    """
    if len({run.run_dir.absolute().name for run in runs}) == len(runs):
        return []
    several = [differing[:count] for count in range(2, MAX_DIFFERING + 1)]
    for some in [*([row] for row in differing), *several]:
        names = [
            ", ".join(f"{flag} {values[n] or formats.DASH}" for flag, *values in some)
            for n in range(len(runs))
        ]
        if len({*names}) == len(runs) and max(map(len, names)) <= MAX_NAME:
            return names
    return []


def _compared(one: Summary, tone: str, folder: str) -> list[str]:
    """A cell for the name of a run, for each of `COLUMNS`, and for its end."""
    cells = [one.figures[name].text for name in COLUMNS]
    cells[0] = Markup("{}{}").format(cells[0], _part("progress", one))
    if at := one.figures["validation"].remark.partition(",")[0]:
        cells[[*COLUMNS].index("validation")] += Markup("<small>{}</small>").format(at)
    end = _part("ended", one.kind, one.ending + one.time_left(), [])
    name = _part("key", tone, one.run.name)
    if folder:
        name += Markup("<small>{}</small>").format(folder)
    return [name, *cells, end]


def _details(run: Run, now: float) -> dict[str, Any]:
    """Starts, scores, stages, ranks, versions and samples of a run."""
    ends = zip(run.starts, run.outcomes(now), strict=True)
    starts = [_start_row(start, *outcome) for start, outcome in ends]
    half = MAX_STARTS // 2
    if len(starts) > MAX_STARTS:
        more = f"{len(starts) - MAX_STARTS} more", *[""] * 5
        starts = [*starts[:half], more, *starts[-half:]]
    scores: dict[str, Any] = {}
    if scored := run.events("scores"):
        head, *rows = formats.scores_table(scored[-1])
        took = float(sum(number for one in scored if math.isfinite(number := one["seconds"])))
        scores = {"step": f"{scored[-1]['step']:,}", "head": head, "rows": rows}
        scores |= {"times": formats.count(len(scored), "time"), "took": formats.duration(took)}
    step, ranks = rank_figures(run)
    facts = [f"{name} {value}" for name, value in (run.fact("versions") or {}).items()]
    facts += [f"{name} {run.fact(name)}" for name in FACTS if run.fact(name) is not None]
    console = read_console(run.run_dir)
    samples = [*{event["number"]: event for event in run.events("sample")}.values()][:MAX_SAMPLES]
    return {
        **{"name": run.name, "starts": starts, "scores": scores, "stages": stage_rows(run)},
        **{"ranks": ranks, "ranks_step": f"{step:,}", "facts": [(fact, None) for fact in facts]},
        **{"samples": samples, "console": console},
    }


def _start_row(start: Start, kind: str, sentence: str) -> tuple[str, ...]:
    """A cell for each name of `START_HEAD`."""
    first, last, remarks = start.first_step, start.last_step, []
    steps = formats.DASH if math.isinf(first) else f"{first:,.0f}"
    steps += f" to {last:,.0f}" if math.isfinite(last) else ""
    for event in start.events:
        if event["event"] == "checkpoint_rejected":
            remarks.append(formats.skipped(event["path"], event["file"], event["reason"]))
        elif event["event"] == "mirror_failed":
            remarks.append(f"step {event.get('step')}: --mirror failed: {event['reason']}")
        elif event["event"] == "checkpoint_fetched":
            remarks.append(f"fetched {event['url']}")
        elif event["event"] == "run_changed":
            remarks.append("changed " + "; ".join(event["changes"]))
    return (
        formats.timestamp(start.first_time),
        steps,
        formats.duration(start.seconds),
        "no run_start recorded" if start.is_implied else describe(start.facts),
        _part("ended", kind, sentence, remarks[:10]),
        f"{start.lost_steps:,}" if start.lost_steps else "",
    )
