"""Which weights are decayed, AdamW for a DeepSpeed file that names no optimizer, and trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from minimind.config.run_config import RunConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices (decayed, the tied embedding once) and norm gains (not decayed)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(groups: list[dict[str, Any]], run: RunConfig) -> torch.optim.Optimizer:
    """Torch's AdamW with the run's learning rate and betas, in one kernel."""
    betas = run.beta1, run.beta2
    return torch.optim.AdamW(groups, lr=run.learning_rate, betas=betas, fused=True)


def trial_optimizer(name: str | None, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Build the optimizer that DeepSpeed takes from torch over two small groups, and take a step.

    Raises what torch raises of its parameters. For one that DeepSpeed would compile, or none, it is
    AdamW: a scheduler finds the same kinds of groups in it.
    """
    given = {key: value for key, value in params.items() if key != "torch_adam"}
    if name in ("Adam", "AdamW"):
        in_torch = params.get("torch_adam") is True
        decoupled = given.pop("adam_w_mode", True) or name == "AdamW"
        given.pop("fp32_optimizer_states", None)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    else:
        in_torch = name == "SGD"
        kind = torch.optim.SGD
    weights = [torch.zeros((2, 2), requires_grad=True), torch.zeros(2, requires_grad=True)]
    groups = [{"params": [weight]} for weight in weights]
    if not in_torch:
        return torch.optim.AdamW(groups)
    optimizer = kind(groups, **given)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    if not given.get("capturable"):  # which takes a GPU
        optimizer.step()
    return optimizer
