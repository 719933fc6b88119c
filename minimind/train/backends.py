"""What takes the steps: DeepSpeed's engine, or a plain (DDP or single) model and its optimizer.

Both are made in engine.py and only looked at here; nothing is imported from their libraries. A
backend runs micro-batches through `forward` and `backward` inside `micro_batch`, and `update`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minimind.train.adapters import require_tested_deepspeed, zero_state
from minimind.train.deepspeed_config import Resolved
from minimind.train.optimizer import adamw
from minimind.train.zero_state import ZeroState

Groups = list[dict[str, Any]]
OptimizerOf = Callable[[Groups], torch.optim.Optimizer]
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: this rank's summed loss and target count, and the global norm.

    Tensors stay on the device; whoever reports them reads them.
    """

    loss_sum: torch.Tensor
    tokens: torch.Tensor
    grad_norm: float | torch.Tensor | None
    lr: float  # as the optimizer had it
    skipped_so_far: int  # steps dropped since step 0 for a non-finite gradient
    is_skipped: bool  # this one was, on every rank
    losses: tuple[torch.Tensor, ...]  # mean loss of each of this rank's micro-batches


class DeepSpeedBackend:
    """DeepSpeed reduces, clips and updates by itself, at the last micro-batch of a step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.module: nn.Module = engine.module
        self.forward = engine
        self.optimizer = engine.optimizer
        if type(self.optimizer).__name__ in ("FP16_UnfusedOptimizer", "FP16_Optimizer"):
            # Stage 0 in bf16: to allocate the moments DeepSpeed 0.19.8 takes a step of zero
            # gradients and keeps it: weights decayed, Adam's bias correction one step ahead.
            self.optimizer.optimizer.state.clear()
            self.optimizer.refresh_fp32_params()
        elif isinstance(self.optimizer, torch.optim.Optimizer):
            # Stage 0 in fp32 is the optimizer itself, and DeepSpeed would have it take any step.
            self.optimizer.register_step_pre_hook(_pass_over_if_overflowed)
        elif not getattr(self.optimizer, "compute_grad_norm", True):
            # Stages 1 and 2 look at the norm, in bf16 and fp16 at the gradients too. In fp32, told
            # to leave the norm out, they would look at neither.
            self.optimizer.check_grad_overflow = True

    @property
    def skipped_steps(self) -> int:
        """Steps without an update since step 0, for a gradient that was not finite."""
        return self.engine.skipped_steps

    def begin(self, lr: float) -> float:
        """Set the learning rate of the coming update, and return the one in force.

        A scheduler block in the file keeps its own: DeepSpeed advances it after every update.
        """
        self.engine.train()
        if self.engine.lr_scheduler is None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        return self.optimizer.param_groups[0]["lr"]

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """What the forward and backward pass of one micro-batch run in."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the gradients; DeepSpeed divides by the number of micro-batches."""
        self.engine.backward(loss)

    def update(self, is_last: bool) -> float | torch.Tensor | None:
        """Step; at the last micro-batch the global gradient norm before clipping."""
        norm = self._norm_of_replicated_gradients() if is_last else None
        if norm is not None:  # every rank has the same; the name is what DeepSpeed asks and counts
            self.optimizer.overflow = not bool(torch.isfinite(norm))
        self.engine.step()
        if is_last and norm is None:
            norm = self.engine.get_global_grad_norm()
        return norm

    def _norm_of_replicated_gradients(self) -> torch.Tensor | None:
        """The gradient norm where DeepSpeed keeps none: stage 0 in fp32, gradients in .grad."""
        engine = self.engine
        if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
            return None
        return torch.nn.utils.get_total_norm(
            [p.grad for p in engine.module.parameters() if p.grad is not None]
        )

    def state(self) -> ZeroState:
        """This rank's fp32 weights and moments; a CheckpointError where nothing knows them."""
        require_tested_deepspeed()
        return zero_state(self.engine)

    def counters(self) -> dict[str, Any]:
        """What DeepSpeed counts, and the state of its scheduler and loss scaler; plain numbers."""
        engine = self.engine
        scaler, scheduler = self._loss_scaler(), engine.lr_scheduler
        kept = {name: getattr(scaler, name) for name in SCALER} if scaler else {}
        return {
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "loss_scaler": kept,
            "scheduler_iteration": scheduler.last_batch_iteration if scheduler else None,
        }

    def _loss_scaler(self) -> Any:
        """DeepSpeed's, where it adjusts the scale; a scale that the file fixes is no state."""
        scaler = self.optimizer.loss_scaler if self.engine.fp16_enabled() else None
        return scaler if scaler and scaler.dynamic else None

    def restore_counters(self, saved: dict[str, Any]) -> None:
        """Set what `counters` returned, from any backend.

        Micro-batches and samples are counted anew from the steps: by their number DeepSpeed knows
        when a window is whole, and another split of the same global batch has another number.
        """
        engine = self.engine
        engine.global_steps = saved["global_steps"]
        engine.skipped_steps = saved["skipped_steps"]
        engine.global_samples = engine.global_steps * engine.train_batch_size()
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        scaler, kept = self._loss_scaler(), saved["loss_scaler"]
        if scaler and "_growth_tracker" in kept:  # torch's, which counts from the last overflow
            scaler.cur_scale, scaler.cur_iter = kept["cur_scale"], engine.global_steps
            scaler.last_overflow_iter = scaler.cur_iter - 1 - kept["_growth_tracker"]
        elif scaler and kept:
            for name in SCALER:
                setattr(scaler, name, kept[name])
        if engine.lr_scheduler is not None and saved["scheduler_iteration"] is not None:
            engine.lr_scheduler.step(saved["scheduler_iteration"])


def _pass_over_if_overflowed(optimizer: Any, *_: Any) -> None:
    """Leave torch's optimizer nothing to do: without gradients no weight, moment or count moves.

    Behind DeepSpeed's clipping, which fails where there are none.
    """
    if getattr(optimizer, "overflow", False):  # as `update` found
        for group in optimizer.param_groups:  # FusedAdam's zero_grad takes no set_to_none
            for p in group["params"]:
                p.grad = None


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
        self.torch_optimizer = self.masters.optimizer if self.masters else self.optimizer
        device = next(module.parameters()).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=run.dtype == "float16")
        self.micro_batches = run.accumulation_steps
        self.max_norm = run.grad_clip or float("inf")
        self.steps = 0
        self.skipped_steps = 0

    def begin(self, lr: float) -> float:
        """Set the learning rate of the coming update, and return it."""
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
        # The norm is of the reduced gradient: not finite on every rank, or on none.
        overflowed = not bool(torch.isfinite(norm))
        self.skipped_steps += overflowed
        if not overflowed:
            self.scaler.step(self.torch_optimizer)
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
            "skipped_steps": self.skipped_steps,
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
    """Keep complex buffers such as pos_cis out of what DDP sends: NCCL refuses complex numbers.

    By the names they have in `module`, which torch.compile prefixes with `_orig_mod.`. Every rank
    builds them from the configuration, so nothing is lost (pytorch issue 99652).
    """
    complex_buffers = [name for name, b in module.named_buffers() if b.is_complex()]
    # The name that DDP looks for; no attribute that a module declares.
    setattr(module, "_ddp_params_and_buffers_to_ignore", complex_buffers)  # noqa: B010 (likewise)


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


Backend = DeepSpeedBackend | PlainBackend
