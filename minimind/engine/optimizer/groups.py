"""Parameter groups, their optimizer, and trial optimizers that check parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from minimind.config.run_config import RunConfig
from minimind.engine.optimizer.lion import Lion
from minimind.engine.optimizer.muon import Groups, MuonWithAdamW, hidden_matrices
from minimind.engine.optimizer.mup import rate_factors


def parameter_groups(
    model: nn.Module, weight_decay: float, apart: Iterable[nn.Parameter] = ()
) -> Groups:
    """Return two groups: matrices with weight decay, norm gains without; both without `apart`."""
    excluded = {id(p) for p in apart}
    trainable = [p for p in model.parameters() if p.requires_grad and id(p) not in excluded]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def run_groups(model: nn.Module, run: RunConfig) -> Groups:
    """Return the parameter groups of the run's optimizer; those of Muon, the last, have `use_muon`.

    The rate of a group is `lr_scale` (1 if missing) times that of the schedule.
    """
    muon = run.muon
    matrices = hidden_matrices(model) if muon else {}
    groups = parameter_groups(model, run.weight_decay, matrices.values())
    if muon:
        group = {
            "params": [*matrices.values()],
            "names": frozenset(matrices),
            "use_muon": True,
            "lr": muon["muon_lr"],
            "lr_scale": muon["muon_lr"] / run.learning_rate,
            "weight_decay": run.weight_decay,
            "momentum": muon["muon_momentum"],
            "adjust_lr_fn": muon["muon_scaling"],
        }
        groups.append(group)
    factors = rate_factors(model, run)
    return [part for group in groups for part in _by_factor(group, factors, run.learning_rate)]


def _by_factor(
    group: dict[str, Any], factors: Mapping[nn.Parameter, float], learning_rate: float
) -> Groups:
    """Split a group by the factor of its rate, 1 first; each part decays as the whole did."""
    by_factor: dict[float, list[nn.Parameter]] = {1.0: []}
    for p in group["params"]:
        by_factor.setdefault(factors.get(p, 1.0), []).append(p)
    if len(by_factor) == 1:
        return [group]
    scale = group.get("lr_scale", 1.0)
    return [
        {
            **group,
            "params": params,
            "lr": learning_rate * scale * factor,
            "lr_scale": scale * factor,
            "weight_decay": group["weight_decay"] / factor,
        }
        for factor, params in by_factor.items()
        if params
    ]


def optimizer_of(groups: Groups, run: RunConfig) -> torch.optim.Optimizer:
    """The optimizer of --optimizer: torch's except Lion, with fused kernels where torch has them.

    Muon is beside AdamW and has the groups with `use_muon`.
    """
    betas = run.beta1, run.beta2
    if run.optimizer == "lion":
        return Lion(groups, lr=run.learning_rate, betas=betas)
    if run.sgd:
        momentum = run.sgd["sgd_momentum"]
        return torch.optim.SGD(groups, lr=run.learning_rate, momentum=momentum, fused=True)
    if any(group.get("use_muon") for group in groups):
        return MuonWithAdamW(groups, lr=run.learning_rate, betas=betas)
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
