"""`minimind export` and `minimind import`: weights -> a directory that other software loads.

One tensor is in memory at a time, whatever the model's size and the number of files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimind.data.gguf_vocabulary import gguf_vocabulary
from minimind.data.load_tokenizer import AnyTokenizer
from minimind.data.tokenizer_files import TOKENIZER_FILES
from minimind.errors import UsageError
from minimind.files import mebibytes
from minimind.gguf_file import NAME as GGUF_NAME
from minimind.gguf_file import gguf_parts, require_gguf, write_gguf
from minimind.model.configuration import MiniMindConfig
from minimind.model.interop import to_gguf, to_halves
from minimind.model.remote_code import AUTO_MAP, remote_code
from minimind.new_folder import NewFolder
from minimind.tensor_sources import INDEX, WHOLE
from minimind.train.claims import CONFIG, MAYBE_IN_CONFIG
from minimind.weights import Weights, require_fitting
from minimind.whole_files import SHARDS, write_folder

SMALL = ("config.json", "generation_config.json", *TOKENIZER_FILES)
OWN = (*SMALL, INDEX, WHOLE, SHARDS, GGUF_NAME, *remote_code())
SHARD_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: list[str]
    parameters: int
    bytes: int


def export(
    weights: Weights,
    tokenizer: AnyTokenizer,
    out: Path,
    form: str,
    dtype: str = "float32",
    max_shard_bytes: int | None = None,
    force: bool = False,
) -> Exported:
    """Write the model as `form` (minimind, llama or gguf) to a new folder `out`.

    Written aside and renamed: an interrupted one leaves nothing under `out`. Raises a UsageError,
    StorageError or CheckpointError before that.
    """
    out = out.resolve()
    if out == weights.path.resolve():
        raise UsageError(f"--out {out} is what is read; give another folder")
    folder = NewFolder(out, force, OWN, "export")
    folder.require_free()
    if not isinstance(weights.config, MiniMindConfig):
        raise UsageError(
            f"{weights.path}: is a model of transformers, which needs no other format; `minimind"
            " checkpoint consolidate` writes what from_pretrained loads"
        )
    require_fitting(tokenizer, weights.config)
    if form != "minimind":
        require_named(weights.tensors.shapes, form)
    kind = getattr(torch, dtype)
    if form == "gguf":
        if max_shard_bytes is not None:
            raise UsageError("--max_shard_size is for safetensors, gguf is one file; drop it")
        require_gguf()
        parts = gguf_parts(weights.config, weights.tensors, kind)
        vocabulary, config = gguf_vocabulary(tokenizer), weights.config
        # Beside it, as transformers puts a space in front of a text when it reads the former alone.
        write_gguf(folder, config, vocabulary, parts, kind, tokenizer.exported)
        files = [GGUF_NAME]
    else:
        source = weights.tensors
        if form == "llama":
            head_dim = weights.config.head_dim
            source = source.renamed(
                {name: name for name in source.shapes},
                lambda name, value: to_halves(name, value, head_dim),
            )
        parts = source.parts(kind)
        texts = _texts(weights.config, tokenizer, form, dtype)
        files = write_folder(folder, parts, texts, max_shard_bytes or SHARD_BYTES)
    parameters = sum(math.prod(shape) for shape in weights.tensors.shapes.values())
    return Exported(files, parameters, sum(part.bytes for part in parts))


def require_named(names: Iterable[str], form: str) -> None:
    """Nothing, or a UsageError with a tensor that only our own format knows."""
    for name in names:
        if to_gguf(name) is None:  # it names just what a dense Llama or Qwen3 has
            raise UsageError(f"--format {form} has no name for {name}; export --format minimind")


def _texts(
    config: MiniMindConfig, tokenizer: AnyTokenizer, form: str, dtype: str
) -> dict[str, bytes]:
    """The small files of a directory that Hugging Face libraries load."""
    ids = {
        name: getattr(config, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if getattr(config, name) is not None
    }
    code: dict[str, bytes] = {}
    if form == "llama":
        told = _llama_config(config)
    else:
        code = remote_code()
        told = {**_minimind_config(config), "auto_map": AUTO_MAP}
    told |= {**ids, "dtype": dtype, "torch_dtype": dtype}  # what transformers 4 reads
    return {
        "config.json": _json(told),
        "generation_config.json": _json({"_from_model_config": True, **ids}),
        **tokenizer.exported,
        **code,
    }


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


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def told(done: Exported, what: str, source: Path, out: Path) -> str:
    """What a command says when it is done."""
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    return (
        f"{out}: {done.parameters:,} parameters as {what}, {mebibytes(done.bytes)} in {files},"
        f" from {source}"
    )
