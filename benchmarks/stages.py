"""What each ZeRO stage costs, 1 process against 2, and DeepSpeed's settings beside each other.

    OMP_NUM_THREADS=1 python -m benchmarks.stages TEXT.jsonl
        [--race stages|scaling|settings|one_gpu|updates] [--model 26m] [--rows 4] [--rounds 12]
        [--minutes M] [--processes 1 2] [--turn STEPS] [--out FILE.json] [FLAG ...]

Every contender is train_pretrain.py, eager, on the CPU, as one process or two that meet over gloo.
FLAGs are handed to all of them: --max_seq_len 128 where the CPU multiplies bf16 slowly. All are
warm and wait; each round lets every one of them take one step (benchmarks/throughput.py). A process
has OMP_NUM_THREADS threads: one core each makes two processes two devices. Ratios are
medians over rounds of two steps of the same round.

stages: without DeepSpeed (alone, DDP) and at stages 0 to 3. `--rows` are those of a step: two
processes share them out, which is strong scaling.

scaling: without DeepSpeed and at stage 2; two processes share the rows, or have as many each, which
is weak scaling.

settings: ZeRO-2 on two processes by configs/ds_config.json, by the same once more (how far apart
two equal contenders are measured), and with one setting changed.

updates: one process without DeepSpeed, and at stage 2 by each value of --zero_update; also with
--optimizer muon. On a GPU with the flags of one_gpu.

one_gpu: one process without DeepSpeed, at stages 0 to 2, and by some settings. On a GPU, compiled:
--race one_gpu --model 104m --rows 16 --turn 10 --device cuda --compile on --max_seq_len 1024
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import arguments, record
from benchmarks.throughput import Contender, race, ratio
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG

WARM = 2  # steps, before the first round; nothing is compiled
# Not data_ms: the waiting at the gate is in it.
PHASES = ("forward_ms", "backward_ms", "optimizer_ms")
STAGES: dict[str, dict[str, Any] | None] = {
    "no DeepSpeed": None,
    **{f"stage {number}": {"stage": number} for number in range(4)},
}
SHIPPED, TWIN = "as shipped", "as shipped, again"
BIG_BUCKETS, NOT_CONTIGUOUS = "buckets of 500,000,000", "no contiguous_gradients"
SETTINGS: dict[str, dict[str, Any]] = {
    SHIPPED: {},
    TWIN: {},
    "buckets of 500,000": {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
    BIG_BUCKETS: {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000},
    "overlap_comm": {"overlap_comm": True},
    NOT_CONTIGUOUS: {"contiguous_gradients": False},
    "round_robin_gradients": {"round_robin_gradients": True},
}


@dataclass(frozen=True)
class Entry:
    """One contender: how many processes, rows on each, and what it changes in the shipped file."""

    processes: int
    rows: int
    zero: Mapping[str, Any] | None  # none: without DeepSpeed
    flags: tuple[str, ...] = ()

    def starter(
        self, name: str, shape: str, folder: Path, flags: Sequence[str] = ()
    ) -> partial[Contender]:
        """What starts it, its own DeepSpeed file written."""
        config = "none"
        if self.zero is not None:
            document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
            document["zero_optimization"] |= self.zero
            if "--optimizer" in flags:  # the block would be in conflict with it
                del document["optimizer"]
            path = folder / f"{name}.json"
            path.write_text(json.dumps(document))
            config = str(path)
        own = ["--compile", "off", "--deepspeed_config", config, "--out_dir", str(folder / name)]
        own += ["--log_interval", str(WARM), *self.flags]
        place = (name, shape, self.rows, folder)
        return partial(Contender, *place, flags=[*own, *flags], processes=self.processes)


def of_kinds(kinds: Sequence[str], processes: int, rows: int) -> dict[str, Entry]:
    """So many processes with so many rows each, without DeepSpeed and by stage."""
    each = f"{processes} x {rows} rows"
    return {f"{each}, {kind}": Entry(processes, rows, STAGES[kind]) for kind in kinds}


def stages(rows: int, processes: Sequence[int]) -> dict[str, Entry]:
    """Every stage on each number of processes, which share the rows."""
    found: dict[str, Entry] = {}
    for count in processes:
        found |= of_kinds(list(STAGES), count, rows // count)
    return found


def both_scalings(rows: int, processes: Sequence[int]) -> dict[str, Entry]:
    """One process, two with its rows between them, and two with as many each."""
    found: dict[str, Entry] = {}
    for count, share in ((1, rows), (2, rows // 2), (2, rows)):
        found |= of_kinds(["no DeepSpeed", "stage 2"], count, share)
    return found


def settings(rows: int, processes: Sequence[int]) -> dict[str, Entry]:
    """ZeRO-2 on several processes that share `rows`, as shipped and otherwise."""
    count = max(processes)
    return {name: Entry(count, rows // count, zero) for name, zero in SETTINGS.items()}


def one_gpu(rows: int, processes: Sequence[int]) -> dict[str, Entry]:
    """One process without DeepSpeed, at stages 0 to 2, and at stage 2 by other settings."""
    whole = "no reduce_scatter"
    changed = {name: SETTINGS[name] for name in (BIG_BUCKETS, NOT_CONTIGUOUS)}
    zero: dict[str, Mapping[str, Any] | None] = {
        **{name: STAGES[name] for name in ("no DeepSpeed", "stage 0", "stage 1", "stage 2")},
        **changed,
        whole: {"reduce_scatter": False},
    }
    return {name: Entry(1, rows, settings) for name, settings in zero.items()}


def updates(rows: int, processes: Sequence[int]) -> dict[str, Entry]:
    """One process without DeepSpeed, and at stage 2 by each value of --zero_update."""
    by = {
        f"stage 2, {update}": Entry(1, rows, STAGES["stage 2"], ("--zero_update", update))
        for update in ("deepspeed", "auto")
    }
    return {"no DeepSpeed": Entry(1, rows, None), **by}


RACES = {
    **{"stages": stages, "scaling": both_scalings, "settings": settings},
    **{"one_gpu": one_gpu, "updates": updates},
}


def phases(folder: Path) -> dict[str, float]:
    """Where the step of rank 0 went: medians of its step lines once it was warm, in ms."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    warm = [line for line in lines if line["event"] == "step" and line["step"] > WARM]
    return {name: statistics.median(line[name] for line in warm) for name in PHASES}


