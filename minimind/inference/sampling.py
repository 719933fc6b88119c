"""Sampling settings and the logits processors that apply them in `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
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


class CheckLogits(LogitsProcessor):
    """Reject logits that are not finite, drop embedding rows beyond the vocabulary, shift to max 0.

    float64, and a maximum of 0, so that division by a temperature close to 0 leaves a maximum.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, T) ids, (B, V) logits -> (B, vocab_size); raise NumericError if one is not finite."""
        scores = scores[:, : self.vocab_size].double()
        if not scores.isfinite().all():
            raise NumericError(
                f"the logits of token {input_ids.shape[1]} are not finite; generate from another"
                " checkpoint"
            )
        return scores - scores.amax(-1, keepdim=True)


class DrawTokens(LogitsProcessor):
    """Draw one token per row and rule out all others, so that greedy search takes it.

    `generate(do_sample=True)` draws all rows from one global generator, which would make a text
    depend on the rest of its batch; here each row has a generator.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores, 0 for the token drawn from their softmax and -inf elsewhere."""
        points = torch.stack([torch.rand(1, generator=one) for one in self.generators])
        cumulative = scores.softmax(-1).cumsum(-1)
        points = points.to(scores) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, points, right=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)


def logits_processors(
    sampling: Sampling, vocab_size: int, generators: Sequence[torch.Generator]
) -> LogitsProcessorList:
    """The processors for `generate(do_sample=False)`; `generators` has one per row."""
    processors: list[LogitsProcessor] = [CheckLogits(vocab_size)]
    if sampling.temperature:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        processors.append(DrawTokens(generators))
    return LogitsProcessorList(processors)
