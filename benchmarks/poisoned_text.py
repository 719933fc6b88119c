"""A document that harms a run, and what --spike_guard makes of it.

    OMP_NUM_THREADS=1 python -m benchmarks.poisoned_text TEXT.jsonl --work DIR [--seeds 1 2 3]
        [--documents 150] [--steps 600] [--learning_rate 0.003] [--out FILE.json]

Plants a document in the first documents of TEXT.jsonl: one character over and over, whose bytes the
tokenizer has not seen. For every seed it is put where the row order reads it soonest, on average,
but not in the first 40 steps: before its window of 32 steps is full the guard skips nothing. Then
trains without it (its rows are left out by --skip_rows), with it, and with it and --spike_guard, by
AdamW with beta2 0.999, at a constant rate, without clipping. Prints the last validation losses.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minimind.train as training
from benchmarks.record import arguments, record
from minimind.cli.main import main as minimind
from minimind.data.rows.skip_rows import skip_rows_text
from minimind.errors import NumericError
from minimind.recovery.step_rows import documents_of, read_run

train: Any = training  # a package that is called like a function
POISON = json.dumps({"text": "☃" * 420}, ensure_ascii=False) + "\n"
ROW_TOKENS = 129
WINDOW = 32
LEARNT = WINDOW + 8  # steps before the first one with the document
FIXED: dict[str, Any] = {
    **{"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": ROW_TOKENS - 1},
    **{"batch_size": 2, "val_fraction": 0.05, "eval_rows": 200, "log_interval": 1},
    **{"device": "cpu", "dtype": "float32", "deepspeed_config": "none"},
    **{"save_interval": 50, "save_minutes": 0, "schedule": "constant"},
    **{"beta2": 0.999, "grad_clip": 0.0},
}


@dataclass(frozen=True)
class Planted:
    """The text with the document at a line, its rows, and the steps (from 1) that read them."""

    text: Path
    line: int
    rows: list[int]
    steps: list[int]


def plant(lines: list[str], flags: dict[str, Any], folder: Path) -> Planted:
    """Plant the document where it is read soonest on average, but after step LEARNT."""
    folder.mkdir(parents=True, exist_ok=True)
    text, first = folder / "text.jsonl", folder / "first"
    text.write_text("".join([POISON, *lines]))
    once = {**flags, "data_path": str(text), "stop_at_step": 1, "resume": "none"}
    train(once, out_dir=str(first))
    stretch = read_run(first).at(1)
    documents, order = documents_of(stretch), stretch.order
    size = documents.tokens(0)[1]  # the document is the first one
    places = documents.places(range(1, len(documents.ends)))
    best, mean = Planted(text, 0, [], []), 0.0
    for number, place in places.items():
        start = documents.tokens(number)[0] - size  # planted before this document
        rows = [*range(start // ROW_TOKENS, (start + size - 1) // ROW_TOKENS + 1)]
        reads = [step + 1 for row in rows for step, _ in order.reads_of(row, flags["max_steps"])]
        is_late = min(reads, default=0) > LEARNT
        if is_late and (not best.steps or sum(reads) / len(reads) < mean):
            best, mean = Planted(text, place.line - 1, rows, sorted(reads)), sum(reads) / len(reads)
    if not best.rows:
        raise SystemExit(f"no place is read after step {LEARNT} only; give more --documents")
    at = best.line - 1
    text.write_text("".join([*lines[:at], POISON, *lines[at:]]))
    return best


def end_of(planted: Planted, flags: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Train; the last validation loss (infinite after status 6), and the guard's decisions."""
    with suppress(NumericError):
        train({**flags, "data_path": str(planted.text)}, out_dir=str(out_dir))
    events = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [event["val_loss"] for event in events if event["event"] == "eval"]
    spikes = [event for event in events if event["event"] in ("spike", "spike_skipped")]
    named = [any(row["row"] in planted.rows for row in event["rows"][:1]) for event in spikes]
    return {
        "val_loss": losses[-1] if losses else math.inf,
        "spikes": [[event["event"], event["step"]] for event in spikes],
        "named": sum(named),
        "rollbacks": sum(event["event"] == "rolled_back" for event in events),
    }


def course(given: Any, lines: list[str], seed: int) -> dict[str, Any]:
    """The three runs of a seed."""
    folder = given.work / f"seed-{seed}"
    flags = {
        **{**FIXED, "seed": seed, "learning_rate": given.learning_rate},
        **{"max_steps": given.steps, "eval_interval": given.steps},
        **{"tokenizer": str(given.work / "tokenizer"), "cache_dir": str(given.work / "cache")},
    }
    planted = plant(lines, flags, folder)
    found = {"rows": planted.rows, "steps": planted.steps, "line": planted.line}
    found["with it"] = end_of(planted, flags, folder / "with")
    text = read_run(folder / "with").at(1).data["fingerprint"]
    left_out = folder / "left_out.txt"
    left_out.write_text(skip_rows_text(planted.rows, ROW_TOKENS, text))
    found["guarded"] = end_of(
        planted, {**flags, "spike_guard": True, "spike_window": WINDOW}, folder / "guarded"
    )
    found["without it"] = end_of(planted, {**flags, "skip_rows": str(left_out)}, folder / "without")
    return found


def main() -> None:
    """Train three runs for each seed, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--documents", type=int, default=150)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    given = parser.parse_args()
    load = os.getloadavg()
    lines = given.text.read_text().splitlines(keepends=True)[: given.documents]
    given.work.mkdir(parents=True, exist_ok=True)
    clean, tokenizer = given.work / "clean.jsonl", given.work / "tokenizer"
    clean.write_text("".join(lines))
    words = f"tokenizer train {clean} --vocab_size 1024 --out {tokenizer} --force"
    if status := minimind(words.split()):
        raise SystemExit(status)
    seeds = {seed: course(given, lines, seed) for seed in given.seeds}
    print(f"{'seed':>4}{'without it':>12}{'with it':>18}{'guarded':>18}  spikes that name it")
    for seed, found in seeds.items():
        usual = found["without it"]["val_loss"]
        others = [found[name]["val_loss"] for name in ("with it", "guarded")]
        shown = "".join(f"{loss:>9.4f} ({loss / usual - 1:+.1%})" for loss in others)
        of = f"{found['guarded']['named']} of {len(found['guarded']['spikes'])}"
        print(f"{seed:>4}{usual:>12.4f}{shown}  {of}; read at {found['steps']}")
    record(given.out, "poisoned_text", load, seeds=seeds)


if __name__ == "__main__":
    main()
