"""Where each DeepSpeed wrapper stores weights and optimizer state: one function per class.

Relies on private attributes of one version of DeepSpeed; other versions, unknown wrappers and
unknown base optimizers are refused by name. Does not import deepspeed.
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

from minimind.config.optimizers import BARE_CLASSES, KINDS_OF_CLASS, RESUMABLE
from minimind.engine.state import Fragment, TensorSplit, ZeroState
from minimind.errors import CheckpointError

TESTED = "0.19.8"  # constraints.txt and pyproject.toml pin the same


def untested_deepspeed() -> str:
    """The version of DeepSpeed that is installed; empty if it is the tested one."""
    installed = version("deepspeed")
    return "" if installed.partition("+")[0] == TESTED else installed  # after + stands the build


def require_tested_deepspeed() -> None:
    """Raise CheckpointError if another version of DeepSpeed is installed."""
    if installed := untested_deepspeed():
        raise CheckpointError(
            f"DeepSpeed {installed} is installed, and checkpoints are tested with {TESTED} only;"
            f" run `pip install deepspeed=={TESTED}`, or train without it (--deepspeed_config none)"
        )


def zero_state(engine: Any) -> ZeroState:
    """Return this rank's state; `engine` is DeepSpeed's engine or a plain backend.

    Raise CheckpointError for an unknown optimizer or wrapper.
    """
    wrapper = engine.optimizer
    base = getattr(wrapper, "optimizer", wrapper)
    if type(base).__name__ not in KINDS_OF_CLASS:
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
    state = adapter(engine, base, names)
    frozen = [_frozen(engine, name, p) for p, name in names.items() if not p.requires_grad]
    return replace(state, fragments=state.fragments + frozen, split=tensor_split(engine))


def tensor_split(engine: Any) -> TensorSplit | None:
    """How weights are divided over tensor-parallel ranks; None if they are whole.

    `engine` is DeepSpeed's engine or a plain backend.
    """
    size = engine.autotp_size() if hasattr(engine, "autotp_size") else 1
    if size < 2:
        return None
    groups = engine.mpu  # DeepSpeed's module of process groups
    group, rank = groups.get_tensor_model_parallel_group(), groups.get_tensor_model_parallel_rank()
    return TensorSplit.of(engine.module, rank, size, group)


def _frozen(engine: Any, name: str, p: Any) -> Fragment:
    """A parameter that is not trained; at stage 3 this rank's partition."""
    if hasattr(p, "ds_tensor"):
        return _partition(engine.optimizer, name, p, p.ds_tensor, 0, is_frozen=True)
    return Fragment(name, 0, p.numel(), p, 0, is_replicated=True, is_frozen=True)


