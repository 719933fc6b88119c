"""Rows to micro-batches on their device: a pure function of the step, read ahead by one thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from minimind.data.order import Order
from minimind.data.shards import TokenShards

ROWS_AT_ONCE = 1024  # whose places in the order are computed together, as many steps as they are


@dataclass(frozen=True)
class Step:
    """The rows of a step on their device, and when they have arrived there (None: they have)."""

    rows: torch.Tensor
    arrived: torch.cuda.Event | None


class Batches:
    """One rank's micro-batches, by step.

    While a step is trained on, the next one is read and, to a GPU, sent: on a stream of its own,
    from pinned memory. Each of `workers` threads reads one step ahead; without any, none is. That
    is all the state there is, and it is never saved: asking for any other step only costs one wait.
    """

    def __init__(
        self,
        shards: TokenShards,
        order: Order,
        row_tokens: int,
        micro_batch_rows: int,
        rank: int,
        world_size: int,
        device: torch.device,
        workers: int = 1,
    ) -> None:
        if order.rows_per_step % (micro_batch_rows * world_size):
            raise ValueError(
                f"rows_per_step = {order.rows_per_step} is no whole number of micro-batches of"
                f" {micro_batch_rows} rows on {world_size} ranks"
            )
        self.order = order
        self._shards = shards
        self._row_tokens = row_tokens
        self._micro_batch_rows = micro_batch_rows
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = workers
        self._reader = ThreadPoolExecutor(max(1, workers), thread_name_prefix="read-ahead")
        self._pending: dict[int, Future[Step]] = {}
        self._places = threading.Lock()
        self._known = range(0)  # the steps whose row indices are in _indices
        self._indices = np.empty((0, 0), dtype=np.int64)

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one step, over all ranks and micro-batches."""
        return self.order.rows_per_step * (self._row_tokens - 1)

    def at(self, step: int) -> list[torch.Tensor]:
        """The micro-batches of a step, each int64 (micro_batch_rows, row_tokens).

        What the current stream is then given to do waits for rows that are still under way.
        """
        future = self._pending.pop(step, None) or self._reader.submit(self._read, step)
        wanted = range(step + 1, step + 1 + self._ahead)
        for other in self._pending.keys() - set(wanted):
            self._pending.pop(other).cancel()
        found = future.result()
        for later in wanted:
            if later not in self._pending:
                self._pending[later] = self._reader.submit(self._read, later)
        if found.arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(found.arrived)
            found.rows.record_stream(stream)  # or its memory would be reused while it is read
        return list(found.rows.split(self._micro_batch_rows))

    def require_unchanged(self) -> None:
        """Nothing, or a DataError when a token file was changed since it was opened."""
        self._shards.require_unchanged()

    def close(self) -> None:
        """End the background thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> Step:
        rows = torch.from_numpy(self._shards.read_rows(self._rows_for(step), self._row_tokens))
        if self._stream is None:
            return Step(rows, None)
        with torch.cuda.stream(self._stream):
            sent = rows.pin_memory().to(self._device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
            return Step(sent, arrived)

    def _rows_for(self, step: int) -> np.ndarray:
        """This rank's row indices, computed for many steps when one is asked for."""
        with self._places:
            if step not in self._known:
                share = self.order.rows_per_step // self._world_size
                self._known = range(step, step + max(1, ROWS_AT_ONCE // share))
                indices = self.order.rows_for(step, self._rank, self._world_size, len(self._known))
                self._indices = indices.reshape(len(self._known), share)
            return self._indices[step - self._known.start]


def held_out_rows(shards: TokenShards, n: int, row_tokens: int) -> np.ndarray:
    """Indices of `n` rows, or of all if there are fewer; of several sources all over them."""
    sizes = shards.sizes(row_tokens)
    total = sum(sizes)
    if len(sizes) == 1 or total <= n:
        return np.arange(min(n, total))
    return np.linspace(0, total - 1, n).astype(np.int64) if n else np.arange(0)
