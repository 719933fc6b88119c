"""Validation loss over a fixed set of held-out rows, in all and of every source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch

from minimind.data.loader.token_shards import TokenShards
from minimind.engine.build import Engine
from minimind.model.loss import IGNORED


@dataclass(frozen=True)
class HeldOutRows:
    """The rows a validation reads, and how many bytes of text each token stands for."""

    shards: TokenShards
    rows: np.ndarray
    row_tokens: int
    piece_bytes: np.ndarray
    sources: tuple[str, ...] = ("data",)
    weights: tuple[float, ...] | None = None  # of the sources in training; None: by their size

    def by_source(self) -> dict[str, np.ndarray]:
        """The rows of each source that has any."""
        if len(self.sources) == 1:
            return {self.sources[0]: self.rows}
        ends = np.cumsum(self.shards.sizes(self.row_tokens))
        source = np.searchsorted(ends, self.rows, side="right")
        found = {name: self.rows[source == n] for n, name in enumerate(self.sources)}
        return {name: rows for name, rows in found.items() if len(rows)}

    def batch(self, wanted: np.ndarray, size: int) -> np.ndarray:
        """The wanted rows as int64 (size, row_tokens); what they do not fill is `IGNORED`."""
        batch = np.full((size, self.row_tokens), IGNORED, dtype=np.int64)
        if len(wanted):
            batch[: len(wanted)] = self.shards.read_rows(wanted, self.row_tokens)
        return batch


@dataclass(frozen=True)
class LossSums:
    """Loss in nats, and over how many tokens and bytes of text it was summed."""

    loss: float
    tokens: float
    text_bytes: float

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss + other.loss, self.tokens + other.tokens, self.text_bytes + other.text_bytes
        )

    def scaled(self, factor: float) -> LossSums:
        """The sums as if there were `factor` times as much of the same text."""
        return LossSums(self.loss * factor, self.tokens * factor, self.text_bytes * factor)

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.loss / max(1.0, self.tokens)

    @property
    def perplexity(self) -> float:
        """The same as a number of equally likely tokens."""
        return math.exp(min(self.mean, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Of text, so that models with different tokenizers can be compared."""
        return self.loss / math.log(2) / max(1.0, self.text_bytes)

    def event(self) -> dict[str, float]:
        """As metrics.jsonl has it."""
        told = {"val_loss": self.mean, "val_ppl": self.perplexity, "val_bpb": self.bits_per_byte}
        return {**told, "tokens": round(self.tokens)}


def evaluate(engine: Engine, held_out: HeldOutRows, batch_rows: int) -> dict[str, Any]:
    """`val_loss` (nats per token), `val_ppl`, `val_bpb` (bits per byte of text) and `tokens`.

    Of several sources also `by_source`, the same of each. With weights the whole is that of the
    mixture: every source counts by its weight, however many of its rows are held out. Every rank
    runs the same number of forward passes, the last ones perhaps on rows of ignored targets: under
    ZeRO-3 they are collective.
    """
    parts = held_out.by_source()
    found = [_sums(engine, held_out, rows, batch_rows) for rows in parts.values()]
    flat = engine.sum_over_ranks([number for sums in found for number in sums])
    each = [LossSums(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
    if len(held_out.sources) == 1:
        return each[0].event()
    by_source = dict(zip(parts, each, strict=True))
    whole = mixture(by_source, held_out)
    return {**whole.event(), "by_source": {name: one.event() for name, one in by_source.items()}}


def mixture(by_source: Mapping[str, LossSums], held_out: HeldOutRows) -> LossSums:
    """The sums over all held-out tokens, with every source scaled to its weight in training."""
    total = reduce(add, by_source.values())
    if held_out.weights is None:
        return total
    weight = dict(zip(held_out.sources, held_out.weights, strict=True))
    share = total.tokens / sum(weight[name] for name in by_source)  # tokens per unit of weight
    return reduce(
        add,
        (
            one.scaled(weight[name] * share / max(1.0, one.tokens))
            for name, one in by_source.items()
        ),
    )


def _sums(engine: Engine, held_out: HeldOutRows, rows: np.ndarray, batch_rows: int) -> list[float]:
    """Loss, tokens and bytes of this rank's share of the rows."""
    sums = [0.0, 0.0, 0.0]
    for start in range(0, len(rows), batch_rows * engine.world_size):
        first = start + engine.rank * batch_rows
        batch = held_out.batch(rows[first : first + batch_rows], batch_rows)
        loss, count = engine.loss_of(torch.from_numpy(batch))
        targets = batch[:, 1:]
        text_bytes = held_out.piece_bytes[targets[targets != IGNORED]].sum()
        sums = [sums[0] + float(loss), sums[1] + float(count), sums[2] + float(text_bytes)]
    return sums
