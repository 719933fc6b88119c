"""Statistics of a tokenizer on some text, and tables of them.

Bytes per token, used pieces, texts that change.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from minimind.data.tokenizer.load import AnyTokenizer
from minimind.data.tokenizer.lossless import lost_bytes
from minimind.data.tokenizer.vocabulary import CONTROL, FILLER, KINDS, Piece
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.terminal import aligned

BATCH_BYTES = 2**20  # a longer text is a batch of its own
SHOWN_AROUND = 12
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
class TokenizerStatistics:
    """Sums over documents; `used` counts the occurrences of each id."""

    used: np.ndarray
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    changed: int = 0
    lost: int = 0  # bytes, as in `TextLoss`
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
                total.lost += lost_bytes(text, tokenizer.decode(ids[ids != tokenizer.unk_id]))
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


def format_header(tokenizer: AnyTokenizer) -> str:
    """Path, kind, size, end-of-document id and hash, in one line."""
    return (
        f"{tokenizer.path}: {type(tokenizer).KIND}, {tokenizer.vocab_size:,} pieces, id"
        f" {tokenizer.eos_id} ends a document, sha256 {tokenizer.fingerprint}"
    )


def format_kinds(pieces: Sequence[Piece]) -> str:
    """The number of pieces of each kind."""
    count = Counter(piece.kind for piece in pieces)
    rows = [(kind, f"{count[kind]:,}", description) for kind, description in KINDS.items()]
    return f"\npieces by kind\n{aligned(rows, '>><', '  ')}"


def format_special(names: dict[str, int]) -> str:
    """The control pieces by id."""
    items = [f"{i} {quote(name.encode())}" for name, i in names.items()]
    more = [f"and {len(items) - MAX_SPECIAL:,} more"] if len(items) > MAX_SPECIAL else []
    return "\nspecial tokens\n  " + "  ".join(items[:MAX_SPECIAL] + more)


def format_longest(pieces: Sequence[Piece]) -> str:
    """The pieces of the most bytes, the earliest learnt first."""
    order = sorted(range(len(pieces)), key=lambda i: (-len(pieces[i].content), i))[:MAX_LONGEST]
    rows = [(f"{len(pieces[i].content)}", str(i), quote(pieces[i].content)) for i in order]
    return f"\nlongest pieces\n{aligned([('bytes', 'id', 'text'), *rows], '>><', '  ')}"


def format_sources(measured: dict[str, TokenizerStatistics]) -> str:
    """Bytes per token by source, and where decoding did not give the text back."""
    rows = [("documents", "text", "bytes per token", "comes back", "source")]
    changes = []
    for name, one in measured.items():
        round_trip = f"NOT {one.changed:,}" if one.changed else "all"
        size = mebibytes(one.bytes)
        rows.append((f"{one.documents:,}", size, f"{one.bytes_per_token:.3f}", round_trip, name))
        if one.changed:
            lost = f"; {one.lost / one.bytes:.2%} of its bytes are lost" if one.lost else ""
            changes.append(f"  {name}: {one.first_change}{lost}")
    return "\n".join(["\nbytes per token", aligned(rows, ">>>><", "  "), *changes])


def format_unused(pieces: Sequence[Piece], used: np.ndarray) -> str:
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
