"""The loss of a model over whole texts, on any number of processes: `minimind eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from minimind.data.loader.eval_windows import Windows
from minimind.model.loss import IGNORED
from minimind.train.evaluate import LossSums


@dataclass(frozen=True)
class Part:
    """Windows over some text, what it is called, and its bytes where they are known exactly."""

    windows: Windows
    names: tuple[str, ...]  # of its sources
    text_bytes: tuple[int | None, ...]


class _Texts(Dataset[tuple[int, np.ndarray]]):
    """The windows of all parts, the longest first: those of a batch are then about as long."""

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
    """Tokens (B, longest + 1), `IGNORED` behind the end of each, and the source of each (B,)."""
    longest = max(len(tokens) for _, tokens in rows)
    batch = np.full((len(rows), longest), IGNORED, dtype=np.int64)
    for number, (_, tokens) in enumerate(rows):
        batch[number, : len(tokens)] = tokens
    return torch.from_numpy(batch), torch.tensor([source for source, _ in rows])


def score(
    accelerator: Any, model: Any, parts: Sequence[Part], piece_bytes: np.ndarray, batch_rows: int
) -> dict[str, LossSums]:
    """The sums of each source that has text, by its name.

    Every process scores every so many batches and all of them get the results of all;
    `gather_for_metrics` leaves out the rows that a last round was filled up with.
    """
    texts = _Texts(parts)
    model = model.to(accelerator.device)
    bytes_of = torch.from_numpy(piece_bytes).to(accelerator.device)
    loader = DataLoader(texts, batch_size=min(batch_rows, len(texts)), collate_fn=_batch)
    names = [name for part in parts for name in part.names]
    sums = torch.zeros(len(names), 3, dtype=torch.float64)
    counted = 0
    for rows, sources in accelerator.prepare_data_loader(loader):
        found = accelerator.gather_for_metrics((sources, _row_sums(model, rows, bytes_of)))
        sums.index_add_(0, found[0].cpu(), found[1].cpu())
        counted += len(found[0])
    assert counted == len(texts), f"{counted} windows were gathered of {len(texts)}"
    known = [count for part in parts for count in part.text_bytes]
    joined: dict[str, LossSums] = {}
    for name, exact, (loss, tokens, text_bytes) in zip(names, known, sums.tolist(), strict=True):
        own = LossSums(loss, tokens, float(text_bytes if exact is None else exact))
        if tokens:  # the splits of a source have one name
            joined[name] = joined[name] + own if name in joined else own
    return joined


@torch.no_grad()
def _row_sums(model: Any, rows: torch.Tensor, bytes_of: torch.Tensor) -> torch.Tensor:
    """float64 (B, 3): loss, tokens and bytes of each row."""
    inputs, targets = rows[:, :-1].clamp(min=0), rows[:, 1:]
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    losses = F.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    counted = targets != IGNORED
    text_bytes = bytes_of[targets.clamp(min=0)] * counted
    columns = (losses.double(), counted.double(), text_bytes.double())
    return torch.stack([column.sum(1) for column in columns], dim=1)
