"""The figures of a run, and the run as a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from minimind.report.downsample import smooth
from minimind.report.formats import (
    format_count,
    format_duration,
    format_mib,
    format_ms,
    format_number,
    format_percent,
)
from minimind.report.records import PAUSES, PHASES, number
from minimind.report.runs import Run

# Pauses as nouns.
NOUNS = {"evaluate": "evaluation", "sample": "samples", "gc": "garbage collection"}
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
SPARKLINE_WIDTH = 60
# Figures that a profile has of each rank: key, name, format.
RANK_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    *((f"{name}_ms", name, format_ms) for name in (*PHASES, "step")),
    ("comm_ms", "of it comm.", format_ms),
    *((f"{name}_ms", NOUNS.get(name, name), format_ms) for name in PAUSES),
    ("memory_mib", "memory peak", format_mib),
)
BRIEF = {"forward": "forward", "of it comm.": "comm.", "memory peak": "memory"}


@dataclass(frozen=True)
class Summary:
    """The figures of a run; NaN or None where unknown."""

    step: int
    total_steps: int | None
    loss: float
    loss_step: int
    mean_loss: float
    best: dict[str, float] | None  # the eval event of the lowest loss
    tokens: float
    tokens_per_second: float
    step_ms: float
    mfu: float
    memory_mib: float
    seconds: float  # of all starts, without the time between them
    shares: dict[str, float]  # of the measured time, by phase and pause
    lost_steps: int
    lost_seconds: float
    skipped: int
    starts: int
    resumes: int
    crashes: int
    kind: str  # of the last outcome
    ending: str


def summarize(run: Run, now: float) -> Summary:
    """The figures of a run at `now` (unix seconds)."""
    loss, taken, segments = run.column("loss"), run.column("taken"), run.segments
    known = np.flatnonzero(np.isfinite(loss))
    spent, lost = (
        {name: sum(s.milliseconds(only_lost)[name] for s in segments) for name in (*PHASES, *PAUSES)}
        for only_lost in (False, True)
    )
    whole = sum(spent.values())
    outcomes = run.outcomes(now)
    kind, ending = outcomes[-1] if outcomes else ("silent", "nothing recorded")
    total = number(run.fact("total_steps"))
    memory = run.column("memory_mib")
    return Summary(
        step=int(run.last_step),
        total_steps=int(total) if math.isfinite(total) else None,
        loss=_last_finite(loss),
        loss_step=int(run.column("step")[known[-1]]) if len(known) else 0,
        mean_loss=_last_finite(smoothed_loss(run)),
        best=_best_validation(run),
        tokens=_last_finite(run.column("tokens")),
        tokens_per_second=_tokens_per_second(run),
        step_ms=_weighted_mean(run.column("step_ms"), taken),
        mfu=_weighted_mean(run.column("mfu"), taken),
        memory_mib=float(np.nanmax(memory)) if np.isfinite(memory).any() else math.nan,
        seconds=sum(s.seconds for s in segments),
        shares={name: ms / whole for name, ms in spent.items()} if whole > 0 else {},
        lost_steps=sum(s.lost_steps for s in segments),
        lost_seconds=sum(lost.values()) / 1e3,
        skipped=len(run.events("step_skipped")),
        starts=sum(not s.start.is_implied or len(s.steps) > 0 for s in segments),
        resumes=sum(s.start.facts.get("resume_from") is not None for s in segments),
        crashes=sum(kind == "crashed" for kind, _ in outcomes),
        kind=kind,
        ending=ending,
    )


def _best_validation(run: Run) -> dict[str, float] | None:
    names = ("step", "val_loss", "val_ppl", "val_bpb")
    events = [{name: number(event.get(name)) for name in names} for event in run.events("eval")]
    events = [event for event in events if math.isfinite(event["val_loss"])]
    return min(events, key=lambda event: event["val_loss"], default=None)


def _tokens_per_second(run: Run) -> float:
    """Tokens over seconds without pauses; a line weighs as many steps as it stands for."""
    speed = run.column("tokens_per_second")
    seconds = 1.0 / np.where(speed > 0, speed, np.nan)
    per_token = _weighted_mean(seconds, run.column("taken"))
    return 1.0 / per_token if per_token > 0 else math.nan


def _weighted_mean(values: np.ndarray, weights: np.ndarray) -> float:
    known = np.isfinite(values) & np.isfinite(weights) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan


def _last_finite(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def window_of(lines: int) -> int:
    """Lines in a moving mean."""
    return max(1, min(lines // 3, max(5, lines // 80)))


def smoothed_loss(run: Run) -> np.ndarray:
    """(kept lines,): the moving mean of the loss."""
    loss = run.column("loss")
    return smooth(loss, window_of(len(loss)))


def rank_figures(run: Run) -> tuple[float, list[tuple[str, str, str, str, str]]]:
    """Step of the last profile with several ranks; name, least, median, largest and its rank."""
    for event in reversed(run.events("profile")):
        rows = []
        for key, name, form in RANK_FIGURES:
            values = _values_by_rank(event.get("ranks"), key)
            if len(values) > 1:
                figures = (min(values.values()), median(values.values()), max(values.values()))
                least, middle, largest = map(form, figures)
                rows.append((name, least, middle, largest, max(values, key=lambda r: values[r])))
        if rows:
            return number(event.get("step")), rows
    return math.nan, []


def _values_by_rank(ranks: Any, key: str) -> dict[str, float]:
    """Rank -> value, from a list of objects or an object of lists."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(ranks, dict) and isinstance(ranks.get(key), list):
        pairs = [*enumerate(ranks[key])]
    elif isinstance(ranks, list):
        pairs = [(r.get("rank", n), r.get(key)) for n, r in enumerate(ranks) if isinstance(r, dict)]
    return {str(rank): number(value) for rank, value in pairs if math.isfinite(number(value))}


