"""Loss of held-out rows during training, and of whole texts (`minimind eval`), per source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from minimind.data.loader.batches import Windows
from minimind.data.loader.token_shards import TokenShards
from minimind.engine.build import Engine
from minimind.engine.loss_of_batch import PADDING
from minimind.model.loss import IGNORED


@dataclass(frozen=True)
class HeldOutRows:
    """Rows that an evaluation reads, and the bytes of text that each token stands for."""

    shards: TokenShards
    rows: np.ndarray  # (N,) row indices
    row_tokens: int
    piece_bytes: np.ndarray  # (vocabulary,)
    sources: tuple[str, ...] = ("data",)
    weights: tuple[float, ...] | None = None  # of the sources in training; None: by size

    def by_source(self) -> dict[str, np.ndarray]:
        """Row indices of each source that has any."""
        if len(self.sources) == 1:
            return {self.sources[0]: self.rows}
        ends = np.cumsum(self.shards.sizes(self.row_tokens))
        source = np.searchsorted(ends, self.rows, side="right")
        rows = {name: self.rows[source == n] for n, name in enumerate(self.sources)}
        return {name: indices for name, indices in rows.items() if len(indices)}

    def batch(self, indices: np.ndarray, size: int) -> np.ndarray:
        """Tokens of the rows, int64 (size, row_tokens), padded with rows of `PADDING`."""
        batch = np.full((size, self.row_tokens), PADDING, dtype=np.int64)
        if len(indices):
            batch[: len(indices)] = self.shards.read_rows(indices, self.row_tokens)
        return batch


@dataclass(frozen=True)
class LossSums:
    """Summed loss in nats, and the number of tokens and bytes of text in the sum."""

    loss: float
    tokens: float
    text_bytes: float

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss + other.loss, self.tokens + other.tokens, self.text_bytes + other.text_bytes
        )

    def scaled(self, factor: float) -> LossSums:
        """Return the sums multiplied by `factor`."""
        return LossSums(self.loss * factor, self.tokens * factor, self.text_bytes * factor)

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.loss / max(1.0, self.tokens)

    @property
    def perplexity(self) -> float:
        """exp(mean); the mean is clamped at 700 against overflow."""
        return math.exp(min(self.mean, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text: comparable between models with different tokenizers."""
        return self.loss / math.log(2) / max(1.0, self.text_bytes)

    def event(self) -> dict[str, float]:
        """The fields of an `eval` event in metrics.jsonl."""
        return {
            "val_loss": self.mean,
            "val_ppl": self.perplexity,
            "val_bpb": self.bits_per_byte,
            "tokens": round(self.tokens),
        }


