"""`minimind eval` against the definition, worked out text by text in float64."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minimind.cli.main import main
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer
from minimind.data.tokenizer.vocabulary import sizes
from minimind.inference.load_model import load_checkpoint
from tests.conftest import ROOT, Trained
from tools.forking import Nursery, free_port


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def evaluate(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def direct(run: Path, texts: list[str], length: int) -> tuple[float, int, int]:
    """Summed loss, tokens and bytes: one text at a time, one stretch at a time, in float64."""
    model, tokenizer, _ = load_checkpoint(str(run))
    model = model.double()
    loss, count, size = 0.0, 0, 0
    for text in texts:
        stream = [tokenizer.eos_id, *tokenizer.encode(text), tokenizer.eos_id]
        size += len(text.encode())
        for start in range(0, len(stream) - 1, length):
            ids = torch.tensor([stream[start : start + length + 1]])
            with torch.no_grad():
                logits = model(input_ids=ids[:, :-1]).logits.double()
            chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
            loss, count = loss - float(chosen.sum()), count + ids.shape[1] - 1
    return loss, count, size


def test_sources_of_the_same_name_in_two_folders_are_distinguished(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folders = [tmp_path / "a", tmp_path / "b"]
    learnt = ["--tokenizer", str(trained.run / "tokenizer"), "--val_fraction", "0"]
    for folder, text in zip(folders, trained.texts.values(), strict=True):
        assert main(["prepare", str(text), "--out", str(folder), *learnt]) == 0
    ask = ("--checkpoint", trained.run, "--split", "train", "--max_rows", "2")
    found = evaluate(capsys, *ask, "--data_path", *folders)
    assert [*found["by_source"]] == [f"{folder}:data" for folder in folders]


def test_raw_text_may_be_as_long_as_the_tokenizer_accepts(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(SentencePieceTokenizer, "longest_at_once", 10)
    ask = ["--checkpoint", str(trained.run), "--cache_dir", str(trained.cache), "--device", "cpu"]
    text = str(next(iter(trained.texts.values())))
    assert main(["eval", *ask, "--data_path", text]) == 3
    assert "max_document_bytes = 10;" in capsys.readouterr().err


def test_scores_of_raw_text_equal_the_definition(
    trained: Trained, capsys: pytest.CaptureFixture[str]
):
    a, b = trained.texts.values()
    ask = ("--checkpoint", trained.run, "--cache_dir", trained.cache, "--batch_size", "7")
    found = evaluate(capsys, *ask, "--data_path", a, b, "--max_seq_len", "48")
    whole = [0.0, 0.0, 0.0]
    for path in (a, b):
        loss, tokens, size = direct(trained.run, texts_of(path), 48)
        own = found["by_source"][str(path)]
        assert (own["tokens"], own["bytes"]) == (tokens, size)
        assert own["loss"] == pytest.approx(loss / tokens, rel=1e-6)
        assert own["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-5)
        assert own["bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-6)
        whole = [one + more for one, more in zip(whole, (loss, tokens, size), strict=True)]
    assert found["loss"] == pytest.approx(whole[0] / whole[1], rel=1e-6)
    assert (found["tokens"], found["bytes"]) == (whole[1], whole[2])
    assert found["tokens"] % (2 * 7), "the point of the sizes is that nothing divides them"


def test_batch_size_does_not_matter_and_splits_contain_all_texts(
    trained: Trained, capsys: pytest.CaptureFixture[str]
):
    ask = ("--checkpoint", trained.run, "--data_path")
    val = evaluate(capsys, *ask, trained.mixed)
    for size in (1, 10**30):
        again = evaluate(capsys, *ask, trained.mixed, "--batch_size", size)
        assert again["loss"] == pytest.approx(val["loss"], rel=1e-6)
    train = evaluate(capsys, *ask, trained.mixed, "--split", "train")
    both = evaluate(capsys, *ask, trained.mixed, "--split", "all")
    raw = evaluate(capsys, *ask, *trained.texts.values(), "--cache_dir", trained.cache)
    assert val["tokens"] + train["tokens"] == both["tokens"] == raw["tokens"]
    assert both["bytes"] == raw["bytes"]
    assert both["loss"] == pytest.approx(raw["loss"], rel=1e-6)
    for name, path in trained.texts.items():
        own, other = both["by_source"][name], raw["by_source"][str(path)]
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-6)
    few = evaluate(capsys, *ask, trained.mixed, "--max_rows", "1")
    assert 0 < few["tokens"] < val["tokens"]
    packed = evaluate(capsys, *ask, trained.mixed, "--no-doc_mask")
    assert packed["tokens"] == val["tokens"]
    assert packed["loss"] != val["loss"]


def test_bytes_per_text_are_exact_if_known(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    ask = ("--checkpoint", trained.run, "--cache_dir", trained.cache, "--data_path")
    plain = evaluate(capsys, *ask, trained.mixed)
    few = evaluate(capsys, *ask, trained.texts["a"], "--max_rows", "1")
    every = evaluate(capsys, *ask, trained.texts["a"], "--max_rows", 10**6)
    assert every["bytes"] == sum(len(text.encode()) for text in texts_of(trained.texts["a"]))
    assert (plain["bytes_of"], few["bytes_of"]) == ("text", "tokens")

    def twice(self: SentencePieceTokenizer) -> Any:
        return 2 * sizes(self.pieces())

    monkeypatch.setattr(SentencePieceTokenizer, "piece_bytes", twice)
    assert evaluate(capsys, *ask, trained.mixed) == plain
    again = evaluate(capsys, *ask, trained.texts["a"], "--max_rows", "1")
    assert again["bytes"] == 2 * few["bytes"]
    assert main(["eval", *map(str, ask), str(trained.texts["a"]), "--max_rows", "1"]) == 0
    assert "over the bytes of the tokens" in capsys.readouterr().out.splitlines()[-1]


def test_documents_are_scored_separately_for_any_training_mask(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "exported"
    words = ["export", "--checkpoint", str(trained.run), "--format", "minimind"]
    assert main([*words, "--out", str(out)]) == 0
    found = []
    for doc_mask in (False, True):
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "doc_mask": doc_mask}))
        separate = evaluate(capsys, "--model", out, "--data_path", trained.mixed)
        packed = evaluate(capsys, "--model", out, "--data_path", trained.mixed, "--no-doc_mask")
        found.append((separate, packed))
    assert found[0] == found[1]


def test_bad_lines_are_an_error_or_skipped_and_reported(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = tmp_path / "text.jsonl"
    lines = trained.texts["a"].read_text().splitlines()[:8]
    text.write_text("\n".join([*lines[:4], "\0\0", *lines[4:]]) + "\n")
    cache = ("--cache_dir", str(tmp_path / "cache"))
    ask = ("--checkpoint", str(trained.run), "--data_path", str(text), *cache)
    assert main(["eval", *ask]) == 3
    assert "skip bad documents with --on_bad_data skip" in capsys.readouterr().err
    assert main(["eval", *ask, "--on_bad_data", "skip"]) == 3
    assert "raise --max_bad_fraction" in capsys.readouterr().err
    assert main(["eval", *ask, "--on_bad_data", "skip", "--max_bad_fraction", "0.2"]) == 0
    output = capsys.readouterr()
    assert "1 of 9 documents are bad and skipped, 2 bytes are lost, the first: " in output.err
    assert "text.jsonl:5 " in output.err
    text.write_text("\n".join(lines) + "\n")
    assert main(["eval", *ask]) == 0
    assert capsys.readouterr() == (output.out, "")


def test_a_full_standard_output_is_a_storage_error(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(full, write_through=True))
        assert main(["eval", str(trained.run), "--data_path", str(trained.mixed)]) == 5
    assert "standard output: No space left on device; free" in capsys.readouterr().err


def test_table_without_json(trained: Trained, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "--checkpoint", str(trained.run), "--data_path", str(trained.mixed)]) == 0
    path, head, *rows = capsys.readouterr().out.splitlines()
    assert path.endswith("step_00000006")
    assert head.split() == ["source", "loss", "+-", "perplexity", "bits/byte", "tokens"]
    assert [row.split()[0] for row in rows] == ["a", "b", "all"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--data_path MIXED", 2, "no RUN is given; give"),
        ("--checkpoint RUN --model RUN --data_path MIXED", 2, "both were given of --checkpoint"),
        ("--model RUN --data_path MIXED", 2, "belongs to a training run; give it as --checkpoint"),
        ("--model A --data_path MIXED", 4, "right name), not a file of torch.save"),
        ("--checkpoint RUN --data_path nowhere.jsonl", 3, "nowhere.jsonl"),
        ("--checkpoint RUN --data_path A --split val", 2, "is raw text; remove --split"),
        ("--checkpoint RUN --data_path MIXED --max_seq_len 65", 2, "more than the 64 positions"),
        ("--checkpoint RUN --data_path A A", 2, "is named twice; name it once"),
        ("--checkpoint RUN --data_path MIXED MIXED/", 2, "named twice; name it once"),
        ("--checkpoint RUN --data_path A FOLDER", 2, "name it once"),
        ("--checkpoint RUN --data_path WHOLE", 3, "val split holds no text; give --split train,"),
        ("--checkpoint RUN --data_path OTHER", 3, "prepared with another tokenizer than the model"),
    ],
)
def test_invalid_input_gives_a_one_line_error(
    words: str,
    status: int,
    message: str,
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    places = {"RUN": trained.run, "MIXED": trained.mixed, "A": trained.texts["a"]}
    places |= {"MIXED/": f"{trained.mixed}/", "FOLDER": tmp_path / "folder"}
    if "FOLDER" in words:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "link.jsonl").symlink_to(trained.texts["a"])
    if "WHOLE" in words:
        places["WHOLE"] = tmp_path / "whole"
        prepare = ["prepare", str(trained.texts["b"]), "--val_fraction", "0"]
        prepare += ["--tokenizer", str(trained.mixed / "tokenizer")]
        assert main([*prepare, "--out", str(places["WHOLE"])]) == 0
    if "OTHER" in words:
        places["OTHER"] = tmp_path / "other"
        prepare = ["prepare", str(trained.texts["b"]), "--vocab_size", "520"]
        assert main([*prepare, "--out", str(places["OTHER"])]) == 0
    capsys.readouterr()
    assert main(["eval", *(str(places.get(word, word)) for word in words.split())]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert ";" in line


def test_two_processes_give_the_same_result_as_one(
    trained: Trained, nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ask = ["--checkpoint", str(trained.run), "--data_path", str(trained.mixed), "--batch_size", "3"]
    alone = evaluate(capsys, *ask)
    words = ["eval", *ask, "--device", "cpu", "--json"]
    statuses, out, _ = nursery.run("minimind.cli.main", words, tmp_path / "ranks")
    assert statuses == [0, 0]
    together = json.loads(out)  # one document: rank 1 prints nothing
    assert together["tokens"] == alone["tokens"]
    assert together["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    for name, sums in together["by_source"].items():
        assert sums == pytest.approx(alone["by_source"][name], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_other_launchers_give_the_same_result(
    launcher: str, trained: Trained, capsys: pytest.CaptureFixture[str]
):
    ask = ["--checkpoint", str(trained.run), "--data_path", str(trained.mixed), "--batch_size", "3"]
    alone = evaluate(capsys, *ask)
    config = str(ROOT / "configs" / "accelerate_config.yaml")
    port = ["--main_process_port", str(free_port())]
    before = {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
        "accelerate": ["accelerate", "launch", "--config_file", config, "--num_processes", "2"],
    }[launcher]
    program = shutil.which(before[0], path=str(Path(sys.executable).parent))
    assert program
    more = port if launcher == "accelerate" else []
    done = subprocess.run(
        [program, *before[1:], *more, "-m", "minimind.cli.main", "eval", *ask, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(line)["loss"] == pytest.approx(alone["loss"], abs=1e-6)


@pytest.fixture
def exported(trained: Trained, tmp_path: Path) -> Path:
    """The trained model in Llama's format, for tests to damage."""
    out = tmp_path / "exported"
    words = ["export", "--checkpoint", str(trained.run), "--format", "llama", "--out", str(out)]
    assert main(words) == 0
    return out


