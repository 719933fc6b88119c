"""The host's work in a step of each engine: `python -m benchmarks.launches --engines`.

A preset's depth with matrices of DIM, so that only the host's work shows. The engines of one depth,
eager or compiled, are built in one process, or one per rank, and take turns. Times are those of
rank 0's main thread on the processor, in ms. "x" is relative to no DeepSpeed: operators, least
time, and the median over rounds of two turns of the same round. The ways of `--zero_update` are
before ("deepspeed") and after ("auto").

An operator counts once where a GPU would launch kernels, a multi-tensor or fused one too; views and
allocations do not. It belongs to the innermost frame that is in ORIGINS. "model" is the forward and
backward pass without hooks; "DeepSpeed" includes DDP's buckets; "ours" is minimind/engine, with the
norm and the fp32 copies of a run without DeepSpeed. torch runs a compiled model eagerly while
operators are counted, so the model's kernels are then the estimate of
`minimind/architecture/costs.py`; the others are counted. Stage 3 is not compiled, which it refuses.

A read is what the host of a GPU would wait for: a number, a tensor, or the size of a result
(`tools/host_reads.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from itertools import product
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.record import record
from minimind.architecture.costs import LAUNCHES
from minimind.config.parse import parse_flags
from minimind.engine import build as engine_build
from minimind.engine.clocks import PhaseClock
from minimind.engine.engine import Engine
from tools.engines import Case, build
from tools.forking import free_port
from tools.host_reads import counted

DIM, VOCABULARY, TOKENS = 16, 128, 3
SHAPE: dict[str, Any] = {"dim": DIM, "n_heads": 2, "n_kv_heads": 1, "vocab_size": VOCABULARY}
WARM, TURN, ROUNDS = 4, 5, 8  # steps before the first round; of a turn
BASE, MUON = "no DeepSpeed", "--optimizer muon"
UPDATES = ("deepspeed", "auto")  # before and after
# Stage and flags.
ENGINES: dict[str, tuple[int | None, str]] = {
    BASE: (None, ""),
    **{f"stage {n}, {way}": (n, f"--zero_update {way}") for n in (0, 1, 2) for way in UPDATES},
    "stage 3": (3, ""),
    "Muon, no DeepSpeed": (None, MUON),
    **{f"Muon, stage 2, {way}": (2, f"{MUON} --zero_update {way}") for way in UPDATES},
}
NAMES = ("model", "optimizer", "DeepSpeed", "ours")
ORIGINS = {  # part of a path -> who issues operators there; the first that matches
    "/deepspeed/runtime/zero/linear.py": "model",  # stage 3's product, in place of torch's
    "/deepspeed/": "DeepSpeed",
    "/torch/optim/": "optimizer",
    "/minimind/engine/optimizers.py": "optimizer",
    "/minimind/engine/": "ours",
    "/minimind/model/": "model",
    "/torch/autograd/graph.py": "model",  # the backward pass; a hook's own frame is further in
}
FREE = ("empty", "new_empty", "detach", "alias", "lift", "set_", "resize_", "_unsafe_view", "prim:")
DDP = ("mul.out", "c10d::")  # what its C++ issues in the backward pass
READ = "_local_scalar_dense"  # counted among the reads


@cache
def origin_of(filename: str) -> str | None:
    """Who issues operators in this file; None: who calls it."""
    return next((name for part, name in ORIGINS.items() if part in filename), None)


class Operators(TorchDispatchMode):
    """Counts operators that compute, by origin and name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if not (func.is_view or name.startswith((*FREE, "profiler::", READ))):
            frames = traceback.walk_stack(sys._getframe(1))
            origins = (origin_of(frame.f_code.co_filename) for frame, _ in frames)
            origin = next(filter(None, origins), "nobody")
            is_ddp = origin == "model" and name.startswith(DDP)
            self.found["DeepSpeed" if is_ddp else origin, name] += 1
        return func(*args, **(kwargs or {}))


class Turns:
    """Takes steps of one engine."""

    def __init__(self, stage: int | None, flags: str, layers: int, how: str) -> None:
        shape = SHAPE | {"n_layers": layers}
        flags += f" --compile {'on' if how == 'compiled' else 'off'}"
        flags += "".join(f" --{k} {v}" for k, v in shape.items() if k != "vocab_size")
        self.engine: Engine = build(Case(stage, "bfloat16", 1, flags=flags, shape=shape), seed=0)
        self.clock = PhaseClock(self.engine.device)
        self.rows = torch.arange(TOKENS).view(1, TOKENS)
        # Stage 3 replaces it for the whole process.
        self.linear = torch.nn.functional.linear
        self.steps = 0

    def take(self, steps: int) -> float:
        """Take steps; return the milliseconds of the processor in one."""
        torch.nn.functional.linear = self.linear
        started = time.thread_time()
        for _ in range(steps):
            self.engine.seed(self.steps)
            self.clock.begin()
            self.engine.step([self.rows], 1e-3, self.clock)
            self.steps += 1
        return (time.thread_time() - started) / steps * 1e3


