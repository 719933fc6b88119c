"""--task sft on models of transformers: in our decoder where it fits, else in their own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import minimind.train as training
from minimind.architecture.hf_models import model_of, require_separate_documents
from minimind.cli.main import main as minimind
from minimind.config.parse import parse_flags
from minimind.errors import CheckpointError, UsageError
from minimind.train.initial_weights import fine_tuned
from tests.conftest import sentences
from tests.train.starts import read_initial
from tests.train.test_fine_tuning import (
    conversations,
    evaluated,
    events,
    held_out,
    loss_by_hand,
    losses,
    write,
)

train: Any = training  # a package that is called like a function
END = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WIDE: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "mistral": {**WIDE, "sliding_window": None},
    "qwen3": {**WIDE, "head_dim": 8},
    "qwen2": WIDE,
    "gpt2": {**GPT2, "bos_token_id": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {**WIDE, "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 1},
}
RUN: dict[str, Any] = {
    **{"task": "sft", "batch_size": 4, "device": "cpu", "dtype": "float32", "log_interval": 1},
    **{"save_minutes": 0, "deepspeed_config": "none", "max_steps": 4, "val_fraction": 0.1},
    **{"eval_interval": 4, "eval_rows": 64, "learning_rate": 1e-3},
}


def save_tokenizer(folder: Path, template: str | None) -> int:
    """Save a byte-level tokenizer with the tokens of ChatML if it has a template."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, *(["<|im_start|>", "<|im_end|>"] if template else [])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sentences(3, 100), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    if template:
        fast.add_special_tokens({"additional_special_tokens": special[1:]})
        fast.chat_template = template
    fast.save_pretrained(folder)
    return len(fast)


def folder_of(place: Path, kind: str, template: str | None = CHATML, spare: int = 0) -> Path:
    """A directory with a random model, and a tokenizer that leaves `spare` rows unused."""
    rows = save_tokenizer(place, template) + spare
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, vocab_size=rows, **CONFIGS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


def talk(place: Path) -> Path:
    return write(place / "talk.jsonl", conversations(80))


# --- in our decoder -----------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_a_directory_of_transformers_is_fine_tuned_in_our_decoder(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    place = folder_of(tmp_path / kind, kind)
    lines = held_out(talk(tmp_path), 0.1)
    (tmp_path / "held.jsonl").write_bytes(b"\n".join(lines))
    cache = ("--data_path", tmp_path / "held.jsonl", "--cache_dir", tmp_path / "cache")
    found = evaluated(capsys, "--model", place, *cache)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), tokenizer_of(place)
    loss, count = loss_by_hand(model, tokenizer, lines)
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["targets"] == count
    more = {"init_from": f"hf:{place}", "data_path": str(tmp_path / "talk.jsonl")}
    run = tmp_path / "run"
    assert train({**RUN, **more, "cache_dir": str(tmp_path / "cache")}, out_dir=str(run)) == 0
    (start,) = events(run, "run_start")
    assert start["init_from"] == {"place": str(place), "kind": "llama"}
    after = evaluated(capsys, "--checkpoint", run, *cache)
    assert after["loss"] == pytest.approx(events(run, "eval")[-1]["val_loss"], rel=1e-6)
    assert after["loss"] < found["loss"]
    config = json.loads((run / "checkpoints" / "step_00000004" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)  # it has every token of its template
    assert minimind(["chat", "--checkpoint", str(run), "--once", "what is sky?"]) == 0


def test_a_directory_is_also_read_as_training_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    place = folder_of(tmp_path / "llama", "llama")
    named, data = f"hf:{place}", talk(tmp_path)
    cache = ("--data_path", data, "--cache_dir", tmp_path / "cache")
    assert evaluated(capsys, "--model", named, *cache) == evaluated(
        capsys, "--model", place, *cache
    )
    assert minimind(["chat", "--model", named, "--once", "what is sky?"]) == 0
    assert minimind(["generate", "--model", named, "--prompt", "sky", "--max_new_tokens", "3"]) == 0
    out = tmp_path / "out"
    assert minimind(["export", "--checkpoint", named, "--format", "llama", "--out", str(out)]) == 0


def tokenizer_of(place: Path) -> Any:
    return AutoTokenizer.from_pretrained(place)


def test_a_sliding_window_is_not_ours(tmp_path: Path):
    place = folder_of(tmp_path / "m", "mistral")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "sliding_window": 8}))
    data = {"data_path": str(talk(tmp_path))}
    with pytest.raises(CheckpointError, match="sliding_window = 8, which MiniMind does not"):
        train({**RUN, "init_from": str(place), **data}, out_dir=str(tmp_path / "out"))


