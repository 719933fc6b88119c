"""Row order: the rows that a rank reads at a step are a pure function of seed, step and rank.

Rows are shuffled in every epoch by a keyed permutation that is computed index by index. Nothing is
stored or replayed: step 10**6 costs as much as step 0, on any number of ranks. Rows that are left
out leave no trace in it: the others keep their order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from minimind.config.flags import MOST_LEFT_OUT
from minimind.config.run_config import RunConfig

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
                places[mine] = self.with_gaps(places[mine], one)
        return permute(places, self.size, self.seed, passes, self.source)

    def places_of(self, row: int, passes: np.ndarray) -> np.ndarray:
        """Place, int64, of a row in each of `passes`; the inverse of `rows_at`."""
        found = np.full(len(passes), row)
        places = unpermute(found, self.size, self.seed, passes, self.source)
        if len(self.left_out):
            pairs = zip(places, passes, strict=True)
            places -= np.array([self.gaps_before(*pair) for pair in pairs], dtype=np.int64)
        return places

    def with_gaps(self, places: np.ndarray, number: int) -> np.ndarray:
        """Map places among the kept rows of a pass to places among all of its rows."""
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
    digests = [
        hashlib.sha512(f"{seed}/{epoch}{of_source}".encode()).digest() for epoch in different
    ]
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


MOST_SOURCES = 10_000
ENDLESS = 2**62  # rows of a run that has no stages
Ranges = tuple[tuple[int, int], ...]  # row numbers, ascending: first and one after the last


def rows_in(ranges: Ranges) -> np.ndarray:
    """The row numbers of some ranges, int64."""
    parts = [np.arange(first, stop, dtype=np.int64) for first, stop in ranges]
    return np.concatenate(parts) if parts else np.arange(0)


def count_rows(ranges: Ranges) -> int:
    """Number of rows in some ranges."""
    return sum(stop - first for first, stop in ranges)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending ranges; those that overlap or touch are joined."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return tuple(found)


def left_out_by_source(sizes: Sequence[int], left_out: Ranges) -> list[np.ndarray]:
    """Numbers within its source of the rows left out, by source."""
    ends, rows = np.cumsum(sizes), rows_in(left_out)
    parts = np.split(rows, np.searchsorted(rows, ends[:-1]))
    return [part - (end - size) for part, end, size in zip(parts, ends, sizes, strict=True)]


@dataclass(frozen=True)
class Mixture:
    """Rows of each source and its weight, relative to the sum of weights.

    An epoch has `epoch_rows` rows (0: as many as all sources together, without those left out), and
    each source a quota of them. A source is read in shuffled passes across epochs; after an epoch,
    read counts differ by at most one. The mixture of a stage ends after `stage_rows`, in a shorter
    last epoch with quotas of its own; its weights may be 0.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    left_out: Ranges = ()
    stage_rows: int = ENDLESS
    epoch_rows: int = 0
    first_epoch: int = 0  # epochs of the earlier stages
    begun: tuple[int, ...] = ()  # by source: rows of this length that earlier stages read

    def __post_init__(self) -> None:
        if not 0 < len(self.sizes) == len(self.weights) <= MOST_SOURCES:
            raise ValueError(
                f"{len(self.sizes)} sources have {len(self.weights)} weights; at most"
                f" {MOST_SOURCES:,} can be mixed"
            )
        is_stage = self.stage_rows != ENDLESS
        reads_any, counts_all = any(self.weights), len(self.begun) == len(self.sizes)
        if is_stage and not (reads_any and counts_all):
            raise ValueError(f"{len(self.sizes)} sources have the weights {self.weights}")
        for number, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
            if is_stage and not weight:
                continue
            if size < 1:
                raise ValueError(f"source {number} has {size} rows")
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"source {number} has the weight {weight}")
            if not self.kept[number]:
                raise ValueError(f"all {size} rows of source {number} are left out")
        if not 0 < self.n_rows <= self.stage_rows:
            raise ValueError(f"{self.stage_rows} rows have no epoch of {self.n_rows}")
        for number, quota in enumerate(self.quotas):
            if quota < 1 and not is_stage:
                raise ValueError(
                    f"source {number} has weight {self.weights[number]:g}, which rounds to none of"
                    f" the {self.n_rows} rows of an epoch"
                )

    @cached_property
    def _left_out(self) -> list[np.ndarray]:
        """Numbers within its source of the rows left out, by source."""
        return left_out_by_source(self.sizes, self.left_out)

    @cached_property
    def kept(self) -> list[int]:
        """Rows that are not left out, by source."""
        return [size - len(out) for size, out in zip(self.sizes, self._left_out, strict=True)]

    @property
    def n_rows(self) -> int:
        """Rows of an epoch, but for the last of a stage."""
        return self.epoch_rows or sum(self.kept)

    @property
    def whole_epochs(self) -> int:
        """Epochs of `n_rows` rows."""
        return self.stage_rows // self.n_rows

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Rows per epoch of each source, by largest remainders; their sum is `n_rows`.

        Computed with fractions, independent of the machine's rounding.
        """
        return self._quotas_of(self.n_rows)

    @cached_property
    def tail_quotas(self) -> tuple[int, ...]:
        """Rows of each source in the shorter last epoch."""
        return self._quotas_of(self.stage_rows % self.n_rows)

    def _quotas_of(self, n_rows: int) -> tuple[int, ...]:
        total = sum(map(Fraction, self.weights))
        exact = [Fraction(weight) * n_rows / total for weight in self.weights]
        quotas = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda n: quotas[n] - exact[n])
        for number in by_remainder[: n_rows - sum(quotas)]:
            quotas[number] += 1
        return tuple(quotas)

    @property
    def reads(self) -> tuple[int, ...]:
        """Rows of each source that a stage reads."""
        pairs = zip(self.quotas, self.tail_quotas, strict=True)
        return tuple(self.whole_epochs * quota + tail for quota, tail in pairs)

    def _read_before(self, source: int, epoch: int) -> int:
        """How many rows of a source, of this length, were read before an epoch."""
        epochs = epoch - self.first_epoch
        whole = min(epochs, self.whole_epochs)
        begun = self.begun[source] if self.begun else 0
        tail = self.tail_quotas[source] if epochs > whole else 0
        return begun + whole * self.quotas[source] + tail

    def rows_at(self, positions: np.ndarray, seed: int, epochs: np.ndarray) -> np.ndarray:
        """Row indices (int64, over all sources) at `positions` of `epochs`.

        The shuffled positions of an epoch are assigned to sources by quota, and within a source to
        its sequence of passes. After the end of a stage, up to which threads may read ahead, they
        are any rows.
        """
        last, tail = self.first_epoch + self.whole_epochs, self.stage_rows % self.n_rows
        is_last = (epochs >= last) & (tail > 0)
        rows = np.empty_like(positions)
        inside = ~is_last
        rows[inside] = self._dealt(positions[inside], seed, epochs[inside], self.quotas)
        if is_last.any():
            places, epochs = positions[is_last] % tail, np.full(is_last.sum(), last)
            rows[is_last] = self._dealt(places, seed, epochs, self.tail_quotas)
        return rows

    def _dealt(
        self, positions: np.ndarray, seed: int, epochs: np.ndarray, quotas: tuple[int, ...]
    ) -> np.ndarray:
        """Row indices at `positions` of epochs that have these quotas."""
        shuffled = permute(positions, sum(quotas), seed, epochs)
        source_of = np.searchsorted(np.cumsum(quotas), shuffled, side="right")
        rows = np.empty_like(shuffled)
        for source in np.unique(source_of).tolist():
            mine = np.flatnonzero(source_of == source)
            turns = shuffled[mine] - sum(quotas[:source])
            rows[mine] = self._read(source, turns, seed, epochs[mine])
        return rows

    def _read(self, source: int, turns: np.ndarray, seed: int, epochs: np.ndarray) -> np.ndarray:
        """Row indices of the reads of a source that are its `turns` in `epochs`."""
        size = self.kept[source]
        # Python's integers: an epoch times a quota may lie beyond int64.
        starts = {
            epoch: divmod(self._read_before(source, epoch), size)
            for epoch in np.unique(epochs).tolist()
        }
        passes, read = np.array([starts[epoch] for epoch in epochs.tolist()], dtype=np.int64).T
        further, place = np.divmod(read + turns, size)
        rows = self._shuffle(source, seed).rows_at(place, passes + further)
        return sum(self.sizes[:source]) + rows

    def _shuffle(self, source: int, seed: int) -> Shuffle:
        return Shuffle(self.sizes[source], seed, self._left_out[source], source)

    def reads_of(self, row: int, seed: int, epochs: range) -> tuple[np.ndarray, np.ndarray]:
        """Positions and epochs, int64, at which `row` is read; the inverse of `rows_at`."""
        source = int(np.searchsorted(np.cumsum(self.sizes), row, side="right"))
        size, quota = self.kept[source], self.quotas[source]
        first, stop = (self._read_before(source, at) for at in (epochs.start, epochs.stop))
        passes = np.arange(first // size, -(-stop // size))  # the first and last may be partial
        within = row - sum(self.sizes[:source])
        reads = passes * size + self._shuffle(source, seed).places_of(within, passes)
        reads = reads[(reads >= first) & (reads < stop)]
        reads -= self._read_before(source, self.first_epoch)
        whole = self.whole_epochs
        numbers = np.minimum(reads // quota, whole) if quota else np.full(len(reads), whole)
        turns, read_in = reads - numbers * quota, numbers + self.first_epoch
        positions = np.empty_like(turns)
        for chosen, quotas in (
            (numbers < whole, self.quotas),
            (numbers == whole, self.tail_quotas),
        ):
            if chosen.any():
                places = sum(quotas[:source]) + turns[chosen]
                positions[chosen] = unpermute(places, sum(quotas), seed, read_in[chosen])
        return positions, read_in


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
    different ones in each epoch. Without a mixture each remaining row is read once per epoch. Rows
    in `left_out` are never read. From the step of a jump on, reading continues at its place.
    """

    n_rows: int  # rows of the text
    rows_per_step: int
    seed: int
    origin: Origin = Origin()
    mixture: Mixture | None = None
    left_out: Ranges = ()
    jumps: tuple[Origin, ...] = ()

    def __post_init__(self) -> None:
        if self.mixture and sum(self.mixture.sizes) != self.n_rows:
            raise ValueError(f"the sources have {sum(self.mixture.sizes)} rows, not {self.n_rows}")
        if self.mixture and self.mixture.left_out != self.left_out:
            raise ValueError("the order and its mixture leave out different rows")
        if count_rows(self.left_out) > MOST_LEFT_OUT:
            raise ValueError(f"at most {MOST_LEFT_OUT:,} rows can be left out")
        if self.rows_per_step < 1 or self.steps_per_epoch < 1:
            raise ValueError(
                f"{self.rows_per_epoch} rows make no step of {self.rows_per_step} rows"
            )

    @cached_property
    def _shuffle(self) -> Shuffle:
        return Shuffle(self.n_rows, self.seed, rows_in(self.left_out))

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch: the rows of the text that are not left out, or as the mixture says."""
        return self.mixture.n_rows if self.mixture else self.n_rows - count_rows(self.left_out)

    @property
    def steps_per_epoch(self) -> int:
        """Complete steps per epoch."""
        return self.rows_per_epoch // self.rows_per_step

    def tokens_of(self, steps: range, row_tokens: int) -> int:
        """Targets of these steps, with so many in a row."""
        return (steps.stop - steps.start) * self.rows_per_step * row_tokens

    def of(self, step: int) -> Order:
        """The order of the stage that `step` is in."""
        return self

    def positions(self, step: int) -> range:
        """Positions that all ranks together read at `step`."""
        origin = self._origin_of(step)
        first = origin.rows + (step - origin.step) * self.rows_per_step
        return range(first, first + self.rows_per_step)

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, rows of it already read) when `step` begins."""
        origin = self._origin_of(step)
        steps = step - origin.step
        left = self._steps_left(origin)
        if steps < left:
            return origin.epoch, origin.offset + steps * self.rows_per_step
        epochs, step_of_epoch = divmod(steps - left, self.steps_per_epoch)
        return origin.epoch + 1 + epochs, step_of_epoch * self.rows_per_step

    def _origin_of(self, step: int) -> Origin:
        """The origin or jump from which `step` is counted."""
        return next((jump for jump in self.jumps[::-1] if jump.step <= step), self.origin)

    def _steps_left(self, origin: Origin) -> int:
        """Complete steps from an origin to the end of its epoch."""
        return (self.rows_per_epoch - origin.offset) // self.rows_per_step

    def jumping(self, step: int, to: int) -> Order:
        """Return the order that from `step` on reads what this one reads from `to` on."""
        jump = Origin(step, self.positions(to).start, *self.place(to))
        kept = tuple(one for one in self.jumps if one.step < step)
        return replace(self, jumps=(*kept, jump))

    def origin_at(self, step: int, is_same_text: bool, left_out: Ranges | None = None) -> Origin:
        """Origin of another order that replaces this one at `step`.

        With another batch size, or other rows left out, reading continues; with other data or
        another seed it restarts.
        """
        # Rows up to a jump that lies ahead are not read.
        at = max([step, *(jump.step for jump in self.jumps)])
        epoch, offset = self.place(at) if is_same_text else (0, 0)
        if is_same_text and left_out is not None and left_out != self.left_out:
            if self.mixture:  # its quotas change, and with them the order of an epoch
                offset = min(offset, self.n_rows - count_rows(left_out))
            else:
                (place,) = self._shuffle.with_gaps(np.array([offset]), epoch).tolist()
                other = Shuffle(self.n_rows, self.seed, rows_in(left_out))
                offset = place - other.gaps_before(place, epoch)
        return Origin(step, self.positions(at).start, epoch, offset)

    def start_json(self) -> dict[str, Any]:
        """The origin, and the rows left out and the jumps, where there are any."""
        values: dict[str, Any] = asdict(self.origin)
        if self.left_out:
            values["left_out"] = [list(one) for one in self.left_out]
        if self.jumps:
            values["jumps"] = [asdict(jump) for jump in self.jumps]
        return values

    @property
    def stage_runs(self) -> dict[str, RunConfig]:
        """The flags of each stage, by its name; none without --stages."""
        return {}

    def stage_of(self, step: int) -> dict[str, str]:
        """Name of the stage of a step, as a field of a step line; none without --stages."""
        return {}

    def stages_json(self) -> dict[str, dict[str, Any]]:
        """What the stages of a run add to its identity, by group; nothing without stages."""
        return {}

    def mixture_json(self) -> dict[str, Any] | None:
        """Sizes and weights of the sources."""
        return self.mixture and {"sizes": self.mixture.sizes, "weights": self.mixture.weights}

    @classmethod
    def from_json(
        cls,
        n_rows: int,
        rows_per_step: int,
        seed: int,
        start: dict[str, Any],
        mixture: dict[str, Any] | None,
    ) -> Order:
        """The order that `start_json` and `mixture_json` describe; ValueError if there is none."""
        left_out = tuple((first, stop) for first, stop in start.get("left_out", ()))
        jumps = tuple(Origin(**jump) for jump in start.get("jumps", ()))
        origin = Origin(start["step"], start["rows"], start["epoch"], start["offset"])
        mixed = None
        if mixture is not None:
            mixed = Mixture(tuple(mixture["sizes"]), tuple(mixture["weights"]), left_out)
        return cls(n_rows, rows_per_step, seed, origin, mixed, left_out, jumps)

    def share(self, data_rank: int, data_size: int) -> range:
        """Places of a rank's rows among those of a step; ranks differ by one row at most.

        Shares are contiguous, so the order does not depend on the number of ranks.
        """
        first, stop = (
            -(-rank * self.rows_per_step // data_size) for rank in (data_rank, data_rank + 1)
        )
        return range(first, stop)

    def data_rank_of(self, place: int, data_size: int) -> int:
        """The rank whose `share` has a place."""
        return place * data_size // self.rows_per_step

    def rows_for(self, step: int, data_rank: int, data_size: int, steps: int = 1) -> np.ndarray:
        """Row indices of `data_rank` for `steps` steps from `step` on, int64 (steps * share,)."""
        share = np.array(self.share(data_rank, data_size), dtype=np.int64)
        places = np.array([self.place(one) for one in range(step, step + steps)], dtype=np.int64)
        epochs = places[:, 0].repeat(len(share))
        positions = (places[:, 1:] + share).ravel()
        if self.mixture:
            return self.mixture.rows_at(positions, self.seed, epochs)
        return self._shuffle.rows_at(positions, epochs)

    def reads_of(self, row: int, stop: int) -> list[tuple[int, int]]:
        """(step, position in its rows) of each read of `row` before step `stop`, in order."""
        if any(first <= row < last for first, last in self.left_out):
            return []
        origins = (self.origin, *self.jumps)
        stops = [*(jump.step for jump in self.jumps), stop]
        reads = []
        for origin, end in zip(origins, stops, strict=True):
            reads += self._reads_from(origin, row, min(end, stop))
        return sorted(reads)

    def _reads_from(self, origin: Origin, row: int, stop: int) -> list[tuple[int, int]]:
        """The reads of a row between an origin and step `stop`."""
        if stop <= origin.step:
            return []
        epochs = range(origin.epoch, self.place(stop - 1)[0] + 1)
        if self.mixture:
            positions, read_in = self.mixture.reads_of(row, self.seed, epochs)
        else:
            read_in = np.arange(epochs.start, epochs.stop)
            positions = self._shuffle.places_of(row, read_in)
        places = zip(read_in.tolist(), positions.tolist(), strict=True)
        reads = [self._step_of(origin, epoch, position) for epoch, position in places]
        return [read for read in reads if read is not None and read[0] < stop]

    def _step_of(self, origin: Origin, epoch: int, position: int) -> tuple[int, int] | None:
        """(step, position in its rows); None before the origin and in the tail of an epoch."""
        later = epoch - origin.epoch
        offset = 0 if later else origin.offset
        number, at = divmod(position - offset, self.rows_per_step)
        if not 0 <= number < (self.rows_per_epoch - offset) // self.rows_per_step:
            return None
        skipped = self._steps_left(origin) + (later - 1) * self.steps_per_epoch if later else 0
        return origin.step + skipped + number, at