CONFIGS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is not JSON"),
    "no object": ([], "object"),
    "a layer less": ({"num_hidden_layers": 1}, "has 'model.layers.1.input_layernorm.weight'"),
    "a layer more": (
        {"num_hidden_layers": 3},
        "has no 'model.layers.2.input_layernorm.weight', which",
    ),
    "another width": ({"hidden_size": 65}, "requires [600, 65]"),
    "null": ({"max_position_embeddings": None}, "has max_position_embeddings = None"),
    "unknown": ({"model_type": "nobodys"}, "has model_type = 'nobodys'"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("change", "message"), CONFIGS.values(), ids=CONFIGS.keys())
def test_invalid_config_of_a_directory_gives_a_one_line_error(
    trained: Trained, exported: Path, change: Any, message: str, capsys: pytest.CaptureFixture[str]
):
    config = exported / "config.json"
    if isinstance(change, dict):
        change = {**json.loads(config.read_text()), **change}
    config.write_text(change if isinstance(change, str) else json.dumps(change))
    capsys.readouterr()
    text = str(trained.texts["a"])
    words = ["eval", "--model", str(exported), "--data_path", text]
    words += ["--cache_dir", str(trained.cache)]
    assert main(words) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert "; " in line


def test_generation_config_of_a_directory_does_not_override_flags(
    exported: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["generate", "--model", str(exported), "--prompt", "abc", "--temperature", "0"]
    words += ["--max_new_tokens", "8"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    for values in ({"min_new_tokens": 30}, {"num_beams": 3}, {"repetition_penalty": 5.0}):
        (exported / "generation_config.json").write_text(json.dumps(values))
        assert main(words) == 0
        assert capsys.readouterr().out == plain
