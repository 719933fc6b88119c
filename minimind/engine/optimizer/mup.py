"""muP: initialization and learning rates that suit every width (Yang et al. 2022, table 8).

With m = dim / mup_base_dim, hidden matrices start smaller by 1 / sqrt(m), and AdamW's rate for them
is 1 / m of the run's. Table 8 multiplies the logits by 1 / m. Here the weight of the final norm
does: it starts at 1 / m with 1 / m of the rate. AdamW does not depend on the scale of a gradient
(epsilon and clipping aside), so this trains the same function, the model stays a plain decoder, and
the head may be tied. Attention keeps 1 / sqrt(head_dim): head_dim is constant over widths.

Weight decay is multiplied by what the rate is divided by, as in the authors' package `mup`: the
decay of a step does not depend on the width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minimind.config.run_config import RunConfig
from minimind.engine.optimizer.muon import hidden_matrices
from minimind.model.experts import MixtureOfExperts

HIDDEN, ROUTER, OUTPUT = "hidden matrices", "routers of experts", "final norm"
# Exponents of m. A router maps the width to a fixed number of experts, like the head.
INIT = {HIDDEN: -0.5, ROUTER: -1.0, OUTPUT: -1.0}
ADAMW = {HIDDEN: -1.0, ROUTER: -1.0, OUTPUT: -1.0}
# An update of Muon has a spectral norm of 1, which suits a hidden matrix of any width and is
# sqrt(m) too large for a router; match_rms_adamw multiplies it by the root of the width.
MUON = {"original": {HIDDEN: 0.0, ROUTER: -0.5}, "match_rms_adamw": {HIDDEN: -0.5, ROUTER: -1.0}}


def role_of(model: Any) -> dict[nn.Parameter, str]:
    """The role of each parameter that muP scales; the others keep initialization and rate."""
    roles: dict[nn.Parameter, str] = dict.fromkeys(hidden_matrices(model).values(), HIDDEN)
    for module in model.modules():
        gate: Any = module.gate.weight if isinstance(module, MixtureOfExperts) else None
        if gate in roles:
            roles[gate] = ROUTER
    return {**roles, model.model.norm.weight: OUTPUT}


def rate_factors(model: Any, run: RunConfig) -> dict[nn.Parameter, float]:
    """Factors of the learning rate other than 1, by parameter."""
    if run.width_ratio == 1.0:
        return {}
    powers = _powers_of_rate(run)
    factors = {p: run.width_ratio ** powers[role] for p, role in role_of(model).items()}
    return {p: factor for p, factor in factors.items() if factor != 1.0}


@torch.no_grad()
def scale_initial_weights(model: Any, run: RunConfig) -> None:
    """Scale freshly initialized weights from the base width's to those of this width."""
    if run.width_ratio == 1.0:
        return
    for p, role in role_of(model).items():
        p.mul_(run.width_ratio ** INIT[role])


def mup_line(run: RunConfig) -> str:
    """The factors in force as a line of the start summary; empty without muP."""
    if run.mup_base_dim is None:
        return ""
    m, powers = run.width_ratio, _powers_of_rate(run)
    parts = [f"dim / mup_base_dim = {m:.4g}"]
    for role in (HIDDEN, ROUTER, OUTPUT) if run.use_moe else (HIDDEN, OUTPUT):
        start = "" if run.init_from else f"initial size x {m ** INIT[role]:.4g}, "
        decay = "" if role == OUTPUT else f", weight decay x {m ** -powers[role]:.4g}"
        parts.append(f"{role}: {start}rate x {m ** powers[role]:.4g}{decay}")
    return f"muP      {'; '.join(parts)}; keep dim / n_heads = {run.dim // run.n_heads}"


def _powers_of_rate(run: RunConfig) -> dict[str, float]:
    return ADAMW | (MUON[run.muon["muon_scaling"]] if run.muon else {})
