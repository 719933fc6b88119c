"""fp32 copies of low-precision weights, updated in multi-tensor kernels.

`MasterWeights` is the optimizer of a backend without DeepSpeed; `ReplicatedStep` takes the place of
DeepSpeed's own step at stage 0 in bf16 and fp16, whose copies are laid out alike.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from minimind.engine.adapters import TESTED, untested_deepspeed
from minimind.engine.optimizers import multi_tensor

_copy_each = multi_tensor._foreach_copy_
# Elements per multi-tensor copy: one kernel on a GPU instead of one per weight, without a second
# copy of all gradients in memory.
COPIED_AT_ONCE = 2**24
Groups = list[dict[str, Any]]
OptimizerOf = Callable[[Groups], torch.optim.Optimizer]


def copy_gradients(parts: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    """Copy gradients into their parts of a vector at once; a part without one becomes zero."""
    pairs = list(zip(parts, grads, strict=True))
    if missing := [part for part, grad in pairs if grad is None]:
        multi_tensor._foreach_zero_(missing)
    if given := [grad for grad in grads if grad is not None]:
        _copy_each([part.view(grad.shape) for part, grad in pairs if grad is not None], given)


class MasterWeights:
    """fp32 copies of bf16 or fp16 weights, and the optimizer that updates the copies.

    As in DeepSpeed, so that losses of a dtype agree with and without it.
    """

    def __init__(
        self, lows: list[list[torch.Tensor]], masters: list[list[torch.Tensor]], optimizer: Any
    ) -> None:
        """Weights and their fp32 copies by group; `optimizer` has the copies."""
        self.fp16_groups = lows
        self.fp32_groups = masters
        self.optimizer = optimizer

    @classmethod
    def of(cls, groups: Groups, optimizer: OptimizerOf) -> MasterWeights:
        """Copies of the weights of `groups`, for a new optimizer."""
        lows = [list(group["params"]) for group in groups]
        masters = [[p.detach().float() for p in params] for params in lows]
        updated = [{**g, "params": params} for g, params in zip(groups, masters, strict=True)]
        return cls(lows, masters, optimizer(updated))

    def _batches(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Weights with their fp32 copies, COPIED_AT_ONCE elements at a time."""
        batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        elements = 0
        for lows, masters in zip(self.fp16_groups, self.fp32_groups, strict=True):
            for low, master in zip(lows, masters, strict=True):
                if batch and elements + low.numel() > COPIED_AT_ONCE:
                    yield batch
                    batch, elements = [], 0
                batch.append((low, master))
                elements += low.numel()
        yield batch

    def take_gradients(self) -> None:
        """Move the gradients from the weights to their fp32 copies."""
        for batch in self._batches():
            lows: list[torch.Tensor] = []
            grads: list[torch.Tensor] = []
            for low, master in batch:
                master.grad = None
                if low.grad is not None:
                    master.grad = torch.empty_like(master)
                    lows.append(low.grad)
                    grads.append(master.grad)
                low.grad = None
            if grads:
                _copy_each(grads, lows)

    @torch.no_grad()
    def put_weights(self) -> None:
        """Round the fp32 copies into the weights."""
        for batch in self._batches():
            lows, masters = zip(*batch, strict=True)
            _copy_each(lows, masters)


# What the steps below use of DeepSpeed's wrappers, by class, and of their modules.
OF_BOTH = (
    *("fp16_groups", "optimizer", "overflow_checker", "mpu"),
    *("_skip_invalid_grad_norm", "_update_scale", "unscale_and_clip_grads"),
)
REPLICATED = {
    "FP16_UnfusedOptimizer": (*OF_BOTH, "fp32_groups", "fused_lamb_legacy"),
    "FP16_Optimizer": (
        *(*OF_BOTH, "fp16_groups_flat", "fp32_groups_flat", "loss_scale_config"),
        *("fused_adam_legacy", "timers"),
    ),
}
NORM, TEST = "get_global_norm", "is_invalid_grad_norm"
OF_ENGINE = (
    *("communication_data_type", "gradient_predivide_factor"),
    *("allreduce_bucket", "unflatten"),
)


def replace_step(wrapper: Any) -> str:
    """Put a `ReplicatedStep` in the place of the wrapper's step; return why not, else nothing."""
    if installed := untested_deepspeed():
        return f"DeepSpeed {installed} is not the tested {TESTED}"
    if isinstance(wrapper, torch.optim.Optimizer):
        return "stage 0 in float32"
    name = type(wrapper).__name__
    if name not in REPLICATED:
        return f"its wrapper is {name}"
    module = sys.modules[type(wrapper).__module__]
    absent = [part for part in REPLICATED[name] if not hasattr(wrapper, part)]
    absent += [part for part in (NORM, TEST) if not hasattr(module, part)]
    if absent:
        return f"its wrapper has no {absent[0]}"
    if wrapper.mpu is not None:
        return "tensor parallelism"
    if wrapper.overflow_checker.has_moe_params:
        return "MoE layers of DeepSpeed"
    is_flat = name == "FP16_Optimizer"
    if wrapper.fused_adam_legacy if is_flat else wrapper.fused_lamb_legacy:
        return "legacy_fusion or Lamb"
    if is_flat and type(wrapper.timers).__name__ not in ("NoopTimer", "NoneType"):
        return "wall_clock_breakdown"
    wrapper.step = FlatReplicatedStep(wrapper) if is_flat else ReplicatedStep(wrapper)
    return ""


