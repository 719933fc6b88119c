"""Both updates of ZeRO 1 and 2 beside each other: `--zero_update deepspeed` and `auto`.

Worker of test_zero_updates.py.

Usage: one, two or four ranks of -m tests.distributed.zero_updates OUT.json [NAME...]

Each case is trained by DeepSpeed's own path and by flat partitions. On the way a gradient is not a
number, a norm is above its limit, and the model is evaluated.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from minimind.engine import flat_partitions
from minimind.engine.adapters import TESTED
from minimind.engine.build import Engine
from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from tests.distributed.adapters import BF16, EXPERTS, FP16, FP32, OFFLOAD, SCALED, WIDE_SUMS, ZERO
from tools.engines import Case, WithFrozenParts, build, course, load, save, state_of, text

UPDATES = {"deepspeed": "by DeepSpeed (--zero_update)", "auto": "by flat partitions"}
SAVED, LAST = 7, 40
SPOILT, EVALUATED, LIMITED = 12, 20, 30  # steps
TOO_LOW = 1e-9  # a limit of the norm
# Buckets: one parameter is larger than any, a few fit, all fit.
SMALL, FEW, HUGE = ({f"{ZERO}reduce_bucket_size": size} for size in (1500, 12_000, 10**8))
OVERLAP = {f"{ZERO}overlap_comm": True}
NO_OVERLAP = {f"{ZERO}overlap_comm": False}
ROUND_ROBIN = {f"{ZERO}round_robin_gradients": True}
ALIGNED = {f"{ZERO}parameter_alignment": True}
NO_NORM = {f"{ZERO}compute_grad_norm": False}
WHOLE = "model.layers.0.input_layernorm.weight"  # on every tensor-parallel rank
MUON, LION = "--optimizer muon --muon_lr 0.01", "--optimizer lion"


class WithUnusedParts(WithFrozenParts):
    """A matrix and a vector to which no gradient comes, beside parts that are frozen."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        layer = self.get_submodule("model.layers.0")
        layer.register_parameter("unused", torch.nn.Parameter(torch.ones(8, 12)))
        self.register_parameter("unused_too", torch.nn.Parameter(torch.ones(5)))


