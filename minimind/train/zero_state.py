"""The optimizer state behind each DeepSpeed wrapper, as named flat runs of float32 numbers.

ZeRO cuts every parameter where its partitions happen to end. A `Fragment` says which part of which
parameter one rank owns and where its fp32 master, exp_avg and exp_avg_sq lie in memory; written
under `kind|parameter|start`, these can be read back by any world size and stage.

This leans on private attributes of DeepSpeed 0.19.8, one function per wrapper class. An unknown
wrapper or base optimizer is refused by name. No deepspeed import: engines are looked at, not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minimind.errors import CheckpointError
from minimind.train.combinations import RESUMABLE

MASTER, ADAM = "fp32", ("exp_avg", "exp_avg_sq")
# What each optimizer remembers of every weight.
MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), ADAM),
    **dict.fromkeys(("FusedLion", "DeepSpeedCPULion"), ("exp_avg",)),
    "SGD": ("momentum_buffer",),
}


@dataclass(frozen=True)
class Fragment:
    """Elements start..start + length of one parameter, as this rank holds them."""

    name: str
    start: int
    length: int
    owner: Tensor  # the tensor that the base optimizer updates and keys its state by
    offset: int  # where in `owner` the fragment begins

    def view(self, tensor: Tensor) -> Tensor:
        """The fragment's part of `owner`, or of a moment laid out like it; 1-D, shares memory."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)

    def share(self, rank: int, world_size: int) -> Fragment:
        """The `rank`-th of `world_size` nearly equal parts."""
        first = self.length * rank // world_size
        last = self.length * (rank + 1) // world_size
        return replace(
            self, start=self.start + first, length=last - first, offset=self.offset + first
        )


@dataclass(frozen=True)
class ZeroState:
    """What one rank owns of the fp32 weights and moments, and how to put changes into force."""

    base: torch.optim.Optimizer
    fragments: list[Fragment]
    refresh: Callable[[], None]
    prepare: Callable[[], None]
    is_replicated: bool = False

    def runs(self, rank: int, world_size: int) -> Iterator[tuple[str, Tensor]]:
        """`kind|parameter|start` and a 1-D float32 view of what this rank has to write.

        Moments only once a step was taken. Replicated state is shared out: each rank writes its
        1 / world_size of every parameter.
        """
        for f in self.fragments:
            part = f.share(rank, world_size) if self.is_replicated else f
            if not part.length:
                continue
            yield f"{MASTER}|{part.name}|{part.start}", part.view(part.owner)
            for kind in self.kinds:
                moment = self.base.state.get(part.owner, {}).get(kind)
                if moment is not None:
                    yield f"{kind}|{part.name}|{part.start}", part.view(moment)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The moments that the base optimizer keeps."""
        name = type(self.base).__name__
        has_none = name == "SGD" and not any(g["momentum"] for g in self.base.param_groups)
        return () if has_none else MOMENTS[name]

    def optimizer_step(self) -> int | None:
        """Updates the base optimizer has counted (SGD: 0, it counts none); None before any."""
        steps = [int(s.get("step", 0)) for s in self.base.state.values() if s]
        return max(steps, default=None)

    def fill(self, read: Callable[[str, str, int, int], Tensor], step: int | None) -> None:
        """Fill every fragment from `read(kind, parameter, start, length)`.

        No rank waits for another here; `refresh`, which puts it into force, is collective.
        """
        self.prepare()
        for owner in {id(f.owner): f.owner for f in self.fragments}.values():
            owner.detach().zero_()  # padding between fragments, uninitialised at stage 3
            self.base.state.pop(owner, None)
            if step is not None:
                self.base.state[owner] = self._fresh_moments(owner, step)
        for f in self.fragments:
            f.view(f.owner).copy_(read(MASTER, f.name, f.start, f.length))
            for kind in self.kinds if step is not None else ():
                f.view(self.base.state[f.owner][kind]).copy_(read(kind, f.name, f.start, f.length))

    def _fresh_moments(self, owner: Tensor, step: int) -> dict[str, Any]:
        keep = torch.preserve_format
        moments = {k: torch.zeros_like(owner, memory_format=keep) for k in self.kinds}
        if type(self.base).__name__ == "SGD":
            return moments
        if type(self.base).__module__.startswith("torch."):
            on_device = self.base.defaults.get("fused") or self.base.defaults.get("capturable")
            place = owner.device if on_device else torch.device("cpu")
            return {"step": torch.tensor(float(step), device=place), **moments}
        for group in self.base.param_groups:
            group["step"] = step
        return {"step": step, **moments}


def zero_state(engine: Any) -> ZeroState:
    """This rank's part of an engine's state; a CheckpointError names an unknown optimizer.

    `engine` has the module and the optimizer: DeepSpeed's engine, or a plain backend.
    """
    wrapper = engine.optimizer
    base = getattr(wrapper, "optimizer", wrapper)
    if type(base).__name__ not in MOMENTS:
        raise CheckpointError(
            f"no checkpoints of the optimizer {type(base).__name__} yet; name"
            f" {', '.join(RESUMABLE)} in the DeepSpeed file"
        )
    adapter = ADAPTERS.get(type(wrapper).__name__)
    if adapter is None:
        raise CheckpointError(
            f"no checkpoints of DeepSpeed's {type(wrapper).__name__} yet; use ZeRO stage 1, 2 or 3"
        )
    names = {p: name for name, p in engine.module.named_parameters()}
    return adapter(engine, base, names)


def _partitioned(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stages 1 and 2: each group is one flat vector, cut into equal partitions by rank.

    `_hp_mapping` would say the same, but is wrong with `round_robin_gradients`.
    """
    z = engine.optimizer
    fragments = []
    for g, flat in enumerate(z.single_partition_of_fp32_groups):
        size = int(z.partition_size[g])
        first = torch.distributed.get_rank(group=z.real_dp_process_group[g]) * size
        for p, at in zip(
            z.round_robin_bit16_groups[g], z.round_robin_bit16_offsets[g], strict=True
        ):
            start, end = max(at, first), min(at + p.numel(), first + size)
            if start < end:
                fragments.append(Fragment(names[p], start - at, end - start, flat, start - first))

    def refresh() -> None:
        z.update_lp_params()
        z._hp_optimizer_states_linked = False
        z._lazy_init_hp_params_optimizer_state()

    return ZeroState(base, fragments, refresh, _nothing)


