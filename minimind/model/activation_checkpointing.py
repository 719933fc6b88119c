"""Activation checkpointing of a function, or of the blocks of a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), recomputed in the backward pass; only the inputs are saved.

    The random state is not preserved.
    """
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def is_compiled() -> bool:
    """Whether torch.compile traces this code; not torch.export, which needs one graph for all
    lengths and without recomputation.
    """
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def is_traced() -> bool:
    """Whether this code is recorded for other inputs, so that no value of a tensor may be read."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] (documented)


def recompute_if_compiled(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), a cheap function: recomputed if compiled for a CPU.

    The saving was measured on a CPU only (`benchmarks/units.py`, benchmarks/README.md).
    """
    if is_compiled() and inputs[0].device.type == "cpu":
        return recompute(function, *inputs)
    return function(*inputs)


def enable_checkpointing(model: Any, enabled: bool = True, **options: Any) -> None:
    """Switch activation checkpointing of a transformers model's blocks on or off.

    `options` are those of torch.utils.checkpoint. transformers before 5.23 names the methods
    gradient_checkpointing_*; 5.23 deprecates these.
    """
    is_new = hasattr(model, "activation_checkpointing_enable")
    name = "activation_checkpointing" if is_new else "gradient_checkpointing"
    if enabled:
        getattr(model, f"{name}_enable")(options or None)
    else:
        getattr(model, f"{name}_disable")()
