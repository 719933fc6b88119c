"""The choice of `minimind tune` against every combination of the same settings.

    OMP_NUM_THREADS=1 python -m benchmarks.tune TEXT.jsonl --work DIR [--minutes M] [--rounds N]
        [--try NAME=V1,V2 ...] [--out FILE.json]

Two CPU processes train a small model. The tuner searches the grid; then each of its points is
measured once a round. The choice is right if its median in the rounds is at most 3 % below that of
the best point, or not further than half the range of its own rounds. Other programs on the machine
widen this range; the file has the load.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import arguments, record
from minimind.config.parse import parse_flags
from minimind.sweep.run import opened
from minimind.sweep.trial import PREFIX, Trial
from minimind.sweep.tune import METRIC, TUNE, Candidate, Given, Search, trial_flags

RUN = "--dim 128 --n_layers 4 --n_heads 4 --n_kv_heads 2 --max_seq_len 128 --vocab_size 1000"
RUN += " --batch_size 4 --accumulation_steps 2 --device cpu --dtype float32"
NEAR = 0.03  # of the best


def values_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of NAME=V1,V2."""
    named = (text.partition("=") for text in texts)
    return {
        name: [int(value) if value.isdecimal() else value for value in values.split(",")]
        for name, _, values in named
    }


def every(search: Search, values: Mapping[str, Sequence[Any]], rounds: int) -> Iterator[Trial]:
    """All combinations, in turns; every other round the other way."""
    yield from search.measure(search.first, 0)
    given = search.given = Given(search.flags, search.runner.place / f"{PREFIX}0000")
    for point in product(*values.values()):
        one = Candidate(given.reduced(dict(zip(values, point, strict=True))))
        search.candidates.setdefault(one.name, one)
    for turn in range(rounds):
        for one in [*search.candidates.values()][:: -1 if turn % 2 else 1]:
            yield from search.measure(one, turn)


def main() -> None:
    """Search, measure every combination, compare and record."""
    parser = arguments(__doc__)
    parser.add_argument("text")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--try", dest="tried", nargs="+", default=["zero=none,3", "batch_size=1,4"])
    args = parser.parse_args()
    load, values = os.getloadavg(), values_of(args.tried)
    os.environ["NUM_PROCESSES"] = "2"
    words = ["--data_path", args.text, "--cache_dir", str(args.work / "cache"), *RUN.split()]
    run = parse_flags(words)
    searches = []
    for name, minutes in (("search", args.minutes), ("whole", 600.0)):
        with opened(TUNE, METRIC, {}, "benchmarks.tune", args.work / name, [run], 1) as runner:
            searches.append(search := Search(runner, trial_flags(run), minutes))
            is_whole = name == "whole"
            trials = every(search, values, args.rounds) if is_whole else search.trials(values)
            if status := runner.run(trials):
                raise SystemExit(status)
    search, whole = searches
    search.conclude(words)
    medians = {one.name: median(one.speeds) for one in whole.able}
    best, chosen = max(medians, key=lambda name: medians[name]), search.chosen().name
    speeds = whole.candidates[chosen].speeds
    behind = 1 - medians[chosen] / medians[best]
    spread = (max(speeds) - min(speeds)) / 2 / medians[chosen]
    verdict = {"best": best, "chosen": chosen, "behind_best": behind, "spread_of_chosen": spread}
    verdict |= {"is_right": behind <= max(NEAR, spread)}
    print(json.dumps({METRIC: medians, **verdict}, indent=1))
    found = json.loads((args.work / "search" / "tune.json").read_text())
    rounds = {one.name: one.speeds for one in whole.able}
    record(args.out, "tune", load, rounds=rounds, candidates=found["candidates"], verdict=verdict)


if __name__ == "__main__":
    main()
