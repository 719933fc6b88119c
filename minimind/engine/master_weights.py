"""fp32 copies of low-precision weights, updated in multi-tensor kernels.

`MasterWeights` is the optimizer of a backend without DeepSpeed; `ReplicatedStep` takes the place of
DeepSpeed's own step at stage 0 in bf16 and fp16, whose copies are laid out alike.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from minimind.engine.adapters import TESTED

_copy_each: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] (not listed)
_norm_each: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage] (not listed)
_scale_each: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage] (not listed)
# Elements per multi-tensor copy: one kernel on a GPU instead of one per weight, without a second
# copy of all gradients in memory.
COPIED_AT_ONCE = 2**24
Groups = list[dict[str, Any]]
OptimizerOf = Callable[[Groups], torch.optim.Optimizer]


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


WRAPPER = "FP16_UnfusedOptimizer"
# What `ReplicatedStep` uses of the wrapper and of its module.
OF_WRAPPER = (
    *("fp16_groups", "fp32_groups", "optimizer", "overflow_checker", "fused_lamb_legacy", "mpu"),
    *("_skip_invalid_grad_norm", "_update_scale", "unscale_and_clip_grads"),
)
NORM, TEST = "get_global_norm", "is_invalid_grad_norm"


def reason_against(engine: Any) -> str:
    """Why DeepSpeed's own step at stage 0 stays; empty if `ReplicatedStep` can take its place."""
    wrapper = engine.optimizer
    name, installed = type(wrapper).__name__, version("deepspeed").partition("+")[0]
    if installed != TESTED:
        return f"version {installed} is not {TESTED}"
    if name != WRAPPER:
        return f"its {name} has no multi-tensor step"
    module = sys.modules[type(wrapper).__module__]
    absent = [name for name in OF_WRAPPER if not hasattr(wrapper, name)]
    absent += [name for name in (NORM, TEST) if not hasattr(module, name)]
    if absent:
        return f"its {name} has no {absent[0]}"
    if wrapper.fused_lamb_legacy:
        return "Lamb measures each weight"
    if wrapper.mpu is not None:
        return "tensor parallelism"
    return "its layers of experts" if wrapper.overflow_checker.has_moe_params else ""


class ReplicatedStep:
    """Stands in for the step of DeepSpeed's FP16_UnfusedOptimizer.

    That one tests, casts, measures, scales and rounds weight by weight, and waits for the device at
    every test. Here a gradient that is not finite shows in the norm, and the norms of all weights
    are read at once.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.module: Any = sys.modules[type(wrapper).__module__]
        self.masters = MasterWeights(wrapper.fp16_groups, wrapper.fp32_groups, wrapper.optimizer)
        wrapper.step = self

    def __call__(self) -> bool:
        """Update, or skip the update; return whether it was skipped."""
        wrapper = self.wrapper
        norm = self.take_gradients()
        wrapper.overflow = False
        if getattr(self.module, TEST)(norm):  # also above the limit of a NormLimit
            return wrapper._skip_invalid_grad_norm()
        wrapper._global_grad_norm = norm
        wrapper._update_scale(False)
        factor = 1.0 / wrapper.unscale_and_clip_grads(norm, apply_scale=False)
        if factor != 1.0:
            _scale_each([p.grad for group in wrapper.fp32_groups for p in group], factor)
        wrapper.optimizer.step()
        self.masters.put_weights()
        for group in wrapper.fp32_groups:
            for master in group:
                master.grad = None
        return False

    def take_gradients(self) -> float:
        """Move the gradients to the fp32 copies; return their norm, infinite if one is not finite.

        It is rounded as DeepSpeed's: squares are added in fp32 within a group.
        """
        self.masters.take_gradients()
        masters = self.wrapper.fp32_groups
        grads = [[p.grad for p in group if p.grad is not None] for group in masters]
        for master in (p for group in masters for p in group):
            if master.grad is None:  # DeepSpeed decays it all the same
                master.grad = torch.zeros_like(master)
        measured = [grad for group in grads for grad in group]
        norms = torch.stack(_norm_each(measured)).tolist() if measured else []  # the only read
        if not all(map(math.isfinite, norms)):
            return math.inf
        by_group, first = [], 0
        with np.errstate(over="ignore"):
            for group in grads:
                of_group = np.array(norms[first : first + len(group)], dtype=np.float32)
                total = np.add.accumulate(of_group * of_group)[-1:].sum()
                by_group.append(float(total) ** 0.5)
                first += len(group)
        return getattr(self.module, NORM)(norm_list=by_group)


def reduce_in_place(engine: Any) -> None:
    """Have the engine copy reduced gradients back by one kernel, and none of a single process."""
    engine.allreduce_and_copy = partial(_allreduce_and_copy, engine)


def _allreduce_and_copy(
    engine: Any, bucket: list[torch.Tensor], group: Any, world_size: float | None = None
) -> None:
    is_exact = engine.communication_data_type in (torch.float32, bucket[0].dtype)
    if dist.get_world_size(group) == 1 and engine.gradient_predivide_factor() == 1.0 and is_exact:
        return
    reduced = engine.allreduce_bucket(bucket, group, world_size)
    _copy_each(bucket, list(engine.unflatten(reduced, bucket)))
