"""Long texts cut where byte-pair merging cannot notice.

Merging needs about 100 bytes of memory per character of a text, all at once; of a chunk at a time
it needs that for the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CHUNK_CHARACTERS = 2**16
GROUP_CHARACTERS = 2**21  # are encoded together, by all threads


def joints(pieces: Iterable[str]) -> frozenset[str]:
    """Every two characters that stand next to each other in a piece."""
    return frozenset(piece[at : at + 2] for piece in pieces for at in range(len(piece) - 1))


def chunks(text: str, joined: frozenset[str], limit: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """Parts of at most `limit` characters that have, one after another, the ids of the whole.

    Whatever merging makes is a piece of the vocabulary, so nothing is ever merged across a place
    whose two characters stand together in no piece. Each part ends at the last such place. A part
    that has none (the same letter a million times) is cut at `limit`: the text still comes back as
    it was, only the ids around that cut may be others than those of the whole.
    """
    start = 0
    while len(text) - start > limit:
        end = start + limit
        cut = end
        while cut > start and text[cut - 1 : cut + 1] in joined:
            cut -= 1
        cut = cut if cut > start else end
        yield text[start:cut]
        start = cut
    yield text[start:] if start else text


def groups(parts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The parts in groups of about `GROUP_CHARACTERS`."""
    group, size = [], 0
    for part in parts:
        group.append(part)
        size += len(part[1])
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group
