"""What `minimind tokenizer inspect` prints, part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from minimind.data.tokenizer.load import AnyTokenizer
from minimind.data.tokenizer.statistics import TokenizerStatistics
from minimind.data.tokenizer.vocabulary import CONTROL, FILLER, KINDS, Piece
from minimind.runtime.durable_files import mebibytes

LONGEST = 10
MOST_UNUSED = 12
MOST_SPECIAL = 32


def about(tokenizer: AnyTokenizer) -> str:
    """What it is, in one line."""
    return (
        f"{tokenizer.path}: {type(tokenizer).KIND}, {tokenizer.vocab_size:,} pieces, id"
        f" {tokenizer.eos_id} ends a document, sha256 {tokenizer.fingerprint}"
    )


def kinds(pieces: Sequence[Piece]) -> str:
    """How many pieces there are of each kind."""
    count = Counter(piece.kind for piece in pieces)
    rows = [(kind, f"{count[kind]:,}", told) for kind, told in KINDS.items()]
    return _table("pieces by kind", [], rows)


def special(names: dict[str, int]) -> str:
    """What the control pieces are called, the first ids first."""
    told = [f"{i} {shown(name.encode())}" for name, i in names.items()]
    more = [f"and {len(told) - MOST_SPECIAL:,} more"] if len(told) > MOST_SPECIAL else []
    return "\nspecial tokens\n  " + "  ".join(told[:MOST_SPECIAL] + more)


def longest(pieces: Sequence[Piece]) -> str:
    """The pieces of the most bytes, the earliest learnt first."""
    order = sorted(range(len(pieces)), key=lambda i: (-len(pieces[i].content), i))
    rows = [
        (f"{len(pieces[i].content)}", str(i), shown(pieces[i].content)) for i in order[:LONGEST]
    ]
    return _table("longest pieces", ["bytes", "id", "text"], rows)


def sources(measured: dict[str, TokenizerStatistics]) -> str:
    """Bytes per token by the name of a text, and where one did not come back."""
    rows, changes = [], []
    for name, found in measured.items():
        back = f"NOT {found.changed:,}" if found.changed else "all"
        size = mebibytes(found.bytes)
        rows.append((f"{found.documents:,}", size, f"{found.bytes_per_token:.3f}", back, name))
        if found.changed:
            changes.append(f"  {name}: {found.first_change}")
    titles = ["documents", "text", "bytes per token", "comes back", "source"]
    return "\n".join([_table("bytes per token", titles, rows), *changes])


def unused(pieces: Sequence[Piece], used: np.ndarray) -> str:
    """Which pieces of text have a count of 0 in `used`."""
    of_text = [i for i, piece in enumerate(pieces) if piece.kind not in (CONTROL, FILLER)]
    never = [i for i in of_text if not used[i]]
    count = Counter(pieces[i].kind for i in never)
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in count.most_common()) or "none"
    examples = [shown(pieces[i].content) for i in reversed(never) if len(pieces[i].content) > 1]
    told = f"\nnever produced on that text: {len(never):,} of {len(of_text):,} pieces ({kinds})"
    return f"{told}\n  " + "  ".join(examples[:MOST_UNUSED]) if examples else told


def shown(content: bytes) -> str:
    """A piece in quotes, with escapes for all that a terminal would not show as it is."""
    try:
        return repr(content.decode())
    except UnicodeDecodeError:  # part of a character
        return repr(content)[1:]


def _table(title: str, heads: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns set to the right, but for the last."""
    lines = [[*heads], *rows] if heads else [*rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]) - 1)]
    told = [
        "  "
        + "  ".join([*(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]
    return "\n".join(["", title, *told])