def _sharded_weights(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 3: every parameter is cut by rank; sub-groups of the pieces are flat vectors."""
    z = engine.optimizer
    fragments = []
    for flat, params in zip(z.fp32_partitioned_groups_flat, z.fp16_groups, strict=True):
        offset = 0
        for p in params:
            share = p.partition_numel()
            start = share * z._get_param_partition_rank(p)
            end = min(start + share, p.ds_numel)
            if start < end:
                fragments.append(Fragment(names[p], start, end - start, flat, offset))
            offset += share

    def refresh() -> None:
        for sub_group in range(len(z.fp32_partitioned_groups_flat)):
            z._reassign_or_swap_out_partitioned_parameters(sub_group)
        z.checkpoint_event_epilogue()

    return ZeroState(base, fragments, refresh, z.checkpoint_event_prologue)


def _replicated_masters(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 0 or no DeepSpeed, in bf16: a full fp32 copy beside each parameter, on every rank."""
    z = engine.optimizer
    pairs = [
        (low, master)
        for lows, masters in zip(z.fp16_groups, z.fp32_groups, strict=True)
        for low, master in zip(lows, masters, strict=True)
    ]

    def refresh() -> None:
        for low, master in pairs:
            low.data.copy_(master.data)

    fragments = [_whole(names[low], master) for low, master in pairs]
    return ZeroState(base, fragments, refresh, _nothing, is_replicated=True)


def _plain(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 0 in fp32: the optimizer updates the parameters themselves, on every rank."""
    params = [p for group in base.param_groups for p in group["params"]]
    fragments = [_whole(names[p], p) for p in params]
    return ZeroState(base, fragments, _nothing, _nothing, is_replicated=True)


def _whole(name: str, owner: Tensor) -> Fragment:
    return Fragment(name, 0, owner.numel(), owner, 0)


def _nothing() -> None:
    pass


ADAPTERS = {
    "DeepSpeedZeroOptimizer": _partitioned,
    "DeepSpeedZeroOptimizer_Stage3": _sharded_weights,
    **dict.fromkeys(("FP16_UnfusedOptimizer", "MasterWeights"), _replicated_masters),
    **dict.fromkeys(("Adam", "AdamW", "SGD"), _plain),
}
