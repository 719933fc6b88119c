"""Micro-batches on the device, a pure function of the step, read ahead by threads.

`Windows` are the evaluation inputs of `minimind eval`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from minimind.data.rows.order import Order
from minimind.data.shards.conversation_shards import PADDING
from minimind.data.shards.token_shards import TokenShards
from minimind.runtime.device import device_kind

if TYPE_CHECKING:
    from minimind.data.rows.stages import StagedOrder
    from minimind.data.shards.teacher_rows import TeacherRows

ROWS_AT_ONCE = 1024  # row indices computed at once, for all steps that they cover
# Smaller steps are read in blocks: handing over to a thread costs more than reading them.
TOKENS_AT_ONCE = 2**15


@dataclass(frozen=True)
class Windows:
    """Ranges of a split; the token before a range is its first input."""

    shards: TokenShards
    starts: np.ndarray  # int64, position of the first target in the split
    lengths: np.ndarray
    starts_document: np.ndarray  # whether a text starts here; its first input is then an end token
    sources: np.ndarray
    eos_id: int

    def __len__(self) -> int:
        return len(self.starts)

    def tokens(self, number: int) -> np.ndarray:
        """The token before the window and its targets, int64 (length + 1,)."""
        start, length = int(self.starts[number]), int(self.lengths[number])
        if not self.starts_document[number]:
            return self.shards.stretch(start - 1, length + 1)
        return np.concatenate(([self.eos_id], self.shards.stretch(start, length)))


def windows_of(
    shards: TokenShards, length: int, eos_id: int, apart: bool = True, most: int | None = None
) -> Windows:
    """Windows of at most `length` targets over all documents, grouped by source.

    `apart`: windows end at documents; otherwise a source is one sequence, like packed rows. `most`
    limits the windows of a source, which are then spread over it.
    """
    source_ends = shards.source_ends()
    ends = np.unique(shards.document_ends() if apart else source_ends)
    ends = ends[ends > 0]
    begins = np.concatenate(([0], ends[:-1])).astype(np.int64)[: len(ends)]
    counts = -(-(ends - begins) // length)
    document = np.repeat(np.arange(len(ends)), counts)
    first = (np.cumsum(counts) - counts)[document]  # window of the document
    number = np.arange(len(document)) - first
    starts = begins[document] + number * length
    lengths = np.minimum(length, ends[document] - starts)
    sources = np.searchsorted(source_ends, starts, side="right")
    windows = Windows(shards, starts, lengths, number == 0, sources, eos_id)
    if most is None:
        return windows
    counts = np.bincount(sources, minlength=len(source_ends))
    begins = np.cumsum(counts) - counts
    pairs = zip(begins, counts.tolist(), strict=True)
    kept = np.concatenate([begin + np.sort(spread(count, most)) for begin, count in pairs])
    return Windows(shards, starts[kept], lengths[kept], (number == 0)[kept], sources[kept], eos_id)


@dataclass(frozen=True)
class Block:
    """Rows of some steps on the device, with the event of their copy (None: complete)."""

    number: int
    rows: torch.Tensor
    steps: list[tuple[torch.Tensor, ...]]  # the same, by step and micro-batch
    arrived: torch.Event | None


class Batches:
    """One rank's micro-batches, by step. Ranks with the same `data_rank` read the same rows.

    During a step the next one is read and copied to the GPU, on a separate stream from pinned
    memory; small steps in blocks. Each of `workers` threads reads one block ahead; with 0, a step
    is read on demand. Nothing else is stored: any step can be requested, at the cost of one wait.

    With the records of a teacher a row has its record after its tokens, zeros for padding.
    """

    def __init__(
        self,
        shards: TokenShards,
        order: Order,
        row_tokens: int,
        micro_batch_rows: int,
        data_rank: int,
        data_size: int,
        device: torch.device,
        workers: int = 1,
        teacher: TeacherRows | None = None,
    ) -> None:
        self.order = order
        self._shards = shards
        self._teacher = teacher
        self.row_tokens = row_tokens
        self.micro_batch_rows = micro_batch_rows
        self._data_rank = data_rank
        self._data_size = data_size
        kind = device_kind(device)
        self._copies = kind.copies(device)
        self._ahead = workers
        self._share = len(order.share(data_rank, data_size))
        # All ranks take as many micro-batches as the first one, which has the most rows.
        each = -(-len(order.share(0, data_size)) // micro_batch_rows) * micro_batch_rows
        self._padded_share = each
        width = row_tokens + (teacher.row_bytes // 8 if teacher else 0)
        small = TOKENS_AT_ONCE // (each * width)
        self._steps_at_once = max(1, small) if workers else 1
        self._reader = ThreadPoolExecutor(max(1, workers), "read-ahead", kind.use, (device,))
        self._pending: dict[int, Future[Block]] = {}  # by number of the block
        self._last: Block | None = None  # the block of the last request
        self._index_lock = threading.Lock()
        self._stretch = max(1, ROWS_AT_ONCE // each)  # steps
        self._known: dict[int, np.ndarray] = {}  # row indices by number of the stretch

    def of(self, step: int) -> Batches:
        """The batches of the stage that `step` is in."""
        return self

    @property
    def tokens_per_step(self) -> int:
        """Positions in the rows of one step, over all ranks and micro-batches.

        All are targets, but for conversations: their padding and the turns of users count too. Rows
        of padding do not count.
        """
        return self.order.rows_per_step * (self.row_tokens - 1)

    def at(self, step: int) -> tuple[torch.Tensor, ...]:
        """The micro-batches of a step, each int64 (micro_batch_rows, row_tokens).

        The current stream waits for rows that are still being copied.
        """
        number, at = divmod(step - self.order.origin.step, self._steps_at_once)
        block = self._last
        if block is None or block.number != number:
            block = self._last = self._block(number) if self._ahead else self._read(number)
        if self._copies is not None and block.arrived is not None:
            self._copies.receive(block.rows, block.arrived)
        return block.steps[at]

    def micro_batch_of(self, step: int, data_rank: int, number: int) -> torch.Tensor:
        """A micro-batch of any rank, int64 (micro_batch_rows, row_tokens), read now."""
        rows = self.order.rows_for(step, data_rank, self._data_size)
        first = number * self.micro_batch_rows
        return self._padded(rows[first : first + self.micro_batch_rows], 1, self.micro_batch_rows)

    def _padded(self, places: np.ndarray, steps: int, size: int) -> torch.Tensor:
        """Rows at the `places` of so many steps, each step filled to `size` rows by padding."""
        rows, given = self._shards.read_rows(places, self.row_tokens), len(places) // steps
        if self._teacher is not None:
            rows = np.concatenate([rows, self._teacher.read(places)], axis=1)
        rows = torch.from_numpy(rows)
        if given == size:
            return rows
        by_step = rows.view(steps, given, rows.shape[1])
        by_step = F.pad(by_step, (0, 0, 0, size - given), value=PADDING)
        by_step[:, given:, self.row_tokens :] = 0
        return by_step.flatten(0, 1)

    def _block(self, number: int) -> Block:
        """Return a block, read ahead or now, and start reading the next ones."""
        wanted = range(number, number + 1 + self._ahead)
        for other in self._pending.keys() - set(wanted):
            self._pending.pop(other).cancel()
        if number not in self._pending:
            self._pending[number] = self._reader.submit(self._read, number)
        block = self._pending[number].result()
        for later in wanted[1:]:
            if later not in self._pending:
                self._pending[later] = self._reader.submit(self._read, later)
        return block

    def require_unchanged(self) -> None:
        """Raise DataError if a token file changed since it was opened."""
        self._shards.require_unchanged()

    def close(self) -> None:
        """End the background thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, number: int) -> Block:
        first = self.order.origin.step + number * self._steps_at_once  # blocks begin at the origin
        steps = range(first, first + self._steps_at_once)
        places = np.concatenate([self._rows_for(step) for step in steps])
        rows = self._padded(places, len(steps), self._padded_share)
        rows, arrived = (rows, None) if self._copies is None else self._copies.send(rows)
        steps = [share.split(self.micro_batch_rows) for share in rows.split(self._padded_share)]
        return Block(number, rows, steps, arrived)

    def _rows_for(self, step: int) -> np.ndarray:
        """This rank's row indices, computed for several steps at once.

        Keeps one range of steps per block that is read concurrently.
        """
        number, at = divmod(step - self.order.origin.step, self._stretch)
        with self._index_lock:
            if number not in self._known:
                first = step - at
                ranks = self._data_rank, self._data_size
                indices = self.order.rows_for(first, *ranks, self._stretch)
                self._known[number] = indices.reshape(self._stretch, self._share)
                if len(self._known) > self._ahead + 2:
                    self._known.pop(next(iter(self._known)))
            return self._known[number][at]


