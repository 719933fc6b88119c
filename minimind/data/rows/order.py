"""Row order: the rows that a rank reads at a step are a pure function of seed, step and rank.

Rows are shuffled in every epoch by a keyed permutation that is computed index by index. Nothing is
stored or replayed: step 10**6 costs as much as step 0, on any number of ranks. Rows that are left
out leave no trace in it: the others keep their order.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minimind.config.flags import MOST_LEFT_OUT
from minimind.config.rules import SourceRows
from minimind.config.run_config import RunConfig
from minimind.errors import UsageError
from minimind.runtime.durable_files import read_small

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
Ranges = tuple[tuple[int, int], ...]  # row numbers, ascending: first and one after the last


def rows_in(ranges: Ranges) -> np.ndarray:
    """The row numbers of some ranges, int64."""
    parts = [np.arange(first, stop, dtype=np.int64) for first, stop in ranges]
    return np.concatenate(parts) if parts else np.arange(0)


def count_rows(ranges: Ranges) -> int:
    """Number of rows in some ranges."""
    return sum(stop - first for first, stop in ranges)


def left_out_by_source(sizes: Sequence[int], left_out: Ranges) -> list[np.ndarray]:
    """Numbers within its source of the rows left out, by source."""
    ends, rows = np.cumsum(sizes), rows_in(left_out)
    parts = np.split(rows, np.searchsorted(rows, ends[:-1]))
    return [part - (end - size) for part, end, size in zip(parts, ends, sizes, strict=True)]


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
        return left_out_by_source(self.sizes, self.left_out)

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
        return self._quotas_of(self.n_rows)

    def _quotas_of(self, n_rows: int) -> tuple[int, ...]:
        total = sum(map(Fraction, self.weights))
        exact = [Fraction(weight) * n_rows / total for weight in self.weights]
        quotas = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda n: quotas[n] - exact[n])
        for number in by_remainder[: n_rows - sum(quotas)]:
            quotas[number] += 1
        return tuple(quotas)

    def rows_at(self, positions: np.ndarray, seed: int, epochs: np.ndarray) -> np.ndarray:
        """Row indices (int64, over all sources) at `positions` of `epochs`.

        The shuffled positions of an epoch are assigned to sources by quota, and within a source to
        its sequence of passes.
        """
        return self._dealt(positions, seed, epochs, self.n_rows, self.quotas)

    def _dealt(
        self,
        positions: np.ndarray,
        seed: int,
        epochs: np.ndarray,
        n_rows: int,
        quotas: tuple[int, ...],
    ) -> np.ndarray:
        """Row indices at `positions` of epochs of `n_rows` rows that have these quotas."""
        shuffled = permute(positions, n_rows, seed, epochs)
        ends = np.cumsum(quotas)
        source_of = np.searchsorted(ends, shuffled, side="right")
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
            epoch: divmod(self.reads_before(source, epoch), size)
            for epoch in np.unique(epochs).tolist()
        }
        passes, read = np.array([starts[epoch] for epoch in epochs.tolist()], dtype=np.int64).T
        further, place = np.divmod(read + turns, size)
        rows = self._shuffle(source, seed).rows_at(place, passes + further)
        return sum(self.sizes[:source]) + rows

    def reads_before(self, source: int, epoch: int) -> int:
        """How many rows of a source were read before an epoch, over all of its passes."""
        return epoch * self.quotas[source]

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
        """Rows of an epoch: those of the text that are not left out, or as the mixture says."""
        return self.mixture.n_rows if self.mixture else self.n_rows - count_rows(self.left_out)

    @property
    def steps_per_epoch(self) -> int:
        """Complete steps per epoch."""
        return self.rows_per_epoch // self.rows_per_step

    def tokens_of(self, steps: int, row_tokens: int) -> int:
        """Targets of a run of so many steps, with so many in a row."""
        return steps * self.rows_per_step * row_tokens

    def of(self, step: int) -> Order:
        """The order that has a step: that of its stage in a run with several."""
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


HEADER = re.compile(r"# rows of (\d+) tokens of text ([0-9a-f]{8})\s*")
MOST_BYTES = 2**28  # lines of nonfinite_rows.jsonl have the tokens of their rows
LINE = re.compile(r"(\d{1,16})(?::(\d{1,16}))?")


def skip_rows_text(rows: Iterable[int], row_tokens: int, fingerprint: str) -> str:
    """Return a file that leaves out `rows`; its first line names the text and the row length."""
    lines = [f"# rows of {row_tokens} tokens of text {fingerprint[:8]}"]
    for first, stop in joined((row, row + 1) for row in rows):
        lines.append(f"{first}:{stop - 1}" if stop - first > 1 else str(first))
    return "\n".join(lines) + "\n"


def read_skip_rows(path: Path, n_rows: int, row_tokens: int, fingerprint: str) -> Ranges:
    """Return the rows in a file, as ranges; raise UsageError for a line that names none.

    A line is a row (17), a range (17:19), a comment (#), or a JSON object with a `row`, such as
    those of nonfinite_rows.jsonl. Rows count from 0 and depend on --max_seq_len, so a file with the
    first line of `skip_rows_text` is refused for other text or rows of another length.
    """
    try:
        lines = read_small(path, MOST_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"--skip_rows {path}: {error.strerror}; correct the path") from error
    ranges: set[tuple[int, int]] = set()
    for number, line in enumerate(lines, 1):
        where = f"--skip_rows {path}:{number}"
        if header := HEADER.fullmatch(line):
            if header.groups() != (str(row_tokens), fingerprint[:8]):
                raise UsageError(
                    f"{where}: has rows of {header[1]} tokens of text {header[2]}, and this run"
                    f" reads rows of {row_tokens} of text {fingerprint[:8]}; give a file made for"
                    " it"
                )
        elif line.strip() and not line.lstrip().startswith("#"):
            found = _rows_of(line.strip(), row_tokens, where)
            if found is None:
                continue
            if not 0 <= found.start < found.stop <= n_rows:
                raise UsageError(f"{where}: {line.strip()[:80]!r} is not in rows 0 to {n_rows - 1}")
            ranges.add((found.start, found.stop))
    if not ranges:
        raise UsageError(f"--skip_rows {path}: has no rows; add some, or drop the flag")
    rows = joined(ranges)
    if (count := count_rows(rows)) > MOST_LEFT_OUT:
        raise UsageError(
            f"--skip_rows {path}: has {count:,} rows, more than {MOST_LEFT_OUT:,}; take their"
            " documents out of the text instead"
        )
    return rows


def sizes_of_sources(run: RunConfig, manifest: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows that the tokens of each source of a manifest make, of --max_seq_len tokens and one."""
    return tuple(one["tokens"]["train"] // (run.max_seq_len + 1) for one in manifest["sources"])


def rows_left_out(run: RunConfig, sizes: Sequence[int], manifest: Mapping[str, Any]) -> Ranges:
    """The rows of --skip_rows; `sizes` has the number of rows of each source."""
    if run.skip_rows is None:
        return ()
    path, row_tokens = Path(run.skip_rows), run.max_seq_len + 1
    return read_skip_rows(path, sum(sizes), row_tokens, manifest["fingerprint"])


def rows_of_sources(run: RunConfig, manifest: Mapping[str, Any]) -> list[SourceRows]:
    """Rows of the sources of a manifest, without those of --skip_rows if it is of text."""
    sizes, ranges = sizes_of_sources(run, manifest), ()
    if run.task == "pretrain":  # rows of conversations are numbered once they are packed
        ranges = rows_left_out(run, sizes, manifest)
    left_out = left_out_by_source(sizes, ranges)
    return [
        SourceRows(one["name"], size - len(out), one["weight"])
        for one, size, out in zip(manifest["sources"], sizes, left_out, strict=True)
    ]


def _rows_of(line: str, row_tokens: int, where: str) -> range | None:
    """Rows of a line, None for one of a gradient; raise UsageError for another line."""
    if line.startswith("{"):
        value = _row_object(line)
        tokens = value.get("tokens")
        if isinstance(tokens, list) and len(tokens) != row_tokens:
            raise UsageError(
                f"{where}: is a row of {len(tokens)} tokens, and this run reads rows of"
                f" {row_tokens} (--max_seq_len); give rows of this length"
            )
        row = value.get("row")
        if "row" not in value and "step" in value:  # in nonfinite_rows.jsonl: names no row
            return None
        if isinstance(row, int) and not isinstance(row, bool):
            return range(row, row + 1)
    elif match := LINE.fullmatch(line):
        return range(int(match[1]), int(match[2] or match[1]) + 1)
    raise UsageError(
        f"{where}: {line[:80]!r} is no row (17), range (17:19) or JSON object with a row; correct"
        " it"
    )


def _row_object(line: str) -> dict[str, Any]:
    """The JSON object of a line; empty for other lines."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending ranges; those that overlap or touch are joined."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return tuple(found)
