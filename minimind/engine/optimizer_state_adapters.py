"""Where each engine keeps its weights and optimizer state: one function per wrapper class.

This leans on private attributes of one version of DeepSpeed; another version, an unknown wrapper
and an unknown base optimizer are refused by name. No deepspeed import: engines are looked at, not
made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from minimind.config.deepspeed.incompatible import RESUMABLE
from minimind.engine.optimizer_state import MOMENTS, Fragment, ZeroState
from minimind.errors import CheckpointError

TESTED = "0.19.8"  # constraints.txt and pyproject.toml pin the same


def require_tested_deepspeed() -> None:
    """Nothing, or a CheckpointError where another DeepSpeed than the tested one is installed."""
    found = version("deepspeed")
    if found.partition("+")[0] != TESTED:  # what follows a + names a build of the same source
        raise CheckpointError(
            f"DeepSpeed {found} is installed, and checkpoints are tested with {TESTED} alone; run"
            f" `pip install deepspeed=={TESTED}`, or train without it (--deepspeed_config none)"
        )


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
    held = adapter(engine, base, names)
    frozen = [_frozen(engine, name, p) for p, name in names.items() if not p.requires_grad]
    return replace(held, fragments=held.fragments + frozen)


def _frozen(engine: Any, name: str, p: Any) -> Fragment:
    """A parameter that is not trained, which is in no optimizer; at stage 3 this rank's piece."""
    if hasattr(p, "ds_tensor"):
        return _piece(engine.optimizer, name, p, p.ds_tensor, 0, is_frozen=True)
    return Fragment(name, 0, p.numel(), p, 0, is_replicated=True, is_frozen=True)


def _partitioned(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stages 1 and 2: each group is one flat vector, cut into equal partitions by rank.

    `_hp_mapping` would say the same, but is wrong with `round_robin_gradients`.
    """
    z = engine.optimizer
    fragments = []
    for g, flat in enumerate(z.single_partition_of_fp32_groups):
        size = int(z.partition_size[g])
        first = torch.distributed.get_rank(group=z.real_dp_process_group[g]) * size
        params, offsets = z.round_robin_bit16_groups[g], z.round_robin_bit16_offsets[g]
        fragments += _cut(zip(params, offsets, strict=True), names, flat, first, first + size)
    return ZeroState(base, fragments, partial(_share_and_link, z), _nothing)


def _partitioned_bf16(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 1 in bf16 with gradients added up in fp32: as above, in the order of the groups."""
    z = engine.optimizer
    fragments = []
    for g, flat in enumerate(z.fp32_groups_flat_partition):
        first = torch.distributed.get_rank(group=z.real_dp_process_group[g]) * flat.numel()
        fragments += _cut(_in_turn(z.bf16_groups[g]), names, flat, first, first + flat.numel())
    return ZeroState(base, fragments, partial(_share_and_link, z), _nothing)


def _share_and_link(z: Any) -> None:
    """The partitions' weights to all ranks; then what DeepSpeed itself remembers of the moments."""
    z.update_lp_params()
    z._hp_optimizer_states_linked = False
    z._lazy_init_hp_params_optimizer_state()


def _in_turn(params: list[Any]) -> Iterable[tuple[Any, int]]:
    """Each parameter and where it begins, one after another in a flat vector."""
    return zip(params, accumulate((p.numel() for p in params), initial=0), strict=False)


def _cut(
    placed: Iterable[tuple[Any, int]], names: dict[Any, str], flat: Tensor, first: int, last: int
) -> list[Fragment]:
    """Fragments of the parameters placed in a vector of which `flat` is first..last."""
    found = []
    for p, at in placed:
        start, end = max(at, first), min(at + p.numel(), last)
        if start < end:
            found.append(Fragment(names[p], start - at, end - start, flat, start - first))
    return found


def _sharded_weights(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 3: every parameter is cut by rank; sub-groups of the pieces are flat vectors."""
    z = engine.optimizer
    fragments = []
    for flat, params in zip(z.fp32_partitioned_groups_flat, z.fp16_groups, strict=True):
        offset = 0
        for p in params:
            fragments.append(_piece(z, names[p], p, flat, offset))
            offset += p.partition_numel()

    def refresh() -> None:
        for sub_group in range(len(z.fp32_partitioned_groups_flat)):
            z._reassign_or_swap_out_partitioned_parameters(sub_group)
        z.checkpoint_event_epilogue()

    return ZeroState(base, fragments, refresh, z.checkpoint_event_prologue)


def _piece(
    z: Any, name: str, p: Any, owner: Tensor, offset: int, is_frozen: bool = False
) -> Fragment:
    """What a rank has of one parameter at stage 3: nothing where only padding is left for it."""
    share = p.partition_numel()
    start = min(share * z._get_param_partition_rank(p), p.ds_numel)
    length = min(share, p.ds_numel - start)
    return Fragment(name, start, length, owner, offset, is_frozen=is_frozen)


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
    return ZeroState(base, fragments, refresh, _nothing)


def _replicated_flat_masters(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 0 in bf16 with DeepSpeed's fused Adam: one fp32 vector per group, on every rank."""
    z = engine.optimizer
    fragments = [
        Fragment(names[p], 0, p.numel(), flat, at, is_replicated=True)
        for flat, params in zip(z.fp32_groups_flat, z.fp16_groups, strict=True)
        for p, at in _in_turn(params)
    ]

    def refresh() -> None:
        for low, master in zip(z.fp16_groups_flat, z.fp32_groups_flat, strict=True):
            low.data.copy_(master.data)

    return ZeroState(base, fragments, refresh, _nothing)


def _plain(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 0 in fp32: the optimizer updates the parameters themselves, on every rank."""
    params = [p for group in base.param_groups for p in group["params"]]
    fragments = [_whole(names[p], p) for p in params]
    return ZeroState(base, fragments, _nothing, _nothing)


def _whole(name: str, owner: Tensor) -> Fragment:
    return Fragment(name, 0, owner.numel(), owner, 0, is_replicated=True)


def _nothing() -> None:
    pass


ADAPTERS = {
    "DeepSpeedZeroOptimizer": _partitioned,
    "BF16_Optimizer": _partitioned_bf16,
    "DeepSpeedZeroOptimizer_Stage3": _sharded_weights,
    **dict.fromkeys(("FP16_UnfusedOptimizer", "MasterWeights"), _replicated_masters),
    "FP16_Optimizer": _replicated_flat_masters,
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "SGD"), _plain),
}
