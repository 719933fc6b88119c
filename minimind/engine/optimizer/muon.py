"""Muon for the matrices of the blocks and AdamW for all other weights, sharded by ZeRO or not.

ZeRO hands an optimizer flat shards of its weights, and Muon orthogonalizes whole matrices: the
momentum stays sharded, and its update is gathered before each matrix is orthogonalized by torch's
Newton-Schulz iteration. DeepSpeed therefore clips and reports the gradient, as with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from minimind.engine.optimizer.state import Fragment, ZeroState
from minimind.runtime.hardware import HAS_BF16

Groups = list[dict[str, Any]]
LINEAR = ("Conv1D",)  # of transformers, in GPT-2: a linear layer with its weight transposed


@dataclass(frozen=True)
class ShardedMatrix:
    """A matrix of which this rank holds a fragment, and how to find the whole in a gathered one."""

    shape: Sequence[int]
    fragment: Fragment
    whole: Callable[[Tensor], Tensor]  # of (ranks, elements of a shard) to (rows, columns)


@dataclass(frozen=True)
class Shards:
    """Matrices by the flat shard that the optimizer updates, and the ranks that share them."""

    matrices: Mapping[int, list[ShardedMatrix]]  # by id of the shard
    collectives: Any  # DeepSpeed's communication backend, whose calls comm_ms times
    process_group: dist.ProcessGroup | None


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups with `use_muon`, torch's fused AdamW for the others.

    muon_names are the parameters of the former, from `names` of each of these groups.
    """

    shards: Shards | None = None  # set after ZeRO has replaced the parameters by shards
    found_inf: Tensor | None = None  # 1 to skip the step; set by the backend

    def __init__(self, groups: Groups, **options: Any) -> None:
        muon_groups = [{**group} for group in groups if group.get("use_muon")]
        names = [group.pop("names") for group in muon_groups]
        self.muon_names: frozenset[str] = frozenset().union(*names)
        others = [group for group in groups if not group.get("use_muon")]
        adamw = torch.optim.AdamW(others, fused=True, **options)
        muon = torch.optim.Muon(muon_groups)
        super().__init__([*adamw.param_groups, *muon.param_groups], {"fused": True})
        self._adamw = adamw

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every group; whole matrices, or the shards that `shards` describes."""
        if self.found_inf is not None and self.found_inf.item():
            return
        for group in self.param_groups:
            if not group.get("use_muon"):
                self._adamw.param_groups, self._adamw.state = [group], self.state
                self._adamw.step()
                continue
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                if p.ndim == 2:
                    update = _nesterov(p.grad, state["momentum_buffer"], group["momentum"])
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(_orthogonal(update, group))
                elif self.shards:  # else DeepSpeed allocates state with a step of zero gradients
                    self._step_shard(p, state["momentum_buffer"], group, self.shards)

    def _step_shard(
        self, flat: Tensor, momentum: Tensor, group: dict[str, Any], shards: Shards
    ) -> None:
        """Update a flat shard of matrices; collective."""
        assert flat.grad is not None
        update = _nesterov(flat.grad, momentum, group["momentum"]).to(iteration_dtype(flat.device))
        ranks = dist.get_world_size(shards.process_group)
        gathered = update.new_empty((ranks, update.numel()))
        gather = shards.collectives.all_gather_into_tensor
        gather(gathered.view(-1), update, group=shards.process_group)
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        for matrix in shards.matrices.get(id(flat), ()):
            change, f = _orthogonal(matrix.whole(gathered), group), matrix.fragment
            f.view(flat).add_(change.reshape(-1).narrow(0, f.start, f.length))


def _nesterov(grad: Tensor, momentum: Tensor, decay: float) -> Tensor:
    """Update the momentum by the gradient; return the Nesterov update."""
    momentum.lerp_(grad, 1 - decay)
    return grad.lerp(momentum, decay)


def _orthogonal(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Change of a matrix by its update: orthogonalized, times the negative learning rate."""
    numbers = group["ns_coefficients"], group["ns_steps"], group["eps"]
    if iteration_dtype(update.device) == torch.bfloat16:
        direction = _zeropower_via_newtonschulz(update, *numbers).float()
    else:
        direction = newton_schulz(update, *numbers)
    return direction.mul_(-_adjust_lr(group["lr"], group["adjust_lr_fn"], update.shape))


def iteration_dtype(device: torch.device) -> torch.dtype:
    """dtype in which Newton-Schulz iterates: torch's bf16, but fp32 on a CPU without bf16.

    There products in bf16 take dozens of times as long (`benchmarks/products.py`).
    """
    return torch.bfloat16 if HAS_BF16 or device.type != "cpu" else torch.float32


def newton_schulz(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The iteration of torch.optim.Muon in the dtype of `update`."""
    a, b, c = coefficients
    is_tall = len(update) > update.shape[1]
    x = (update.T if is_tall else update) / update.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable weights of linear layers other than the output head, by name."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    layers = [module for module in model.modules() if type(module).__name__ in LINEAR]
    layers += [module for module in model.modules() if isinstance(module, nn.Linear)]
    matrices = {id(module.weight) for module in layers} - {id(getattr(head, "weight", None))}
    return {
        name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in matrices
    }


def shards_of(
    engine: Any, collectives: Any, state: ZeroState, muon_names: Set[str]
) -> Shards | None:
    """Describe the sharded matrices `muon_names` of a DeepSpeed engine; None if none is sharded."""
    wrapper = engine.optimizer
    named = dict(engine.module.named_parameters())
    found: dict[int, list[ShardedMatrix]] = {}
    for f in state.fragments:
        p: Any = named[f.name]
        shape = tuple(getattr(p, "ds_shape", p.shape))
        if f.is_replicated or f.name not in muon_names:
            continue
        if hasattr(p, "ds_shape"):  # stage 3: every rank holds an equal part, padded at the end
            whole = _of_columns(slice(f.offset, f.offset + p.partition_numel()), shape)
        else:  # stages 1 and 2: the shards of all ranks are one vector
            whole = _of_vector(f, shape)
        found.setdefault(id(f.owner), []).append(ShardedMatrix(shape, f, whole))
    if all(f.is_replicated for f in state.fragments):
        return None
    groups = getattr(wrapper, "real_dp_process_group", None)
    group = groups[0] if groups else getattr(wrapper, "dp_process_group", None)
    return Shards(found, collectives, group)


def _of_columns(columns: slice, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return lambda gathered: gathered[:, columns].reshape(-1)[: prod(shape)].view(*shape)


def _of_vector(f: Fragment, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    start = dist.get_rank() * f.owner.numel() + f.offset - f.start
    return lambda gathered: gathered.view(-1).narrow(0, start, prod(shape)).view(*shape)
