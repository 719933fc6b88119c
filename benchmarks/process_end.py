"""CPU seconds of a whole run of two steps: its start, its end, and little between.

    OMP_NUM_THREADS=1 python -m benchmarks.process_end [--roots . OTHER_CHECKOUT] [--rounds 7]
        [--processes 1 2] [--out FILE.json]

User and system time of all processes of the run, the launcher's too. One process is started by
train_pretrain.py, two by run_accelerate.sh. Checkouts take turns in every round.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import arguments, record

FLAGS = "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 2 --max_seq_len 64 --vocab_size 600"
FLAGS += " --batch_size 2 --accumulation_steps 1 --max_steps 2 --device cpu"


def write_text(path: Path) -> None:
    """Documents of random words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(400)]
    texts = (" ".join(draw.choices(words, k=80)) for _ in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def cpu_seconds(root: Path, processes: int, folder: Path) -> float:
    """CPU seconds of one run of a checkout and of all that it starts."""
    start = (
        [sys.executable, "train_pretrain.py"] if processes == 1 else ["bash", "run_accelerate.sh"]
    )
    with tempfile.TemporaryDirectory(dir=folder) as out:
        places = ["--data_path", str(folder / "text.jsonl"), "--cache_dir", str(folder / "cache")]
        environ = {**os.environ, "PYTHON": sys.executable, "NUM_PROCESSES": str(processes)}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*start, *FLAGS.split(), *places, "--out_dir", f"{out}/run"],
            cwd=root,
            env=environ,
            check=True,
            capture_output=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run it, print the median and the least and most per checkout, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--roots", type=Path, nargs="+", default=[Path()])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    before = os.getloadavg()
    spent: dict[tuple[int, Path], list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_text(folder / "text.jsonl")
        for number in range(given.rounds + 1):
            for processes in given.processes:
                for root in given.roots:
                    seconds = cpu_seconds(root.resolve(), processes, folder)
                    if number:  # the first round prepares the text
                        spent.setdefault((processes, root), []).append(seconds)
    found = []
    for (processes, root), seconds in spent.items():
        name, middle = root.resolve().name, statistics.median(seconds)
        found.append({"processes": processes, "checkout": name, "cpu_seconds": seconds})
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"processes: {processes}, {name}: {middle:.2f} s ({spread})")
    record(given.out, "process_end", before, found=found)


if __name__ == "__main__":
    main()
