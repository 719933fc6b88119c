"""CPU time and error of the iterations that orthogonalize Muon's updates, for tiny and 26m.

    OMP_NUM_THREADS=1 python -m benchmarks.newton_schulz [--rounds 12] [--out FILE.json]

Polar Express one by one and in pairs (`newton_schulz` of minimind/engine/optimizers.py), and
quintic. The time is of a random matrix, in turn. The error is relative to the same polynomials one
by one in float64, in the Frobenius norm: that of random, ill-conditioned and rank-deficient
matrices.

Then quintic of 16 matrices of a shape in stacks of so many elements: the least time of all turns,
relative to the matrices one by one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.record import arguments, record
from minimind.config.optimizers import NEWTON_SCHULZ
from minimind.engine.optimizers import newton_schulz, stacks

SHAPES = ((192, 192), (64, 192), (192, 512), (512, 512), (512, 1408))
STACKED = ((16, 32), (32, 64), (64, 64), (64, 192), (96, 96), (128, 128), (192, 192), (192, 512))
MATRICES, ELEMENTS = 16, (0, 2**15, 2**16, 2**17, 2**24)
STEPS, EPS = 5, 1e-7
ALONE, PAIRS = "polar_express, one by one", "polar_express"


def one_by_one(update: Tensor) -> Tensor:
    """Polar Express of a wide matrix, each iteration as quintic's."""
    x = update / update.norm().clamp(min=EPS)
    for a, b, c in NEWTON_SCHULZ[PAIRS][:STEPS]:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


CONTENDERS: dict[str, Callable[[Tensor], Tensor]] = {
    name: partial(newton_schulz, rows=rows, steps=STEPS, eps=EPS)
    for name, rows in NEWTON_SCHULZ.items()
} | {ALONE: one_by_one}


def matrices(rows: int, columns: int) -> dict[str, Tensor]:
    """Matrices in float64: random, of falling singular values, of low rank."""
    torch.manual_seed(5)
    draw = partial(torch.randn, dtype=torch.float64)
    left, right = (torch.linalg.qr(draw(size, rows))[0] for size in (rows, columns))
    falling = {
        f"condition 1e{power}": left * torch.logspace(0, -power, rows).double() @ right.T
        for power in (4, 7)
    }
    low = draw(rows, 8) @ draw(8, columns)
    ranks = {"rank 1": draw(rows, 1) @ draw(1, columns), "rank 8": low}
    noisy = {"rank 8 and noise of 1e-4": low + 1e-4 * draw(rows, columns)}
    return {"random": draw(rows, columns), **falling, **ranks, **noisy}


def in_stacks(matrices: list[Tensor], most: int) -> None:
    """Quintic of matrices of one shape, stacks of up to `most` elements together."""
    for stack in stacks([matrix.shape for matrix in matrices], most):
        chosen = [matrices[i] for i in stack]
        update = torch.stack(chosen) if len(chosen) > 1 else chosen[0]
        newton_schulz(update, NEWTON_SCHULZ["quintic"], STEPS, EPS)


def times_of_stacks(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """The least milliseconds by ELEMENTS, of turns one after another."""
    drawn = [torch.randn(shape).to(dtype) for _ in range(MATRICES)]
    least: dict[str, float] = {}
    for _ in range(rounds + 1):
        for most in ELEMENTS:
            started = time.process_time()
            in_stacks(drawn, most)
            spent = (time.process_time() - started) * 1e3
            least[str(most)] = min(spent, least.get(str(most), spent))
    return least


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    before, found = os.getloadavg(), {}
    for shape in SHAPES:
        of_shape = matrices(*shape)
        update, size = of_shape["random"].float(), " x ".join(map(str, shape))
        spent: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for number in range(given.rounds + 1):  # the first touches memory
            for name, contender in CONTENDERS.items():
                started = time.process_time()
                contender(update)
                if number:
                    spent[name].append((time.process_time() - started) * 1e3)
        pairs = zip(spent[ALONE], spent[PAIRS], strict=True)
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        ms = {name: statistics.median(times) for name, times in spent.items()}
        print(
            f"{size:12}", *(f"{name} {value:.2f} ms;" for name, value in ms.items()), f"{ratio:.2f}"
        )
        errors: dict[str, dict[str, float]] = {}
        for kind, matrix in of_shape.items():
            exact = one_by_one(matrix)
            errors[kind] = {
                name: float((CONTENDERS[name](matrix.float()) - exact).norm() / exact.norm())
                for name in (ALONE, PAIRS)
            }
            print(f"  {kind:26}", *(f"{name} {value:.1e};" for name, value in errors[kind].items()))
        found[size] = {"ms": ms, "pairs_against_one_by_one": ratio, "errors": errors}
    together: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for shape in STACKED:
            name = f"{str(dtype).removeprefix('torch.')}, {shape[0]} x {shape[1]}"
            ms = together[name] = times_of_stacks(shape, dtype, given.rounds)
            ratios = (f"{most}: {ms[most] / ms['0']:.2f};" for most in ms)
            print(f"{name:20}", f"one by one {ms['0']:.2f} ms; together", *ratios)
    record(given.out, "newton_schulz", before, found=found, stacks=together)


if __name__ == "__main__":
    main()
