"""The output of `minimind tokenizer inspect`, part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from minimind.data.tokenizer.load import AnyTokenizer
from minimind.data.tokenizer.statistics import TokenizerStatistics
from minimind.data.tokenizer.vocabulary import CONTROL, FILLER, KINDS, Piece
from minimind.runtime.durable_files import mebibytes

MAX_LONGEST = 10
MAX_UNUSED = 12
MAX_SPECIAL = 32


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
    return _format_table("pieces by kind", [], rows)


def format_special(names: dict[str, int]) -> str:
    """The control pieces by id."""
    items = [f"{i} {quote(name.encode())}" for name, i in names.items()]
    more = [f"and {len(items) - MAX_SPECIAL:,} more"] if len(items) > MAX_SPECIAL else []
    return "\nspecial tokens\n  " + "  ".join(items[:MAX_SPECIAL] + more)


def format_longest(pieces: Sequence[Piece]) -> str:
    """The pieces of the most bytes, the earliest learnt first."""
    order = sorted(range(len(pieces)), key=lambda i: (-len(pieces[i].content), i))[:MAX_LONGEST]
    rows = [(f"{len(pieces[i].content)}", str(i), quote(pieces[i].content)) for i in order]
    return _format_table("longest pieces", ["bytes", "id", "text"], rows)


def format_sources(measured: dict[str, TokenizerStatistics]) -> str:
    """Bytes per token by source, and where decoding did not give the text back."""
    rows, changes = [], []
    for name, one in measured.items():
        round_trip = f"NOT {one.changed:,}" if one.changed else "all"
        size = mebibytes(one.bytes)
        rows.append((f"{one.documents:,}", size, f"{one.bytes_per_token:.3f}", round_trip, name))
        if one.changed:
            changes.append(f"  {name}: {one.first_change}")
    titles = ["documents", "text", "bytes per token", "comes back", "source"]
    return "\n".join([_format_table("bytes per token", titles, rows), *changes])


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


def _format_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, except the last."""
    lines = [heads, *rows] if heads else [*rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    text = [
        "  ".join(["", *(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]
    return "\n".join(["", title, *text])
