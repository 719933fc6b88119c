"""Tokens/s and peak memory of whole training loops, which take turns step by step.

    OMP_NUM_THREADS=2 python -m benchmarks.throughput TEXT.jsonl [--model 26m] [--rows 8]
        [--rounds 20] [--warm 4] [--only NAME ...] [--dtype float32 ...] [--against CHECKOUT ...]
        [--out FILE.json]

litgpt takes part if it is installed (docs/measurements.md).

Every contender (benchmarks/contenders.py) is a separate process that waits between its steps, so
that all see the same machine and none shares an allocator. In each round every contender takes one
step, in a rotating order. A ratio is the median over rounds of two steps of the same round. CPU
seconds of the process are reported besides wall time, as they are less affected by other load.
Memory is the peak of resident memory with imports and compilation: each compiles without a cache.
All compute in bf16 unless --dtype is given: ours and the Trainer with bf16 weights and fp32 master
weights, as in DeepSpeed, the plain loops with fp32 weights under autocast. With --against, every
contender with our model also runs from other checkouts of this repository.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from benchmarks.contenders import CONTENDERS
from benchmarks.record import arguments, record
from minimind.config.parse import parse_flags

WARM = 4  # steps before the first round: compilation, first use of memory
BASE, BARE = "Llama, eager loop", "bare compiled loop"
OTHERS = (BASE, "Llama, Trainer, ZeRO-2", "litgpt, eager loop")  # have nothing of this repository


class Contender:
    """The processes of one contender, and the times of its steps.

    Several processes are the ranks of one run. Every rank waits for its turn: otherwise it would
    begin its next step during the turns of others.
    """

    def __init__(
        self,
        name: str,
        shape: str,
        rows: int,
        folder: Path,
        flags: Sequence[str] = (),
        processes: int = 1,
        environment: Mapping[str, str] = MappingProxyType({}),
        checkout: Path | None = None,
    ) -> None:
        self.name, self.logs = name, [folder / f"{name}-{rank}.log" for rank in range(processes)]
        self.steps: list[dict[str, float]] = []
        self.gates: list[tuple[IO[str], IO[str]]] = []
        self.processes = []
        rendezvous = rendezvous_environment(processes) if processes > 1 else {}
        for rank, log in enumerate(self.logs):
            (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
            place = [shape, str(rows), str(theirs_in), str(theirs_out), str(folder)]
            who = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if rendezvous else {}
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.contenders", name, *place, *flags],
                    pass_fds=(theirs_in, theirs_out),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **rendezvous, **who, **environment},
                    cwd=checkout,  # `-m` looks there first
                )
            os.close(theirs_in)
            os.close(theirs_out)
            self.gates.append((open(ours_out, "w"), open(ours_in)))
            self.processes.append(process)

    def step(self, steps: int = 1) -> dict[str, float]:
        """Take `steps` steps while the others wait.

        Return the means per step: seconds of the slowest rank and CPU seconds of all.
        """
        self.begin(steps)
        return self.end()

    def begin(self, steps: int) -> None:
        """Let `steps` steps pass."""
        for ask, _ in self.gates:
            with suppress(BrokenPipeError):  # it has ended and does not answer
                ask.write(f"{steps}\n")
                ask.flush()

    def end(self) -> dict[str, float]:
        """Wait for the steps that have begun; return what `step` returns."""
        answers = [answers.readline() for _, answers in self.gates]
        for answer, log in zip(answers, self.logs, strict=True):
            if not answer:
                raise SystemExit(f"{self.name} ended:\n{log.read_text()[-3000:]}")
        took = [json.loads(answer) for answer in answers]
        over = {"seconds": max, "cpu": sum, "peak_mib": max}
        return {what: of(one[what] for one in took) for what, of in over.items()}

    def close(self) -> None:
        """End the processes."""
        for gate in self.gates:
            for end in gate:
                with suppress(BrokenPipeError):
                    end.close()
        for process in self.processes:
            process.wait()


def rendezvous_environment(processes: int) -> dict[str, str]:
    """Environment of `processes` ranks on this host: address, port and world size."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(processes)
    result = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return result | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def fresh_compile_cache(folder: Path, number: int) -> dict[str, str]:
    """Environment with an empty compile cache for contender `number`.

    Compilation is part of the peak memory; with a filled cache it would be missing.
    """
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"compiled-{number}")}


