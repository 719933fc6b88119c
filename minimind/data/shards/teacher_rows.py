"""What a teacher says of every row of a text: the folder that `minimind data logits` writes.

`rows.bin` has a record for each row, in the order of their numbers. For T targets it has T times
the log-probabilities, float32, of the K likeliest ids and of all other ids together, then T times
these K ids, and zeros up to a multiple of 8 bytes. `sums.bin` has the sums of its blocks, and
`teacher.json`, which is written last, what they are of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minimind.data.shards.block_sums import SUM_DTYPE, CheckedBlocks, SumWriter
from minimind.data.shards.manifest import changed, require_hash
from minimind.data.shards.token_shards import token_dtype
from minimind.errors import CheckpointError
from minimind.runtime import disk
from minimind.runtime.checked_json import (
    ClosedJson,
    Digest,
    Positive,
    Size,
    read_foreign_object,
    validate,
)
from minimind.runtime.durable_files import canonical_json, sha256_of, sync_file, write_durably

NAME, ROWS, SUMS = "teacher.json", "rows.bin", "sums.bin"
SYNC_SECONDS = 10.0


class _Facts(ClosedJson):
    teacher: Digest  # of its weights
    dtype: str  # in which it computed
    top_k: Size
    vocab_size: Size  # ids that its probabilities are of
    rows: Size
    task: str
    max_seq_len: Size
    doc_mask: bool
    distill_temperature: Positive
    text: Digest
    tokenizer: Digest
    sums: Digest


@dataclass(frozen=True)
class TeacherRows:
    """The records of a folder; `facts` are the values of its `teacher.json`."""

    folder: Path
    facts: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> TeacherRows:
        """Open a folder; raise CheckpointError or DataError for a damaged one."""
        try:
            facts = read_foreign_object(folder / NAME)
            validate(_Facts, facts)
        except CheckpointError as error:
            raise type(error)(f"{folder / NAME}: {error}; write the folder again") from error
        rows = cls(folder, facts)
        require_hash(folder / SUMS, facts["sums"])
        size = disk.stat(path).st_size if disk.exists(path := folder / ROWS) else 0
        if size != rows.bytes:
            raise changed(path, f"its {size:,} bytes are not the {rows.bytes:,}")
        return rows

    @property
    def _parts(self) -> tuple[int, int]:
        """Bytes of the log-probabilities of a row, and of its ids."""
        targets, top_k = self.facts["max_seq_len"], self.facts["top_k"]
        item = token_dtype(self.facts["vocab_size"]).itemsize
        return 4 * targets * (top_k + 1), item * targets * top_k

    @property
    def row_bytes(self) -> int:
        return -(-sum(self._parts) // 8) * 8

    @property
    def bytes(self) -> int:
        return self.facts["rows"] * self.row_bytes

    @cached_property
    def _table(self) -> np.ndarray:
        table = np.memmap(self.folder / ROWS, np.int64, "r")
        return np.asarray(table).reshape(-1, self.row_bytes // 8)

    @cached_property
    def _blocks(self) -> CheckedBlocks:
        sums = np.fromfile(self.folder / SUMS, SUM_DTYPE)
        return CheckedBlocks(self.folder / ROWS, self._table.reshape(-1).view(np.uint8), sums)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """The records of rows, int64 (len(numbers), row_bytes / 8); DataError if damaged."""
        self._blocks.check(numbers * self.row_bytes, self.row_bytes)
        return self._table[numbers]

    def write(
        self,
        records: Iterable[tuple[Tensor, Tensor]],
        done: int = 0,
        synced: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """Write the folder, of log-probabilities (B, T, K + 1) and ids (B, T, K) in order.

        The file has the first `done` rows already. `synced` is given the number of rows that are on
        the disk, every SYNC_SECONDS and at the end, also after an error.
        """
        sums, dtype = SumWriter(), token_dtype(self.facts["vocab_size"])
        with open(self.folder / ROWS, "r+b" if done else "w+b") as file:

            def sync() -> float:
                file.flush()
                sync_file(self.folder / ROWS)
                synced(done)
                return time.monotonic()

            file.truncate(done * self.row_bytes)
            while content := file.read(2**20):
                sums.add(content)
            last = time.monotonic()
            try:
                for log_probs, ids in records:
                    parts = log_probs.numpy().astype("<f4"), ids.numpy().astype(dtype)
                    flat = np.concatenate([p.reshape(len(p), -1).view(np.uint8) for p in parts], 1)
                    content = np.pad(flat, ((0, 0), (0, self.row_bytes - flat.shape[1]))).tobytes()
                    file.write(content)
                    sums.add(content)
                    done += len(flat)
                    if time.monotonic() - last > SYNC_SECONDS:
                        last = sync()
            finally:
                sync()
        write_durably(self.folder / SUMS, sums.finish())
        facts = self.facts | {"sums": sha256_of(self.folder / SUMS)}
        write_durably(self.folder / NAME, canonical_json(facts))

    def unpacked(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities, float32 (B, T, K + 1), and ids, int64 (B, T, K), on its device."""
        sizes, shape = self._parts, (len(records), self.facts["max_seq_len"], -1)
        content = records.contiguous().view(torch.uint8)[:, : sum(sizes)]
        log_probs, ids = (part.contiguous() for part in content.split(sizes, dim=1))
        size = token_dtype(self.facts["vocab_size"]).itemsize
        signed = ids.view(torch.int16 if size == 2 else torch.int32).long()
        return log_probs.view(torch.float32).view(shape), (signed % 256**size).view(shape)
