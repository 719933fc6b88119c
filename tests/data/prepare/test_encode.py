"""Units to shards: what is encoded together, and how long a document may be for a tokenizer."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers

from minimind.cli import evaluate as eval_commands
from minimind.cli.main import main
from minimind.data.prepare import encode
from minimind.data.prepare.encode import Batch
from minimind.data.prepare.prepared import open_prepared
from minimind.data.prepare.work_units import Unit
from minimind.data.text.documents import ReadOptions, Records
from minimind.data.text.formats import segments_of
from minimind.data.tokenizer.load import load_tokenizer, longest_document
from minimind.data.tokenizer.sentencepiece import MODEL_NAME, train_tokenizer
from minimind.data.tokenizer.statistics import measure
from minimind.errors import DataError
from tests.conftest import ROOT, sentences

MIB = 2**20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of each of three kinds."""
    place = tmp_path_factory.mktemp("encode")
    train_tokenizer(sentences(3, 200), 512, place / MODEL_NAME)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue] (set at import)
        sentence_iterator=iter(sentences(3, 300)),
        model_writer=model,
        model_type="unigram",
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (place / "unigram.model").write_bytes(model.getvalue())
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(place / "bytes.json"))
    return place


class Recorder:
    """A tokenizer that says how many batches it has at a time, and with how many threads."""

    def __init__(self, longest_at_once: int | None) -> None:
        self.longest_at_once = longest_at_once
        self.seen: list[tuple[str, int, int]] = []  # first text, threads, batches at the time
        self._now = 0
        self._lock = threading.Lock()

    def encode_arrays(self, texts: list[str], threads: int) -> list[np.ndarray]:
        with self._lock:
            self._now += 1
        time.sleep(0.02)
        with self._lock:
            self.seen.append((texts[0], threads, self._now))
            self._now -= 1
        return [np.array([len(text)], dtype=np.int32) for text in texts]


@pytest.mark.parametrize(("longest", "large"), [(None, 8 * MIB), (2 * MIB, MIB)])
def test_a_large_document_has_all_threads_and_memory_to_itself(longest: int | None, large: int):
    tokenizer = Recorder(longest)
    work: Any = SimpleNamespace(
        tokenizer=tokenizer,
        encode_batch=lambda batch, threads: tokenizer.encode_arrays(batch.texts, threads),
        threads=2,
        overlap_task=lambda: None,
    )
    sizes = [1, 1, 1, large, 1, large - 1, 1, large, large, 1]
    given = [Batch([f"{n}"], [], ["train"], [size]) for n, size in enumerate(sizes)]
    found: Any = list(encode._overlapped(given, work))
    assert [batch.texts for batch, _ in found] == [batch.texts for batch in given]
    assert [ids[0].tolist() for _, ids in found] == [[1]] * len(given)
    seen = {int(text): (threads, together) for text, threads, together in tokenizer.seen}
    for number, size in enumerate(sizes):
        assert seen[number][0] == (2 if size == large else 1)
        assert seen[number][1] == 1 or size < large
    assert max(together for _, together in seen.values()) == 2


def test_batches_are_as_short_as_what_templates_write_is_long(tmp_path: Path):
    def of_line(line: bytes | bytearray) -> encode.WrittenText:
        text = encode.WrittenText(line.decode())
        text.written = "a" * int(line), []
        return text

    records = Records(of_line, lambda row: "", lambda names: [])
    (tmp_path / "t.jsonl").write_text(f"1\n{MIB}\n{MIB}\n1\n1\n")
    unit = Unit(0, 0, tuple(segments_of(tmp_path / "t.jsonl", 2**30)))
    reading = ReadOptions(records=records)
    reader = encode.UnitReader(unit, reading, 0, True, tmp_path / "listed", lambda _: None)
    assert [len(batch.texts) for batch in reader.batches()] == [2, 1, 2]


def test_what_is_accepted_depends_on_whether_a_tokenizer_cuts_texts(place: Path):
    found = [longest_document(str(place / n)) for n in (MODEL_NAME, "unigram.model", "bytes.json")]
    assert found == [64 * MIB, 8 * MIB, 2 * MIB]
    assert longest_document(None) == 64 * MIB


