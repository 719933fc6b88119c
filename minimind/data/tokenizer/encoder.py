"""Encode texts with a SentencePiece model: long ones in chunks, short ones joined, words cached.

Merges do not cross the start of a word unless a piece does. So the ids of a text are the ids of its
words in a row, and frequent words can be looked up instead of merged again.
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
from minimind.data.tokenizer.hf_export import is_plain_bpe, normal_pieces
from minimind.data.tokenizer.long_texts import (
    CHUNK_CHARACTERS,
    GROUP_CHARACTERS,
    adjacent_pairs,
    chunks,
)

Arrays = Callable[[list[str]], list[np.ndarray]]
WORD = re.compile(" *[^ ]+| +")  # with the spaces before it
MAX_CHARACTERS_PER_SPACE = 12  # in a text whose words are looked up
LOOKUP_CHARACTERS = 2**18  # whose words are looked up together
MIN_WORDS_PER_NEW = 4  # caching a new word costs more than merging it once
ENTRY_SIZE, CACHE_SIZE = 64, 2**23  # in characters; about 20 MB


class WordCache:
    """Ids by word; used by one thread at a time."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._encode = partial(processor.encode, num_threads=1, return_type="numpy")
        self._ids: dict[str, bytes] = {}
        self._size = 0

    def encode(self, parts: list[str]) -> list[np.ndarray]:
        """Ids of each part, read-only int32; merged as usual if too many of its words are new.

        So the cache fills with the words of a language rather than with numbers and file names.
        """
        words = [WORD.findall(part) for part in parts]
        new = [*set(chain.from_iterable(words)).difference(self._ids)]
        if len(new) * MIN_WORDS_PER_NEW > sum(map(len, words)):
            return self._encode(parts)
        self._ids.update(zip(new, map(np.ndarray.tobytes, self._encode(new)), strict=True))
        joined = [b"".join(map(self._ids.__getitem__, part_words)) for part_words in words]
        self._size += sum(map(len, new)) + ENTRY_SIZE * len(new)
        if self._size > CACHE_SIZE:
            self._ids, self._size = {}, 0
        return [np.frombuffer(ids, np.int32) for ids in joined]


class TextEncoder:
    """Encodes texts with one model; ids do not depend on the number of threads."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        self._lock = Lock()  # of `_words`

    @cached_property
    def pairs(self) -> frozenset[str] | None:
        """Adjacent character pairs of all pieces; None if the model does more than merge."""
        if not is_plain_bpe(self._processor):
            return None
        return adjacent_pairs(
            piece.replace(SPACE_SIGN, " ") for piece in normal_pieces(self._processor)
        )

    @cached_property
    def _words(self) -> WordCache | None:
        """None if a piece has a space after another character."""
        if self.pairs is None or any(pair[1] == " " != pair[0] for pair in self.pairs):
            return None
        return WordCache(self._processor)

    @cached_property
    def _separator(self) -> int | None:
        """Id of NUL, which merges with nothing: no piece contains it. None as for `pairs`."""
        if self.pairs is None:
            return None
        (separator,) = self._processor.encode("\0")
        return separator

    def __reduce__(self) -> tuple[Any, ...]:
        return TextEncoder, (self._processor,)  # a lock cannot be copied

    def lists(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; see `long_texts.chunks` for very long ones."""
        encode = partial(self._processor.encode, num_threads=threads)
        with _require_unicode_on_error(texts):
            return [list(chain.from_iterable(parts)) for parts in self._encode_parts(texts, encode)]

    def arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """Ids of each text as read-only int32 arrays: a tenth of the memory of lists.

        One thread at a time looks words up, holding the GIL; other threads merge without it.
        """
        with _require_unicode_on_error(texts):
            if threads > 1 or not self._lock.acquire(blocking=False):
                return self._merge(texts, threads)
            try:
                return self._look_up(texts)
            finally:
                self._lock.release()

    def _merge(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        encode = partial(self._processor.encode, num_threads=threads, return_type="numpy")
        whole = partial(self._whole, encode)
        if self._separator is None:
            return whole(texts)
        is_short = [len(text) <= CHUNK_CHARACTERS for text in texts]
        return _encode_by_kind(texts, is_short, partial(self._encode_joined, encode), whole)

    def _look_up(self, texts: Sequence[str]) -> list[np.ndarray]:
        merge = partial(self._merge, threads=1)
        if self._words is None:
            return merge(texts)
        has_words = [text.count(" ") * MAX_CHARACTERS_PER_SPACE > len(text) for text in texts]
        look_up = partial(self._whole, self._words.encode, group_characters=LOOKUP_CHARACTERS)
        return _encode_by_kind(texts, has_words, look_up, merge)

    def _encode_joined(self, encode: Arrays, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode short texts joined by NUL, which takes a fifth less time than one by one.

        They are short enough for every chunk to end below its limit, so no cut changes an id.
        """
        (ids,) = self._whole(encode, ["\0".join([*texts, ""])])
        ends = np.flatnonzero(ids == self._separator).tolist()
        if len(ends) != len(texts):  # a text contains NUL
            return self._whole(encode, texts)
        return [ids[begin + 1 : end] for begin, end in pairwise([-1, *ends])]

    def _whole(
        self, encode: Arrays, texts: Sequence[str], group_characters: int = GROUP_CHARACTERS
    ) -> list[np.ndarray]:
        parts_of = self._encode_parts(texts, encode, group_characters)
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in parts_of]

    def _encode_parts(
        self,
        texts: Sequence[str],
        encode: Callable[[list[str]], list[Any]],
        group_characters: int = GROUP_CHARACTERS,
    ) -> Iterator[list[Any]]:
        """Yield per text the ids of its parts, encoded about `group_characters` at a time."""
        ids: list[Any] = []
        ends: list[int] = []
        group: list[str] = []
        size = 0
        for text in texts:
            for part in self._parts(text):
                group.append(part)
                size += len(part)
                if size >= group_characters:
                    ids += encode(group)
                    group, size = [], 0
            ends.append(len(ids) + len(group))
        ids += encode(group)
        return (ids[begin:end] for begin, end in pairwise([0, *ends]))

    def _parts(self, text: str) -> Iterable[str]:
        """Split into parts that are encoded separately."""
        if len(text) <= CHUNK_CHARACTERS or self.pairs is None:
            return (escape(text),)
        return chunks(escape(text), self.pairs)


def _encode_by_kind(
    texts: Sequence[str], is_first: list[bool], first: Arrays, second: Arrays
) -> list[np.ndarray]:
    """Encode two kinds of texts in two ways; return the arrays in the order of the texts."""
    first_ids = iter(first([*compress(texts, is_first)]))
    second_ids = iter(second([*compress(texts, map(not_, is_first))]))
    return [next(first_ids if flag else second_ids) for flag in is_first]


@contextmanager
def _require_unicode_on_error(texts: Sequence[str]) -> Iterator[None]:
    """Raise DataError for text that is not Unicode, instead of SentencePiece's own errors."""
    try:
        yield
    except (RuntimeError, TypeError):
        for text in texts:
            require_unicode(text)
        raise
