"""Pack whole conversations into padded rows; a token carries whether it is a target.

In the files the highest bit of a token marks a target. In a row, int64, a token t that is not a
target is ~t (negative), as the engine expects it, and ~(t + START) where a conversation starts. The
first token, which is no target, also has the number of the row's source: + number * SOURCE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minimind.data.shards.token_shards import TokenShards

TARGET = 1 << 31  # bit of a uint32 token that is trained on
START = 1 << 31  # bit of a row's non-target token where a conversation starts
SOURCE = 1 << 32  # unit of the source in the first token of a row
PADDING = ~0  # a token that is no target
DTYPE = np.dtype("<u4")


def marked(ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Token ids with the marks of targets, uint32, as they are stored."""
    return ids.astype(DTYPE) | np.where(targets, TARGET, 0).astype(DTYPE)


def unmarked(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids, int64, of tokens as they are stored, and which of them are targets."""
    stored = stored.astype(np.int64)
    return stored & (TARGET - 1), stored >= TARGET


@dataclass(frozen=True)
class Packing:
    """Which tokens of a split lie in which row: row n has the tokens `starts[n]` to `stops[n]`."""

    starts: np.ndarray  # int64
    stops: np.ndarray
    sizes: tuple[int, ...]  # rows of each source
    conversations: int
    cut: int  # conversations longer than a row, kept up to the end of an assistant turn
    dropped: int  # conversations whose first assistant turn ends after the row
    gaps: tuple[tuple[int, int], ...]  # tokens in no row, from and up to

    @property
    def tokens(self) -> int:
        """Tokens in all rows, without padding."""
        return int((self.stops - self.starts).sum())


class ConversationShards(TokenShards):
    """TokenShards whose rows hold whole conversations, next to each other, in their order."""

    def __init__(self, directory: str | Path, split: str, eos_id: int, **read: Any) -> None:
        super().__init__(directory, split, **read)
        self._eos_id = eos_id
        self._packings: dict[int, Packing] = {}

    @cached_property
    def _ends(self) -> np.ndarray:
        return self.document_ends()

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation; 0 if there is none."""
        return int(np.diff(self._ends, prepend=0).max(initial=0))

    def packing(self, row_tokens: int) -> Packing:
        if row_tokens not in self._packings:
            self._packings[row_tokens] = self._pack(row_tokens)
        return self._packings[row_tokens]

    def targets(self, row_tokens: int) -> int:
        """Number of tokens in all rows that are targets; reads the whole split."""
        for shard, tokens in enumerate(self._maps):
            self._check(shard, np.zeros(1, dtype=np.int64), len(tokens))
        whole = sum(int(np.count_nonzero(tokens >= TARGET)) for tokens in self._maps)
        gaps = self.packing(row_tokens).gaps
        return whole - sum(int(self.with_targets(a, b - a)[1].sum()) for a, b in gaps)

    def rows(self, row_tokens: int) -> int:
        """Number of rows over all sources."""
        return len(self.packing(row_tokens).starts)

    def sizes(self, row_tokens: int) -> tuple[int, ...]:
        """Rows of each source."""
        return self.packing(row_tokens).sizes

    def too_long(self, row_tokens: int) -> tuple[int, ...]:
        """Conversations of each source that are cut or dropped, as longer than a row."""
        ends = [gap[1] for gap in self.packing(row_tokens).gaps]
        before = np.searchsorted(ends, [0, *self.source_ends()], side="right")
        return tuple(np.diff(before).tolist())

    def row_starts(self, indices: np.ndarray, row_tokens: int) -> np.ndarray:
        """Position of the first token of each row, int64."""
        return self.packing(row_tokens).starts[np.asarray(indices, dtype=np.int64)]

    def row_stops(self, indices: np.ndarray, row_tokens: int) -> np.ndarray:
        """Position after the last token of each row, int64; padding is not stored."""
        return self.packing(row_tokens).stops[np.asarray(indices, dtype=np.int64)]

    def rows_over(self, start: int, stop: int, row_tokens: int) -> range:
        """The rows with any of the tokens `start` to `stop`."""
        packing = self.packing(row_tokens)
        first = int(np.searchsorted(packing.stops, start, side="right"))
        return range(first, int(np.searchsorted(packing.starts, stop, side="left")))

    def read_rows(self, indices: np.ndarray, row_tokens: int) -> np.ndarray:
        """Read rows as int64 (len(indices), row_tokens), as the module describes them.

        Padding is ~eos_id, and starts like a conversation. Raise DataError for an id outside the
        vocabulary.
        """
        packing = self.packing(row_tokens)
        source_stops = np.cumsum(packing.sizes)
        result = np.full((len(indices), row_tokens), ~self._eos_id, dtype=np.int64)
        for row, index in zip(result, np.asarray(indices, dtype=np.int64).tolist(), strict=True):
            start, stop = int(packing.starts[index]), int(packing.stops[index])
            ids, targets = self.with_targets(start, stop - start)
            row[: stop - start] = np.where(targets, ids, ~ids)
            first, last = np.searchsorted(self._ends, [start, stop])
            starts = np.append(self._ends[first:last] - start, 0)
            row[starts] = ~(ids[starts] + START)
            row[0] -= SOURCE * int(np.searchsorted(source_stops, index, side="right"))
            row[stop - start : stop - start + 1] = ~(self._eos_id + START)
        return result

    def stretch(self, start: int, length: int) -> np.ndarray:
        """Tokens from `start` on, int64 (length,); raise DataError for an invalid id."""
        return self.with_targets(start, length)[0]

    def with_targets(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids from `start` on, int64 (length,), and which of them are targets.

        Raise DataError for an invalid id.
        """
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start}..{start + length} of {len(self)}")
        stored = np.empty(length, dtype=np.int64)
        self._copy(start, stored)
        ids, targets = unmarked(stored)
        if length and ids.max() >= self._vocab_size:
            self._raise_unknown_id(np.array([start]), ids[None])
        return ids, targets

    def _pack(self, row_tokens: int) -> Packing:
        """Fill each row with the next conversations as long as they fit."""
        ends = self._ends
        source_ends = self.source_ends()
        starts: list[int] = []
        stops: list[int] = []
        sizes: list[int] = []
        gaps: list[tuple[int, int]] = []
        cut = dropped = at = begin = 0
        for source_end in source_ends.tolist():
            before = len(starts)
            last = int(np.searchsorted(ends, source_end, side="right"))
            while at < last:
                fits = min(int(np.searchsorted(ends, begin + row_tokens, side="right")), last)
                if fits > at:
                    starts.append(begin)
                    begin, at = int(ends[fits - 1]), fits
                    stops.append(begin)
                    continue
                kept = self._turns_within(begin, row_tokens)
                if kept:
                    starts.append(begin)
                    stops.append(begin + kept)
                cut, dropped = cut + bool(kept), dropped + (not kept)
                gaps.append((begin + kept, int(ends[at])))
                begin, at = int(ends[at]), at + 1
            sizes.append(len(starts) - before)
        first, last = (np.array(values, dtype=np.int64) for values in (starts, stops))
        return Packing(first, last, tuple(sizes), len(ends), cut, dropped, tuple(gaps))

    def _turns_within(self, start: int, length: int) -> int:
        """Tokens up to the last end of an assistant turn within `length`; 0 if there is none."""
        targets = self.with_targets(start, length + 1)[1]
        turn_ends = np.flatnonzero(targets[:-1] & ~targets[1:])
        return int(turn_ends[-1]) + 1 if len(turn_ends) else 0


@dataclass(frozen=True)
class ConversationRows:
    """The evaluation inputs of `minimind eval --task sft`: all rows of a split, unpadded."""

    shards: ConversationShards
    row_tokens: int

    @property
    def packing(self) -> Packing:
        return self.shards.packing(self.row_tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, without padding."""
        return self.packing.stops - self.packing.starts

    @property
    def sources(self) -> np.ndarray:
        """Number of the source of each row."""
        return np.repeat(np.arange(len(self.packing.sizes)), self.packing.sizes)

    def __len__(self) -> int:
        return len(self.packing.starts)

    def tokens(self, number: int) -> np.ndarray:
        """The tokens of a row, int64 (its length,): ~t for a token t that is no target."""
        (row,) = self.shards.read_rows(np.array([number]), self.row_tokens)
        return row[: int(self.lengths[number])]
