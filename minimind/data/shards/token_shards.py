"""Token files: little-endian uint16 or uint32, read through a memory map.

A directory holds the shards of its splits (`train-00000.bin`, ...) and a `manifest.json` with
their sizes. A row is `row_tokens` consecutive tokens, also across shards.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from minimind.data.shards.block_sums import CheckedBlocks, SumWriter, read_sums
from minimind.data.shards.manifest import read_manifest, require_hash
from minimind.errors import DataError
from minimind.runtime import disk

INDEX_DTYPE = np.dtype("<u8")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smaller dtype that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ShardWriter:
    """Writes NAME.bin (tokens) and NAME.idx (document ends); no file without documents."""

    def __init__(self, directory: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._paths = [directory / f"{name}.bin", directory / f"{name}.idx"]
        self._dtypes = [dtype, INDEX_DTYPE]
        self._files: list[BinaryIO] = []
        self._digests = [hashlib.sha256(), hashlib.sha256()]
        self._sums = SumWriter()  # of the tokens
        self.tokens = 0
        self.documents = 0

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their concatenated tokens and their lengths."""
        if not len(lengths):
            return
        if not self._files:
            self._files = [open(path, "wb") for path in self._paths]
        ends = self.tokens + np.cumsum(lengths)
        for numbers, dtype, file, digest in zip(
            (ids, ends), self._dtypes, self._files, self._digests, strict=True
        ):
            content = numbers.astype(dtype).tobytes()
            file.write(content)
            digest.update(content)
            if dtype is self._dtypes[0]:
                self._sums.add(content)
        self.tokens, self.documents = int(ends[-1]), self.documents + len(lengths)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def finish(self) -> dict[str, Any] | None:
        """Make the files durable; return the manifest entry, or None without documents.

        With the entry are the `sums` of the blocks of tokens, in base64, which have their own file.
        """
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self.close()
        if not self.tokens:
            return None
        return {
            "name": self._paths[0].name,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.tokens * self._dtypes[0].itemsize,
            "sha256": self._digests[0].hexdigest(),
            "index_sha256": self._digests[1].hexdigest(),
            "sums": base64.b64encode(self._sums.finish()).decode(),
        }


