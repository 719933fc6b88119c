"""Worker of test_tensor_parallel.py: tensor-parallel courses, saved, resumed and spoilt.

Usage: one, two or four ranks of -m tests.distributed.tensor_parallel ROOT PHASE [STAGE...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from minimind.engine.build import Engine
from minimind.engine.clocks import PhaseClock
from minimind.engine.engine import StepResult
from minimind.recovery.fingerprints import Fingerprints
from tools.engines import ORDER, Case, build, course, load, save, state_of, text

SAVED, STEPS, CLIP = 5, 12, 0.9
SPOILT = ("model.norm.weight", "model.layers.0.self_attn.o_proj.weight")


def case_of(stage: int | None, tensor: int = 1) -> Case:
    """With norms of heads, dropout, an average, and a gradient norm above the clip at first."""
    accumulation = {1: 4, 2: 2, 4: 2}[int(os.environ["WORLD_SIZE"])]
    flags = f"--ema 0.9 --dropout 0.1 --grad_clip {CLIP} --tensor_parallel {tensor}"
    return Case(stage, "float32", accumulation, flags=flags, shape={"qk_norm": True, "head_dim": 6})


def whole(root: Path, stages: list[int]) -> dict[str, Any]:
    """The course of one process without DeepSpeed, saved on the way."""
    engine = build(case_of(None), seed=1)
    before = course(engine, 0, SAVED)
    save(engine, root / "whole", SAVED)
    unbroken = course(engine, SAVED, STEPS)
    leave()
    return {"course": before + unbroken, "fingerprint": fingerprint(case_of(None))}


def divided(root: Path, stages: list[int]) -> dict[str, Any]:
    """The same on tensor-parallel ranks: unbroken, resumed by itself, resumed from one process."""
    found: dict[str, Any] = {}
    world_size = int(os.environ["WORLD_SIZE"])
    for stage in stages:
        place = root / f"{world_size}-{stage}"
        engine = build(case_of(stage, 2), seed=1)
        before = course(engine, 0, SAVED)
        save(engine, place, SAVED)
        unbroken = course(engine, SAVED, STEPS)
        other = build(case_of(stage, 2), seed=2)
        load(other, place, SAVED)
        resumed = course(other, SAVED, STEPS)
        ends = state_of(engine), state_of(other)
        load(other, root / "whole", SAVED)
        found[str(stage)] = {
            "course": before + unbroken,
            "resumed": resumed,
            "differing": [key for key in ends[0] if not torch.equal(ends[0][key], ends[1][key])],
            "shapes": {name: len(values) for name, values in ends[0].items()},
            "of one process": course(other, SAVED, STEPS),
            "copies": copies(engine),
            "gathered": gathered(engine),
            "spoilt": spoil(engine),
            "fingerprint": fingerprint(case_of(stage, 2)),
        }
    return found


def take_step(engine: Engine, step: int) -> StepResult:
    """Take the step after `step`, whatever the engine has taken before."""
    rows = text()[
        torch.from_numpy(ORDER.rows_for(step, engine.data_rank, engine.parallel.data_size))
    ]
    clock = PhaseClock(engine.device)
    clock.begin()
    batch = rows.split(len(rows) // engine.resolved.run.accumulation_steps)
    first = ORDER.share(engine.data_rank, engine.parallel.data_size).start
    engine.seed(step)
    return engine.step(batch, 1e-3, clock, first=first)


def fingerprint(case: Case) -> dict[str, Any]:
    """That of the first step."""
    batches: Any = SimpleNamespace(order=ORDER)
    engine = build(case, seed=1)
    fingerprints = Fingerprints(engine, batches)
    fingerprints.begin(0)
    return fingerprints.end(1, take_step(engine, 0))


def copies(engine: Engine) -> list[float]:
    """A sum over the weights that every rank has whole, from each rank."""
    split = engine.state().split
    assert split is not None
    own = [p for name, p in engine.model.named_parameters() if name not in split.shapes]
    return engine.gather(float(sum(p.double().sum() for p in own)))


def gathered(engine: Engine) -> list[int]:
    """Bytes that each rank holds in a save beside its weights and moments."""
    state = engine.state()
    tensors = (tensor for f in state.fragments for tensor in state.tensors_of(f).values())
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved = list(state.slices(engine.rank, engine.world_size))  # all of them exist at once
    others = (run for _, run in saved if run.untyped_storage().data_ptr() not in own)
    return engine.gather(sum(run.numel() * run.element_size() for run in others))


def spoil(engine: Engine) -> list[Any]:
    """Whether each rank skips a step in which rank 1 has a gradient that is not finite."""
    weights, seen = dict(engine.model.named_parameters()), []
    for name in SPOILT:
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        factor = float("inf") if engine.rank == 1 else 1.0
        hook = weights[name].register_hook(lambda gradient, by=factor: gradient * by)
        result = take_step(engine, STEPS)
        hook.remove()
        is_same = all(torch.equal(weights[name], old) for name, old in before.items())
        seen += engine.gather((bool(result.is_skipped), is_same))
    return seen


def returned(root: Path, stages: list[int]) -> dict[str, Any]:
    """What was saved by tensor-parallel ranks goes on in one process, under DeepSpeed or not."""
    found = {}
    for stage in (None, 2):
        for place in sorted(root.glob("[24]-*")):
            engine = build(case_of(stage), seed=2)
            load(engine, place, SAVED)
            found[f"{place.name} -> {stage}"] = course(engine, SAVED, STEPS)
            if stage is None:
                leave()
    return found


def leave() -> None:
    """End the group of a single process, which DeepSpeed must not find."""
    from minimind.engine.build import leave_process_group

    leave_process_group()
    os.environ["LOCAL_RANK"] = "0"


def main() -> None:
    """Run a phase; rank 0 writes what it found."""
    root, phase = Path(sys.argv[1]), sys.argv[2]
    for name, alone in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, alone)
    found = globals()[phase](root, [int(stage) for stage in sys.argv[3:]])
    if os.environ["RANK"] == "0":
        (root / f"{phase}-{os.environ['WORLD_SIZE']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