def race(
    starts: Mapping[str, Callable[[], Contender]],
    rounds: int,
    warm: int = WARM,
    minutes: float = float("inf"),
    turn: int = 1,
    warm_together: bool = False,
) -> dict[str, Any]:
    """Return turns of `turn` steps by contender, each {"seconds", "cpu", "peak_mib"} of one step.

    After `minutes` no further round begins, except for the first two. With `warm_together` all
    start and compile at the same time, before the first round.
    """
    runners: dict[str, Contender] = {}
    names, over = list(starts), time.monotonic() + 60 * minutes
    try:
        started = time.perf_counter()
        for name, start in starts.items():
            runners[name] = start()
            runners[name].begin(warm)
            if not warm_together:
                runners[name].end()
                print(f"{name}: warm after {time.perf_counter() - started:.0f} s", flush=True)
                started = time.perf_counter()
        if warm_together:
            for name, runner in runners.items():
                runner.end()
                print(f"{name}: warm after {time.perf_counter() - started:.0f} s", flush=True)
        for number in range(rounds):
            if number > 1 and time.monotonic() > over:
                break
            for at in range(len(names)):
                runner = runners[names[(at + number) % len(names)]]
                runner.steps.append(runner.step(turn))
    finally:
        for runner in runners.values():
            runner.close()
    return {name: runner.steps for name, runner in runners.items()}


def ratio(found: Mapping[str, Any], one: str, other: str, what: str) -> float:
    """Return how many times as fast `one` is as `other`: the median over rounds."""
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
    """Return the table as text."""
    lines = [f"{'':28}{'s/step':>8}{'tokens/s':>10}{'speed':>8}{'by CPU':>8}{'MiB':>7}{'':>7}"]
    for name, row in table.items():
        lines.append(
            f"{name:28}{row['seconds']:8.3f}{row['tokens_per_second']:10,.0f}{row['speed']:8.2f}"
            f"{row['speed_by_cpu']:8.2f}{row['peak_mib']:7.0f}{row['memory']:7.2f}"
        )
    return "\n".join([*lines, f"speed and memory against: {base}"])


def installed() -> list[str]:
    """Return the contenders whose library is installed."""
    has_litgpt = find_spec("litgpt") is not None
    return [name for name in CONTENDERS if has_litgpt or not name.startswith("litgpt")]


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="26m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", type=int, default=WARM)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=(here := installed()))
    dtypes = ("bfloat16", "bf16-mixed", "float32")
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=["bfloat16"])
    parser.add_argument("--against", type=Path, nargs="+", default=[], metavar="CHECKOUT")
    given = parser.parse_args()
    if missing := [name for name in given.only if name not in here]:
        raise SystemExit(f"{missing[0]}: litgpt is not installed (docs/measurements.md)")
    if given.only == here != [*CONTENDERS]:
        print("litgpt is left out: it is not installed (docs/measurements.md)")
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        starts: dict[str, Callable[[], Contender]] = {}
        for checkout in (None, *given.against):
            place = folder / str(len(starts))
            place.mkdir()
            shutil.copy(given.text, place / "text.jsonl")
            for name in given.only:
                if checkout and name in OTHERS:
                    continue
                for dtype in given.dtype:
                    options = {"environment": fresh_compile_cache(place, len(starts))}
                    options |= {"checkout": checkout}
                    what = (name, given.model, given.rows, place, ("--dtype", dtype))
                    parts = [name] + ([checkout.name] if checkout else [])
                    parts += [dtype] if len(given.dtype) > 1 else []
                    starts[", ".join(parts)] = partial(Contender, *what, **options)
        found = race(starts, given.rounds, given.warm)
    base = [*found][-1] if given.against else BASE if BASE in found else next(iter(found))
    tokens = given.rows * parse_flags(["--model", given.model]).max_seq_len
    table = summary(found, tokens, base)
    print(shown(table, base))
    record(given.out, "throughput", before, table=table, steps=found)


if __name__ == "__main__":
    main()
