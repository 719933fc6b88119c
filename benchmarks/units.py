"""The units of a feed-forward kept for the backward pass, and computed again as `layers.py` has it.

    OMP_NUM_THREADS=2 python -m benchmarks.units [--rounds 25] [--rows 2] [--dtype bfloat16]
        [--out FILE.json]

The 26m preset, compiled for the CPU, forward and backward, a step of each in turn in one process.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.record import arguments, preset, record
from minimind.model import layers


def step_of(text: torch.Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """A forward and backward pass of a model of its own, compiled by a first one."""
    model: Any = preset("26m")
    model.to(dtype).train()

    @torch.compile(dynamic=False)
    def loss_of(text: torch.Tensor) -> Any:
        out = model(text[:, :-1], shift_labels=text[:, 1:], summed_by=0)
        return out.loss_sum / out.targets

    def step() -> None:
        model.zero_grad()
        loss_of(text).backward()

    step()
    return step


def main() -> None:
    """Run it, print the ratio, write the JSON."""
    asked = arguments(__doc__)
    asked.add_argument("--rounds", type=int, default=25)
    asked.add_argument("--rows", type=int, default=2)
    asked.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = asked.parse_args()
    before, recomputed = os.getloadavg(), layers.recomputed
    text = torch.randint(preset("26m").config.vocab_size, (given.rows, 513))
    steps = {}
    for name in ("kept", "again"):
        keeps: Any = lambda function, *inputs: function(*inputs)  # noqa: E731 (one line says it)
        layers.recomputed = recomputed if name == "again" else keeps
        torch.compiler.reset()
        steps[name] = step_of(text, getattr(torch, given.dtype))
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(given.rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            steps[name]()
            spent[name].append((time.perf_counter() - started) * 1e3)
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
