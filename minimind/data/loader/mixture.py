"""A mixture of sources: which rows of which source an epoch reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from minimind.data.loader.permutation import Shuffle, permute, unpermute

MOST_SOURCES = 10_000
Ranges = tuple[tuple[int, int], ...]  # of row numbers: first and one after the last, ascending


def rows_in(ranges: Ranges) -> np.ndarray:
    """The row numbers of some ranges, int64."""
    parts = [np.arange(first, stop, dtype=np.int64) for first, stop in ranges]
    return np.concatenate(parts) if parts else np.arange(0)


def count_rows(ranges: Ranges) -> int:
    """Number of rows in some ranges."""
    return sum(stop - first for first, stop in ranges)


@dataclass(frozen=True)
class Mixture:
    """Rows of each source and its weight, relative to the sum of weights.

    An epoch has as many rows as all sources together, without those left out, and each source a
    quota of them. A source is read in shuffled passes across epochs; after an epoch, read counts
    differ by at most one.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    left_out: Ranges = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.sizes) == len(self.weights) <= MOST_SOURCES:
            raise ValueError(
                f"{len(self.sizes)} sources have {len(self.weights)} weights; at most"
                f" {MOST_SOURCES:,} can be mixed"
            )
        for number, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
            if size < 1:
                raise ValueError(f"source {number} has {size} rows")
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"source {number} has the weight {weight}")
            if not self.kept[number]:
                raise ValueError(f"all {size} rows of source {number} are left out")
        for number, quota in enumerate(self.quotas):
            if quota < 1:
                raise ValueError(
                    f"source {number} has weight {self.weights[number]:g}, which rounds to none of"
                    f" the {self.n_rows} rows of an epoch"
                )

    @cached_property
    def _left_out(self) -> list[np.ndarray]:
        """Numbers within its source of the rows left out, by source."""
        ends = np.cumsum(self.sizes)
        rows = rows_in(self.left_out)
        parts = np.split(rows, np.searchsorted(rows, ends[:-1]))
        return [
            part - (end - size) for part, end, size in zip(parts, ends, self.sizes, strict=True)
        ]

    @cached_property
    def kept(self) -> list[int]:
        """Rows that are not left out, by source."""
        return [size - len(out) for size, out in zip(self.sizes, self._left_out, strict=True)]

    @property
    def n_rows(self) -> int:
        """Rows per epoch: of all sources, without those left out."""
        return sum(self.kept)

    def _shuffle(self, source: int, seed: int) -> Shuffle:
        return Shuffle(self.sizes[source], seed, self._left_out[source], source)

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Rows per epoch of each source, by largest remainders; their sum is `n_rows`.

        Computed with fractions, independent of the machine's rounding.
        """
        total = sum(map(Fraction, self.weights))
        exact = [Fraction(weight) * self.n_rows / total for weight in self.weights]
        quotas = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda n: quotas[n] - exact[n])
        for number in by_remainder[: self.n_rows - sum(quotas)]:
            quotas[number] += 1
        return tuple(quotas)

    def rows_at(self, positions: np.ndarray, seed: int, epochs: np.ndarray) -> np.ndarray:
        """Row indices (int64, over all sources) at `positions` of `epochs`.

        The shuffled positions of an epoch are assigned to sources by quota, and within a source to
        its sequence of passes.
        """
        shuffled = permute(positions, self.n_rows, seed, epochs)
        ends = np.cumsum(self.quotas)
        source_of = np.searchsorted(ends, shuffled, side="right")
        rows = np.empty_like(shuffled)
        for source in np.unique(source_of).tolist():
            mine = np.flatnonzero(source_of == source)
            rows[mine] = self._read(source, shuffled[mine], seed, epochs[mine])
        return rows

    def _read(self, source: int, shuffled: np.ndarray, seed: int, epochs: np.ndarray) -> np.ndarray:
        size, quota = self.kept[source], self.quotas[source]
        # In Python's integers: an epoch times a quota may lie beyond int64.
        starts = {epoch: divmod(epoch * quota, size) for epoch in np.unique(epochs).tolist()}
        passes, read = np.array([starts[epoch] for epoch in epochs.tolist()], dtype=np.int64).T
        further, place = np.divmod(read + shuffled - sum(self.quotas[:source]), size)
        rows = self._shuffle(source, seed).rows_at(place, passes + further)
        return sum(self.sizes[:source]) + rows

    def reads_of(self, row: int, seed: int, epochs: range) -> tuple[np.ndarray, np.ndarray]:
        """Positions and epochs, int64, at which `row` is read; the inverse of `rows_at`."""
        source = int(np.searchsorted(np.cumsum(self.sizes), row, side="right"))
        size, quota, before = self.kept[source], self.quotas[source], sum(self.quotas[:source])
        within = row - sum(self.sizes[:source])
        first, last = epochs.start * quota // size, (epochs.stop * quota - 1) // size
        passes = np.arange(first, last + 1)
        places = self._shuffle(source, seed).places_of(within, passes)
        read_in, turn = np.divmod(passes * size + places, quota)
        inside = (read_in >= epochs.start) & (read_in < epochs.stop)
        read_in, turn = read_in[inside], turn[inside]
        return unpermute(before + turn, self.n_rows, seed, read_in), read_in
