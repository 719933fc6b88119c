"""Worker of test_corruption.py: flips single bits on random ranks and lets the check look for them.

Usage: torchrun ... flip_bits.py RESULTS.json FLIPS CLEAN STAGE,DTYPE[,deterministic] ...
STAGE None: without DeepSpeed. Each case checks a clean state CLEAN times, a step apart, and then
FLIPS flips: of weights, of state, and of activations while rows are computed again. A flip is
undone before the next one.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState  # noqa: TID251 (a fresh one for every engine)

import minimind.recovery.corruption as checking
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine.build import Engine, build_engine
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.recovery.corruption import INTEGERS, CorruptionCheck

SHAPE = MiniMindConfig(
    vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)
FLAGS = "--batch_size 4 --accumulation_steps 2 --max_steps 9000 --device cpu --verify_interval 1"
LR = 1e-3


class Rows:
    """Random rows instead of Batches."""

    micro_batch_rows = 4

    def of(self, step: int) -> Rows:
        return self

    def micro_batch_of(self, step: int, rank: int, number: int) -> torch.Tensor:
        """(4, 33) token ids."""
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
        return torch.randint(96, (4, 33), generator=generator)


def engine_of(stage: int | None, dtype: str, is_deterministic: bool) -> Engine:
    """A new engine."""
    AcceleratorState._reset_state(reset_partial_state=True)
    flags = [*FLAGS.split(), "--dtype", dtype, *(["--deterministic"] if is_deterministic else [])]
    run = parse_flags(flags)
    written = read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG))
    written["zero_optimization"]["stage"] = stage or 0
    world_size = int(os.environ["WORLD_SIZE"])
    resolved = resolve(written, "flips.json", run, world_size, "cpu")
    torch.manual_seed(1)
    model = MiniMindForCausalLM(SHAPE)
    return build_engine(ResolvedConfig(run, "ddp") if stage is None else resolved, model, "cpu")


def flip(tensor: torch.Tensor, choose: random.Random) -> Callable[[], None]:
    """Flip one bit of a tensor; return a function that undoes it."""
    bits = tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])
    at, bit = choose.randrange(len(bits)), choose.randrange(8 * tensor.element_size())
    before = bits[at].clone()
    is_sign = bit == 8 * tensor.element_size() - 1
    bits[at] ^= -(1 << bit) if is_sign else 1 << bit

    def undo() -> None:
        bits[at] = before

    return undo


class Activation:
    """Flips a bit of what a module computes, in one of the three passes of a check."""

    def __init__(self, engine: Engine, choose: random.Random) -> None:
        modules = [m for m in engine.model.modules() if isinstance(m, torch.nn.Linear)]
        self.passes, self.at, self.choose = 0, choose.randrange(3), choose
        self.handle = choose.choice(modules).register_forward_hook(self.forward)
        self.is_flipped = False

    def forward(self, module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        """Flip in pass `at`."""
        if self.passes == self.at:
            output = output.clone()
            flip(output, self.choose)
            self.is_flipped = True
        self.passes += 1
        return output


def spoil(engine: Engine, what: str, choose: random.Random) -> Callable[[], None]:
    """Flip a bit on this rank; return a function that undoes it."""
    if what == "activation":
        return Activation(engine, choose).handle.remove
    if what == "weight":
        weights = [getattr(p, "ds_tensor", p) for p in engine.model.parameters()]
        return flip(choose.choice(weights), choose)
    held = engine.state()
    f = choose.choice([f for f in held.fragments if f.length])
    kinds = held.tensors_of(f) if f.is_replicated else {"fp32": f.view(f.owner)}
    return flip(choose.choice(list(kinds.values())), choose)


def course(words: str, flips: int, clean: int) -> dict[str, Any]:
    """False alarms, and what was found of each flip."""
    stage, dtype, *more = words.split(",")
    engine = engine_of(None if stage == "None" else int(stage), dtype, bool(more))
    check, clock, rows = (
        CorruptionCheck(engine.resolved.run, engine),
        PhaseClock(engine.device),
        Rows(),
    )
    batches: Any = rows
    alarms: list[Any] = []
    for step in range(clean):
        engine.seed(step)
        clock.begin()
        engine.step([rows.micro_batch_of(step, engine.rank, n) for n in (0, 1)], LR, clock)
        clock.take()
        if found := check.check(step + 1, batches):
            alarms.append(f"{step}: {check.text(found)}")
    choose, found = random.Random(words), []
    for number in range(flips):
        what = ("weight", "state", "activation")[number % 3]
        rank, seed = choose.randrange(engine.world_size), choose.random()
        undo = spoil(engine, what, random.Random(seed)) if engine.rank == rank else lambda: None
        faults = check.check(clean + number, batches)
        undo()
        ranks = sorted({one for fault in faults for one in fault.ranks})
        is_either = any(fault.is_either for fault in faults)
        kinds = sorted({fault.kind for fault in faults})
        found.append(
            {"what": what, "rank": rank, "named": ranks, "either": is_either, "kinds": kinds}
        )
    assert not check.check(clean + flips, batches)
    return {"case": words, "alarms": alarms, "flips": found, "seconds": check.seconds}


def main() -> None:
    """Take every case of the command line; rank 0 writes the list."""
    flips, clean = int(sys.argv[2]), int(sys.argv[3])
    checking.hardware = lambda device: "the same"  # not read from the system 10,000 times
    report = [course(words, flips, clean) for words in sys.argv[4:]]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
