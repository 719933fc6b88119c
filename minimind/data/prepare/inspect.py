"""Inspect a prepared folder: counts, lengths, duplicates, rows and damage."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minimind.data.chat.template import readable
from minimind.data.prepare.merge import tokens_fingerprint
from minimind.data.prepare.prepared import Prepared
from minimind.data.shards.conversation_shards import ConversationShards, unmarked
from minimind.data.shards.manifest import index_name, read_manifest
from minimind.data.shards.token_shards import INDEX_DTYPE
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.durable_files import sha256_of
from minimind.runtime.terminal import SHOWN, shorten_line

MOST_HASHES = 2**21  # documents compared; above this, a sample by hash
END = " [end] "  # marks the end of a document in a row


@dataclass(frozen=True)
class Duplicate:
    """A repeated document: its count, its length and the start of its text."""

    times: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection."""

    sources: list[dict[str, Any]]
    splits: dict[str, dict[str, int]]
    rejected: dict[str, Any]
    lengths: list[tuple[int, int]]  # (longest of its bin in tokens, documents)
    duplicates: list[Duplicate]
    duplicate_share: float  # fraction of documents that repeat another
    compared: int  # documents; a sample if there are very many
    rows: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=2)


def inspect(prepared: Prepared, rows: int, row_tokens: int) -> Inspection:
    """Inspect an undamaged folder."""
    manifest = prepared.manifest
    keys = (
        "name",
        "weight",
        "documents",
        "tokens",
        "text_bytes",
        "rejected",
        "sha256",
        "text_loss",
    )
    duplicates, share, compared = _duplicates(prepared)
    return Inspection(
        sources=[
            {key: source[key] for key in keys if key in source} for source in manifest["sources"]
        ],
        splits={
            split: {key: counts[key] for key in ("tokens", "documents", "text_bytes")}
            for split, counts in manifest["splits"].items()
        },
        rejected=manifest["rejected"],
        lengths=_lengths(prepared),
        duplicates=duplicates,
        duplicate_share=share,
        compared=compared,
        rows=list(_rows(prepared, rows, row_tokens)),
    )


def damage(directory: Path) -> Iterator[str]:
    """Yield `FILE: fault` for every file that is missing or changed."""
    manifest = read_manifest(directory)
    if manifest["fingerprint"] != tokens_fingerprint(manifest):
        yield "manifest.json: does not match its own fingerprint"
    expected = dict(manifest["files"])
    for _, shard in _shards(manifest):
        expected |= {shard["name"]: shard["sha256"], index_name(shard): shard["index_sha256"]}
    for name, digest in _with_progress(sorted(expected.items()), "hashing"):
        if not disk.is_file(directory / name):
            yield f"{name}: is missing"
        elif sha256_of(directory / name) != digest:
            yield f"{name}: does not match its sha256"


def _with_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Wrap `items` in a progress bar if stderr is a terminal."""
    return tqdm(items, desc=what, unit=" files", leave=False, disable=not sys.stderr.isatty())


def _shards(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for split, counts in manifest["splits"].items():
        for shard in counts["shards"]:
            yield split, shard


def _ends(directory: Path, shard: dict[str, Any]) -> np.ndarray:
    """Return the end of each document in tokens; raise DataError for an invalid index."""
    path, remedy = directory / index_name(shard), "restore it, or prepare the text again"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    size = INDEX_DTYPE.itemsize * shard["documents"]
    if len(content) != size:
        raise DataError(f"{path}: has {len(content)} bytes, not {size}; {remedy}")
    ends = np.frombuffer(content, dtype=INDEX_DTYPE)
    if ends[-1:].sum() != shard["tokens"] or (ends <= np.insert(ends[:-1], 0, 0)).any():
        raise DataError(f"{path}: has impossible document ends; {remedy}")
    return ends.astype(np.int64)


def _lengths(prepared: Prepared) -> list[tuple[int, int]]:
    """Count documents by length: up to 1, 2, 4, ... tokens, including the end token."""
    counts = np.zeros(64, dtype=np.int64)
    for _, shard in _shards(prepared.manifest):
        lengths = np.diff(_ends(prepared.directory, shard), prepend=0)
        counts += np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int), minlength=64)
    used = np.flatnonzero(counts)
    span = range(used[0], used[-1] + 1) if len(used) else range(0)
    return [(2**power, int(counts[power])) for power in span]


def _duplicates(prepared: Prepared) -> tuple[list[Duplicate], float, int]:
    """Return the most frequent documents, the repeated fraction and the number compared."""
    directory, dtype = prepared.directory, np.dtype(prepared.manifest["dtype"]).newbyteorder("<")
    every = 1 + prepared.manifest["documents"] // MOST_HASHES
    hashes: list[int] = []
    places: list[tuple[int, int, int]] = []  # shard, start, end
    shards = [shard for _, shard in _shards(prepared.manifest)]
    for number, shard in enumerate(_with_progress(shards, "comparing")):
        tokens = np.memmap(directory / shard["name"], dtype=dtype, mode="r")
        start = 0
        for end in _ends(directory, shard).tolist():
            digest = hashlib.blake2b(tokens[start:end].tobytes(), digest_size=8).digest()
            value = int.from_bytes(digest, "little")
            if value % every == 0:
                hashes.append(value)
                places.append((number, start, end))
            start = end
    if not hashes:
        return [], 0.0, 0
    _, firsts, counts = np.unique(
        np.array(hashes, dtype=np.uint64), return_index=True, return_counts=True
    )
    most = sorted(zip(-counts, firsts, strict=True))[:5]
    duplicates = []
    for minus, first in most:
        if minus < -1:
            number, start, end = places[first]
            tokens = np.memmap(directory / shards[number]["name"], dtype=dtype, mode="r")
            text = _text(prepared, tokens[start : min(end, start + SHOWN)])
            duplicates.append(Duplicate(int(-minus), end - start, shorten_line(text)))
    return duplicates, 1 - len(counts) / len(hashes), len(hashes)


def _rows(prepared: Prepared, count: int, row_tokens: int) -> Iterator[str]:
    """Yield evenly spaced rows of the training split as text; of conversations without padding."""
    train = prepared.train
    total = train.rows(row_tokens)
    places = np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64))
    starts, stops = (of(places, row_tokens).tolist() for of in (train.row_starts, train.row_stops))
    for index, start, stop in zip(places, starts, stops, strict=True):
        if isinstance(train, ConversationShards):
            text = prepared.text(start, stop - start)
        else:
            row = train.stretch(start, stop - start)
            ends = np.flatnonzero(row == prepared.tokenizer.eos_id)
            parts = np.split(row, ends)  # all but the first start with an end token
            text = END.join(prepared.tokenizer.decode(part.tolist()) for part in parts)
        yield f"row {index}: {shorten_line(text, 4 * SHOWN)}"


def _text(prepared: Prepared, stored: np.ndarray) -> str:
    """Text of tokens as they lie in a file."""
    if isinstance(prepared.train, ConversationShards):
        return readable(prepared.tokenizer, *unmarked(stored))
    return prepared.tokenizer.decode(stored.tolist())
