"""A model from a training checkpoint, and text from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minimind.data.load_tokenizer import AnyTokenizer
from minimind.model.decoder import MiniMindForCausalLM
from minimind.weights import weights_of_checkpoint
from minimind.writing import Sampling, write_on


def load_checkpoint(place: str) -> tuple[MiniMindForCausalLM, AnyTokenizer, Path]:
    """The fp32 model, its tokenizer and the step directory of a run directory or step directory.

    A run directory gives its newest valid checkpoint. Hashes are verified before anything is read;
    neither DeepSpeed nor the number of processes that trained it is needed.
    """
    found = weights_of_checkpoint(place)
    model = MiniMindForCausalLM(found.config)
    found.fill(model)
    return model.eval(), found.load_tokenizer(), found.path


def generate(model: Any, tokenizer: AnyTokenizer, prompt: str, how: Sampling) -> tuple[str, float]:
    """The prompt with its continuation, and the tokens generated per second."""
    written = write_on(model, tokenizer, [prompt], how)
    return prompt + written.texts[0], written.speed
