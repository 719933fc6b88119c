"""What our loop costs over the engine beneath it, and what the profiling hooks cost.

    OMP_NUM_THREADS=1 python -m benchmarks.overhead TEXT.jsonl [--pairs 100]
        [--model tiny|least|PRESET] [--batch_size ROWS]
        [--hooks_only] [--guard] [--deepspeed_config configs/ds_config.json] [--out FILE.json]

One process, one run. Before each step of the loop, the same rows take a bare step on the same
engine: forward, backward and step only. Loop steps alternate between three kinds: default, with
profiling hooks, without any clock. In the results these are "as ever", "hooks" and "neither".

hooks: loop steps with profiling hooks (phase clock and timed collectives) less those without any
clock. profile: loop steps with profiling hooks less default ones, which is what --profile adds to a
run. With --hooks_only there are no bare steps and no default steps, for models with slow steps.
guard: with --guard a fourth kind has the spike guard, less default steps; its window is full when
the differences are taken. What DeepSpeed's optimizer does for the guard is in every kind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import arguments, record
from minimind.config.flags import FLAGS
from minimind.data.rows.batches import Batches
from minimind.engine.clocks import COLLECTIVES
from minimind.engine.engine import Engine
from minimind.recovery.spikes import SpikeGuard

WARM = 10  # steps
KINDS = ("as ever", "hooks", "neither")
GUARD = "guard"
# What the loop calls of a spike guard in a step, and what a guard without a limit returns.
WITHOUT_GUARD: dict[str, Any] = {
    "norm_limit": math.inf,
    "own_sums": [],
    "observe": False,
    "hold": None,
}
# A step of some milliseconds, which hides nothing: `--model least`.
LEAST = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32}
LEAST |= {"vocab_size": 1024, "batch_size": 2}


class NoClock:
    """A PhaseClock that records nothing."""

    def __init__(self, true: Any) -> None:
        self.true = true

    def mark(self, phase: str, is_last: bool = False) -> None:
        """Do nothing."""


class Race:
    """Alternates bare steps and steps of the loop, and records their times."""

    def __init__(self, pairs: int, hooks_only: bool, has_guard: bool) -> None:
        self.kinds, self.has_bare = KINDS[1:] if hooks_only else KINDS, not hooks_only
        self.kinds += (GUARD,) if has_guard else ()
        self.warm = FLAGS["spike_window"].unset * len(self.kinds) if has_guard else WARM
        self.steps, self.taken = pairs * len(self.kinds), 0
        self.step_start = self.read_seconds = 0.0
        self.engine: Any = None
        self.bare = 0.0
        self.pairs: list[dict[str, Any]] = []  # seconds of each pair, and whether it had hooks
        self.kind = KINDS[0]
        self.timed: dict[str, Any] = {}

    def at(self, read: Any, batches: Batches, step: int) -> Any:
        """The rows of a step; the loop's last step ends here, and its next one begins."""
        now = time.perf_counter()
        if self.taken > self.warm:
            spent = {
                "bare": self.bare,
                "loop": now - self.step_start + self.read_seconds,
                "kind": self.kind,
            }
            self.pairs.append(spent)
        if len(self.pairs) == self.steps:
            raise KeyboardInterrupt
        rows = read(batches, step)
        self.read_seconds = time.perf_counter() - now
        if self.engine is not None:
            self.switch_hooks(False)
            started = time.perf_counter()
            if self.has_bare:
                self.bare_step(rows)
            self.bare = time.perf_counter() - started
            self.kind = self.kinds[self.taken % len(self.kinds)]
            self.switch_hooks(self.kind == "hooks")
        self.taken += 1
        self.step_start = time.perf_counter()
        return rows

    def bare_step(self, rows: Any) -> None:
        """One step as DeepSpeed documents it."""
        backend = self.engine.backend
        for micro_batch in rows:
            if hasattr(backend, "engine"):  # DeepSpeed's
                out = backend.engine(
                    input_ids=micro_batch[:, :-1],
                    shift_labels=micro_batch[:, 1:],
                    loss_chunk_size=0,
                )
                backend.engine.backward(out.loss_sum / out.targets)
                backend.engine.step()
            else:
                out = backend.forward(
                    input_ids=micro_batch[:, :-1],
                    shift_labels=micro_batch[:, 1:],
                    loss_chunk_size=0,
                )
                backend.backward(out.loss_sum / out.targets)
                backend.update(True)

    def switch_hooks(self, on: bool) -> None:
        """Install the timed collectives, or remove them."""
        collectives = getattr(self.engine.backend, "collectives", None)
        if collectives is None:
            return
        if not self.timed:
            self.timed = {n: vars(collectives)[n] for n in COLLECTIVES if n in vars(collectives)}
        for name, timed in self.timed.items():
            if on:
                setattr(collectives, name, timed)
            else:
                vars(collectives).pop(name, None)  # the class's own is under it


