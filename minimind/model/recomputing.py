"""Activation checkpointing, by whichever name the installed transformers has for it."""

from __future__ import annotations

from typing import Any


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
