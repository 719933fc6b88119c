"""Texts -> ids with a SentencePiece model: long ones in chunks, short ones as one, words looked up.

What is merged never crosses a space that follows something else, unless a piece does: so the words
of a text have, one after another, the ids of the whole, and English has each of its words often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, compress, pairwise
from operator import not_
from threading import Lock
from typing import Any

import numpy as np
import sentencepiece

from minimind.data.tokenizer.escaping import SPACE_SIGN, escape, require_unicode
from minimind.data.tokenizer.hf_export import merges_plainly, normal_pieces
from minimind.data.tokenizer.long_texts import CHUNK_CHARACTERS, GROUP_CHARACTERS, chunks, joints

Arrays = Callable[[list[str]], list[np.ndarray]]
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

    @cached_property
    def _separator(self) -> int | None:
        """The id of NUL, which merges with nothing: SentencePiece takes no piece that has one.

        None where a model does more than merge.
        """
        if self.joined is None:
            return None
        (separator,) = self._processor.encode("\0")
        return separator

    def __reduce__(self) -> tuple[Any, ...]:
        return TextEncoder, (self._processor,)  # a lock cannot be copied

    def lists(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; `long_texts.chunks` says what cutting long ones may change."""
        encode = partial(self._processor.encode, num_threads=threads)
        with _naming_half_characters(texts):
            return [list(chain.from_iterable(parts)) for parts in self._encoded(texts, encode)]

    def arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """The same as int32, not to be written to, a tenth of the memory of lists.

        Words that come again are looked up by one thread at a time, which keeps Python's lock;
        the others merge meanwhile, without it. So do several threads that share a text.
        """
        with _naming_half_characters(texts):
            if threads > 1 or not self._lock.acquire(blocking=False):
                return self._merged(texts, threads)
            try:
                return self._looked_up(texts)
            finally:
                self._lock.release()

    def _merged(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        encode = partial(self._processor.encode, num_threads=threads, return_type="numpy")
        whole = partial(self._whole, encode)
        if self._separator is None:
            return whole(texts)
        is_short = [len(text) <= CHUNK_CHARACTERS for text in texts]
        return _by_kind(texts, is_short, partial(self._short, encode), whole)

    def _looked_up(self, texts: Sequence[str]) -> list[np.ndarray]:
        merged = partial(self._merged, threads=1)
        if self._words is None:
            return merged(texts)
        is_spaced = [text.count(" ") * SPACED > len(text) for text in texts]
        looked_up = partial(self._whole, self._words.of, together=TOGETHER)
        return _by_kind(texts, is_spaced, looked_up, merged)

    def _short(self, encode: Arrays, texts: Sequence[str]) -> list[np.ndarray]:
        """Texts as one, which takes a fifth less time than one by one, with a NUL behind each.

        Each is so short that chunks always end before their limit: no cut changes an id.
        """
        (ids,) = self._whole(encode, ["\0".join([*texts, ""])])
        ends = np.flatnonzero(ids == self._separator).tolist()
        if len(ends) != len(texts):  # one has a NUL of its own
            return self._whole(encode, texts)
        return [ids[begin + 1 : end] for begin, end in pairwise([-1, *ends])]

    def _whole(
        self, encode: Arrays, texts: Sequence[str], together: int = GROUP_CHARACTERS
    ) -> list[np.ndarray]:
        parts = self._encoded(texts, encode, together)
        return [one[0] if len(one) == 1 else np.concatenate(one) for one in parts]

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
        for text in texts:
            for part in self._parts(text):
                group.append(part)
                size += len(part)
                if size >= together:
                    found += encode(group)
                    group, size = [], 0
            ends.append(len(found) + len(group))
        found += encode(group)
        return (found[begin:end] for begin, end in pairwise([0, *ends]))

    def _parts(self, text: str) -> Iterable[str]:
        """What is encoded for itself; the whole where a model does more than merge."""
        if len(text) <= CHUNK_CHARACTERS or self.joined is None:
            return (escape(text),)
        return chunks(escape(text), self.joined)


def _by_kind(
    texts: Sequence[str], is_first: list[bool], first: Arrays, second: Arrays
) -> list[np.ndarray]:
    """Arrays of texts in their order, of two kinds that are encoded in two ways."""
    ones = iter(first([*compress(texts, is_first)]))
    others = iter(second([*compress(texts, map(not_, is_first))]))
    return [next(ones if one else others) for one in is_first]


@contextmanager
def _naming_half_characters(texts: Sequence[str]) -> Iterator[None]:
    """What SentencePiece says of them is of another kind, and does not say where."""
    try:
        yield
    except (RuntimeError, TypeError):
        for text in texts:
            require_unicode(text)
        raise
