"""Validation loss over a fixed set of held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from minimind.data.shards import TokenShards
from minimind.model.loss import IGNORED
from minimind.train.engine import Engine


@dataclass(frozen=True)
class HeldOut:
    """The rows a validation reads, and how many bytes of text each token stands for."""

    shards: TokenShards
    rows: np.ndarray
    row_tokens: int
    piece_bytes: np.ndarray

    def batch(self, start: int, size: int) -> np.ndarray:
        """Rows start..start+size as int64 (size, row_tokens); beyond the last row: `IGNORED`."""
        wanted = self.rows[start : start + size]
        batch = np.full((size, self.row_tokens), IGNORED, dtype=np.int64)
        if len(wanted):
            batch[: len(wanted)] = self.shards.read_rows(wanted, self.row_tokens)
        return batch


def evaluate(engine: Engine, held_out: HeldOut, batch_rows: int) -> dict[str, float]:
    """`val_loss` (nats per token), `val_ppl`, `val_bpb` (bits per byte of text) and `tokens`.

    Every rank runs the same number of forward passes, the last ones perhaps on rows of ignored
    targets: under ZeRO-3 a forward pass is collective. Bits per byte do not depend on the
    tokenizer, so runs with different ones can be compared.
    """
    sums = [0.0, 0.0, 0.0]
    for start in range(0, len(held_out.rows), batch_rows * engine.world_size):
        rows = held_out.batch(start + engine.rank * batch_rows, batch_rows)
        loss, count = engine.loss_of(torch.from_numpy(rows))
        targets = rows[:, 1:]
        text_bytes = held_out.piece_bytes[targets[targets != IGNORED]].sum()
        sums = [sums[0] + float(loss), sums[1] + float(count), sums[2] + float(text_bytes)]
    loss, tokens, text_bytes = engine.sum_over_ranks(sums)
    mean = loss / max(1.0, tokens)
    return {
        "val_loss": mean,
        "val_ppl": math.exp(min(mean, 700.0)),
        "val_bpb": loss / math.log(2) / max(1.0, text_bytes),
        "tokens": int(tokens),
    }
