"""Raw text files -> a tokenizer and token shards in a cache, built once and found by content."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minimind.data.cache import build_once
from minimind.data.documents import find_files, read_documents
from minimind.data.shards import MANIFEST_NAME, ShardWriter, TokenShards, read_manifest, token_dtype
from minimind.data.tokenizer import MODEL_NAME, SMALLEST_VOCABULARY, Tokenizer, train_tokenizer
from minimind.errors import DataError, UsageError
from minimind.files import canonical_json, fingerprint, sha256_of, write_durably

FORMAT_VERSION = 1  # raise it when the same text would give other files
SPLITS = ("train", "val")
ENCODE_BYTES = 2**22
MOST_THREADS = 16


@dataclass(frozen=True)
class Prepared:
    """A tokenizer and the tokens of the two splits, ready to be read."""

    directory: Path
    tokenizer: Tokenizer
    train: TokenShards
    val: TokenShards
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A text file as it was when its content was hashed."""

    path: Path
    bytes: int
    modified_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Source:
        """Hash the file."""
        try:
            size, modified_ns = _size_and_time(path)
            return cls(path, size, modified_ns, sha256_of(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); check it") from error

    @property
    def identity(self) -> list[str]:
        """What its documents depend on: the content, and how it is read."""
        return [self.path.suffix, self.sha256]

    def require_unchanged(self) -> None:
        """Nothing, or a DataError when the file was written to while it was read."""
        expected = (self.bytes, self.modified_ns)
        if not self.path.exists() or _size_and_time(self.path) != expected:
            raise DataError(f"{self.path}: changed while it was read; start again when it is done")


def _size_and_time(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


@dataclass(frozen=True)
class Corpus:
    """The documents of some files, cut into what is trained on and what is held out."""

    sources: list[Source]
    val_fraction: float
    max_document_bytes: int
    progress: bool

    def documents(self, doing: str) -> Iterator[tuple[int, str, str]]:
        """(index of the file, split, text) of every document, in order."""
        silent = not self.progress or not sys.stderr.isatty()
        total = sum(source.bytes for source in self.sources)
        with tqdm(total=total, desc=doing, unit="B", unit_scale=True, disable=silent) as bar:
            for index, source in enumerate(self.sources):
                done = bar.n
                for text in read_documents(source.path, self.max_document_bytes):
                    content = text.encode()
                    yield index, split_of(content, self.val_fraction), text
                    bar.update(len(content))
                bar.update(done + source.bytes - bar.n)  # the JSON around the text
                source.require_unchanged()

    def training_texts(self) -> Iterator[str]:
        """The documents that are not held out; a DataError when there is none."""
        found = False
        for _, split, text in self.documents("reading"):
            if split == "train":
                found = True
                yield text
        if not found:
            raise no_training_documents(self.val_fraction)


def split_of(content: bytes, val_fraction: float) -> str:
    """The split of a document, by its text alone: it stays there whatever is added around it."""
    place = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64
    return "val" if place < val_fraction else "train"


def no_training_documents(val_fraction: float) -> DataError:
    """Every document was held out."""
    return DataError(
        f"no document is left to train on: val_fraction = {val_fraction} holds all of them out;"
        " lower --val_fraction or add documents"
    )


def prepare(
    paths: Sequence[str | Path],
    *,
    tokenizer_path: str | None,
    vocab_size: int,
    val_fraction: float,
    max_document_bytes: int,
    cache_dir: Path,
    progress: bool,
) -> Prepared:
    """The tokens of the text in `paths`; every process calls it, one of them does the work.

    Without `tokenizer_path` a tokenizer of `vocab_size` pieces is learnt from the training split.
    With it, its own number of pieces is in force, and comparing the two is the caller's.
    """
    if tokenizer_path is None and vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size} is less than {SMALLEST_VOCABULARY}; raise --vocab_size"
        )
    cache_dir = cache_dir.expanduser()
    sources = [Source.of(path) for path in find_files(paths)]
    corpus = Corpus(sources, float(val_fraction), max_document_bytes, progress)
    if tokenizer_path is None:
        tokenizer = Tokenizer(_learnt_tokenizer(corpus, vocab_size, cache_dir))
    else:
        tokenizer = Tokenizer(Path(tokenizer_path).expanduser())
    identity = {
        "format_version": FORMAT_VERSION,
        "sources": [source.identity for source in sources],
        "tokenizer": tokenizer.fingerprint,
        "val_fraction": corpus.val_fraction,
        "max_document_bytes": max_document_bytes,
    }
    key = fingerprint(identity)
    directory = cache_dir / f"tokens-{key}"
    build_once(directory, lambda draft: _write_tokens(draft, corpus, tokenizer, key))
    return open_prepared(directory, tokenizer)


def open_prepared(directory: Path, tokenizer: Tokenizer) -> Prepared:
    """The shards in a directory that is complete."""
    manifest = read_manifest(directory)
    train, val = (TokenShards(directory, split) for split in SPLITS)
    return Prepared(directory, tokenizer, train, val, manifest)


def _learnt_tokenizer(corpus: Corpus, vocab_size: int, cache_dir: Path) -> Path:
    identity = {
        "format_version": FORMAT_VERSION,
        "sources": [source.identity for source in corpus.sources],
        "vocab_size": vocab_size,
        "val_fraction": corpus.val_fraction,
    }
    directory = cache_dir / f"tokenizer-{fingerprint(identity)}"

    def build(draft: Path) -> None:
        train_tokenizer(corpus.training_texts(), vocab_size, draft / MODEL_NAME)

    build_once(directory, build)
    return directory


def _write_tokens(directory: Path, corpus: Corpus, tokenizer: Tokenizer, key: str) -> None:
    """Shards of both splits and a manifest; each document is followed by the end-of-document id."""
    dtype = token_dtype(tokenizer.vocab_size)
    counts = {split: {"tokens": 0, "documents": 0, "text_bytes": 0} for split in SPLITS}
    documents = [0] * len(corpus.sources)
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(directory, split, dtype)) for split in SPLITS
        }
        for index, split, text_bytes, ids in _encoded(corpus, tokenizer):
            writers[split].add([*ids, tokenizer.eos_id])
            counts[split]["tokens"] += len(ids) + 1
            counts[split]["documents"] += 1
            counts[split]["text_bytes"] += text_bytes
            documents[index] += 1
        shards = {split: writer.close() for split, writer in writers.items()}
    if not counts["train"]["documents"]:
        raise no_training_documents(corpus.val_fraction)
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": key,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": dtype.name,
        "splits": {split: {**counts[split], "shards": shards[split]} for split in SPLITS},
        "sources": [
            {"file": s.path.name, "bytes": s.bytes, "sha256": s.sha256, "documents": n}
            for s, n in zip(corpus.sources, documents, strict=True)
        ],
    }
    write_durably(directory / MANIFEST_NAME, canonical_json(manifest))


def _encoded(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[tuple[int, str, int, list[int]]]:
    """(index of the file, split, bytes of text, ids) of every document, in order."""
    threads = min(os.cpu_count() or 1, MOST_THREADS)
    for batch in _batched(corpus.documents("tokenizing")):
        encoded = tokenizer.encode_batch([text for _, _, text in batch], threads)
        for (index, split, text), ids in zip(batch, encoded, strict=True):
            yield index, split, len(text.encode()), ids


def _batched(documents: Iterator[tuple[int, str, str]]) -> Iterator[list[tuple[int, str, str]]]:
    """Groups of documents of about `ENCODE_BYTES`, for the threads to share."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[2].encode())
        if size >= ENCODE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