def summary(
    found: Mapping[str, Any], entries: Mapping[str, Entry], tokens_a_row: int, base: str
) -> dict[str, Any]:
    """By contender: time, tokens/s, how long against `base` in paired steps, memory a process."""
    table = {}
    for name, steps in found.items():
        seconds = statistics.median(step["seconds"] for step in steps)
        tokens = tokens_a_row * entries[name].rows * entries[name].processes
        pairs = zip(steps, found[base], strict=True)
        longer = sorted(ours["seconds"] / theirs["seconds"] for ours, theirs in pairs)
        table[name] = {
            "ms": seconds * 1e3,
            "least_ms": min(step["seconds"] for step in steps) * 1e3,
            "tokens_per_second": tokens / seconds,
            "time": statistics.median(longer),
            "time_quartiles": [longer[len(longer) // 4], longer[-1 - len(longer) // 4]],
            "time_by_cpu": 1 / ratio(found, name, base, "cpu"),
            "peak_mib": steps[-1]["peak_mib"],
        }
    return table


def scaling(found: Mapping[str, Any], rows: int) -> dict[str, dict[str, float]]:
    """How many times the tokens/s of one process two reach: strong and weak, by kind."""
    result: dict[str, dict[str, float]] = {}
    for kind in STAGES:
        one = f"1 x {rows} rows, {kind}"
        strong, weak = f"2 x {rows // 2} rows, {kind}", f"2 x {rows} rows, {kind}"
        if one in found and strong in found:
            result[kind] = {"strong": ratio(found, strong, one, "seconds")}
            if weak in found:
                result[kind]["weak"] = 2 * ratio(found, weak, one, "seconds")
    return result


def shown(table: Mapping[str, Mapping[str, Any]], base: str) -> str:
    """Return the table as text."""
    wide = max(map(len, table))
    heads = f"{'ms/step':>9}{'tokens/s':>10}{'time':>7}  {'quartiles':11}{'by CPU':>7}{'MiB':>7}"
    lines = [f"{'':{wide}}{heads}{'forward':>9}{'backward':>10}{'optimizer':>11}"]
    for name, row in table.items():
        low, high = row["time_quartiles"]
        lines.append(
            f"{name:{wide}}{row['ms']:9.1f}{row['tokens_per_second']:10,.0f}{row['time']:7.3f}"
            f"  {low:.3f}-{high:.3f}{row['time_by_cpu']:7.3f}{row['peak_mib']:7.0f}"
            f"{row['forward_ms']:9.1f}{row['backward_ms']:10.1f}{row['optimizer_ms']:11.1f}"
        )
    return "\n".join([*lines, f"time, quartiles and by CPU against: {base}"])


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; return the options and the flags for train_pretrain.py."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--race", choices=RACES, default="stages")
    parser.add_argument("--model", default="26m")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then the rounds end")
    parser.add_argument("--processes", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--turn", type=int, default=1, help="steps in a row of each contender")
    given, flags = parser.parse_known_args()
    if given.rows % 2 or given.rounds < WARM:
        parser.error(f"--rows must be even, and --rounds at least {WARM}")
    return given, flags


def main() -> None:
    """Run it, print the table, write the JSON."""
    (given, flags), before = parse_arguments(), os.getloadavg()
    run = parse_flags(["--model", given.model, *flags])
    entries = RACES[given.race](given.rows, given.processes)
    base = next(iter(entries))
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        shutil.copy(given.text, folder / "text.jsonl")
        starts = {n: one.starter(n, given.model, folder, flags) for n, one in entries.items()}
        found = race(starts, given.rounds, WARM, given.minutes, given.turn)
        spent = {name: phases(folder / name) for name in entries}
    table = summary(found, entries, run.max_seq_len, base)
    table = {name: row | spent[name] for name, row in table.items()}
    print(shown(table, base))
    scaled = scaling(found, given.rows)
    for kind, times in scaled.items():
        print(f"1 -> 2 processes, {kind}: {', '.join(f'{t} {n:.2f}' for t, n in times.items())}")
    record(given.out, "stages", before, table=table, scaling=scaled, steps=found)


if __name__ == "__main__":
    main()