def describe(run: Run) -> str:
    """`2,361,024 parameters, bfloat16, DeepSpeed ZeRO-2 on 2 processes (cpu)`."""
    parameters, world = number(run.fact("parameters")), number(run.fact("world_size"))
    backend = backend_name(run.fact("backend"), run.fact("zero_stage"))
    processes = f"on {format_count(int(world), 'process', 'processes')}" if world == world else ""
    device = f"({run.fact('device')})" if run.fact("device") else ""
    parts = (
        f"{parameters:,.0f} parameters" if math.isfinite(parameters) else "",
        str(run.fact("dtype") or ""),
        " ".join(filter(None, (backend, processes, device))),
    )
    return ", ".join(filter(None, parts))


def backend_name(backend: object, stage: object) -> str:
    """`DeepSpeed ZeRO-2`, `DDP`, `single`."""
    if backend == "deepspeed":
        return f"DeepSpeed ZeRO-{stage}"
    return "DDP" if backend == "ddp" else str(backend or "")


def describe_course(summary: Summary) -> str:
    """`step 160 of 160 after 2 min 5 s: done`."""
    total = f" of {summary.total_steps:,}" if summary.total_steps is not None else ""
    return f"step {summary.step:,}{total} after {format_duration(summary.seconds)}: {summary.ending}"


def describe_results(summary: Summary) -> str:
    """`smoothed loss 5.39, best validation 5.38; 4,698 tokens/s, 64% of the time in backward`."""
    parts = [f"smoothed loss {summary.mean_loss:.2f}"] if math.isfinite(summary.mean_loss) else []
    parts += [f"best validation {summary.best['val_loss']:.2f}"] if summary.best else []
    text = ", ".join(parts)
    if math.isfinite(summary.tokens_per_second):
        text += f"; {format_number(summary.tokens_per_second)} tokens/s"
    if text and summary.shares:
        name, share = max(summary.shares.items(), key=lambda item: item[1])
        text += f", {format_percent(share)} of the time in {NOUNS.get(name, name)}"
    return text


def describe_setbacks(summary: Summary) -> str:
    """`1 resume, 1 crash, 16 steps lost (7.1 s)`; empty if there were none."""
    lost = f"{format_count(summary.lost_steps, 'step')} lost"
    parts = (
        (summary.resumes, format_count(summary.resumes, "resume")),
        (summary.crashes, format_count(summary.crashes, "crash", "crashes")),
        (summary.lost_steps, f"{lost} ({format_duration(summary.lost_seconds)})"),
        (summary.skipped, f"{format_count(summary.skipped, 'step')} skipped"),
    )
    return ", ".join(text for number, text in parts if number)


def as_text(run: Run, summary: Summary, has_blocks: bool = True) -> str:
    """The run in 6 to 12 lines for a terminal; ASCII only unless `has_blocks`."""
    figures = {
        "run": describe(run) or "nothing is known of it",
        "course": describe_course(summary),
        "setbacks": describe_setbacks(summary),
    }
    if math.isfinite(summary.loss):
        loss = f"{summary.loss:.4f} at step {summary.loss_step:,}"
        figures["loss"] = f"{loss}, {summary.mean_loss:.4f} smoothed"
    if best := summary.best:
        pairs = ((", perplexity", best["val_ppl"]), (", bits per byte", best["val_bpb"]))
        more = "".join(f"{name} {value:.4g}" for name, value in pairs if math.isfinite(value))
        step = int(best["step"])
        figures["validation"] = f"{best['val_loss']:.4f} at step {step:,}, the best{more}"
    if math.isfinite(summary.tokens):
        mfu = f", MFU {format_percent(summary.mfu)}" if math.isfinite(summary.mfu) else ""
        speed = f"{format_number(summary.tokens_per_second)} tokens/s"
        figures["tokens"] = f"{summary.tokens:,.0f}, {speed}{mfu}"
    shares = [(name, share) for name, share in summary.shares.items() if share >= 0.0005]
    figures["time"] = ", ".join(f"{NOUNS.get(n, n)} {format_percent(share)}" for n, share in shares)
    if math.isfinite(summary.memory_mib):
        figures["memory"] = f"{format_mib(summary.memory_mib)} at most, of one process"
    figures["ranks"] = ", ".join(
        f"{BRIEF[name]} {least} to {largest} (rank {rank})"
        for name, least, _, largest, rank in rank_figures(run)[1]
        if name in BRIEF
    )
    if unread := run.records.unread_lines:
        figures["unread"] = f"{format_count(unread, 'line')} of metrics.jsonl"
    lines = [f"  {name:<12}{value}" for name, value in figures.items() if value]
    curve = sparkline(smoothed_loss(run), BLOCKS if has_blocks else ASCII_BLOCKS)
    text = "\n".join([str(run.run_dir), *lines, *([f"  {curve}"] if curve else [])])
    return text if has_blocks else text.encode("ascii", "replace").decode()


def sparkline(values: np.ndarray, blocks: str) -> str:
    """The finite values as at most `SPARKLINE_WIDTH` blocks, then `first to last`."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    means = np.array([p.mean() for p in np.array_split(values, min(SPARKLINE_WIDTH, len(values)))])
    span = float(means.max() - means.min()) or 1.0
    heights = ((means - means.min()) / span * (len(blocks) - 1)).round().astype(int)
    return "".join(blocks[n] for n in heights) + f"  {values[0]:.2f} to {values[-1]:.2f}"