def test_a_document_that_a_tokenizer_would_need_too_much_memory_for_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text, tokenizer = tmp_path / "t.jsonl", str(place / "bytes.json")
    text.write_text('{"text": "short"}\n' + json.dumps({"text": "a " * MIB + "b"}) + "\n")
    command = ["prepare", str(text), "--tokenizer", tokenizer, "--val_fraction", "0"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 3
    output = capsys.readouterr().err
    assert "t.jsonl:2 (byte 18): the document has 2097153 bytes, more than max_document_b" in output
    assert "raise --max_document_bytes" in output
    command += ["--out", str(tmp_path / "skipped"), "--on_bad_data", "skip"]
    assert main([*command, "--max_bad_fraction", "0.5"]) == 0
    manifest = open_prepared(tmp_path / "skipped").manifest
    assert (manifest["documents"], manifest["rejected"]["count"]) == (1, 1)
    assert manifest["options"]["max_document_bytes"] == 2 * MIB


def test_inspecting_a_tokenizer_takes_documents_as_long_as_preparing_does(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "t.txt").write_text("a " * MIB + "b")
    command = ["tokenizer", "inspect", str(place / "bytes.json"), "--data_path"]
    command.append(str(tmp_path / "t.txt"))
    assert main(command) == 3
    assert "longer than max_document_bytes = 2097152" in capsys.readouterr().err
    (tmp_path / "t.txt").write_text("a " * 9 + "b")
    assert main([*command, "--max_document_bytes", "19"]) == 0
    assert main([*command, "--max_document_bytes", "18"]) == 3


def test_evaluating_raw_text_takes_documents_as_long_as_preparing_does(place: Path, tmp_path: Path):
    (tmp_path / "t.txt").write_text("a " * MIB + "b")
    text = str(tmp_path / "t.txt")
    args = eval_commands.Eval(data_path=[text], cache_dir=str(tmp_path / "cache"))
    opened = load_tokenizer(place / "bytes.json"), str(place / "bytes.json")
    with pytest.raises(DataError, match="longer than max_document_bytes = 2097152"):
        eval_commands._open_data(text, (text,), *opened, None, args, 0)
    args.max_document_bytes = 9
    (tmp_path / "t.txt").write_text("a " * 5)
    with pytest.raises(DataError, match="longer than max_document_bytes = 9"):
        eval_commands._open_data(text, (text,), *opened, None, args, 0)


def test_what_is_measured_at_once_is_bounded_in_bytes():
    third = "\u5b57" * (MIB // 9)
    texts = [third, third, third, third, 2 * MIB * "a", "b", "b"]
    seen: list[list[int]] = []

    def encode_arrays(batch: list[str], threads: int) -> list[np.ndarray]:
        seen.append([len(text.encode()) for text in batch])
        return [np.zeros(1, dtype=np.int32) for _ in batch]

    comes_back = iter(texts)
    tokenizer: Any = SimpleNamespace(
        piece_bytes=lambda: np.zeros(9, dtype=np.int32),
        unk_id=-1,
        encode_arrays=encode_arrays,
        decode=lambda _: next(comes_back),
    )
    found = measure(tokenizer, iter(texts))
    sizes = [len(text.encode()) for text in texts]
    assert seen == [sizes[:3], sizes[3:4], sizes[4:5], sizes[5:]]
    assert (found.bytes, found.documents, found.changed) == (sum(sizes), 7, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["unigram.model", "bytes.json"])
def test_the_longest_documents_stay_within_a_gibibyte(place: Path, tmp_path: Path, name: str):
    size = longest_document(str(place / name))
    letters = np.random.default_rng(0).integers(33, 91, size).astype(np.uint8).tobytes().decode()
    with open(tmp_path / "t.jsonl", "w") as file:
        for start in range(3):
            file.write(json.dumps({"text": letters[start:]}) + "\n")
            file.write(json.dumps({"text": letters[: size // 2 - 1]}) + "\n")
    code = f"""
from minimind.cli.main import main
from minimind.runtime.environment import peak_bytes
command = ["prepare", {str(tmp_path / "t.jsonl")!r}, "--tokenizer", {str(place / name)!r}]
assert main([*command, "--val_fraction", "0", "--out", {str(tmp_path / "out")!r}]) == 0
print(peak_bytes())
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert int(ended.stdout.splitlines()[-1]) < 2**30


def test_each_kind_of_tokenizer_encodes_arrays_as_it_encodes(place: Path):
    texts = ["The quick brown fox", "", "a b  c"]
    for name in (MODEL_NAME, "unigram.model", "bytes.json"):
        tokenizer = load_tokenizer(place / name)
        for threads in (1, 2):
            found = tokenizer.encode_arrays(texts, threads)
            assert [ids.tolist() for ids in found] == list(map(tokenizer.encode, texts))