class StagedBatches(Batches):
    """The micro-batches of a run in stages, each built when its first step is asked for."""

    def __init__(
        self, shards: TokenShards, order: StagedOrder, build: Callable[[int], Batches]
    ) -> None:
        """`build` makes the micro-batches of a stage, by its number from 0."""
        self.order: StagedOrder = order
        self._shards = shards
        self._build = build
        self._parts: dict[int, Batches] = {}

    def of(self, step: int) -> Batches:
        """The micro-batches of the stage of a step."""
        number = self.order.number_at(step)
        if number not in self._parts:
            self._parts[number] = self._build(number)
        return self._parts[number]

    def at(self, step: int) -> tuple[torch.Tensor, ...]:
        """The micro-batches of a step, as `Batches.at` has them."""
        # The spike guard looks back by a step.
        for number in [one for one in self._parts if one < self.order.number_at(step) - 1]:
            self._parts.pop(number).close()
        return self.of(step).at(step)

    def micro_batch_of(self, step: int, data_rank: int, number: int) -> torch.Tensor:
        """A micro-batch of any rank, as `Batches.micro_batch_of` has it."""
        return self.of(step).micro_batch_of(step, data_rank, number)

    def close(self) -> None:
        """End the background threads."""
        for part in self._parts.values():
            part.close()


