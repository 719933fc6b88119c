"""Tokens/s and peak memory of whole training loops, one step of each in turn.

    OMP_NUM_THREADS=2 python -m benchmarks.throughput TEXT.jsonl [--model 26m] [--rows 8]
        [--rounds 20] [--only NAME ...] [--out FILE.json]

Every contender (benchmarks/contenders.py) is a process of its own that waits between its steps, so
that all see the same machine and none shares an allocator. Each round lets every one of them take
one step, in an order that moves on. A ratio is the median over rounds of two steps of the same
round; the process's own CPU seconds stand beside the clock's, as they hear less of the neighbours.
Memory is the peak of resident memory, the imports included. All compute in bf16: ours and the
Trainer with bf16 weights and fp32 masters, as DeepSpeed has it, the loops written by hand with fp32
weights under autocast, as such loops have it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.record import arguments, record
from minimind.flags import parse_flags

WARM = 4  # steps before the first round: compiling, the first touch of memory
BASE, BARE = "Llama, eager loop", "bare compiled loop"


class Contender:
    """The process of one contender, and what its steps took."""

    def __init__(self, name: str, shape: str, rows: int, folder: Path, *more: str) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self.steps: list[dict[str, float]] = []
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.contenders",
                name,
                shape,
                str(rows),
                str(theirs_in),
                str(theirs_out),
                str(folder),
                *more,
            ],
            pass_fds=(theirs_in, theirs_out),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.ask, self.answers = open(ours_out, "w"), open(ours_in)

    def step(self, steps: int = 1) -> dict[str, float]:
        """A turn of it, while every other waits: what one of its steps took."""
        self.ask.write(f"{steps}\n")
        self.ask.flush()
        answer = self.answers.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """Let it end."""
        self.ask.close()
        self.process.wait()


def race(
    names: Sequence[str],
    shape: str,
    rows: int,
    rounds: int,
    folder: Path,
    flags: Sequence[str] = (),
    turn: int = 1,
) -> dict[str, Any]:
    """Turns of `turn` steps by contender, each {"seconds", "cpu", "peak_mib"} of one step.

    `flags` are for those of ours.
    """
    runners = {}
    for name in names:
        runners[name] = Contender(name, shape, rows, folder, *flags)
        started = time.perf_counter()
        for _ in range(WARM):
            runners[name].step()
        print(f"{name}: warm after {time.perf_counter() - started:.0f} s", flush=True)
    for number in range(rounds):
        for at in range(len(names)):
            runner = runners[names[(at + number) % len(names)]]
            runner.steps.append(runner.step(turn))
    for runner in runners.values():
        runner.close()
    return {name: runner.steps for name, runner in runners.items()}


def ratio(found: Mapping[str, Any], one: str, other: str, what: str) -> float:
    """How many times as fast `one` is as `other`: the median over rounds."""
    pairs = zip(found[one], found[other], strict=True)
    return statistics.median(theirs[what] / ours[what] for ours, theirs in pairs)


def summary(found: Mapping[str, Any], tokens: int, base: str) -> dict[str, Any]:
    """By contender: median and least seconds, tokens/s, speed against `base`, peak memory."""
    base_peak = found[base][-1]["peak_mib"]
    table = {}
    for name, steps in found.items():
        seconds = statistics.median(step["seconds"] for step in steps)
        table[name] = {
            "seconds": seconds,
            "least_seconds": min(step["seconds"] for step in steps),
            "tokens_per_second": tokens / seconds,
            "speed": ratio(found, name, base, "seconds"),
            "speed_by_cpu": ratio(found, name, base, "cpu"),
            "peak_mib": steps[-1]["peak_mib"],
            "memory": steps[-1]["peak_mib"] / base_peak,
            "speed_against_bare": ratio(found, name, BARE, "seconds") if BARE in found else None,
        }
    return table


def shown(table: Mapping[str, Mapping[str, float]], base: str) -> str:
    """The table for people."""
    lines = [f"{'':28}{'s/step':>8}{'tokens/s':>10}{'speed':>8}{'by CPU':>8}{'MiB':>7}{'':>7}"]
    for name, row in table.items():
        lines.append(
            f"{name:28}{row['seconds']:8.3f}{row['tokens_per_second']:10,.0f}{row['speed']:8.2f}"
            f"{row['speed_by_cpu']:8.2f}{row['peak_mib']:7.0f}{row['memory']:7.2f}"
        )
    return "\n".join([*lines, f"speed and memory against: {base}"])


def main() -> None:
    """Run it, print the table, write the JSON."""
    asked = arguments(__doc__)
    asked.add_argument("text", type=Path)
    asked.add_argument("--model", default="26m")
    asked.add_argument("--rows", type=int, default=8)
    asked.add_argument("--rounds", type=int, default=20)
    asked.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    given = asked.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        shutil.copy(given.text, folder / "text.jsonl")
        found = race(given.only, given.model, given.rows, given.rounds, folder)
    base = BASE if BASE in found else given.only[0]
    tokens = given.rows * parse_flags(["--model", given.model]).max_seq_len
    table = summary(found, tokens, base)
    print(shown(table, base))
    record(given.out, "throughput", before, table=table, steps=found)


if __name__ == "__main__":
    main()