def measure(rank: int, size: int, port: int, layers: int, how: str, rounds: int, out: str) -> None:
    """Build the engines and let them take turns; rank 0 writes what it found."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or one would be eager
    turns: dict[str, Turns] = {}
    for name, (stage, flags) in ENGINES.items():
        if how == "compiled" and stage == 3:
            continue  # a run of it is refused
        turns[name] = Turns(stage, flags, layers, how)
        turns[name].take(WARM)
        # The process group of the first engine is that of all.
        engine_build._init_single_process = partial(os.environ.pop, "LOCAL_RANK", None)
    graphs = counters["stats"]["unique_graphs"]
    gc.collect()
    gc.freeze()
    gc.disable()
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            times[name].append(turns[name].take(TURN))
    if counters["stats"]["unique_graphs"] != graphs:
        raise SystemExit("a graph was compiled during the timed steps")
    found: dict[str, Any] = {}
    for name, one in turns.items():
        with counted() as reads, Operators() as operators:
            one.take(1)
        issued: dict[str, int] = dict.fromkeys(NAMES, 0)
        for (origin, _), number in operators.found.items():
            issued[origin] += number
        if how == "compiled":
            block, rest = LAUNCHES["compiled"]
            issued["model"] = layers * block + rest
        found[name] = {
            "update": getattr(one.engine.backend, "zero_update", ""),
            "parameters": sum(1 for _ in one.engine.model.parameters()),
            "operators": issued,
            "reads": dict(reads),
            "ms_of_turns": times[name],
            "least_ms": min(times[name]),
            "median_ms": statistics.median(times[name]),
            "time": statistics.median(map(truediv, times[name], times[BASE])),
        }
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def operators_of(row: Mapping[str, Any]) -> int:
    """Return the operators of a step, of every origin."""
    return sum(row["operators"].values())


def shown(title: str, table: Mapping[str, Any]) -> str:
    """Return the table of one depth as text."""
    heads = "".join(f"{name:>{len(name) + 2}}" for name in (*NAMES, "  all"))
    lines = [f"{title:27}{heads}{'x':>6}{'reads':>6}{'ms least':>9}{'x':>6}{'median':>8}{'x':>6}"]
    base = table[BASE]
    for name, row in table.items():
        columns = "".join(f"{row['operators'][origin]:{len(origin) + 2},}" for origin in NAMES)
        whole, least = operators_of(row), row["least_ms"]
        lines.append(
            f"  {name:25}{columns}{whole:7,}{whole / operators_of(base):6.2f}"
            f"{sum(row['reads'].values()):6}{least:9.2f}{least / base['least_ms']:6.2f}"
            f"{row['median_ms']:8.2f}{row['time']:6.2f}"
        )
    updates = [f"  {name}: {row['update']}" for name, row in table.items() if "auto" in name]
    return "\n".join([*lines, *updates])


def above_base(less: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What every further parameter adds above BASE between two depths, by engine.

    Operators, and microseconds by the least time.
    """

    def above(table: Mapping[str, Any], name: str) -> tuple[float, float]:
        row, base = table[name], table[BASE]
        return operators_of(row) - operators_of(base), (row["least_ms"] - base["least_ms"]) * 1e3

    parameters = more[BASE]["parameters"] - less[BASE]["parameters"]
    found = {}
    for name in more:
        pairs = zip(above(less, name), above(more, name), strict=True)
        operators, micros = ((after - before) / parameters for before, after in pairs)
        found[name] = {"operators": operators, "us": micros}
    return found


def run(given: argparse.Namespace) -> None:
    """Run it, print a table for each depth, write the JSON after each."""
    before = os.getloadavg()
    found: dict[str, Any] = {}
    for size, how in product(given.processes, given.how):
        group = f"{how}, W = {size}"
        tables: dict[str, Any] = {}
        found[group] = {"depths": tables}
        for preset in given.depths:
            layers = parse_flags(["--model", preset]).n_layers
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "found.json")
                place = (size, free_port(), layers, how, given.rounds or ROUNDS, str(out))
                spawn(measure, place, size)
                tables[preset] = json.loads(out.read_text())
            print(shown(f"{preset}, {group}", tables[preset]), flush=True)
            record(given.out, "launches", before, found=found)
        if len(tables) > 1:
            (less, one), (more, other) = list(tables.items())[-2:]
            found[group]["above"] = above = above_base(one, other)
            print(f"above {BASE}, for each parameter from {less} to {more}, {group}")
            for name, row in above.items():
                print(f"  {name:25}{row['operators']:7.2f} operators{row['us']:7.1f} us")
            record(given.out, "launches", before, found=found)
