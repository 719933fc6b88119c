"""Forward and backward passes that are repeated, and checksums of state, to compare ranks.

A checksum is the sum of the bits of a tensor as integers, modulo 2**64: any single flipped bit
changes it, and it does not depend on the order of summation. It does not see values that are
swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from minimind.engine.engine import Engine
from minimind.engine.loss_of_batch import compute_loss, uncompiled

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
K = TypeVar("K", bound=Hashable)
Key = tuple[str, int, int]  # a slice of a weight: name, first element, number of elements


@dataclass(frozen=True)
class Replay:
    """Result of one forward and backward pass over some rows."""

    rows: int  # checksum of the token ids
    loss: float  # nats per token
    norms: list[float]  # of the gradient of each weight; empty at stage 3
    sums: list[int]  # checksums of the loss and of these gradients


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The checksum of a tensor, int64 on its device."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def checksums(tensors: Mapping[K, Tensor]) -> dict[K, int]:
    """Checksums by key, with one wait for each device."""
    by_device: dict[torch.device, dict[K, Tensor]] = {}
    for key, tensor in tensors.items():
        by_device.setdefault(tensor.device, {})[key] = sum_of_bits(tensor)
    found: dict[K, int] = {}
    for sums in by_device.values():
        found.update(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
    return found


def is_sharded(engine: Engine) -> bool:
    """Whether a rank holds only a part of each weight (stage 3)."""
    return any(hasattr(p, "ds_tensor") for p in engine.model.parameters())


def replay(engine: Engine, rows: Tensor, rank: int, is_whole: bool) -> Replay:
    """Compute loss and gradients of rows (B, T + 1) with the random state of `rank`.

    Gradients are not accumulated or reduced. `is_whole`: the rows are a micro-batch, for which the
    model is compiled. At stage 3 only the loss is computed, which is collective.
    """
    engine.seed(engine.seeded_step, rank)
    rows = rows.to(engine.device)
    norms: list[Tensor] = []
    sums = [sum_of_bits(rows)]
    if is_sharded(engine):
        loss_sum, targets = engine.loss_of(rows)
    else:
        model: Any = engine.model
        if not model.training:
            engine.backend.forward.train()
        weights = [p for p in model.parameters() if p.requires_grad]
        with nullcontext() if is_whole else uncompiled(model):
            loss = compute_loss(model, rows[:, :-1], rows[:, 1:], engine.loss_chunk_size)
            # Not backward(), whose hooks reduce gradients.
            found = torch.autograd.grad(loss.total, weights, allow_unused=True)
        gradients = [grad for grad in found if grad is not None]
        loss_sum, targets = loss.loss_sum.detach(), loss.tokens
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in gradients]
        sums += map(sum_of_bits, gradients)
    sums.append(sum_of_bits(loss_sum))
    mean = loss_sum.double() / targets
    rows_sum, *others = torch.stack(sums).tolist()
    return Replay(rows_sum, float(mean), torch.stack(norms).tolist() if norms else [], others)


def replicated_checksums(engine: Engine) -> dict[str, int]:
    """Checksums of what every rank holds in full: buffers; without ZeRO also weights and moments.

    By kind and name, as in checkpoints.
    """
    held = engine.state()
    tensors = {f"buffer|{name}": buffer for name, buffer in engine.model.named_buffers()}
    for f in held.fragments:
        if f.is_replicated:
            tensors |= {f"{kind}|{f.name}": f.view(one) for kind, one in held.tensors_of(f).items()}
    return checksums(tensors)


def master_checksums(engine: Engine) -> dict[Key, int]:
    """Checksums of this rank's fp32 weights, rounded to the weights they are copied to."""
    return _of_masters(engine, lambda weight, master: master.to(weight.device, weight.dtype))


def weight_checksums(engine: Engine, keys: Mapping[Key, Any]) -> dict[Key, int]:
    """Checksums of slices of this rank's weights, except those that it has no copy of."""
    if is_sharded(engine):
        own = _of_masters(engine, lambda weight, master: weight)
        return {key: own[key] for key in keys if key in own}
    weights = dict(engine.model.named_parameters())
    return checksums({key: weights[key[0]].view(-1).narrow(0, *key[1:]) for key in keys})


def _of_masters(engine: Engine, choose: Callable[[Tensor, Tensor], Tensor]) -> dict[Key, int]:
    """Checksums of `choose(weight, master)` for slices that have an fp32 copy on this rank."""
    weights = dict(engine.model.named_parameters())
    tensors = {}
    for f in engine.state().fragments:
        p: Any = weights[f.name]
        if not f.length or f.is_frozen or f.owner is p:
            continue
        if hasattr(p, "ds_tensor"):  # stage 3: the partition of this rank
            weight = p.ds_tensor.view(-1).narrow(0, 0, f.length)
        else:
            weight = p.detach().view(-1).narrow(0, f.start, f.length)
        tensors[f.name, f.start, f.length] = choose(weight, f.view(f.owner))
    return checksums(tensors)
