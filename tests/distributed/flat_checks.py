"""Worker of test_flat_partitions_check.py: updates that are compared, and a copy that is broken.

Usage: one or more ranks of -m tests.distributed.flat_checks OUT.json CASE ...
Every case trains for `STEPS` steps in each of `WAYS`. The device passes for one on which updates
are compared with the gradients themselves.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minimind.engine import deepspeed_backend, flat_partitions, master_weights
from minimind.engine.build import Engine
from minimind.engine.flat_partitions import CHECKED, FlatPartitions
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from tools.engines import Case, build, course, state_of

STEPS = 5
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
POISON = float("nan")
# DeepSpeed's own path; ours, whose updates are not compared; compared; compared, a copy broken.
WAYS = ("deepspeed", "unchecked", "checked", "broken")


class WithUnused(MiniMindForCausalLM):
    """A parameter that no loss depends on."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        self.unused = nn.Parameter(torch.ones(7, 3))


class Poisoned(MiniMindForCausalLM):
    """The first gradient of the last rank has a NaN, so that all skip the first step."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        self.backward_passes = 0
        self.model.norm.weight.register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor:
        self.backward_passes += 1
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if self.backward_passes > 1 or not is_last:
            return gradient
        return gradient.index_fill(0, torch.tensor([3]), POISON)


OVERLAP = {"zero_optimization.overlap_comm": True}
SMALL = {**OVERLAP, "zero_optimization.reduce_bucket_size": 1500}
MUON = "--optimizer muon --muon_lr 0.01"
CASES = {
    "1, fp32": Case(1, "float32", 1),
    "1, bf16, 2 micro-batches": Case(1, "bfloat16", 2),
    "1, fp32, 2 micro-batches, overlap": Case(1, "float32", 2, OVERLAP),
    "2, fp32, 2 micro-batches": Case(2, "float32", 2),
    "2, bf16": Case(2, "bfloat16", 1),
    "2, bf16, 2 micro-batches, overlap": Case(2, "bfloat16", 2, SMALL),
    "2, bf16, Muon": Case(2, "bfloat16", 1, flags=MUON),
    "1, fp32, Muon": Case(1, "float32", 2, flags=MUON),
    "2, bf16, spike guard": Case(2, "bfloat16", 2, flags="--spike_guard"),
    "2, fp32, unused": Case(2, "float32", 2, model=WithUnused),
    "1, bf16, unused": Case(1, "bfloat16", 1, model=WithUnused),
    "2, bf16, NaN": Case(2, "bfloat16", 2, model=Poisoned),
    "1, fp32, NaN": Case(1, "float32", 1, model=Poisoned),
    "2, fp32, tensor parallel": Case(2, "float32", 2, flags="--tensor_parallel 2"),
    "1, bf16, tensor parallel": Case(1, "bfloat16", 2, flags="--tensor_parallel 2"),
}


def spoiling(copy: Any, is_here: bool) -> Any:
    """A multi-tensor copy that loses an element of the last tensor, where `is_here`."""

    def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
        copy(targets, sources)
        if is_here:
            targets[-1].view(-1)[-1] += 0.25

    return copy_each


def engine_of(case: Case, way: str, patch: pytest.MonkeyPatch) -> Engine:
    """An engine that updates in one of `WAYS`."""
    if way in ("checked", "broken"):
        # As on a device on which equality with DeepSpeed was not run.
        patch.setattr(
            deepspeed_backend, "FlatPartitions", lambda z, checked: FlatPartitions(z, CHECKED)
        )
    if way == "broken":
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        for module in (flat_partitions, master_weights):  # among ranks, and on one
            patch.setattr(module, "_copy_each", spoiling(module._copy_each, is_last))
    flags = f"{case.flags} --zero_update {'deepspeed' if way == 'deepspeed' else 'auto'}"
    return build(Case(**{**vars(case), "flags": flags}), seed=1)


def seen(case: Case, way: str, alive: WeakSet[Any]) -> dict[str, Any]:
    """The course of one engine, its end, and who updated; its optimizer is added to `alive`."""
    checks = 0

    def counted(partitions: FlatPartitions) -> None:
        nonlocal checks
        checks += 1
        check(partitions)

    check = FlatPartitions._check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatPartitions, "_check", counted)
        engine = engine_of(case, way, patch)
        if case.model is not Poisoned:  # which keeps itself, by a hook of its own
            alive.add(engine.backend.optimizer)
        updates, changes, steps = [engine.zero_update], [], []
        for step in range(STEPS):
            steps += course(engine, step, step + 1)
            updates.append(engine.zero_update)
            changes.append(engine.take_update_change())
        digest = hashlib.sha256()
        for key, values in state_of(engine).items():
            digest.update(key.encode() + values.numpy().tobytes())
        engine.release()
    said = engine.gather([updates, changes])
    return {
        "course": steps,
        "end": digest.hexdigest(),
        "checks": checks,
        "updates": [updates for updates, _ in said],
        "changes": [changes for _, changes in said],
    }


def main() -> None:
    """Take every case of the command line; rank 0 writes what it saw."""
    if "WORLD_SIZE" not in os.environ:
        os.environ |= {**ALONE, "MASTER_PORT": "0"}
    found: dict[str, Any] = {}
    alive: WeakSet[Any] = WeakSet()
    for name in sys.argv[2:]:
        found[name] = {way: seen(CASES[name], way, alive) for way in WAYS}
    gc.collect()
    found["alive"] = len(alive)
    if int(os.environ["RANK"]) == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
