"""Curves of any length made as long as a screen is wide, without hiding an extreme."""

from __future__ import annotations

import numpy as np


def extremes(x: np.ndarray, y: np.ndarray, columns: int, span: tuple[float, float]) -> np.ndarray:
    """Indices, in order, of the points that draw the same curve in `columns` pixel columns.

    Of each column the first, least, largest and last point (M4: Jugel et al. 2014). Points without
    a number go, but one of each gap stays, so that it stays a gap. `x` never decreases.
    """
    if len(x) <= 4 * columns:
        return np.arange(len(x))
    known = np.flatnonzero(np.isfinite(y))
    gaps = np.flatnonzero(~np.isfinite(y) & np.r_[True, np.isfinite(y[:-1])])
    if len(gaps) > columns:
        gaps = gaps[:: -(-len(gaps) // columns)]
    if not len(known):
        return gaps
    column = _column(x[known], columns, span)
    first = np.flatnonzero(np.r_[True, column[1:] != column[:-1]])
    last = np.r_[first[1:], len(known)] - 1
    by_height = np.lexsort((y[known], column))
    kept = np.concatenate([first, last, by_height[first], by_height[last]])
    return np.union1d(known[kept], gaps)


def _column(x: np.ndarray, columns: int, span: tuple[float, float]) -> np.ndarray:
    low, high = span
    scaled = (x - low) / ((high - low) or 1.0) * columns
    return np.clip(scaled, 0, columns - 1).astype(np.int64)


def smoothed(y: np.ndarray, window: int) -> np.ndarray:
    """The mean over `window` points around each, fewer near the ends; NaN are left out.

    Symmetric from the first point on, so that a steep beginning is not levelled.
    """
    total = np.concatenate(([0.0], np.cumsum(np.nan_to_num(y))))
    count = np.concatenate(([0], np.cumsum(np.isfinite(y))))
    at = np.arange(len(y))
    half = np.minimum(at, window // 2)
    low, high = at - half, np.minimum(len(y), at + half + 1)
    counted = count[high] - count[low]
    return np.where(counted > 0, (total[high] - total[low]) / np.maximum(1, counted), np.nan)


def bins(
    begins: np.ndarray, ends: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first and last x of each group of lines, and which group a line is in.

    A line stands for (begin, end]; there are at most `columns` groups, of about equal length in x.
    """
    if len(begins) <= columns:
        return begins, ends, np.arange(len(begins))
    raw = _column(ends, columns, (float(begins[0]), float(ends[-1])))
    first = np.flatnonzero(np.r_[True, raw[1:] != raw[:-1]])
    group = np.cumsum(np.r_[False, raw[1:] != raw[:-1]])
    last = np.r_[first[1:], len(ends)] - 1
    return begins[first], ends[last], group


def grouped_mean(values: np.ndarray, weights: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The weighted mean of each group; 0 where nothing is known."""
    weight = np.where(np.isfinite(values), weights, 0.0)
    size = int(group[-1]) + 1 if len(group) else 0
    total = np.bincount(group, np.nan_to_num(values) * weight, size)
    counted = np.bincount(group, weight, size)
    return np.divide(total, counted, out=np.zeros(size), where=counted > 0)
