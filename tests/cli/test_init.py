"""`minimind init`: a run.yaml that a run reads, and what it refuses."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minimind.train as training
from minimind.architecture.choice import LADDER, Text, choose, ladder
from minimind.cli.command import command_of
from minimind.cli.init import (
    Init,
    Machine,
    Sample,
    has_room,
    measured_runs,
    read_sample,
    rehearsed,
    speed_by_steps,
    yaml_text,
)
from minimind.cli.main import build_parser, main
from minimind.config.deepspeed import backend_choice
from minimind.config.launcher_env import Launch
from minimind.config.parse import parse_flags, words_of
from minimind.runtime.device import HOST
from minimind.sweep import step_time
from minimind.train.start import rehearse
from tests.closed import closed
from tests.conftest import sentences

train: Any = training  # a package that is called like a function

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
    run = parse_flags(["--config", "run.yaml"])
    assert (run.data_path, run.out_dir, run.optimizer) == (("text.jsonl",), "out/text", "muon")
    assert run.max_tokens
    assert run.max_tokens > 1e5
    values = [line for line in Path("run.yaml").read_text().splitlines() if "0" in line]
    assert all("#" in line for line in values)
    assert len(Path("run.prompts.txt").read_text().splitlines()) == 3
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    (here / "out/text/checkpoints").mkdir(parents=True)
    capsys.readouterr()
    assert main([*words, "--force"]) == 0
    assert "out/text holds a run" in capsys.readouterr().out


def test_another_machine_is_not_asked_for_in_this_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    written(here / "text.jsonl")
    monkeypatch.setattr(backend_choice, "list_gpus", lambda: ["T4"])  # which torch does not see
    words = "init --hours 2 --gpu_model h100 --gpus 8".split()
    assert main([*words, "--data_path", "text.jsonl"]) == 0
    printed = capsys.readouterr().out
    run = parse_flags(["--config", "run.yaml", "--dry_run", "--device", "cuda"])
    monkeypatch.setattr(backend_choice, "list_gpus", list)
    plan = rehearse(run, Launch(world_size=8))
    assert plan.schedule
    rows = f"about {plan.schedule.total_steps:,} of {plan.run.rows_per_step(8)} rows"
    assert rows in printed
    assert plan.run.dtype == "bfloat16"


def test_a_text_with_fewer_tokens_than_a_step_of_all_gpus_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    written(here / "text.jsonl")
    words = "init --hours 2 --gpu_model h100 --gpus 2000 --data_path text.jsonl".split()
    assert main(words) == 3
    assert "--gpus" in capsys.readouterr().err


def test_texts_may_be_called_like_flags(here: Path):
    for name in ("text.jsonl", "-t.jsonl"):
        written(here / name)
    assert main("init --hours 2 --gpu_model h100 -- text.jsonl -t.jsonl".split()) == 0


def test_the_size_of_a_text_is_that_of_its_documents(here: Path):
    size = written(here / "text.jsonl", 60_000)
    assert (here / "text.jsonl").stat().st_size > 3 * 2**20
    assert read_sample(["text.jsonl"]).text.bytes == pytest.approx(size, rel=0.01)


def test_the_size_of_a_file_that_is_read_ahead_is_that_of_its_documents(here: Path):
    """1 MiB is read of a buffer of 1 MiB at a time; the rest of it counts too."""
    size = written(here / "text.jsonl", 30_000)
    texts = [json.loads(line)["text"] for line in (here / "text.jsonl").read_text().splitlines()]
    (here / "text.json").write_text(json.dumps([{"text": text} for text in texts]))
    (here / "text.csv").write_text("text,n\n" + "".join(f"{text},1\n" for text in texts))
    with gzip.open(here / "text.csv.gz", "wb") as packed:
        packed.write((here / "text.csv").read_bytes())
    for name in ("text.json", "text.csv", "text.csv.gz"):
        assert read_sample([name]).text.bytes == pytest.approx(size, rel=0.05), name


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--data_path gone.jsonl", 3, "no such file"),
        ("gone.jsonl", 3, "no such file"),
        ("text.jsonl --out .", 2, "is a folder"),
        ("text.jsonl --out tokens/", 2, "tokens is a folder"),
        ("tokens", 3, "name the text"),
        ("text.jsonl --text_field body", 3, '"body"'),
        ("text.jsonl --out beside.yaml", 2, "beside.prompts.txt"),
        ("text.jsonl --out beside.yaml --force", 2, "beside.prompts.txt"),
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
    (here / "beside.prompts.txt").write_text("my own")
    (here / "tokens").mkdir()
    (here / "tokens/plan.json").touch()
    assert main(["init", "--gpu_model", "h100", *words.split()]) == status
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (here / "run.yaml").exists()
    assert (here / "beside.prompts.txt").read_text() == "my own"


@pytest.mark.parametrize("text", ["closed/text.jsonl", "text.jsonl --out closed/run.yaml"])
def test_a_closed_folder_is_said_before_anything_is_measured(
    text: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    written(here / "text.jsonl")
    (here / "closed").mkdir()
    monkeypatch.setattr("minimind.cli.init.find_machine", pytest.fail)
    with closed(here / "closed"):
        assert main(["init", *text.split()]) == (5 if "--out" in text else 3)
    error = capsys.readouterr().err
    assert "closed" in error
    assert "ermission" in error
    assert error.count("\n") == 1


def test_a_small_text_is_said_before_anything_is_measured(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    written(here / "text.jsonl", 10)
    monkeypatch.setattr("minimind.cli.init.find_machine", pytest.fail)
    assert main(["init", "text.jsonl"]) == 3


@pytest.mark.parametrize(
    ("documents", "share", "said"),
    [(1, 0, "a .txt file is one document"), (100, 0.05, "about 5"), (600, 0.01, "about 6")],
)
def test_a_text_of_few_documents_holds_out_more_or_nothing(
    documents: int, share: float, said: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    text = " ".join(WORDS) + "\n"
    for n in range(documents):
        (here / f"{n}.txt").write_text(f"{n} {text * (1 + 3000 // documents)}")
    assert main(["init", "*.txt", "--gpu_model", "h100"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert parse_flags(["--config", "run.yaml"]).val_fraction == pytest.approx(share)


def test_another_field_and_bad_documents_are_read_as_in_the_run(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    written(here / "text.jsonl")
    lines = (here / "text.jsonl").read_text().replace('"text"', '"body"')
    (here / "text.jsonl").write_text("no JSON\n" + lines)
    words = "init text.jsonl --text_field body --gpu_model h100".split()
    assert main(words) == 3
    assert main([*words, "--on_bad_data", "skip"]) == 0
    run = parse_flags(["--config", "run.yaml"])
    assert (run.text_field, run.on_bad_data) == ("body", "skip")
    assert main([*words, "--on_bad_data", "skip", "--max_document_bytes", "9", "--force"]) == 3
    assert "remove --on_bad_data skip" in capsys.readouterr().err


def test_the_speed_is_that_of_the_batch_of_the_run():
    """A step of 0.1 s and 0.1 s a row: 8 rows share it in a long run, in a short one two."""
    size = LADDER[0]
    at = [speed_by_steps(size, seconds, 2, 0.2, 0.9) for seconds in (10, 100, 1000, 1e6)]
    assert at == sorted(at)
    assert at[0] == pytest.approx(2 * 2 * 256 / 0.3)
    assert at[-1] == pytest.approx(2 * 8 * 256 / 0.9)
    assert speed_by_steps(size, 1e6, 2, 0.9, 0.2) > 0  # noise


def machine_of(gpus: int, gib: int) -> Machine:
    """GPUs of so much memory, of another machine."""
    name = f"{gpus} x H100"
    return Machine(name, "cuda", gpus, "", "assumed", lambda size, seconds: 1e6, gib * 2**30, True)


def test_a_size_has_room_in_the_batch_that_the_run_takes(here: Path):
    """A start does not lower the rows of its rule to what the memory holds."""
    written(here / "text.jsonl")
    for gpus, most in ((1, {2: "26m", 4: "64m", 12: "104m", 24: "0.4b"}), (8, {12: "0.4b"})):
        for gib, name in most.items():
            machine = machine_of(gpus, gib)
            fitting = [size.name for size in LADDER if has_room(["text.jsonl"], machine, size)]
            assert fitting[-1] == name


def test_the_memory_is_that_of_the_dtype_of_the_start(here: Path, monkeypatch: pytest.MonkeyPatch):
    written(here / "text.jsonl")
    machine = replace(machine_of(2, 8), device="cpu", kind="measured", is_elsewhere=False)
    for has_bf16, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(type(HOST), "has_bf16", has_bf16)
        assert rehearsed(["text.jsonl"], machine, LADDER[0], 10**6).run.dtype == dtype


def test_what_no_run_has_measured_is_said_so(here: Path):
    text = Text(1e10, lambda vocab_size: 3.5)
    choice = choose(text, 1000, 60, lambda size, seconds: 1e6)
    assert choice.size is LADDER[-1]
    sample = Sample(text, 1e6, ["The"])
    machine = machine_of(8, 80)
    words = ["init", "--data_path", "text.jsonl", "--out_dir", "out", "--hours", "1000"]
    command = command_of(build_parser().parse_args(words))
    assert isinstance(command, Init)
    Path("run.yaml").write_text(
        yaml_text(command, choice, sample, machine, Path("run.prompts.txt"), 1000, 64)
    )
    assert Path("run.yaml").read_text().count("untried for so large a model") == 2
    assert parse_flags(["--config", "run.yaml"]).muon_lr == 0.008


def test_the_steps_of_the_runs_are_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_time, "SECONDS", 0.1)
    for flags in [*measured_runs()][:2]:
        assert 0 < step_time.step_seconds(parse_flags(words_of(flags)), "cpu") < 60


@pytest.mark.parametrize("vocab_size", [300, 151_936])
def test_the_steps_of_any_vocabulary_are_measured(vocab_size: int):
    """A text's own tokenizer may have fewer pieces than one that a run trains."""
    assert all(size.shape().vocab_size == vocab_size for size in ladder(vocab_size))
    runs = [parse_flags(words_of(flags)) for flags in measured_runs(vocab_size)]
    assert {run.vocab_size for run in runs} == {max(512, vocab_size)}


