"""Mistakes in what a start reads are reported before the slow imports, by --dry_run too."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minimind.config.parse import parse_flags
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.train.inputs import require_inputs
from tests.conftest import ROOT

TEXT = b'{"text": "a text"}\n'
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TALK = json.dumps({"conversations": TURNS}).encode() + b"\n"
PATHS: dict[str, Callable[[Path], Any]] = {
    "t.jsonl": lambda path: path.write_bytes(TEXT),
    "talk.jsonl": lambda path: path.write_bytes(TALK),
    "bad.jsonl": lambda path: path.write_bytes(b"hello\n" + TEXT),
    "t.txt": lambda path: path.write_bytes(b"a text"),
    "empty.txt": lambda path: path.write_bytes(b""),
    "t.pdf": lambda path: path.write_bytes(b"text\na\n"),
    "cut.jsonl.gz": lambda path: path.write_bytes(gzip.compress(TEXT)[:9]),
    "t.parquet": lambda path: pq.write_table(pa.table({"text": ["a"]}), path),
    "other.parquet": lambda path: pq.write_table(pa.table({"body": ["a"]}), path),
    "no.parquet": lambda path: path.write_bytes(b"PAR1"),
    "pipe.jsonl": os.mkfifo,
    "folder/deep/t.jsonl": lambda path: path.write_bytes(TEXT),
    "folder/b.pdf": lambda path: path.write_bytes(b"a"),
    "mixed/a.jsonl": lambda path: path.write_bytes(TEXT),
    "mixed/b.jsonl": lambda path: path.write_bytes(TALK),
    "none/b.pdf": lambda path: path.write_bytes(b"a"),
    "begun/plan.json": lambda path: path.write_bytes(b"{}"),
    "cut.json": lambda path: path.write_bytes(b"{"),
    "steps/checkpoints/x": lambda path: path.write_bytes(b""),
    "run/checkpoints/step_00000003/manifest.json": lambda path: path.write_bytes(b"{}"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, write in PATHS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


BAD = [
    ("--data_path cut.jsonl.gz", DataError, "cut.jsonl.gz:1"),
    ("--data_path other.parquet", DataError, 'other.parquet: has no column "text"'),
    ("--data_path no.parquet", DataError, "no.parquet"),
    ("--task sft --data_path t.parquet", DataError, "t.parquet"),
]


@pytest.mark.parametrize(("words", "error", "message"), BAD, ids=[words for words, *_ in BAD])
def test_mistakes_are_found_by_a_look(
    words: str, error: type[Exception], message: str, place: Path
):
    with pytest.raises(error) as found:
        require_inputs(parse_flags([*words.split(), "--dry_run"]))
    assert message in str(found.value)


@pytest.mark.parametrize(
    "words",
    [
        "--data_path t.jsonl t.txt t.parquet folder",
        "--data_path t.jsonl folder/**/*.jsonl",
        "--data_path bad.jsonl talk.jsonl --on_bad_data skip",
        "--data_path other.parquet --text_field body",
        "--data_path s3://nowhere/t.jsonl https://localhost:1/t.txt",
        "--task sft --data_path talk.jsonl",
        "--init_from folder",
        "--dry_run",  # without text: of the other flags
    ],
)
def test_what_a_start_takes_passes(words: str, place: Path):
    words = words if "data_path" in words or "dry_run" in words else f"{words} --data_path t.jsonl"
    require_inputs(parse_flags(words.split()))


def test_without_text_a_start_shows_an_example(place: Path):
    with pytest.raises(UsageError, match=r"no --data_path was given .* for example: bash"):
        require_inputs(parse_flags([]))


def test_a_long_text_file_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minimind.train.inputs.LONGEST_TEXT", 3)
    (place / "t.txt").write_bytes(b"\0\0\0\0")
    require_inputs(parse_flags(["--data_path", "t.txt"]))


def test_a_run_that_goes_on_by_itself_needs_no_weights_to_start_from(place: Path):
    (place / "out" / "checkpoints" / "step_00000001").mkdir(parents=True)
    words = ["--data_path", "t.jsonl", "--init_from", "gone", "--out_dir", "out"]
    require_inputs(parse_flags(words))
    with pytest.raises(CheckpointError, match="gone: there is no such file"):
        require_inputs(parse_flags([*words, "--resume", "none"]))


@pytest.mark.parametrize("more", [[], ["--dry_run"]])
def test_the_command_ends_before_torch_is_imported(more: list[str], place: Path):
    code = (
        "import sys; from minimind.launch.train_pretrain import main;"
        " status = main(sys.argv[1:]); print(status, 'torch' in sys.modules)"
    )
    words = ["--data_path", "talk.jsonl", "--deepspeed_config", "none", *more]
    command = [sys.executable, "-c", code, *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.stdout == "3 False\n"
    assert "error[E_DATA]" in done.stderr
    assert "importing libraries" not in done.stderr
