"""Shards of given tokens, as a preparation would have written them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from minimind.data.shards.block_sums import SumWriter
from minimind.data.shards.manifest import FORMAT_VERSION, SUMS_NAME, seal
from minimind.data.shards.token_shards import ShardWriter


def sums_of(path: Path) -> bytes:
    """The sums of the blocks of a token file."""
    sums = SumWriter()
    sums.add(path.read_bytes())
    return sums.finish()


def describe(
    directory: Path,
    dtype: str,
    shards: Sequence[dict[str, Any]],
    weights: Sequence[float | None] = (None,),
    vocab_size: int = 2**31,
) -> None:
    """The manifest of shards, of one source where they do not say of which."""
    shards = [{"source": 0, "index_sha256": "", **shard} for shard in shards]
    nothing = {"tokens": 0, "documents": 0, "text_bytes": 0}
    source = {"name": "x", "documents": 0, "tokens": {"train": 0, "val": 0}, "text_bytes": 0}
    source |= {"rejected": 0, "sha256": "", "inputs": [], "split_bytes": {"train": 0, "val": 0}}
    sums = b"".join(sums_of(directory / shard["name"]) for shard in shards)
    (directory / SUMS_NAME).write_bytes(sums)
    manifest = {
        "format_version": FORMAT_VERSION,
        "dtype": np.dtype(dtype).name,
        "vocab_size": vocab_size,
        "eos_id": 2,
        "documents": 0,
        "tokenizer": "",
        "fingerprint": "",
        "options": {"text_field": "text", "max_document_bytes": 1, "val_fraction": 0.0},
        "rejected": {"count": 0, "listed": 0, "bytes": 0, "first": ""},
        "files": {SUMS_NAME: hashlib.sha256(sums).hexdigest()},
        "sources": [{**source, "weight": weight} for weight in weights],
        "splits": {"train": {**nothing, "shards": shards}, "val": {**nothing, "shards": []}},
    }
    (directory / "manifest.json").write_text(json.dumps(seal(manifest)))


def write(
    directory: Path, tokens: np.ndarray, dtype: str, shard_tokens: int, pieces: int = 7
) -> list[dict[str, Any]]:
    """Shards of `shard_tokens` tokens, each of some documents."""
    shards = []
    for start in range(0, len(tokens), shard_tokens):
        part = tokens[start : start + shard_tokens]
        with closing(ShardWriter(directory, f"train-{len(shards):05d}", np.dtype(dtype))) as writer:
            lengths = [len(piece) for piece in np.array_split(part, pieces) if len(piece)]
            writer.add(part, np.array(lengths))
            shard = writer.finish()
        assert shard
        shards.append(shard)
    describe(directory, dtype, shards)
    return shards
