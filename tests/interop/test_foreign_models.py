"""Models as people have them: read as transformers reads them, or refused by the field's name."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import minimind.train
from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import CheckpointError
from minimind.inference.engine import generate_texts
from minimind.inference.load_model import load_checkpoint, load_model
from minimind.inference.text import Sampling
from minimind.interop.foreign_config import ARCHITECTURES, FIXED, MISTRAL_WINDOW, NO_ROPE_INTERVAL
from minimind.interop.tensor_sources import open_tensors
from minimind.interop.weights import load_weights_from
from minimind.model.causal_lm import MiniMindForCausalLM
from tests.conftest import sentences
from tests.faults import tiny
from tests.train.starts import read_initial

IDS = 512
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
Values = dict[str, Any]
train: Any = minimind.train  # a module that is called


@dataclass(frozen=True)
class Form:
    """A config class, its configuration, and what its file has in place of what is saved today."""

    kind: str
    config: Values = field(default_factory=dict)
    file: Values = field(default_factory=dict)  # None takes a name away
    refused: str = ""  # words of the refusal

    def save(self, folder: Path, tokenizer: Path) -> None:
        config = AutoConfig.for_model(
            self.kind,
            **{
                **{"vocab_size": IDS, "hidden_size": 32, "intermediate_size": 48},
                **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
                **{"head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None},
                **self.config,
            },
        )
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
        model.save_pretrained(folder)
        change_config(folder, **self.file)
        shutil.copy(tokenizer, folder / "tokenizer.model")


def change_config(folder: Path, **change: Any) -> None:
    values = {**json.loads((folder / "config.json").read_bytes()), **change}
    kept = {name: value for name, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def base(theta: float, **scaling: Any) -> Values:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


LLAMA3: Values = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SMOLLM3: Values = {"pad_token_id": 3}  # the default is an id of its own vocabulary
OLD: Values = {"rope_parameters": None, "head_dim": None, "dtype": None, "torch_dtype": "float16"}
MINIMIND3: Values = {
    **OLD,
    **{"model_type": "minimind", "rope_theta": 1e6, "head_dim": 8, "flash_attn": True},
    **{"inference_rope_scaling": False, "use_moe": False, "num_experts": 4, "dropout": 0.0},
}
FORMS = {
    "Llama 1": Form("llama", {"num_key_value_heads": 4}, {**OLD, "pad_token_id": -1}),
    "Llama 2": Form("llama", {"rms_norm_eps": 1e-5}, {**OLD, "pretraining_tp": 1}),
    "Llama 2, dynamic": Form(
        "llama", {}, {**OLD, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    ),
    "Vicuna": Form(
        "llama",
        {"num_key_value_heads": 4},
        {**OLD, "rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 256},
    ),
    "Llama 3": Form("llama", base(5e5)),
    "Llama 3.1": Form("llama", base(5e5, **LLAMA3)),
    "Llama 3.1, of transformers 4": Form(
        "llama", {}, {**OLD, "rope_theta": 5e5, "rope_scaling": LLAMA3}
    ),
    "Llama 3.2": Form("llama", {**base(5e5, **LLAMA3), "tie_word_embeddings": True}),
    "TinyLlama": Form("llama", {}, {**OLD, "rope_theta": 1e4, "rope_scaling": None}),
    "SmolLM2": Form("llama", {**base(1e5), "tie_word_embeddings": True}),
    "padded rows": Form("llama", {"vocab_size": IDS + 64, "tie_word_embeddings": True}),
    "Mistral 0.1": Form("mistral", {"sliding_window": 32}, refused="has sliding_window = 32"),
    "Mistral 0.2": Form("mistral", {"sliding_window": None}, base(1e6)),
    "Mistral, a wide window": Form("mistral", {"sliding_window": 64}),
    "Qwen2": Form("qwen2", base(1e6)),
    "Qwen2.5": Form("qwen2", {**base(1e6), "tie_word_embeddings": True, "vocab_size": IDS + 64}),
    "Qwen2, of transformers 4": Form(
        "qwen2", {}, {**OLD, "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 32}
    ),
    "Qwen2, wide heads": Form("qwen2", {**base(1e6), "head_dim": 16}),
    "Qwen2, a window": Form(
        "qwen2", file={"use_sliding_window": True}, refused="use_sliding_window = True"
    ),
    "Llama with biases": Form("llama", {"attention_bias": True}, refused="attention_bias = True"),
    "Qwen3": Form("qwen3", {**base(1e6), "vocab_size": IDS + 128}),
    "Qwen3, tied": Form("qwen3", {**base(1e6), "tie_word_embeddings": True}),
    "Qwen3, wide heads": Form("qwen3", {**base(1e6), "head_dim": 16}),
    "Mistral, narrow heads": Form("mistral", {"sliding_window": None, "head_dim": 4}),
    "Qwen3, heads that do not divide": Form("qwen3", {**base(1e6), "hidden_size": 34}),
    "an odd head": Form("qwen3", file={"head_dim": 7}, refused="head_dim=7 "),
    "Qwen3 with biases": Form("qwen3", {"attention_bias": True}, refused="attention_bias = True"),
    "Qwen3, a window": Form(
        "qwen3", {"use_sliding_window": True}, refused="use_sliding_window = True"
    ),
    "SmolLM3": Form("smollm3", {**SMOLLM3, **base(2e6), "num_hidden_layers": 5}),
    "SmolLM3, every second": Form(
        "smollm3", {**SMOLLM3, "no_rope_layer_interval": 2, "head_dim": 12}
    ),
    "SmolLM3, none rotates": Form("smollm3", {**SMOLLM3, "no_rope_layers": [0, 0]}),
    "SmolLM3, all rotate": Form("smollm3", {**SMOLLM3, "no_rope_layers": [1, 1, 0]}),
    "SmolLM3, no base, no list": Form(
        *(
            "smollm3",
            {**SMOLLM3, "num_hidden_layers": 4},
            {"no_rope_layers": None, "rope_parameters": None},
        )
    ),
    "SmolLM3, irregular": Form(
        *("smollm3", {**SMOLLM3, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 0]}),
        refused="has no_rope_layers = [1, 0, 0], which MiniMind does not support",
    ),
    "SmolLM3, a short list": Form(
        *("smollm3", SMOLLM3, {"no_rope_layers": [1]}), refused="has no_rope_layers = [1], which"
    ),
    "SmolLM3, a list of words": Form(
        *("smollm3", SMOLLM3, {"no_rope_layers": "10"}), refused="has no_rope_layers = '10', which"
    ),
    "SmolLM3, no interval": Form(
        *("smollm3", SMOLLM3, {"no_rope_layers": None, "no_rope_layer_interval": "x"}),
        refused="has no_rope_layer_interval = 'x'",
    ),
    "SmolLM3 with biases": Form(
        "smollm3", {**SMOLLM3, "attention_bias": True}, refused="attention_bias"
    ),
    "MiniMind-3": Form("qwen3", {**base(1e6), "tie_word_embeddings": True}, MINIMIND3),
    "MiniMind of 2025": Form("llama", {**base(1e6), "tie_word_embeddings": True}, MINIMIND3),
    "MiniMind-3, scaled": Form(
        "qwen3",
        {**base(1e6), "tie_word_embeddings": True},
        {**MINIMIND3, "inference_rope_scaling": True},
        refused="inference_rope_scaling = True",
    ),
}

TRAINED = ("Qwen3, wide heads", "Qwen2", "SmolLM3")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(tiny.tokenizer_bytes(folder))
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Callable[[str], Path]:
    """The folder of a form, made once."""
    root = tmp_path_factory.mktemp("saved")

    def find(name: str) -> Path:
        if not (root / name).exists():
            FORMS[name].save(root / name, tokenizer)
        return root / name

    return find


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def run(*words: object) -> int:
    return main([*map(str, words)])


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.randint(IDS, (3, 64), generator=torch.Generator().manual_seed(1))
    return model.eval()(ids).logits


def ours(folder: Path, out: Path, kind: str = "llama") -> Tensor:
    assert run("import", "--from", kind, folder, "--out", out) == 0
    return logits(MiniMindForCausalLM.from_pretrained(out))


def as_transformers(folder: Path) -> Path:
    """A copy that transformers reads: its own model_type, and the base that it would lose."""
    copy = copied(folder, folder.with_name(f"{folder.name} of transformers"))
    values = json.loads((folder / "config.json").read_bytes())
    if values.get("model_type") == "minimind":  # is a Llama or a Qwen3 by its tensors
        normed = any("q_norm" in name for name in open_tensors(folder).shapes)
        change_config(copy, model_type="qwen3" if normed else "llama")
    scaling, parameters = values.get("rope_scaling"), values.get("rope_parameters")
    if scaling and parameters and "rope_theta" not in values:
        change_config(copy, rope_theta=parameters["rope_theta"])
    return copy


def theirs(folder: Path) -> Tensor | None:
    """What transformers reads; None if it makes up a tensor, or ignores one."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    wrong = (report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return None if any(wrong) else logits(model)


