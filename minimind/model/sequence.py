"""Positions of a row divided over ranks, each of which attends for some heads.

Shape letters: B rows, T positions, H heads, D channels per head, N ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    """Send part n of the first dimension to rank n of a group, and so their gradients back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        """Return the parts that the ranks sent, in their order."""
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Exchange the gradients: rank n gets that of the part it sent."""
        sent: Any = _Exchange.apply(grads[0], ctx.group)
        return sent, None


@dataclass(frozen=True)
class SequenceGroup:
    """N ranks with T / N consecutive positions each of the same rows.

    Attention needs all positions, but not all heads: before it each rank exchanges its positions of
    all heads for all positions of H / N heads, and back afterwards (DeepSpeed-Ulysses, Jacobs et
    al. 2023). Fewer than N key heads are repeated to N.
    """

    group: Any
    rank: int
    size: int

    def part(self, x: Tensor, dim: int) -> Tensor:
        """The positions of this rank along a dimension of all positions."""
        assert x.shape[dim] % self.size == 0, f"{x.shape[dim]} positions on {self.size} ranks"
        return x.chunk(self.size, dim)[self.rank]

    def to_heads(self, *several: Tensor) -> tuple[Tensor, ...]:
        """Exchange (B, T / N, H, D) each for (B, T, H / N, D), all of them at once."""
        parts = []
        for x_BTHD in several:
            heads = x_BTHD.shape[2]
            x_BTHD = (
                x_BTHD
                if heads >= self.size
                else x_BTHD.repeat_interleave(self.size // heads, dim=2)
            )
            parts.append(x_BTHD.unflatten(2, (self.size, -1)))
        sent = torch.cat(parts, dim=3).movedim(2, 0)
        received: Any = _Exchange.apply(sent, self.group)  # (N, B, T / N, heads, D)
        sizes = [part.shape[3] for part in parts]
        return received.movedim(0, 1).flatten(1, 2).split(sizes, dim=2)

    def to_positions(self, x_BTHD: Tensor) -> Tensor:
        """Exchange (B, T, H / N, D) for (B, T / N, H, D)."""
        sent = x_BTHD.unflatten(1, (self.size, -1)).movedim(1, 0)
        received: Any = _Exchange.apply(sent, self.group)
        return received.movedim(0, 2).flatten(2, 3)
