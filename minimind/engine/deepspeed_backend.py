"""What takes the steps under DeepSpeed: its engine, made in engine.py and only looked at here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from minimind.engine.collective_clock import CommunicationClock
from minimind.engine.deepspeed_logs import CollectivesLog
from minimind.engine.optimizer_state import ZeroState
from minimind.engine.optimizer_state_adapters import require_tested_deepspeed, zero_state
from minimind.engine.plain_backend import PlainBackend

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedBackend:
    """DeepSpeed reduces, clips and updates by itself, at the last micro-batch of a step."""

    def __init__(
        self, engine: Any, collectives: Any = None, log: CollectivesLog | None = None
    ) -> None:
        self.engine = engine
        self.collectives = collectives  # DeepSpeed's communication backend
        self._log = log
        self._clock: CommunicationClock | None = None
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

    def watch(self, clock: CommunicationClock) -> None:
        """Have DeepSpeed's collectives timed."""
        self._clock = clock
        clock.watch_deepspeed(self.collectives)

    def collectives_table(self) -> str:
        """What DeepSpeed's comms_logger tells since the last call; nothing where it is off."""
        return self._log.table() if self._log else ""

    def release(self) -> None:
        """Leave what of DeepSpeed belongs to the process as it was found."""
        if self._clock:
            self._clock.release()
        if self._log:
            self._log.release()

    def begin(self, lr: float) -> float:
        """Set the learning rate of the coming update, and return the one in force.

        A scheduler block in the file keeps its own: DeepSpeed advances it after every update.
        """
        if not self.module.training:  # after a validation: it goes through all modules
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


Backend = DeepSpeedBackend | PlainBackend
