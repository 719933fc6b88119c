"""What the ranks of a run told of their steps: who is slow, who waits, who needs most memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from minimind.report.figures import WORDS
from minimind.report.numbers import mebibytes, milliseconds
from minimind.report.records import PAUSES, PHASES, number
from minimind.report.runs import Run

Form = Callable[[float], str]
# Name in a profile's `ranks`, what it is called, and how its values are written.
TOLD: tuple[tuple[str, str, Form], ...] = (
    *((f"{name}_ms", name, milliseconds) for name in (*PHASES, "step")),
    ("comm_ms", "of it comm.", milliseconds),
    *((f"{name}_ms", WORDS.get(name, name), milliseconds) for name in PAUSES),
    ("memory_mib", "memory peak", mebibytes),
)
BRIEF = {"forward": "forward", "of it comm.": "comm.", "memory peak": "memory"}


@dataclass(frozen=True)
class Spread:
    """One figure over the ranks, as text, and whose the largest is."""

    name: str
    least: str
    median: str
    largest: str
    rank: str


def spreads(run: Run) -> tuple[float, list[Spread]]:
    """The step of the last profile in which several ranks told of themselves, and their figures.

    Of times each rank's is the median over its steps, of pauses their sum. Without such a profile:
    no figures.
    """
    for event in reversed(run.events("profile")):
        found = [
            _spread(name, by_rank, form)
            for key, name, form in TOLD
            if len(by_rank := _by_rank(event.get("ranks"), key)) > 1
        ]
        if found:
            return number(event.get("step")), found
    return math.nan, []


def in_brief(run: Run) -> str:
    """`forward 12 ms to 50 ms (rank 2), comm. 1 ms to 4 ms (rank 0), ...`; empty without ranks."""
    return ", ".join(
        f"{BRIEF[one.name]} {one.least} to {one.largest} (rank {one.rank})"
        for one in spreads(run)[1]
        if one.name in BRIEF
    )


def _spread(name: str, by_rank: dict[str, float], form: Form) -> Spread:
    values = [*by_rank.values()]
    told = (form(value) for value in (min(values), median(values), max(values)))
    return Spread(name, *told, rank=max(by_rank, key=lambda rank: by_rank[rank]))


def _by_rank(ranks: Any, name: str) -> dict[str, float]:
    """Rank -> figure, of a list of objects or of an object of lists."""
    if isinstance(ranks, dict):
        values = ranks.get(name)
        told = enumerate(values) if isinstance(values, list) else ()
    elif isinstance(ranks, list):
        objects = [(n, one) for n, one in enumerate(ranks) if isinstance(one, dict)]
        told = [(one.get("rank", n), one.get(name)) for n, one in objects]
    else:
        return {}
    return {str(rank): number(value) for rank, value in told if math.isfinite(number(value))}
