"""Row order: the rows that a rank reads at a step are a pure function of seed, step and rank.

Rows are shuffled in every epoch by a keyed permutation that is computed index by index. Nothing is
stored or replayed: step 10**6 costs as much as step 0, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

ROUNDS = 8  # one sha512 digest gives 8 round keys of 8 bytes
MOST_SOURCES = 10_000


def permute(
    positions: np.ndarray, size: int, seed: int, epoch: int | np.ndarray, source: int | None = None
) -> np.ndarray:
    """Permute positions of `range(size)`, int64; a bijection in every epoch.

    `epoch` may be an array with one epoch per position. Each source has its own shuffles. A Feistel
    network (Luby and Rackoff 1988) permutes the next power of four; values beyond `size` are
    permuted again until they are inside (cycle walking; Black and Rogaway 2002), fewer than four
    times on average. Memory does not depend on `size`: an index array for 10**9 rows would take 8
    GB on every rank.
    """
    return _walk(_feistel, positions, size, seed, epoch, source)


def unpermute(
    values: np.ndarray, size: int, seed: int, epoch: int | np.ndarray, source: int | None = None
) -> np.ndarray:
    """The positions that `permute` maps to `values`, int64."""
    return _walk(_unfeistel, values, size, seed, epoch, source)


def _walk(
    network: Callable[[np.ndarray, int, np.ndarray], np.ndarray],
    given: np.ndarray,
    size: int,
    seed: int,
    epoch: int | np.ndarray,
    source: int | None,
) -> np.ndarray:
    """Apply the network until all values are inside."""
    values = np.array(given, dtype=np.uint64)
    if size < 1 or (values >= size).any():
        raise ValueError(f"positions must lie in range({size})")
    keys = _keys(seed, np.atleast_1d(epoch), source)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    values = network(values, half_bits, keys)
    while len(outside := np.flatnonzero(values >= size)):
        of_these = keys if keys.shape[1] == 1 else keys[:, outside]
        values[outside] = network(values[outside], half_bits, of_these)
    return values.astype(np.int64)


def _keys(seed: int, epochs: np.ndarray, source: int | None) -> np.ndarray:
    """Keys of the rounds, uint64 (ROUNDS, 1) for a single epoch, else (ROUNDS, epochs)."""
    of_source = "" if source is None else f"/{source}"
    different, place = np.unique(epochs, return_inverse=True)
    digests = [hashlib.sha512(f"{seed}/{one}{of_source}".encode()).digest() for one in different]
    keys = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, ROUNDS).T
    return keys if len(different) == 1 else keys[:, place]


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << bits | right


def _unfeistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """The inverse of `_feistel`."""
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> bits, values & mask
    for key in keys[::-1]:
        left, right = right ^ (_mix(left + key) & mask), left
    return left << bits | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix bits with the finalizer of splitmix64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


@dataclass(frozen=True)
class Mixture:
    """Rows of each source and its weight, relative to the sum of weights.

    An epoch has as many rows as all sources together, and each source a quota of them. A source is
    read in shuffled passes across epochs; after an epoch, read counts differ by at most one.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

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
        for number, quota in enumerate(self.quotas):
            if quota < 1:
                raise ValueError(
                    f"source {number} has weight {self.weights[number]:g}, which rounds to none of"
                    f" the {self.n_rows} rows of an epoch"
                )

    @property
    def n_rows(self) -> int:
        """Rows of all sources, and rows per epoch."""
        return sum(self.sizes)

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
        size, quota = self.sizes[source], self.quotas[source]
        # In Python's integers: an epoch times a quota may lie beyond int64.
        starts = {epoch: divmod(epoch * quota, size) for epoch in np.unique(epochs).tolist()}
        passes, read = np.array([starts[epoch] for epoch in epochs.tolist()], dtype=np.int64).T
        further, place = np.divmod(read + shuffled - sum(self.quotas[:source]), size)
        return sum(self.sizes[:source]) + permute(place, size, seed, passes + further, source)

    def reads_of(self, row: int, seed: int, epochs: range) -> tuple[np.ndarray, np.ndarray]:
        """Positions and epochs, int64, at which `row` is read; the inverse of `rows_at`."""
        source = int(np.searchsorted(np.cumsum(self.sizes), row, side="right"))
        size, quota, before = self.sizes[source], self.quotas[source], sum(self.quotas[:source])
        within = row - sum(self.sizes[:source])
        first, last = epochs.start * quota // size, (epochs.stop * quota - 1) // size
        passes = np.arange(first, last + 1)
        places = unpermute(np.full(len(passes), within), size, seed, passes, source)
        read_in, turn = np.divmod(passes * size + places, quota)
        inside = (read_in >= epochs.start) & (read_in < epochs.stop)
        read_in, turn = read_in[inside], turn[inside]
        return unpermute(before + turn, self.n_rows, seed, read_in), read_in


