"""A linear layer in torch's bf16, in bf16 through fp32 as in `bf16_matmul.py`, and in fp32.

    OMP_NUM_THREADS=1 python -m benchmarks.products [--rounds 10] [--tokens 512] [--out FILE.json]

The first projection of a feed-forward, 512 channels to 1,408 as in 26m, forward and backward, in
turn. Runs use the first on CPUs with bf16 instructions and the second on others; "chosen" names the
one of this CPU.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import arguments, record
from minimind.model.bf16_matmul import WidenedLinear
from minimind.runtime.hardware import HAS_BF16

INPUTS, OUTPUTS = 512, 1408


def forward_and_backward(
    product: Callable[[Tensor, Tensor], Tensor], tokens: int, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a step of the layer: its output, and the gradients of input and weight."""
    x = torch.randn(tokens, INPUTS, dtype=dtype).requires_grad_()
    weight = torch.randn(OUTPUTS, INPUTS, dtype=dtype).requires_grad_()
    back = torch.randn(tokens, OUTPUTS, dtype=dtype)

    def step() -> None:
        x.grad = weight.grad = None
        product(x, weight).backward(back)

    return step


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    before, widen = os.getloadavg(), WidenedLinear.apply
    steps = {
        "bf16, torch's": forward_and_backward(F.linear, given.tokens, torch.bfloat16),
        "bf16, by fp32": forward_and_backward(widen, given.tokens, torch.bfloat16),  # type: ignore[arg-type] (torch types apply loosely)
        "fp32": forward_and_backward(F.linear, given.tokens, torch.float32),
    }
    spent: dict[str, list[float]] = {one: [] for one in steps}
    for number in range(given.rounds + 1):  # the first touches memory
        for one, step in steps.items():
            started = time.perf_counter()
            step()
            if number:
                spent[one].append((time.perf_counter() - started) * 1e3)
    base, found = spent["bf16, torch's"], {}
    print(f"{'':16}{'ms':>10}{'least':>10}{'speed':>8}")
    for one, times in spent.items():
        pairs = zip(base, times, strict=True)
        ms, least = statistics.median(times), min(times)
        speed = statistics.median(theirs / ours for theirs, ours in pairs)
        found[one] = {"ms": ms, "least_ms": least, "speed_against_bf16": speed}
        print(f"{one:16}{ms:10.2f}{least:10.2f}{speed:8.2f}")
    chosen = "bf16, torch's" if HAS_BF16 else "bf16, by fp32"
    print(f"chosen on this CPU: {chosen}")
    record(given.out, "products", before, found=found, chosen=chosen)


if __name__ == "__main__":
    main()
