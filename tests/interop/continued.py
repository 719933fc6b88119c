"""Small runs of ours and of DeepSpeed on the same rows, of which one continues the other."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine.compile import compute_in
from minimind.engine.optimizers import run_groups
from minimind.engine.plain_backend import PlainBackend
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from tests.faults import tiny
from tools.forking import Nursery, free_port

STEPS, RATE, ROWS, LENGTH = 3, 1e-2, 4, 16  # of deepspeed_runs.py, which imports DeepSpeed
BOUNDS = {"float32": 1e-6, "bfloat16": 2e-2, "bf16-mixed": 2e-2}  # of a loss of 6.4
DTYPES = {"f": "float32", "b": "bfloat16", "h": "float16", "m": "bf16-mixed"}


def cases(*names: str) -> list[tuple[str, int, str]]:
    """`2f` -> stage 2 in float32."""
    return [(name, int(name[0]), DTYPES[name[1]]) for name in names]


def run_deepspeed(
    nursery: Nursery, processes: int, source: Path, out: Path, names: tuple[str, ...]
) -> None:
    """Run deepspeed_runs.py on so many ranks, until they end."""
    words = [str(source), str(out), json.dumps(cases(*names))]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables = alone | {"MASTER_PORT": str(free_port())} if processes == 1 else {}
    statuses, _, said = nursery.run(
        "tests.interop.deepspeed_runs", words, out / "ranks", processes, of_last=([], variables)
    )
    assert statuses == [0] * processes, said[-3000:]


class Engine(tiny.Engine):
    """One process with a model, whose steps are those of deepspeed_runs.py."""

    def __init__(self, config: MiniMindConfig, dtype: str, optimizer: str = "adamw") -> None:
        torch.manual_seed(1)
        flags = {"dtype": dtype, "learning_rate": RATE, "grad_clip": 1, "optimizer": optimizer}
        run = parse_flags([word for name, v in flags.items() for word in (f"--{name}", str(v))])
        self.model = MiniMindForCausalLM(config).to(getattr(torch, run.weight_dtype))
        compute_in(dtype, self.model, "cpu")
        groups = run_groups(self.model, run)
        self.backend = PlainBackend(self.model, self.model, ResolvedConfig(run, "single"), groups)

    def losses(self, first: int, last: int) -> list[float]:
        """Train steps `first` to `last` - 1; return their losses."""
        found = []
        for step in range(first, last):
            random = torch.Generator().manual_seed(step)
            ids = torch.randint(5, 512, (ROWS, LENGTH), generator=random)
            self.backend.begin(RATE)
            loss = self.model(input_ids=ids, labels=ids).loss
            self.backend.backward(loss)
            self.backend.update(True)
            found.append(float(loss.detach()))
        return found
