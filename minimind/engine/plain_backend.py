"""The backend without DeepSpeed: a DDP or single-process model and its optimizer.

Created by build.py. A backend runs `forward` and `backward` of micro-batches inside `micro_batch`,
then `update`; deepspeed_backend.py has the same interface.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.engine.adapters import zero_state
from minimind.engine.clocks import CommunicationClock
from minimind.engine.master_weights import Groups, MasterWeights
from minimind.engine.optimizers import MuonWithAdamW, optimizer_of
from minimind.engine.state import ZeroState
from minimind.runtime.collectives import lost_peers
from minimind.runtime.device import device_kind


class PlainBackend:
    """A model under DDP or in a single process, with an optimizer of torch's."""

    zero_update = ""
    waits = False  # for the device at the end of a backward pass

    def __init__(
        self, forward: nn.Module, module: nn.Module, resolved: ResolvedConfig, groups: Groups
    ) -> None:
        run = resolved.run
        is_low = run.weight_dtype != "float32"
        self.module = module
        self.forward = forward
        self.masters = MasterWeights.of(groups, partial(optimizer_of, run=run)) if is_low else None
        self.optimizer: Any = self.masters or optimizer_of(groups, run)
        self.torch_optimizer: Any = self.masters.optimizer if self.masters else self.optimizer
        device = next(module.parameters()).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=run.dtype == "float16")
        self.micro_batches = run.accumulation_steps
        self.max_norm = run.grad_clip or float("inf")
        self.steps = 0
        self.skipped_steps: int | torch.Tensor = 0
        self.state().start()
        if isinstance(forward, DistributedDataParallel):
            order_buckets(forward)

    def watch(self, clock: CommunicationClock) -> None:
        """Time DDP's reductions."""
        if isinstance(self.forward, DistributedDataParallel):
            clock.watch_ddp(self.forward)

    def release(self) -> None:
        """Do nothing: hooks end with the model."""

    def begin(self, lr: float) -> float:
        """Set the learning rate of the next update and return it."""
        if not self.module.training:  # after an evaluation; train() walks all modules
            self.forward.train()
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch: gradients are reduced with the last one only."""
        if is_last or not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        return self.forward.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a micro-batch."""
        self.scaler.scale(loss / self.micro_batches).backward()

    def update(self, is_last: bool, norm_limit: float = math.inf) -> torch.Tensor | None:
        """Clip and step at the last micro-batch; return the gradient norm before clipping.

        The update is skipped if the norm is not finite or above `norm_limit`.
        """
        if not is_last:
            return None
        if self.masters:
            self.masters.take_gradients()
        self.scaler.unscale_(self.torch_optimizer)
        updated = [p for group in self.torch_optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(updated, self.max_norm)
        # The norm is that of the reduced gradient, so it is finite on all ranks or on none. Fused
        # AdamW and SGD skip the update by a flag on the device (found_inf, as set by GradScaler);
        # Muon and Lion read the flag.
        is_skipped = ~torch.isfinite(norm)
        self.skipped_steps = self.skipped_steps + is_skipped
        if norm_limit < math.inf:
            is_skipped = is_skipped | (norm > norm_limit)
        self.torch_optimizer.found_inf = is_skipped.float()
        if device_kind(norm.device).skips_by_flag or not is_skipped:
            self.torch_optimizer.step()
        self.scaler.update()  # it uses the overflow that unscale_ found
        self.torch_optimizer.zero_grad()
        if self.masters:
            self.masters.put_weights()
        self.steps += 1
        return norm

    def state(self) -> ZeroState:
        """The fp32 weights and moments, replicated on every rank."""
        return zero_state(self)

    def counters(self) -> dict[str, Any]:
        """The same as `DeepSpeedBackend.counters`, with torch's loss scaler."""
        scaler, muon = self.scaler.state_dict(), self.torch_optimizer
        return {
            "global_steps": self.steps,
            "skipped_steps": int(self.skipped_steps),
            # torch's state is empty if disabled
            "loss_scaler": {**scaler, "cur_scale": scaler["scale"]} if scaler else {},
            "scheduler_iteration": None,
            "muon_stack": muon.stack if isinstance(muon, MuonWithAdamW) else None,
        }

    def restore_counters(self, saved: dict[str, Any]) -> None:
        """Restore what `counters` of any backend returned."""
        self.steps, self.skipped_steps = saved["global_steps"], saved["skipped_steps"]
        if isinstance(self.torch_optimizer, MuonWithAdamW):
            self.torch_optimizer.stack = saved["muon_stack"]
        kept = saved["loss_scaler"]
        if self.scaler.is_enabled() and kept:
            state = self.scaler.state_dict()
            # DeepSpeed keeps counting where torch restarts after the scale has grown.
            stable = kept.get("cur_iter", 0) - kept.get("last_overflow_iter", -1) - 1
            tracker = stable % state["growth_interval"]
            restored = {"scale": kept["cur_scale"], "_growth_tracker": tracker}
            self.scaler.load_state_dict(state | restored | {k: kept[k] for k in state if k in kept})


def prepare_for_ddp(module: nn.Module) -> None:
    """Exclude non-persistent buffers from DDP's broadcast: NCCL refuses complex pos_cis.

    Every rank builds them from the configuration. Names are those in `module`, which torch.compile
    prefixes with `_orig_mod.` (pytorch issue 99652).
    """
    state = module.state_dict()
    tables = [name for name, _ in module.named_buffers() if name not in state]
    # The attribute that DDP reads; modules do not declare it.
    setattr(module, "_ddp_params_and_buffers_to_ignore", tables)  # noqa: B010 (not declared)


def unused_parameters(model: nn.Module) -> list[str]:
    """Names of trainable parameters that get no gradient, found with one row of two tokens.

    DDP waits for every gradient unless it searches for unused parameters, which costs every step.
    """
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    model(input_ids=tokens).logits.sum().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    model.zero_grad(set_to_none=True)
    return unused


def order_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP order its buckets as it does after its first backward pass (collective).

    On more than two ranks a sum depends on the place of its terms in a bucket, so that the first
    step of a resumed run would differ from that of the unbroken one. DDP that searches for unused
    parameters keeps its first buckets.
    """
    if ddp.find_unused_parameters:
        return
    with lost_peers():
        ddp.reducer.prepare_for_backward([])
        # Gradients become ready from the last weight to the first, nearly as in the model.
        torch.stack([p.sum() for p in ddp.parameters() if p.requires_grad]).sum().backward()
    ddp.zero_grad(set_to_none=True)
