"""Numbers by rule beside the best of a sweep around them, and beside the defaults of before.

    OMP_NUM_THREADS=1 python -m benchmarks.auto_values NAME=TEXT.jsonl [...] --folder DIR
        [--only CASE ...] [--out FILE.json]

Cases are sizes, texts and epochs that the rules were fitted on (benchmarks/default_rules.py), and
others that they were not; NAME is kjv, poems, python (of examples/stdlib_corpus.py) or headers (the
C headers of Python, a document each). Every run reads the same number of tokens on one thread. A
sweep moves one number at a time away from that of the rule: rate, rows and, with several epochs,
weight decay. Printed are held-out bits per byte of the rule and of the best, and the share of the
CPU time of the defaults of before in which the rule reaches their value. What is done in DIR is not
done again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.default_rules import SHAPES, K, in_an_order, part_of
from benchmarks.default_rules import prepare as tokenize
from benchmarks.racers import BEFORE, DEFAULT
from benchmarks.record import arguments, record
from benchmarks.time_to_loss import needed
from minimind.config.rules import suited_rows

ROW, POINTS = 256, 10


@dataclass(frozen=True)
class Case:
    """What is trained, and whether a sweep surrounds the rule."""

    shape: str
    text: str
    tokens: int
    epochs: int = 1
    is_swept: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.text}-{self.tokens // K}k-{self.epochs}e"

    @property
    def rows(self) -> int:
        """Rows of a step by the rule."""
        return suited_rows(1, ROW, self.tokens, 64, "AdamW")


CASES = (
    Case("4m", "kjv", 512 * K, is_swept=True),  # a size kept out
    Case("1m", "python", 512 * K, is_swept=True),  # a text kept out
    Case("1m", "headers", 480 * K, 12, is_swept=True),  # many epochs on another one
    Case("1m", "python", 480 * K, 12),
    Case("0.3m", "kjv", 512 * K),
    Case("1m", "poems", 512 * K),
    Case("2m", "kjv", 512 * K),
    Case("8m", "kjv", 256 * K),
)


def data_of(case: Case, text: Path, folder: Path) -> Path:
    """Prepared text: the whole, or as much as the epochs read."""
    vocab = SHAPES[case.shape]["vocab_size"]
    place = folder / case.text
    whole = place / str(vocab)
    if not whole.exists():
        place.mkdir(parents=True, exist_ok=True)
        lines, size, held_out = in_an_order(text), 0, []
        while size < 2**17:  # a point of a run is judged in seconds
            held_out.append(lines.pop())
            size += len(held_out[-1].encode())
        (place / "held_out.jsonl").write_text("".join(held_out), encoding="utf-8")
        kept = [line for line in lines if line not in held_out]  # a text may repeat documents
        (place / "train.jsonl").write_text("".join(kept), encoding="utf-8")
        tokenize(place / "train.jsonl", place, whole, "--vocab_size", str(vocab))
    if case.epochs == 1:
        return whole
    return part_of(place, case.tokens // case.epochs, vocab, whole / "tokenizer")


def train(
    case: Case, name: str, racer: str, flags: dict[str, Any], folder: Path, data: Path
) -> Any:
    """Points of a run, unless that was done."""
    place = folder / "runs" / f"{case.name}-{name}.json"
    if place.exists():
        return json.loads(place.read_text())
    place.parent.mkdir(exist_ok=True)
    shape = folder / f"{case.shape}.yaml"
    shape.write_text(yaml.safe_dump({**SHAPES[case.shape], "max_seq_len": ROW}))
    rows = 8 if racer == BEFORE else flags.get("batch_size", case.rows)
    steps = case.tokens // (rows * ROW) // POINTS * POINTS
    out = place.with_suffix("")
    words = [sys.executable, "-m", "benchmarks.racers", racer, str(data), str(out)]
    words += ["--model", str(shape), "--rows", str(rows), "--steps", str(steps), "--judge"]
    words += ["--epochs", str(10 * case.epochs)]
    for flag, value in flags.items():
        words += [f"--{flag}", str(value)]
    with place.with_suffix(".log").open("w") as log:
        subprocess.run(words, check=True, stdout=log, stderr=subprocess.STDOUT)
    points: list[dict[str, float]] = json.loads((out / "points.json").read_text())
    config = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    names = ("learning_rate", "batch_size", "weight_decay", "warmup_steps")
    found = {"case": case.name, "run": name, **{n: config[n] for n in names}, "curve": points}
    shutil.rmtree(out)
    place.write_text(json.dumps(found))
    return found


def around(rule: dict[str, Any], epochs: int) -> dict[str, dict[str, Any]]:
    """Flags of the sweep: one number at a time away from that of the rule."""
    rate, rows, decay = rule["learning_rate"], rule["batch_size"], rule["weight_decay"]
    sweep: dict[str, dict[str, Any]] = {}
    for factor in (0.5, 0.71, 1.41, 2):
        sweep[f"rate-x{factor}"] = {"learning_rate": float(f"{rate * factor:.3g}")}
    sweep |= {f"rows-{n}": {"batch_size": n} for n in {max(1, rows // 2), 2 * rows} - {rows}}
    if epochs > 1:
        sweep |= {f"decay-x{f}": {"weight_decay": decay * f} for f in (0.5, 2)}
    return sweep


def main() -> None:
    """Run the cases, print a line for each, and record the result."""
    parser = arguments(__doc__)
    parser.add_argument("texts", nargs="+", metavar="NAME=TEXT.jsonl")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[])
    args = parser.parse_args()
    texts = dict(text.split("=", 1) for text in args.texts)
    cases = {case.name: case for case in CASES if case.text in texts}
    if unknown := [name for name in args.only if name not in cases] or (not cases and [*texts]):
        parser.error(f"{unknown[0]} is no case or text; with these texts there are {[*cases]}")
    before, lines = os.getloadavg(), []
    for case in (cases[name] for name in cases if not args.only or name in args.only):
        data = data_of(case, Path(texts[case.text]), args.folder)
        rule = train(case, "rule", DEFAULT, {}, args.folder, data)
        old = train(case, "before", BEFORE, {}, args.folder, data)
        runs = [rule, old]
        for name, flags in around(rule, case.epochs).items() if case.is_swept else ():
            runs.append(train(case, name, DEFAULT, flags, args.folder, data))
        lines += runs
        bits = [run["curve"][-1]["bits"] for run in runs]
        best = min(range(len(runs)), key=bits.__getitem__)
        share = needed(rule, bits[1], "cpu_seconds") / old["curve"][-1]["cpu_seconds"]
        print(
            f"{case.name}: rule {bits[0]:.4f} (rate {rule['learning_rate']:g}, rows"
            f" {rule['batch_size']}, decay {rule['weight_decay']:g}); best {bits[best]:.4f}"
            f" ({runs[best]['run']}), {100 * (bits[0] / bits[best] - 1):.2f} % above it; before"
            f" {bits[1]:.4f}, reached in {share:.2f} of its time",
            flush=True,
        )
    record(args.out, "auto_values", before, runs=lines)


if __name__ == "__main__":
    main()