def require_equal(found: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * max(1, float(expected.abs().max()))


# --- config classes -----------------------------------------------------------------------------


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_transformers_or_the_field_is_named(name, saved, tmp_path, capsys):
    form, folder = FORMS[name], copied(saved(name), tmp_path / "model")
    if form.refused:
        assert run("import", "--from", "llama", folder, "--out", tmp_path / "out") == 4
        report = capsys.readouterr().err
        assert f"{folder / 'config.json'}: " in report
        assert form.refused in report
        return
    found = ours(folder, tmp_path / "out")
    require_equal(found, theirs(as_transformers(folder)))
    assert run("import", "--from", "minimind3", folder, "--out", tmp_path / "again") == 0
    written = [(tmp_path / out / WEIGHTS).read_bytes() for out in ("out", "again")]
    assert written[0] == written[1]
    words = ("export", "--checkpoint", tmp_path / "out", "--format", "llama", "--out")
    assert run(*words, tmp_path / "back") == 0
    require_equal(found, theirs(tmp_path / "back"))
    before, after = open_tensors(folder), open_tensors(tmp_path / "back")
    assert after.shapes == before.shapes
    assert all(torch.equal(after.read(name), before.read(name)) for name in before.shapes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TRAINED)
def test_a_run_from_it_resumes_bit_for_bit_generates_and_is_exported(name, saved, tmp_path):
    lines = (json.dumps({"text": text}) for text in sentences(4, 60))
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    flags: Values = {
        **{"data_path": [str(tmp_path / "text.jsonl")], "cache_dir": str(tmp_path / "cache")},
        **{"init_from": str(saved(name)), "deepspeed_config": "none", "device": "cpu"},
        **{"dtype": "float32", "max_steps": 4, "batch_size": 2, "eval_rows": 0},
        **{"learning_rate": 1e-2, "warmup_steps": 0, "optimizer": "muon"},
    }
    whole, resumed = (str(tmp_path / place) for place in ("whole", "resumed"))
    assert train(flags, out_dir=whole) == 0
    assert train(flags, out_dir=resumed, stop_at_step=2) == 75
    assert train(flags, out_dir=resumed) == 0
    model, again = (load_checkpoint(place)[0] for place in (whole, resumed))
    before = load_model(None, str(saved(name)))[0].state_dict()
    for tensor, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[tensor]), tensor
        assert not torch.equal(value, before[tensor]), tensor
    prompts = torch.randint(IDS, (2, 5))
    options: Values = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    one, other = (model.generate(prompts, use_cache=u, **options) for u in (True, False))
    assert torch.equal(one, other)
    words = ("export", "--checkpoint", whole, "--format", "llama", "--out", tmp_path / "back")
    assert run(*words) == 0
    require_equal(logits(model), theirs(tmp_path / "back"))


