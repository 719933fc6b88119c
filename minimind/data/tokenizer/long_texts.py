"""Split long texts at places where byte-pair merging does not depend on the context.

Merging takes about 100 bytes of memory per character of a text, or of a chunk. Chunks also stay in
the CPU caches: an eighth less time for English.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from minimind.data.tokenizer.vocabulary import BYTE, Piece

CHUNK_CHARACTERS = 2**9
LONGEST_CHUNK = 2**16
CHUNK_TOKENS = 2**16
GROUP_CHARACTERS = 2**21  # encoded together, by all threads


def adjacent_pairs(pieces: Iterable[str]) -> frozenset[str]:
    """All pairs of adjacent characters in the pieces."""
    return frozenset(piece[at : at + 2] for piece in pieces for at in range(len(piece) - 1))


def chunks(
    text: str, pairs: frozenset[str], aim: int = CHUNK_CHARACTERS, limit: int = LONGEST_CHUNK
) -> Iterator[str]:
    """Yield chunks of about `aim` characters whose ids in a row are the ids of the whole text.

    Merges only produce pieces of the vocabulary, so none spans a pair of characters that occurs in
    no piece. A chunk ends at the first such pair after `aim`, or at `limit` (a letter repeated a
    million times): then the ids around the cut may differ, and the text still round-trips.
    """
    start, size = 0, len(text)
    while size - start > aim:
        cut, end = start + aim, min(start + limit, size)
        while cut < end and text[cut - 1 : cut + 1] in pairs:
            cut += 1
        yield text[start:cut]
        start = cut
    if start < size or not size:
        yield text[start:]


def id_chunks(ids: np.ndarray, pieces: Callable[[], Iterable[Piece]]) -> Iterator[list[int]]:
    """Split `ids` so that no character is divided; calls `pieces` only if there are several."""
    if len(ids) <= CHUNK_TOKENS:
        yield ids.tolist()
        return
    is_continuation = np.array([p.kind == BYTE and 0x80 <= p.content[0] < 0xC0 for p in pieces()])
    start, size = 0, len(ids)
    while start < size:
        end = start + CHUNK_TOKENS
        while end < size and is_continuation[ids[end]]:
            end += 1
        yield ids[start:end].tolist()
        start = end
