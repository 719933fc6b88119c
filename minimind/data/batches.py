"""Rows to micro-batches: a pure function of the step, read ahead by one background thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from minimind.data.order import Order
from minimind.data.shards import TokenShards


class Batches:
    """One rank's micro-batches, by step.

    While a step is trained on, the next one is read. That is all the state there is, and it is
    never saved: asking for any other step only costs one wait.
    """

    def __init__(
        self,
        shards: TokenShards,
        order: Order,
        row_tokens: int,
        micro_batch_rows: int,
        rank: int,
        world_size: int,
        pin: bool,
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
        self._pin = pin
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._pending: dict[int, Future[list[torch.Tensor]]] = {}

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one step, over all ranks and micro-batches."""
        return self.order.rows_per_step * (self._row_tokens - 1)

    def at(self, step: int) -> list[torch.Tensor]:
        """The micro-batches of a step, each int64 (micro_batch_rows, row_tokens)."""
        future = self._pending.pop(step, None) or self._reader.submit(self._read, step)
        for other in self._pending.values():
            other.cancel()
        micro_batches = future.result()
        self._pending = {step + 1: self._reader.submit(self._read, step + 1)}
        return micro_batches

    def close(self) -> None:
        """End the background thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> list[torch.Tensor]:
        indices = self.order.rows_for(step, self._rank, self._world_size)
        rows = torch.from_numpy(self._shards.read_rows(indices, self._row_tokens))
        if self._pin:
            rows = rows.pin_memory()
        return list(rows.split(self._micro_batch_rows))


def held_out_rows(shards: TokenShards, n: int, row_tokens: int) -> np.ndarray:
    """Indices of the first `n` rows, or of all if there are fewer."""
    return np.arange(min(n, shards.rows(row_tokens)))
