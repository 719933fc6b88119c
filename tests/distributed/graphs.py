"""How many graphs a compiled run is made of under each backend, and what breaks or remakes them.

    torchrun ... -m tests.distributed.graphs OUT.json

Graphs are captured as ever and then run as they are. Whatever torch would compile again after the
first step is an error here.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._functorch import config

from minimind.engine.compile import EAGER_BACKWARD
from tools.engines import Case, build, course

is_ahead: list[bool] = []  # of each graph, whether its backward pass is asked for with it
STAGES = {"ddp": None, "stage 0": 0, "stage 1": 1, "stage 2": 2}
EXPERTS = {"use_moe": True, "n_routed_experts": 2, "num_experts_per_tok": 1}


def captured(graph: Any, inputs: Any) -> Any:
    """The graph as it is."""
    is_ahead.append(getattr(config, EAGER_BACKWARD))
    return aot_eager(graph, inputs)


def compiled_course(stage: int | None, shape: dict[str, Any]) -> dict[str, Any]:
    """Losses of four steps, eager and compiled, and what torch counted of the latter."""
    torch._dynamo.reset()
    counters.clear()
    eager = course(build(Case(stage, "bfloat16", shape=shape), seed=1), 0, 4)
    assert not counters["stats"]
    before = len(is_ahead)
    engine = build(Case(stage, "bfloat16", flags="--compile on", shape=shape), seed=1)
    compiled = course(engine, 0, 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        engine.loss_of(torch.zeros((2, 17), dtype=torch.int64, device=engine.device))
        compiled += course(engine, 1, 4)
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "ahead": is_ahead[before:],
        "eager": [step["loss"] for step in eager],
        "compiled": [step["loss"] for step in compiled],
    }


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.compile = partial(torch.compile, backend=captured)
    found = {name: compiled_course(stage, {}) for name, stage in STAGES.items()}
    for name in ("ddp", "stage 2"):
        found[f"experts, {name}"] = compiled_course(STAGES[name], EXPERTS)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down
