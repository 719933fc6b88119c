"""Rotary position embedding: the pos_cis table, its scaling, the rotation of queries and keys.

Weights and caches use the interleaved layout: a pair is two ADJACENT channels. Only a compiled
training pass uses the half layout, in which channel j is paired with j + D/2, because its loads and
stores are then contiguous. The rows of the projections are permuted when they are read, which
copies a small matrix; scores do not change, since queries and keys are permuted alike.

Shape letters: B rows, T positions, H heads, D channels per head (D is even).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minimind.model.sizes import MAX_FACTOR

KINDS = ("linear", "ntk", "yarn", "llama3")
FASTEST, SLOWEST = 32, 1  # turns over L positions between which yarn blends (beta_fast, beta_slow)
LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4}  # the same of llama3, in every Llama


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
    if scaling["rope_type"] == "llama3":
        low, high = LLAMA3.values()
        turns = frequencies * length / (2 * math.pi)
        slowed, mscale = ((high - turns) / (high - low)).clamp(0, 1), 1.0
    else:
        slowed, mscale = _share_of_slowed(head_dim, theta, length), 0.1 * math.log(factor) + 1
    return frequencies * (1 - slowed + slowed / factor), mscale


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
        raise ValueError(f"rope_type={kind!r} of rope_scaling is not one of {', '.join(KINDS)}.")
    if not isinstance(factor, int | float) or not 1 <= factor <= MAX_FACTOR:
        raise ValueError(
            f"factor={factor!r} of rope_scaling is not a number from 1 to {MAX_FACTOR}."
        )
    if not isinstance(length, int) or length < 1:
        raise ValueError(
            f"original_max_position_embeddings={length!r} of rope_scaling is not a number of"
            " positions"
        )
    if kind == "ntk" and head_dim == 2:
        raise ValueError("rope_type='ntk' needs heads of more than one pair of channels.")
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_type='yarn' needs rope_theta above 1, and it is {theta:g}.")


class Rotary(NamedTuple):
    """Rotation at the positions of a forward pass, in the forms of both layouts."""

    cis: Tensor | None  # interleaved: complex64, (T, D/2) or (B, T, D/2); None: no such operators
    reals: Tensor  # half: `pos_cis_as_reals(cis)`, fp32 (2, T, D/2) or (2, B, T, D/2)


def build_pos_cis(
    head_dim: int, max_positions: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the rotation of each channel pair as complex64 (max_positions, head_dim // 2).

    Entry (t, j) rotates pair j at position t by the angle t * theta ** (-2j / head_dim), and has
    unit length; `scaling` changes the angles, and yarn the length too. Pairs are
    ADJACENT channels (0, 1), (2, 3), ... as in RoFormer (Su et al. 2021, section 3.4). Llama in
    transformers pairs channel j with j + D/2, so import and export permute the rows of q and k.

    Computed in float64: bf16 cannot distinguish neighbouring positions beyond 256. Uses integer
    constructors only, because DeepSpeed's zero.Init casts the result of floating-point ones.
    """
    frequencies, mscale = rotary_frequencies(head_dim, theta, scaling)
    angles = torch.outer(torch.arange(max_positions).double(), frequencies)
    return torch.polar(mscale * torch.ones_like(angles), angles).to(torch.complex64)


def pos_cis_as_reals(pos_cis: Tensor) -> Tensor:
    """Real and imaginary parts of pos_cis, fp32 (2, ...), each contiguous."""
    return torch.stack((pos_cis.real, pos_cis.imag))


def interleaved_to_half(weight: Tensor, head_dim: int) -> Tensor:
    """Permute the rows of every head to channels 0, 2, 4, ... then 1, 3, 5, ... (as in Llama)."""
    return _transpose_rows(weight, (-1, head_dim // 2, 2))


def half_to_interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Invert `interleaved_to_half`."""
    return _transpose_rows(weight, (-1, 2, head_dim // 2))


def _transpose_rows(weight: Tensor, parts: tuple[int, int, int]) -> Tensor:
    """Transpose the rows of each head, seen as a table of `parts`."""
    return weight.unflatten(0, parts).transpose(1, 2).flatten(0, 2)
