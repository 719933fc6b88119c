"""Weights that something wrapped, a base model, an adapter, a quantized configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minimind.architecture.hf_models import foreign_config
from minimind.cli.main import main
from minimind.config.parse import config_file
from minimind.errors import CheckpointError, UsageError
from minimind.interop.tensor_sources import open_tensors, unwrapped
from minimind.interop.weights import load_transformers_weights, load_weights_from
from minimind.model.causal_lm import MiniMindForCausalLM
from tests.interop.hostile import good_folder
from tests.model.references import as_reference, build

HEADLESS = "has no 'lm_head.weight', which its config.json requires"
PREFIX = "model."
WRAPPED: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "both, the other way round": lambda name: f"_orig_mod.module.{name}",
    "a compiled part": lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod.", 1),
    "compiled layers": lambda name: name.replace(".self_attn.", "._orig_mod.self_attn."),
    "FSDP": lambda name: (
        f"_fsdp_wrapped_module.{name.replace('.mlp.', '._fsdp_wrapped_module.mlp.')}"
    ),
    "checkpoints": lambda name: name.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "a base model": lambda name: name.removeprefix(PREFIX),
    "a compiled base model": lambda name: f"_orig_mod.{name.removeprefix(PREFIX)}",
    "PEFT": lambda name: f"base_model.model.{name}",
    "Lightning": lambda name: f"model.{name}",
}
# Also read, by names alone.
IN_FRONT = (
    *("_forward_module.", "module.module.", "_fpw_module.", "model._orig_mod.", "_orig_mod.model."),
    *("pretrained_model.", "student.", "student_model.", "actor.", "policy.", "llm.", "net."),
    *("network.", "_model.", "model.module.", "module._orig_mod.base_model.model."),
    *("_forward_module.model._orig_mod.", "model.base_model.model.", "student.model.module."),
    *("pretrained_model.base_model.model.", "_fsdp_wrapped_module.base_model.model._orig_mod."),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good_folder(tmp_path / "folder")


def rename(folder: Path, as_named: Callable[[str], str]) -> dict[str, Tensor]:
    tensors = load_file(folder / "model.safetensors")
    renamed = {as_named(name): value for name, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    return renamed


@pytest.mark.sample(4)
@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "pickle"])
@pytest.mark.parametrize("how", WRAPPED)
def test_they_are_read_exactly(how: str, as_file: bool, folder: Path, tmp_path: Path):
    assert main(["import", "--from", "llama", str(folder), "--out", str(tmp_path / "right")]) == 0
    renamed = rename(folder, WRAPPED[how])
    if as_file:
        torch.save(renamed, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    assert main(["import", "--from", "llama", str(folder), "--out", str(tmp_path / "out")]) == 0
    right, found = (load_file(tmp_path / name / "model.safetensors") for name in ("right", "out"))
    assert {*right} == {*found}
    assert all(torch.equal(value, found[name]) for name, value in right.items())
    ids = torch.arange(20)[None]
    model = MiniMindForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        reference = as_reference(build(vocab_size=512))(ids).logits
        torch.testing.assert_close(model(ids).logits, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_head", [True, False], ids=["head", "tied"])
@pytest.mark.parametrize("prefix", ["", *IN_FRONT])
def test_prefixes_are_dropped_in_any_order(prefix: str, has_head: bool):
    names = [f"model.layers.0.{part}.weight" for part in ("self_attn.q_proj", "input_layernorm")]
    names += ["model.embed_tokens.weight", "model.norm.weight", *(["lm_head.weight"] * has_head)]
    assert unwrapped([f"{prefix}{name}" for name in names]) == names
    theirs = ["layers.0.attention.wq.weight", "tok_embeddings.weight", "norm.weight"]
    assert unwrapped([f"{prefix}{name}" for name in theirs]) == theirs


@pytest.mark.parametrize(
    "names",
    [
        ["transformer.h.0.ln_1.weight", "transformer.wte.weight", "lm_head.weight"],  # GPT-2
        ["model.decoder.layers.0.fc1.weight", "model.decoder.embed_tokens.weight"],  # OPT
        ["gpt_neox.layers.0.mlp.weight", "embed_out.weight"],
        ["backbone.layers.0.mixer.in_proj.weight", "backbone.embeddings.weight"],  # Mamba
        ["model.layers.0.mlp.gate_proj.weight", "model.embed_tokens.weight"],  # tied
        ["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight"],
    ],
)
def test_names_of_models_themselves_are_kept(names: list[str]):
    assert unwrapped(names) == names


READERS: dict[str, Callable[[Path], object]] = {
    "import": load_weights_from,
    "hf": lambda folder: load_transformers_weights(
        str(folder), foreign_config(json.loads((folder / "config.json").read_bytes()))
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda name: f"my_wrapper.inner.{name}",
            "without the prefix 'my_wrapper.inner.', which no wrapper known"
            " here writes; save the model inside, or rename its tensors",
        ),
        (
            lambda name: name.replace("q_proj.", "q_proj.base_layer."),
            "belongs to an adapter that is not merged; merge it into the model (merge_and_unload",
        ),
        (
            lambda name: name.replace("q_proj.weight", "q_proj.lora_A.default.weight"),
            "belongs to an adapter that is not merged; merge it into the model (merge_and_unload",
        ),
        (
            lambda name: name.replace("mlp.up_proj.weight", "_flat_param"),
            "is a shard of FSDP without names; save the model with StateDictType.FULL_STATE_DICT",
        ),
    ],
)
def test_what_names_tell_is_said(
    change: Callable[[str], str], told: str, reader: str, folder: Path
):
    rename(folder, change)
    with pytest.raises(CheckpointError) as caught:
        READERS[reader](folder)
    assert str(caught.value).startswith(f"{folder}: ")
    assert told in str(caught.value)


def test_names_that_would_be_one_are_kept(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    both = {**tensors, **{f"module.{name}": value.clone() for name, value in tensors.items()}}
    save_file(both, folder / "model.safetensors")
    assert {*open_tensors(folder).shapes} == {*both}


def test_a_base_model_without_the_head_that_it_needs(folder: Path):
    rename(folder, WRAPPED["a base model"])
    values = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=HEADLESS):
        load_weights_from(folder)


@pytest.mark.parametrize("reader", ["import", "chat", "export", "hf"])
@pytest.mark.parametrize("base", [None, "base-1B", 7])
def test_an_adapter_alone(reader: str, base: object, tmp_path: Path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    about = {} if base is None else {"base_model_name_or_path": base}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    save_file(
        {"base_model.model.x.lora_A.weight": torch.zeros(2)}, adapter / "adapter_model.safetensors"
    )
    out = ["--out", str(tmp_path / "out")]
    words = {
        "import": ["import", "--from", "llama", str(adapter), *out],
        "export": ["export", "--checkpoint", str(adapter), "--format", "llama", *out],
        "chat": ["chat", "--model", str(adapter), "--once", "hello"],
    }
    if reader == "hf":
        with pytest.raises(UsageError) as caught:
            config_file(str(adapter))
        report = str(caught.value)
    else:
        assert main(words[reader]) == CheckpointError.status
        report = capsys.readouterr().err
    named = "" if base is None else f" {base}"
    assert f"{adapter}: holds only a LoRA adapter (adapter_config.json, adapter_model" in report
    assert f"; merge it into its base model{named} (merge_and_unload of PEFT), and name" in report


def test_a_model_beside_an_adapter_is_read(folder: Path):
    (folder / "adapter_config.json").write_text("{}")
    assert load_weights_from(folder).kind == "llama"


@pytest.mark.parametrize("kind", ["llama", "minimind2"])
def test_a_quantized_configuration(kind: str, folder: Path, tmp_path: Path, capsys):
    values = json.loads((folder / "config.json").read_bytes())
    values["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(values))
    if kind == "minimind2":
        save_file({"tok_embeddings.weight": torch.zeros(512, 48)}, folder / "model.safetensors")
    assert main(["import", "--from", kind, str(folder), "--out", str(tmp_path / "out")]) == 4
    report = capsys.readouterr().err
    assert f"{folder}/config.json: has a quantization_config, and quantized weights are" in report


def test_a_configuration_that_is_not_quantized_after_all(folder: Path, tmp_path: Path):
    values = json.loads((folder / "config.json").read_bytes())
    for none in (None, {}):
        (folder / "config.json").write_text(json.dumps({**values, "quantization_config": none}))
        assert load_weights_from(folder).kind == "llama"
