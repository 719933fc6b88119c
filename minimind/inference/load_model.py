"""Load a model and its tokenizer from a checkpoint or an exported directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from minimind.architecture.hf_models import model_of
from minimind.checkpoint.directory import read_chosen
from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import UsageError
from minimind.interop.tensor_sources import TRAINED, require_trained
from minimind.interop.weights import (
    CONFIG,
    Weights,
    is_checkpoint,
    load_checkpoint_weights,
    load_weights_from,
)
from minimind.runtime import disk
from minimind.runtime.hub import WEIGHTS, local_model

LoadedModel = tuple[Any, Tokenizer, Path]  # MiniMindForCausalLM or a model of transformers


def load_model(
    checkpoint: str | None, model: str | None, tokenizer: str | None = None, weights: str = TRAINED
) -> LoadedModel:
    """The fp32 model on the CPU, its tokenizer and its path, from either `checkpoint` or `model`.

    `model` may be hf:DIR, as in training. `tokenizer`: of a `model` directory without one.
    `weights`: of a checkpoint, trained or ema. Raise UsageError if a place is of the other kind,
    CheckpointError if the weights do not fit their configuration.
    """
    if (checkpoint is None) == (model is None):
        count = "neither was" if checkpoint is None else "both were"
        raise UsageError(
            f"{count} given of --checkpoint (of a run) and --model (an exported directory); give"
            " one of them"
        )
    if checkpoint is not None and tokenizer is not None:
        raise UsageError(
            "--tokenizer has no effect with a checkpoint, which has its own; remove --tokenizer"
        )
    model = model and str(local_model(model))
    _check_kind(checkpoint, model)
    if checkpoint is not None:
        return load_checkpoint(checkpoint, weights)
    require_trained(weights, f"--model {model}")
    found = load_weights_from(model or "")
    if found.note:
        print(f"{found.path}: {found.note}", file=sys.stderr)
    if tokenizer is not None:
        found = found.with_tokenizer(tokenizer)
    return build_model(found)


def load_checkpoint(place: str, weights: str = TRAINED) -> LoadedModel:
    """The model of a step directory, or of the newest valid checkpoint of a run directory.

    Hashes are verified first; neither DeepSpeed nor the original number of processes is needed.
    """
    return read_chosen(place, lambda chosen: build_model(load_checkpoint_weights(chosen, weights)))


def build_model(weights: Weights) -> LoadedModel:
    """Build the model from its weights; a tokenizer that does not fit is refused first."""
    tokenizer = weights.load_tokenizer()
    model = model_of(weights.config)
    weights.fill(model)
    weights.release()
    return model.eval(), tokenizer, weights.path


def is_exported(path: Path) -> bool:
    """Whether a place has a model that is no training run's: a file of weights, or a directory."""
    if disk.is_file(path):
        return path.suffix in WEIGHTS and not is_checkpoint(path.parent)
    return disk.is_file(path / CONFIG) and not is_checkpoint(path)


def _check_kind(checkpoint: str | None, model: str | None) -> None:
    """Raise UsageError if the place is empty, GGUF, or belongs to the other flag."""
    flag, place = ("--model ", model) if checkpoint is None else ("", checkpoint)
    if not place:
        raise UsageError("--model is empty, as from a variable that is not set; give a directory")
    path = Path(place).expanduser()
    if checkpoint is None and is_checkpoint(path):
        raise UsageError(f"--model {place} belongs to a training run; give it as --checkpoint")
    if (
        path.suffix == ".gguf"
        if not disk.is_dir(path)
        else not (disk.exists(path / CONFIG) or is_checkpoint(path))
        and any(disk.matching(path, "*.gguf"))
    ):
        raise UsageError(
            f"{flag}{place}: is GGUF, which llama.cpp and Ollama read; name the checkpoint, or the"
            " directory, that it was exported from"
        )
    if checkpoint is not None and is_exported(path):
        raise UsageError(f"{place} is an exported model, not a run; give it as --model")
