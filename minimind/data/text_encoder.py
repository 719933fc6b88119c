"""Texts -> ids with a SentencePiece model: long ones in chunks, words that come again looked up.

What is merged never crosses a space that follows something else, unless a piece does: so the words
of a text have, one after another, the ids of the whole, and English has each of its words often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, compress
from operator import not_
from threading import Lock
from typing import Any

import numpy as np
import sentencepiece

from minimind.data.escaping import SPACE_SIGN, escape, require_unicode
from minimind.data.hf_export import merges_plainly, normal_pieces
from minimind.data.long_texts import CHUNK_CHARACTERS, GROUP_CHARACTERS, chunks, joints

WORD = re.compile(" *[^ ]+| +")  # with the spaces before it
SPACED = 12  # characters for each space, at most, in a text whose words are looked up
KEPT_CHARACTERS = 2**20  # of words, in about 30 MB; then they are learnt anew


class WordIds:
    """The ids of words by the words, for one thread at a time."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        self._known: dict[str, bytes] = {}
        self._characters = 0

    def of(self, parts: Sequence[str]) -> list[np.ndarray]:
        """Int32, of each part."""
        words = [WORD.findall(part) for part in parts]
        new = [*set(chain.from_iterable(words)).difference(self._known)]
        ids = self._processor.encode(new, num_threads=1, return_type="numpy")
        self._known.update(zip(new, map(np.ndarray.tobytes, ids), strict=True))
        found = [b"".join(map(self._known.__getitem__, own)) for own in words]
        self._characters += sum(map(len, new))
        if self._characters > KEPT_CHARACTERS:
            self._known, self._characters = {}, 0
        return [np.frombuffer(own, np.int32) for own in found]


class TextEncoder:
    """Ids of texts by one model; the same for any number of threads."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        self._lock = Lock()  # of `_words`

    @cached_property
    def joined(self) -> frozenset[str] | None:
        """Every two characters that stand side by side in a piece.

        None where a model does more than merge, and texts are encoded whole.
        """
        if not merges_plainly(self._processor):
            return None
        return joints(piece.replace(SPACE_SIGN, " ") for piece in normal_pieces(self._processor))

    @cached_property
    def _words(self) -> WordIds | None:
        """None where a piece has a space behind something else."""
        if self.joined is None or any(pair[1] == " " != pair[0] for pair in self.joined):
            return None
        return WordIds(self._processor)

    def lists(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; `long_texts.chunks` says what cutting long ones may change."""
        encode = partial(self._processor.encode, num_threads=threads)
        return [list(chain.from_iterable(parts)) for parts in self._encoded(texts, encode)]

    def arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """The same as int32, a tenth of the memory; words of spaced texts may be looked up.

        One thread at a time does that: it keeps Python's lock, which merging does not need, so
        that others merge meanwhile, and several on one text are faster than it is.
        """
        plain = partial(self._processor.encode, num_threads=threads, return_type="numpy")
        spaced = [threads == 1 and text.count(" ") * SPACED > len(text) for text in texts]
        is_ours = any(spaced) and self._lock.acquire(blocking=False)
        try:
            words = self._words if is_ours else None
            if words is None:
                spaced = [False] * len(texts)
            rest = self._encoded([*compress(texts, map(not_, spaced))], plain)
            looked_up = self._encoded([*compress(texts, spaced)], words.of) if words else rest
        finally:
            if is_ours:
                self._lock.release()
        found = (next(looked_up if is_spaced else rest) for is_spaced in spaced)
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in found]

    def _encoded(
        self, texts: Sequence[str], encode: Callable[[list[str]], list[Any]]
    ) -> Iterator[list[Any]]:
        """Of each text the ids of its parts; they are encoded some `GROUP_CHARACTERS` at a time."""
        found: list[Any] = []
        ends: list[int] = []
        group: list[str] = []
        size = 0
        try:
            for text in texts:
                for part in self._parts(text):
                    group.append(part)
                    size += len(part)
                    if size >= GROUP_CHARACTERS:
                        found += encode(group)
                        group, size = [], 0
                ends.append(len(found) + len(group))
            found += encode(group)
        except (RuntimeError, TypeError):  # what SentencePiece says of half a character
            for text in texts:
                require_unicode(text)
            raise
        return (found[begin:end] for begin, end in zip([0, *ends], ends, strict=False))

    def _parts(self, text: str) -> Iterable[str]:
        """What is encoded for itself; the whole where a model does more than merge."""
        if len(text) <= CHUNK_CHARACTERS or self.joined is None:
            return (escape(text),)
        return chunks(escape(text), self.joined)
