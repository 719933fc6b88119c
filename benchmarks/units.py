"""Feed-forward units and norms saved for the backward pass, or recomputed as in `kernels.py`.

    OMP_NUM_THREADS=2 python -m benchmarks.units [--model 26m] [--rounds 25] [--rows 2]
        [--dtype bfloat16] [--out FILE.json]

A preset, compiled for the CPU: forward and backward steps of both variants, alternating in
one process.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.record import arguments, preset, record
from minimind.model import kernels

AGAIN = kernels.recompute


def kept(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Call `function`, whose result is saved for the backward pass, unless it is attention."""
    return AGAIN(function, *inputs) if function is kernels._block else function(*inputs)


def step_of(shape: str, text: torch.Tensor, dtype: torch.dtype, how: Any) -> Callable[[], None]:
    """Return a forward and backward step of a new model, compiled by a first call.

    The compiler guards on `kernels.recompute`, so every call sets it.
    """
    model: Any = preset(shape)
    model.to(dtype).train()

    @torch.compile(dynamic=False)
    def loss_of(text: torch.Tensor) -> Any:
        out = model(text[:, :-1], shift_labels=text[:, 1:], loss_chunk_size=0)
        return out.loss_sum / out.targets

    def step() -> None:
        kernels.recompute = how
        model.zero_grad()
        loss_of(text).backward()

    step()
    return step


def main() -> None:
    """Run it, print the ratio, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="26m")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args()
    before, dtype = os.getloadavg(), getattr(torch, given.dtype)
    config = preset(given.model).config
    length = min(512, config.max_position_embeddings)
    text = torch.randint(config.vocab_size, (given.rows, length + 1))
    ways = {"kept": kept, "again": AGAIN}
    steps = {name: step_of(given.model, text, dtype, how) for name, how in ways.items()}
    graphs = counters["stats"]["unique_graphs"]
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(given.rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            steps[name]()
            spent[name].append((time.perf_counter() - started) * 1e3)
    if counters["stats"]["unique_graphs"] != graphs:
        raise SystemExit("a graph was compiled during the timed steps")
    pairs = [b / a for a, b in zip(spent["kept"], spent["again"], strict=True)]
    quartiles = statistics.quantiles(pairs, n=4)
    found = {
        "kept_ms": statistics.median(spent["kept"]),
        "again_ms": statistics.median(spent["again"]),
        "time": quartiles[1],
        "quartiles": [quartiles[0], quartiles[2]],
    }
    print(f"kept {found['kept_ms']:.0f} ms, again {found['again_ms']:.0f} ms")
    print(f"time {quartiles[1]:.3f} ({quartiles[0]:.3f}-{quartiles[2]:.3f})")
    record(given.out, "units", before, found=found)


if __name__ == "__main__":
    main()