class TokenShards:
    """The tokens of a split as one sequence; `len` counts tokens.

    `manifest` and `sums` are read from the folder unless they are given: in a manifest of several
    folders the names of the shards are paths.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        manifest: dict[str, Any] | None = None,
        sums: Mapping[Path, np.ndarray] | None = None,
    ) -> None:
        directory = Path(directory)
        manifest = read_manifest(directory) if manifest is None else manifest
        sums = read_sums(directory, manifest) if sums is None else sums
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        shards = manifest["splits"][split]["shards"]
        self._paths = [directory / shard["name"] for shard in shards]
        self._states = [_opened(*pair, dtype) for pair in zip(self._paths, shards, strict=True)]
        # Plain arrays: np.memmap adds overhead to every slice.
        self._maps = [np.asarray(np.memmap(path, dtype=dtype, mode="r")) for path in self._paths]
        self._index_hashes = [shard["index_sha256"] for shard in shards]
        self._blocks = [
            CheckedBlocks(path, tokens.view(np.uint8), sums[path])
            for path, tokens in zip(self._paths, self._maps, strict=True)
        ]
        sizes = [shard["tokens"] for shard in shards]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)  # starts of the shards, and the end
        sources = manifest["sources"]
        self._tokens = [0] * len(sources)  # tokens of each source
        for shard in shards:
            self._tokens[shard["source"]] += shard["tokens"]
        begin = np.cumsum([0, *self._tokens], dtype=np.int64)
        self._begin = begin[:-1]  # first token of each source
        self._begin_of_shard = [int(begin[shard["source"]]) for shard in shards]
        weights = tuple(source["weight"] for source in sources)
        self.weights: tuple[float, ...] | None = None if None in weights else weights
        self._vocab_size = manifest["vocab_size"]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, row_tokens: int) -> int:
        """Number of complete rows over all sources."""
        return sum(self.sizes(row_tokens))

    def sizes(self, row_tokens: int) -> tuple[int, ...]:
        """Rows of each source."""
        return tuple(tokens // row_tokens for tokens in self._tokens)

    def read_rows(self, indices: np.ndarray, row_tokens: int) -> np.ndarray:
        """Read rows as int64 (len(indices), row_tokens).

        Raise DataError for an id outside the vocabulary: an embedding reports only an
        index error, and on a GPU a device-side assert.
        """
        starts = self.row_starts(indices, row_tokens)
        result = np.empty((len(starts), row_tokens), dtype=np.int64)
        first = np.searchsorted(self._starts, starts, side="right") - 1
        is_whole = starts + row_tokens <= self._starts[first + 1]
        for shard in np.unique(first[is_whole]).tolist():
            mine = np.flatnonzero(is_whole & (first == shard))
            self._gather(shard, starts[mine], mine, result)
        for number in np.flatnonzero(~is_whole).tolist():
            self._copy(int(starts[number]), result[number])
        if result.size and result.max() >= self._vocab_size:
            self._raise_unknown_id(starts, result)
        return result

    def row_starts(self, indices: np.ndarray, row_tokens: int) -> np.ndarray:
        """Position of the first token of each row, int64."""
        indices = np.asarray(indices, dtype=np.int64)
        borders = np.cumsum([0, *self.sizes(row_tokens)], dtype=np.int64)
        if len(indices) and not (0 <= indices.min() and indices.max() < borders[-1]):
            raise IndexError(f"rows {indices.min()}..{indices.max()} of {borders[-1]}")
        source = np.searchsorted(borders, indices, side="right") - 1
        return self._begin[source] + (indices - borders[source]) * row_tokens

    def row_stops(self, indices: np.ndarray, row_tokens: int) -> np.ndarray:
        """Position after the last token of each row, int64."""
        return self.row_starts(indices, row_tokens) + row_tokens

    def rows_over(self, start: int, stop: int, row_tokens: int) -> range:
        """The complete rows with any of the tokens `start` to `stop` of one source."""
        source = int(np.searchsorted(self.source_ends(), start, side="right"))
        sizes, begin = self.sizes(row_tokens), int(self._begin[source])
        before = sum(sizes[:source])
        last = min((stop - 1 - begin) // row_tokens + 1, sizes[source])
        return range(before + (start - begin) // row_tokens, before + last)

    def source_ends(self) -> np.ndarray:
        """Cumulative token counts of the sources, int64."""
        return np.cumsum(self._tokens, dtype=np.int64)

    def document_ends(self) -> np.ndarray:
        """Cumulative token counts of the documents, int64; raise DataError for a damaged file."""
        ends = [np.zeros(0, dtype=np.int64)]
        for path, sha256, start in zip(
            self._paths, self._index_hashes, self._starts[:-1], strict=True
        ):
            index = path.with_suffix(".idx")
            require_hash(index, sha256)
            ends.append(start + np.fromfile(index, dtype=INDEX_DTYPE).astype(np.int64))
        return np.concatenate(ends)

    def stretch(self, start: int, length: int) -> np.ndarray:
        """Tokens from `start` on, int64 (length,); raise DataError for an invalid id."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start}..{start + length} of {len(self)}")
        result = np.empty((1, length), dtype=np.int64)
        self._copy(start, result[0])
        if length and result.max() >= self._vocab_size:
            self._raise_unknown_id(np.array([start]), result)
        return result[0]

    def require_unchanged(self) -> None:
        """Raise DataError if size, mtime or inode of a token file changed since it was opened."""
        for path, before in zip(self._paths, self._states, strict=True):
            try:
                is_same = _state(path) == before
            except OSError:
                is_same = False
            if not is_same:
                raise DataError(
                    f"{path}: was changed or removed while it was trained on; restore it, and run"
                    " the same command again"
                )

    def _gather(self, shard: int, starts: np.ndarray, into: np.ndarray, result: np.ndarray) -> None:
        """Gather rows that lie within one shard."""
        row_tokens = result.shape[1]
        tokens, begin = self._maps[shard], int(self._starts[shard])
        source = self._begin_of_shard[shard]
        ahead = (source - begin) % row_tokens  # tokens of a row that began in the shard before
        whole = (len(tokens) - ahead) // row_tokens
        self._check(shard, starts - begin, row_tokens)
        table = tokens[ahead : ahead + whole * row_tokens].reshape(whole, row_tokens)
        result[into] = table[(starts - begin - ahead) // row_tokens]

    def _copy(self, start: int, row: np.ndarray) -> None:
        """Fill `row` with tokens from `start` on, across shards."""
        filled = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < len(row):
            offset = start + filled - int(self._starts[shard])
            part = self._maps[shard][offset : offset + len(row) - filled]
            self._check(shard, np.array([offset]), len(part))
            row[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1

    def _check(self, shard: int, starts: np.ndarray, length: int) -> None:
        """Raise DataError unless `length` tokens from each of `starts` are as written."""
        size = self._maps[shard].itemsize
        self._blocks[shard].check(starts * size, length * size)

    def _raise_unknown_id(self, starts: np.ndarray, rows: np.ndarray) -> NoReturn:
        row, column = np.argwhere(rows >= self._vocab_size)[0].tolist()
        position = int(starts[row]) + column
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        path = self._paths[shard]
        raise DataError(
            f"{path}: token {position - int(self._starts[shard])} (counted from 0) is"
            f" {rows[row, column]}, and the vocabulary has {self._vocab_size} ids; delete"
            f" {path.parent} to build it again"
        )


def _state(path: Path) -> tuple[int, int, int]:
    state = disk.stat(path)
    return state.st_size, state.st_mtime_ns, state.st_ino


def _opened(path: Path, shard: dict[str, Any], dtype: np.dtype[Any]) -> tuple[int, int, int]:
    """Return size, time and inode of a shard after checking its size."""
    expected = shard["tokens"] * dtype.itemsize
    remedy = f"delete {path.parent} to build it again"
    try:
        state = _state(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    if state[0] != expected:
        raise DataError(f"{path}: has {state[0]} bytes, its manifest says {expected}; {remedy}")
    return state
