"""Weight decay, dropout, and other losses where a small text is read many times; dropout's cost.

    OMP_NUM_THREADS=1 python -m benchmarks.dropout NAME=TEXT.jsonl [...] --folder DIR
        [--shape 0.3m] [--tokens 491520] [--passes 4 12 40] [--rates 0.1 0.2] [--seeds 3]
        [--out FILE.json]
    OMP_NUM_THREADS=1 python -m benchmarks.dropout --cost [--model 26m] [--rows 2] [--rounds 15]
        [--compile] [--out FILE.json]

Every run reads as many tokens, in passes over a part of the text, on one thread in fp32. With the
decay of `auto` (minimind/config/rules.py) there is no dropout or one of the rates; with the decay
of one pass there is one of the rates. Two arms have the decay of `auto` and another loss: label
smoothing of 0.1, and a z-loss, 1e-4 times the squared logarithm of the softmax's denominator. The
other numbers are those of `auto`. Printed are bits per byte of held-out documents after the last
step: the mean over seeds, and each seed's. What is done in DIR is not done again.

--cost times forward and backward passes in fp32 without dropout, with it, and with the dropout of
torch at the same places. They take turns; a ratio is the median over rounds, of CPU time.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.auto_values import ROW, Case, data_of
from benchmarks.default_rules import SHAPES, K
from benchmarks.record import arguments, preset, record
from minimind.config.rules import Workload, weight_decay
from minimind.engine.compile import compiled_methods
from minimind.launch.train_pretrain import main as train_pretrain
from minimind.model.dropout import Dropout, row_keys
from minimind.model.loss import IGNORED

MODULE = "benchmarks.dropout"
ONE_PASS = weight_decay(Workload(0, 0, 1.0, 0))


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    """Label smoothing of 0.1, for --loss."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with a z-loss, for --loss."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    squares = logits[targets != IGNORED].logsumexp(-1).square()
    return F.cross_entropy(logits, targets, reduction="sum") + 1e-4 * squares.sum()


def arms(rates: list[float]) -> dict[str, dict[str, Any]]:
    """Flags of each arm, by its name."""
    alone = {f"dropout {rate:g}": {"weight_decay": ONE_PASS, "dropout": rate} for rate in rates}
    both = {f"decay and dropout {rate:g}": {"dropout": rate} for rate in rates}
    losses = {"label smoothing": smoothed, "z-loss": with_z_loss}
    other = {name: {"loss": f"{MODULE}:{f.__name__}"} for name, f in losses.items()}
    return {"decay": {}, **alone, **both, **other}


def train(case: Case, data: Path, flags: Mapping[str, Any], place: Path) -> dict[str, Any]:
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


def passes_over_texts(args: Namespace) -> None:
    """Run the arms on every text, print a line for each, and record the result."""
    before, lines = os.getloadavg(), []
    for text in args.texts:
        name, _, path = text.partition("=")
        for passes in args.passes:
            case = Case(args.shape, name, args.tokens, passes)
            data = data_of(case, Path(path), args.folder)
            for arm, flags in arms(args.rates).items():
                places = [
                    args.folder / "dropout" / f"{case.name}-{arm.replace(' ', '-')}-{seed}.json"
                    for seed in range(args.seeds)
                ]
                runs = [
                    train(case, data, {**flags, "seed": seed}, place)
                    for seed, place in enumerate(places)
                ]
                bits = [run["bits"] for run in runs]
                lines.append({"case": case.name, "arm": arm, "runs": runs})
                each = " ".join(f"{one:.4f}" for one in bits)
                print(f"{case.name}: {arm}: {statistics.mean(bits):.4f} ({each})", flush=True)
    record(args.out, "dropout", before, runs=lines)


def of_torch(_: Dropout, x: Tensor, __: int) -> Tensor:
    """torch's dropout at the places of ours."""
    return F.dropout(x, 0.1)


def step_of(shape: str, rows: int, is_compiled: bool, kind: str) -> Callable[[], float]:
    """A forward and backward pass of a new model, which returns its CPU seconds."""
    model: Any = preset(shape).train()
    length = model.config.max_position_embeddings
    text = torch.randint(model.config.vocab_size, (rows, length + 1))
    given: dict[str, Any] = {}
    if kind != "none":
        keys = row_keys(0, 0, 0, rows, text.device)
        given = {"dropout": 0.1, "dropout_keys": keys}
    if is_compiled:
        for module, name in compiled_methods(model):
            setattr(module, name, torch.compile(getattr(module, name), dynamic=False))

    def step() -> float:
        model.zero_grad()
        started = time.process_time()
        with patch.object(Dropout, "__call__", of_torch if kind == "torch" else Dropout.__call__):
            inputs = text[:, :-1], text[:, 1:]
            out = model(inputs[0], shift_labels=inputs[1], loss_chunk_size=0, **given)
            out.loss_sum.backward()
        return time.process_time() - started

    step()
    step()
    return step


def cost(args: Namespace) -> None:
    """Time the steps, print the ratios, and record them."""
    before, kinds = os.getloadavg(), ("none", "keyed", "torch")
    steps = {kind: step_of(args.model, args.rows, args.compile, kind) for kind in kinds}
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(args.rounds):
        for kind in kinds[:: 1 if number % 2 else -1]:
            spent[kind].append(steps[kind]())
    found: dict[str, Any] = {"none_ms": 1e3 * statistics.median(spent["none"])}
    print(f"{args.model}, {args.rows} rows: {found['none_ms']:.0f} ms without dropout")
    for kind in kinds[1:]:
        pairs = [b / a for a, b in zip(spent["none"], spent[kind], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        found[kind] = [low, middle, high]
        print(f"{kind}: {middle:.3f} of the time ({low:.3f}-{high:.3f})")
    record(args.out, "dropout", before, found=found)


def main() -> None:
    """Compare losses over many passes, or the cost of a step."""
    parser = arguments(__doc__)
    parser.add_argument("texts", nargs="*", metavar="NAME=TEXT.jsonl")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES], default="0.3m")
    parser.add_argument("--tokens", type=int, default=480 * K)
    parser.add_argument("--passes", type=int, nargs="+", default=[4, 12, 40])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--model", default="26m")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.cost:
        cost(args)
    elif args.texts and args.folder:
        passes_over_texts(args)
    else:
        parser.error("give texts and --folder, or --cost")


if __name__ == "__main__":
    main()
