"""Sweeps behind the rules of learning rate, batch and weight decay (minimind/config/rules.py).

    OMP_NUM_THREADS=1 python -m benchmarks.default_rules TEXT.jsonl [TEXT.jsonl ...] --folder DIR
        [--only NAME ...] [--out FILE.json]

Every text is divided into documents to train on and held-out ones, and tokenized once per size of
vocabulary. Then `minimind sweep` runs the grids of PLANS: shapes of 0.3M to 8M parameters, numbers
of tokens, one and twelve epochs; each grid moves one or two flags. What is done in DIR is not done
again. The result has one line per run, with bits per byte of the last validation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.record import arguments, record

HELD_OUT = 33  # one of so many documents
ROW = 256
K = 1024
SHAPES = {
    "0.3m": {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 2048},
    "1m": {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 4096},
    "2m": {"dim": 192, "n_layers": 4, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 4096},
    "4m": {"dim": 256, "n_layers": 5, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 4096},
    "8m": {"dim": 320, "n_layers": 6, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 4096},
}


@dataclass(frozen=True)
class Plan:
    """Grid of flags at one shape and length."""

    shape: str
    tokens: int
    epochs: int = 1
    rows: int = 4
    grid: dict[str, list[Any]] = field(default_factory=dict)
    only: str = ""  # the one text that it is run on

    def name(self, text: str) -> str:
        """Folder of the sweep."""
        return f"{text}-{self.shape}-{self.tokens // K}k-{self.epochs}e-{self.rows}r"


def rates(*values: float) -> dict[str, list[float]]:
    """Grid over the learning rate alone."""
    return {"learning_rate": list(values)}


PLANS = (
    Plan("1m", 256 * K, grid=rates(2e-3, 4e-3, 8e-3)),
    Plan("0.3m", 256 * K, grid=rates(4e-3, 8e-3, 16e-3)),
    Plan("1m", 256 * K, rows=2, grid=rates(2e-3, 4e-3)),
    Plan("1m", 256 * K, rows=8, grid=rates(4e-3, 8e-3)),
    Plan("0.3m", 1024 * K, grid=rates(4e-3, 8e-3, 16e-3)),
    Plan("0.3m", 1024 * K, rows=8, grid=rates(8e-3, 16e-3)),
    Plan("0.3m", 1024 * K, rows=2, grid=rates(4e-3, 8e-3)),
    Plan("1m", 480 * K, 12, grid={"weight_decay": [0.1, 0.5, 2.0], "learning_rate": [4e-3]}),
    Plan("2m", 256 * K, rows=2, grid=rates(1.5e-3, 3e-3, 6e-3)),
    Plan("8m", 256 * K, rows=2, grid=rates(1e-3, 2e-3, 4e-3), only="kjv"),
    Plan("1m", 1024 * K, grid=rates(2e-3, 4e-3, 8e-3)),
    Plan("0.3m", 480 * K, 12, grid={"weight_decay": [0.1, 0.5, 2.0], "learning_rate": [6e-3]}),
    Plan("1m", 1024 * K, rows=8, grid=rates(4e-3, 8e-3)),
)
FIXED = {
    "dtype": "float32",
    "max_seq_len": ROW,
    "device": "cpu",
    "deepspeed_config": "none",
    "eval_interval": 1_000_000,
    "eval_rows": 96,
    "log_interval": 1_000,
    "save_interval": 1_000_000,
}


def divide(path: Path, folder: Path) -> None:
    """Write train.jsonl and held_out.jsonl, documents in an order of their own."""
    if (folder / "held_out.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = in_an_order(path)
    train = [line for at, line in enumerate(lines) if at % HELD_OUT]
    (folder / "train.jsonl").write_text("".join(train), encoding="utf-8")
    (folder / "held_out.jsonl").write_text("".join(lines[::HELD_OUT]), encoding="utf-8")


def in_an_order(path: Path) -> list[str]:
    """Lines of a file, the same every time, in an order that is not the file's."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [lines[n] for n in sorted(range(len(lines)), key=lambda n: n * 2654435761 % 2**32)]


