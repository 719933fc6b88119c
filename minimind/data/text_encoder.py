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
TOGETHER = 2**18  # characters whose words are looked up together
MOST_NEW = 4  # of so many words one may be new: learning it takes longer than merging it here
ENTRY, KEPT = 64, 2**23  # what a word counts beside its characters, and how much is kept: 20 MB


class WordIds:
    """The ids of words by the words, for one thread at a time."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._encode = partial(processor.encode, num_threads=1, return_type="numpy")
        self._known: dict[str, bytes] = {}
        self._kept = 0

    def of(self, parts: list[str]) -> list[np.ndarray]:
        """Int32, of each part, not to be written to; merged where too few of its words are known.

        So the table learns the words of a language, and neither numbers nor names of files.
        """
        words = [WORD.findall(part) for part in parts]
        new = [*set(chain.from_iterable(words)).difference(self._known)]
        if len(new) * MOST_NEW > sum(map(len, words)):
            return self._encode(parts)
        self._known.update(zip(new, map(np.ndarray.tobytes, self._encode(new)), strict=True))
        found = [b"".join(map(self._known.__getitem__, own)) for own in words]
        self._kept += sum(map(len, new)) + ENTRY * len(new)
        if self._kept > KEPT:
            self._known, self._kept = {}, 0
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

    def __reduce__(self) -> tuple[Any, ...]:
        return TextEncoder, (self._processor,)  # a lock cannot be copied

    def lists(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; `long_texts.chunks` says what cutting long ones may change."""
        encode = partial(self._processor.encode, num_threads=threads)
        return [list(chain.from_iterable(parts)) for parts in self._encoded(texts, encode)]

    def arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """The same as int32, not to be written to, a tenth of the memory of lists.

        Words that come again are looked up by one thread at a time, which keeps Python's lock;
        the others merge meanwhile, without it. So do several threads that share a text.
        """
        if threads == 1 and self._lock.acquire(blocking=False):
            try:
                return self._looked_up(texts)
            finally:
                self._lock.release()
        return list(self._merged(texts, threads))

    def _merged(self, texts: Sequence[str], threads: int) -> Iterator[np.ndarray]:
        encode = partial(self._processor.encode, num_threads=threads, return_type="numpy")
        return map(_whole, self._encoded(texts, encode))

    def _looked_up(self, texts: Sequence[str]) -> list[np.ndarray]:
        words = self._words
        if words is None:
            return list(self._merged(texts, 1))
        is_spaced = [text.count(" ") * SPACED > len(text) for text in texts]
        spaced = map(_whole, self._encoded([*compress(texts, is_spaced)], words.of, TOGETHER))
        others = self._merged([*compress(texts, map(not_, is_spaced))], 1)
        return [next(spaced if one else others) for one in is_spaced]

    def _encoded(
        self,
        texts: Sequence[str],
        encode: Callable[[list[str]], list[Any]],
        together: int = GROUP_CHARACTERS,
    ) -> Iterator[list[Any]]:
        """Of each text the ids of its parts; they are encoded some `together` characters a time."""
        found: list[Any] = []
        ends: list[int] = []
        group: list[str] = []
        size = 0
        try:
            for text in texts:
                for part in self._parts(text):
                    group.append(part)
                    size += len(part)
                    if size >= together:
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


def _whole(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
