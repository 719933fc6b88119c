"""A model from a training checkpoint, and text from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from minimind.data.load_tokenizer import AnyTokenizer, load_tokenizer
from minimind.data.tokenizer_files import JSON_NAME, MODEL_NAME, TOKENIZER_FILES
from minimind.errors import CheckpointError, DataError
from minimind.model.decoder import MiniMindConfig, MiniMindForCausalLM
from minimind.train.checkpoint import choose, read_manifest
from minimind.train.claims import ELSEWHERE, read_config, require_listed
from minimind.train.resume import load_weights, misfits
from minimind.train.saver import shapes
from minimind.writing import Sampling, write_on


def load_checkpoint(place: str) -> tuple[MiniMindForCausalLM, AnyTokenizer, Path]:
    """The fp32 model, its tokenizer and the step directory of a run directory or step directory.

    A run directory gives its newest valid checkpoint. Hashes are verified before anything is read;
    neither DeepSpeed nor the number of processes that trained it is needed.
    """
    path, rejected = choose(place)
    for bad in rejected:
        print(f"{bad.path} is passed over: {bad.file} {bad.reason}", file=sys.stderr)
    weights = load_weights(path)
    model = MiniMindForCausalLM(_config(path, weights))
    model.load_state_dict(weights, strict=False)  # without a tied lm_head
    return model.eval(), _tokenizer(path, model.config.vocab_size), path


def _config(path: Path, weights: dict[str, torch.Tensor]) -> MiniMindConfig:
    """The shape of a checkpoint's model; a CheckpointError where its weights have another.

    No table or layer that the weights do not bear out is made.
    """
    claimed = read_config(path, read_manifest(path))
    misfit = f"{path / 'config.json'}: does not fit the weights saved beside it"
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    if claimed["num_hidden_layers"] != len(layers):
        raise CheckpointError(
            f"{misfit} (num_hidden_layers: {len(layers)} -> {claimed['num_hidden_layers']});"
            f" {ELSEWHERE}"
        )
    try:
        config = MiniMindConfig(**claimed)
        with torch.device("meta"):
            own = shapes(MiniMindForCausalLM(config))
    except (ValueError, RuntimeError) as error:  # the latter of sizes that int64 cannot hold
        told = str(error).splitlines()[0]
        raise CheckpointError(f"{misfit} ({told}); {ELSEWHERE}") from error
    saved = {name: list(value.shape) for name, value in weights.items()}
    if wrong := misfits(saved, own):
        raise CheckpointError(f"{misfit} ({'; '.join(wrong[:3])}); {ELSEWHERE}")
    return config


def _tokenizer(path: Path, vocab_size: int) -> AnyTokenizer:
    """The tokenizer in a checkpoint; a CheckpointError where the model does not know its ids."""
    there = [name for name in TOKENIZER_FILES if (path / name).exists()] or [MODEL_NAME]
    for name in there:
        require_listed(read_manifest(path), path / name)
    file = path / (JSON_NAME if JSON_NAME in there and MODEL_NAME not in there else MODEL_NAME)
    try:
        tokenizer = load_tokenizer(file)
    except DataError as error:  # whose way out is that of a run that has text
        told = str(error).split(";")[0]
        raise CheckpointError(f"{told}; {ELSEWHERE}") from error
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{file}: has {tokenizer.vocab_size} pieces and the model {vocab_size}; {ELSEWHERE}"
        )
    return tokenizer


def generate(model: Any, tokenizer: AnyTokenizer, prompt: str, how: Sampling) -> tuple[str, float]:
    """The prompt with its continuation, and the tokens generated per second."""
    written = write_on(model, tokenizer, [prompt], how)
    return prompt + written.texts[0], written.speed
