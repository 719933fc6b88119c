"""A bounded sample of a text of any size, selected by content."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable

PASSAGE_CHARACTERS = 2**14
SEED = 42


def sample(texts: Iterable[str], limit_bytes: int, seed: int = SEED) -> list[str]:
    """Sample passages of at most `limit_bytes` in total, in one pass over the texts.

    Keeps the passages with the smallest hashes: memory is bounded, every passage has the same
    chance, and a document more or less changes little, unlike every n-th passage. Passages rather
    than documents, so that a document of a gigabyte is not all or nothing. Each seed gives another
    sample.
    """
    salt = b"" if seed == SEED else str(seed).encode()
    passages = (
        text[start : start + PASSAGE_CHARACTERS]
        for text in texts
        for start in range(0, len(text), PASSAGE_CHARACTERS)
    )
    kept: list[tuple[int, int, str, int]] = []
    size = 0
    for order, passage in enumerate(passages):
        content = passage.encode()
        digest = int.from_bytes(hashlib.sha256(salt + content).digest()[:8], "big")
        heapq.heappush(kept, (-digest, order, passage, len(content)))
        size += len(content)
        while size > limit_bytes:
            size -= heapq.heappop(kept)[3]
    return [passage for _, _, passage, _ in sorted(kept, key=lambda entry: entry[1])]
