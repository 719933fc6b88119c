"""Matrix products in bf16, also on CPUs without bf16 instructions.

Without them torch multiplies bf16 dozens of times slower than fp32 (`benchmarks/products.py`). Here
factors are converted to fp32, multiplied and rounded once, which gives what the instructions give:
they also multiply exactly and accumulate in fp32.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op

from minimind.runtime.hardware import HAS_BF16

ROWS = 512  # or columns, converted at a time: enough for full speed
PART = 2**21  # elements of a part at most; wide matrices take fewer rows, at least 64


def needs_fp32_matmul(x: Tensor) -> bool:
    """Whether products of x are computed in fp32; never under autocast, which would undo it."""
    is_slow = not HAS_BF16 and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return is_slow and not torch.is_autocast_enabled("cpu")


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert to fp32 if products of the first tensor are computed in fp32."""
    return tuple(x.float() for x in tensors) if needs_fp32_matmul(tensors[0]) else tensors


def _widened_matmul(one: Tensor, other: Tensor) -> Tensor:
    """bf16 product (N, M) of (N, K) and (K, M), accumulated in fp32.

    The smaller factor is converted as a whole, the other one and the result in parts.
    """
    out = one.new_empty(len(one), other.shape[1])  # allocated first, against fragmentation
    is_tall = len(one) >= other.shape[1]
    wide = (other if is_tall else one).float()
    rows = PART // max(one.shape[1], min(out.shape), 1)
    size = min(ROWS, max(rows // 64, 1) * 64)
    for start in range(0, max(out.shape), size):
        part = slice(start, start + size)
        if is_tall:
            out[part] = one[part].float() @ wide
        else:
            out[:, part] = wide @ other[:, part].float()
    return out


# One opaque operation for the compiler: if it saw the conversion, it would save the fp32 copy for
# the backward pass instead of the bf16 original. Named after the module, because a directory for
# trust_remote_code may contain another copy of it.
_opaque = custom_op(
    f"minimind::{re.sub(r'[^a-zA-Z0-9]', '_', __name__)}", _widened_matmul, mutates_args=()
)


@_opaque.register_fake
def _(one: Tensor, other: Tensor) -> Tensor:
    return one.new_empty(one.shape[0], other.shape[1])  # len() would specialize it


def bf16_matmul(one: Tensor, other: Tensor) -> Tensor:
    """bf16 product (N, M) of bf16 (N, K) and (K, M), accumulated in fp32 and rounded once."""
    out: Tensor = (_opaque if torch.compiler.is_compiling() else _widened_matmul)(one, other)
    return out


class WidenedLinear(torch.autograd.Function):
    """x @ weight.T computed in fp32; saves only bf16 for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Product (N, outputs) in bf16 of x (N, inputs) and weight (outputs, inputs)."""
        ctx.save_for_backward(x, weight)
        return bf16_matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of x and weight in bf16; None for one that is frozen."""
        x, weight = ctx.saved_tensors
        grad, grad_x, grad_weight = grads[0], None, None
        if ctx.needs_input_grad[0]:
            grad_x = bf16_matmul(grad, weight)
        if ctx.needs_input_grad[1]:
            grad_weight = bf16_matmul(grad.t(), x)
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), by way of fp32 where bf16 is slow; the bias is then added last."""
    if not needs_fp32_matmul(x):
        return F.linear(x, weight, bias)
    rows: Any = WidenedLinear.apply(x.reshape(-1, x.shape[-1]), weight)
    out = rows.view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class Linear(nn.Linear):
    """nn.Linear computed by `linear`, by default without bias."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        """Output (..., outputs)."""
        return linear(input, self.weight, self.bias)
