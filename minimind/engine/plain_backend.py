"""What takes the steps without DeepSpeed: a plain (DDP or single) model and its optimizer.

Made in engine.py; nothing of Accelerate is imported. A backend runs micro-batches through `forward`
and `backward` inside `micro_batch`, and `update`s; deepspeed_backend.py has the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minimind.config.deepspeed.resolve import Resolved
from minimind.engine.collective_clock import CommunicationClock
from minimind.engine.optimizer import adamw
from minimind.engine.optimizer_state import ZeroState
from minimind.engine.optimizer_state_adapters import zero_state
from minimind.model.experts import Routing

Groups = list[dict[str, Any]]
OptimizerOf = Callable[[Groups], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: this rank's losses and target counts, and the global norm.

    Tensors stay on the device; whoever reports them reads them.
    """

    loss_sums: tuple[torch.Tensor, ...]  # over the targets of each of its micro-batches
    targets: tuple[torch.Tensor, ...]
    grad_norm: float | torch.Tensor | None
    lr: float  # as the optimizer had it
    skipped_so_far: int | torch.Tensor  # steps dropped since step 0 for a non-finite gradient
    is_skipped: bool | torch.Tensor  # this one was, on every rank
    routing: Routing | None = None  # of experts, by layer; mean over this rank's micro-batches

    @property
    def loss_sum(self) -> torch.Tensor:
        """Over all of them, in float64."""
        return reduce(torch.add, (part.double() for part in self.loss_sums))

    @property
    def tokens(self) -> torch.Tensor:
        """Targets of all of them."""
        return reduce(torch.add, self.targets)


class MasterWeights:
    """fp32 copies of bf16 or fp16 weights, and the optimizer that updates them in their place.

    What DeepSpeed does, so that a dtype means the same with and without it: bf16 losses agree.
    """

    def __init__(self, groups: Groups, optimizer: OptimizerOf) -> None:
        self.fp16_groups = [list(group["params"]) for group in groups]
        self.fp32_groups = [[p.detach().float() for p in params] for params in self.fp16_groups]
        masters = zip(groups, self.fp32_groups, strict=True)
        self.optimizer = optimizer([{**group, "params": params} for group, params in masters])

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for lows, masters in zip(self.fp16_groups, self.fp32_groups, strict=True):
            yield from zip(lows, masters, strict=True)

    def take_gradients(self) -> None:
        """Move the gradients from the weights to their fp32 copies."""
        for low, master in self._pairs():
            master.grad = None if low.grad is None else low.grad.float()
            low.grad = None

    def put_weights(self) -> None:
        """Round the fp32 copies into the weights."""
        for low, master in self._pairs():
            low.data.copy_(master)


class PlainBackend:
    """A model without DeepSpeed, under DDP or alone, with an optimizer of torch's."""

    def __init__(
        self, forward: nn.Module, module: nn.Module, resolved: Resolved, groups: Groups
    ) -> None:
        run = resolved.run
        is_low = run.dtype != "float32"
        self.module = module
        self.forward = forward
        self.masters = MasterWeights(groups, partial(adamw, run=run)) if is_low else None
        self.optimizer: Any = self.masters or adamw(groups, run)
        self.torch_optimizer: Any = self.masters.optimizer if self.masters else self.optimizer
        device = next(module.parameters()).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=run.dtype == "float16")
        self.micro_batches = run.accumulation_steps
        self.max_norm = run.grad_clip or float("inf")
        self.steps = 0
        self.skipped_steps: int | torch.Tensor = 0
        self.state().start()

    def watch(self, clock: CommunicationClock) -> None:
        """Have DDP's reductions timed."""
        if isinstance(self.forward, DistributedDataParallel):
            clock.watch_ddp(self.forward)

    def collectives_table(self) -> str:
        """Nothing: DeepSpeed's comms_logger is not here."""
        return ""

    def release(self) -> None:
        """Do nothing: what is timed goes with the model."""

    def begin(self, lr: float) -> float:
        """Set the learning rate of the coming update, and return it."""
        if not self.module.training:  # after a validation: it goes through all modules
            self.forward.train()
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        return lr

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced over the ranks with the last micro-batch only."""
        if is_last or not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        return self.forward.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's share to the gradients."""
        self.scaler.scale(loss / self.micro_batches).backward()

    def update(self, is_last: bool) -> torch.Tensor | None:
        """Clip and step at the last micro-batch; the gradient norm before clipping."""
        if not is_last:
            return None
        if self.masters:
            self.masters.take_gradients()
        self.scaler.unscale_(self.torch_optimizer)
        updated = [p for group in self.torch_optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(updated, self.max_norm)
        # The norm is of the reduced gradient: not finite on every rank, or on none. Fused AdamW
        # leaves weights, moments and count alone by a number on the device, as GradScaler has it.
        is_skipped = ~torch.isfinite(norm)
        self.skipped_steps = self.skipped_steps + is_skipped
        self.torch_optimizer.found_inf = is_skipped.float()
        self.torch_optimizer.step()
        self.scaler.update()  # learns from what unscale_ found
        self.torch_optimizer.zero_grad()
        if self.masters:
            self.masters.put_weights()
        self.steps += 1
        return norm

    def state(self) -> ZeroState:
        """The fp32 weights and moments, of which every rank has all."""
        return zero_state(self)

    def counters(self) -> dict[str, Any]:
        """What `DeepSpeedBackend.counters` returns, with torch's loss scaler."""
        kept = self.scaler.state_dict()  # empty unless it scales
        return {
            "global_steps": self.steps,
            "skipped_steps": int(self.skipped_steps),
            "loss_scaler": {**kept, "cur_scale": kept["scale"]} if kept else {},
            "scheduler_iteration": None,
        }

    def restore_counters(self, saved: dict[str, Any]) -> None:
        """Set what `counters` returned, from any backend."""
        self.steps, self.skipped_steps = saved["global_steps"], saved["skipped_steps"]
        kept = saved["loss_scaler"]
        if self.scaler.is_enabled() and kept:
            own = self.scaler.state_dict()
            # DeepSpeed goes on counting where torch begins anew once the scale has grown.
            stable = kept.get("cur_iter", 0) - kept.get("last_overflow_iter", -1) - 1
            told = {"scale": kept["cur_scale"], "_growth_tracker": stable % own["growth_interval"]}
            self.scaler.load_state_dict(own | told | {k: kept[k] for k in own if k in kept})


def prepare_for_ddp(module: nn.Module) -> None:
    """Keep buffers that are no state out of what DDP sends: NCCL refuses complex pos_cis.

    By the names they have in `module`, which torch.compile prefixes with `_orig_mod.`. Every rank
    builds them from the configuration, so nothing is lost (pytorch issue 99652).
    """
    state = module.state_dict()
    tables = [name for name, _ in module.named_buffers() if name not in state]
    # The name that DDP looks for; no attribute that a module declares.
    setattr(module, "_ddp_params_and_buffers_to_ignore", tables)  # noqa: B010 (likewise)


def unused_parameters(model: nn.Module) -> list[str]:
    """Names of trainable parameters that a forward pass leaves without a gradient.

    DDP waits for every gradient, so it must be told when some never come; searching for them
    costs every step, so it is told only then. Found by one row of two tokens.
    """
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    model(input_ids=tokens).logits.sum().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    model.zero_grad(set_to_none=True)
    return unused
