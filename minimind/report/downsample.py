"""Reduce long columns to what a screen can show."""

from __future__ import annotations

import numpy as np


def downsample(x: np.ndarray, y: np.ndarray, columns: int, span: tuple[float, float]) -> np.ndarray:
    """Ascending indices of the points that draw the same curve in `columns` pixel columns.

    Of each column the first, least, largest and last point (M4: Jugel et al. 2014), and one NaN of
    each gap. `x` must not decrease.
    """
    if len(x) <= 4 * columns:
        return np.arange(len(x))
    known = np.flatnonzero(np.isfinite(y))
    gaps = np.flatnonzero(~np.isfinite(y) & np.r_[True, np.isfinite(y[:-1])])
    gaps = gaps[:: max(1, -(-len(gaps) // columns))]
    column = pixel_columns(x[known], columns, span)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.flatnonzero(np.diff(column, append=columns))
    by_height = np.lexsort((y[known], column))
    return np.union1d(known[np.concatenate([first, last, by_height[first], by_height[last]])], gaps)


def group_lines(
    begins: np.ndarray, ends: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Begin and end of at most `columns` groups of about equal length, and the group of a line."""
    if len(begins) <= columns:
        return begins, ends, np.arange(len(begins))
    column = pixel_columns(ends, columns, (float(begins[0]), float(ends[-1])))
    is_first, is_last = np.diff(column, prepend=-1) != 0, np.diff(column, append=columns) != 0
    return begins[is_first], ends[is_last], np.cumsum(is_first) - 1


def group_means(values: np.ndarray, weights: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Weighted mean of each group; 0 where no value is known."""
    weights = np.where(np.isfinite(values), weights, 0.0)
    size = int(group[-1]) + 1 if len(group) else 0
    total = np.bincount(group, np.nan_to_num(values) * weights, size)
    weight = np.bincount(group, weights, size)
    return np.divide(total, weight, out=np.zeros(size), where=weight > 0)


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Centered moving mean that skips NaN; the window shrinks symmetrically at both ends."""
    total = np.concatenate(([0.0], np.cumsum(np.nan_to_num(y))))
    count = np.concatenate(([0], np.cumsum(np.isfinite(y))))
    index = np.arange(len(y))
    half = np.minimum(index, window // 2)
    low, high = index - half, np.minimum(len(y), index + half + 1)
    known = count[high] - count[low]
    return np.where(known > 0, (total[high] - total[low]) / np.maximum(1, known), np.nan)


def pixel_columns(x: np.ndarray, columns: int, span: tuple[float, float]) -> np.ndarray:
    """The column of each x, from 0 to `columns` - 1."""
    scaled = (x - span[0]) / ((span[1] - span[0]) or 1.0) * columns
    return np.clip(scaled, 0, columns - 1).astype(np.int64)