class Recomputing(MiniMindForCausalLM):
    """Computes every block again in the backward pass."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        enable_checkpointing(self)


@dataclass(frozen=True)
class Pair:
    """A configuration, and what happens on the way."""

    case: Case
    is_guarded: bool = True  # --spike_guard, whose limit a step is above
    is_crossed: bool = False  # each also resumes the other's checkpoint
    spoilt: str = "model.layers.1.self_attn.o_proj.weight"  # whose gradient is NaN in a step
    but: str = ""  # why flat partitions do not cover it
    among_ranks: str = ""  # why not among several


def pair(
    stage: int, dtype: str, accumulation: int = 1, *edits: dict[str, Any], **options: Any
) -> Pair:
    """A pair whose JSON has all `edits`."""
    own = {name: options.pop(name) for name in ("flags", "model", "shape") if name in options}
    merged = {key: value for edit in edits for key, value in edit.items()}
    options.setdefault("is_guarded", dtype != FP16)  # which refuses the guard
    return Pair(Case(stage, dtype, accumulation, edits=merged, **own), **options)


PAIRS = {
    "1, fp32": pair(1, FP32),
    "1, fp32, 4 micro-batches": pair(1, FP32, 4),
    "1, bf16": pair(1, BF16, is_crossed=True),
    "1, bf16, 4 micro-batches": pair(1, BF16, 4),
    "1, bf16, 4 micro-batches, Muon": pair(1, BF16, 4, flags=MUON),
    "1, bf16, Lion": pair(1, BF16, flags=LION),
    "1, fp16, 4 micro-batches": pair(1, FP16, 4, SCALED, is_crossed=True),
    "1, bf16, overlap, small buckets": pair(1, BF16, 2, OVERLAP, SMALL),
    "1, bf16, no overlap, small buckets": pair(1, BF16, 2, NO_OVERLAP, SMALL),
    "1, bf16, overlap, few buckets": pair(1, BF16, 2, OVERLAP, FEW),
    "1, fp32, unused, Muon": pair(1, FP32, 2, model=WithUnusedParts, flags=MUON),
    "1, bf16, round robin, experts": pair(1, BF16, 2, ROUND_ROBIN, shape=EXPERTS),
    "2, fp32": pair(2, FP32),
    "2, fp32, 4 micro-batches": pair(2, FP32, 4, is_crossed=True),
    "2, fp32, 4 micro-batches, Muon": pair(2, FP32, 4, flags=MUON),
    "2, bf16": pair(2, BF16),
    "2, bf16, unguarded": pair(2, BF16, is_guarded=False),
    "2, bf16, 4 micro-batches": pair(2, BF16, 4, is_crossed=True),
    "2, bf16, 2 micro-batches, Muon": pair(2, BF16, 2, flags=MUON, is_crossed=True),
    "2, bf16, 4 micro-batches, Lion": pair(2, BF16, 4, flags=LION),
    "2, fp16": pair(2, FP16, 1, SCALED),
    "2, fp16, 4 micro-batches": pair(2, FP16, 4, SCALED),
    "2, fp16, no clipping": pair(2, FP16, 2, SCALED, flags="--grad_clip 0"),
    "2, fp16, static scale": pair(2, FP16, 2, {"fp16.loss_scale": 64}),
    "2, bf16, overlap, small buckets": pair(2, BF16, 2, OVERLAP, SMALL),
    "2, bf16, no overlap, small buckets": pair(2, BF16, 2, NO_OVERLAP, SMALL),
    "2, bf16, no overlap": pair(2, BF16, 2, NO_OVERLAP),
    "2, fp32, few buckets": pair(2, FP32, 4, OVERLAP, FEW),
    "2, bf16, aligned as they are": pair(2, BF16, 2, ALIGNED),
    "2, bf16, huge buckets": pair(2, BF16, 1, HUGE),
    "2, bf16, round robin": pair(2, BF16, 2, ROUND_ROBIN),
    "2, bf16, round robin, Muon": pair(2, BF16, 2, ROUND_ROBIN, flags=MUON),
    "2, bf16, experts": pair(2, BF16, 4, shape=EXPERTS),
    "2, fp32, experts, Muon": pair(2, FP32, 2, shape=EXPERTS, flags=MUON),
    "2, bf16, recomputing": pair(2, BF16, 2, model=Recomputing),
    "1, bf16, recomputing": pair(1, BF16, 2, model=Recomputing),
    "2, bf16, unused": pair(2, BF16, 4, model=WithUnusedParts),
    "1, bf16, unused": pair(1, BF16, 4, model=WithUnusedParts),
    "2, bf16, frozen": pair(2, BF16, 2, model=WithFrozenParts),
    "2, bf16, average": pair(2, BF16, 2, flags="--ema 0.9", is_crossed=True),
    "2, bf16, no clipping": pair(2, BF16, 2, flags="--grad_clip 0"),
    "1, fp32, no clipping": pair(1, FP32, 2, flags="--grad_clip 0"),
    "2, bf16, low clip": pair(2, BF16, 2, flags="--grad_clip 0.05"),
    "2, bf16, no norm": pair(2, BF16, 2, NO_NORM, flags="--grad_clip 0", is_guarded=False),
    "1, fp32, no norm": pair(1, FP32, 1, NO_NORM, flags="--grad_clip 0", is_guarded=False),
    "2, fp16, no norm": pair(2, FP16, 1, NO_NORM, SCALED, flags="--grad_clip 0", is_guarded=False),
    "2, bf16, tied": pair(2, BF16, 2, shape={"tie_word_embeddings": True}),
    "2, bf16, sp2": pair(2, BF16, 2, flags="--sequence_parallel 2"),
    "1, fp32, sp2": pair(1, FP32, 1, flags="--sequence_parallel 2"),
    "2, bf16, compiled": pair(2, BF16, 2, flags="--compile on"),
    "1, bf16, compiled, Muon": pair(1, BF16, 1, flags=f"--compile on {MUON}"),
}


# Options that flat partitions do not cover, with the reason that the start gives.
OPTIONS = {
    "offload": pair(2, BF16, 2, OFFLOAD, but="offload_optimizer"),
    "offload at stage 1": pair(1, BF16, 2, OFFLOAD, but="offload_optimizer"),
    "fp32 sums": pair(2, BF16, 2, WIDE_SUMS, but="data_types.grad_accum_dtype"),
    "fp32 sums at stage 1": pair(1, BF16, 2, WIDE_SUMS, but="data_types.grad_accum_dtype"),
    "alignment": pair(2, BF16, 2, ALIGNED, model=WithUnusedParts, but="parameter_alignment"),
    "alignment and round robin": pair(
        1, BF16, 2, ALIGNED, ROUND_ROBIN, model=WithUnusedParts, but="parameter_alignment"
    ),
    "communication in fp32": pair(
        2, BF16, 2, {"communication_data_type": "fp32"}, but="communication_data_type"
    ),
    "scattered gradients": pair(
        2,
        BF16,
        2,
        {f"{ZERO}contiguous_gradients": False},
        among_ranks="contiguous_gradients = false",
    ),
    "all-reduce": pair(
        2, BF16, 2, {f"{ZERO}reduce_scatter": False}, among_ranks="reduce_scatter = false"
    ),
    "reductions to one rank": pair(
        1,
        BF16,
        2,
        {f"{ZERO}use_multi_rank_bucket_allreduce": False},
        among_ranks="use_multi_rank_bucket_allreduce = false",
    ),
    "gradients divided before": pair(
        1,
        BF16,
        2,
        {f"{ZERO}reduce_scatter": False, "gradient_predivide_factor": 3.0},
        but="gradient_predivide_factor",
        among_ranks="reduce_scatter = false",
    ),
    "two reasons": pair(
        2,
        BF16,
        2,
        OFFLOAD,
        ALIGNED,
        model=WithUnusedParts,
        but="offload_optimizer, parameter_alignment",
    ),
    # `installed` names the version in these.
    "another version": pair(2, BF16, 2, but=f"DeepSpeed 0.20.0 is not the tested {TESTED}"),
    "another wrapper": pair(2, BF16, 2, but="its wrapper has no name_of_another_version"),
}
# Launched by themselves: DeepSpeed keeps the groups of its first engine. The weight that is spoilt
# is whole on both ranks, and not finite on rank 1 only.
TENSOR = {
    "2, fp32, tp2": pair(2, FP32, 2, flags="--tensor_parallel 2", spoilt=WHOLE),
    "2, bf16, tp2": pair(2, BF16, 2, flags="--tensor_parallel 2", spoilt=WHOLE),
    "1, bf16, tp2": pair(1, BF16, 4, flags="--tensor_parallel 2", spoilt=WHOLE),
    "2, bf16, tp2, unguarded": pair(
        2, BF16, 2, flags="--tensor_parallel 2", spoilt=WHOLE, is_guarded=False
    ),
    "2, bf16, tp2, divided": pair(2, BF16, 2, flags="--tensor_parallel 2"),
}
PAIRS |= OPTIONS | TENSOR


class Watched:
    """An engine by one of both updates, and all steps that it took."""

    def __init__(self, pair: Pair, update: str, seed: int = 7) -> None:
        self.pair = pair
        guard = "--spike_guard" if pair.is_guarded else ""
        flags = f"{pair.case.flags} {guard} --zero_update {update}"
        self.engine = build(replace(pair.case, flags=flags), seed)
        self.update = self.engine.backend.zero_update  # pyright: ignore[reportAttributeAccessIssue] (of DeepSpeed's)

    def take(self, first: int, last: int) -> list[Any]:
        """Every step, and the loss of an evaluation."""
        steps: list[Any] = []
        for step in range(first, last):
            if step == EVALUATED:
                total, _ = self.engine.loss_of(text()[:4])
                steps.append({"step": step, "evaluated": float(total)})
            hook = spoil(self.engine, self.pair.spoilt) if step == SPOILT else None
            limit = {"norm_limit": TOO_LOW} if step == LIMITED and self.pair.is_guarded else {}
            steps += course(self.engine, step, step + 1, **limit)
            if hook:
                hook.remove()
        return steps


def spoil(engine: Engine, name: str) -> Any:
    """Make a gradient of the last rank NaN; return its hook."""
    weight = dict(engine.model.named_parameters())[name]
    factor = float("nan") if engine.rank == engine.world_size - 1 else 1.0
    return weight.register_hook(lambda gradient: gradient * factor)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same bit for bit, and how far it is apart."""
    assert one.keys() == other.keys()
    apart = {key: float((one[key].double() - other[key].double()).abs().max()) for key in one}
    same = {key for key in one if torch.equal(one[key], other[key])}
    return [f"{key} {distance:.2g}" for key, distance in apart.items() if key not in same]


