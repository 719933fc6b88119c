"""What a tokenizer makes of some text: bytes per token, pieces that are used, texts that change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from minimind.data.tokenizer.load import AnyTokenizer

BATCH_BYTES = 2**20  # a longer text is a batch of its own
SHOWN_AROUND = 12
# What tokenizers tend to change: spaces, line ends, accents in two parts, rare characters, and what
# looks like their own signs.
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
class Measured:
    """Sums over some documents; `used` counts how often each id came up."""

    used: np.ndarray
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    changed: int = 0
    first_change: str = field(default="")

    @property
    def bytes_per_token(self) -> float:
        """NaN of no text."""
        return self.bytes / self.tokens if self.tokens else float("nan")


def measure(tokenizer: AnyTokenizer, texts: Iterable[str]) -> Measured:
    """The texts encoded, decoded and compared, a batch of them in memory.

    A text that is longer than `longest_document` of the tokenizer is for its reader to refuse.
    """
    threads = os.cpu_count() or 1
    found = Measured(np.zeros(tokenizer.vocab_size, dtype=np.int64))
    for batch, size in _batches(texts):
        found.bytes += size
        for text, ids in zip(batch, tokenizer.encode_arrays(batch, threads), strict=True):
            found.documents += 1
            found.tokens += len(ids)
            found.used += np.bincount(ids, minlength=len(found.used))
            back = tokenizer.decode(ids)
            if back != text:
                found.changed += 1
                found.first_change = found.first_change or _change(found.documents, text, back)
    return found


def _batches(texts: Iterable[str]) -> Iterator[tuple[list[str], int]]:
    """Texts of up to `BATCH_BYTES` together, with how many bytes they are."""
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
    """Where a text and what came back of it part."""
    pairs = enumerate(zip(text, back, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(text), len(back)))
    window = slice(max(at - SHOWN_AROUND, 0), at + SHOWN_AROUND)
    return f"document {document}, character {at}: {text[window]!r} comes back as {back[window]!r}"
