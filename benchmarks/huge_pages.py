"""CPU time of a step with and without huge pages for torch's allocations, and whether losses agree.

    OMP_NUM_THREADS=1 python -m benchmarks.huge_pages TEXT.jsonl
        [--flags="--config strong --model tiny"] [--steps 24] [--rounds 3] [--out FILE.json]

In turn, runs with THP_MEM_ALLOC_ENABLE=0 and 1 train for 2 steps and for --steps more; a step's
time is the difference of the processor's seconds, of user and kernel, divided by --steps. The
kernel has to give huge pages (`minimind env`).
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import arguments, record
from minimind.config.launcher_env import HUGE_PAGES

FIRST = 2  # steps that both runs of a pair take


def seconds_of(words: list[str], out_dir: Path, setting: str) -> tuple[float, list[float]]:
    """The processor's seconds of a run, and its losses."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "minimind", "train", *words, "--out_dir", str(out_dir)]
    subprocess.run(
        command, env={**os.environ, HUGE_PAGES: setting}, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    events = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return spent, [event["loss"] for event in events if event["event"] == "step"]


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--flags", default="--config strong --model tiny")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    load, steps = os.getloadavg(), {"0": [], "1": []}
    losses: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        words = [*shlex.split(given.flags), "--data_path", str(given.text), "--device", "cpu"]
        words += ["--cache_dir", str(place / "cache"), "--log_interval", "1", "--eval_rows", "0"]
        for number in range(-1, given.rounds):  # the first prepares the text
            for setting in sorted(steps, reverse=bool(number % 2)):
                spent = []
                for count in (FIRST, FIRST + given.steps):
                    out_dir = place / f"{number}-{setting}-{count}"
                    more = ["--max_steps", str(count)]
                    seconds, found = seconds_of([*words, *more], out_dir, setting)
                    spent.append(seconds)
                losses.append(found)
                if number >= 0:
                    steps[setting].append((spent[1] - spent[0]) / given.steps)
    median = {setting: statistics.median(found) for setting, found in steps.items()}
    ratio = statistics.median(b / a for a, b in zip(steps["0"], steps["1"], strict=True))
    is_equal = all(found == losses[0] for found in losses)
    for setting, seconds in median.items():
        print(f"{HUGE_PAGES}={setting}: {seconds * 1000:,.0f} ms of the processor per step")
    print(f"ratio {ratio:.3f}, losses {'equal' if is_equal else 'DIFFER'}")
    found = {"steps": steps, "ratio": ratio, "losses_equal": is_equal}
    record(given.out, "huge_pages", load, **found)


if __name__ == "__main__":
    main()
