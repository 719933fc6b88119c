"""Load a training checkpoint and generate from it."""

from __future__ import annotations

from typing import Any

from minimind.checkpoint.choose import read_chosen
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.inference.generate import generate_texts
from minimind.inference.load_model import LoadedModel, build_model
from minimind.inference.sampling import Sampling
from minimind.interop.weights import load_checkpoint_weights


def load_checkpoint(place: str) -> LoadedModel:
    """The fp32 model, tokenizer and step directory of a run or step directory.

    A run directory gives its newest valid checkpoint. Hashes are verified before anything is read;
    neither DeepSpeed nor the original number of processes is needed.
    """
    return read_chosen(place, lambda chosen: build_model(load_checkpoint_weights(chosen)))


def generate(
    model: Any, tokenizer: AnyTokenizer, prompt: str, sampling: Sampling
) -> tuple[str, float]:
    """The prompt with its continuation, and the tokens generated per second."""
    result = generate_texts(model, tokenizer, [prompt], sampling)
    return prompt + result.texts[0], result.tokens_per_second
