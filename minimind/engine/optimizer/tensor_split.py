"""Tensor parallelism: which part of a weight a rank holds, and its place in the whole weight.

A group of adjacent ranks shares each weight matrix of a block. Projections into a branch are
divided by rows (output features: heads, or channels of the feed-forward), those out of it by
columns. Embedding, norms and head are whole on every rank. Checkpoints hold slices of whole
weights, so they do not depend on the size of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minimind.runtime.collectives import lost_peers

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
OF_HEADS = ("q_norm", "k_norm")  # whole on every rank, and applied to its own heads only
Run = tuple[int, Tensor]  # start in the whole weight, values


def layer_specs() -> dict[str, Any]:
    """DeepSpeed's `partition_config` for the decoder; layers that are not named stay whole."""
    kinds = {"column": BY_ROWS, "row": BY_COLUMNS}  # DeepSpeed names them by the transposed matrix
    specs = [
        {"patterns": [rf".*\.({'|'.join(names)})\.weight$"], "partition_type": kind}
        for kind, names in kinds.items()
    ]
    return {"use_default_specs": False, "layer_specs": specs}


@dataclass(frozen=True)
class TensorSplit:
    """The part of each divided weight that rank `rank` of a tensor-parallel group holds."""

    rank: int
    size: int
    group: Any
    shapes: Mapping[str, tuple[int, int]]  # of the parts, by the name of the weight

    @classmethod
    def of(cls, model: nn.Module, rank: int, size: int, group: Any) -> TensorSplit:
        """The split of a model whose layers were divided by `layer_specs`."""
        shapes = {
            name: (p.shape[0], p.shape[1])
            for name, p in model.named_parameters()
            if _layer(name) in (*BY_ROWS, *BY_COLUMNS)
        }
        return cls(rank, size, group, shapes)

    def whole_shape(self, name: str, shape: Iterable[int]) -> list[int]:
        """Shape of the whole weight of which a part of `shape` is here."""
        if name not in self.shapes:
            return list(shape)
        rows, columns = shape
        by_rows = _layer(name) in BY_ROWS
        return [rows * self.size, columns] if by_rows else [rows, columns * self.size]

    def runs(self, name: str, start: int, values: Tensor) -> Iterator[Run]:
        """Runs of the whole weight for elements of this rank's part, 1-D from `start` on.

        Collective over the group for a weight divided by columns, where a row is in pieces: whole
        rows are gathered, and each rank yields some of them. All ranks have the same `start` and
        the same number of values.
        """
        if name not in self.shapes:
            yield start, values
            return
        rows, columns = self.shapes[name]
        if _layer(name) in BY_ROWS:
            yield self.rank * rows * columns + start, values
            return
        end = start + len(values)
        first, last = -(-start // columns), end // columns  # rows that are complete
        borders = [first * columns, last * columns] if first < last else [min(first * columns, end)]
        for begin, stop in ((start, borders[0]), (borders[-1], end)):
            if begin < stop:
                row, column = divmod(begin, columns)
                place = (row * self.size + self.rank) * columns + column
                yield place, values[begin - start : stop - start]
        if first < last:
            complete = values[borders[0] - start : borders[1] - start].view(-1, columns)
            share = slice(
                len(complete) * self.rank // self.size, len(complete) * (self.rank + 1) // self.size
            )
            parts = [part[share] for part in self._gather(complete)]
            if len(parts[0]):
                place = (first + share.start) * columns * self.size
                yield place, torch.cat(parts, dim=1).view(-1)

    def _gather(self, values: Tensor) -> list[Tensor]:
        """The values of every rank of the group, which have the same shape (collective)."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with lost_peers():
            dist.all_gather(parts, values.contiguous(), group=self.group)
        return parts

    def read(
        self, read: Callable[[int, int], Tensor], name: str, start: int, length: int
    ) -> Tensor:
        """Elements of this rank's part; `read` returns elements (start, length) of the whole."""
        if name not in self.shapes:
            return read(start, length)
        rows, columns = self.shapes[name]
        if _layer(name) in BY_ROWS:
            return read(self.rank * rows * columns + start, length)
        first, last = start // columns, -(-(start + length) // columns)
        width = columns * self.size
        whole = read(first * width, (last - first) * width).view(-1, width)
        part = whole[:, self.rank * columns : (self.rank + 1) * columns].reshape(-1)
        return part[start - first * columns :][:length]


def sum_partial_gradients(model: nn.Module, group: Any) -> None:
    """Sum the gradients of whole weights that see only some heads on each rank, as computed."""

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient

    for name, p in model.named_parameters():
        if _layer(name) in OF_HEADS and p.requires_grad:
            p.register_hook(summed)


def gradient_norm(model: nn.Module, split: TensorSplit | None) -> Tensor:
    """Norm of the gradients of the whole weights, where every rank has its part of them."""
    divided, whole = [], []
    for name, p in model.named_parameters():
        if p.grad is not None:
            (divided if split and name in split.shapes else whole).append(p.grad)
    norm = torch.nn.utils.get_total_norm(whole)
    if split is None:
        return norm
    squares = torch.nn.utils.get_total_norm(divided).square()
    squares += norm.square() / split.size  # equal on every rank, and so is the sum of both
    with lost_peers():
        dist.all_reduce(squares, group=split.group)
    return squares.sqrt()


def _layer(name: str) -> str:
    """Name of the layer that a parameter belongs to."""
    return name.split(".")[-2] if "." in name else ""
