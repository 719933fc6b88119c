"""The processes that encode beside the first one: what they get from it, and what they do not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from minimind.cli.main import main
from minimind.data.loader.token_shards import ShardWriter
from minimind.data.prepare.unit_reader import Batch, UnitReader
from minimind.data.prepare.workers import _started
from minimind.data.tokenizer.sentencepiece import Tokenizer
from tests.conftest import sentences


def test_the_export_is_made_while_the_end_is_tokenised_and_not_for_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told: list[str] = []
    export, add, batches = Tokenizer.exported.func, ShardWriter.add, UnitReader.batches

    def read(reader: UnitReader) -> Iterator[Batch]:
        yield from batches(reader)
        told.append("read")

    def recorded(tokenizer: Tokenizer) -> dict[str, bytes]:
        told.append("export")
        return export(tokenizer)

    def added(writer: ShardWriter, ids: np.ndarray, lengths: np.ndarray) -> None:
        told.append("add")
        add(writer, ids, lengths)

    monkeypatch.setattr(Tokenizer, "exported", property(recorded))
    monkeypatch.setattr(ShardWriter, "add", added)
    monkeypatch.setattr(UnitReader, "batches", read)
    (tmp_path / "t.txt").write_text("\n".join(sentences(1, 200)))
    words = ["prepare", str(tmp_path / "t.txt"), "--vocab_size", "512", "--val_fraction", "0"]
    assert main([*words, "--out", str(tmp_path / "share"), "--shard", "0/2"]) == 0
    assert told == ["read", "add", "add"]
    told.clear()
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert told[:4] == ["read", "export", "add", "add"]


def test_a_helper_does_not_hear_of_ctrl_c_and_the_first_process_does():
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with _started([sys.executable, "-c", code], []) as process:
        assert process.communicate()[0] == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_helper_keeps_the_locks_of_a_first_process_that_is_killed(tmp_path: Path):
    path = tmp_path / "lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    code = f"import os; print(os.path.samestat(os.fstat({lock}), os.stat({str(path)!r})))"
    with _started([sys.executable, "-c", code], [lock]) as process:
        assert process.communicate()[0] == "True\n"
    os.close(lock)