def test_what_a_file_leaves_open_is_said_once(saved, tmp_path, capsys):
    folder = saved("Llama 2, dynamic")
    capsys.readouterr()  # the first to save it shows a bar
    assert run("import", "--from", "llama", folder, "--out", tmp_path / "out") == 0
    note = "rope_theta 10000, the default of transformers; without the dynamic scaling, which"
    assert capsys.readouterr().err.startswith(f"{folder}: {note} begins beyond 64 positions\n")
    flags = ("--rope_theta", 500, "--out", tmp_path / "flag")
    assert run("import", "--from", "llama", folder, *flags) == 0
    assert json.loads((tmp_path / "flag" / "config.json").read_bytes())["rope_theta"] == 500
    assert "rope_theta" not in capsys.readouterr().err
    load_model(None, str(folder))
    assert capsys.readouterr().err.startswith(f"{folder}: {note} begins")
    initial = read_initial(tiny_flags(folder, tmp_path))
    assert f"{folder} (llama); rope_theta 10000, the default" in initial.line()
    bare = copied(saved("MiniMind-3"), tmp_path / "bare")
    change_config(bare, rope_theta=None)
    assert run("import", "--from", "minimind3", bare, "--out", tmp_path / "bad") == 4
    assert "config.json: has no rope_theta (give it as --rope_theta)" in capsys.readouterr().err
    words = ("--rope_theta", 1e6, "--out", tmp_path / "good")
    assert run("import", "--from", "minimind3", bare, *words) == 0


