"""Row order: the rows that a rank reads at a step are a pure function of seed, step and rank.

Rows are shuffled in every epoch by a keyed permutation that is computed index by index. Nothing is
stored or replayed: step 10**6 costs as much as step 0, on any number of ranks. Rows that are left
out leave no trace in it: the others keep their order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from minimind.config.flags import MOST_LEFT_OUT
from minimind.data.loader.mixture import Mixture, Ranges, count_rows, rows_in
from minimind.data.loader.permutation import Shuffle


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

    n_rows: int  # of the text
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
        """Rows of the text that are not left out."""
        return self.n_rows - count_rows(self.left_out)

    @property
    def steps_per_epoch(self) -> int:
        """Complete steps per epoch."""
        return self.rows_per_epoch // self.rows_per_step

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
                (place,) = self._shuffle.beside_gaps(np.array([offset]), epoch).tolist()
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

    def rows_for(self, step: int, data_rank: int, data_size: int, steps: int = 1) -> np.ndarray:
        """Row indices of `data_rank` for `steps` steps from `step` on, int64 (steps * share,).

        Ranks take contiguous shares, so the order does not depend on the number of ranks.
        """
        if self.rows_per_step % data_size:
            raise ValueError(
                f"rows_per_step = {self.rows_per_step} cannot be shared by {data_size} ranks"
            )
        share = self.rows_per_step // data_size
        places = np.array([self.place(one) for one in range(step, step + steps)], dtype=np.int64)
        epochs = places[:, 0].repeat(share)
        positions = (places[:, 1:] + data_rank * share + np.arange(share)).ravel()
        if self.mixture:
            return self.mixture.rows_at(positions, self.seed, epochs)
        return self._shuffle.rows_at(positions, epochs)

    def reads_of(self, row: int, stop: int) -> list[tuple[int, int]]:
        """(step, position in its rows) of each read of `row` before step `stop`, in order."""
        if any(first <= row < last for first, last in self.left_out):
            return []
        origins = (self.origin, *self.jumps)
        stops = [*(jump.step for jump in self.jumps), stop]
        found = []
        for origin, end in zip(origins, stops, strict=True):
            found += self._reads_from(origin, row, min(end, stop))
        return sorted(found)

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
        found = [self._step_of(origin, epoch, position) for epoch, position in places]
        return [read for read in found if read is not None and read[0] < stop]

    def _step_of(self, origin: Origin, epoch: int, position: int) -> tuple[int, int] | None:
        """(step, position in its rows); None before the origin and in the tail of an epoch."""
        later = epoch - origin.epoch
        offset = 0 if later else origin.offset
        number, at = divmod(position - offset, self.rows_per_step)
        if not 0 <= number < (self.rows_per_epoch - offset) // self.rows_per_step:
            return None
        skipped = self._steps_left(origin) + (later - 1) * self.steps_per_epoch if later else 0
        return origin.step + skipped + number, at
