"""How much of a text follows from what stands before it, whatever the model.

Both figures are of a sample, so that they take a fraction of a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

PIECE, SHORTEST = 192, 64  # bytes that are judged together, and the fewest
FEWEST = 20  # pieces
CHANCE = 0.92  # bits of a byte after another, over those of a byte alone, from which it is chance
FREQUENT, LEAST = 500, 10  # words that are looked at, and how often each occurs
NEAR = 16  # pairs of words among which an order of chance exchanges their second words
ORDERS = 4  # of chance
# A word after blanks, a character of a script that has none, or what is neither.
WORD = re.compile(r"(\s*)(?:([^\W\u2e80-\uffff]+)|([\u3040-\u9fff\uac00-\ud7af]))|\S")


def share_of_chance(texts: Sequence[str]) -> float | None:
    """The share of pieces whose bytes follow from nothing, as digits drawn by chance; None of few.

    A piece is one of those if a byte costs as much after the one before it, by the pairs of bytes
    of all texts, as by the frequencies of the piece alone. In text of any language it costs 0.65
    to 0.85 times that.
    """
    raw = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
    single = np.bincount(np.concatenate([np.empty(0, np.int64), *raw]), minlength=256)
    pairs = np.zeros(256 * 256)
    for one in raw:
        pairs += np.bincount(one[:-1] * 256 + one[1:], minlength=256 * 256)
    pairs = pairs.reshape(256, 256)
    alone = (single + 0.5) / (single.sum() + 128)
    types = (pairs > 0).sum(1, keepdims=True)  # Witten and Bell's weight of a byte alone
    after = (pairs + types * alone) / np.maximum(pairs.sum(1, keepdims=True) + types, 1)
    sizes, ratios = [], []
    for one in raw:
        for piece in np.array_split(one, max(1, round(len(one) / PIECE))):
            if len(piece) < SHORTEST:
                continue
            counts = np.bincount(piece)
            share = counts[counts > 0] / len(piece)
            own = -(share * np.log2(share)).sum() + (len(share) - 1) / (2 * len(piece) * np.log(2))
            bits = -np.log2(after[piece[:-1], piece[1:]]).mean()
            ratios.append(bits / own if len(share) > 1 else 0.0)
            sizes.append(len(piece))
    is_chance = np.array(ratios) > CHANCE
    return float(np.average(is_chance, weights=sizes)) if len(sizes) >= FEWEST else None


def word_order(texts: Sequence[str]) -> tuple[float, int]:
    """Bits that a frequent word tells of the frequent one after it, and the pairs it follows from.

    They are those of the pairs in the text less those of the same words in an order of chance, in
    which near pairs have exchanged their second words: 0 where the order of words says nothing. A
    tenth of a bit is much less than any language has.
    """
    ids: dict[str, int] = {}
    found = [
        (ids.setdefault(first, len(ids)), ids.setdefault(second, len(ids)))
        for text in texts
        for first, second in _neighbours(text)
    ]
    first, second = np.array(found, np.int64).reshape(-1, 2).T
    counts = np.bincount(np.concatenate([first, second]), minlength=1)
    is_frequent = counts >= LEAST
    is_frequent[np.argsort(-counts, kind="stable")[FREQUENT:]] = False
    kept = is_frequent[first] & is_frequent[second]
    first, second = first[kept], second[kept]
    if not len(first):
        return 0.0, 0
    draw, near = np.random.default_rng(0), np.arange(len(first)) // NEAR
    orders = (np.argsort(near + draw.random(len(first))) for _ in range(ORDERS))
    by_chance = [_bits(first * len(ids) + second[order]) for order in orders]
    return float(np.mean(by_chance) - _bits(first * len(ids) + second)), len(first)


def _neighbours(text: str) -> Iterator[tuple[str, str]]:
    """Words with nothing but blanks between them."""
    before = None
    for match in WORD.finditer(text):
        blanks, word, character = match.groups()
        if before and (character or (word and blanks)):
            yield before, character or word
        before = character or word


def _bits(keys: np.ndarray) -> float:
    """The entropy of values."""
    share = np.unique(keys, return_counts=True)[1] / len(keys)
    return float(-(share * np.log2(share)).sum())
