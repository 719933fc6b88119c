"""A model that is there to be asked, from wherever it lies, and its tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from minimind.architecture.hf_models import model_of
from minimind.checkpoint.choose import read_chosen
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.errors import UsageError
from minimind.interop.weights import CONFIG, Weights, is_checkpoint, load_weights_from, weights_of

WEIGHTS = (".safetensors", ".pth", ".pt", ".bin")
Loaded = tuple[Any, AnyTokenizer, Path]  # the first a MiniMindForCausalLM, or transformers' own


def load_model(checkpoint: str | None, model: str | None, tokenizer: str | None = None) -> Loaded:
    """The fp32 model on the CPU, its tokenizer, and where they were found; exactly one is given.

    `tokenizer` is for a `model` that has none beside it. A UsageError where one was given that is
    the other, a CheckpointError where the weights do not fit what is said of them.
    """
    if (checkpoint is None) == (model is None):
        found = "neither was" if checkpoint is None else "both were"
        raise UsageError(
            f"of --checkpoint (a run's) and --model (an exported directory) {found} given;"
            " give one of them"
        )
    if checkpoint is not None and tokenizer is not None:
        raise UsageError("--tokenizer is for --model: a checkpoint has its own; leave it out")
    _require_kind(checkpoint, model)
    if checkpoint is not None:
        return read_chosen(checkpoint, lambda chosen: ready(weights_of(chosen)))
    found = load_weights_from(model or "")
    if tokenizer is not None:
        found = replace(found, tokenizer=Path(tokenizer).expanduser())
    return ready(found)


def ready(found: Weights) -> Loaded:
    """The same of weights that were looked at; what is small, and may not fit, is read first."""
    tokenizer = found.load_tokenizer()
    model = model_of(found.config)
    found.fill(model)
    found.release()
    return model.eval(), tokenizer, found.path


def _require_kind(checkpoint: str | None, model: str | None) -> None:
    """Nothing, or a UsageError that says which of the flags the place is for."""
    flag, place = ("--model", model) if checkpoint is None else ("--checkpoint", checkpoint)
    if not place:
        raise UsageError(f"{flag} is empty, as of a variable that is not set; name a place")
    path = Path(place).expanduser()
    if _is_gguf(path):
        raise UsageError(
            f"{flag} {place}: is GGUF, which llama.cpp and Ollama read; name the checkpoint, or the"
            " directory, that it was exported from"
        )
    if checkpoint is None and is_checkpoint(path):
        raise UsageError(f"--model {place}: is of a training run; give it as --checkpoint")
    if checkpoint is not None and not is_checkpoint(path) and _is_exported(path):
        raise UsageError(f"--checkpoint {place}: is no training run's; give it as --model")


def _is_gguf(path: Path) -> bool:
    if path.is_dir():
        return not (path / CONFIG).exists() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf"


def _is_exported(path: Path) -> bool:
    if path.is_file():
        return path.suffix in WEIGHTS and not is_checkpoint(path.parent)
    return (path / CONFIG).is_file()
