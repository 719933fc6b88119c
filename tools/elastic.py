"""Every pair of stages, of world sizes and of groups: saved by one, it goes on under the other.

    python -m tools.elastic [--optimizer NAME] [--zero_update deepspeed]

`make elastic`: 7 minutes.

Each source takes 7 steps, saves, and takes 20 more, which are its unbroken curve. Each target loads
that checkpoint and takes the same 20. Printed is the largest difference of a loss between the two:
at most 2e-6 in fp32 and 2e-3 in bf16, none at all where source and target are the same
configuration; rows must be equal. Muon iterates in fp32 here: in bf16 its rounding makes 1e-3. 16
pairs of stages at world size 2, 9 pairs of world sizes at stage 2, DDP and a single process from
and to DeepSpeed, a chain along one run, and every pair of groups: ranks that share weight matrices
(`tp2`, AdamW only) or the positions of rows (`sp2`, `sp4`), beside data-parallel ranks too. Exit 1
when a limit is broken.

Ten launches: the sources on 1, 4 and 2 ranks and on 4 and 2 with `tp2`, then the targets on the
same, so that every target runs in another process than its source. `python -m tools.gpu` asks for
the pairs of stages of one process, on a GPU where there is one: `... elastic FOLDER sources|targets
DEVICE`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tools.matrix import groups
from tools.runs import ROOT

SAVED, STEPS = 7, 20
WITHIN = {"float32": 2e-6, "bfloat16": 2e-3}
ACCUMULATION = {1: 4, 2: 2, 4: 1}  # the same rows a step
STAGES = (0, 1, 2, 3)


class Layout(NamedTuple):
    """Ranks, their ZeRO stage (None without DeepSpeed), and how many of them read the same rows."""

    world_size: int
    stage: int | None
    tensor: int = 1
    sequence: int = 1


PLAIN, ALONE = Layout(2, 2), Layout(1, None)
DDP = Layout(2, None)
GROUPS = [
    *(Layout(2, 2, tensor=2), Layout(4, 1, tensor=2)),
    *(Layout(2, 2, sequence=2), Layout(4, 3, sequence=2), Layout(4, None, sequence=4)),
]
PAIRS: list[tuple[Layout, Layout]] = [
    *((Layout(2, source), Layout(2, target)) for source in STAGES for target in STAGES),
    *((Layout(a, 2), Layout(b, 2)) for a in (1, 2, 4) for b in (1, 2, 4) if (a, b) != (2, 2)),
    *((DDP, DDP), (DDP, PLAIN), (PLAIN, DDP)),
    *((ALONE, ALONE), (ALONE, PLAIN), (PLAIN, ALONE)),
    *product(GROUPS, [*GROUPS, PLAIN, ALONE]),
    *product([PLAIN, ALONE], GROUPS),
]
# Of one process, whose device is named.
ON_DEVICE = [(Layout(1, a), Layout(1, b)) for a in STAGES for b in STAGES]
# From a checkpoint of PLAIN: each takes some of the 20 steps, and saves for the next.
CHAIN: list[tuple[Layout, int]] = [(Layout(1, 3), 7), (Layout(4, 0), 6), (Layout(2, 2), 7)]
# Phase, ranks, and how many of them share weight matrices.
SIZES = [(1, 1), (4, 1), (2, 1), (4, 2), (2, 2)]
LAUNCHES = [(phase, *sizes) for phase in ("sources", "targets") for sizes in SIZES]


def name_of(layout: Layout) -> str:
    """As in the table."""
    without = "ddp" if layout.world_size > 1 else "single"
    shown = without if layout.stage is None else f"ZeRO-{layout.stage}"
    return f"{layout.world_size} x {shown}{groups(layout.tensor, layout.sequence)}"


def pairs_of(optimizer: str) -> list[tuple[Layout, Layout]]:
    """Those that the optimizer supports."""
    is_supported = optimizer == "adamw"
    return [pair for pair in PAIRS if is_supported or all(one.tensor == 1 for one in pair)]


def in_order(layouts: set[Layout]) -> list[Layout]:
    """No DeepSpeed first, for which a process group must not stand yet; stage 3 last."""
    return sorted(layouts, key=lambda one: (-1 if one.stage is None else one.stage, name_of(one)))


class Worker:
    """One rank of one launch: builds its engines one after another."""

    def __init__(
        self,
        root: Path,
        world_size: int,
        tensor: int,
        device: str = "",
        optimizer: str = "adamw",
        update: str = "auto",
    ) -> None:
        self.root, self.optimizer, self.update = root, optimizer, update
        self.world_size, self.tensor = world_size, tensor
        self.device = device or "cpu"
        self.pairs, self.chain = (ON_DEVICE, []) if device else (pairs_of(optimizer), CHAIN)
        self.curves: dict[str, Any] = {}

    def sources(self) -> None:
        """Save after some steps, and go on: the unbroken curves."""
        from tools.engines import course, save

        for layout in in_order({source for source, _ in self.pairs if self._builds(source)}):
            for dtype in WITHIN:
                engine = self._build(layout, dtype)
                course(engine, 0, SAVED)
                save(engine, self._place(layout, dtype), SAVED)
                self.curves[f"{dtype}|{name_of(layout)}"] = course(engine, SAVED, SAVED + STEPS)
                self._leave(layout)

    def targets(self) -> None:
        """Go on from each source's checkpoint, and take this launch's part of the chain."""
        from tools.engines import course, load

        for target in in_order({target for _, target in self.pairs if self._builds(target)}):
            for source in [s for s, t in self.pairs if t == target]:
                for dtype in WITHIN:
                    engine = self._build(target, dtype)
                    load(engine, self._place(source, dtype), SAVED)
                    found = course(engine, SAVED, SAVED + STEPS)
                    self.curves[f"{dtype}|{name_of(source)} -> {name_of(target)}"] = found
                    self._leave(target)
        self._chain()

    def _chain(self) -> None:
        from tools.engines import course, load, save

        place, first = PLAIN, SAVED
        for layout, steps in self.chain:
            for dtype in WITHIN if self._builds(layout) else ():
                engine = self._build(layout, dtype)
                load(engine, self._place(place, dtype), first)
                self.curves[f"{dtype}|chain {first}"] = course(engine, first, first + steps)
                save(engine, self._place(layout, dtype), first + steps)
            place, first = layout, first + steps

    def _builds(self, layout: Layout) -> bool:
        """Whether it is one of this launch's: DeepSpeed keeps the groups of its first engine."""
        return (layout.world_size, layout.tensor) == (self.world_size, self.tensor)

    def _build(self, layout: Layout, dtype: str) -> Any:
        import torch

        from minimind.engine import optimizers
        from tools.engines import MUON, Case, build

        # On a GPU some kernels sum in an order of their own each time.
        flags = f"--zero_update {self.update}" if layout.stage is not None else ""
        flags += " --deterministic" if self.device == "cuda" else ""
        flags += f" --tensor_parallel {layout.tensor} --sequence_parallel {layout.sequence}"
        edits = {}
        if self.optimizer == "muon":
            dtypes = {"cpu": torch.float32}
            optimizers.iteration_dtype = lambda device: dtypes.get(device.type, torch.bfloat16)
            edits = MUON
            flags += " --optimizer muon --muon_lr 0.01" if layout.stage is None else ""
        elif self.optimizer != "adamw":
            flags += f" --optimizer {self.optimizer}"
        accumulation = ACCUMULATION[layout.world_size]
        case = Case(layout.stage, dtype, accumulation, edits=edits, flags=flags)
        return build(case, seed=1, on=self.device)

    def _place(self, layout: Layout, dtype: str) -> Path:
        return self.root / f"{dtype}-{name_of(layout)}".replace(" ", "-")

    def _leave(self, layout: Layout) -> None:
        """A single process has a group of its own, which DeepSpeed must not find."""
        if layout == ALONE:
            from minimind.engine.build import leave_process_group

            leave_process_group()
            os.environ["LOCAL_RANK"] = "0"  # taken away from Accelerate, put back for DeepSpeed


