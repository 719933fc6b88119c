"""Statistics of a tokenizer on some text: bytes per token, used pieces, texts that change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from minimind.data.tokenizer.load import AnyTokenizer

BATCH_BYTES = 2**20  # a longer text is a batch of its own
SHOWN_AROUND = 12
# Text that tokenizers tend to change: spaces, line ends, combining accents, rare characters, and
# text that looks like special tokens.
AWKWARD = (
    " a  b   c ",
    "\n\n\ta\r\n",
    "e\u0301 \u212b ﬁ ½ \u3000",
    "春眠不覺曉 👩‍👩‍👧 \U0010ffff",
    "\u2581 \u2581\u2581 \ufdd0\ufdd1",
    "<s></s><unk><pad><unused_0><0x41><|endoftext|>",
    "don't 1234 I 'm .",
)


@dataclass
class TokenizerStatistics:
    """Sums over documents; `used` counts the occurrences of each id."""

    used: np.ndarray
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    changed: int = 0
    first_change: str = field(default="")

    @property
    def bytes_per_token(self) -> float:
        """NaN without text."""
        return self.bytes / self.tokens if self.tokens else float("nan")


def measure(tokenizer: AnyTokenizer, texts: Iterable[str]) -> TokenizerStatistics:
    """Encode, decode and compare the texts, one batch at a time.

    The reader has to refuse texts longer than `longest_document`.
    """
    threads = os.cpu_count() or 1
    total = TokenizerStatistics(np.zeros(tokenizer.vocab_size, dtype=np.int64))
    for batch, size in _batches(texts):
        total.bytes += size
        for text, ids in zip(batch, tokenizer.encode_arrays(batch, threads), strict=True):
            total.documents += 1
            total.tokens += len(ids)
            total.used += np.bincount(ids, minlength=len(total.used))
            back = tokenizer.decode(ids)
            if back != text:
                total.changed += 1
                total.first_change = total.first_change or _change(total.documents, text, back)
    return total


def _batches(texts: Iterable[str]) -> Iterator[tuple[list[str], int]]:
    """Yield batches of up to `BATCH_BYTES` and their size in bytes."""
    batch: list[str] = []
    size = 0
    for text in texts:
        own = len(text.encode())
        if batch and size + own > BATCH_BYTES:
            yield batch, size
            batch, size = [], 0
        batch.append(text)
        size += own
    if batch:
        yield batch, size


def _change(document: int, text: str, back: str) -> str:
    """Describe the first difference between a text and its round trip."""
    pairs = enumerate(zip(text, back, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(text), len(back)))
    window = slice(max(at - SHOWN_AROUND, 0), at + SHOWN_AROUND)
    return f"document {document}, character {at}: {text[window]!r} comes back as {back[window]!r}"
