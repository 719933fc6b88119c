"""--init_from: a new run begins with the weights, the shape and the tokenizer of another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import minimind.train
from minimind.checkpoint.directory import published_checkpoints, read_manifest
from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.data.prepare.prepared import open_prepared
from minimind.data.rows.order import Order
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.errors import CheckpointError, UsageError
from minimind.interop.weights import load_weights_from
from minimind.train import pretrain as pretrain_module
from tests.conftest import ROOT, sentences
from tests.interop import minimind2
from tests.train.starts import read_initial, start_of, unbroken_text
from tools.runs import events

SHAPE = minimind2.Shape(norm_eps=1e-4)
WEIGHTS = minimind2.random_weights(SHAPE)
GIVEN = ["--n_heads", "4", "--rope_theta", "1e4", "--norm_eps", "1e-4"]
EMBEDDING = "model.embed_tokens.weight"
LENGTH, ROWS = 32, 4
train: Any = minimind.train  # a module that is called
PLACES = ("file.pth", "ours", "llama", "run", "run/checkpoints/step_00000001")


@pytest.fixture(scope="module")
def places(tiny_tokenizer: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as MiniMind2's file, ours, a Llama directory and a run; and text."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "tokenizer.model").write_bytes(tiny_tokenizer)
    torch.save(WEIGHTS, folder / "file.pth")
    lines = (json.dumps({"text": text}) for text in sentences(4, 60))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    given = ["--tokenizer", folder / "tokenizer.model"]
    words = ["prepare", folder / "text.jsonl", "--out", folder / "data", "--processes", 1, *given]
    assert main([*map(str, words)]) == 0
    words = ["import", "--from", "minimind2", folder / "file.pth", "--out", folder / "ours", *given]
    assert main([*map(str, [*words, *GIVEN, "--max_seq_len", LENGTH])]) == 0
    words = ["export", "--format", "llama", "--checkpoint", folder / "ours"]
    assert main([*map(str, words), "--out", str(folder / "llama")]) == 0
    run(folder, folder / "run", folder / "ours")
    return folder


def flags(folder: Path, out_dir: Path, init_from: Path | None, **more: Any) -> dict[str, Any]:
    """One step that leaves the weights where they are."""
    return {
        **{"data_path": [str(folder / "data")], "out_dir": str(out_dir), "max_steps": 1},
        **{"deepspeed_config": "none", "device": "cpu", "dtype": "float32", "eval_rows": 0},
        **{"batch_size": ROWS, "log_interval": 1, "learning_rate": 1e-30, "warmup_steps": 0},
        **({"init_from": str(init_from)} if init_from else {}),
        **more,
    }


def run(folder: Path, out_dir: Path, init_from: Path | None, **more: Any) -> list[dict[str, Any]]:
    """The events of a run in this process."""
    assert train(flags(folder, out_dir, init_from, **more)) == 0
    return events(out_dir)


def of_pth() -> dict[str, Any]:
    """What MiniMind2's file does not hold."""
    return {"n_heads": 4, "rope_theta": 1e4, "norm_eps": 1e-4, "max_seq_len": LENGTH}


def source_loss(folder: Path) -> float:
    """What the source model, by its own definition, makes of the rows of step 1."""
    shards = open_prepared(folder / "data").train
    order = Order(shards.rows(LENGTH + 1), ROWS, 42)
    rows = torch.from_numpy(shards.read_rows(order.rows_for(0, 0, 1), LENGTH + 1)).long()
    logits = minimind2.logits(SHAPE, WEIGHTS, rows[:, :-1])
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


@pytest.mark.parametrize("place", PLACES)
def test_the_loss_of_step_1_is_that_of_the_source(place, places, tmp_path, capsys):
    more = of_pth() if place.endswith(".pth") else {}
    started, _, step = run(places, tmp_path / "out", places / place, **more)[:3]
    assert abs(step["loss"] - source_loss(places)) <= 1e-5
    path = places / ("run/checkpoints/step_00000001" if place.startswith("run") else place)
    kind = {"file.pth": "minimind2", "ours": "minimind", "llama": "llama"}.get(place, "checkpoint")
    assert started["init_from"] == {"place": str(path), "kind": kind}
    assert (started["step"], started["resume_from"]) == (0, None)
    output = unbroken_text(start_of(capsys.readouterr().out))
    assert f"weights from {path} ({kind})" in output
    (saved,) = published_checkpoints(tmp_path / "out" / "checkpoints")
    assert read_manifest(saved)["init_from"] == started["init_from"]
    assert load_weights_from(saved).config.rms_norm_eps == 1e-4


