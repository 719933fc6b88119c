"""N-grams of given texts, such as those of an evaluation, for datatrove's filter."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from minimind.data.prepare.encode import refuse
from minimind.data.quality.near_duplicates import quiet
from minimind.data.quality.rules import plain_words
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import read_segment, segments_of
from minimind.errors import DataError


def ngram_filter(files: Sequence[Path], reading: ReadOptions) -> Any:
    """datatrove's filter of texts with an n-gram of the files, which it names by their numbers.

    Its own indexer does the same with tasks of lighteval, and needs that package.
    Raise DataError if a document is bad, or a file has no n-gram.
    """
    from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.text import ngrams, simplify_text

    # its xxhash64 fails with xxhash 4
    config = NGramsDecontConfig(hash_config=HashConfig(hash_fc="sha1"))
    with TemporaryDirectory() as index, quiet():
        found: Any = NGramsDecontFilter(index, config, language=plain_words())  # pyright: ignore[reportArgumentType] (a tokenizer is taken too)
        for number, path in enumerate(files):
            hashes = {
                found.hash_func(" ".join(ngram))
                for text in _texts(path, reading)
                for ngram in ngrams(
                    found.tokenizer.word_tokenize(simplify_text(text, config.norm_config)),
                    config.n_grams,
                )
            }
            if not hashes:
                raise DataError(
                    f"--decontaminate {path}: no text has {config.n_grams} words, so nothing can be"
                    " found by it; give longer texts, or leave it out"
                )
            place = Path(index) / f"{number}.index.hashes"
            np.array(sorted(hashes), config.hash_config.np_descr).tofile(place)
        found.load_index_hashes()
    return found


def _texts(path: Path, reading: ReadOptions) -> Iterator[str]:
    for segment in segments_of(path, sys.maxsize):
        for document in read_segment(segment, reading):
            if isinstance(document, Rejection):
                refuse(document)
            else:
                yield document[0]
