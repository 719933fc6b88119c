"""Decides which steps are spikes, from loss and gradient norm of the steps before.

Both are compared with median and MAD of the last steps that are none. Arithmetic on the same
numbers on every rank, so all ranks decide alike, and a resumed run like the unbroken one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from minimind.config.run_config import PATIENCE
from minimind.runtime.checked_json import ClosedJson, Count, Real

MAD_TO_DEVIATION = 1.4826  # of a normal distribution
# Of the median. The loss of a batch varies by some percent and a window may hold almost equal
# values; norms two or three times the median are common, and harmless.
LOSS_DEVIATION, NORM_DEVIATION = 0.02, 0.25


class Estimate:
    """The last values of a quantity, and the limit above which a value is far from them."""

    def __init__(
        self, factor: float, window: int, least: float, values: Iterable[float] = ()
    ) -> None:
        """`least` is the smallest deviation, as a share of the median."""
        self._factor, self._least = factor, least
        self.values = deque(values, maxlen=window)
        self.limit = self._compute()

    def add(self, value: float) -> None:
        """Add a value in place of the oldest."""
        self.values.append(value)
        self.limit = self._compute()

    def _compute(self) -> float:
        """Infinite until there are as many values as the window holds."""
        size = len(self.values)
        if size < (self.values.maxlen or 0):
            return math.inf
        values, middle = np.fromiter(self.values, np.float64, size), size // 2
        median = np.partition(values, middle)[middle]
        mad = np.partition(np.abs(values - median), middle)[middle]
        deviation = max(MAD_TO_DEVIATION * mad, self._least * median)
        return float(median + self._factor * deviation)


@dataclass(frozen=True)
class Observed:
    """Loss and gradient norm of a step over all ranks, and the norm limit of its update.

    `step` counts from 0, like the row order. Values that are not finite are None.
    """

    step: int
    loss: float | None
    norm: float | None
    norm_limit: float | None

    @property
    def is_skipped(self) -> bool:
        """Whether the update was skipped for its norm."""
        return self.norm is not None and self.norm > (self.norm_limit or math.inf)


class ObservedState(ClosedJson):
    """The last step in a checkpoint."""

    step: Count
    loss: Real | None
    norm: Real | None
    norm_limit: Real | None


Values = Annotated[list[Real], Field(max_length=10_000)]


class SpikeState(ClosedJson):
    """`spikes` of a checkpoint's manifest."""

    losses: Values
    norms: Values
    first: Count | None
    in_a_row: Count
    skipped: Count
    rollbacks: Count
    last: ObservedState | None


class SpikeDetector:
    """Observes steps in order, and counts what it decides."""

    def __init__(self, factor: float, window: int, state: dict[str, Any] | None = None) -> None:
        """Continue from `state`, a `SpikeState`, or begin."""
        state = state or {}
        self.losses = Estimate(factor, window, LOSS_DEVIATION, state.get("losses", ()))
        self.norms = Estimate(factor, window, NORM_DEVIATION, state.get("norms", ()))
        self.first: int | None = state.get("first")  # of the spikes in a row
        self.in_a_row: int = state.get("in_a_row", 0)
        self.skipped: int = state.get("skipped", 0)  # updates since step 0
        self.rollbacks: int = state.get("rollbacks", 0)

    def observe(self, seen: Observed) -> bool:
        """Whether a step is a spike: loss or norm is above its limit, or not finite."""
        self.skipped += seen.is_skipped
        loss, norm = seen.loss, seen.norm
        if loss is None or norm is None or loss > self.losses.limit or seen.is_skipped:
            self.first = seen.step if self.first is None else self.first
            self.in_a_row += 1
            return True
        self.first, self.in_a_row = None, 0
        self.losses.add(loss)
        self.norms.add(norm)
        return False

    @property
    def must_go_back(self) -> bool:
        """Whether the spikes in a row are too many for skipping alone."""
        return self.in_a_row >= PATIENCE

    def state(self, last: Observed | None) -> dict[str, Any]:
        """Everything that later decisions depend on; `last` is a step not yet observed."""
        return {
            "losses": list(self.losses.values),
            "norms": list(self.norms.values),
            "first": self.first,
            "in_a_row": self.in_a_row,
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
            "last": last and asdict(last),
        }