def held_out_rows(
    shards: TokenShards, n: int, row_tokens: int, weights: Sequence[float] | None = None
) -> np.ndarray:
    """Indices of `n` rows (or all, if fewer): the first of a fixed order that is spread everywhere.

    The order depends on the numbers of rows and the weights alone. Sources share any number of rows
    by `weights` (None: by their rows), and each one's are spread over it. A source with rows has at
    least one, also if that makes more than `n`.
    """
    sizes = shards.sizes(row_tokens)
    if not n:
        return np.empty(0, dtype=np.int64)
    first = np.cumsum([0, *sizes[:-1]])
    rows = [begin + spread(size, n) for begin, size in zip(first, sizes, strict=True)]
    turns = [
        np.append(0.0, np.arange(1, min(size, n)) + 0.5)[:size] / weight
        for size, weight in zip(sizes, weights or [max(1, size) for size in sizes], strict=True)
    ]
    order = np.argsort(np.concatenate(turns), kind="stable")
    return np.concatenate(rows)[order[: max(n, np.count_nonzero(sizes))]]


def spread(total: int, n: int) -> np.ndarray:
    """The first `n` of a fixed order of all places below `total`, int64; all, if fewer.

    As many places as one takes, they are even over the whole: each is a step of about the golden
    ratio after the last, around the end. Of the steps near it one is chosen whose ratio to `total`
    has small partial quotients, which bound the unevenness (Niederreiter 1992, chapter 3).
    """

    def unevenness(step: int) -> tuple[int, int]:
        quotients, a, b = [], total, step
        while b:
            quotients.append(a // b)
            a, b = b, a % b
        return max(quotients), abs(step - golden)

    golden, near = round(total * (math.sqrt(5) - 1) / 2), min(32, total // 16 + 2)
    steps = range(max(1, golden - near), min(total, golden + near) + 1)
    step = min((one for one in steps if math.gcd(one, total) == 1), key=unevenness, default=1)
    return (np.arange(min(n, total)) * step + total // 2) % max(1, total)
