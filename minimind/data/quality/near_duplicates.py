"""Near-duplicates by MinHash: the signature, bucket and cluster stages of datatrove on disk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.installed import install_extra

RANK_DOCUMENTS = 2**20  # signatures that are sorted at once, in 68 bytes each
BLOCK_SHINGLES = 2**12  # hashed at once, or a long document would need a kilobyte a word
READ_LINES = 2**10
CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # each character is a word
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")


@dataclass(frozen=True)
class MinHash:
    """Texts are candidates if all hashes of one bucket are equal; defaults are datatrove's."""

    ngrams: int = 5
    buckets: int = 14
    hashes: int = 8


def require_datatrove(flag: str) -> None:
    """Raise UsageError if datatrove is not installed."""
    try:
        import datatrove  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{flag} needs datatrove, which is not installed; {install_extra('quality')}"
        ) from error


def near_duplicates(texts: Iterable[str], options: MinHash, folder: Path) -> dict[int, int]:
    """Return the number of each text to remove, from 0, and of the text that stays instead of it.

    Texts that are joined by pairs are a cluster; datatrove chooses the one that stays.
    Signatures are kept below `folder`.
    """
    from datatrove.pipeline.dedup import minhash
    from datatrove.utils.hashing import HashConfig

    config = minhash.MinhashConfig(
        n_grams=options.ngrams,
        num_buckets=options.buckets,
        hashes_per_bucket=options.hashes,
        hash_config=HashConfig(hash_fc="sha1"),  # its xxhash64 fails with xxhash 4
    )
    signatures, pairs, clusters = (str(folder / name) for name in ("signatures", "pairs", "found"))
    reading = {"config": config, "lines_to_buffer": READ_LINES}
    with quiet():
        _write_signatures(texts, config, signatures)
        buckets = minhash.MinhashDedupBuckets(signatures, pairs, **reading)
        for bucket in range(options.buckets):
            buckets.run(rank=bucket, world_size=options.buckets)
        found = minhash.MinhashDedupCluster(pairs, clusters, save_cluster_id=True, **reading)
        with redirect_stderr(StringIO()):  # its progress bar
            found.run()
    return _replaced(Path(clusters))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of datatrove."""
    from loguru import logger

    logger.disable("datatrove")
    try:
        yield
    finally:
        logger.enable("datatrove")


def _write_signatures(texts: Iterable[str], config: Any, folder: str) -> None:
    from datatrove.data import Document

    step = _signature_step(config, folder)
    left = iter(texts)
    rank = 0
    for first in left:
        part = islice(chain([first], left), RANK_DOCUMENTS)
        step.run((Document(text, "") for text in part), rank)
        rank += 1


def _signature_step(config: Any, folder: str) -> Any:
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        """Words without a model of a language."""

        def word_tokenize(self, text: str) -> list[str]:
            return WORD.findall(text)

        def sent_tokenize(self, text: str) -> list[str]:
            raise NotImplementedError

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            raise NotImplementedError

    class Signature(MinhashDedupSignature):
        """The same hashes in bounded memory."""

        def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
            starts = range(0, len(shingles), BLOCK_SHINGLES)
            blocks = (shingles[start : start + BLOCK_SHINGLES] for start in starts)
            least = [super(Signature, self).get_signature(block) for block in blocks]
            return np.min(least, axis=0).tolist()

    return Signature(folder, config, language=Words())  # pyright: ignore[reportArgumentType]


def _replaced(folder: Path) -> dict[int, int]:
    """Read the clusters: for each text to remove, the one of its cluster that stays."""
    cluster_of: dict[int, int] = {}
    removed: set[int] = set()
    for path in sorted(disk.matching(folder, "*.clusters")):
        first = int(path.stem) * RANK_DOCUMENTS
        for document, cluster in np.fromfile(path, "<u4").reshape(-1, 2).tolist():
            cluster_of[first + document] = cluster
        remove = path.with_suffix(".remove")
        if disk.exists(remove):
            removed.update((first + np.fromfile(remove, "<u4").astype(int)).tolist())
    staying = {cluster: number for number, cluster in cluster_of.items() if number not in removed}
    return {number: staying[cluster_of[number]] for number in sorted(removed)}
