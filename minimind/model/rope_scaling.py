"""Rotary frequencies of contexts longer than those that a model was trained on.

`scaling` is None or {"rope_type": KIND, "factor": F, "original_max_position_embeddings": L}, in the
spelling of transformers. L is the length that the model was trained on before the scaling; only
yarn depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minimind.model.sizes import MAX_FACTOR

KINDS = ("linear", "ntk", "yarn")
FASTEST, SLOWEST = 32, 1  # turns over L positions between which yarn blends (beta_fast, beta_slow)


def effective_theta(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> float:
    """Return the base of the frequencies: theta, or a larger one for ntk.

    ntk is the static NTK-aware scaling: the slowest pair of channels turns `factor` times slower,
    the fastest as before, at every length of the input. It is nothing but a larger base.
    """
    if scaling is None or scaling["rope_type"] != "ntk":
        return theta
    return theta * scaling["factor"] ** (head_dim / (head_dim - 2))


def rotary_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Tensor, float]:
    """Return radians per position of each pair, float64 (head_dim // 2,), and yarn's `mscale`.

    Queries and keys are multiplied by mscale, which is 1 for the other kinds.
    """
    pairs = torch.arange(0, head_dim, 2).double()
    frequencies = effective_theta(head_dim, theta, scaling) ** (-pairs / head_dim)
    if scaling is None or scaling["rope_type"] == "ntk":
        return frequencies, 1.0
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequencies / factor, 1.0
    length = scaling["original_max_position_embeddings"]
    slowed = _share_of_slowed(head_dim, theta, length)
    return frequencies * (1 - slowed + slowed / factor), 0.1 * math.log(factor) + 1


def _share_of_slowed(head_dim: int, theta: float, length: int) -> Tensor:
    """Return 0 for pairs that make FASTEST turns in `length` positions, 1 below SLOWEST turns.

    A linear ramp lies between (Peng et al. 2023, section 3.2), from and to whole numbers of pairs.
    """

    def pair_of(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_of(FASTEST)), 0)
    last = min(math.ceil(pair_of(SLOWEST)), head_dim - 1)
    width = last - first or 0.001
    return ((torch.arange(head_dim // 2).double() - first) / width).clamp(0, 1)


def check_scaling(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> None:
    """Raise ValueError for scaling that is unknown, incomplete or impossible for such heads."""
    kind, factor = scaling.get("rope_type"), scaling.get("factor")
    length = scaling.get("original_max_position_embeddings")
    if kind not in KINDS:
        raise ValueError(f"rope_type={kind!r} of rope_scaling is none of {', '.join(KINDS)}.")
    if not isinstance(factor, int | float) or not 1 <= factor <= MAX_FACTOR:
        raise ValueError(f"factor={factor!r} of rope_scaling is no number from 1 to {MAX_FACTOR}.")
    if not isinstance(length, int) or length < 1:
        raise ValueError(
            f"original_max_position_embeddings={length!r} of rope_scaling is no number of positions"
        )
    if kind == "ntk" and head_dim == 2:
        raise ValueError("rope_type='ntk' needs heads of more than one pair of channels.")
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_type='yarn' needs rope_theta above 1, and it is {theta:g}.")
