"""What a tokenizer makes of some text: bytes per token, pieces that are used, texts that change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from minimind.data.load_tokenizer import AnyTokenizer

BATCH_BYTES = 2**22
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
    """The texts encoded, decoded and compared, a bounded part of them in memory."""
    threads = os.cpu_count() or 1
    found = Measured(np.zeros(tokenizer.vocab_size, dtype=np.int64))
    for batch in _batches(texts):
        for text, ids in zip(batch, tokenizer.encode_batch(batch, threads), strict=True):
            found.documents += 1
            found.bytes += len(text.encode())
            found.tokens += len(ids)
            found.used += np.bincount(ids, minlength=len(found.used)) if ids else 0
            back = tokenizer.decode(ids)
            if back != text:
                found.changed += 1
                found.first_change = found.first_change or _change(found.documents, text, back)
    return found


def _batches(texts: Iterable[str]) -> Iterator[Sequence[str]]:
    size = 0

    def number(text: str) -> int:
        nonlocal size
        size += len(text)
        return size // BATCH_BYTES

    for _, batch in groupby(texts, number):
        yield [*batch]


def _change(document: int, text: str, back: str) -> str:
    """Where a text and what came back of it part."""
    pairs = enumerate(zip(text, back, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(text), len(back)))
    window = slice(max(at - SHOWN_AROUND, 0), at + SHOWN_AROUND)
    return f"document {document}, character {at}: {text[window]!r} comes back as {back[window]!r}"
