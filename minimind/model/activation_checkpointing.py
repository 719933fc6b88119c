"""Activation checkpointing: of a function, or of the blocks of a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs), computed again for the backward pass, which keeps the inputs alone.

    For functions that draw nothing: no random state is kept.
    """
    found: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return found


def not_kept(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs), of little work: compiled for a CPU it is `recomputed`, else a plain call.

    What that costs was measured on a CPU (`benchmarks/units.py`, docs/performance.md) and nowhere
    else.
    """
    if torch.compiler.is_compiling() and inputs[0].device.type == "cpu":
        return recomputed(function, *inputs)
    return function(*inputs)


def recompute_blocks(model: Any, is_wanted: bool = True, **how: Any) -> None:
    """Have each block of a transformers model keep its input alone, and compute the rest again.

    `how` is for torch.utils.checkpoint. transformers 5.20, the last one for Python 3.10, calls it
    gradient checkpointing; 5.23 warns of that name.
    """
    is_new = hasattr(model, "activation_checkpointing_enable")
    name = "activation_checkpointing" if is_new else "gradient_checkpointing"
    if is_wanted:
        getattr(model, f"{name}_enable")(how or None)
    else:
        getattr(model, f"{name}_disable")()
