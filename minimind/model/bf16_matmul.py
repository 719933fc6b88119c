"""Matrix products in bf16, also on CPUs that have no instructions for them.

Elsewhere torch multiplies bf16 dozens of times as slowly as fp32 (`benchmarks/products.py`).
Widened to fp32, multiplied and rounded once, the result is what the instructions would give: they
too multiply exactly, and add up in fp32.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op

from minimind.runtime.hardware import HAS_BF16

ROWS = 512  # or columns, in fp32 at a time: enough for the full rate
PART = 2**21  # most numbers of a part, of the factor or the result: fewer rows then, down to 64


def is_widened(x: Tensor) -> bool:
    """Whether products of x are taken in fp32; never under autocast, which would narrow them."""
    is_slow = not HAS_BF16 and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return is_slow and not torch.is_autocast_enabled("cpu")


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same in fp32 where their products are taken so, else as they are."""
    return tuple(x.float() for x in tensors) if is_widened(tensors[0]) else tensors


def _product(one: Tensor, other: Tensor) -> Tensor:
    """(N, M), bf16: of (N, K) and (K, M) by way of fp32, in which one factor is whole.

    It is the smaller one; of the other and of the result there is a part at a time in fp32.
    """
    found = one.new_empty(len(one), other.shape[1])  # first: what outlives the rest leaves no hole
    is_tall = len(one) >= other.shape[1]
    wide = (other if is_tall else one).float()
    fitting = PART // max(one.shape[1], min(found.shape), 1)
    size = min(ROWS, max(fitting // 64, 1) * 64)
    for start in range(0, max(found.shape), size):
        part = slice(start, start + size)
        if is_tall:
            found[part] = one[part].float() @ wide
        else:
            found[:, part] = wide @ other[:, part].float()
    return found


# To the compiler it is one operation: of a widening that it sees, it keeps the fp32 for the
# backward pass, and not the bf16 before it. Named by the module, of which a directory for
# trust_remote_code may have brought along another copy.
_opaque = custom_op(
    f"minimind::{re.sub(r'[^a-zA-Z0-9]', '_', __name__)}", _product, mutates_args=()
)


@_opaque.register_fake
def _(one: Tensor, other: Tensor) -> Tensor:
    return one.new_empty(one.shape[0], other.shape[1])  # len() would hold to one number of rows


def product(one: Tensor, other: Tensor) -> Tensor:
    """(N, M), bf16: of (N, K) and (K, M) in bf16, added up in fp32 and rounded once."""
    found: Tensor = (_opaque if torch.compiler.is_compiling() else _product)(one, other)
    return found


class Widened(torch.autograd.Function):
    """x times weight transposed by way of fp32; for the backward pass only bf16 is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(rows of x, rows of weight), bf16; both are matrices."""
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and weight, bf16; None for one that is frozen."""
        x, weight = ctx.saved_tensors
        grad, of_x, of_weight = grads[0], None, None
        if ctx.needs_input_grad[0]:
            of_x = product(grad, weight)
        if ctx.needs_input_grad[1]:
            of_weight = product(grad.t(), x)
        return of_x, of_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight), at the speed of fp32 where bf16 has none of its own."""
    if not is_widened(x):
        return F.linear(x, weight)
    rows: Any = Widened.apply(x.reshape(-1, x.shape[-1]), weight)
    return rows.view(*x.shape[:-1], weight.shape[0])


class Linear(nn.Linear):
    """nn.Linear without biases, by `linear`."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """(..., outputs)."""
        return linear(input, self.weight)
