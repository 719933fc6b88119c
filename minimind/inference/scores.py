"""Scores of a model: what a task gives, and batches of questions that ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, TypeVar

from minimind.config.tasks import AVERAGE

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """The result of a task: its fields in a `scores` event."""

    value: float
    chance: float | None  # share that a guess has right; None: no share of right answers
    stderr: float | None  # standard error of the value, over the questions
    questions: int
    higher_is_better: bool = True


def share_right(is_right: Sequence[bool], chance: float) -> Score:
    """The score of questions that are answered right or wrong."""
    number, value = len(is_right), fmean(is_right)
    return Score(value, chance, standard_error(value, number), number)


def standard_error(share: float, number: int) -> float | None:
    """Standard error of a share of `number` answers; None of a single one."""
    inside = min(1.0, max(0.0, share))
    return math.sqrt(inside * (1 - inside) / (number - 1)) if number > 1 else None


def average_of(scores: Mapping[str, Score]) -> float | None:
    """Mean of (value - chance) / (1 - chance): 0 for guesses, 1 if all is right; None of none."""
    above = [
        (one.value - one.chance) / (1 - one.chance)
        for one in scores.values()
        if one.chance is not None and one.chance < 1
    ]
    return fmean(above) if above else None


def fields_of(scores: Mapping[str, Score]) -> dict[str, Any]:
    """`tasks` and `average`, as in a `scores` event."""
    return {
        "tasks": {name: asdict(one) for name, one in scores.items()},
        AVERAGE: average_of(scores),
    }


class StoppedError(Exception):
    """A stop was asked for while questions were left."""


@dataclass(frozen=True)
class Shares:
    """How ranks share batches: group g of ranks computes every batch n with n % size == g.

    A batch is the same on any number of ranks, so that results are. Each method is collective.
    """

    group: int = 0
    size: int = 1
    counts: bool = True  # this rank counts what its group computes
    is_collective: bool = False  # so is a forward pass
    add: Callable[[list[float]], list[float]] = list  # sums over ranks
    gather: Callable[[Any], list[Any]] = lambda value: [value]  # values of all ranks
    is_stopping: Callable[[], bool] = lambda: False

    def go_on(self) -> None:
        """Raise StoppedError on every rank if one is asked to stop."""
        if self.add([float(self.is_stopping())])[0]:
            raise StoppedError

    def numbers(
        self, compute: Callable[[Sequence[T]], Sequence[float]], batches: Sequence[Sequence[T]]
    ) -> list[float]:
        """What `compute` returns for all batches: one number for each item.

        A rank without a batch repeats the last one: all ranks compute the same number of times.
        Raise StoppedError on every rank if one is asked to stop.
        """
        begins, total = [0], 0
        for batch in batches:
            begins.append(total := total + len(batch))
        found = [0.0] * total
        for first in range(0, len(batches), self.size):
            self.go_on()
            at = first + self.group
            own = compute(batches[min(at, len(batches) - 1)])
            if at < len(batches) and self.counts:
                found[begins[at] : begins[at + 1]] = own
        return self.add(found)