def test_weights_are_in_the_model_before_an_engine_gets_it(places, tmp_path, monkeypatch):
    """DeepSpeed cuts the model up and copies it: what comes later it would not see."""
    seen = []

    class Enough(Exception):
        pass

    def look(resolved, model, device):
        seen.append(model.state_dict())
        raise Enough

    monkeypatch.setattr(pretrain_module, "build_engine", look)
    with pytest.raises(Enough):
        run(places, tmp_path / "out", places / "ours")
    wq = seen[0]["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(wq, WEIGHTS["layers.1.attention.wq.weight"])
    assert seen[0]["lm_head.weight"] is not None
    assert torch.equal(seen[0]["lm_head.weight"], WEIGHTS["output.weight"])


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_the_loss_of_step_1_under_deepspeed(stage, places, tmp_path):
    config = json.loads((ROOT / "configs" / "ds_config.json").read_text())
    config["zero_optimization"]["stage"] = stage
    (tmp_path / "ds.json").write_text(json.dumps(config))
    more = {"deepspeed_config": str(tmp_path / "ds.json")}
    given = flags(places, tmp_path / "out", places / "llama", **more)
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    flat = [str(w) for word in words for w in (word if isinstance(word, list) else [word])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_pretrain.py"), *flat],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (step,) = events(tmp_path / "out", "step")
    assert abs(step["loss"] - source_loss(places)) <= 1e-5


def test_a_resumed_run_ignores_it_and_needs_it_no_more(places, tmp_path, capsys):
    source = Path(shutil.copytree(places / "ours", tmp_path / "source"))
    out = tmp_path / "out"
    more = {"max_steps": 2, "learning_rate": 0.1}
    assert train(flags(places, out, source, stop_at_step=1, **more)) == 75
    shutil.rmtree(source)
    again = run(places, out, source, **more)
    started = [event for event in again if event["event"] == "run_start"]
    assert [event["init_from"]["place"] for event in started] == [str(source)] * 2
    assert started[1]["resume_from"]
    assert f"--init_from {source} is ignored" in " ".join(capsys.readouterr().out.split())
    straight = run(places, tmp_path / "straight", places / "ours", **more)
    losses = [[e["loss"] for e in events if e["event"] == "step"] for events in (again, straight)]
    assert losses[0] == losses[1]
    for path in published_checkpoints(out / "checkpoints"):
        assert read_manifest(path)["init_from"] == {"place": str(source), "kind": "minimind"}


PADDED = SHAPE.vocab_size + 64  # rows; the tokenizer has an id for each but the last 64


@pytest.fixture(scope="module")
def padded(places) -> Path:
    """The Llama directory with rows that have no id, as Qwen3 has them."""
    folder = Path(shutil.copytree(places / "llama", places / "padded"))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, 0.5 * embedding[:64]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "vocab_size": PADDED}))
    return folder


def test_rows_without_an_id_are_trained_on_and_stay(places, padded, tmp_path, capsys):
    """As in transformers: they are no target, and have a share of the softmax."""
    more = {"max_steps": 2, "learning_rate": 0.1, "cache_dir": str(tmp_path / "cache")}
    assert train(flags(places, tmp_path / "out", padded, stop_at_step=1, **more)) == 75
    start = unbroken_text(start_of(capsys.readouterr().out))
    assert f"vocabulary {PADDED} (64 of it unused)" in start
    wide = {**WEIGHTS, "output.weight": load_file(padded / "model.safetensors")[EMBEDDING]}
    shards = open_prepared(places / "data").train
    order = Order(shards.rows(LENGTH + 1), ROWS, 42)
    rows = torch.from_numpy(shards.read_rows(order.rows_for(0, 0, 1), LENGTH + 1)).long()
    logits = minimind2.logits(SHAPE, wide, rows[:, :-1])
    loss = float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
    _, _, step, *_ = events = run(places, tmp_path / "out", padded, **more)
    assert abs(step["loss"] - loss) <= 1e-5
    straight = run(places, tmp_path / "straight", padded, **more)
    steps = [[e["loss"] for e in run_ if e["event"] == "step"] for run_ in (events, straight)]
    assert steps[0] == steps[1]
    assert load_weights_from(tmp_path / "out").config.vocab_size == PADDED
    words = ["export", "--format", "llama", "--checkpoint", tmp_path / "out"]
    assert main([*map(str, words), "--out", str(tmp_path / "llama")]) == 0
    assert len(load_file(tmp_path / "llama" / "model.safetensors")[EMBEDDING]) == PADDED


