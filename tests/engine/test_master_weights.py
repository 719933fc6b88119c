"""fp32 copies of low-precision weights: multi-tensor copies with the bits of single ones."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minimind.config.parse import parse_flags
from minimind.engine import master_weights
from minimind.engine.master_weights import MasterWeights
from minimind.engine.optimizers import optimizer_of

RUN = parse_flags([])
SIZES = [(3, 5), (7,), (1000,), (2, 2), (64, 3)]


class Operators(TorchDispatchMode):
    """Counts operators by name: on a GPU each launches kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def masters_of(dtype: torch.dtype) -> tuple[list[torch.Tensor], MasterWeights]:
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(size, generator=draw).to(dtype).requires_grad_() for size in SIZES]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=draw).to(dtype)
    weights[1].grad = None  # frozen in this step
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:]}]
    return weights, MasterWeights.of(groups, partial(optimizer_of, run=RUN))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [1, 20, 2**24])
def test_copies_have_the_bits_of_single_ones(dtype: torch.dtype, at_once: int, monkeypatch):
    monkeypatch.setattr(master_weights, "COPIED_AT_ONCE", at_once)
    weights, masters = masters_of(dtype)
    grads = [None if weight.grad is None else weight.grad.float() for weight in weights]
    masters.take_gradients()
    wide = [master for group in masters.fp32_groups for master in group]
    for weight, master, grad in zip(weights, wide, grads, strict=True):
        assert weight.grad is None
        assert (master.grad is None) == (grad is None)
        if grad is not None and master.grad is not None:
            assert torch.equal(master.grad, grad)
    masters.optimizer.step()
    masters.put_weights()
    for weight, master in zip(weights, wide, strict=True):
        assert torch.equal(weight, master.to(dtype))


def test_each_copy_is_one_multi_tensor_operator():
    _, masters = masters_of(torch.bfloat16)
    with Operators() as seen:
        masters.take_gradients()
        masters.put_weights()
    assert seen.found == {"_foreach_copy_": 2, "empty_like": 4}


def test_adamw_is_one_fused_operator_per_group():
    _, masters = masters_of(torch.bfloat16)
    masters.take_gradients()
    masters.optimizer.step()
    with Operators() as seen:
        masters.optimizer.step()
    assert seen.found["_fused_adamw_"] == 2
    assert not [name for name in seen.found if name.startswith(("mul", "addc", "sqrt", "div"))]
