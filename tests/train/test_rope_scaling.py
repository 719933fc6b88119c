"""--rope_scaling: a run that continues a model at a longer context, and what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import minimind.train
from minimind.checkpoint.directory import published_checkpoints
from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.errors import UsageError
from minimind.inference.load_model import load_checkpoint
from minimind.interop.formats import FORMATS
from tests.conftest import sentences
from tests.faults import tiny
from tests.train.starts import read_initial, start_of, unbroken_text

LENGTH = tiny.SHAPE["max_position_embeddings"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
train: Any = minimind.train  # a module that is called


@pytest.fixture(scope="module")
def base(tiny_run: Path, tiny_tokenizer: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 32 positions, its tokenizer, and text."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(tiny_run, folder / "run")
    (folder / "tokenizer.model").write_bytes(tiny_tokenizer)
    lines = (json.dumps({"text": text}) for text in sentences(4, 120))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def flags(base: Path, out_dir: Path, **more: Any) -> dict[str, Any]:
    return {
        **{"data_path": str(base / "text.jsonl"), "init_from": str(base / "run")},
        **{"out_dir": str(out_dir), "cache_dir": str(base / "cache"), "max_steps": 3},
        **{"deepspeed_config": "none", "device": "cpu", "dtype": "float32", "eval_rows": 0},
        **{"batch_size": 2, "log_interval": 1, **more},
    }


def of(base: Path, *words: str) -> Any:
    """The run that these flags start from the model of 32 positions."""
    given = ["--init_from", str(base / "run"), "--out_dir", str(base / "none"), *words]
    return read_initial(parse_flags(given)).run


def test_one_command_continues_at_four_times_the_length(base, tmp_path, capsys):
    given = flags(base, tmp_path / "out", rope_scaling="yarn", rope_factor=4.0)
    assert train(given, stop_at_step=1) == 75
    first = start_of(capsys.readouterr().out)
    assert "rope yarn, 4 x 32 positions" in unbroken_text(first)
    assert f"rows of {4 * LENGTH + 1}" in unbroken_text(first)
    config = load_checkpoint(str(tmp_path / "out"))[0].config
    assert (config.rope_scaling, config.max_position_embeddings) == (YARN, 4 * LENGTH)
    refused = {"rope_scaling": "linear"}, {"rope_factor": 8.0}, {"rope_original_length": 16}
    for change in refused:
        (name,) = change
        with pytest.raises(UsageError, match=rf"^{name} = .*, but checkpoint .* has"):
            train({**given, **change})
    del given["rope_scaling"], given["rope_factor"]
    assert train(given) == 0  # the rest is of the checkpoint
    assert "rope yarn, 4 x 32 positions" in unbroken_text(start_of(capsys.readouterr().out))
    words = ["generate", "--checkpoint", tmp_path / "out", "--prompt", "a " * LENGTH]
    assert main([*map(str, words), "--max_new_tokens", "2"]) == 0
    assert len(published_checkpoints(tmp_path / "out" / "checkpoints")) == 2


def test_a_scaled_model_keeps_its_scaling_or_gets_another(base, tmp_path):
    train(flags(base, tmp_path / "out", rope_scaling="yarn", rope_factor=4.0, max_steps=1))
    given = ["--init_from", str(tmp_path / "out"), "--out_dir", str(tmp_path / "none")]
    kept = read_initial(parse_flags(given)).run
    assert (kept.rope_scaling, kept.rope_factor, kept.rope_original_length) == ("yarn", 4.0, 32)
    assert kept.max_seq_len == 128
    other = read_initial(parse_flags([*given, *"--rope_scaling ntk --rope_factor 8".split()])).run
    assert (other.rope_scaling, other.rope_factor, other.rope_original_length) == ("ntk", 8.0, 32)
    assert other.max_seq_len == 256


def test_factor_and_row_length_follow_from_one_another(base):
    run = of(base, "--rope_scaling", "linear", "--max_seq_len", "96")
    assert (run.rope_factor, run.rope_original_length, run.max_seq_len) == (3.0, LENGTH, 96)
    assert run.sources["rope_factor"] == "max_seq_len 96 / 32"
    words = "--rope_scaling linear --max_seq_len 67 --rope_factor 2.09"  # 67 / 32, rounded down
    assert of(base, *words.split()).max_seq_len == 67
    run = of(base, "--rope_scaling", "ntk", "--rope_factor", "2.5")
    assert (run.rope_factor, run.max_seq_len) == (2.5, 80)
    words = "--rope_scaling yarn --rope_factor 4 --max_seq_len 48 --rope_original_length 16"
    run = of(base, *words.split())
    assert (run.rope_factor, run.rope_original_length, run.max_seq_len) == (4.0, 16, 48)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--rope_scaling yarn", r"rows of 32 tokens \(--init_from .*\) without a length to reach"),
        ("--rope_scaling ntk --max_seq_len 32", "give --rope_factor, or a larger --max_seq_len"),
        (
            "--rope_scaling yarn --max_seq_len 65536",
            r"^max_seq_len = 65536 \(--max_seq_len\) is 2048 times the 32 .* at most 1024",
        ),
        ("--rope_scaling yarn --rope_factor 1", "above 1"),
        (
            "--rope_scaling yarn --rope_factor 2.5 --max_seq_len 81",
            r"^max_seq_len = 81 \(--max_seq_len\) is longer than the 80 positions of 2.5 x 32",
        ),
    ],
)
def test_flags_without_effect_and_incomplete_scaling_are_refused(words, sentence, base):
    with pytest.raises(UsageError, match=sentence):
        of(base, *words.split())


@pytest.mark.parametrize("model", [[], ["--model", "tiny"]])
def test_factor_and_row_length_follow_from_one_another_without_a_model(model, capsys):
    given = [*model, "--rope_scaling", "yarn", "--rope_original_length", "256"]
    for words in ("--rope_factor 4", "--max_seq_len 1024", "--rope_factor 4 --max_seq_len 1024"):
        run = read_initial(parse_flags([*given, *words.split()])).run
        assert (run.rope_factor, run.rope_original_length, run.max_seq_len) == (4.0, 256, 1024)
    words = "--rope_factor 4 --batch_size 1 --accumulation_steps 1 --max_steps 1"
    assert main(["plan", *given, *words.split(), "--tokens", "1e6"]) == 0
    assert "1,024 tokens" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"rows of 256 tokens .* without a length to reach"):
        parse_flags(given)


@pytest.mark.parametrize("is_directory", [False, True])
def test_weights_that_do_not_record_their_length_need_it_as_a_flag(is_directory, base, tmp_path):
    """--max_seq_len is the length to reach."""
    export = ["export", "--checkpoint", str(base / "run"), "--format", "llama"]
    assert main([*export, "--out", str(tmp_path / "llama")]) == 0
    place = tmp_path / "llama" / "model.safetensors"
    if is_directory:
        tensors = {
            FORMATS["minimind2"].from_ours(name): value for name, value in load_file(place).items()
        }
        place = tmp_path / "minimind2"
        place.mkdir()
        torch.save(tensors, place / "pytorch_model.bin")
        config = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}
        (place / "config.json").write_text(json.dumps(config))
    shape = "--n_heads 2 --rope_theta 1e6 --norm_eps 1e-5 --tokenizer"
    given = [*shape.split(), str(base / "tokenizer.model")]
    given += ["--init_from", str(place), "--out_dir", str(tmp_path / "none")]
    given += ["--rope_scaling", "yarn"]
    for words in ("--rope_factor 4 --max_seq_len 128", "--rope_factor 4", "--max_seq_len 128"):
        with pytest.raises(UsageError, match="--rope_original_length") as caught:
            read_initial(parse_flags([*given, *words.split()]))
        assert "--max_seq_len" not in str(caught.value)
        words += " --rope_original_length 32"
        run = read_initial(parse_flags([*given, *words.split()])).run
        assert (run.rope_factor, run.rope_original_length, run.max_seq_len) == (4.0, 32, 128)
