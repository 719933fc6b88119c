"""What a run reports when its data or configuration cannot be: kind, file, field, value, way out.

In process up to where workers would meet; two real launches show the line and the exit status.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimind.checkpoint.run_folder import lock_out_dir
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.errors import (
    CheckpointError,
    DataError,
    LockedError,
    RunError,
    StorageError,
    UsageError,
)
from minimind.runtime.process import Progress
from minimind.train.inputs import require_inputs
from minimind.train.pretrain import pretrain
from tests.conftest import SHAPE, Launcher
from tools.runs import left_over


@pytest.fixture
def start_error(monkeypatch, tmp_path, corpus):
    """Runs rank 0 of two up to its first mistake, and gives that back."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(flags: str) -> RunError:
        places = f"--cache_dir {tmp_path / 'cache'} --out_dir {tmp_path / 'out'} --device cpu"
        data = "" if "--data_path" in flags else f"--data_path {corpus}"
        requested = parse_flags(f"{SHAPE} {places} {data} {flags}".split())
        progress = Progress()
        try:
            require_inputs(requested)
            pretrain(requested, progress)
        except RunError as error:
            return error
        finally:
            if progress.lock:
                progress.lock.close()
        pytest.fail("no mistake was found")

    return run


def written(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def test_missing_data_is_named(start_error, tmp_path):
    error = start_error("--data_path nowhere.jsonl")
    assert isinstance(error, DataError)
    assert "nowhere.jsonl" in str(error)
    assert not (tmp_path / "out").exists()


def test_no_data_path_at_all_gives_an_example(start_error):
    error = start_error(f"--data_path {'dataset/pretrain_hq.jsonl'}")
    assert isinstance(error, UsageError)
    assert "bash run_accelerate.sh --model tiny --data_path" in str(error)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", b"", ["empty.jsonl", "empty"]),
        ("bad.jsonl", b'{"text": "a b c"}\n{"text": "d"\n', ["bad.jsonl:2 (byte 18)"]),
        ("field.jsonl", b'{"txt": "a"}\n', ["field.jsonl:1", "text"]),
        ("raw.txt", b"abc\0def", ["raw.txt:1", "NUL"]),
        ("latin.txt", b"caf\xe9", ["latin.txt:1 (byte 3)", "UTF-8"]),
        ("table.csv", b"a,b\n", ["table.csv"]),
        ("folder/readme.md", b"no text here", ["folder"]),
    ],
)
def test_bad_data_is_reported_with_file_and_line(start_error, tmp_path, name, content, words):
    path = written(tmp_path / name, content)
    error = start_error(f"--data_path {Path(path).parent if 'folder' in name else path}")
    assert isinstance(error, DataError)
    for word in words:
        assert word in str(error)
    assert "; " in str(error)  # and what to do
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_less_text_than_one_step_is_reported_in_rows(start_error, tmp_path):
    path = written(tmp_path / "short.jsonl", json.dumps({"text": "a few words " * 90}).encode())
    error = start_error(
        f"--data_path {path} --val_fraction 0 --batch_size 64 --accumulation_steps 4"
    )
    assert isinstance(error, DataError)
    assert "fewer than the 512 of one step (64 x 4 x 2 processes)" in str(error)


def test_a_deepspeed_file_that_contradicts_a_flag_is_reported_before_any_work(
    start_error, tmp_path
):
    config = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    config["gradient_clipping"] = 0.5
    path = written(tmp_path / "ds.json", json.dumps(config).encode())
    error = start_error(f"--deepspeed_config {path} --grad_clip 1.0")
    assert isinstance(error, UsageError)
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_of_another_size_than_the_flag_is_refused(start_error, tmp_path):
    from minimind.data.tokenizer.sentencepiece import train_tokenizer

    train_tokenizer(["some words to learn from, again and again " * 20], 512, tmp_path / "t.model")
    error = start_error(f"--tokenizer {tmp_path / 't.model'}")
    assert isinstance(error, UsageError)
    assert "vocab_size = 600 (--vocab_size)" in str(error)
    assert "512" in str(error)


def test_an_out_dir_that_cannot_be_written_is_a_storage_error(start_error, tmp_path):
    (tmp_path / "out").write_text("in the way")
    error = start_error("")
    assert isinstance(error, StorageError)
    assert str(tmp_path / "out") in str(error)


def test_a_checkpoint_that_is_not_there_is_reported_before_anything_is_written(
    start_error, tmp_path
):
    error = start_error("--resume nowhere")
    assert isinstance(error, CheckpointError)
    assert "nowhere: no such directory" in str(error)
    assert not (tmp_path / "out").exists()


def test_an_out_dir_in_use_names_its_holder(start_error, tmp_path):
    with lock_out_dir(tmp_path / "out"):
        error = start_error("")
    assert isinstance(error, LockedError)
    assert "process" in str(error)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        pytest.param(
            *("--batch_sise 3", 2, ["E_USAGE", "did you mean --batch_size?"]),
            marks=pytest.mark.long,  # tests/refusals has it in process
        ),
        ("--data_path gone.jsonl", 3, ["E_DATA", "gone.jsonl"]),
    ],
)
def test_a_launched_mistake_is_one_line_and_its_status(
    launch: Launcher, tmp_path: Path, flags: str, status: int, words: list[str]
):
    done = launch.run(tmp_path / "out", flags)
    assert left_over(tmp_path, 0) == []
    assert done.status == status
    starting, *phases, line = done.stderr.splitlines()
    assert starting.startswith("starting 2 processes on the CPU (")
    assert all(phase.endswith(" ...") for phase in phases)
    assert line.startswith("train_pretrain: error[")
    assert " rank=" in line
    assert all(word in line for word in words)
    assert not (tmp_path / "out").exists()
