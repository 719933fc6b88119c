"""Which rows a rank reads at a step: arithmetic, so a position in the data is one integer.

Rows are shuffled anew every epoch by a keyed permutation that is computed index by index. Nothing
is stored and nothing is replayed: step 10**6 costs what step 0 costs, on any number of ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

ROUNDS = 8


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where a shuffle of `range(size)` sends each position: int64, one to one.

    A Feistel network (Luby and Rackoff 1988) permutes the next power of four; a value that lands
    beyond `size` is sent on until it lands inside (cycle walking; Black and Rogaway 2002), which
    takes fewer than four rounds on average. Memory does not depend on `size`: an index array for
    10**9 rows would take 8 GB on every rank.
    """
    values = np.array(positions, dtype=np.uint64)
    if size < 1 or (values >= size).any():
        raise ValueError(f"positions must lie in range({size})")
    keys = np.frombuffer(hashlib.sha512(f"{seed}/{epoch}".encode()).digest(), dtype="<u8")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _feistel(values, half_bits, keys)
    while len(outside := np.flatnonzero(values >= size)):
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> bits, values & mask
    for key in keys[:ROUNDS]:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << bits | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit given (the finalizer of splitmix64)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


@dataclass(frozen=True)
class Origin:
    """Where an order takes over: at `step`, after `rows` rows in all, `offset` rows into `epoch`.

    A run whose batch or text was changed on the way goes on in another order than it began in.
    """

    step: int = 0
    rows: int = 0
    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Order:
    """The global row order: `rows_per_step` rows a step, over all ranks and micro-batches.

    A row's place in it counts on through the epochs. What an epoch has left over after its last
    whole step is dropped, never padded; another permutation leaves other rows over.
    """

    n_rows: int
    rows_per_step: int
    seed: int
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        if self.rows_per_step < 1 or self.steps_per_epoch < 1:
            raise ValueError(f"{self.n_rows} rows are no step of {self.rows_per_step} rows")

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in one pass over the rows."""
        return self.n_rows // self.rows_per_step

    def positions(self, step: int) -> range:
        """The places in the global row order that all ranks together read at `step`."""
        first = self.origin.rows + (step - self.origin.step) * self.rows_per_step
        return range(first, first + self.rows_per_step)

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, rows of it already read) when `step` begins."""
        origin, steps = self.origin, step - self.origin.step
        left = (self.n_rows - origin.offset) // self.rows_per_step  # steps of the epoch begun
        if steps < left:
            return origin.epoch, origin.offset + steps * self.rows_per_step
        epochs, step_of_epoch = divmod(steps - left, self.steps_per_epoch)
        return origin.epoch + 1 + epochs, step_of_epoch * self.rows_per_step

    def origin_at(self, step: int, is_same_text: bool) -> Origin:
        """Where another order takes over from this one at `step`.

        With another batch it reads on; another text or another shuffle it reads from the start.
        """
        epoch, offset = self.place(step) if is_same_text else (0, 0)
        return Origin(step, self.positions(step).start, epoch, offset)

    def rows_for(self, step: int, rank: int, world_size: int) -> np.ndarray:
        """Row indices `rank` reads at `step`: int64 (rows_per_step / world_size,).

        Ranks take contiguous shares, so joined by rank they are what one rank alone would read.
        """
        if self.rows_per_step % world_size:
            raise ValueError(
                f"rows_per_step = {self.rows_per_step} cannot be shared by {world_size} ranks"
            )
        share = self.rows_per_step // world_size
        epoch, offset = self.place(step)
        start = offset + rank * share
        return permute(np.arange(start, start + share), self.n_rows, self.seed, epoch)
