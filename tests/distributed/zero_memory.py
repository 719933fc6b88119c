"""Worker of test_zero_memory.py: bytes that a step holds by DeepSpeed's update and by ours.

Usage: ranks of -m tests.distributed.zero_memory OUT.json CASE ...
A case is STAGE,DTYPE,MICRO-BATCHES,OVERLAP,BUCKET.

In the last of three steps all storages are counted as in measure_memory.py: at every gradient and
reduction, between micro-batches, at the boundary (after the last backward pass, in the update of
each group, and at the collectives there), and after the step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from tests.distributed.adapters import ZERO
from tools.engines import Case, build, course
from tools.measure_memory import COLLECTIVES, inner_parts, settled

LAST = 2  # step that is looked at


class Census:
    """The most bytes at each point of a step, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.collective = ""  # where one is
        self.at: dict[str, int] = {}

    def look(self, point: str) -> None:
        """Count what is held now."""
        if self.is_on:
            most = self.at.get(point, 0)
            self.at[point] = max(most, settled(most))

    def before(self, owner: Any, method: str, point: str = "") -> None:
        """Count before every call of `owner.method`; no point: that of a collective."""
        real = getattr(owner, method)

        def call(*given: Any, **named: Any) -> Any:
            self.look(point or self.collective)
            return real(*given, **named)

        setattr(owner, method, call)


census = Census()


class Watched(MiniMindForCausalLM):
    """Its gradients are counted as they come."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(lambda _: census.look("at a gradient"))


def measure(case: Case) -> dict[str, int]:
    """Bytes by point; the same of this rank's weights."""
    gc.collect()
    gc.freeze()  # what is there by now is neither looked at nor counted
    engine = build(case, seed=1)
    census.at = {}
    deepspeed, optimizer = inner_parts(engine)
    backward = engine.backend.backward

    def watched_backward(loss: torch.Tensor) -> None:
        census.collective = "at a reduction"
        backward(loss)
        census.collective = "at the boundary"
        is_last = deepspeed.is_gradient_accumulation_boundary()
        census.look("at the boundary" if is_last else "between micro-batches")

    engine.backend.backward = watched_backward
    census.before(optimizer, "step", "at the boundary")
    course(engine, 0, LAST)
    census.is_on = True
    course(engine, LAST, LAST + 1)
    census.look("after the step")
    census.is_on = False
    return {**census.at, "weights": sum(p.numel() for p in engine.model.parameters())}


def main() -> None:
    """Measure every case of the command line by both updates; rank 0 writes all ranks' bytes."""
    for name, alone in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, alone)
    import_module("deepspeed")  # its many objects are frozen with the others
    for name in COLLECTIVES:
        census.before(dist, name)
    found: dict[str, Any] = {}
    for words in sys.argv[2:]:
        stage, dtype, accumulation, overlap, bucket = words.split(",")
        edits: dict[str, Any] = {
            f"{ZERO}overlap_comm": overlap == "overlap",
            f"{ZERO}reduce_bucket_size": int(bucket),
        }
        found[words] = {}
        for update in ("deepspeed", "auto"):
            flags = f"--zero_update {update}"
            case = Case(int(stage), dtype, int(accumulation), edits, Watched, flags)
            shares: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
            own = measure(case)
            dist.all_gather_object(shares, own)
            found[words][update] = shares
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
