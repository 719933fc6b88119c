"""Loss of a model on whole texts or conversations, per source (`minimind eval`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import Windows
from minimind.data.shards.conversation_shards import PADDING, ConversationRows, ConversationShards
from minimind.engine.engine import marked_inputs
from minimind.errors import DataError
from minimind.model.loss import IGNORED
from minimind.runtime.device import widened


@dataclass(frozen=True)
class LossSums:
    """Summed loss in nats, and the number of tokens and bytes of text in the sum.

    With the number of rows, and sums over the rows of the squares of their losses and tokens and of
    their product, it has a standard error.
    """

    loss: float
    tokens: float
    text_bytes: float
    rows: float = 0.0
    loss_loss: float = 0.0
    loss_tokens: float = 0.0
    tokens_tokens: float = 0.0

    @classmethod
    def of_rows(cls, losses: np.ndarray, tokens: np.ndarray, text_bytes: float) -> LossSums:
        """The sums over rows (N,) of these losses and tokens; rows without tokens do not count."""
        columns = (losses, tokens)
        sums = (losses @ losses, losses @ tokens, tokens @ tokens)
        rows = np.count_nonzero(tokens)
        return cls(*map(float, (*map(np.sum, columns), text_bytes, rows, *sums)))

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*map(add, astuple(self), astuple(other)))

    def scaled(self, factor: float) -> LossSums:
        """The sums of so many times the tokens, from the same rows, without a standard error."""
        return LossSums(self.loss * factor, self.tokens * factor, self.text_bytes * factor)

    @property
    def residual(self) -> float:
        """Squares of what the loss of each row differs from the mean of its tokens, summed."""
        spread = self.loss_loss - 2 * self.mean * self.loss_tokens
        return max(spread + self.mean**2 * self.tokens_tokens, 0.0)  # NaN stays

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
        """The fields of an `eval` event in metrics.jsonl, without those of a standard error."""
        return {
            "val_loss": self.mean,
            "val_ppl": self.perplexity,
            "val_bpb": self.bits_per_byte,
            "tokens": round(self.tokens),
        }


def standard_error(parts: Sequence[LossSums], shares: Sequence[float]) -> float | None:
    """Standard error of the mean loss of sources that count by `shares`, from their rows' spread.

    A mean is a ratio of two sums over rows: its error is that of Cochran (1977), 6.13, for rows of
    any number of tokens, drawn from a text without end. A source of one row is taken to spread as
    the rows of the others do. None if no source has two rows.
    """
    freedom = sum(max(0.0, part.rows - 1) for part in parts)
    if not freedom:
        return None
    usual, variance = sum(part.residual for part in parts) / freedom, 0.0
    for part, share in zip(parts, shares, strict=True):
        if part.rows:
            squared = part.residual / (part.rows - 1) if part.rows > 1 else usual
            variance += part.rows * squared * (share / sum(shares) / part.tokens) ** 2
    return math.sqrt(variance)


@dataclass(frozen=True)
class Part:
    """Windows over some text, its name, and its size in bytes where that is known exactly."""

    windows: Windows | ConversationRows
    names: tuple[str, ...]  # one per source
    text_bytes: tuple[int | None, ...]
    mean_bytes: tuple[float | None, ...]  # bytes of text per token, where tokens do not show it


def part_of_conversations(
    name: str, prepared: Prepared, positions: int, max_seq_len: int | None
) -> Part:
    """The rows of a file as training packs them; raise DataError if no conversation fits.

    `positions` are those of the model. Without `max_seq_len` a row is as long as the longest
    conversation: losses are the same in longer rows, which need more memory.
    """
    assert isinstance(prepared.train, ConversationShards)
    row_tokens = 1 + (max_seq_len or positions)  # a position has the next token as its target
    if max_seq_len is None:
        row_tokens = min(row_tokens, prepared.train.longest)
    rows = ConversationRows(prepared.train, row_tokens)
    if not len(rows):
        raise DataError(
            f"{name}: has no conversation whose first answer ends within {row_tokens} tokens; give"
            " shorter ones"
        )
    return Part(rows, (name,), (None,), (None,))


def figures_of(sums: Sequence[LossSums], parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of `minimind eval --json`: of conversations if the parts hold some."""
    total = reduce(add, sums)
    error = standard_error(sums, [one.tokens for one in sums])
    means = {"loss": total.mean, "loss_se": error, "perplexity": total.perplexity}
    rows = [part.windows for part in parts]
    packings = [split.packing for split in rows if isinstance(split, ConversationRows)]
    if packings:
        dropped = sum(packing.dropped for packing in packings)
        return {
            **means,
            "targets": int(total.tokens),
            "conversations": sum(packing.conversations for packing in packings) - dropped,
            "cut": sum(packing.cut for packing in packings),
            "dropped": dropped,
        }
    return {
        **means,
        "bits_per_byte": total.bits_per_byte,
        "tokens": int(total.tokens),
        "bytes": int(total.text_bytes),
    }


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
    """Tokens (B, longest), padded with `PADDING`, and the source of each row (B,)."""
    longest = max(len(tokens) for _, tokens in rows)
    batch = np.full((len(rows), longest), PADDING, dtype=np.int64)
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
    has_starts = any(isinstance(part.windows, ConversationRows) for part in parts)
    model = model.to(accelerator.device)
    bytes_of = torch.from_numpy(piece_bytes).to(accelerator.device)
    loader = DataLoader(texts, batch_size=min(batch_rows, len(texts)), collate_fn=_batch)
    names = [name for part in parts for name in part.names]
    sums = torch.zeros(len(names), 7, dtype=torch.float64)
    counted = 0
    for rows, sources in accelerator.prepare_data_loader(loader):
        row_sums = _row_sums(model, rows, has_starts, bytes_of)
        sources, row_sums = accelerator.gather_for_metrics((sources, row_sums))
        row_sums = row_sums.cpu().double()
        losses, tokens, _ = row_sums.T
        squares = (torch.ones_like(losses), losses**2, losses * tokens, tokens**2)
        sums.index_add_(0, sources.cpu(), torch.column_stack((row_sums, *squares)))
        counted += len(sources)
    assert counted == len(texts), f"gathered {counted} windows of {len(texts)}"
    exact_bytes = [
        pair for part in parts for pair in zip(part.text_bytes, part.mean_bytes, strict=True)
    ]
    results: dict[str, LossSums] = {}
    for name, (exact, mean), (loss, tokens, text_bytes, *spread) in zip(
        names, exact_bytes, sums.tolist(), strict=True
    ):
        estimate = text_bytes if mean is None else mean * tokens
        part = LossSums(loss, tokens, float(estimate if exact is None else exact), *spread)
        if tokens:  # the splits of a source share its name
            results[name] = results[name] + part if name in results else part
    return results


@torch.no_grad()
def row_losses(
    model: Any, rows: torch.Tensor, has_starts: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss summed over each of the marked rows (B,), float64 where the device has it; targets."""
    inputs = marked_inputs(rows, has_starts)
    targets = inputs.pop("shift_labels")
    logits = model(**inputs, use_cache=False).logits.float()
    losses = F.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    return widened(losses).sum(1), targets


def _row_sums(
    model: Any, rows: torch.Tensor, has_starts: bool, bytes_of: torch.Tensor
) -> torch.Tensor:
    """Loss, tokens and bytes of each row, float64 (B, 3) where the device has it."""
    losses, targets = row_losses(model, rows, has_starts)
    counted = targets != IGNORED
    text_bytes = bytes_of[targets.clamp(min=0)] * counted
    return torch.stack([losses, widened(counted).sum(1), widened(text_bytes).sum(1)], dim=1)
