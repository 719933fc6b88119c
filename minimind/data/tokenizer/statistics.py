"""Statistics of a tokenizer on some text, and tables of them.

Bytes per token, used pieces, texts that change.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from minimind.data.tokenizer.base import Tokenizer
from minimind.data.tokenizer.lossless import TextLoss
from minimind.data.tokenizer.vocabulary import CONTROL, FILLER, KINDS, Piece
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.terminal import aligned

BATCH_BYTES = 2**20  # a longer text is a batch of its own
MAX_LONGEST = 10
MAX_UNUSED = 12
MAX_SPECIAL = 32
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
class TokenizerStatistics(TextLoss):
    """Sums over documents."""

    documents: int = 0
    used: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of each id

    @property
    def bytes_per_token(self) -> float:
        """NaN without text."""
        return self.bytes / self.tokens if self.tokens else float("nan")


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenizerStatistics:
    """Encode, decode and compare the texts, one batch at a time.

    The reader has to refuse texts longer than `longest_document`.
    """
    threads, sizes = os.cpu_count() or 1, tokenizer.piece_bytes()
    total = TokenizerStatistics(used=np.zeros(len(sizes), dtype=np.int64))
    for batch in _batches(texts):
        arrays = tokenizer.encode_arrays(batch, threads)
        total.count(tokenizer, sizes, batch, arrays)
        total.documents += len(batch)
        total.used += np.bincount(np.concatenate(arrays), minlength=len(sizes))
    return total


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    total = 0
    for text in texts:
        size = len(text.encode())
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(text)
        total += size
    if batch:
        yield batch


def describe(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> str:
    """Path, library, size and hash; then the kinds of pieces, the special and the longest ones."""
    count = Counter(piece.kind for piece in pieces)
    kinds = [(kind, f"{count[kind]:,}", description) for kind, description in KINDS.items()]
    special = [f"{i} {quote(name.encode())}" for name, i in tokenizer.special_tokens().items()]
    if len(special) > MAX_SPECIAL:
        special[MAX_SPECIAL:] = [f"and {len(special) - MAX_SPECIAL:,} more"]
    order = sorted(range(len(pieces)), key=lambda i: (-len(pieces[i].content), i))[:MAX_LONGEST]
    longest = [(f"{len(pieces[i].content)}", str(i), quote(pieces[i].content)) for i in order]
    return "\n".join(
        [
            f"{tokenizer.path}: {tokenizer.KIND}, {tokenizer.vocab_size:,} pieces, id"
            f" {tokenizer.eos_id} ends a document, sha256 {tokenizer.fingerprint}",
            f"\npieces by kind\n{aligned(kinds, '>><', '  ')}",
            "\nspecial tokens\n  " + "  ".join(special),
            f"\nlongest pieces\n{aligned([('bytes', 'id', 'text'), *longest], '>><', '  ')}",
        ]
    )


def compare(measured: Mapping[str, TokenizerStatistics]) -> str:
    """Bytes per token by source, and where decoding did not give the text back."""
    rows = [("documents", "text", "bytes per token", "comes back", "source")]
    changes = []
    for name, one in measured.items():
        round_trip = f"NOT {one.changed:,}" if one.changed else "all"
        size = mebibytes(one.bytes)
        rows.append((f"{one.documents:,}", size, f"{one.bytes_per_token:.3f}", round_trip, name))
        if one.changed:
            changes.append(f"  {name}: {f'loses {one}' if one.lost else one.example}")
    return "\n".join(["\nbytes per token", aligned(rows, ">>>><", "  "), *changes])


def never_produced(pieces: Sequence[Piece], used: np.ndarray) -> str:
    """The text pieces whose count in `used` is 0."""
    text_ids = [i for i, piece in enumerate(pieces) if piece.kind not in (CONTROL, FILLER)]
    unused = [i for i in text_ids if not used[i]]
    count = Counter(pieces[i].kind for i in unused)
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in count.most_common()) or "none"
    line = f"\nnever produced on that text: {len(unused):,} of {len(text_ids):,} pieces ({kinds})"
    examples = [quote(pieces[i].content) for i in reversed(unused) if len(pieces[i].content) > 1]
    return f"{line}\n  " + "  ".join(examples[:MAX_UNUSED]) if examples else line


def quote(content: bytes) -> str:
    """A piece in quotes, with escapes for what is not printable."""
    try:
        return repr(content.decode())
    except UnicodeDecodeError:  # part of a character
        return repr(content)[1:]