def evaluate(engine: Engine, held_out: HeldOutRows, batch_rows: int) -> dict[str, Any]:
    """Return the fields of an `eval` event, with `by_source` if there are several sources.

    With weights the total is that of the mixture: a source counts by its weight in training, not by
    its number of held-out rows. Collective: under ZeRO-3 a forward pass is, so every rank runs the
    same number of them, the last ones perhaps on ignored rows.
    """
    rows_of = held_out.by_source()
    local = [_sum_loss(engine, held_out, rows, batch_rows) for rows in rows_of.values()]
    flat = engine.sum_over_ranks([number for sums in local for number in sums])
    sums = [LossSums(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
    if len(held_out.sources) == 1:
        return sums[0].event()
    by_source = dict(zip(rows_of, sums, strict=True))
    events = {name: part.event() for name, part in by_source.items()}
    return {**mixture(by_source, held_out).event(), "by_source": events}


def mixture(by_source: Mapping[str, LossSums], held_out: HeldOutRows) -> LossSums:
    """Sum over all held-out tokens, with each source scaled to its weight in training."""
    total = reduce(add, by_source.values())
    if held_out.weights is None:
        return total
    weight = dict(zip(held_out.sources, held_out.weights, strict=True))
    tokens_per_weight = total.tokens / sum(weight[name] for name in by_source)
    scaled = (
        sums.scaled(weight[name] * tokens_per_weight / max(1.0, sums.tokens))
        for name, sums in by_source.items()
    )
    return reduce(add, scaled)


def _sum_loss(
    engine: Engine, held_out: HeldOutRows, rows: np.ndarray, batch_rows: int
) -> list[float]:
    """Loss, tokens and bytes summed over this rank's share of the rows.

    The device is read at the end, so that it computes a batch while the next one is made.
    """
    losses, counts, text_bytes = [], [], 0.0
    for start in range(0, len(rows), batch_rows * engine.world_size):
        first = start + engine.rank * batch_rows
        batch = held_out.batch(rows[first : first + batch_rows], batch_rows)
        loss, count = engine.loss_of(torch.from_numpy(batch))
        losses.append(loss)
        counts.append(count)
        targets = batch[:, 1:]
        text_bytes += float(held_out.piece_bytes[targets[targets >= 0]].sum())
    return [sum(torch.stack(losses).tolist()), sum(torch.stack(counts).tolist()), text_bytes]


@dataclass(frozen=True)
class Part:
    """Windows over some text, its name, and its size in bytes where that is known exactly."""

    windows: Windows
    names: tuple[str, ...]  # one per source
    text_bytes: tuple[int | None, ...]


class _Texts(Dataset[tuple[int, np.ndarray]]):
    """Windows of all parts, longest first, so that the windows of a batch have similar lengths."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        sizes = [len(part.windows) for part in parts]
        first_name = np.cumsum([0, *(len(part.names) for part in parts)])[:-1]
        part = np.repeat(np.arange(len(parts)), sizes)
        number = np.concatenate([np.arange(size) for size in sizes])
        source = np.concatenate(
            [part.windows.sources + n for part, n in zip(parts, first_name, strict=True)]
        )
        order = np.argsort(-np.concatenate([part.windows.lengths for part in parts]), kind="stable")
        self._part, self._number, self._source = part[order], number[order], source[order]

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, at: int) -> tuple[int, np.ndarray]:
        windows = self._parts[int(self._part[at])].windows
        return int(self._source[at]), windows.tokens(int(self._number[at]))


def _batch(rows: Sequence[tuple[int, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, longest), padded with `IGNORED`, and the source of each row (B,)."""
    longest = max(len(tokens) for _, tokens in rows)
    batch = np.full((len(rows), longest), IGNORED, dtype=np.int64)
    for number, (_, tokens) in enumerate(rows):
        batch[number, : len(tokens)] = tokens
    return torch.from_numpy(batch), torch.tensor([source for source, _ in rows])


def score(
    accelerator: Any, model: Any, parts: Sequence[Part], piece_bytes: np.ndarray, batch_rows: int
) -> dict[str, LossSums]:
    """Return the loss sums of each source that has text, by name, on every process.

    Batches are distributed over the processes; `gather_for_metrics` drops the rows that pad the
    last round.
    """
    texts = _Texts(parts)
    model = model.to(accelerator.device)
    bytes_of = torch.from_numpy(piece_bytes).to(accelerator.device)
    loader = DataLoader(texts, batch_size=min(batch_rows, len(texts)), collate_fn=_batch)
    names = [name for part in parts for name in part.names]
    sums = torch.zeros(len(names), 3, dtype=torch.float64)
    counted = 0
    for rows, sources in accelerator.prepare_data_loader(loader):
        row_sums = _row_sums(model, rows, bytes_of)
        sources, row_sums = accelerator.gather_for_metrics((sources, row_sums))
        sums.index_add_(0, sources.cpu(), row_sums.cpu())
        counted += len(sources)
    assert counted == len(texts), f"gathered {counted} windows of {len(texts)}"
    exact_bytes = [count for part in parts for count in part.text_bytes]
    results: dict[str, LossSums] = {}
    for name, exact, (loss, tokens, text_bytes) in zip(
        names, exact_bytes, sums.tolist(), strict=True
    ):
        part = LossSums(loss, tokens, float(text_bytes if exact is None else exact))
        if tokens:  # the splits of a source share its name
            results[name] = results[name] + part if name in results else part
    return results


@torch.no_grad()
def _row_sums(model: Any, rows: torch.Tensor, bytes_of: torch.Tensor) -> torch.Tensor:
    """Loss, tokens and bytes of each row, float64 (B, 3)."""
    inputs, targets = rows[:, :-1].clamp(min=0), rows[:, 1:]
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    losses = F.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    counted = targets != IGNORED
    text_bytes = bytes_of[targets.clamp(min=0)] * counted
    columns = (losses.double(), counted.double(), text_bytes.double())
    return torch.stack([column.sum(1) for column in columns], dim=1)
