"""The loss of a micro-batch, routing metrics, and torch.compile of the model.

Inputs and targets are (B, T) token ids on the model's device: a row without its last and without
its first token. A token t of a row that is no target is stored as ~t, which is negative: in
fine-tuning, where ~(t + START) also starts a conversation, and in rows of `PADDING`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

import torch

from minimind.config.run_config import RunConfig
from minimind.data.shards.conversation_shards import START
from minimind.model.experts import Routing
from minimind.model.loss import IGNORED, mean_with_nan_grads
from minimind.model.sizes import LOSS_CHUNK
from minimind.runtime.collectives import Ranks
from minimind.runtime.device import HOST, device_kind
from minimind.runtime.terminal import phase

PADDING = ~0  # a token that is no target


def loss_chunk_positions(run: RunConfig) -> int:
    """Number of positions whose logits are computed at a time; 0: all."""
    return LOSS_CHUNK if run.loss == "chunked" else 0


def eval_chunk_positions(run: RunConfig, device: torch.device) -> int:
    """The same for validation, which is not compiled: on a GPU always in parts."""
    is_ours = run.hugging_face is None
    return LOSS_CHUNK if device_kind(device) is not HOST and is_ours else loss_chunk_positions(run)


@dataclass(frozen=True)
class MicroBatchLoss:
    """Summed cross-entropy and number of targets of a micro-batch, or of its rows; routing."""

    loss_sum: torch.Tensor
    tokens: torch.Tensor
    routing: Routing | None  # None for a dense model and in evaluation

    @property
    def total(self) -> torch.Tensor:
        """The loss of the backward pass: nats per token plus the balance loss of experts.

        Both are means over rows of equal length, so their mean over micro-batches and ranks is the
        mean over the rows of a step, however it is split.
        """
        return self.divided_by(self.tokens)

    def divided_by(self, targets: torch.Tensor) -> torch.Tensor:
        """The same with the summed cross-entropy divided by `targets`, a positive scalar."""
        if self.routing is None:
            return mean_with_nan_grads(self.loss_sum, targets)
        balance = self.routing.aux_loss
        return mean_with_nan_grads(self.loss_sum, targets, also=balance) + balance


def token_ids(rows: torch.Tensor) -> torch.Tensor:
    """Return the ids of tokens; non-targets are stored negative."""
    return torch.where(rows >= 0, rows, ~rows % START)


@dataclass(frozen=True)
class ModelInputs:
    """What the model reads of a micro-batch, each (B, T)."""

    ids: torch.Tensor
    targets: torch.Tensor  # may be IGNORED
    starts: torch.Tensor | None = None  # bool, of conversations; None: the model finds documents

    @classmethod
    def of_text(cls, rows: torch.Tensor) -> Self:
        """Inputs of rows (B, T + 1) of text, whose tokens are all targets."""
        return cls(rows[:, :-1], rows[:, 1:])

    @classmethod
    def of_marked(cls, rows: torch.Tensor, has_starts: bool) -> Self:
        """Inputs of rows (B, T + 1) with negative tokens, of conversations if `has_starts`."""
        targets = torch.where(rows >= 0, rows, IGNORED)
        starts = ~rows[:, :-1] >= START if has_starts else None
        return cls(token_ids(rows)[:, :-1], targets[:, 1:], starts)


def compute_loss(
    forward: Any, inputs: ModelInputs, loss_chunk_size: int = 0, by_row: bool = False
) -> MicroBatchLoss:
    """Compute the loss with `forward`, the model wrapped by its backend; `by_row`: of each row.

    Logits are computed for `loss_chunk_size` positions at a time; 0: for all. The loss is part of
    the model, so that it is compiled with the model.
    """
    more: dict[str, Any] = {"loss_by_row": True} if by_row else {}
    if inputs.starts is not None:
        more["document_starts"] = inputs.starts
    out = forward(
        input_ids=inputs.ids, shift_labels=inputs.targets, loss_chunk_size=loss_chunk_size, **more
    )
    routing = None if out.aux_loss is None else Routing(out.aux_loss, out.expert_load)
    return MicroBatchLoss(out.loss_sum, out.targets, routing)


def mean_routing(routings: Sequence[Routing | None]) -> Routing | None:
    """Mean over micro-batches, detached, on the device."""
    present = [routing for routing in routings if routing is not None]
    if not present:
        return None
    losses = torch.stack([routing.aux_loss.detach() for routing in present])
    return Routing(losses.mean(), torch.stack([routing.load for routing in present]).mean(0))


def routing_fields(routing: Routing | None, ranks: Ranks) -> dict[str, Any]:
    """Fields of a step event: `aux_loss` and the load of experts over all ranks (collective).

    expert_load is the share of visits per expert, averaged over layers. expert_load_range is the
    smallest and largest share of any expert in any layer, as a multiple of the uniform share.
    """
    if routing is None:
        return {}
    layers, experts = routing.load.shape
    local = [float(routing.aux_loss), *routing.load.flatten().tolist()]
    aux_loss, *shares = (number / ranks.world_size for number in ranks.sum_over_ranks(local))
    multiples = [share * experts for share in shares]
    return {
        "aux_loss": aux_loss,
        "expert_load": [sum(shares[n::experts]) / layers for n in range(experts)],
        "expert_load_range": [min(multiples), max(multiples)],
    }


# The option of torch 2.10 to 2.13. Versions without it use more memory, and ranks that compile the
# backward pass for different times wait for --dist_timeout.
EAGER_BACKWARD = "force_non_lazy_backward_lowering"
ORIGINAL = "_torchdynamo_orig_callable"  # attribute of a compiled function
# The choice of attention kernels; its arguments are in the graph, and so in the key of torch's
# cache. Without this mark every block on a GPU bypasses the cache of AOTAutograd.
CACHEABLE = dict.fromkeys(
    ("torch.nn.attention._sdpa_kernel", "torch.nn.attention._backend_from_string"), "1"
)


# One C++ file for each graph instead of one for each kernel, most of whose time is that of the
# headers; and no trial of the vector instructions that the processor reports.
CPU_OPTIONS: dict[str, Any] = {"cpp_wrapper": True, "cpp.vec_isa_ok": True}


def compile_model(model: Any, run: RunConfig, device: str) -> None:
    """Compile methods of the model in place if --compile is on; names of weights do not change.

    `device` is cpu or cuda, where the model will be.

    Shapes are static, because rows are packed. Hooks are not compiled: DeepSpeed registers timers
    there that synchronize the GPU, which torch 2.13 cannot compile. With --deterministic no kernel
    is selected by timing, since another choice after a resume would sum in another order.
    """
    if run.compile != "on":
        return
    from torch._inductor import config

    marked = config.unsafe_marked_cacheable_functions
    config.unsafe_marked_cacheable_functions = marked | CACHEABLE
    options = CPU_OPTIONS if device == "cpu" else {}
    options = options | ({"deterministic": True} if run.deterministic else {})
    for module, name in compiled_methods(model):
        compiled = torch.compile(getattr(module, name), dynamic=False, options=options or None)
        setattr(module, name, compiled)
    is_whole = hasattr(model.forward, ORIGINAL)
    model.forward = with_compile_message(with_compiler_settings(model.forward, is_whole))


def compiled_methods(model: Any) -> list[tuple[Any, str]]:
    """Modules and their methods that are compiled: those the model names, else its forward."""
    return getattr(model, "compiled_methods", lambda: [(model, "forward")])()


def with_compile_message(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Print a line on rank 0 if the first call, which compiles, takes long."""
    has_run = False

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            return forward(*args, **kwargs)
        has_run = True
        with phase("compiling the model, which takes tens of seconds unless torch has it cached"):
            return forward(*args, **kwargs)

    return called


