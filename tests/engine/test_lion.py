"""Lion against the formula of its paper in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimind.engine.optimizers import Lion


def by_the_paper(
    w: torch.Tensor, gradients: list[torch.Tensor], lr: float, betas: tuple[float, float], wd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and momentum after algorithm 2 of arXiv 2302.06675, line by line, in float64."""
    theta, m = w.double(), torch.zeros_like(w, dtype=torch.float64)
    for gradient in gradients:
        g = gradient.double()
        c = betas[0] * m + (1 - betas[0]) * g
        theta = theta - lr * (torch.sign(c) + wd * theta)
        m = betas[1] * m + (1 - betas[1]) * g
    return theta, m


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_an_update_is_that_of_the_paper(betas, weight_decay):
    torch.manual_seed(5)
    w = torch.randn(64, 32)
    gradients = [torch.randn_like(w) * scale for scale in (1.0, 0.01, 3.0, 0.1, 1.0, 1.0)]
    p = torch.nn.Parameter(w.clone())
    optimizer = Lion([{"params": [p], "weight_decay": weight_decay}], lr=0.02, betas=betas)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    expected, momentum = by_the_paper(w, gradients, 0.02, betas, weight_decay)
    assert torch.allclose(p.detach().double(), expected, rtol=0, atol=2e-6)
    state: Any = optimizer.state[p]
    assert torch.allclose(state["exp_avg"].double(), momentum, rtol=0, atol=1e-6)
    assert float(state["step"]) == len(gradients)


def test_a_gradient_of_zero_and_a_missing_one_move_nothing():
    zero, missing = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Lion([zero, missing], lr=0.1, betas=(0.9, 0.99))
    zero.grad = torch.zeros(3)
    optimizer.step()
    assert zero.tolist() == missing.tolist() == [1.0, 1.0, 1.0]
    assert missing not in optimizer.state