def test_other_architectures_are_named_with_the_flag_that_takes_them(tmp_path: Path):
    place = folder_of(tmp_path / "q", "gpt2")
    data = {"data_path": str(talk(tmp_path))}
    with pytest.raises(CheckpointError, match=r"'gpt2', none of llama.*--model hf:"):
        train({**RUN, "init_from": str(place), **data}, out_dir=str(tmp_path / "out"))


# --- in the code of transformers ----------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_packed_document_has_the_logits_that_it_has_alone(kind: str, attention: str):
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, vocab_size=50, **CONFIGS[kind])
    config._attn_implementation = attention
    model = model_of(config).eval()
    require_separate_documents(model)
    documents = [torch.randint(50, (2, length)) for length in (5, 9, 3)]
    row = torch.cat(documents, 1)
    starts = torch.zeros(row.shape, dtype=torch.bool)
    starts[:, [0, 5, 14]] = True
    with torch.no_grad():
        packed = model(input_ids=row, use_cache=False, document_starts=starts).logits
        alone = [model(input_ids=one, use_cache=False).logits for one in documents]
        mixed = model(input_ids=row, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-6)
    assert (mixed - packed).abs().max() > 1e-3  # without the arguments they see each other


def test_a_model_that_does_not_separate_documents_is_refused(tmp_path: Path):
    place = folder_of(tmp_path / "opt", "opt")
    more = {"model": f"hf:{place}", "init_from": str(place), "data_path": str(talk(tmp_path))}
    with pytest.raises(UsageError, match="OPTForCausalLM of transformers does not keep"):
        train({**RUN, **more, "cache_dir": str(tmp_path)}, out_dir=str(tmp_path / "out"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "spare"), [("qwen2", 0), ("gpt2", 0), ("qwen2", 9)])
def test_it_is_fine_tuned_with_rows_for_the_tokens_of_the_template(
    kind: str, spare: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    place = folder_of(tmp_path / kind, kind, template=None, spare=spare)
    rows = AutoConfig.from_pretrained(place).vocab_size
    more = {"model": f"hf:{place}", "init_from": str(place), "data_path": str(talk(tmp_path))}
    flags = {**RUN, **more, "cache_dir": str(tmp_path / "cache")}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(flags, out_dir=str(whole)) == 0
    assert train(flags, out_dir=str(stopped), stop_at_step=2) == 75
    assert train(flags, out_dir=str(stopped)) == 0
    assert losses(stopped) == losses(whole)
    lines = held_out(tmp_path / "talk.jsonl", 0.1)
    (tmp_path / "held.jsonl").write_bytes(b"\n".join(lines))
    cache = ("--data_path", tmp_path / "held.jsonl", "--cache_dir", tmp_path / "cache")
    found = evaluated(capsys, "--checkpoint", whole, *cache)
    assert found["loss"] == pytest.approx(events(whole, "eval")[-1]["val_loss"], rel=1e-6)
    out = tmp_path / "out"
    words = ["export", "--checkpoint", str(whole), "--format", "transformers", "--out", str(out)]
    assert minimind(words) == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), tokenizer_of(out)
    assert model.config.vocab_size == max(rows, rows - spare + 5)
    step = whole / "checkpoints" / "step_00000004"
    again = {**flags, "model": f"hf:{step}", "init_from": str(whole), "max_steps": 1}
    assert train(again, out_dir=str(tmp_path / "second")) == 0
    (start,) = events(tmp_path / "second", "run_start")
    assert start["init_from"] == {"place": str(step), "kind": "checkpoint"}
    loss, count = loss_by_hand(model, tokenizer, lines)
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert minimind(["chat", "--checkpoint", str(whole), "--once", "what is sky?"]) == 0


def test_new_rows_are_the_mean_of_the_others(tmp_path: Path):
    place = folder_of(tmp_path / "q", "qwen2", template=None)
    words = ["--task", "sft", "--model", f"hf:{place}", "--init_from", str(place)]
    run = parse_flags([*words, "--cache_dir", str(tmp_path)])
    initial = fine_tuned(read_initial(run), {})
    assert initial.weights is not None
    name = "model.embed_tokens.weight"
    table = initial.weights.tensors.read(name)
    before = AutoModelForCausalLM.from_pretrained(place).state_dict()[name]
    assert len(table) == len(before) + 5
    torch.testing.assert_close(table[: len(before)], before)
    torch.testing.assert_close(table[len(before) :], before.mean(0).expand(5, -1))
