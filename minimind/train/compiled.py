"""torch.compile as this package uses it: one graph of model and loss, with its backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from minimind.config import RunConfig
from minimind.model.decoder import MiniMindForCausalLM


def compile_within(model: MiniMindForCausalLM, run: RunConfig) -> None:
    """Have the model compiled at its first micro-batch, in place: no name of a weight changes.

    Shapes are static, for rows are packed: every micro-batch has the same. Whatever wraps the model
    afterwards (DeepSpeed, DDP) is not compiled, so that its hooks break no graph.
    """
    if run.compile != "on":
        return
    model.compile(dynamic=False)


def uncompiled() -> AbstractContextManager[object]:
    """Runs what is called within as it is written, compiled or not."""
    return torch.compiler.set_stance("force_eager")
