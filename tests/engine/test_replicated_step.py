"""The step that stands in for DeepSpeed's at stage 0: its bits, its reads, and where it is not."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimind.config.launcher_env import configure_libraries
from minimind.engine import master_weights
from minimind.engine.deepspeed_backend import NormLimit
from minimind.engine.master_weights import reduce_in_place, replace_step
from tools.host_reads import counted

SIZES = [(24, 16), (16,), (1000,), (3, 5), (7,), (16, 24)]
FROZEN, UNUSED, SPARE = 3, 4, 1  # places in SIZES; SPARE has a gradient in every second step
STEPS = 40
# By step, in one element of one gradient; the last is finite, and its square is not.
SPOILT = {5: math.nan, 11: math.inf, 12: -math.inf, 13: 2.0**100}
ABOVE_LIMIT = (20, 31)
CLASSES = {
    "FP16_UnfusedOptimizer": "deepspeed.runtime.fp16.unfused_optimizer",
    "FP16_Optimizer": "deepspeed.runtime.fp16.fused_optimizer",
}


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed on this process's CPU, without a process group."""
    for name in ("DS_ACCELERATOR", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.setenv(name, "cpu")
    configure_libraries("cpu")
    unfused = importlib.import_module(CLASSES["FP16_UnfusedOptimizer"])
    monkeypatch.setattr(unfused, "dist", SimpleNamespace(get_rank=lambda: 0))


class Course:
    """A wrapper of DeepSpeed's around AdamW, and gradients for it."""

    def __init__(self, name: str, dtype: torch.dtype, clip: float) -> None:
        draw = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(size, generator=draw).to(dtype) for size in SIZES]
        for place, weight in enumerate(self.weights):
            weight.requires_grad_(place != FROZEN)
        decays = {"params": self.weights[::2], "weight_decay": 0.1}
        base = torch.optim.AdamW([decays, {"params": self.weights[1::2]}], lr=1e-2, fused=True)
        # The scale grows every third step, and falls at once where a gradient overflows.
        scale = {"init_scale": 2.0**13, "scale_window": 3, "delayed_shift": 1, "min_scale": 1.0}
        self.wrapper: Any = getattr(importlib.import_module(CLASSES[name]), name)(
            base,
            low_precision_dtype=dtype,
            dynamic_loss_scale=dtype == torch.float16,
            dynamic_loss_args=scale if dtype == torch.float16 else None,
            clip_grad=clip,
            verbose=False,
        )
        base.state.clear()
        self.limit = NormLimit(self.wrapper)

    def take(self, step: int) -> list[Any]:
        """What the step leaves: whether it was skipped, the norm, the scale."""
        draw = torch.Generator().manual_seed(100 + step)
        scale = self.wrapper.loss_scale_config.cur_scale
        for place, weight in enumerate(self.weights):
            gradient = torch.randn(weight.shape, generator=draw) * 10 ** (step % 5 - 2) * scale
            if place in (FROZEN, UNUSED) or (place == SPARE and step % 2):
                continue
            if place == 2 and step in SPOILT:
                gradient[7] = SPOILT[step]
            weight.grad = gradient.to(weight.dtype)
        self.limit.limit = 1e-9 if step in ABOVE_LIMIT else math.inf
        skipped = self.wrapper.step()
        assert skipped == self.wrapper.overflow
        above = self.limit.take()
        self.wrapper.zero_grad()
        return [skipped, self.wrapper._global_grad_norm, self.wrapper.loss_scale, above]

    def state(self) -> list[torch.Tensor]:
        """Weights, and what AdamW has of each of their fp32 copies."""
        base = self.wrapper.optimizer
        updated = [p for group in base.param_groups for p in group["params"]]
        return [*self.weights, *updated, *(t for p in updated for t in base.state[p].values())]


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CLASSES)
def test_it_has_the_bits_of_deepspeed_and_reads_the_device_once(
    name: str, dtype: torch.dtype, clip: float
):
    """Norms, scales, skipped steps, weights and moments, with gradients that are spoilt."""
    found = []
    for is_ours in (False, True):
        course = Course(name, dtype, clip)
        assert not is_ours or replace_step(course.wrapper) == ""
        steps, reads = [], []
        for step in range(STEPS):
            with counted() as seen:
                steps.append(course.take(step))
            reads.append(sum(seen.values()))
        assert {*reads} == {1} if is_ours else max(reads) > len(SIZES) - 2
        assert all(p.grad is None for p in course.weights)
        found.append((steps, course.state()))
        course.limit.release()
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
    skipped = {step for step, (was_skipped, *_) in enumerate(found[0][0]) if was_skipped}
    assert {*SPOILT, *ABOVE_LIMIT} <= skipped
    scales = {scale for _, _, scale, _ in found[0][0]}
    assert (len(scales) > 3) == (dtype == torch.float16)


REASONS: dict[str, Callable[[Any], object]] = {
    "tensor parallelism": lambda w: setattr(w, "mpu", object()),
    "MoE layers of DeepSpeed": lambda w: setattr(w.overflow_checker, "has_moe_params", True),
    "legacy_fusion or Lamb": lambda w: [
        setattr(w, name, True) for name in ("fused_lamb_legacy", "fused_adam_legacy")
    ],
    "has no optimizer": lambda w: delattr(w, "optimizer"),
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("name", CLASSES)
def test_what_it_does_not_know_stays_with_deepspeed(name: str, reason: str):
    course = Course(name, torch.bfloat16, 1.0)
    course.limit.release()
    REASONS[reason](course.wrapper)
    assert replace_step(course.wrapper).endswith(reason)
    assert "step" not in vars(course.wrapper)


def test_another_version_or_class_or_measured_parts_stay_with_deepspeed(monkeypatch):
    course = Course("FP16_Optimizer", torch.bfloat16, 1.0)
    course.limit.release()
    course.wrapper.timers = object()
    assert replace_step(course.wrapper) == "wall_clock_breakdown"
    assert replace_step(course.wrapper.optimizer) == "stage 0 in float32"
    monkeypatch.setattr(master_weights, "untested_deepspeed", lambda: "0.20.0")
    assert replace_step(course.wrapper) == "DeepSpeed 0.20.0 is not the tested 0.19.8"
    engine = engine_of(lambda *_: None)
    reduce_in_place(engine)
    assert "allreduce_and_copy" not in vars(engine)


def engine_of(reduce: Callable[..., Any], factor: float = 1.0) -> Any:
    """What DeepSpeed's engine shows to its reduction at stage 0."""
    return SimpleNamespace(
        communication_data_type=torch.float32,
        gradient_predivide_factor=lambda: factor,
        allreduce_bucket=reduce,
        unflatten=lambda flat, like: [flat[:6].view(2, 3), flat[6:]],
    )


@pytest.mark.parametrize("name", vars(engine_of(lambda: None)))
def test_an_engine_without_a_name_reduces_by_itself(name: str):
    engine = engine_of(lambda *_: None)
    delattr(engine, name)
    reduce_in_place(engine)
    assert "allreduce_and_copy" not in vars(engine)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_process_alone_copies_no_gradient(is_exact: bool, group: None):
    """But where a factor rounds them, as it does on more."""
    grads = [torch.ones(2, 3), torch.full((4,), 3.0)]

    def halved(bucket: list[torch.Tensor], *_: Any) -> torch.Tensor:
        return torch.cat([grad.flatten() for grad in bucket]) / 2

    engine = engine_of(halved, 1.0 if is_exact else 3.0)
    reduce_in_place(engine)
    engine.allreduce_and_copy(grads, None)
    assert grads[1].tolist() == [3.0 if is_exact else 1.5] * 4
