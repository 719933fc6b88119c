"""Rows of the training tokens of a prepared folder, as different training loops cut them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from minimind.data.prepare.prepared import open_prepared
from minimind.model.loss import IGNORED


def documents(data: Path) -> list[np.ndarray]:
    """Training documents, each with the end-of-document token before and after it."""
    tokens, eos = all_tokens(data)
    ends = np.flatnonzero(tokens == eos)
    starts = np.concatenate([[0], np.add(ends[:-1], 1)])
    return [
        np.concatenate([[eos], tokens[start : end + 1]])
        for start, end in zip(starts, ends, strict=True)
    ]


def all_tokens(data: Path) -> tuple[np.ndarray, int]:
    """Training tokens of a prepared folder, and the end-of-document token."""
    prepared = open_prepared(data)
    tokens = prepared.train.stretch(0, len(prepared.train))
    return tokens.astype(np.int64), prepared.tokenizer.eos_id


def padded_rows(data: Path, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (N, length): a document per row, cut to it; padding has no loss."""
    texts = [torch.from_numpy(text[: length + 1]) for text in documents(data)]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    inputs = pad([text[:-1] for text in texts])
    return inputs, pad([text[1:] for text in texts], padding_value=IGNORED)


def packed_rows(data: Path, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (N, length): all documents in one stream, cut into rows."""
    tokens, _ = all_tokens(data)
    rows = torch.from_numpy(tokens[: len(tokens) // (length + 1) * (length + 1)])
    rows = rows.view(-1, length + 1)
    return rows[:, :-1], rows[:, 1:]


def best_fit_rows(
    texts: Iterable[np.ndarray], length: int, held: int = 1000
) -> Iterator[np.ndarray]:
    """Full rows (length,) that begin with a document, while there are texts.

    The longest of the next `held` documents that fits goes into the row. If none fits, the shortest
    is cut to what is left, and its end is dropped. Of equal ones the first is taken.
    """
    waiting: list[tuple[int, int, np.ndarray]] = []  # by length, of equal ones the last first
    arriving = ((len(text), -number, text) for number, text in enumerate(texts))
    while True:
        row, room = [], length
        while room:
            for entry in islice(arriving, held - len(waiting)):
                insort(waiting, entry, key=itemgetter(0, 1))
            if not waiting:
                return
            longest = max(room, waiting[0][0])
            _, _, text = waiting.pop(bisect_right(waiting, longest, key=itemgetter(0)) - 1)
            row.append(text[:room])
            room -= len(row[-1])
        yield np.concatenate(row)


def shuffled(count: int, rows: int) -> Iterator[torch.Tensor]:
    """Endless batches of row numbers, each epoch in a random order."""
    while True:
        yield from torch.randperm(count)[: count // rows * rows].split(rows)