def test_the_base_beside_an_overriding_scaling_is_kept(saved, tmp_path):
    """transformers 5.23 takes 10000 here."""
    plain, mixed = (copied(saved("Llama 3"), tmp_path / name) for name in ("plain", "mixed"))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    change_config(mixed, rope_scaling=yarn)
    change_config(plain, rope_parameters={**yarn, "rope_theta": 5e5})
    require_equal(ours(mixed, tmp_path / "out"), theirs(plain))


def tiny_flags(folder: Path, tmp_path: Path, *more: str) -> Any:
    given = ["--init_from", str(folder), "--out_dir", str(tmp_path / "none"), *more]
    return parse_flags(given)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            *("Qwen3, tied", {"rope_parameters": {**LLAMA3, "rope_theta": 1e6}}),
            "llama3 rotations of qwen3",
        ),
        ("Qwen2", {"rope_parameters": {**LLAMA3, "rope_theta": 1e6}}, "llama3 rotations of qwen2"),
        ("Qwen2, wide heads", {}, "head_dim of qwen2"),
        ("SmolLM3, every second", {}, "no_rope_interval but 4 of smollm3"),
    ],
)
def test_what_gguf_does_not_have_is_refused(name, change, words, saved, tmp_path, capsys):
    pytest.importorskip("gguf")
    folder = copied(saved(name), tmp_path / "model")
    change_config(folder, **change)
    require_equal(ours(folder, tmp_path / "out"), theirs(folder))
    flags = ("export", "--checkpoint", tmp_path / "out", "--format", "gguf")
    assert run(*flags, "--out", tmp_path / "gguf") == 2
    assert f"--format gguf has no {words}; export" in capsys.readouterr().err


def test_the_gguf_of_smollm3_has_our_tensors(saved, tmp_path):
    gguf = pytest.importorskip("gguf")
    ours(saved("SmolLM3"), tmp_path / "out")
    words = ("export", "--checkpoint", tmp_path / "out", "--out", tmp_path / "gguf")
    assert run(*words, "--format", "gguf") == 0
    found = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf")
    assert found.fields["general.architecture"].contents() == "smollm3"
    assert found.fields["smollm3.rope.freq_base"].contents() == 2e6
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in found.tensors}
    kept = load_file(tmp_path / "out" / WEIGHTS)
    for layer in range(5):  # adjacent channels are pairs, also where nothing rotates
        expected = kept[f"model.layers.{layer}.self_attn.k_proj.weight"]
        assert torch.equal(tensors[f"blk.{layer}.attn_k.weight"], expected)


def test_a_file_alone_shows_biases_and_the_width_of_its_heads(saved, tmp_path):
    folder = saved("Qwen2, wide heads")
    words: tuple[Any, ...] = ("--n_heads", 4, "--rope_theta", 1e6, "--norm_eps", 1e-6)
    words += ("--max_seq_len", 64, "--tokenizer", folder / "tokenizer.model")
    assert (
        run("import", "--from", "llama", folder / WEIGHTS, "--out", tmp_path / "out", *words) == 0
    )
    found = logits(MiniMindForCausalLM.from_pretrained(tmp_path / "out"))
    require_equal(found, theirs(folder))


# --- files --------------------------------------------------------------------------------------


