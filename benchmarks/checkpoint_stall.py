"""How long training stands still for a checkpoint, against torch.save of the same state.

    python -m benchmarks.checkpoint_stall [--model 26m] [--rounds 7] [--folder DIR]

One process without DeepSpeed, so that the whole state is written by it. Every round takes one
optimizer step and then, interleaved: torch.save of the fp32 weights and moments (as a loop without
a background writer would, with no fsync), and a save of ours, waited for. Afterwards a resume:
hashes verified, weights and moments loaded. Prints minimum, median and maximum.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import arguments, preset, record
from minimind.checkpoint.resume import resume
from minimind.checkpoint.retention import Rules
from minimind.checkpoint.saver import Saver
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.run_config import RunConfig
from minimind.engine.build import Engine, build_engine, leave_process_group
from minimind.engine.clocks import PhaseClock


def milliseconds(work: Callable[[], Any]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def build(model: str, run: RunConfig) -> Engine:
    """A single-process engine of the preset's shape, on the CPU."""
    torch.manual_seed(0)
    resolved = read_setup(run, read_launch(os.environ)).resolve()
    return build_engine(resolved, preset(model), "cpu")


def measure(engine: Engine, vocab: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by what was timed, one number a round."""
    manifest = {"identity": {}, "world_size": 1, "zero_stage": None, "order": {}, "tokens": 0}
    saver = Saver(engine, engine.another_group(600), folder / "checkpoints", Rules(2), {})
    rows = torch.randint(0, vocab, (1, 65))
    clock = PhaseClock(engine.device)
    found: dict[str, list[float]] = {"torch.save": [], "stall": [], "until durable": []}
    for step in range(1, 2 * rounds, 2):  # the first of the two steps of a round
        clock.begin()
        engine.step([rows], 1e-4, clock)
        state = dict(engine.backend.state().slices(0, 1))
        path = folder / "plain.pt"
        found["torch.save"].append(milliseconds(lambda p=path, s=state: torch.save(s, p)))
        path.unlink()
        found["stall"].append(milliseconds(lambda s=step: saver.begin({**manifest, "step": s})))
        clock.begin()
        engine.step([rows], 1e-4, clock)  # training goes on while the files are written
        event = saver.poll(wait=True)
        assert event
        found["until durable"].append(event["seconds"] * 1e3)
    found["resume"] = [
        milliseconds(lambda: resume(engine, engine, folder / "checkpoints", "auto", {}))
        for _ in range(rounds)
    ]
    saver.close()
    return found


def main() -> None:
    """Measure, print, and write the figures to --out."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="26m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write (default: a temporary one)")
    args, load = parser.parse_args(), os.getloadavg()
    run = parse_flags(["--model", args.model, "--device", "cpu", "--deepspeed_config", "none"])
    engine = build(args.model, run)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(engine, run.vocab_size, Path(folder), args.rounds)
    leave_process_group()
    print(
        f"{args.model}: {engine.parameters:,} parameters, {args.rounds} rounds,"
        f" {os.cpu_count()} cores"
    )
    for name, times in found.items():
        low, middle, high = min(times), statistics.median(times), max(times)
        print(f"  {name:<14}{low:>10.1f}{middle:>10.1f}{high:>10.1f}  ms (min, median, max)")
    ratios = [a / b for a, b in zip(found["stall"], found["torch.save"], strict=True)]
    print(
        f"  stall / torch.save: {statistics.median(ratios):.3f} (median), {max(ratios):.3f} (max)"
    )
    record(args.out, "checkpoint_stall", load, model=args.model, ms=found, ratios=ratios)


if __name__ == "__main__":
    main()
