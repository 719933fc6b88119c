"""The worker processes of a preparation."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from minimind.cli.main import main
from minimind.config.run_config import PROJECT
from minimind.data.prepare import workers
from minimind.data.prepare.encode import Batch, UnitReader
from minimind.data.prepare.prepare import build_once
from minimind.data.shards.token_shards import ShardWriter
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer
from minimind.errors import DataError, RunError
from tests.conftest import sentences


def test_the_export_is_made_while_the_end_is_tokenised_and_not_for_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    export, add, batches = SentencePieceTokenizer.exported.func, ShardWriter.add, UnitReader.batches

    def read(reader: UnitReader) -> Iterator[Batch]:
        yield from batches(reader)
        calls.append("read")

    def recorded(tokenizer: SentencePieceTokenizer) -> dict[str, bytes]:
        calls.append("export")
        return export(tokenizer)

    def added(writer: ShardWriter, ids: np.ndarray, lengths: np.ndarray) -> None:
        calls.append("add")
        add(writer, ids, lengths)

    monkeypatch.setattr(SentencePieceTokenizer, "exported", property(recorded))
    monkeypatch.setattr(ShardWriter, "add", added)
    monkeypatch.setattr(UnitReader, "batches", read)
    (tmp_path / "t.txt").write_text("\n".join(sentences(1, 200)))
    words = ["prepare", str(tmp_path / "t.txt"), "--vocab_size", "512", "--val_fraction", "0"]
    assert main([*words, "--out", str(tmp_path / "share"), "--shard", "0/2"]) == 0
    assert calls == ["read", "add", "add"]
    calls.clear()
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert calls[:4] == ["read", "export", "add", "add"]


def text_file(folder: Path, documents: int) -> str:
    path = folder / "t.jsonl"
    path.write_text("".join(f"{json.dumps({'text': t})}\n" for t in sentences(1, documents)))
    return str(path)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".idx")
    }


def test_a_script_without_a_main_guard_prepares_with_several_processes(tmp_path: Path):
    """The worker processes do not import the script that started them."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "pathlib.Path(sys.argv[1]).open('a').write('started\\n')\n"
        "from minimind.cli.main import main\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )
    words = ["prepare", text_file(tmp_path, 3_000), "--vocab_size", "512", "--shard_bytes", "20000"]
    starts = tmp_path / "starts"
    assert main([*words, "--out", str(tmp_path / "1"), "--processes", "1"]) == 0
    command = [sys.executable, script, starts, *words, "--out", tmp_path / "3", "--processes", "3"]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    assert starts.read_text() == "started\n"
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "3")
    assert len(bytes_of(tmp_path / "1")) > 3


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def errors_of_killed(
    process: subprocess.Popen[str], workers: list[int], stop: signal.Signals, victim: str
) -> str:
    """What a command prints when it or the last of its workers gets a signal; it ends by it."""
    os.kill(process.pid if victim == "parent" else workers[-1], stop)
    errors = process.communicate(timeout=120)[1]
    expected = {"worker": 70, "parent": -9 if stop == signal.SIGKILL else 130}[victim]
    assert process.returncode == expected, errors
    assert "Traceback" not in errors
    return errors


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stop", "victim"),
    [(signal.SIGKILL, "parent"), (signal.SIGINT, "parent"), (signal.SIGKILL, "worker")],
)
def test_no_worker_survives_and_the_next_start_finishes(
    stop: signal.Signals, victim: str, tmp_path: Path
):
    command = [sys.executable, "-m", "minimind", "prepare", text_file(tmp_path, 8_000)]
    command += ["--vocab_size", "512", "--shard_bytes", "50000", "--processes", "2"]
    command += ["--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        workers: list[int] = []
        while len(workers) < 3 or not list((tmp_path / "out.part").glob("unit-*.json")):
            assert process.poll() is None
            workers = children(process.pid)  # with the resource tracker
            time.sleep(0.01)
        errors = errors_of_killed(process, workers, stop, victim)
    if victim == "worker":
        assert "run the same command again" in errors
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert main(command[3:]) == 0


def test_without_semaphores_one_process_prepares_the_text(tmp_path: Path, monkeypatch):
    """As in a container without /dev/shm."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(workers, "ProcessPoolExecutor", fail)
    words = ["prepare", str(text_file(tmp_path, 300)), "--vocab_size", "512", "--processes", "2"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("error", "is_kept"), [(RunError, True), (KeyboardInterrupt, True), (DataError, False)]
)
def test_a_draft_is_kept_unless_the_same_text_fails_again(
    tmp_path: Path, error: type[BaseException], is_kept: bool
):
    def build(draft: Path) -> None:
        (draft / "unit").touch()
        raise error("stop")

    with pytest.raises(error):
        build_once(tmp_path / "out", build, "free some space", is_resumable=True)
    assert (tmp_path / "out.part" / "unit").exists() == is_kept