def with_compiler_settings(forward: Callable[..., Any], is_whole: bool) -> Callable[..., Any]:
    """Run `forward`, whose first call compiles, under settings of torch's compiler.

    The backward graph is compiled with the forward graph, so that a rank has compiled all before
    its first collective. By default torch compiles it at its first use, when all saved activations
    are in memory; what the compiler allocates then fragments the memory of a CPU for good. Compiled
    early it may not support backward(retain_graph=True), which is not used here. Under DDP torch
    splits a graph where a bucket of gradients is full, which only a model compiled as a whole needs
    to overlap the reduction.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    settings = [] if is_whole else [dynamo.patch(optimize_ddp=False)]
    if hasattr(functorch, EAGER_BACKWARD):
        settings.append(functorch.patch({EAGER_BACKWARD: True}))

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:  # not for other code of the process
            for setting in settings:
                stack.enter_context(setting)
            return forward(*args, **kwargs)

    return called


class CompileClock:
    """Time that this process spends in torch.compile, as counted by torch."""

    def __init__(self, run: RunConfig) -> None:
        self._is_on = run.compile == "on"
        self._last = self._seconds()

    def take(self) -> float:
        """Seconds of compilation since the last call or the start."""
        before, self._last = self._last, self._seconds()
        return self._last - before

    def _seconds(self) -> float:
        if not self._is_on:
            return 0.0
        from torch._dynamo.utils import calculate_time_spent

        return calculate_time_spent()["total_wall_time"]


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the model uncompiled inside the block; flex attention stays compiled."""
    methods = [(module, name, getattr(module, name)) for module, name in compiled_methods(model)]
    compiled = [entry for entry in methods if hasattr(entry[2], ORIGINAL)]
    for module, name, method in compiled:
        setattr(module, name, getattr(method, ORIGINAL))
    try:
        yield
    finally:
        for module, name, method in compiled:
            setattr(module, name, method)
