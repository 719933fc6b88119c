"""A bounded part of a text of any size, chosen by content."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable

PASSAGE_CHARACTERS = 2**14
SEED = 42


def sample(texts: Iterable[str], limit_bytes: int, seed: int = SEED) -> list[str]:
    """Passages of at most `limit_bytes` together, from all over the texts, in one reading.

    Those whose hash is smallest are kept: no more is ever in memory, it takes no second reading to
    know how many there are, each passage has the same chance wherever it stands, and a document
    more or less hardly changes the choice. Every nth would change all of it. Passages and not
    documents, so that one document of a gigabyte cannot be all or nothing. Each seed has its
    own choice.
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
