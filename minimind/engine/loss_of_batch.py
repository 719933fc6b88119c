"""What a micro-batch is trained on, apart from what is told of it.

Inputs and targets are (B, T) token ids on the model's device: of each row all but the last, and all
but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from minimind.config.run_config import RunConfig
from minimind.model.experts import Routing
from minimind.model.loss import mean_with_nan_grads
from minimind.runtime.collectives import Ranks
from minimind.runtime.terminal import phase

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
            return mean_with_nan_grads(self.loss_sum, self.tokens)
        balance = self.routing.aux_loss
        return mean_with_nan_grads(self.loss_sum, self.tokens, also=balance) + balance


def objective_of(
    forward: Any, inputs: torch.Tensor, targets: torch.Tensor, loss_chunk_size: int = 0
) -> Objective:
    """The objective of `forward`, the model as its backend wraps it.

    Logits are computed for `loss_chunk_size` positions at a time; 0: for all. The loss is part of
    the model, so that it is compiled with the model.
    """
    out = forward(input_ids=inputs, shift_labels=targets, loss_chunk_size=loss_chunk_size)
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


# How torch 2.10 to 2.13 call it. Where another one does not, there is more memory in use.
AHEAD = "force_non_lazy_backward_lowering"


def compile_within(model: PreTrainedModel, run: RunConfig, device: str) -> None:
    """Have the model compiled at its first micro-batch, in place: no name of a weight changes.

    Shapes are static, for rows are packed: every micro-batch has the same. Its forward is, and not
    the call that goes through its hooks: DeepSpeed hangs its timers there, which wait for the GPU,
    and torch 2.13 cannot compile that. Whatever wraps the model is not compiled either.

    With --deterministic no kernel is chosen by how long it took: on a GPU another choice, after a
    resume, would sum in another order.

    On a CPU the backward pass is made `ahead`; on GPUs that was not measured.
    """
    if run.compile != "on":
        return
    options: dict[str, Any] | None = {"deterministic": True} if run.deterministic else None
    forward = torch.compile(model.forward, dynamic=False, options=options)
    model.forward = announced(ahead(forward) if device == "cpu" else forward)


def announced(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with a line on rank 0 when its first call, which compiles, takes long."""
    has_run = False

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            return forward(*args, **kwargs)
        has_run = True
        with phase("compiling the model"):
            return forward(*args, **kwargs)

    return called


def ahead(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled `forward`, whose first call makes the graph of its backward pass too.

    torch makes that at its first use, when all that is kept for it is in memory. What the compiler
    leaves behind would lie between, for good, and later steps would not fit the gaps. Made so, it
    may refuse backward(retain_graph=True), which nothing here asks for.
    """
    from torch._functorch import config

    if not hasattr(config, AHEAD):
        return forward
    both = config.patch({AHEAD: True})

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        with both:  # and not for whatever else the process compiles
            return forward(*args, **kwargs)

    return called


class CompileClock:
    """How long this process has been making graphs, by torch's own count."""

    def __init__(self, run: RunConfig) -> None:
        self._is_on = run.compile == "on"
        self._told = self._seconds()

    def take(self) -> float:
        """Seconds since the last call, or the start; 0 where nothing was compiled."""
        told, self._told = self._told, self._seconds()
        return self._told - told

    def _seconds(self) -> float:
        if not self._is_on:
            return 0.0
        from torch._dynamo.utils import calculate_time_spent

        return calculate_time_spent()["total_wall_time"]


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the model as it is written, compiled or not; whatever else is compiled stays so.

    Document masks on a GPU are: attention that is compiled by itself.
    """
    found = model.forward
    if not hasattr(found, "_torchdynamo_orig_callable"):
        yield
        return
    model.forward = found._torchdynamo_orig_callable
    try:
        yield
    finally:
        model.forward = found
