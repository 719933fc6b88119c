"""What a chart shows, and on which scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from minimind.report.numbers import exact


@dataclass(frozen=True)
class Line:
    """A curve; `tone` is its colour's class, `look` how it is drawn."""

    name: str
    tone: str
    x: np.ndarray
    y: np.ndarray
    look: str = "plain"  # plain, raw, lost, dots, limit
    value: str | None = None  # what the legend says beside the name; None: the last y
    in_legend: bool = True
    end: str = ""  # what stands at its right end, where there is room


@dataclass(frozen=True)
class Layer:
    """One colour of a stack: heights over the stretches between `edges`."""

    name: str
    tone: str
    heights: np.ndarray
    value: str


@dataclass(frozen=True)
class Mark:
    """A moment in the life of a run: an upright line, and its words where there is room."""

    x: float
    kind: str  # resume, crash, end
    label: str


@dataclass(frozen=True)
class Point:
    """A sign on a curve."""

    x: float
    y: float
    kind: str
    tone: str
    label: str


@dataclass(frozen=True)
class Chart:
    """What is drawn over the steps (or tokens) `span`."""

    key: str
    title: str
    unit: str
    span: tuple[float, float]
    lines: Sequence[Line] = ()
    begins: np.ndarray = field(default_factory=lambda: np.empty(0))
    ends: np.ndarray = field(default_factory=lambda: np.empty(0))
    layers: Sequence[Layer] = ()
    marks: Sequence[Mark] = ()
    points: Sequence[Point] = ()
    bands: Sequence[tuple[float, float]] = ()  # stretches of x that were lost
    ticks_below: Sequence[tuple[str, str, np.ndarray]] = ()  # name, tone, x: strokes at the foot
    from_zero: bool = False
    may_be_log: bool = False
    is_wide: bool = False
    has_labels: bool = False
    columns: int = 1000
    x_name: str = "step"
    form: Callable[[float], str] = exact  # of values in words; the script goes by its name
    tick_form: Callable[[float], str] | None = None  # None: as many digits as tell them apart

    def at(self, x: np.ndarray) -> np.ndarray:
        """0 at the left edge to 1 at the right one."""
        low, high = self.span
        return (x - low) / ((high - low) or 1.0)


@dataclass(frozen=True)
class Scale:
    """What the lower and upper edge stand for."""

    low: float
    high: float
    is_log: bool = False
    highest: float = math.nan  # of the data, where the edge cuts it off

    def at(self, values: np.ndarray) -> np.ndarray:
        """0 at the low edge to 1 at the high one; NaN for what cannot be drawn."""
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = (np.log10([self.low, self.high])) if self.is_log else (self.low, self.high)
            scaled = np.log10(np.where(values > 0, values, np.nan)) if self.is_log else values
        return np.clip((scaled - low) / (high - low), -0.05, 1.0)


def scale_of(values: np.ndarray, from_zero: bool, may_be_log: bool) -> Scale:
    """The scale that shows `values`: with room at the edges, a logarithm where they are far apart.

    A few values beyond all others are cut off, and said to be, rather than flatten the rest.
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return Scale(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if may_be_log and low > 1e-30 and high > 12 * low:
        room = (high / low) ** 0.04
        return Scale(low / room, high * room, True)
    highest = math.nan
    if from_zero:
        low, usual = min(0.0, low), float(np.quantile(values, 0.98))
        if high > 4 * usual > 0:
            high, highest = 1.4 * usual, high
    room = 0.05 * ((high - low) or abs(high) or 1.0)
    return Scale(low if from_zero and low == 0 else low - room, high + room, highest=highest)