def part_of(folder: Path, tokens: int, vocab: int, tokenizer: Path) -> Path:
    """Prepared folder of the first documents with about so many tokens."""
    from minimind.data.tokenizer.load import load_tokenizer

    out = folder / f"{vocab}-{tokens // K}k"
    if not out.exists():
        encode, lines, count = load_tokenizer(str(tokenizer)).encode, [], 0
        for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
            lines.append(line)
            count += len(encode(json.loads(line)["text"])) + 1
            if count >= tokens:
                break
        part = folder / f"{vocab}-{tokens // K}k.jsonl"
        part.write_text("".join(lines), encoding="utf-8")
        prepare(part, folder, out, "--tokenizer", str(tokenizer))
    return out


def prepare(text: Path, folder: Path, out: Path, *flags: str) -> None:
    """Tokenize text, with the held-out documents of the folder."""
    words = [str(text), "--val_path", str(folder / "held_out.jsonl"), "--out", str(out), *flags]
    subprocess.run([sys.executable, "-m", "minimind", "prepare", *words], check=True)


def data_of(plan: Plan, folder: Path) -> Path:
    """Prepared text of a plan: the whole, or as much as --epochs read as its tokens."""
    vocab = SHAPES[plan.shape]["vocab_size"]
    whole = folder / f"{vocab}"
    if not whole.exists():
        prepare(folder / "train.jsonl", folder, whole, "--vocab_size", str(vocab))
    if plan.epochs == 1:
        return whole
    return part_of(folder, plan.tokens // plan.epochs, vocab, whole / "tokenizer")


def sweep(plan: Plan, text: str, folder: Path) -> list[dict[str, Any]]:
    """Run a grid, or read it if it is done; one line per run."""
    place = folder / plan.name(text)
    if not (place / "done").exists():
        steps = plan.tokens // (plan.rows * ROW)
        flags = {**FIXED, **SHAPES[plan.shape], "data_path": str(data_of(plan, folder))}
        flags |= {"batch_size": plan.rows, "warmup_steps": min(100, int(0.3 * steps))}
        flags |= {"max_tokens": plan.tokens, "epochs": 10 * plan.epochs}
        spec = {"flags": flags, "dimensions": plan.grid, "sampler": "grid", "pruner": "none"}
        file = folder / f"{plan.name(text)}.yaml"
        file.write_text(yaml.safe_dump(spec), encoding="utf-8")
        words = [sys.executable, "-m", "minimind", "sweep", str(file), "--out_dir", str(place)]
        subprocess.run([*words, "--parallel", "1"], check=True)
        (place / "done").touch()
    return [line for trial in sorted(place.glob("trial-*")) if (line := read(plan, text, trial))]


def read(plan: Plan, text: str, trial: Path) -> dict[str, Any] | None:
    """What a run was, and its last validation."""
    config = yaml.safe_load((trial / "config.yaml").read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    start = next(event for event in events if event["event"] == "run_start")
    values = [event["val_bpb"] for event in events if event["event"] == "eval"]
    names = ("learning_rate", "weight_decay", "batch_size", "dim", "n_layers", "vocab_size")
    return {
        "text": text,
        "shape": plan.shape,
        "parameters": start["parameters"],
        "tokens": plan.tokens,
        "epochs": plan.epochs,
        **{name: config[name] for name in names},
        "bits_per_byte": values[-1] if values else None,
    }


def main() -> None:
    """Run the plans and record the result."""
    parser = arguments(__doc__)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[])
    args = parser.parse_args()
    known = {plan.name(path.stem) for plan in PLANS for path in args.texts}
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"--only {unknown[0]} is no sweep of these texts; there are {sorted(known)}")
    lines, load = [], os.getloadavg()
    for plan in PLANS:
        for path in args.texts:
            folder = args.folder / path.stem
            divide(path, folder)
            is_asked = not args.only or plan.name(path.stem) in args.only
            if is_asked and plan.only in ("", path.stem):
                lines += sweep(plan, path.stem, folder)
    record(args.out, "default_rules", load, runs=lines)


if __name__ == "__main__":
    main()
