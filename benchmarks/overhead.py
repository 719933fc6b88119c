"""What our loop costs over the engine beneath it, and what the profiling hooks cost.

    OMP_NUM_THREADS=1 python -m benchmarks.overhead TEXT.jsonl [--pairs 100]
        [--model tiny|least|PRESET]
        [--deepspeed_config configs/ds_config.json] [--out FILE.json]

One process, one run. Where the loop asks for its rows, a bare step is taken on the same engine with
the same rows: forward, backward and step as its library documents them, and nothing else. A pair is
a step of the loop and the bare one before it. Hooks are those of --profile: every other pair's loop
step has them, the clock of phases and the timed collectives; the others have neither.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import arguments, record
from minimind.data.batches import Batches
from minimind.train.communication import COLLECTIVES
from minimind.train.stepping import Engine

WARM = 10  # steps
# A step of some milliseconds, which hides nothing: `--model least`.
LEAST = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32}
LEAST |= {"vocab_size": 1024, "batch_size": 2}


class NoClock:
    """In the place of PhaseClock: nothing is noted."""

    def __init__(self, true: Any) -> None:
        self.true = true

    def mark(self, phase: str) -> None:
        """Do nothing."""


class Race:
    """Steps of the loop and bare ones in turn."""

    def __init__(self, pairs: int) -> None:
        self.pairs, self.taken = pairs, 0
        self.began = 0.0
        self.engine: Any = None
        self.bare = 0.0
        self.found: list[dict[str, Any]] = []  # seconds of each pair, and whether it had hooks
        self.has_hooks = True
        self.timed: dict[str, Any] = {}

    def at(self, read: Any, batches: Batches, step: int) -> Any:
        """The rows of a step: the loop's last step ends here, and its next one begins."""
        now = time.perf_counter()
        if self.taken > WARM:
            spent = {"bare": self.bare, "loop": now - self.began, "hooks": self.has_hooks}
            self.found.append(spent)
        if len(self.found) == 2 * self.pairs:
            raise KeyboardInterrupt
        rows = read(batches, step)
        if self.engine is not None:
            started = time.perf_counter()
            self.bare_step(rows)
            self.bare = time.perf_counter() - started
            self.has_hooks = not self.has_hooks
            self.switch_hooks()
        self.taken += 1
        self.began = time.perf_counter()
        return read(batches, step)

    def bare_step(self, rows: Any) -> None:
        """What a loop of one's own would do with the engine."""
        backend = self.engine.backend
        for micro_batch in rows:
            if hasattr(backend, "engine"):  # DeepSpeed's
                out = backend.engine(
                    input_ids=micro_batch[:, :-1], shift_labels=micro_batch[:, 1:], summed_by=0
                )
                backend.engine.backward(out.loss_sum / out.targets)
                backend.engine.step()
            else:
                out = backend.forward(
                    input_ids=micro_batch[:, :-1], shift_labels=micro_batch[:, 1:], summed_by=0
                )
                backend.backward(out.loss_sum / out.targets)
                backend.update(True)

    def switch_hooks(self) -> None:
        """Take the timed collectives away, or put them back."""
        collectives = getattr(self.engine.backend, "collectives", None)
        if collectives is None:
            return
        if not self.timed:
            self.timed = {n: vars(collectives)[n] for n in COLLECTIVES if n in vars(collectives)}
        for name, timed in self.timed.items():
            if self.has_hooks:
                setattr(collectives, name, timed)
            else:
                vars(collectives).pop(name, None)  # the class's own is under it


def run(race: Race, given: argparse.Namespace, folder: Path) -> None:
    """Train until enough pairs have been taken."""
    import minimind.train as training

    read, step = Batches.at, Engine.step

    def gated(self: Batches, number: int) -> Any:
        return race.at(read, self, number)

    def with_or_without(self: Engine, rows: Any, lr: float, clock: Any) -> Any:
        race.engine = self
        return step(self, rows, lr, clock if race.has_hooks else NoClock(clock))

    Batches.at, Engine.step = gated, with_or_without
    train: Any = training
    try:
        train(
            **(LEAST if given.model == "least" else {"model": given.model}),
            data_path=[str(given.text)],
            out_dir=str(folder / "out"),
            cache_dir=str(folder / "cache"),
            deepspeed_config=given.deepspeed_config,
            device="cpu",
            max_steps=10**6,
            log_interval=10**6,
            save_interval=10**6,
            eval_rows=0,
            profile=True,
            profile_interval=10**6,
        )
    except KeyboardInterrupt:
        pass
    finally:
        Batches.at, Engine.step = read, step


def main() -> None:
    """Run it, print the figures, write the JSON."""
    asked = arguments(__doc__)
    asked.add_argument("text", type=Path)
    asked.add_argument("--model", default="tiny")
    asked.add_argument("--pairs", type=int, default=100)
    asked.add_argument("--deepspeed_config", default="configs/ds_config.json")
    given = asked.parse_args()
    race, before = Race(given.pairs), os.getloadavg()
    with tempfile.TemporaryDirectory() as kept:
        run(race, given, Path(kept))
    with_hooks = [pair for pair in race.found if pair["hooks"]]
    without = [pair for pair in race.found if not pair["hooks"]]
    hooks = [one["loop"] / two["loop"] - 1 for one, two in zip(with_hooks, without, strict=True)]
    found = {
        "bare_ms": statistics.median(pair["bare"] for pair in race.found) * 1e3,
        "loop_ms": statistics.median(pair["loop"] for pair in without) * 1e3,
        "loop_with_hooks_ms": statistics.median(pair["loop"] for pair in with_hooks) * 1e3,
        "loop_over_engine_ms": statistics.median(p["loop"] - p["bare"] for p in without) * 1e3,
        "hooks_share": statistics.median(hooks),
        "hooks_ms": statistics.median(
            (one["loop"] - two["loop"]) * 1e3 for one, two in zip(with_hooks, without, strict=True)
        ),
    }
    print(json.dumps(found, indent=1))
    record(given.out, "overhead", before, found=found, pairs=race.found)


if __name__ == "__main__":
    main()