class ReplicatedStep:
    """The step of DeepSpeed's FP16_UnfusedOptimizer, bit for bit, without tensor parallelism.

    That one tests, casts, measures, scales and rounds weight by weight, and waits for the device at
    every test. Here a gradient that is not finite shows in the norm, and all norms are read at
    once.
    """

    scaled: tuple[Any, ...] = ()  # arguments of unscale_and_clip_grads before the norm

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.module: Any = sys.modules[type(wrapper).__module__]
        self.weights = self.weights_of(wrapper)
        self.updated = self.weights.fp32_groups

    @staticmethod
    def weights_of(wrapper: Any) -> MasterWeights:
        """What the optimizer updates, by group, and what that is rounded into."""
        return MasterWeights(wrapper.fp16_groups, wrapper.fp32_groups, wrapper.optimizer)

    def __call__(self) -> bool:
        """Update, or skip the update; return whether it was skipped."""
        wrapper, updated = self.wrapper, self.updated
        self.take_gradients()
        norm = self.norm()
        wrapper.overflow = False
        if getattr(self.module, TEST)(norm):  # also above the limit of a NormLimit
            return wrapper._skip_invalid_grad_norm()
        self.note(norm)
        factor = 1.0 / wrapper.unscale_and_clip_grads(*self.scaled, norm, apply_scale=False)
        if factor != 1.0:
            multi_tensor._foreach_mul_([p.grad for group in updated for p in group], factor)
        wrapper.optimizer.step()
        self.weights.put_weights()
        for p in (p for group in updated for p in group):
            p.grad = None
        return False

    def norm(self) -> float:
        """Norm of all gradients; infinite if one is not finite."""
        grads = [p.grad for group in self.updated for p in group]
        norms = torch.stack(
            multi_tensor._foreach_norm(grads)
        ).tolist()  # the only read of the device
        with np.errstate(over="ignore"):
            return self.total(norms) if all(map(math.isfinite, norms)) else math.inf

    def take_gradients(self) -> None:
        """Move the gradients to the fp32 weights; DeepSpeed updates those without one too."""
        self.weights.take_gradients()
        for p in (p for group in self.updated for p in group):
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    def total(self, norms: list[float]) -> float:
        """Norm of all from the norms of each, with sums of squares in fp32 within a group."""
        each, by_group = iter(norms), []
        for group in self.updated:
            of_group = np.array([next(each) for _ in group], dtype=np.float32)
            by_group.append(float(sum(of_group * of_group, start=np.float32(0))) ** 0.5)
        return getattr(self.module, NORM)(norm_list=by_group)

    def note(self, norm: float) -> None:
        """Give DeepSpeed the norm, and count a step for its loss scale."""
        self.wrapper._global_grad_norm = norm
        self.wrapper._update_scale(False)


class FlatReplicatedStep(ReplicatedStep):
    """The same of FP16_Optimizer, the wrapper of DeepSpeed's FusedAdam."""

    scaled = (None,)

    @staticmethod
    def weights_of(wrapper: Any) -> MasterWeights:
        """One vector of a group, in which the model's weights lie."""
        lows = [[flat] for flat in wrapper.fp16_groups_flat]
        return MasterWeights(lows, [[flat] for flat in wrapper.fp32_groups_flat], wrapper.optimizer)

    def take_gradients(self) -> None:
        for params, (flat,) in zip(self.wrapper.fp16_groups, self.updated, strict=True):
            flat.grad = torch.empty_like(flat)
            parts = flat.grad.split([p.numel() for p in params])
            copy_gradients(parts, [p.grad for p in params])
            for p in params:
                p.grad = None

    def total(self, norms: list[float]) -> float:
        squares = np.float32(reduce(add, (norm**2.0 for norm in norms)))
        return getattr(self.module, NORM)(norm_list=[float(squares) ** 0.5])

    def note(self, norm: float) -> None:
        scale = self.wrapper.loss_scale_config
        if scale.use_grad_scaling:
            self.wrapper._update_scale(False)
        self.wrapper._global_grad_norm = norm / scale.cur_scale


def reduce_in_place(engine: Any) -> None:
    """Have the engine copy reduced gradients back by one kernel, and none of a single process.

    Another version of it, or one without the names that are used, keeps its own way.
    """
    if untested_deepspeed() or not all(hasattr(engine, name) for name in OF_ENGINE):
        return
    engine.allreduce_and_copy = partial(_allreduce_and_copy, engine)


def _allreduce_and_copy(
    engine: Any, bucket: list[torch.Tensor], group: Any, world_size: float | None = None
) -> None:
    is_exact = engine.communication_data_type in (torch.float32, bucket[0].dtype)
    if dist.get_world_size(group) == 1 and engine.gradient_predivide_factor() == 1.0 and is_exact:
        return
    reduced = engine.allreduce_bucket(bucket, group, world_size)
    _copy_each(bucket, list(engine.unflatten(reduced, bucket)))
