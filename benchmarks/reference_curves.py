"""Validation over tokens of the presets on the text of `make train`, seed by seed, for reports.

    OMP_NUM_THREADS=1 python -m benchmarks.reference_curves --folder DIR [--seeds 42 1 2]
        [--only NAME ...] [--steps 400] [--out minimind/report/reference/NAME.json]

A curve is the flags of `make train` with one of `CURVES`, in one process with the rows of its two.
What is done in DIR is not done again; the result is written anew after each run, with the seeds
that are done. `minimind report` and the end of a run place runs of the same kind among them
(minimind/report/placement.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import arguments
from minimind.report.history import read_configuration
from minimind.report.placement import SHAPE

ROOT = Path(__file__).resolve().parents[1]
# The rows a step of two processes with --batch_size 8.
PACE = "--batch_size 16 --eval_interval 25 --eval_rows 64 --device cpu"
# Unmeasured as yet: 26m-default and 26m-strong take hours a seed on a CPU.
CURVES = {
    "tiny-strong": "--config strong --model tiny",
    "tiny-default": "--model tiny",
    "26m-strong": "--config strong --model 26m",
    "26m-default": "--model 26m",
}
MEASURED = ("tiny-strong", "tiny-default")


def train(flags: str, out: Path, folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; it is trained unless that was done."""
    metrics = out / "metrics.jsonl"
    if not metrics.exists() or '"event": "exit"' not in metrics.read_text():
        words = [sys.executable, str(ROOT / "train_pretrain.py"), *flags.split()]
        words += ["--data_path", str(folder / "stdlib.jsonl"), "--out_dir", str(out)]
        words += ["--cache_dir", str(folder / "cache")]
        with out.with_suffix(".log").open("a") as log:
            subprocess.run(words, check=True, stdout=log, stderr=subprocess.STDOUT)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def evaluations(lines: list[dict[str, Any]]) -> dict[int, float]:
    """Bits per byte by step."""
    return {line["step"]: line["val_bpb"] for line in lines if line["event"] == "eval"}


def main() -> None:
    """Train what is missing, and write the curves."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 1, 2])
    parser.add_argument("--only", nargs="+", choices=CURVES, default=MEASURED)
    parser.add_argument("--steps", type=int, default=400, help="those of `make train`: 400")
    args = parser.parse_args()
    text = args.folder / "stdlib.jsonl"
    if not text.exists():
        words = [sys.executable, str(ROOT / "examples" / "stdlib_corpus.py"), str(text)]
        subprocess.run(words, check=True)
    # One step of any model tells what the held-out text is like.
    of_text = train(
        f"{CURVES['tiny-default']} {PACE} --max_steps 1", args.folder / "text", args.folder
    )
    (floors,) = [line for line in of_text if line["event"] == "floors"]
    curves: dict[str, Any] = {}
    for seed in args.seeds:
        for name in args.only:
            out = args.folder / f"{name}-{seed}"
            lines = train(
                f"{CURVES[name]} {PACE} --max_steps {args.steps} --seed {seed}", out, args.folder
            )
            start, found, config = lines[0], evaluations(lines), read_configuration(out).flags
            size = start["tokens_per_step"]
            facts = {"tokens_per_step": size, "total_tokens": size * start["total_steps"]}
            shape = {flag: config[flag][0] for flag in SHAPE if flag in config}
            empty = {"name": name, "flags": shape, **facts, "versions": start["versions"]}
            empty |= {"tokens": [size * step for step in found], "seeds": [], "val_bpb": []}
            curve = curves.setdefault(name, empty)
            curve["seeds"].append(seed)
            curve["val_bpb"].append([round(bits, 5) for bits in found.values()])
            print(f"{name}, seed {seed}: {curve['val_bpb'][-1][-1]:.4f}", flush=True)
            if args.out:
                found = {"text": floors["bits"], "curves": [*curves.values()]}
                args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