def run(race: Race, given: argparse.Namespace, folder: Path) -> None:
    """Train until enough pairs have been taken."""
    import minimind.train as training

    read, engine_step = Batches.at, Engine.step

    def at_with_bare_step(self: Batches, step: int) -> Any:
        return race.at(read, self, step)

    def with_or_without(
        self: Engine,
        micro_batches: Any,
        lr: float,
        clock: Any,
        norm_limit: float = math.inf,
        first: int = 0,
    ) -> Any:
        race.engine = self
        used: Any = NoClock(clock) if race.kind == "neither" else clock
        return engine_step(self, micro_batches, lr, used, norm_limit, first)

    def guarding(name: str) -> Any:
        true = vars(SpikeGuard)[name]
        call: Any = true.fget if isinstance(true, property) else true

        def called(self: SpikeGuard, *given: Any) -> Any:
            """As without --spike_guard, except in steps that have it."""
            if race.kind == GUARD:
                return call(self, *given)
            return WITHOUT_GUARD[name]

        return property(called) if isinstance(true, property) else called

    guard_methods = {name: vars(SpikeGuard)[name] for name in WITHOUT_GUARD}
    Batches.at, Engine.step = at_with_bare_step, with_or_without
    for name in guard_methods if GUARD in race.kinds else ():
        setattr(SpikeGuard, name, guarding(name))
    train: Any = training
    shape = LEAST if given.model == "least" else {"model": given.model}
    rows = {"batch_size": given.batch_size} if given.batch_size else {}
    try:
        train(
            **(shape | rows),
            data_path=[str(given.text)],
            out_dir=str(folder / "out"),
            cache_dir=str(folder / "cache"),
            deepspeed_config=given.deepspeed_config,
            device="cpu",
            max_steps=10**6,
            log_interval=10**6,
            save_interval=10**6,
            save_minutes=0.0,
            eval_rows=0,
            profile=True,
            profile_interval=10**6,
            spike_guard=GUARD in race.kinds,
        )
    except KeyboardInterrupt:
        pass
    finally:
        Batches.at, Engine.step = read, engine_step
        for name, method in guard_methods.items():
            setattr(SpikeGuard, name, method)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by ranks: no distribution is assumed.

    For fewer than six values it is minimum and maximum, with less confidence.
    """
    ordered, middle = sorted(values), (len(values) - 1) / 2
    away = 0.98 * math.sqrt(len(values))  # 1.96 deviations of how many lie below the median
    low, high = math.floor(middle - away), math.ceil(middle + away)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def summary(race: Race) -> dict[str, Any]:
    """Return median step times in ms, and the median of each difference with its 95 % interval.

    Raise SystemExit if a signal ended the run early: the figures would be of fewer pairs.
    """
    if len(race.pairs) < race.steps:
        done = f"{len(race.pairs)} of {race.steps} steps"
        raise SystemExit(f"the run ended after {done}: there are no figures of it")
    loop = {
        kind: [pair["loop"] * 1e3 for pair in race.pairs if pair["kind"] == kind]
        for kind in race.kinds
    }
    found: dict[str, Any] = {f"loop_ms, {kind}": statistics.median(loop[kind]) for kind in loop}
    hooks, neither = loop["hooks"], loop["neither"]
    differences = {
        "hooks_ms": [one - two for one, two in zip(hooks, neither, strict=True)],
        "hooks_share": [one / two - 1 for one, two in zip(hooks, neither, strict=True)],
    }
    if race.has_bare:
        ever = [pair for pair in race.pairs if pair["kind"] == "as ever"]
        found["bare_ms"] = statistics.median(pair["bare"] for pair in race.pairs) * 1e3
        differences["profile_ms"] = [a - b for a, b in zip(hooks, loop["as ever"], strict=True)]
        differences["loop_over_engine_ms"] = [(one["loop"] - one["bare"]) * 1e3 for one in ever]
    if GUARD in loop:
        other = loop["as ever" if race.has_bare else "hooks"]
        differences["guard_ms"] = [a - b for a, b in zip(loop[GUARD], other, strict=True)]
    for name, values in differences.items():
        found[name] = statistics.median(values)
        found[f"{name}, 95 %"] = interval(values)
    return found


def main() -> None:
    """Run it, print the figures, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch_size", type=int, help="rows of a step; the preset's own if absent")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--hooks_only", action="store_true")
    parser.add_argument("--guard", action="store_true")
    parser.add_argument("--deepspeed_config", default="configs/ds_config.json")
    given = parser.parse_args()
    race, before = Race(given.pairs, given.hooks_only, given.guard), os.getloadavg()
    with tempfile.TemporaryDirectory() as kept:
        run(race, given, Path(kept))
    found = summary(race)
    print(json.dumps(found, indent=1))
    names = ("bare", "loop") if race.has_bare else ("loop",)
    pairs: dict[str, list[list[int]]] = {kind: [] for kind in race.kinds}
    for one in race.pairs:
        pairs[one["kind"]].append([round(one[name] * 1e6) for name in names])
    record(given.out, "overhead", before, found=found, microseconds_of_pairs=pairs)


if __name__ == "__main__":
    main()