@contextmanager
def installed(name: str) -> Iterator[None]:
    """DeepSpeed as another version of it would look, if the case is about one."""
    with ExitStack() as stack:
        if name == "another version":
            stack.enter_context(
                mock.patch.object(flat_partitions, "untested_deepspeed", return_value="0.20.0")
            )
        elif name == "another wrapper":
            names = (*flat_partitions.READ, "name_of_another_version")
            stack.enter_context(mock.patch.object(flat_partitions, "READ", names))
        yield


def study(name: str, root: Path) -> dict[str, Any]:
    """Courses and final states by both updates, and each from the other's checkpoint on."""
    known, found = PAIRS[name], {}
    engines, ends = {}, {}
    for update in UPDATES:
        with installed(name):
            one = engines[update] = Watched(known, update)
        steps = one.take(0, SAVED)
        if known.is_crossed:
            save(one.engine, root / update, SAVED)
        steps += one.take(SAVED, LAST)
        ends[update] = state_of(one.engine)
        skipped = one.engine.backend.engine.skipped_steps  # pyright: ignore[reportAttributeAccessIssue] (of DeepSpeed's)
        found[update] = {"update": one.update, "course": steps, "skipped": skipped}
        if not known.is_crossed:
            one.engine.release()
    found["differing"] = differing(*ends.values())
    found["crossed"] = {}
    if known.is_crossed:
        for source, target in (("deepspeed", "auto"), ("auto", "deepspeed")):
            other = engines[target]
            load(other.engine, root / source, SAVED)
            went_on = other.take(SAVED, LAST)
            found["crossed"][f"{source} -> {target}"] = [
                went_on,
                differing(ends[source], state_of(other.engine)),
            ]
        for one in reversed(engines.values()):
            one.engine.release()
    return found


def main() -> None:
    """Study every pair of the command line; rank 0 writes what it saw."""
    for name, alone in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, alone)
    os.environ["DS_ACCELERATOR"] = "cpu"
    get_accelerator: Any = import_module("deepspeed.accelerator").get_accelerator
    get_accelerator().is_fp16_supported = lambda: True
    out, found = Path(sys.argv[1]), {}
    for name in sys.argv[2:] or PAIRS:
        place = out.parent / "checkpoints" / name.replace(", ", "-").replace(" ", "-")
        found[name] = study(name, place)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
