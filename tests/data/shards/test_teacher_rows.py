"""The records of a teacher: what was written is what is read, and damage is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minimind.data.shards.teacher_rows import NAME, ROWS, SUMS, TeacherRows
from minimind.errors import CheckpointError, DataError

ROWS_OF, TARGETS, TOP_K = 300, 7, 5


def facts(vocab_size: int) -> dict[str, Any]:
    digests = dict.fromkeys(("teacher", "text", "tokenizer"), "0" * 64)
    sizes = {"rows": ROWS_OF, "max_seq_len": TARGETS, "top_k": TOP_K, "vocab_size": vocab_size}
    run = {"task": "pretrain", "doc_mask": False, "distill_temperature": 2.0, "dtype": "float32"}
    return {**digests, **sizes, **run}


def written(folder: Path, vocab_size: int = 600) -> tuple[Tensor, Tensor]:
    """Records of a folder that is written in parts of 7 rows."""
    draw = torch.Generator().manual_seed(1)
    log_probs = torch.randn(ROWS_OF, TARGETS, TOP_K + 1, generator=draw)
    ids = torch.randint(vocab_size, (ROWS_OF, TARGETS, TOP_K), generator=draw)
    ids[0, 0, 0] = vocab_size - 1
    parts = zip(log_probs.split(7), ids.split(7), strict=True)
    TeacherRows(folder, facts(vocab_size)).write(parts)
    return log_probs, ids


@pytest.mark.parametrize(("vocab_size", "item"), [(600, 2), (2**16, 2), (2**16 + 1, 4)])
def test_any_rows_in_any_order(tmp_path: Path, vocab_size: int, item: int):
    log_probs, ids = written(tmp_path, vocab_size)
    rows = TeacherRows.of(tmp_path)
    numbers = np.array([299, 0, 17, 0])
    found = rows.unpacked(torch.from_numpy(rows.read(numbers)))
    assert torch.equal(found[0], log_probs[numbers])
    assert torch.equal(found[1], ids[numbers])
    size = TARGETS * ((TOP_K + 1) * 4 + TOP_K * item)
    assert size <= rows.row_bytes < size + 8
    assert (tmp_path / ROWS).stat().st_size == rows.bytes == ROWS_OF * rows.row_bytes


def test_a_damaged_row_is_found_when_it_is_read(tmp_path: Path):
    written(tmp_path)
    rows = TeacherRows.of(tmp_path)
    with open(tmp_path / ROWS, "rb+") as file:
        file.seek(rows.bytes - 1)
        file.write(b"!")
    rows.read(np.array([0]))
    with pytest.raises(DataError, match=r"rows\.bin: was changed .* \(block 5 of 5\)"):
        rows.read(np.array([0, ROWS_OF - 1]))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (ROWS, lambda content: content[:-8], r"rows\.bin: .* bytes are not the"),
        (SUMS, lambda content: content[:-4], r"sums\.bin: was changed"),
        (NAME, lambda content: content[:-1], r"teacher\.json: is not JSON; "),
        (NAME, lambda content: content.replace(b'"rows":300', b'"rows":299'), r"rows\.bin: "),
        (NAME, lambda content: content.replace(b'"top_k":5', b'"top_k":0'), r"has top_k = 0, "),
        (NAME, lambda content: json.dumps(json.loads(content) | {"k": 1}).encode(), "field k; "),
    ],
)
def test_a_cut_or_edited_file_is_refused(tmp_path: Path, name: str, change: Any, words: str):
    written(tmp_path)
    TeacherRows.of(tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises((DataError, CheckpointError), match=words):
        TeacherRows.of(tmp_path)


def test_a_write_continues_after_the_rows_that_it_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log_probs, ids = written(tmp_path)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    parts = [*zip(log_probs.split(7), ids.split(7), strict=True)]
    reported: list[int] = []
    monkeypatch.setattr("minimind.data.shards.teacher_rows.SYNC_SECONDS", -1.0)

    def cut() -> Iterator[tuple[Tensor, Tensor]]:
        yield from parts[:3]
        raise OSError("no more")

    rows = TeacherRows(tmp_path, facts(600))
    with pytest.raises(OSError, match="no more"):
        rows.write(cut(), synced=reported.append)
    assert reported == [7, 14, 21, 21]
    rows.write(iter(parts[2:]), done=14)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
