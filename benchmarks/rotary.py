"""Rotary position, compiled and not: complex numbers against reals in halves.

    OMP_NUM_THREADS=1 python -m benchmarks.rotary [--rounds 40] [--out FILE.json]

Queries of 8 heads and keys of 2, 64 channels each, 8 rows of 512 positions, forward and backward,
one of each in turn. "halves, compiled" is what a compiled run does with activations; what putting
the projections' rows in that order costs, once a layer and micro-batch, stands beside it.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.record import arguments, record
from minimind.model.decoder import apply_rotary
from minimind.model.kernels import apply_rotary_half
from minimind.model.rotary import build_pos_cis, interleaved_to_half, pos_cis_as_reals

ROWS, POSITIONS, HEADS, CHANNELS, WIDTH = 8, 512, (8, 2), 64, 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def forward_and_backward(
    turn: Callable[..., Tensor], table: Tensor, dtype: torch.dtype
) -> Callable[[], None]:
    """A step of `turn` on queries and keys, and on what comes back."""
    given = [torch.randn(ROWS, POSITIONS, h, CHANNELS, dtype=dtype) for h in HEADS]
    back = [torch.randn_like(x) for x in given]
    given = [x.requires_grad_() for x in given]

    def step() -> None:
        for x, gradient in zip(given, back, strict=True):
            x.grad = None
            turn(x, table).backward(gradient)

    return step


def reordering(dtype: torch.dtype) -> Callable[[], None]:
    """A step of both projections' weights, forward and backward."""
    weights = [torch.randn(h * CHANNELS, WIDTH, dtype=dtype).requires_grad_() for h in HEADS]
    back = [torch.randn_like(w) for w in weights]
    compiled = torch.compile(interleaved_to_half, dynamic=False)

    def step() -> None:
        for w, gradient in zip(weights, back, strict=True):
            w.grad = None
            compiled(w, CHANNELS).backward(gradient)

    return step


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex")
    pos_cis, before = build_pos_cis(CHANNELS, POSITIONS, 1e6), os.getloadavg()
    reals, found = pos_cis_as_reals(pos_cis), {}
    for name, dtype in DTYPES.items():
        steps = {
            "complex, eager": forward_and_backward(apply_rotary, pos_cis, dtype),
            "complex, compiled": forward_and_backward(
                torch.compile(apply_rotary, dynamic=False), pos_cis, dtype
            ),
            "halves, compiled": forward_and_backward(
                torch.compile(apply_rotary_half, dynamic=False), reals, dtype
            ),
            "weights into halves": reordering(dtype),
        }
        spent: dict[str, list[float]] = {one: [] for one in steps}
        for number in range(given.rounds + 3):  # the first compile, and touch memory
            for one, step in steps.items():
                started = time.perf_counter()
                step()
                if number >= 3:
                    spent[one].append((time.perf_counter() - started) * 1e3)
        base = spent["complex, compiled"]
        print(f"{name:24}{'ms':>8}{'least':>8}{'speed':>8}")
        for one, times in spent.items():
            pairs = zip(base, times, strict=True)
            speed = statistics.median(theirs / ours for theirs, ours in pairs)
            found[f"{name}, {one}"] = {
                "ms": statistics.median(times),
                "least_ms": min(times),
                "speed_against_complex_compiled": speed,
            }
            print(f"{one:24}{statistics.median(times):8.2f}{min(times):8.2f}{speed:8.2f}")
    record(given.out, "rotary", before, found=found)


if __name__ == "__main__":
    main()
