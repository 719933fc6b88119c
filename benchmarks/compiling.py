"""Compile time and step time: methods compiled by region against the whole model, and eager.

    OMP_NUM_THREADS=2 python -m benchmarks.compiling TEXT.jsonl [--model 26m] [--rows 8]
        [--starts 3] [--rounds 12] [--dtype float32] [--out FILE.json]

A start is a separate process whose first step is timed (benchmarks/contenders.py). Cold: torch's
compile caches are empty; warm: an earlier start has filled them. Compile time is the first step
less the median of the next two. Starts of the contenders alternate; then one process of each takes
steps in turn.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.record import arguments, record
from benchmarks.throughput import Contender, fresh_compile_cache, race, shown, summary
from minimind.config.parse import parse_flags

REGIONS, WHOLE = "ours, single, compiled", "ours, single, compiled as a whole"
EAGER = "ours, single, eager"


def compile_seconds(start: Callable[[], Contender]) -> float:
    """Return the seconds that the first step of a process takes beyond its next ones."""
    contender = start()
    try:
        first, *others = (contender.step()["seconds"] for _ in range(3))
    finally:
        contender.close()
    return first - statistics.median(others)


def main() -> None:
    """Run it, print the figures, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="26m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        shutil.copy(given.text, folder / "text.jsonl")
        place = (given.model, given.rows, folder, ("--dtype", given.dtype))
        flags = (*place[-1], *"--compile off --deepspeed_config none".split())
        # Tokenizes the text as well.
        eager = compile_seconds(partial(Contender, EAGER, *place[:-1], flags))
        seconds: dict[str, dict[str, list[float]]] = {
            name: {"cold": [], "warm": []} for name in (REGIONS, WHOLE)
        }
        for number in range(given.starts):
            for at, (name, starts) in enumerate(seconds.items()):
                caches = fresh_compile_cache(folder, 2 * number + at)
                for kind in starts:  # cold fills the caches for warm
                    start = partial(Contender, name, *place, environment=caches)
                    starts[kind].append(compile_seconds(start))
        steps = race(
            {
                name: partial(Contender, name, *place, environment=fresh_compile_cache(folder, at))
                for at, name in enumerate(seconds)
            },
            given.rounds,
        )
    for name, starts in seconds.items():
        medians = {kind: statistics.median(values) for kind, values in starts.items()}
        print(f"{name:40} cold {medians['cold']:6.1f} s  warm {medians['warm']:6.1f} s")
    print(f"{EAGER:40} {eager:6.1f} s")
    tokens = given.rows * parse_flags(["--model", given.model]).max_seq_len
    table = summary(steps, tokens, WHOLE)
    print(shown(table, WHOLE))
    record(given.out, "compiling", before, seconds=seconds, eager=eager, table=table, steps=steps)


if __name__ == "__main__":
    main()
