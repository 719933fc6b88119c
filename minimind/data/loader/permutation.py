"""Shuffles of rows by a keyed permutation, which is computed index by index.

A Feistel network (Luby and Rackoff 1988) permutes the next power of four; values beyond the size
are permuted again until they are inside (cycle walking; Black and Rogaway 2002), fewer than four
times on average. Memory does not depend on the size: an index array for 10**9 rows would take 8 GB
on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

ROUNDS = 8  # one sha512 digest gives 8 round keys of 8 bytes


def permute(
    positions: np.ndarray, size: int, seed: int, epoch: int | np.ndarray, source: int | None = None
) -> np.ndarray:
    """Permute positions of `range(size)`, int64; a bijection in every epoch.

    `epoch` may be an array with one epoch per position. Each source has its own shuffles.
    """
    return _walk(_feistel, positions, size, seed, epoch, source)


def unpermute(
    values: np.ndarray, size: int, seed: int, epoch: int | np.ndarray, source: int | None = None
) -> np.ndarray:
    """The positions that `permute` maps to `values`, int64."""
    return _walk(_unfeistel, values, size, seed, epoch, source)


@dataclass(frozen=True)
class Shuffle:
    """Passes over `size` rows, each in its own order, without the rows that are left out.

    Leaving rows out does not change the order of the others.
    """

    size: int
    seed: int
    left_out: np.ndarray  # row numbers, int64
    source: int | None = None

    def rows_at(self, places: np.ndarray, passes: np.ndarray) -> np.ndarray:
        """Row numbers, int64, at `places` of `passes`, one pass per place."""
        if len(self.left_out):
            places = places.copy()
            for one in np.unique(passes).tolist():
                mine = passes == one
                places[mine] = self.beside_gaps(places[mine], one)
        return permute(places, self.size, self.seed, passes, self.source)

    def places_of(self, row: int, passes: np.ndarray) -> np.ndarray:
        """Place, int64, of a row in each of `passes`; the inverse of `rows_at`."""
        found = np.full(len(passes), row)
        places = unpermute(found, self.size, self.seed, passes, self.source)
        if len(self.left_out):
            places -= [self.gaps_before(p, one) for p, one in zip(places, passes, strict=True)]
        return places

    def beside_gaps(self, places: np.ndarray, number: int) -> np.ndarray:
        """Places among the kept rows of a pass as places among all of its rows."""
        gaps = self._gaps(number)
        return places + np.searchsorted(gaps - np.arange(len(gaps)), places, side="right")

    def gaps_before(self, place: int, number: int) -> int:
        """How many rows are left out before a place among all rows of a pass."""
        return int(np.searchsorted(self._gaps(number), place))

    def _gaps(self, number: int) -> np.ndarray:
        """Places of the rows that are left out, ascending."""
        return np.sort(unpermute(self.left_out, self.size, self.seed, number, self.source))


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
