"""Forward and backward passes that are repeated, and checksums of state, to compare ranks.

A checksum is the sum of the bits of a tensor as integers, modulo 2**64: any single flipped bit
changes it, and it does not depend on the order of summation. It does not see values that are
swapped, or the same bit flipped up in one value and down in another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from minimind.engine.engine import Engine
from minimind.engine.loss_of_batch import MicroBatchLoss, compute_loss, uncompiled

PIECE = 2**22  # elements that are summed at once: the sum converts them to int64 first
FP16_SCALE = 2.0**10  # of the loss, so that gradients in float16 are not too small
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
K = TypeVar("K", bound=Hashable)
Key = tuple[str, int, int]  # a slice of a weight: name, first element, number of elements


@dataclass(frozen=True)
class Replay:
    """Result of one forward and backward pass over some rows."""

    rows: int  # checksum of the token ids
    loss: float  # nats per token; 0 without targets
    norms: list[float]  # of the gradient of each weight; empty at stage 3
    sums: list[int]  # checksums of the loss and of these gradients


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The checksum of a tensor, int64 on its device."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    parts = flat.view(INTEGERS[flat.element_size()]).split(PIECE)
    sums = [part.sum(dtype=torch.int64) for part in parts]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def checksums(tensors: Iterable[tuple[K, Tensor]]) -> dict[K, int]:
    """Checksums by key, with one wait for each device; holds one tensor at a time."""
    by_device: dict[torch.device, dict[K, Tensor]] = {}
    for key, tensor in tensors:
        by_device.setdefault(tensor.device, {})[key] = sum_of_bits(tensor)
        del tensor
    found: dict[K, int] = {}
    for sums in by_device.values():
        found.update(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
    return found


def is_sharded(engine: Engine) -> bool:
    """Whether a rank holds only a part of each weight (stage 3)."""
    return any(hasattr(p, "ds_tensor") for p in engine.model.parameters())


class GradientRecord:
    """Norms and checksums of the gradients of weights, each taken as soon as it is computed.

    The gradient itself is dropped: all of them at once would need as much memory as the weights.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        device = weights[0].device
        self.norms = [torch.zeros((), device=device) for _ in weights]
        self.sums = [torch.zeros((), dtype=torch.int64, device=device) for _ in weights]
        self._handles = [p.register_hook(partial(self._take, n)) for n, p in enumerate(weights)]

    def _take(self, number: int, grad: Tensor) -> Tensor:
        self.norms[number] = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self.sums[number] = sum_of_bits(grad)
        return grad.new_zeros(()).expand_as(grad)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def replay(engine: Engine, rows: Tensor, data_rank: int, is_whole: bool) -> Replay:
    """Compute loss and gradients of rows (B, T + 1) with the random state of `data_rank`.

    Gradients are not accumulated or reduced. `is_whole`: the rows are a micro-batch, for which the
    model is compiled. At stage 3 only the loss is computed, which is collective.
    """
    engine.seed(engine.seeded_step, data_rank)
    rows = rows.to(engine.device)
    norms: list[Tensor] = []
    sums = [sum_of_bits(rows)]
    if is_sharded(engine):
        loss_sum, targets = engine.loss_of(rows)
    else:
        loss, record = _loss_and_gradients(engine, rows, is_whole)
        loss_sum, targets = loss.loss_sum.detach(), loss.tokens
        norms, sums = record.norms, [*sums, *record.sums]
    sums.append(sum_of_bits(loss_sum))
    mean = loss_sum.double() / targets.clamp(min=1)
    rows_sum, *others = torch.stack(sums).tolist()
    return Replay(rows_sum, float(mean), torch.stack(norms).tolist() if norms else [], others)


def _loss_and_gradients(
    engine: Engine, rows: Tensor, is_whole: bool
) -> tuple[MicroBatchLoss, GradientRecord]:
    model: Any = engine.model
    if not model.training:
        engine.backend.forward.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    record = GradientRecord(weights)
    scale = FP16_SCALE if engine.resolved.run.dtype == "float16" else 1.0
    try:
        with nullcontext() if is_whole else uncompiled(model):
            loss = compute_loss(model, engine.inputs_of(rows), engine.loss_chunk_size)
            total = loss.divided_by(loss.tokens.clamp(min=1)) * scale
            # Not backward(), whose hooks reduce gradients.
            torch.autograd.grad(total, weights, allow_unused=True)
    finally:
        record.close()
    return loss, record


def replicated_checksums(engine: Engine) -> dict[str, int]:
    """Checksums of what every rank holds in full, by kind and name.

    Buffers; without ZeRO also weights and moments; at stage 3 the small weights that each rank
    keeps.
    """
    model = engine.model
    tensors = {f"buffer|{name}": buffer for name, buffer in model.named_buffers()}
    for name, p in model.named_parameters():
        if getattr(p, "ds_persist", False) and p.numel() == p.ds_numel:
            tensors[f"weight|{name}"] = p
    held = engine.state()
    for f in held.fragments:
        if f.is_replicated:
            tensors |= {f"{kind}|{f.name}": f.view(one) for kind, one in held.tensors_of(f).items()}
    return checksums(tensors.items())


def master_checksums(engine: Engine) -> dict[Key, int]:
    """Checksums of this rank's fp32 weights, rounded to the weights they are copied to."""
    return checksums(
        (key, master.to(weight.device, weight.dtype)) for key, weight, master in _pairs(engine)
    )


def weight_checksums(engine: Engine, keys: Mapping[Key, Any]) -> dict[Key, int]:
    """Checksums of slices of this rank's weights, except those that it has no copy of."""
    if is_sharded(engine):
        return checksums((key, weight) for key, weight, _ in _pairs(engine) if key in keys)
    weights = dict(engine.model.named_parameters())
    return checksums((key, weights[key[0]].view(-1).narrow(0, *key[1:])) for key in keys)


def _pairs(engine: Engine) -> Iterator[tuple[Key, Tensor, Tensor]]:
    """Slices of weights on this rank that have an fp32 copy here, each with that copy."""
    weights = dict(engine.model.named_parameters())
    for f in engine.state().fragments:
        p: Any = weights[f.name]
        if not f.length or f.is_frozen or f.owner is p:
            continue
        if hasattr(p, "ds_tensor"):  # stage 3: the partition of this rank
            weight = p.ds_tensor.view(-1).narrow(0, 0, f.length)
        else:
            weight = p.detach().view(-1).narrow(0, f.start, f.length)
        yield (f.name, f.start, f.length), weight, f.view(f.owner)