def test_special_tokens_take_rows_that_have_no_id(places, padded, tmp_path):
    talk = [{"prompt": f"what is {n}?", "completion": f"it is {n}"} for n in range(200)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in talk))
    more = {"task": "sft", "data_path": str(tmp_path / "talk.jsonl"), "max_steps": 2}
    more |= {"max_seq_len": 32, "cache_dir": str(tmp_path / "cache"), "batch_size": 1}
    given = flags(places, tmp_path / "out", padded, **more)
    assert train(given, stop_at_step=1) == 75
    assert train(given) == 0
    config = load_weights_from(tmp_path / "out").config
    (saved, *_) = published_checkpoints(tmp_path / "out" / "checkpoints")
    ids = load_tokenizer(saved).vocab_size
    assert SHAPE.vocab_size < ids < config.vocab_size == PADDED


def test_a_tokenizer_with_fewer_ids_than_the_models_own_is_refused(places, padded, tmp_path):
    """That there are spare rows does not tell that it is the right one."""
    train_tokenizer(sentences(2, 50), 540, tmp_path / "other.model")
    more = {"data_path": [str(places / "text.jsonl")], "cache_dir": str(tmp_path / "cache")}
    more["tokenizer"] = str(tmp_path / "other.model")
    with pytest.raises(UsageError, match=r"vocab_size = 512 \(--init_from .* has 540"):
        run(places, tmp_path / "out", padded, **more)
    other = ["--tokenizer", str(tmp_path / "other.model"), "--out", str(tmp_path / "imported")]
    assert main(["import", "--from", "llama", str(padded), *other]) == 4


