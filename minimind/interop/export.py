"""`minimind export` and `minimind import`: weights -> a directory that other software loads.

One tensor is in memory at a time, whatever the model's size and the number of files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from minimind.checkpoint.validation import CONFIG, MAYBE_IN_CONFIG
from minimind.data.tokenizer.files import TOKENIZER_FILES
from minimind.data.tokenizer.gguf_vocabulary import gguf_vocabulary
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.errors import UsageError
from minimind.interop.gguf import NAME as GGUF_NAME
from minimind.interop.gguf import gguf_parts, require_gguf, write_gguf
from minimind.interop.hf_folder import configuration_files, foreign_files, with_tokenizer
from minimind.interop.remote_code import AUTO_MAP, remote_code
from minimind.interop.tensor_sources import INDEX, WHOLE, Source
from minimind.interop.weight_names import to_gguf, to_halves
from minimind.interop.weights import TRANSFORMERS, Weights, require_fitting
from minimind.interop.write_folder import SHARDS, write_folder
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.output_folder import NewFolder

SMALL = ("config.json", "generation_config.json", *TOKENIZER_FILES)
OWN = (*SMALL, INDEX, WHOLE, SHARDS, GGUF_NAME, *remote_code())
SHARD_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: list[str]
    parameters: int
    bytes: int
    note: str | None = None  # what a reader of the files should know


def export(
    weights: Weights,
    tokenizer: AnyTokenizer,
    out: Path,
    form: str,
    dtype: str = "float32",
    max_shard_bytes: int | None = None,
    force: bool = False,
) -> Exported:
    """Write the model as `form` to a new folder `out`: minimind, llama, gguf or transformers.

    Written aside and renamed: an interrupted one leaves nothing under `out`. Raises a UsageError,
    StorageError or CheckpointError before that.
    """
    out = out.resolve()
    if out == weights.path.resolve():
        raise UsageError(f"--out {out} is what is read; give another folder")
    folder = NewFolder(out, force, OWN, "export")
    folder.require_free()
    require_form(weights, form)
    require_fitting(tokenizer, weights.config)
    if form in ("llama", "gguf"):
        require_named(weights.tensors.shapes, form)
    kind, note = getattr(torch, dtype), None
    if form == "gguf":
        if max_shard_bytes is not None:
            raise UsageError("--max_shard_size is for safetensors, gguf is one file; drop it")
        require_gguf()
        parts = gguf_parts(weights.config, weights.tensors, kind)
        name, vocabulary = run_name(weights.path), gguf_vocabulary(tokenizer)
        # Beside it, as transformers puts a space in front of a text when it reads the former alone.
        write_gguf(folder, weights.config, name, vocabulary, parts, kind, tokenizer.exported)
        files = [GGUF_NAME]
    else:
        parts = _tensors(weights, form).parts(kind)
        texts, note = _texts(weights.config, tokenizer, form, dtype)
        files = write_folder(folder, parts, texts, max_shard_bytes or SHARD_BYTES)
    parameters = sum(math.prod(shape) for shape in weights.tensors.shapes.values())
    return Exported(files, parameters, sum(part.bytes for part in parts), note)


def require_form(weights: Weights, form: str) -> None:
    """Nothing, or a UsageError for a format that is not of this kind of model."""
    is_ours = isinstance(weights.config, MiniMindConfig)
    if is_ours and form == TRANSFORMERS:
        raise UsageError(
            f"--format {form} is for runs of --model hf:, and {weights.path} is of the MiniMind"
            " decoder; give --format llama, or minimind"
        )
    if not is_ours and form != TRANSFORMERS:
        raise UsageError(
            f"--format {form} is for the MiniMind decoder, and {weights.path} is"
            f" {weights.config.model_type} of transformers; give --format {TRANSFORMERS}"
        )


def run_name(path: Path) -> str:
    """The name of the run that a step directory is of, or of the directory or file itself."""
    path = path.resolve()
    named = path.parent.parent if path.parent.name == "checkpoints" else path
    return os.fsencode(named.stem if named.is_file() else named.name).decode(errors="replace")


def require_named(names: Iterable[str], form: str) -> None:
    """Nothing, or a UsageError with a tensor that only our own format knows."""
    for name in names:
        if to_gguf(name) is None:  # it names just what a dense Llama or Qwen3 has
            raise UsageError(f"--format {form} has no name for {name}; export --format minimind")


def _tensors(weights: Weights, form: str) -> Source:
    """The tensors by the names that they already have, those of q and k in Llama's order."""
    source = weights.tensors
    if form != "llama":
        return source
    head_dim, names = weights.config.head_dim, {name: name for name in source.shapes}
    return source.renamed(names, lambda name, value: to_halves(name, value, head_dim))


def _texts(
    config: PretrainedConfig, tokenizer: AnyTokenizer, form: str, dtype: str
) -> tuple[dict[str, bytes], str | None]:
    """The small files of a directory that Hugging Face libraries load, and a note on them."""
    if not isinstance(config, MiniMindConfig):
        return foreign_files(config, tokenizer, dtype)
    ids = {
        name: getattr(config, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if getattr(config, name) is not None
    }
    if form == "llama":
        return with_tokenizer(_llama_config(config) | ids, tokenizer, dtype)
    told = {**_minimind_config(config), **ids, "auto_map": AUTO_MAP}
    return {**configuration_files(told, dtype), **tokenizer.exported, **remote_code()}, None


def _minimind_config(config: MiniMindConfig) -> dict[str, Any]:
    """Everything that determines the model, and nothing of the library that wrote it."""
    own = {name: getattr(config, name) for name in (*CONFIG, *MAYBE_IN_CONFIG)}
    return {**own, "model_type": "minimind", "architectures": ["MiniMindForCausalLM"]}


def _llama_config(config: MiniMindConfig) -> dict[str, Any]:
    """The configuration of the same function of token ids as LlamaForCausalLM or Qwen3ForCausalLM.

    Where a row has several documents theirs see one another: neither knows doc_mask.
    """
    is_normed = getattr(config, "qk_norm", False)
    own = {"use_sliding_window": False} if is_normed else {"mlp_bias": False}
    return {
        "architectures": ["Qwen3ForCausalLM" if is_normed else "LlamaForCausalLM"],
        "model_type": "qwen3" if is_normed else "llama",
        **own,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,  # what transformers 4 and others read
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
    }


def told(done: Exported, what: str, source: Path, out: Path) -> str:
    """What a command says when it is done."""
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    return (
        f"{out}: {done.parameters:,} parameters as {what}, {mebibytes(done.bytes)} in {files},"
        f" from {source}"
    )
