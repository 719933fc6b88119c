"""What --fingerprints costs a step, in CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks.fingerprints TEXT.jsonl [--pairs 20] [--model tiny]
        [--batch_size ROWS] [--dtype float32] [--deepspeed_config none] [--out FILE.json]

One run of one process, of which every second step is recorded. A pair is a step without a record
and the next one, with it. share: what a record adds to the steps at --fingerprints 10, as a part of
the time of ten steps.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import minimind.train as training
from benchmarks.overhead import interval
from benchmarks.record import arguments, record
from minimind.train import loop

WARM, EVERY = 4, 10  # steps


def main() -> None:
    """Run it, print the figures, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--deepspeed_config", default="none")
    given, before = parser.parse_args(), os.getloadavg()
    seconds: list[float] = []
    take_step = loop.take_step

    def timed(*arguments: Any) -> Any:
        started = time.process_time()
        result = take_step(*arguments)
        seconds.append(time.process_time() - started)
        return result

    train: Any = training
    loop.take_step = timed
    with tempfile.TemporaryDirectory() as kept:
        train(
            model=given.model,
            batch_size=given.batch_size,
            dtype=given.dtype,
            deepspeed_config=given.deepspeed_config,
            data_path=[str(given.text)],
            out_dir=f"{kept}/out",
            cache_dir=f"{kept}/cache",
            device="cpu",
            max_steps=WARM + 2 * given.pairs,
            log_interval=10**6,
            save_minutes=0.0,
            eval_rows=0,
            fingerprints=2,
        )
    loop.take_step = take_step
    plain, recorded = seconds[WARM::2], seconds[WARM + 1 :: 2]
    more = [(b - a) * 1e3 for a, b in zip(plain, recorded, strict=True)]
    shares = [(b - a) / (EVERY * a) for a, b in zip(plain, recorded, strict=True)]
    found: dict[str, Any] = {"step_ms": statistics.median(plain) * 1e3}
    for name, values in (("record_ms", more), ("share", shares)):
        found |= {name: statistics.median(values), f"{name}, 95 %": interval(values)}
    print(json.dumps(found, indent=1))
    record(given.out, "fingerprints", before, found=found)


if __name__ == "__main__":
    main()
