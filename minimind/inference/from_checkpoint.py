"""A model from a training checkpoint, and text from it."""

from __future__ import annotations

from typing import Any

from minimind.checkpoint.choose import read_chosen
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.inference.generate import write_on
from minimind.inference.load_model import Loaded, ready
from minimind.inference.sampling import Sampling
from minimind.interop.weights import weights_of


def load_checkpoint(place: str) -> Loaded:
    """The fp32 model, its tokenizer and the step directory of a run directory or step directory.

    A run directory gives its newest valid checkpoint. Hashes are verified before anything is read;
    neither DeepSpeed nor the number of processes that trained it is needed.
    """
    return read_chosen(place, lambda chosen: ready(weights_of(chosen)))


def generate(model: Any, tokenizer: AnyTokenizer, prompt: str, how: Sampling) -> tuple[str, float]:
    """The prompt with its continuation, and the tokens generated per second."""
    written = write_on(model, tokenizer, [prompt], how)
    return prompt + written.texts[0], written.speed
