"""CRC-32 sums of blocks of token files, checked when a process first reads from a block.

`sums.bin` has the sums of all token files of a folder, in the order of the manifest, which has its
sha256.
"""

from __future__ import annotations

import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from minimind.data.shards.manifest import SUMS_NAME, changed, require_hash, shards_of
from minimind.errors import DataError

# A row of 2,048 tokens has 4 KiB: its first reading costs four times its bytes, and zlib sums more
# than 1 GB/s. A sum is 0.02 % of its block.
BLOCK_BYTES = 2**14
SUM_DTYPE = np.dtype("<u4")


class SumWriter:
    """Sums the blocks of a file that is written in pieces."""

    def __init__(self) -> None:
        self._sums = array("L")
        self._sum, self._filled = 0, 0  # of the block that is not full

    def add(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            part = left[: BLOCK_BYTES - self._filled]
            self._sum, left = zlib.crc32(part, self._sum), left[len(part) :]
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._close_block()

    def finish(self) -> bytes:
        """The sums of all blocks, four bytes each."""
        if self._filled:
            self._close_block()
        return np.array(self._sums, dtype=SUM_DTYPE).tobytes()

    def _close_block(self) -> None:
        self._sums.append(self._sum)
        self._sum, self._filled = 0, 0


class CheckedBlocks:
    """The blocks of a memory-mapped file, each checked before what it holds is first used."""

    def __init__(self, path: Path, content: np.ndarray, sums: np.ndarray) -> None:
        """`content` is the file as uint8, `sums` has one number a block."""
        self._path, self._content, self._sums = path, content, sums
        self._is_checked = np.zeros(len(sums), dtype=bool)
        self._left = len(sums)  # at most so many are not checked

    def check(self, starts: np.ndarray, length: int) -> None:
        """Check the blocks of `length` bytes from each of `starts` on (int64).

        Raise DataError for the first one that is not as it was written. Threads may check one block
        at the same time, to the same end.
        """
        if not self._left or not length or not len(starts):
            return
        first, last = starts // BLOCK_BYTES, (starts + length - 1) // BLOCK_BYTES
        reach = np.arange(int((last - first).max()) + 1)
        blocks = np.minimum(first[:, None] + reach, last[:, None])
        new = np.unique(blocks[~self._is_checked[blocks]])
        for block in new.tolist():
            begin = block * BLOCK_BYTES
            content = self._content[begin : begin + BLOCK_BYTES]
            if zlib.crc32(content.data) != self._sums[block]:
                last_byte = begin + len(content) - 1
                raise changed(
                    self._path,
                    f"bytes {begin:,} to {last_byte:,} (block {block + 1:,} of"
                    f" {len(self._sums):,}) are not those",
                )
        if len(new):
            self._is_checked[new] = True
            self._left = int(np.count_nonzero(~self._is_checked))


def read_sums(directory: Path, manifest: dict[str, Any]) -> dict[Path, np.ndarray]:
    """The sums of each token file of a folder, by its path.

    Raise DataError if they are not as they were written.
    """
    path = directory / SUMS_NAME
    if SUMS_NAME not in manifest["files"]:
        raise DataError(f"{path}: is not in the manifest; prepare the text again, or clear a cache")
    require_hash(path, manifest["files"][SUMS_NAME])
    sums, at, found = np.fromfile(path, dtype=SUM_DTYPE), 0, {}
    for shard in shards_of(manifest):
        count = -(-shard["bytes"] // BLOCK_BYTES)
        found[directory / shard["name"]] = sums[at : at + count]
        at += count
    return found
