"""What needs no network makes of the held-out text: compressors, and n-grams of the training text.

The figures are floors that a loss can be compared with whatever the tokenizer. All follow from at
most `MOST_TRAINED` training tokens and `MOST_HELD_OUT` held-out ones, so that they take seconds.
"""

from __future__ import annotations

import lzma
import math
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import spread
from minimind.inference.score import LossSums
from minimind.train.evaluate import HeldOutRows, mixture
from minimind.train.regularity import share_of_chance, word_order

MOST_TRAINED, MOST_HELD_OUT = 2**22, 2**20  # tokens
PIECES, SHORTEST_PIECE = 64, 2048  # of a source of which not all is read; tokens
STRETCH = 32  # tokens in a row that tell a copy of a text from the same phrase
SAMPLES, SAMPLE = 128, 512  # stretches whose text is looked at, and their tokens


def floors(prepared: Prepared, held_out: HeldOutRows) -> dict[str, Any]:
    """The fields of a `floors` event: bits per byte of the rows that an evaluation reads.

    `repeated` is the share of the training text, in stretches of STRETCH tokens, that occurred in
    it before; `seen` that of the held-out text which occurs in the training text. The rest is of
    the training text: what `regularity` finds in it, its bits per byte by its own unigram, the
    bytes of a token and the tokens of a document.
    """
    parts = training_tokens(prepared)
    tokens = np.concatenate(parts)
    model = NGrams(tokens, prepared.tokenizer.vocab_size)
    known, stretches = np.empty(0, np.uint64), 0
    if len(tokens) > STRETCH:
        own = np.concatenate([_stretches(part) for part in parts if len(part) >= STRETCH])
        # Of large numbers np.unique makes a table of hashes, which takes ten times as long.
        own.sort()
        known, stretches = own[np.diff(own, prepend=~own[:1]) != 0], len(own)
    sums: dict[str, dict[str, LossSums]] = {}
    seen: list[np.ndarray] = []
    by_source = held_out.by_source(held_out.in_force)
    most = max(1, MOST_HELD_OUT // (held_out.row_tokens * len(by_source)))  # rows of a source
    for source, indices in by_source.items():
        rows = held_out.shards.read_rows(np.sort(indices[:most]), held_out.row_tokens)
        of_id = held_out.bytes_per_id[held_out.sources.index(source)]
        text_bytes, count = float(of_id[rows[:, 1:]].sum()), float(rows[:, 1:].size)
        text = "".join(prepared.tokenizer.decode(row.tolist()) for row in rows).encode()
        for name, compress in _compressors(len(text)).items():
            nats = 8 * math.log(2) * len(compress(text)) * text_bytes / max(1, len(text))
            sums.setdefault(name, {})[source] = LossSums(nats, count, text_bytes)
        for name, nats in model.losses(rows).items():
            sums.setdefault(name, {})[source] = LossSums(nats, count, text_bytes)
        if held_out.row_tokens >= STRETCH and stretches:
            ones = np.ones(len(known))
            seen += [_looked_up(_stretches(row), known, ones) for row in rows]
    return {
        "bits": {name: mixture(of_name, held_out).bits_per_byte for name, of_name in sums.items()},
        "repeated": 1 - len(known) / stretches if stretches else None,
        "seen": float(np.concatenate(seen).mean()) if seen else None,
        "trained": len(tokens),
        **_of_training_text(prepared, model.counts),
    }


def _of_training_text(prepared: Prepared, counts: np.ndarray) -> dict[str, float | None]:
    """What stretches of it, spread over all of it, are like; `counts` are those of its tokens."""
    shards, texts, read = prepared.train, list[str](), 0
    count = min(SAMPLES, max(1, len(shards) // SAMPLE))
    for start in np.linspace(0, max(0, len(shards) - SAMPLE), count).astype(int).tolist():
        tokens = shards.stretch(start, min(SAMPLE, len(shards)))
        read += len(tokens)
        documents = np.split(tokens, np.flatnonzero(tokens == prepared.tokenizer.eos_id) + 1)
        texts += [prepared.tokenizer.decode(one.tolist()) for one in documents if len(one)]
    bits, pairs = word_order(texts)
    documents = prepared.manifest["splits"]["train"]["documents"]
    bytes_per_token = sum(len(text.encode()) for text in texts) / max(1, read)
    share = counts[counts > 0] / max(1, counts.sum())
    entropy = float(-(share * np.log2(share)).sum())  # bits of a token
    return {
        "chance": share_of_chance(texts),
        "word_order": bits,
        "word_pairs": pairs,
        "own_unigram": entropy / bytes_per_token if bytes_per_token else None,
        "bytes_per_token": bytes_per_token,
        "document_tokens": len(shards) / max(1, documents),
    }


def training_tokens(prepared: Prepared) -> list[np.ndarray]:
    """Tokens of each source, int64, at most MOST_TRAINED in all: of a longer one, pieces of it."""
    ends, begin, parts = prepared.train.source_ends().tolist(), 0, []
    for end in ends:
        length, most = end - begin, MOST_TRAINED // len(ends)
        piece, starts = length, [0]
        if length > most:
            piece = min(most, max(SHORTEST_PIECE, most // PIECES))
            starts = piece * np.sort(spread(length // piece, most // piece))
        for start in starts:
            stretch = prepared.train.stretch(begin + int(start), piece)
            parts.append(np.asarray(stretch, dtype=np.int64))
        begin = end
    return parts


def _compressors(size: int) -> dict[str, Callable[[bytes], bytes]]:
    """Each at its best; zstd where it is installed."""
    # The preset's dictionary of 64 MiB would be allocated for a text of any size.
    strongest = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}
    filters = [{**strongest, "dict_size": max(2**12, size)}]
    found: dict[str, Callable[[bytes], bytes]] = {
        "zlib": lambda text: zlib.compress(text, 9),
        "xz": lambda text: lzma.compress(text, check=lzma.CHECK_NONE, filters=filters),
    }
    if find_spec("zstandard"):
        import zstandard

        found["zstd"] = zstandard.ZstdCompressor(level=22).compress
    return found


def _stretches(tokens: np.ndarray) -> np.ndarray:
    """A hash of every STRETCH tokens in a row, uint64 (tokens - STRETCH + 1,)."""
    hashes, factor, length = tokens.astype(np.uint64) + np.uint64(1), 0x9E3779B97F4A7C15, 1
    while length < STRETCH:
        hashes = hashes[:-length] * np.uint64(factor) + hashes[length:]
        factor, length = factor * factor % 2**64 + 2, 2 * length
    return hashes


class NGrams:
    """Counts of a text, for a unigram model and an interpolated Kneser-Ney trigram.

    A discount is that of Ney et al. (1994) from the counts of one and of two; lower orders count
    the contexts in which a token follows (Kneser and Ney 1995).
    """

    def __init__(self, tokens: np.ndarray, vocabulary: int) -> None:
        self.size = vocabulary
        self.counts = np.bincount(tokens, minlength=vocabulary)
        keys = (tokens[:-2] * vocabulary + tokens[1:-1]) * vocabulary + tokens[2:]
        trigrams, times = np.unique(keys, return_counts=True)
        bigrams, contexts = np.unique(trigrams % vocabulary**2, return_counts=True)
        words, of_word = np.unique(bigrams % vocabulary, return_counts=True)
        # Lowest first; the context of a key is what is left without its last token.
        self._orders = [
            _Order(words, of_word, vocabulary),
            _Order(bigrams, contexts, vocabulary),
            _Order(trigrams, times, vocabulary),
        ]

    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Nats of all tokens of the rows but the first of each, by model."""
        plain = (self.counts + 1) / (self.counts.sum() + self.size)
        first = rows[:, :2].reshape(-1, 2)  # whose context is a single token
        keys = (rows[:, :-2] * self.size + rows[:, 1:-1]) * self.size + rows[:, 2:]
        nats = -np.log(self._probability(keys.ravel(), 3)).sum()
        nats -= np.log(self._probability(first[:, 0] * self.size + first[:, 1], 2)).sum()
        return {"unigram": float(-np.log(plain[rows[:, 1:]]).sum()), "trigram": float(nats)}

    def _probability(self, keys: np.ndarray, order: int) -> np.ndarray:
        found = np.full(len(keys), 1 / self.size)
        for n in range(order):
            found = self._orders[n].interpolated(keys % self.size ** (n + 1), found)
        return found


class _Order:
    """The n-grams of one order: their counts and those of their contexts."""

    def __init__(self, keys: np.ndarray, counts: np.ndarray, vocabulary: int) -> None:
        self._keys, self._counts, self._size = keys, counts, vocabulary
        self._contexts, starts = np.unique(keys // vocabulary, return_index=True)
        self._totals = np.add.reduceat(counts, starts) if len(keys) else counts
        self._types = np.diff(starts, append=len(keys))
        once, twice = (int((counts == n).sum()) for n in (1, 2))
        self._discount = once / (once + 2 * twice) if once else 0.5

    def interpolated(self, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probabilities of the last token of each key; those of `lower` in an unknown context."""
        counts = _looked_up(keys, self._keys, self._counts)
        contexts = keys // self._size
        totals = _looked_up(contexts, self._contexts, self._totals)
        types = _looked_up(contexts, self._contexts, self._types)
        kept = np.maximum(counts - self._discount, 0) + self._discount * types * lower
        return np.where(totals > 0, kept / np.maximum(totals, 1), lower)


def _looked_up(keys: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of each key, 0 where it is not known."""
    if not len(known):
        return np.zeros(len(keys))
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, values[at], 0)
