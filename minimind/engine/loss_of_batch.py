"""What a micro-batch is trained on, apart from what is told of it.

Inputs and targets are (B, T) token ids on the model's device: of each row all but the last, and all
but the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minimind.config.run_config import RunConfig
from minimind.model.experts import Routing
from minimind.model.loss import contagious_mean
from minimind.runtime.collectives import Ranks

CHUNK = 1024  # positions; logits of so many are some MiB


def positions_at_once(run: RunConfig) -> int:
    """Of how many positions logits are made at a time; 0: of all."""
    return CHUNK if run.loss == "chunked" else 0


@dataclass(frozen=True)
class Objective:
    """The summed cross-entropy of one micro-batch, its targets, and how its tokens were routed."""

    loss_sum: torch.Tensor
    tokens: torch.Tensor
    routing: Routing | None  # None for a dense model, and outside training

    @property
    def trained(self) -> torch.Tensor:
        """What the backward pass begins with: nats per token, and the balance of experts if any.

        Both are means over rows of one length, so that their mean over micro-batches and ranks is
        that over the step's rows: how a step is split up changes no more than rounding.
        """
        if self.routing is None:
            return contagious_mean(self.loss_sum, self.tokens)
        balance = self.routing.aux_loss
        return contagious_mean(self.loss_sum, self.tokens, also=balance) + balance


def objective_of(
    forward: Any, inputs: torch.Tensor, targets: torch.Tensor, summed_by: int = 0
) -> Objective:
    """The objective of `forward`, the model as its backend wraps it.

    Logits are made for `summed_by` positions at a time; 0: for all. The loss is made within the
    model, so that whatever compiles the model compiles it too.
    """
    out = forward(input_ids=inputs, shift_labels=targets, summed_by=summed_by)
    is_routed = out.aux_loss is not None
    return Objective(
        out.loss_sum, out.targets, Routing(out.aux_loss, out.expert_load) if is_routed else None
    )


def mean_routing(routings: Sequence[Routing | None]) -> Routing | None:
    """The mean over micro-batches, without gradients; left on the device until it is reported."""
    found = [routing for routing in routings if routing is not None]
    if not found:
        return None
    losses = torch.stack([routing.aux_loss.detach() for routing in found])
    return Routing(losses.mean(), torch.stack([routing.load for routing in found]).mean(0))


def routing_facts(routing: Routing | None, ranks: Ranks) -> dict[str, Any]:
    """`aux_loss` and the load of experts over all ranks, for a step line; reads the device.

    expert_load has the share of visits by expert, averaged over layers. There experts of the same
    number have nothing to do with each other, so expert_load_range has the least and the largest
    share of any expert of any layer, as a multiple of the uniform one.
    """
    if routing is None:
        return {}
    layers, experts = routing.load.shape
    own = [float(routing.aux_loss), *routing.load.flatten().tolist()]
    aux_loss, *shares = (number / ranks.world_size for number in ranks.sum_over_ranks(own))
    multiples = [share * experts for share in shares]
    return {
        "aux_loss": aux_loss,
        "expert_load": [sum(shares[n::experts]) / layers for n in range(experts)],
        "expert_load_range": [min(multiples), max(multiples)],
    }
