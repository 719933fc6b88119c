"""Which weights are decayed, and AdamW for a DeepSpeed file that names no optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minimind.config import RunConfig


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
