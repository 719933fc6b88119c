"""Time of the host per operator: a step of the 26m preset's depth with tensors of a few elements.

    OMP_NUM_THREADS=1 python -m benchmarks.launches [--rounds 50] [--out FILE.json]
        [--engines [--depths 26m 104m 0.4b] [--how eager compiled] [--processes 1 2]]

Forward and backward pass in fp32, eager and compiled. On a GPU the host spends this time, and that
of a CUDA launch, on every kernel; `minimind/architecture/costs.py` counts the kernels.

--engines: what the host does in a step of each engine instead (`benchmarks/engine_launches.py`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import engine_launches
from benchmarks.record import arguments, record
from minimind.architecture.costs import LAUNCHES
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig

LAYERS, ROUNDS = 8, 50


def step_of(compiles: bool) -> Callable[[], None]:
    """A forward and backward pass of a model of its own."""
    shape: Any = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MiniMindConfig(vocab_size=16, num_hidden_layers=LAYERS, **shape)
    model: Any = MiniMindForCausalLM(config).train()
    text = torch.randint(16, (1, 3))
    forward = torch.compile(model.forward, dynamic=False) if compiles else model.forward

    def step() -> None:
        out = forward(input_ids=text[:, :-1], shift_labels=text[:, 1:], loss_chunk_size=0)
        (out.loss_sum / out.targets).backward()
        model.zero_grad()

    return step


def launches(step: Callable[[], None], compiles: bool) -> int:
    """Operators of an eager step; kernels of a compiled one, as the estimate states them."""
    if compiles:
        block, rest = LAUNCHES["compiled"]
        return LAYERS * block + rest
    with engine_launches.Operators() as found:
        step()
    return found.found.total()


def main() -> None:
    """Run it, print microseconds per launch, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--engines", action="store_true")
    parser.add_argument("--depths", nargs="+", default=["26m", "104m", "0.4b"], help="presets")
    parser.add_argument("--how", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    parser.add_argument("--processes", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    given = parser.parse_args()
    if given.engines:
        engine_launches.run(given)
        return
    before, found = os.getloadavg(), {}
    for name in ("eager", "compiled"):
        step = step_of(name == "compiled")
        number = launches(step, name == "compiled")
        step()
        spent = []
        for _ in range(given.rounds or ROUNDS):
            started = time.perf_counter()
            step()
            spent.append((time.perf_counter() - started) * 1e6)
        micros = statistics.median(spent)
        found[name] = {"step_us": micros, "launches": number, "us": micros / number}
        print(f"{name:<9}{micros:,.0f} us, {number} launches, {micros / number:.1f} us each")
    record(given.out, "launches", before, found=found)


if __name__ == "__main__":
    main()
