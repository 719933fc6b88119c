"""The next token: the likeliest, or one drawn by random numbers that a text has to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from minimind.errors import NumericError

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the likeliest."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.9
    seed: int = 42
    top_k: int = 0  # 0: of all
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def random_of(self, number: int) -> torch.Generator:
        """The random numbers of a text, by its number: whatever it is generated beside."""
        digest = sha256(f"{self.seed} {number}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def chooser(how: Sampling, padding: Sequence[int], random: Sequence[torch.Generator]) -> Choose:
    """For transformers' greedy search: (B, T) ids, (B, V) logits -> those in which one token leads.

    `padding` is how many of each row's ids are none of its text's, `random` what each draws by.
    Raises a NumericError where nothing can be drawn. In float64, or a temperature close to 0 is
    one over an infinity.
    """
    warpers: list[Callable[..., torch.Tensor]] = []
    if how.top_k:
        warpers.append(TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        warpers.append(TopPLogitsWarper(how.top_p))

    def choose(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        _require_finite(ids, logits)
        logits = logits.double()
        if how.repetition_penalty != 1:
            logits = _penalised(ids, logits, padding, how.repetition_penalty)
        if not how.temperature:
            return logits
        logits = (logits - logits.amax(-1, keepdim=True)) / how.temperature
        for warp in warpers:
            logits = warp(ids, logits)
        return torch.full_like(logits, -torch.inf).scatter(-1, _drawn(logits, random), 0.0)

    return choose


def _drawn(logits: torch.Tensor, random: Sequence[torch.Generator]) -> torch.Tensor:
    """(B, 1): where the point that each row draws falls among its probabilities."""
    points = torch.stack([torch.rand(1, generator=own) for own in random]).to(logits)
    reached = logits.softmax(-1).cumsum(-1)
    return torch.searchsorted(reached, points * reached[:, -1:], right=True)


def _require_finite(ids: torch.Tensor, logits: torch.Tensor) -> None:
    if not torch.isfinite(logits).all():
        raise NumericError(
            f"the logits of token {ids.shape[1]} are not finite; generate from another checkpoint"
        )


def _penalised(
    ids: torch.Tensor, logits: torch.Tensor, padding: Sequence[int], penalty: float
) -> torch.Tensor:
    """What a text has already is less likely (CTRL, Keskar et al. 2019), its padding apart."""
    logits = logits.clone()
    for row, pad in enumerate(padding):
        there = ids[row, pad:].unique()
        own = logits[row, there]
        logits[row, there] = torch.where(own > 0, own / penalty, own * penalty)
    return logits