def work(
    root: Path,
    phase: str,
    device: str = "",
    optimizer: str = "adamw",
    tensor: str = "1",
    update: str = "auto",
) -> None:
    """What each rank of a launch runs."""
    import torch.distributed as dist

    worker = Worker(root, int(os.environ["WORLD_SIZE"]), int(tensor), device, optimizer, update)
    getattr(worker, phase)()
    if dist.get_rank() == 0:
        path = root / f"{phase}-{worker.world_size}-{tensor}.json"
        path.write_text(json.dumps(worker.curves))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


def launch(
    root: Path, phase: str, world_size: int, tensor: int, optimizer: str, update: str
) -> dict[str, Any]:
    """The curves that one launch has found."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc_per_node={world_size}", "-m", "tools.elastic"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*torchrun, str(root), phase, "", optimizer, str(tensor), update],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        ranks = f"{world_size} ranks{groups(tensor, 1)}"
        raise SystemExit(f"{phase} on {ranks} failed:\n{done.stderr[-9000:]}")
    return curves_of(root, phase, world_size, tensor)


def curves_of(root: Path, phase: str, world_size: int, tensor: int = 1) -> dict[str, Any]:
    """What a launch has written."""
    return json.loads((root / f"{phase}-{world_size}-{tensor}.json").read_text())


def shown(curve: list[Any], unbroken: list[Any], limit: float, is_same: bool) -> tuple[str, bool]:
    """What the table says of a curve, and whether it is within its limit."""
    if [s["rows"] for s in curve] != [s["rows"] for s in unbroken]:
        return "OTHER ROWS", False
    largest = max(abs(a["loss"] - b["loss"]) for a, b in zip(curve, unbroken, strict=True))
    if curve == unbroken:  # norms and counters too
        return "bit for bit", True
    is_within = largest <= limit and not is_same
    return f"{largest:.1e}{'' if is_within else ' TOO MUCH'}", is_within


def main(optimizer: str, update: str) -> int:
    """Print one line per pair and one for the chain; 1 if a limit is broken."""
    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for phase, world_size, tensor in LAUNCHES:
            if tensor > 1 and optimizer != "adamw":
                continue
            ranks = f"{world_size} ranks{groups(tensor, 1)}"
            print(f"{phase} on {ranks} ...", file=sys.stderr, flush=True)
            curves |= launch(Path(name), phase, world_size, tensor, optimizer, update)
    print(f"{'saved by':<16}{'goes on as':<16}{'fp32':>20}{'bf16':>20}")
    pairs = [(name_of(a), name_of(b)) for a, b in pairs_of(optimizer)]
    lines = [(a, b, f"{a} -> {b}") for a, b in pairs]
    lines.append((name_of(PLAIN), " -> ".join(name_of(layout) for layout, _ in CHAIN), "chain"))
    hops = [SAVED + sum(steps for _, steps in CHAIN[:hop]) for hop in range(len(CHAIN))]
    failed = 0
    for source, target, key in lines:
        calls = []
        for dtype, limit in WITHIN.items():
            if key == "chain":
                curve = [step for hop in hops for step in curves[f"{dtype}|chain {hop}"]]
            else:
                curve = curves[f"{dtype}|{key}"]
            unbroken = curves[f"{dtype}|{source}"]
            text, is_right = shown(curve, unbroken, limit, is_same=source == target)
            calls.append(text)
            failed += not is_right
        print(f"{source:<16}{target:<16}{calls[0]:>20}{calls[1]:>20}")
    limits = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in WITHIN.items())
    print(f"within {limits}" if not failed else f"{failed} are not within {limits}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].startswith("--"):
        work(Path(sys.argv[1]), *sys.argv[2:])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--zero_update", default="auto")
    named = parser.parse_args()
    sys.exit(main(named.optimizer, named.zero_update))