def inv_freq(folder: Path) -> None:
    tables = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.rand(4) for n in range(2)}
    save_file({**load_file(folder / WEIGHTS), **tables}, folder / WEIGHTS, {"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / PICKLED)
    (folder / WEIGHTS).unlink()


def of_a_trainer(folder: Path) -> None:
    pickled(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": 1}, folder / name)
    (folder / "trainer_state.json").write_text("{}")


def in_two(whole: str, index: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        stem, _, suffix = whole.rpartition(".")
        names = sorted(tensors)
        parts = {f"{stem}-0000{n + 1}-of-00002.{suffix}": names[n::2] for n in range(2)}
        for file, own in parts.items():
            held = {name: tensors[name] for name in own}
            if suffix == "bin":
                torch.save(held, folder / file)
            else:
                save_file(held, folder / file, {"format": "pt"})
        listed = {name: file for file, own in parts.items() for name in own}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
        (folder / WEIGHTS).unlink()

    return change


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "whole": lambda folder: None,
    "with inv_freq": inv_freq,
    "pickled": pickled,
    "of a Trainer": of_a_trainer,
    "in two": in_two(WEIGHTS, INDEX),
    "pickled in two": in_two(PICKLED, PICKLED_INDEX),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_any_age_are_read(layout, saved, tmp_path):
    folder = copied(saved("TinyLlama"), tmp_path / "model")
    expected = theirs(folder)
    LAYOUTS[layout](folder)
    found = ours(folder, tmp_path / "out")
    require_equal(found, expected)
    require_equal(found, theirs(folder))


def test_an_index_beside_another_model_is_refused(saved, tmp_path, capsys):
    folder = copied(saved("TinyLlama"), tmp_path / "model")
    in_two(WEIGHTS, INDEX)(folder)
    shutil.copy(saved("TinyLlama") / WEIGHTS, folder)
    assert run("import", "--from", "llama", folder, "--out", tmp_path / "out") == 4
    words = f"{folder / INDEX}: stands beside {WEIGHTS}, which it does not list; "
    assert words in capsys.readouterr().err


# --- tokenizers and rows ------------------------------------------------------------------------


def with_both(folder: Path, rows: int) -> None:
    """tokenizer.model of 512 ids and tokenizer.json of 514."""
    names = ("<|im_start|>", "<|im_end|>")
    after = with_special_tokens(load_tokenizer(folder), names, folder / "x")
    after.save(folder / "x")
    for file in (folder / "x").iterdir():
        if file.name != "tokenizer.model":
            shutil.copy(file, folder / file.name)
    shutil.rmtree(folder / "x")
    assert (folder / "tokenizer.json").exists()
    assert load_tokenizer(folder / "tokenizer.model").vocab_size == IDS
    tensors = load_file(folder / WEIGHTS)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kept = tensors[name]
        tensors[name] = torch.cat([kept, kept[: rows - IDS] + 1]) if rows > IDS else kept
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    change_config(folder, vocab_size=rows)


@pytest.mark.parametrize(
    ("rows", "ids"), [(IDS + 2, IDS + 2), (IDS, IDS), (IDS + 1, IDS), (IDS + 9, IDS + 2)]
)
def test_of_two_tokenizers_the_one_that_fits_is_taken(rows, ids, saved, tmp_path):
    folder = copied(saved("TinyLlama"), tmp_path / "model")
    with_both(folder, rows)
    require_equal(ours(folder, tmp_path / "out"), theirs(folder))
    assert load_tokenizer(tmp_path / "out").vocab_size == ids
    run_ = read_initial(tiny_flags(folder, tmp_path)).run
    assert run_.vocab_size == ids
    assert load_tokenizer(str(run_.tokenizer)).vocab_size == ids
    if rows >= IDS + 2:  # also where the rows are not known
        assert load_tokenizer(folder).vocab_size == ids


def test_a_tokenizer_that_does_not_fit_is_refused_with_the_name_of_the_other(
    saved, tmp_path, capsys
):
    folder = copied(saved("TinyLlama"), tmp_path / "model")
    with_both(folder, IDS)
    words = ("import", "--from", "llama", folder, "--out", tmp_path / "out", "--tokenizer")
    assert run(*words, folder / "tokenizer.json") == 4
    report = capsys.readouterr().err
    assert f"{folder}/tokenizer.json: has 514 pieces and the embedding 512 rows; " in report
    assert "(tokenizer.model is beside it)" in report


@pytest.mark.parametrize("has_other", [True, False])
def test_a_vocabulary_of_tiktoken_is_named_and_passed_over(has_other, saved, tmp_path, capsys):
    folder = copied(saved("TinyLlama"), tmp_path / "model")
    with_both(folder, IDS + 2)
    (folder / "tokenizer.model").write_text("IQ== 0\nIg== 1\nIw== 2\n")
    if has_other:
        ours(folder, tmp_path / "out")
        assert load_tokenizer(tmp_path / "out").vocab_size == IDS + 2
        return
    (folder / "tokenizer.json").unlink()
    assert run("import", "--from", "llama", folder, "--out", tmp_path / "out") == 4
    report = capsys.readouterr().err
    assert f"{folder}/tokenizer.model: is a vocabulary of tiktoken (write it as a token" in report


def test_rows_without_an_id_are_kept_and_never_generated(saved, tmp_path, capsys):
    folder = copied(saved("padded rows"), tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    tensors["model.embed_tokens.weight"][IDS:] *= 100  # far more probable than any other
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    found = ours(folder, tmp_path / "out")
    assert "64 of 576 rows of the embedding have no id" in capsys.readouterr().err
    assert (found.argmax(-1) >= IDS).all()
    model, own, _ = load_model(None, str(tmp_path / "out"))
    sampling = Sampling(max_new_tokens=20, temperature=1.0)
    assert generate_texts(model, own, ["a"], sampling).tokens  # an id beyond has no piece
    words = ("export", "--checkpoint", tmp_path / "out", "--out", tmp_path / "gguf")
    gguf = pytest.importorskip("gguf")
    assert run(*words, "--format", "gguf") == 0
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    assert len(fields["tokenizer.ggml.tokens"].contents()) == IDS + 64
    assert fields["llama.vocab_size"].contents() == IDS + 64


# --- adapters -----------------------------------------------------------------------------------


def adapter(base: Path, folder: Path) -> Path:
    """A LoRA adapter of all matrices, as PEFT saves it."""
    peft = pytest.importorskip("peft", reason="needs the extra: pip install -e '.[examples]'")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")  # peft asks it
@pytest.mark.parametrize("name", ["Llama 2", "Mistral 0.2", "Qwen3"])
def test_an_adapter_is_merged_into_its_base(name, saved, tmp_path):
    base = saved(name)
    folder = adapter(base, tmp_path / "adapter")
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits(peft.PeftModel.from_pretrained(model, folder).merge_and_unload())
    before = theirs(base)
    assert before is not None
    assert (expected - before).abs().max() > 0.1
    require_equal(ours(folder, tmp_path / "out"), expected)
    initial = read_initial(tiny_flags(folder, tmp_path))
    assert initial.weights
    assert (initial.weights.path, initial.run.dim) == (folder, 32)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")  # peft asks it
def test_tensors_that_the_adapter_does_not_describe_are_refused(saved, tmp_path, capsys):
    folder = adapter(saved("Llama 2"), tmp_path / "adapter")
    held = load_file(folder / "adapter_model.safetensors")
    name = next(iter(held))
    for change in ({f"{name}x": torch.zeros(3)}, {name: None}, {name: torch.zeros(2, 2)}):
        kept = {key: value for key, value in {**held, **change}.items() if value is not None}
        save_file(kept, folder / "adapter_model.safetensors")
        assert run("import", "--from", "llama", folder, "--out", tmp_path / "out") == 4
        assert f"{folder}: is not an adapter of {saved('Llama 2')} (" in capsys.readouterr().err


def test_without_peft_it_is_named(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    folder = tmp_path / "adapter"
    folder.mkdir()
    base = saved("Llama 2")
    about = {"base_model_name_or_path": str(base), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file({"x": torch.zeros(2)}, folder / "adapter_model.safetensors")
    assert run("import", "--from", "llama", folder, "--out", tmp_path / "out") == 2
    words = f"{folder}: holds a LoRA adapter of {base}, which the package peft merges; "
    error = capsys.readouterr().err
    assert words in error
    assert error.rstrip().endswith("-m pip install peft")


# --- keys that are left out ---------------------------------------------------------------------

# The class of Mistral has 8 heads of keys and values where the file has none.
HEADS: Values = {"num_attention_heads": 16, "num_key_value_heads": 8}
NOT_READ = {
    *("architectures", "transformers_version", "dtype", "torch_dtype", "initializer_range"),
    *("use_cache", "attention_dropout", "pretraining_tp", "max_window_layers", "flash_attn"),
    *("num_experts", "dropout"),
}
WINDOWS = ("sliding_window", "layer_types", "rope_scaling", "quantization_config")
THEIR_ERRORS = (
    *(OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    StrictDataclassError,
)
# As transformers writes them, with values other than the defaults of the class where it may be.
KEYS = {
    "llama": Form("llama", base(5e5)),
    "llama, tied": Form("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": Form("mistral", {**HEADS, "sliding_window": None}),
    "mistral, tied": Form("mistral", {"tie_word_embeddings": True, "head_dim": 4}),
    "qwen2": Form("qwen2", base(1e6)),
    "qwen3": Form("qwen3", base(1e6)),
    "qwen3, as its class": Form("qwen3", {"head_dim": 128}),
    "smollm3": Form("smollm3", {**SMOLLM3, "no_rope_layer_interval": 2, **base(5e5)}),
    "smollm3, untied": Form("smollm3", {**SMOLLM3, "tie_word_embeddings": False}),
    "minimind": Form("qwen3", {**base(1e6), "tie_word_embeddings": True}, MINIMIND3),
}


def test_defaults_are_those_of_the_classes():
    for kind, (_, theta, is_tied) in ARCHITECTURES.items():
        if kind == "minimind":
            continue
        config = CONFIG_MAPPING[kind]()
        assert config.rope_parameters["rope_theta"] == theta
        assert config.tie_word_embeddings == is_tied
        for name, value in FIXED.items():
            assert getattr(config, name, value) == value
    assert CONFIG_MAPPING["mistral"]().sliding_window == MISTRAL_WINDOW
    assert CONFIG_MAPPING["smollm3"]().no_rope_layer_interval == NO_ROPE_INTERVAL


@pytest.mark.parametrize(
    ("name", "key"), [("mistral", "num_key_value_heads"), ("smollm3", "tie_word_embeddings")]
)
def test_the_default_of_a_class_is_taken(name, key, tokenizer, tmp_path):
    KEYS[name].save(tmp_path / "model", tokenizer)
    change_config(tmp_path / "model", **{key: None})
    require_equal(ours(tmp_path / "model", tmp_path / "out"), theirs(tmp_path / "model"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
@pytest.mark.parametrize("name", KEYS)
def test_a_key_left_out_is_as_in_transformers_or_it_is_named(name, absent, tokenizer, tmp_path):
    folder = tmp_path / "model"
    KEYS[name].save(folder, tokenizer)
    whole = json.loads((folder / "config.json").read_bytes())
    right = theirs(as_transformers(folder))
    for key in sorted({*whole, *WINDOWS} - NOT_READ):
        values = {**whole, key: None}
        if absent:
            del values[key]
        (folder / "config.json").write_text(json.dumps(values))
        shutil.rmtree(tmp_path / "model of transformers", ignore_errors=True)
        try:
            expected = theirs(as_transformers(folder))
        except THEIR_ERRORS:
            expected = None
        report, weights = "", None
        try:
            weights = load_weights_from(folder)
        except CheckpointError as error:
            report = str(error)
        if weights is None:
            assert report.startswith(f"{folder}"), report
            assert key in report or (expected is None and "config.json requires" in report), report
            continue
        model = MiniMindForCausalLM(weights.config)
        weights.fill(model)
        # What transformers does not read has to be the model as it was.
        require_equal(logits(model), right if expected is None else expected)


# --- mutations ----------------------------------------------------------------------------------

BASES = (
    "Llama 1",
    "Llama 3.1",
    "Mistral 0.2",
    "Qwen3",
    "SmolLM2",
    "MiniMind-3",
    "Qwen3, wide heads",
    "Qwen2",
    "SmolLM3",
    "SmolLM3, every second",
)
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen2", "mistral", "llama", "qwen3", "smollm3", "gemma", 3),
    "hidden_act": ("gelu", "relu", 1),
    "num_key_value_heads": (1, 2, 4, "2"),
    "num_attention_heads": (2, 8, 5),
    "head_dim": (4, 8, 16, 7.5),
    "rms_norm_eps": (1e-3, 0, "1e-5"),
    "rope_theta": (500, 1e6, -1, "x"),
    "rope_scaling": (
        {"type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16},
        {"rope_type": "longrope", "factor": 2.0},
        LLAMA3,
        {**LLAMA3, "low_freq_factor": 2.0},
        {"rope_type": "linear"},
        [1],
    ),
    "partial_rotary_factor": (0.5, 1.0),
    "tie_word_embeddings": (True, False, "no"),
    "vocab_size": (IDS - 1, IDS, IDS + 1, "512"),
    "sliding_window": (8, 64, 4096),
    "use_sliding_window": (True, False),
    "layer_types": (["sliding_attention", "full_attention"], ["full_attention"] * 2),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "quantization_config": ({"quant_method": "fp8"}, {}),
    "max_position_embeddings": (64, 128, 0),
    "num_hidden_layers": (1, 2, 3),
    "hidden_size": (16, 32, 64),
    "intermediate_size": (48, 64),
    "no_rope_layers": ([1, 0], [0, 0], [0, 1], [1, 1, 1, 0, 1], [1], [1, 2], "x", 7),
    "no_rope_layer_interval": (1, 2, 4, 9, 0, "2"),
    "unknown_field": (1, "x", None),
}


def mutate_tensors(folder: Path, draw: random.Random) -> tuple[str, ...]:
    tensors = load_file(folder / WEIGHTS)
    name = draw.choice(sorted(tensors))
    value = tensors[name]
    extra = ("'x'", "lm_head.bias", "model.layers.2.mlp.up_proj.weight", f"{name}_scale_inv")
    what = draw.choice(("missing", "extra", "shape", "dtype", "values", "name"))
    if what == "missing":
        del tensors[name]
    elif what == "extra":
        tensors[draw.choice(extra)] = torch.zeros(3)
    elif what == "shape":
        tensors[name] = draw.choice((value[1:].clone(), value[None], torch.cat([value, value])))
    elif what == "dtype":
        kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
        tensors[name] = value.to(draw.choice((*kinds, torch.float8_e4m3fn)))
    elif what == "values":
        tensors[name] = value * draw.choice((2.0, torch.inf, torch.nan))
    else:
        other = draw.choice((f"module.{name}", name.upper(), name.replace("model.", "", 1)))
        tensors[other] = tensors.pop(name)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return (
        name.lower().removeprefix("model."),
        *(added.lower() for added in extra),
        "num_hidden_layers",
    )


def mutate_config(folder: Path, draw: random.Random) -> tuple[str, ...]:
    values = json.loads((folder / "config.json").read_bytes())
    name = draw.choice(sorted({*values, *OTHER_VALUES}))
    if name not in OTHER_VALUES or (name in values and draw.random() < 0.4):
        values.pop(name)
    else:
        values[name] = draw.choice(OTHER_VALUES[name])
    (folder / "config.json").write_text(json.dumps(values))
    return name, "config.json requires", "head_dim", "rotations", "rope_type"


def mutate_index(folder: Path, draw: random.Random) -> tuple[str, ...]:
    (path,) = folder.glob("*.index.json")
    index = json.loads(path.read_bytes())
    listed = index["weight_map"]
    name = draw.choice(sorted(listed))
    what = draw.choice(("gone", "elsewhere", "swapped", "no map", "a folder up", "short"))
    if what == "gone":
        del listed[name]
    elif what == "short":
        index["weight_map"] = {name: listed[name]}
    elif what == "no map":
        del index["weight_map"]
    else:
        other = next(file for file in {*listed.values()} if file != listed[name])
        names = {"elsewhere": "none.bin", "swapped": other, "a folder up": f"../{listed[name]}"}
        listed[name] = names[what]
    path.write_text(json.dumps(index))
    return path.name, "none.bin", "has no 'model.", "has no 'lm_head."


def mutate_file(folder: Path, draw: random.Random) -> tuple[str, ...]:
    path = draw.choice(sorted(p for p in folder.iterdir() if not p.name.startswith(("gen", "tok"))))
    content = bytearray(path.read_bytes())
    what = draw.choice(("cut", "flipped", "gone", "longer"))
    named = path.name, "nor an index of either", "config.json", "cannot be read"
    if what == "gone":
        path.unlink()
        return named
    if what == "cut":
        del content[draw.randrange(len(content)) :]
    elif what == "longer":
        content += b"\0" * 9
    else:
        content[draw.randrange(min(2000, len(content)))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return named


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(200))
def test_a_changed_folder_is_read_as_transformers_reads_it_or_refused(
    seed, saved, tmp_path, capsys
):
    draw = random.Random(seed)
    whole, folder = saved(draw.choice(BASES)), tmp_path / "model"
    copied(whole, folder)
    right = theirs(as_transformers(copied(whole, tmp_path / "whole")))
    mutate = draw.choice((mutate_tensors, mutate_config, mutate_config, mutate_index, mutate_file))
    layout = draw.choice(("whole", "pickled", "in two", "pickled in two"))
    layout = draw.choice(("in two", "pickled in two")) if mutate is mutate_index else layout
    if mutate is mutate_tensors:
        named = mutate(folder, draw)
        if not {torch.float8_e4m3fn} & {t.dtype for t in load_file(folder / WEIGHTS).values()}:
            LAYOUTS[layout](folder)
    else:
        LAYOUTS[layout](folder)
        named = mutate(folder, draw)
    capsys.readouterr()
    status = run("import", "--from", "llama", folder, "--out", tmp_path / "out")
    report = [line for line in capsys.readouterr().err.splitlines() if "error[" in line]
    if status:
        assert status in (2, 4)
        assert len(report) == 1
        assert f"{folder}" in report[0]
        assert "; " in report[0]
        assert any(word in report[0].lower() for word in named), report[0]
        return
    found = logits(MiniMindForCausalLM.from_pretrained(tmp_path / "out"))
    copy = as_transformers(folder)
    try:
        expected = theirs(copy)
    except THEIR_ERRORS:  # then it has to be the model as it was
        expected = None
    require_equal(found, right if expected is None else expected)