def test_questions_are_asked_again_until_they_are_answered(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    written(here / "my text.jsonl")
    answers = iter(["", "gone.jsonl", '"my text', '"my text.jsonl"', "soon", "2", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["init", "--gpu_model", "h100"]) == 0
    printed = capsys.readouterr().out
    assert "gone.jsonl: there is no such file" in printed
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


def test_a_prepared_folder_has_sizes_and_a_tokenizer(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    texts = sentences(1, 400)
    (here / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    size = sum(len(one.encode()) for one in texts)
    words = ["--vocab_size", "600", "--val_fraction", "0.1"]
    assert main(["prepare", "text.jsonl", *words, "--out", "tokens"]) == 0
    init = ["init", "--data_path", "tokens", "--hours", "2", "--gpu_model", "h100"]
    assert main(init) == 0
    printed = capsys.readouterr().out
    assert f"tokens: {size / 1e3:.3g} kB in about 400 documents" in printed
    assert "vocabulary 600" in printed
    manifest = json.loads(Path("tokens/manifest.json").read_text())
    train_tokens, val_tokens = (manifest["splits"][name]["tokens"] for name in ("train", "val"))
    assert f"of {train_tokens:,} tokens" in printed
    assert f"of the tokens ({val_tokens:,}), chosen when the text was prepared" in printed
    run = parse_flags(["--config", "run.yaml", "--dry_run"])
    assert (run.data_path, run.vocab_size) == (("tokens",), parse_flags([]).vocab_size)
    assert len(Path("run.prompts.txt").read_text().splitlines()) == 3
    assert train(config="run.yaml", dry_run=True, device="cpu", deepspeed_config="none") == 0
    few = ["--vocab_size", "600", "--val_fraction", "0.001"]  # less than a row
    assert main(["prepare", "text.jsonl", *few, "--out", "few"]) == 0
    assert main(["init", "few", "--hours", "2", "--gpu_model", "h100", "--force"]) == 0
    assert "no row, so the run is not validated" in capsys.readouterr().out
    held_out = json.loads(Path("few/manifest.json").read_text())["splits"]["val"]["tokens"]
    assert 0 < held_out < 257
    for more, reason in (
        (["text.jsonl"], "--data_path tokens: was written by `minimind prepare`"),
        (["--text_field", "body"], "--text_field body has no effect on tokens"),
    ):
        assert main([*init, *more, "--force"]) == 2
        assert reason in capsys.readouterr().err
