"""Weight decay, dropout and both where a small text is read many times.

    OMP_NUM_THREADS=1 python -m benchmarks.dropout NAME=TEXT.jsonl [...] --folder DIR
        [--shape 0.3m] [--tokens 491520] [--passes 4 12 40] [--rates 0.1 0.2] [--seeds 2]
        [--out FILE.json]

Every run reads as many tokens, in passes over a part of the text, on one thread in fp32. With the
decay of `auto` (minimind/config/rules.py) there is no dropout or one of the rates; with the decay
of one pass there is one of the rates. The other numbers are those of `auto`. Printed are bits per
byte of held-out documents after the last step: the mean over seeds, and each seed's. What is done
in DIR is not done again.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from contextlib import redirect_stdout
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.auto_values import ROW, Case, data_of
from benchmarks.default_rules import SHAPES, K
from benchmarks.record import arguments, record
from minimind.config.rules import Workload, weight_decay
from minimind.launch.train_pretrain import main as train_pretrain

ONE_PASS = weight_decay(Workload(0, 0, 1.0, 0))


def arms(rates: list[float]) -> dict[str, dict[str, float]]:
    """Flags of each arm, by its name."""
    alone = {f"dropout {rate:g}": {"weight_decay": ONE_PASS, "dropout": rate} for rate in rates}
    both = {f"decay and dropout {rate:g}": {"dropout": rate} for rate in rates}
    return {"decay": {}, **alone, **both}


def train(case: Case, data: Path, flags: dict[str, float], place: Path) -> dict[str, Any]:
    """Last validation of a run, unless that was done."""
    if place.exists():
        return json.loads(place.read_text())
    place.parent.mkdir(exist_ok=True)
    out, started = place.with_suffix(""), time.process_time()
    shutil.rmtree(out, ignore_errors=True)
    line = f"--data_path {data} --out_dir {out} --max_tokens {case.tokens} --epochs 1000"
    line += f" --max_seq_len {ROW} --device cpu --dtype float32 --deepspeed_config none"
    line += " --eval_rows 1000000 --eval_interval 1000000 --log_interval 1000 --save_minutes 0"
    for name, value in {**SHAPES[case.shape], **flags}.items():
        line += f" --{name} {value}"
    with redirect_stdout(io.StringIO()):
        status = train_pretrain(line.split())
    if status:
        raise SystemExit(status)
    events = list(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
    last = [event for event in events if event["event"] == "eval"][-1]
    loss = [event for event in events if event["event"] == "step"][-1]["loss"]
    found = {"bits": last["val_bpb"], "val_loss": last["val_loss"], "train_loss": loss}
    found |= {"step": last["step"], "cpu_seconds": time.process_time() - started}
    shutil.rmtree(out)
    place.write_text(json.dumps(found))
    return found


def main() -> None:
    """Run the arms, print a line for each, and record the result."""
    parser = arguments(__doc__)
    parser.add_argument("texts", nargs="+", metavar="NAME=TEXT.jsonl")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", choices=[*SHAPES], default="0.3m")
    parser.add_argument("--tokens", type=int, default=480 * K)
    parser.add_argument("--passes", type=int, nargs="+", default=[4, 12, 40])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    before, lines = os.getloadavg(), []
    for text in args.texts:
        name, _, path = text.partition("=")
        for passes in args.passes:
            case = Case(args.shape, name, args.tokens, passes)
            data = data_of(case, Path(path), args.folder)
            for arm, flags in arms(args.rates).items():
                runs = [
                    train(
                        case,
                        data,
                        {**flags, "seed": seed},
                        args.folder
                        / "dropout"
                        / f"{case.name}-{arm.replace(' ', '-')}-{seed}.json",
                    )
                    for seed in range(args.seeds)
                ]
                bits = [run["bits"] for run in runs]
                lines.append({"case": case.name, "arm": arm, "runs": runs})
                each = " ".join(f"{one:.4f}" for one in bits)
                print(f"{case.name}: {arm}: {mean(bits):.4f} ({each})", flush=True)
    record(args.out, "dropout", before, runs=lines)


if __name__ == "__main__":
    main()
