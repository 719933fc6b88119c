"""The backend that steps a DeepSpeed engine, which build.py creates.

An update whose gradient norm is above a limit can be skipped.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from minimind.config.deepspeed.keys import BATCH
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.engine.adapters import require_tested_deepspeed, tensor_split, zero_state
from minimind.engine.clocks import CommunicationClock
from minimind.engine.flat_partitions import CHECKED, FlatPartitions, reason_against
from minimind.engine.master_weights import REPLICATED, reduce_in_place, replace_step
from minimind.engine.optimizers import MuonWithAdamW, shards_of
from minimind.engine.state import ZeroState, gradient_norm, layer_specs, sum_partial_gradients

TEST = "is_invalid_grad_norm"  # the test of the norm in each of DeepSpeed's optimizers, by name


class NormLimit:
    """Stands in for DeepSpeed's test of the gradient norm, and also fails it above `limit`.

    DeepSpeed then skips the update as it does for a norm that is not finite, on every rank. Its own
    `_global_grad_norm` is infinite afterwards, so the norm is kept here.
    """

    def __init__(self, optimizer: Any) -> None:
        self._module: Any = sys.modules[type(optimizer).__module__]
        self._test = getattr(self._module, TEST)
        setattr(self._module, TEST, self)
        # Stages 1 and 2 in bf16 test the norm only with this, and compute one only with the other.
        optimizer.check_grad_overflow = optimizer.compute_grad_norm = True
        self.limit = math.inf
        self.norm: float | torch.Tensor | None = None  # the last update's, if above the limit

    def __call__(self, norm: Any) -> bool:
        """Whether DeepSpeed has to skip the update."""
        value = float(norm)  # the only read of the device
        if self._test(value):
            return True
        self.norm = norm if value > self.limit else None
        return self.norm is not None

    def take(self) -> float | torch.Tensor | None:
        """The norm of the last update if it was skipped for being above the limit, else None."""
        norm, self.norm = self.norm, None
        return norm

    def release(self) -> None:
        """Give DeepSpeed its own test back."""
        setattr(self._module, TEST, self._test)


SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def configuration(resolved: ResolvedConfig) -> dict[str, Any]:
    """A copy of the resolved configuration for DeepSpeed, which writes its defaults into it.

    Its train_batch_size counts a row once per process that reads it: DeepSpeed 0.19.8 does not
    know sequence groups, and checks it so under tensor parallelism too, where it averages over
    data-parallel ranks all the same.
    """
    config, run = deepcopy(resolved.config), resolved.run
    if not config.get("comms_logger", {}).get("enabled"):
        config.pop("comms_logger", None)  # DeepSpeed 0.19.8 switches it on by any block
    if BATCH in config:
        config[BATCH] *= run.tensor_parallel * run.sequence_parallel
    if run.tensor_parallel > 1:
        config["tensor_parallel"]["partition_config"] = layer_specs()
    return config


class DeepSpeedBackend:
    """DeepSpeed reduces, clips and updates at the last micro-batch of a step."""

    def __init__(
        self, engine: Any, collectives: Any = None, limits_norm: bool = False, update: str = "auto"
    ) -> None:
        """With `limits_norm`, `update` skips gradients whose norm is above its limit.

        update: --zero_update.
        """
        self.engine = engine
        self.collectives = collectives  # DeepSpeed's communication backend
        self._clock: CommunicationClock | None = None
        self.module: nn.Module = engine.module
        self.forward = engine
        self.optimizer = engine.optimizer
        self._split = tensor_split(engine)
        if self._split:
            sum_partial_gradients(self.module, self._split.group)
        is_bare = isinstance(self.optimizer, torch.optim.Optimizer)
        if type(self.optimizer).__name__ in REPLICATED:
            # Stage 0 in bf16: to allocate the moments DeepSpeed 0.19.8 takes a step with zero
            # gradients and keeps it: weights are decayed, Adam's step count is one ahead.
            self.optimizer.optimizer.state.clear()
            self.optimizer.refresh_fp32_params()
        elif is_bare:
            # Stage 0 in fp32: the bare optimizer, which DeepSpeed steps with any gradient.
            self.optimizer.register_step_pre_hook(_skip_if_overflowed)
        elif not getattr(self.optimizer, "compute_grad_norm", True) or self._split:
            # Stages 1 and 2 check the norm, in bf16 and fp16 also the gradients. In fp32 without
            # the norm they would check neither, and tensor-parallel ranks leave whole weights of
            # all but the first out of the norm.
            self.optimizer.check_grad_overflow = True
        reason, self._partitions = "--zero_update", None
        if update == "auto" and (is_bare or type(self.optimizer).__name__ in REPLICATED):
            reason = replace_step(self.optimizer)
            reduce_in_place(engine)
        elif update == "auto" and not (reason := reason_against(self.optimizer)):
            # Its losses were compared with DeepSpeed's on CPUs only.
            checked = 0 if engine.device.type == "cpu" else CHECKED
            self._partitions = FlatPartitions(self.optimizer, checked)
        self._reason = reason
        base = getattr(self.optimizer, "optimizer", self.optimizer)
        self._norm_limit = NormLimit(self.optimizer) if limits_norm and not is_bare else None
        self._spikes = 0  # updates that the limit skipped, since the engine was built or resumed
        self._muon = base if isinstance(base, MuonWithAdamW) else None
        if self._muon:
            names = self._muon.muon_names
            self._muon.shards = shards_of(engine, collectives, self.state(), names)

    @property
    def zero_update(self) -> str:
        """Who updates under ZeRO, as the start says it."""
        reason = self._partitions.fault if self._partitions else self._reason
        if reason:
            return f"by DeepSpeed ({reason})"
        return "by flat partitions" if self._partitions else "by multi-tensor kernels"

    @property
    def waits(self) -> bool:
        """Whether a backward pass ends by a wait for the device, as DeepSpeed 0.19.8 has it."""
        if self._partitions and not self._partitions.fault:
            return False
        is_stage_3 = self.engine.zero_optimization_partition_weights()
        return is_stage_3 or getattr(self.optimizer, "overlap_comm", False)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since step 0 because of a gradient that is not finite."""
        return self.engine.skipped_steps - self._spikes

    def watch(self, clock: CommunicationClock) -> None:
        """Time DeepSpeed's collectives."""
        self._clock = clock
        clock.watch_deepspeed(self.collectives)

    def release(self) -> None:
        """Restore process-wide objects of DeepSpeed, and let weights and moments be freed."""
        for hook in getattr(self.optimizer, "_grad_acc_hooks", ()):
            hook.remove()  # Python does not collect what a weight's hook refers to
        if self._clock:
            self._clock.release()
        if self._norm_limit:
            self._norm_limit.release()

    def begin(self, lr: float) -> float:
        """Set the learning rate of the next update; return the one in force.

        A scheduler block in the file determines it instead, advanced after every update.
        """
        if not self.module.training:  # after an evaluation; train() walks all modules
            self.engine.train()
        if self.engine.lr_scheduler is None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
        return self.optimizer.param_groups[0]["lr"]

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Context of the forward and backward pass of one micro-batch."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients; DeepSpeed divides by the number of micro-batches."""
        self.engine.backward(loss)

    def update(self, is_last: bool, norm_limit: float = math.inf) -> float | torch.Tensor | None:
        """Step; return the global gradient norm before clipping at the last micro-batch."""
        norm = self._norm_of_replicated_gradients() if is_last else None
        if norm is not None:  # the same on every rank; DeepSpeed reads and counts `overflow`
            value = float(norm)  # the only read of the device
            is_finite = math.isfinite(value)
            self.optimizer.overflow = not (is_finite and value <= norm_limit)
            self._spikes += is_finite and self.optimizer.overflow
        if self._norm_limit:
            self._norm_limit.limit = norm_limit
        self.engine.step()
        if is_last and norm is None:
            above = self._norm_limit.take() if self._norm_limit else None
            self._spikes += above is not None
            norm = self.engine.get_global_grad_norm() if above is None else above
        return norm

    def _norm_of_replicated_gradients(self) -> torch.Tensor | None:
        """Gradient norm at stage 0 in fp32, where DeepSpeed computes none."""
        engine = self.engine
        if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
            return None
        return gradient_norm(engine.module, self._split)

    def state(self) -> ZeroState:
        """This rank's fp32 weights and moments; raise CheckpointError for unknown optimizers."""
        require_tested_deepspeed()
        return zero_state(self.engine)

    def counters(self) -> dict[str, Any]:
        """DeepSpeed's counters and the state of scheduler and loss scaler, as plain numbers."""
        engine = self.engine
        scaler, scheduler = self._loss_scaler(), engine.lr_scheduler
        values = {name: getattr(scaler, name) for name in SCALER} if scaler else {}
        return {
            "global_steps": engine.global_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scaler": values,
            "scheduler_iteration": scheduler.last_batch_iteration if scheduler else None,
            "muon_stack": self._muon.stack if self._muon else None,
        }

    def _loss_scaler(self) -> Any:
        """DeepSpeed's dynamic loss scaler; None if the scale is fixed by the file."""
        scaler = self.optimizer.loss_scaler if self.engine.fp16_enabled() else None
        return scaler if scaler and scaler.dynamic else None

    def restore_counters(self, saved: dict[str, Any]) -> None:
        """Restore what `counters` of any backend returned.

        Micro-batches and samples are derived from the steps: DeepSpeed uses their number to find
        the end of an accumulation, and it differs with another split of the global batch.
        """
        engine = self.engine
        engine.global_steps = saved["global_steps"]
        engine.skipped_steps, self._spikes = saved["skipped_steps"], 0
        engine.global_samples = engine.global_steps * engine.train_batch_size()
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        scaler, kept = self._loss_scaler(), saved["loss_scaler"]
        if scaler and "_growth_tracker" in kept:  # torch's tracker counts from the last overflow
            scaler.cur_scale, scaler.cur_iter = kept["cur_scale"], engine.global_steps
            scaler.last_overflow_iter = scaler.cur_iter - 1 - kept["_growth_tracker"]
        elif scaler and kept:
            for name in SCALER:
                setattr(scaler, name, kept[name])
        if engine.lr_scheduler is not None and saved["scheduler_iteration"] is not None:
            engine.lr_scheduler.step(saved["scheduler_iteration"])
        if self._muon:
            self._muon.stack = saved["muon_stack"]


def _skip_if_overflowed(optimizer: Any, *_: Any) -> None:
    """Step pre-hook: drop the gradients after an overflow, so that the step changes nothing.

    It runs after DeepSpeed's clipping, which fails without gradients.
    """
    if getattr(optimizer, "overflow", False):  # set by `update`
        for group in optimizer.param_groups:  # FusedAdam's zero_grad takes no set_to_none
            for p in group["params"]:
                p.grad = None
