"""`minimind init`: a run.yaml that a run reads, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from minimind.cli.init import read_sample
from minimind.cli.main import main
from minimind.config.parse import parse_flags

WORDS = "the quick brown fox jumps over a lazy dog while seven sages sleep in quiet rooms".split()


def written(path: Path, documents: int = 3000) -> int:
    """Documents of ten words; returns the bytes of their texts."""
    texts = [
        " ".join(WORDS[(n * 7 + k * k + n // 5) % len(WORDS)] for k in range(10 + n % 5))
        for n in range(documents)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return sum(map(len, texts))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_is_read_back(here: Path, capsys: pytest.CaptureFixture[str]):
    written(here / "text.jsonl")
    words = "init --data_path text.jsonl --hours 2 --gpu_model h100".split()
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "bash run_accelerate.sh --config run.yaml" in printed
    assert "a guide, no law" in printed
    run = parse_flags(["--config", "run.yaml"])
    assert (run.data_path, run.out_dir, run.optimizer) == (("text.jsonl",), "out/text", "muon")
    assert run.max_tokens
    assert run.max_tokens > 1e5
    values = [line for line in Path("run.yaml").read_text().splitlines() if "0" in line]
    assert all("#" in line for line in values)
    assert len(Path("run.prompts.txt").read_text().splitlines()) == 3
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0


def test_the_size_of_a_text_is_that_of_its_documents(here: Path):
    size = written(here / "text.jsonl", 60_000)
    assert (here / "text.jsonl").stat().st_size > 3 * 2**20
    assert read_sample(["text.jsonl"]).bytes == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--data_path gone.jsonl", 2, "no such file"),
        ("--data_path s3://bucket/text.jsonl", 2, "not on this machine"),
        ("--data_path empty.jsonl", 3, "empty.jsonl"),
        ("--data_path small.jsonl", 3, "add text"),
        ("--data_path text.jsonl --hours 0.001", 2, "give --hours"),
        ("--hours 1", 2, "give --data_path"),
        ("--data_path text.jsonl --out gone/run.yaml", 5, "gone"),
    ],
)
def test_what_is_refused(
    words: str, status: int, said: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    written(here / "text.jsonl")
    written(here / "small.jsonl", 10)
    (here / "empty.jsonl").touch()
    assert main(["init", "--gpu_model", "h100", *words.split()]) == status
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (here / "run.yaml").exists()


def test_questions_are_asked_again_until_they_are_answered(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    written(here / "my text.jsonl")
    answers = iter(["", "gone.jsonl", '"my text', '"my text.jsonl"', "soon", "2", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["init", "--gpu_model", "h100"]) == 0
    printed = capsys.readouterr().out
    assert "gone.jsonl: no such file" in printed
    assert "No closing quotation" in printed
    assert "give a number above 0" in printed
    run = parse_flags(["--config", "run.yaml"])
    assert (run.data_path, run.out_dir) == (("my text.jsonl",), "out/my text")
    assert next(answers, None) is None


def test_answers_that_end_are_a_mistake(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def ended(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["init"]) == 2
    assert "--data_path" in capsys.readouterr().err


def test_a_text_of_one_huge_line_and_parquet_are_read(here: Path):
    line = json.dumps({"text": " ".join(WORDS) * 30_000})
    (here / "one.jsonl").write_text(line)
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": [" ".join(WORDS[n % 9 :]) for n in range(3000)]})
    parquet.write_table(table, here / "text.parquet")
    for name in ("one.jsonl", "text.parquet"):
        assert main(["init", "--gpu_model", "h100", "--data_path", name, "--force"]) == 0
