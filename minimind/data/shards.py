"""Token ids <-> files: little-endian uint16 or uint32 and nothing else, memory-mapped to read.

A directory holds the shards of its splits (`train-00000.bin`, ...) and a `manifest.json` that says
how many tokens each has. A row is `row_tokens` tokens in sequence, wherever shards begin.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minimind.errors import DataError

MANIFEST_NAME = "manifest.json"
SHARD_TOKENS = 2**27  # 256 MiB as uint16


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of the two that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ShardWriter:
    """Writes one split's tokens, a new file every `shard_tokens`; no file for no tokens."""

    def __init__(
        self, directory: Path, split: str, dtype: np.dtype[Any], shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._directory = directory
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._file = None
        self._digest = hashlib.sha256()
        self._shards: list[dict[str, Any]] = []

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens."""
        tokens = np.asarray(ids, dtype=self._dtype)
        while len(tokens):
            if self._file is None:
                self._begin()
            room = self._shard_tokens - self._shards[-1]["tokens"]
            self._write(tokens[:room])
            tokens = tokens[room:]

    def close(self) -> list[dict[str, Any]]:
        """Finish the last file; name, tokens, bytes and sha256 of each."""
        self._end()
        return self._shards

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        name = f"{self._split}-{len(self._shards):05d}.bin"
        self._file = open(self._directory / name, "xb")
        self._digest = hashlib.sha256()
        self._shards.append({"name": name, "tokens": 0, "bytes": 0, "sha256": ""})

    def _write(self, tokens: np.ndarray) -> None:
        assert self._file is not None
        content = tokens.tobytes()
        self._file.write(content)
        self._digest.update(content)
        shard = self._shards[-1]
        shard["tokens"] += len(tokens)
        shard["bytes"] += len(content)
        if shard["tokens"] == self._shard_tokens:
            self._end()

    def _end(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            file.flush()
            os.fsync(file.fileno())
        self._shards[-1]["sha256"] = self._digest.hexdigest()


class TokenShards:
    """The tokens of one split as one long sequence; `len` counts tokens."""

    def __init__(self, directory: str | Path, split: str) -> None:
        directory = Path(directory)
        manifest = read_manifest(directory)
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        shards = manifest["splits"][split]["shards"]
        self._maps = [_mapped(directory / shard["name"], shard, dtype) for shard in shards]
        sizes = [shard["tokens"] for shard in shards]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)  # of each shard, and the end

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, row_tokens: int) -> int:
        """Whole rows; the tokens after the last one are not read."""
        return len(self) // row_tokens

    def read_rows(self, indices: np.ndarray, row_tokens: int) -> np.ndarray:
        """Rows `indices` as int64 (len(indices), row_tokens)."""
        indices = np.asarray(indices, dtype=np.int64)
        rows = self.rows(row_tokens)
        if len(indices) and not (0 <= indices.min() and indices.max() < rows):
            raise IndexError(f"rows {indices.min()}..{indices.max()} of {rows}")
        result = np.empty((len(indices), row_tokens), dtype=np.int64)
        for row, index in zip(result, indices, strict=True):
            self._copy(int(index) * row_tokens, row)
        return result

    def _copy(self, start: int, row: np.ndarray) -> None:
        """Fill `row` with the tokens from `start`, across as many shards as it takes."""
        filled = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < len(row):
            offset = start + filled - int(self._starts[shard])
            part = self._maps[shard][offset : offset + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a directory of shards says of itself."""
    path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict) or not {"dtype", "splits"} <= manifest.keys():
            raise ValueError("it describes no shards")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); delete the directory to build it again"
        ) from error
    return manifest


def _mapped(path: Path, shard: dict[str, Any], dtype: np.dtype[Any]) -> np.ndarray:
    expected = shard["tokens"] * dtype.itemsize
    remedy = f"delete {path.parent} to build it again"
    try:
        size = path.stat().st_size
        if size == expected:
            return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    raise DataError(f"{path}: has {size} bytes, its manifest says {expected}; {remedy}")
