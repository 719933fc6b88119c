"""Every ZeRO stage x dtype x accumulation x world size against one run each in fp32 and bf16.

    python -m tools.matrix [FLAG ...]  (`make matrix`; 128 runs, 14 minutes on 2 cores)

Each run takes 20 steps over the same 8 rows a step, however they are shared out, so that the loss
curves have to agree: in fp32 within 2e-6 relative, in bf16 within 2e-3 absolute. The learning rate
of every step has to be equal. Also without DeepSpeed, as ddp and single; with ranks that share
weight matrices (`tp2`) or the positions of rows (`sp2`, `sp4`), beside data-parallel ranks too; and
the loss in two chunks per micro-batch against the whole. Exit 1 when one of them does not. Every
run has the flags of the command line too: `--zero_update deepspeed`.

Ranks are forked from a process that has imported everything. `python -m tools.gpu` starts some of
the runs by torchrun, on a GPU where there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, ParallelLayout
from minimind.errors import PREEMPTED
from minimind.model.sizes import LOSS_CHUNK
from tools.forking import Nursery, free_port
from tools.runs import PACE, ROOT, SHAPE, sentences

ROWS = 8
WITHIN = {"float32": 2e-6, "bfloat16": 2e-3}  # relative, absolute
STAGES = (0, 1, 2, 3, None)  # None is without DeepSpeed
ALONE, TWO = ParallelLayout(1), ParallelLayout(2)
CHAIN = (4, 3, 2, 4)  # ranks of one run, which is resumed on the next number of them
TENSOR = [ParallelLayout(world, tensor=2) for world in (2, 4)]
SEQUENCE = [ParallelLayout(world, sequence=n) for world, n in ((2, 2), (4, 2), (4, 4))]
# Runs train_pretrain.py with flags on so many ranks, and returns its status and what it printed.
Start = Callable[[list[str], int, Path], tuple[int, str]]


def torchrun(flags: list[str], world: int, out: Path) -> tuple[int, str]:
    """A run by torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world)]
    met = ["--master_port", str(free_port())]
    command = [*launcher, *met, str(ROOT / "train_pretrain.py"), *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def forked(nursery: Nursery) -> Start:
    """A start of ranks that the nursery forks, on CPUs."""

    def start(flags: list[str], world: int, out: Path) -> tuple[int, str]:
        statuses, _, text = nursery.run("train_pretrain", flags, out, world)
        return max(statuses, key=abs), text

    return start


def train(
    root: Path,
    stage: int | None,
    dtype: str,
    accumulation: int,
    layout: ParallelLayout = TWO,
    device: str = "cpu",
    more: str = "",
    start: Start = torchrun,
) -> list[Any]:
    """The `step` events of one run."""
    ranks = f"{layout.world_size}{groups(layout.tensor, layout.sequence)}"
    out = root / f"{stage}-{dtype}-{accumulation}-{ranks}{more}".replace(" ", "")
    flags = [*(more or SHAPE).split(), *PACE.split(), "--data_path", str(root / "text.jsonl")]
    flags += ["--cache_dir", str(root / "cache"), "--out_dir", str(out), "--dtype", dtype]
    flags += ["--batch_size", str(ROWS // accumulation // layout.data_size)]
    flags += [f"--{flag}={size}" for flag, size in layout.to_json().items()]
    flags += ["--accumulation_steps", str(accumulation), "--device", device]
    if stage is not None:
        config = root / f"stage{stage}.json"
        shipped = DEFAULT_DEEPSPEED_CONFIG.read_text()
        config.write_text(shipped.replace('"stage": 2', f'"stage": {stage}'))
        flags += ["--deepspeed_config", str(config)]
    status, printed = start(flags, layout.world_size, out)
    if status:
        raise SystemExit(f"{out.name} ended with {status}:\n{printed[-2000:]}")
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (first,) = [e for e in events if e["event"] == "run_start"]
    backend = "deepspeed" if stage is not None else "ddp" if layout.world_size > 1 else "single"
    assert (first["backend"], first["zero_stage"]) == (backend, stage), first
    assert layout.to_json().items() <= first.items(), first
    return [e for e in events if e["event"] == "step"]


def chained(
    root: Path,
    stage: int | None,
    dtype: str,
    start: Start,
    chain: Sequence[int] = CHAIN,
    more: str = "",
) -> list[Any]:
    """The `step` events of one run on each number of ranks, with the same --global_batch_size.

    On three ranks two of them have a row of padding, and one has two: a micro-batch of padding.
    """
    out = root / f"chain-{stage}-{dtype}{more}".replace(" ", "")
    pace = PACE.replace("--accumulation_steps 2", f"--global_batch_size {ROWS}")
    flags = [*SHAPE.split(), *pace.split(), "--data_path", str(root / "text.jsonl")]
    flags += ["--cache_dir", str(root / "cache"), "--out_dir", str(out), "--dtype", dtype]
    flags += ["--deepspeed_config", "none" if stage is None else f"zero{stage}", *more.split()]
    for number, world in enumerate(chain, 1):
        stop = ["--stop_at_step", str(number * 20 // len(chain))]
        status, printed = start([*flags, *stop], world, out)
        if status != (0 if number == len(chain) else PREEMPTED):
            raise SystemExit(f"{out.name} on {world} ranks ended with {status}:\n{printed[-2000:]}")
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    starts = [e for e in events if e["event"] == "run_start"]
    assert [e["world_size"] for e in starts] == [*chain], starts
    steps = [e for e in events if e["event"] == "step"]
    assert [e["rows"] for e in steps] == [[ROWS * n, ROWS * n + ROWS] for n in range(20)], steps
    assert [e["tokens"] for e in steps] == [64 * ROWS * n for n in range(1, 21)], steps
    return steps


def difference(dtype: str, steps: list[Any], reference: list[Any]) -> float:
    """The largest over the curve: relative in float32, absolute in bfloat16."""
    pairs = [(a["loss"], b["loss"]) for a, b in zip(steps, reference, strict=True)]
    return max(abs(a - b) / (abs(b) if dtype == "float32" else 1.0) for a, b in pairs)


def groups(tensor: int, sequence: int) -> str:
    """` tp2` or ` sp4`; empty where every rank has rows of its own."""
    return f" tp{tensor}" * (tensor > 1) + f" sp{sequence}" * (sequence > 1)


def cases(dtype: str) -> Iterator[tuple[int | None, int, ParallelLayout]]:
    """Stage, accumulation and layout of every run."""
    yield from product(STAGES, (1, 4), (ALONE, TWO))
    stages = (0, 1, 2) if dtype == "float32" else (1, 2)  # the others are refused
    yield from product(stages, (1, 4), TENSOR)
    yield from product(STAGES, (1, 4), SEQUENCE)


def main(flags: list[str]) -> int:
    """Print one line per run, each with `flags`; 1 if any disagrees."""
    failed = 0
    nursery = Nursery()
    on_cpus = forked(nursery)

    def start(own: list[str], world: int, out: Path) -> tuple[int, str]:
        return on_cpus([*own, *flags], world, out)

    print(f"{'backend':<12}{'dtype':<10}{'accumulation':>12}{'ranks':>8}{'difference':>13}  rates")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in sentences(1, 400))
        (root / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for dtype in WITHIN:
            reference = train(root, 2, dtype, 2, start=start)
            for stage, accumulation, layout in cases(dtype):
                steps = train(root, stage, dtype, accumulation, layout, start=start)
                found = difference(dtype, steps, reference)
                same = [s["lr"] for s in steps] == [s["lr"] for s in reference]
                agrees = found < WITHIN[dtype] and same and len(steps) == 20
                failed += not agrees
                without = "ddp" if layout.world_size > 1 else "single"
                shown = without if stage is None else f"ZeRO-{stage}"
                ranks = f"{layout.world_size}{groups(layout.tensor, layout.sequence)}"
                print(
                    f"{shown:<12}{dtype:<10}{accumulation:>12}{ranks:>8}{found:>13.1e}"
                    f"  {'equal' if same else 'DIFFER'}{'' if agrees else '  DISAGREES'}",
                    flush=True,
                )
            alone = train(root, None, dtype, 1, ALONE, start=start)
            for stage in STAGES if dtype == "float32" else (2,):
                found = difference(dtype, chained(root, stage, dtype, start), alone)
                agrees = found < WITHIN[dtype]
                failed += not agrees
                shown = "without" if stage is None else f"ZeRO-{stage}"
                ranks = ", then ".join(map(str, CHAIN))
                print(f"{shown:<12}{dtype:<10}{ranks} ranks {found:>10.1e}", flush=True)
        for stage in (2, 3, None):
            long_rows = SHAPE.replace("--max_seq_len 64", f"--max_seq_len {LOSS_CHUNK // 2}")
            whole, chunked = (
                train(root, stage, "float32", 1, more=f"{long_rows} --loss {loss}", start=start)
                for loss in ("full", "chunked")
            )
            found = difference("float32", chunked, whole)
            agrees = found < WITHIN["float32"] and len(chunked) == 20
            failed += not agrees
            shown = "ddp" if stage is None else f"ZeRO-{stage}"
            print(f"{shown:<12}--loss chunked against full {found:>14.1e}", flush=True)
    nursery.close()
    print("all agree" if not failed else f"{failed} disagree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
