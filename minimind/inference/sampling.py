"""Sampling settings and the logits processors that apply them in `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minimind.errors import NumericError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy decoding, top_k 0 keeps all tokens."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.9
    seed: int = 42
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def generator(self, number: int) -> torch.Generator:
        """Random generator of the text with this number, the same in any batch."""
        digest = sha256(f"{self.seed} {number}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def logits_processors(
    sampling: Sampling, vocab_size: int, generators: Sequence[torch.Generator]
) -> LogitsProcessorList:
    """Processors that apply the settings in `generate(do_sample=False)`.

    `generate(do_sample=True)` draws all rows from one global generator, which would make a text
    depend on the rest of its batch. So the last processor draws a token for each row, from one of
    `generators`, and rules out all others.
    """

    def check(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Drop the logits beyond the vocabulary; shift the others to a maximum of 0.

        In float64, so that division by a temperature close to 0 leaves a maximum.
        """
        scores = scores[:, :vocab_size].double()
        if not scores.isfinite().all():
            raise NumericError(
                f"the logits of token {input_ids.shape[1]} are not finite; generate from another"
                " checkpoint"
            )
        return scores - scores.amax(-1, keepdim=True)

    def draw(input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V): 0 for a token drawn from the softmax of each row, -inf elsewhere."""
        points = torch.stack([torch.rand(1, generator=generator) for generator in generators])
        cumulative = scores.softmax(-1).cumsum(-1)
        points = points.to(scores) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, points, right=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)

    if not sampling.temperature:
        return LogitsProcessorList([check])
    warpers = [TemperatureLogitsWarper(float(sampling.temperature))]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    return LogitsProcessorList([check, *warpers, draw])
