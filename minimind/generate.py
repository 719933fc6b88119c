"""Text from a training checkpoint, one token after another, with a key/value cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimind.data.load_tokenizer import AnyTokenizer
from minimind.errors import NumericError, UsageError
from minimind.model.decoder import MiniMindForCausalLM
from minimind.weights import weights_of_checkpoint


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the likeliest."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.9
    seed: int = 42


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
    """The prompt with its continuation, and the tokens generated per second.

    Stops at the end-of-document token, or when the positions the model was trained on are used up.
    """
    ids = [*tokenizer.encode(prompt)] or [tokenizer.eos_id]  # after a document's end, a new one
    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        raise UsageError(
            f"--prompt has {len(ids)} tokens and the model {model.config.max_position_embeddings}"
            " positions; shorten it"
        )
    torch.manual_seed(how.seed)
    drawn = {"temperature": how.temperature, "top_p": how.top_p} if how.temperature else {}
    started = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=min(how.max_new_tokens, room),
            do_sample=bool(drawn),
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id,
            use_cache=True,
            logits_processor=[_require_finite],
            **drawn,
        )
    new = [int(i) for i in out[0, len(ids) :] if int(i) != tokenizer.eos_id]
    speed = (out.shape[1] - len(ids)) / (time.perf_counter() - started)
    text = tokenizer.decode(new)
    if len(new) == how.max_new_tokens:  # perhaps cut within the bytes of one character
        text = text.rstrip("\ufffd")
    return prompt + text, speed


def _require_finite(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The logits; a NumericError where nothing can be drawn from them."""
    if not torch.isfinite(logits).all():
        raise NumericError(
            f"the logits of token {ids.shape[1]} are not finite; generate from another checkpoint"
        )
    return logits
