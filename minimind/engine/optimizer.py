"""Parameter groups, the default AdamW, and trial optimizers that check parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from minimind.config.run_config import RunConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay, norm gains without."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(groups: list[dict[str, Any]], run: RunConfig) -> torch.optim.Optimizer:
    """torch's fused AdamW with the learning rate and betas of the run."""
    betas = run.beta1, run.beta2
    return torch.optim.AdamW(groups, lr=run.learning_rate, betas=betas, fused=True)


def trial_optimizer(name: str | None, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Build a torch optimizer with `params` on two small groups and take a step.

    Raises what torch raises for its parameters. If DeepSpeed would compile the optimizer, or there
    is none, returns AdamW, whose groups suit schedulers too.
    """
    options = {key: value for key, value in params.items() if key != "torch_adam"}
    if name in ("Adam", "AdamW"):
        is_torch = params.get("torch_adam") is True
        decoupled = options.pop("adam_w_mode", True) or name == "AdamW"
        options.pop("fp32_optimizer_states", None)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    else:
        is_torch = name == "SGD"
        kind = torch.optim.SGD
    weights = [torch.zeros((2, 2), requires_grad=True), torch.zeros(2, requires_grad=True)]
    groups = [{"params": [weight]} for weight in weights]
    if not is_torch:
        return torch.optim.AdamW(groups)
    optimizer = kind(groups, **options)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    if not options.get("capturable"):  # requires a GPU
        optimizer.step()
    return optimizer
