"""The few figures a run comes down to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minimind.report.records import PAUSES, PHASES, number
from minimind.report.runs import Run, how_it_ended
from minimind.report.thin import smoothed

# Of causes, as nouns.
WORDS = {"evaluate": "evaluation", "sample": "samples", "gc": "garbage collection"}


@dataclass(frozen=True)
class Best:
    """The lowest validation."""

    step: int
    loss: float
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Figures:
    """What is told of a run first; NaN or None where it is not known."""

    step: int
    total_steps: int | None
    loss: float
    loss_step: int
    mean_loss: float
    best: Best | None
    last_validation: float
    tokens: float
    tokens_per_second: float
    step_ms: float
    mfu: float
    memory_mib: float
    seconds: float  # of all starts together, without what lies between them
    shares: dict[str, float]  # of the measured time, by phase and pause
    lost_steps: int
    lost_seconds: float
    skipped: int
    starts: int
    resumes: int
    crashes: int
    kind: str
    ending: str


def window_of(lines: int) -> int:
    """How many lines the smoothed loss is a mean of."""
    return max(1, min(lines // 3, max(5, lines // 80)))


def figures_of(run: Run, now: float) -> Figures:
    """The figures of a run, seen at `now` (unix seconds)."""
    loss, steps = run.column("loss"), run.column("step")
    known = np.flatnonzero(np.isfinite(loss))
    last = known[-1] if len(known) else None
    evals = [number(e.get("val_loss")) for e in run.events("eval")]
    spent = _spent(run, False)
    whole = sum(spent.values())
    stretches = run.stretches
    ends = [how_it_ended(s, s is stretches[-1], now) for s in stretches]
    kind, ending = ends[-1] if ends else ("silent", "nothing recorded")
    total = number(run.fact("total_steps"))
    return Figures(
        step=int(run.last_step),
        total_steps=int(total) if math.isfinite(total) else None,
        loss=float(loss[last]) if last is not None else math.nan,
        loss_step=int(steps[last]) if last is not None else 0,
        mean_loss=_last(smoothed_loss(run)),
        best=_best(run),
        last_validation=evals[-1] if evals else math.nan,
        tokens=_last(run.column("tokens")),
        tokens_per_second=_speed(run),
        step_ms=_weighted(run.column("step_ms"), run.column("taken")),
        mfu=_weighted(run.column("mfu"), run.column("taken")),
        memory_mib=_most(run.column("memory_mib")),
        seconds=sum(s.seconds for s in stretches),
        shares={n: ms / whole for n, ms in spent.items()} if whole > 0 else {},
        lost_steps=sum(s.lost_steps for s in stretches),
        lost_seconds=sum(_spent(run, True).values()) / 1e3,
        skipped=len(run.events("step_skipped")),
        starts=sum(not s.start.is_implied or len(s.steps) > 0 for s in stretches),
        resumes=sum(s.start.facts.get("resume_from") is not None for s in stretches),
        crashes=sum(kind == "crashed" for kind, _ in ends),
        kind=kind,
        ending=ending,
    )


def _spent(run: Run, only_lost: bool) -> dict[str, float]:
    """Milliseconds by phase and pause: all that was spent, or what was lost of it."""
    each = [stretch.milliseconds(only_lost) for stretch in run.stretches]
    return {name: sum(one[name] for one in each) for name in (*PHASES, *PAUSES)}


def _best(run: Run) -> Best | None:
    found = [e for e in run.events("eval") if math.isfinite(number(e.get("val_loss")))]
    if not found:
        return None
    lowest = min(found, key=lambda e: number(e["val_loss"]))
    loss, ppl, bpb = (number(lowest.get(name)) for name in ("val_loss", "val_ppl", "val_bpb"))
    return Best(int(lowest["step"]), loss, ppl, bpb)


def _speed(run: Run) -> float:
    """Tokens over seconds, pauses apart; the lines weigh as the steps they stand for."""
    speed, taken = run.column("tokens_per_second"), run.column("taken")
    fine = np.isfinite(speed) & (speed > 0)
    per_token = _weighted(1.0 / np.where(fine, speed, np.nan), taken)
    return 1.0 / per_token if per_token > 0 else math.nan


def _weighted(values: np.ndarray, weights: np.ndarray) -> float:
    fine = np.isfinite(values) & np.isfinite(weights) & (weights > 0)
    return float(np.average(values[fine], weights=weights[fine])) if fine.any() else math.nan


def _most(values: np.ndarray) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else math.nan


def _last(values: np.ndarray) -> float:
    fine = values[np.isfinite(values)]
    return float(fine[-1]) if len(fine) else math.nan


def smoothed_loss(run: Run) -> np.ndarray:
    """(lines that hold,): the loss as a moving mean over `window_of` them."""
    loss = run.column("loss")
    return smoothed(loss, window_of(len(loss)))