def _partitioned(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stages 1 and 2: each group is a flat vector in equal partitions by rank.

    `_hp_mapping` is not used: it is wrong with `round_robin_gradients`.
    """
    z = engine.optimizer
    fragments = []
    for g, flat in enumerate(z.single_partition_of_fp32_groups):
        size = int(z.partition_size[g])
        first = torch.distributed.get_rank(group=z.real_dp_process_group[g]) * size
        params, offsets = z.round_robin_bit16_groups[g], z.round_robin_bit16_offsets[g]
        fragments += fragments_of(
            zip(params, offsets, strict=True), names, flat, first, first + size
        )
    return ZeroState(base, fragments, partial(_gather_and_link, z), _no_op)


def _partitioned_bf16(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 1 in bf16 with fp32 gradient accumulation: as above, in group order."""
    z = engine.optimizer
    fragments = []
    for g, flat in enumerate(z.fp32_groups_flat_partition):
        first = torch.distributed.get_rank(group=z.real_dp_process_group[g]) * flat.numel()
        fragments += fragments_of(
            _with_offsets(z.bf16_groups[g]), names, flat, first, first + flat.numel()
        )
    return ZeroState(base, fragments, partial(_gather_and_link, z), _no_op)


def _gather_and_link(z: Any) -> None:
    """Gather the weights on all ranks, then rebuild DeepSpeed's links to the moments."""
    z.update_lp_params()
    z._hp_optimizer_states_linked = False
    z._lazy_init_hp_params_optimizer_state()


def _with_offsets(params: list[Any]) -> Iterable[tuple[Any, int]]:
    """Parameters with their offsets in a flat vector."""
    return zip(params, accumulate((p.numel() for p in params), initial=0), strict=False)


def fragments_of(
    params: Iterable[tuple[Any, int]], names: dict[Any, str], flat: Tensor, first: int, last: int
) -> list[Fragment]:
    """Fragments of parameters inside `flat`, elements first..last of the whole vector."""
    fragments = []
    for p, at in params:
        start, end = max(at, first), min(at + p.numel(), last)
        if start < end:
            fragments.append(Fragment(names[p], start - at, end - start, flat, start - first))
    return fragments


def _sharded_weights(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 3: every parameter is partitioned by rank; sub-groups are flat vectors."""
    z = engine.optimizer
    fragments = []
    for flat, params in zip(z.fp32_partitioned_groups_flat, z.fp16_groups, strict=True):
        offset = 0
        for p in params:
            fragments.append(_partition(z, names[p], p, flat, offset))
            offset += p.partition_numel()

    def refresh() -> None:
        for sub_group in range(len(z.fp32_partitioned_groups_flat)):
            z._reassign_or_swap_out_partitioned_parameters(sub_group)
        z.checkpoint_event_epilogue()

    return ZeroState(base, fragments, refresh, z.checkpoint_event_prologue)


def _partition(
    z: Any, name: str, p: Any, owner: Tensor, offset: int, is_frozen: bool = False
) -> Fragment:
    """This rank's partition of a parameter at stage 3; empty if it is only padding."""
    share = p.partition_numel()
    start = min(share * z._get_param_partition_rank(p), p.ds_numel)
    length = min(share, p.ds_numel - start)
    return Fragment(name, start, length, owner, offset, is_frozen=is_frozen)


def _replicated_masters(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 0 or no DeepSpeed, in bf16: an fp32 copy of each parameter on every rank."""
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
    return ZeroState(base, fragments, refresh, _no_op)


def _replicated_flat_masters(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 0 in bf16 with DeepSpeed's fused Adam: an fp32 vector per group on every rank."""
    z = engine.optimizer
    fragments = [
        Fragment(names[p], 0, p.numel(), flat, at, is_replicated=True)
        for flat, params in zip(z.fp32_groups_flat, z.fp16_groups, strict=True)
        for p, at in _with_offsets(params)
    ]

    def refresh() -> None:
        for low, master in zip(z.fp16_groups_flat, z.fp32_groups_flat, strict=True):
            low.data.copy_(master.data)

    return ZeroState(base, fragments, refresh, _no_op)


def _plain(engine: Any, base: Any, names: dict[Any, str]) -> ZeroState:
    """Stage 0 in fp32: the optimizer updates the parameters on every rank."""
    params = [p for group in base.param_groups for p in group["params"]]
    fragments = [_whole(names[p], p) for p in params]
    return ZeroState(base, fragments, _no_op, _no_op)


def _whole(name: str, owner: Tensor) -> Fragment:
    return Fragment(name, 0, owner.numel(), owner, 0, is_replicated=True)


def _no_op() -> None:
    pass


ADAPTERS = {
    "DeepSpeedZeroOptimizer": _partitioned,
    "BF16_Optimizer": _partitioned_bf16,
    "DeepSpeedZeroOptimizer_Stage3": _sharded_weights,
    **dict.fromkeys(("FP16_UnfusedOptimizer", "MasterWeights"), _replicated_masters),
    "FP16_Optimizer": _replicated_flat_masters,
    **dict.fromkeys(BARE_CLASSES, _plain),
}