@dataclass(frozen=True)
class Origin:
    """Start of an order: at `step`, after `rows` rows in total, `offset` rows into `epoch`.

    All zero unless batch size or data changed on a resume.
    """

    step: int = 0
    rows: int = 0
    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Order:
    """The global row order, with `rows_per_step` rows per step over all ranks.

    Positions continue across epochs. Rows after the last complete step of an epoch are dropped,
    different ones in each epoch. Without a mixture each remaining row is read once per epoch.
    """

    n_rows: int
    rows_per_step: int
    seed: int
    origin: Origin = Origin()
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        if self.mixture and self.mixture.n_rows != self.n_rows:
            raise ValueError(f"the sources have {self.mixture.n_rows} rows, not {self.n_rows}")
        if self.rows_per_step < 1 or self.steps_per_epoch < 1:
            raise ValueError(f"{self.n_rows} rows make no step of {self.rows_per_step} rows")

    @property
    def steps_per_epoch(self) -> int:
        """Complete steps per epoch."""
        return self.n_rows // self.rows_per_step

    def positions(self, step: int) -> range:
        """Positions that all ranks together read at `step`."""
        first = self.origin.rows + (step - self.origin.step) * self.rows_per_step
        return range(first, first + self.rows_per_step)

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, rows of it already read) when `step` begins."""
        origin, steps = self.origin, step - self.origin.step
        left = (self.n_rows - origin.offset) // self.rows_per_step  # steps left in origin.epoch
        if steps < left:
            return origin.epoch, origin.offset + steps * self.rows_per_step
        epochs, step_of_epoch = divmod(steps - left, self.steps_per_epoch)
        return origin.epoch + 1 + epochs, step_of_epoch * self.rows_per_step

    def origin_at(self, step: int, is_same_text: bool) -> Origin:
        """Origin of another order that replaces this one at `step`.

        With another batch size reading continues; with other data or another seed it restarts.
        """
        epoch, offset = self.place(step) if is_same_text else (0, 0)
        return Origin(step, self.positions(step).start, epoch, offset)

    def rows_for(self, step: int, rank: int, world_size: int, steps: int = 1) -> np.ndarray:
        """Row indices of `rank` for `steps` steps from `step` on, int64 (steps * share,).

        Ranks take contiguous shares, so the order does not depend on the number of ranks.
        """
        if self.rows_per_step % world_size:
            raise ValueError(
                f"rows_per_step = {self.rows_per_step} cannot be shared by {world_size} ranks"
            )
        share = self.rows_per_step // world_size
        places = np.array([self.place(one) for one in range(step, step + steps)], dtype=np.int64)
        epochs = places[:, 0].repeat(share)
        positions = (places[:, 1:] + rank * share + np.arange(share)).ravel()
        if self.mixture:
            return self.mixture.rows_at(positions, self.seed, epochs)
        return permute(positions, self.n_rows, self.seed, epochs)

    def reads_of(self, row: int, stop: int) -> list[tuple[int, int]]:
        """(step, position in its rows) of each read of `row` before step `stop`, in order."""
        if stop <= self.origin.step:
            return []
        epochs = range(self.origin.epoch, self.place(stop - 1)[0] + 1)
        if self.mixture:
            positions, read_in = self.mixture.reads_of(row, self.seed, epochs)
        else:
            read_in = np.arange(epochs.start, epochs.stop)
            positions = unpermute(np.full(len(epochs), row), self.n_rows, self.seed, read_in)
        found = map(self._step_of, read_in.tolist(), positions.tolist())
        return sorted(read for read in found if read is not None and read[0] < stop)

    def _step_of(self, epoch: int, position: int) -> tuple[int, int] | None:
        """(step, position in its rows); None before the origin and in the tail of an epoch."""
        origin, later = self.origin, epoch - self.origin.epoch
        offset = 0 if later else origin.offset
        number, at = divmod(position - offset, self.rows_per_step)
        if not 0 <= number < (self.n_rows - offset) // self.rows_per_step:
            return None
        left = (self.n_rows - origin.offset) // self.rows_per_step
        skipped = left + (later - 1) * self.steps_per_epoch if later else 0
        return origin.step + skipped + number, at
