"""Lion: updates by the sign of an interpolated momentum; torch has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023 (arXiv 2302.06675), with decoupled weight decay.

    The state is that of DeepSpeed's Lion: `exp_avg`, and a step count that no update reads.
    """

    found_inf: Tensor | None = None  # 1 to skip the step; set by the backend

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        if self.found_inf is not None and self.found_inf.item():
            return
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p))
                state["step"] += 1
                direction = state["exp_avg"].lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
                state["exp_avg"].lerp_(p.grad, 1 - beta2)