def test_mup_scales_no_weights_that_are_given(places, tmp_path):
    given = places / "ours"
    step = run(places, tmp_path / "given", given, mup_base_dim=SHAPE.dim // 4)[2]
    assert abs(step["loss"] - source_loss(places)) <= 1e-5
    words = ["--mup_base_dim", str(SHAPE.dim // 4), "--init_from", str(given)]
    read = read_initial(parse_flags(words))
    assert read.run.width_ratio == 4  # the rates are scaled


# --- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("--dim", "64"),
        ("--n_layers", "3"),
        ("--n_heads", "8"),
        ("--hidden_dim", "64"),
        ("--norm_eps", "1e-6"),
        ("--vocab_size", "600"),
        ("--qk_norm",),
        ("--model", "tiny"),
    ],
)
def test_a_flag_that_contradicts_the_shape_is_named_with_it(words, places, tmp_path):
    given = ["--init_from", str(places / "llama"), "--out_dir", str(tmp_path), *words]
    with pytest.raises(UsageError) as caught:
        read_initial(parse_flags(given))
    report = str(caught.value)
    assert f"--init_from {places / 'llama'}" in report
    assert words[0].removeprefix("--") in report


def test_the_length_of_a_row_is_free_and_that_of_the_source_where_none_is_stated(places, tmp_path):
    given = ["--init_from", str(places / "ours"), "--out_dir", str(tmp_path)]
    assert read_initial(parse_flags(given)).run.max_seq_len == LENGTH
    run = read_initial(parse_flags([*given, "--max_seq_len", "48", "--dim", "32"])).run
    assert (run.max_seq_len, run.dim, run.hidden_dim) == (48, 32, SHAPE.hidden_dim)
    assert run.tokenizer == str(places / "ours" / "tokenizer.model")
    assert run.sources["n_layers"] == f"--init_from {places / 'ours'}"


@pytest.mark.parametrize("name", ["n_heads", "rope_theta", "norm_eps"])
def test_values_missing_in_the_file_are_required_as_flags(name, places, tmp_path):
    text = {key: value for key, value in of_pth().items() if key != name}
    words = [word for key, value in text.items() for word in (f"--{key}", str(value))]
    given = ["--init_from", str(places / "file.pth"), "--out_dir", str(tmp_path), *words]
    with pytest.raises(UsageError, match=f"--{name}"):
        read_initial(parse_flags(given))


def test_the_length_of_a_row_is_not_ascribed_to_a_file_that_lacks_it(places, tmp_path):
    text = {key: value for key, value in of_pth().items() if key != "max_seq_len"}
    words = [word for key, value in text.items() for word in (f"--{key}", str(value))]
    given = ["--init_from", str(places / "file.pth"), "--out_dir", str(tmp_path), *words]
    run = read_initial(parse_flags([*given, "--data_path", str(places / "data")])).run
    assert (run.max_seq_len, run.sources["max_seq_len"]) == (512, "default")
    assert run.sources["n_layers"] == f"--init_from {places / 'file.pth'}"


def test_a_directory_of_minimind2_gives_its_length_and_leaves_it_free(places, tmp_path):
    folder = tmp_path / "MiniMind2"
    folder.mkdir()
    shutil.copy(places / "file.pth", folder / "pytorch_model.bin")
    shutil.copy(places / "tokenizer.model", folder / "tokenizer.model")
    config = {name: getattr(SHAPE, name) for name in minimind2.Shape.__dataclass_fields__}
    (folder / "config.json").write_text(json.dumps({**config, "max_seq_len": 8192}))
    given = ["--init_from", str(folder), "--out_dir", str(tmp_path)]
    run = read_initial(parse_flags(given)).run
    assert (run.max_seq_len, run.sources["max_seq_len"]) == (8192, f"--init_from {folder}")
    assert read_initial(parse_flags([*given, "--max_seq_len", "48"])).run.max_seq_len == 48


def test_another_rotary_base_is_taken_and_said_and_that_of_a_preset_is_not(places, tmp_path):
    """It binds no weight; but a preset's would change what they mean."""
    given = ["--init_from", str(places / "ours"), "--out_dir", str(tmp_path)]
    initial = read_initial(parse_flags([*given, "--rope_theta", "7"]))
    assert initial.run.rope_theta == 7
    assert initial.line().endswith("(minimind); rope_theta 7 in place of 10000")
    prepared: Any = SimpleNamespace(tokenizer=load_tokenizer(places / "ours"))
    assert initial.build(initial.run, prepared).config.rope_theta == 7
    assert read_initial(parse_flags(given)).run.rope_theta == SHAPE.rope_theta
    shape = "dim: 32\nn_layers: 2\nn_heads: 4\nn_kv_heads: 2\nvocab_size: 512\nrope_theta: 7.0\n"
    (tmp_path / "preset.yaml").write_text(shape)
    with pytest.raises(UsageError, match=r"rope_theta = 7\.0 \(model .*, but --init_from"):
        read_initial(parse_flags([*given, "--model", str(tmp_path / "preset.yaml")]))


def test_numbers_that_are_none_are_reported_by_the_name_that_the_file_has(places, tmp_path):
    wrong = {**WEIGHTS, "layers.1.attention.wq.weight": torch.full((32, 32), torch.nan)}
    torch.save(wrong, tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=r"file\.pth: layers\.1\.attention\.wq\.weight has"):
        run(places, tmp_path / "out", tmp_path / "file.pth", **of_pth())


def test_a_file_without_a_tokenizer_needs_one_or_prepared_text(places, tmp_path):
    words = [word for key, value in of_pth().items() for word in (f"--{key}", str(value))]
    given = ["--init_from", str(places / "file.pth"), "--out_dir", str(tmp_path), *words]
    with pytest.raises(UsageError, match="--tokenizer"):
        read_initial(parse_flags(given))
    assert read_initial(parse_flags([*given, "--data_path", str(places / "data")])).weights


def test_a_tokenizer_of_another_size_ends_the_start(places, tmp_path):
    train_tokenizer(sentences(2, 50), 600, tmp_path / "other.model")
    more = {"data_path": [str(places / "text.jsonl")], "cache_dir": str(tmp_path / "cache")}
    more["tokenizer"] = str(tmp_path / "other.model")
    with pytest.raises(UsageError, match=r"vocab_size = 512 \(--init_from .* has 600"):
        run(places, tmp_path / "out", places / "ours", **more)


def test_plan_reads_no_weights(capsys):
    assert main(["plan", "--init_from", "somewhere"]) == 2
    assert "--init_from" in capsys.readouterr().err
