"""Tokens/s, MFU and memory of the presets on one GPU, beside a bare loop and transformers' Llama.

    make gpu-bench
    python -m benchmarks.gpu [TEXT.jsonl] [--models 26m 104m 0.4b] [--rows N ...]
        [--max_seq_len 1024] [--rounds 10] [--steps 10] [--minutes 7] [--device cuda|cpu]
        [--out FILE.json]

train_pretrain.py, compiled, in bf16, under ZeRO-2 and without DeepSpeed; the same model in a
compiled plain loop, and LlamaForCausalLM of the same shape in an eager one, both under autocast.
The four processes of a model (benchmarks/contenders.py) share the GPU and take turns of --steps
steps; a ratio is the median over pairs of turns of the same round. MFU is given for two peaks: that
of the vendor's data sheet, and that of a large bf16 matrix product, measured on this GPU just
before. Memory is the peak that torch allocated in the process. Each model is printed and written
when done, so that a failure of another costs no figures. Every model has an equal share of the
remaining --minutes; then no further round of it begins, except for the first two. Without TEXT, the
corpus of `make train`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import arguments, record
from benchmarks.throughput import BARE, Contender, race, summary
from benchmarks.throughput import BASE as LLAMA
from examples.stdlib_corpus import main as write_corpus
from minimind.architecture.plan import shape_of
from minimind.architecture.shape import flops_per_token
from minimind.config.parse import parse_flags
from minimind.train.speed import peak_of

OURS = ("ours, ZeRO-2, compiled", "ours, single, compiled")
NAMES = (*OURS, BARE, LLAMA)
ROWS = {"26m": 32, "104m": 16, "0.4b": 8}  # of 1,024 tokens; four processes share the GPU
CORPUS = 4.0  # MB, of which little is read


def measured_peak(device: torch.device) -> float:
    """Return the TFLOP/s of a product of two square bf16 matrices: the best of several."""
    side = 8192 if device.type == "cuda" else 512
    one, other = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        _wait_for(device)
        started = time.perf_counter()
        for _ in range(5):
            torch.mm(one, other)
        _wait_for(device)
        best = min(best, (time.perf_counter() - started) / 5)
    return 2 * side**3 / best / 1e12


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_model(
    model: str, rows: int, given: Any, folder: Path, peaks: dict[str, Any], minutes: float
) -> Any:
    """Return the table of one model, with MFU, and the turns of every contender."""
    words = f"--max_seq_len {given.max_seq_len} --device {given.device} --dtype bfloat16".split()
    run = parse_flags(["--model", model, *words])
    place = (model, rows, folder, words)
    starts = {name: partial(Contender, name, *place) for name in NAMES}
    turns = race(starts, given.rounds, minutes=minutes, turn=given.steps, warm_together=True)
    table = summary(turns, rows * run.max_seq_len, OURS[-1])
    for row in table.values():
        done = flops_per_token(shape_of(run)) * row["tokens_per_second"] / 1e12
        row["mfu"] = {who: peak and done / peak for who, peak in peaks.items()}
    return {"rows": rows, "table": table, "turns": turns}


def in_turn(
    given: Any, rows: Sequence[int], folder: Path, peaks: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield each model with its figures, or with SystemExit if a process ended (out of memory)."""
    over = time.monotonic() + 60 * given.minutes
    for number, (model, count) in enumerate(zip(given.models, rows, strict=True)):
        share = (over - time.monotonic()) / 60 / (len(rows) - number)
        try:
            yield model, of_model(model, count, given, folder, peaks, share)
        except SystemExit as ended:
            yield model, ended


def shown(found: dict[str, Any]) -> str:
    """Return the table as text."""
    head = f"{'model':8}{'rows':>5}  {'':24}{'ms/step':>9}{'tokens/s':>11}{'speed':>7}"
    lines = [f"{head}{'MFU, vendor':>13}{'measured':>10}{'MiB':>9}"]
    for model, one in found.items():
        for name, row in one["table"].items():
            mfu = {
                who: "-" if share is None else f"{share:.1%}" for who, share in row["mfu"].items()
            }
            lines.append(
                f"{model:8}{one['rows']:5}  {name:24}{row['seconds'] * 1e3:9.1f}"
                f"{row['tokens_per_second']:11,.0f}{row['speed']:7.2f}"
                f"{mfu['vendor']:>13}{mfu['measured']:>10}{row['peak_mib']:9,.0f}"
            )
    return "\n".join([*lines, f"speed against: {OURS[-1]}"])


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--models", nargs="+", default=list(ROWS))
    parser.add_argument("--rows", nargs="+", type=int, help="per step, of each model")
    parser.add_argument("--max_seq_len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --device cpu --models tiny tries the command")
    rows = given.rows or [ROWS.get(model, 2) for model in given.models]
    if len(rows) != len(given.models):
        raise SystemExit(f"--rows has {len(rows)} numbers for {len(given.models)} models")
    before, started, device = os.getloadavg(), time.perf_counter(), torch.device(given.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    vendor = peak_of(parse_flags(["--dtype", "bfloat16"]), device)
    peaks = {"vendor": vendor and vendor[0], "measured": measured_peak(device)}
    print(f"{name}: bf16 TFLOP/s of {vendor or 'no data sheet'}, {peaks['measured']:.1f} measured")
    result = {"name": name, "peak_tflops": peaks, "cuda": torch.version.cuda}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        if given.text is None:
            write_corpus([str(folder / "text.jsonl"), "--max_megabytes", str(CORPUS)])
        else:
            shutil.copy(given.text, folder / "text.jsonl")
        for model, one in in_turn(given, rows, folder, peaks):
            found[model] = one
            print(shown({model: one}) if isinstance(one, dict) else f"{model}: {one}", flush=True)
            seconds = time.perf_counter() - started
            whole = {model: one for model, one in found.items() if isinstance(one, dict)}
            record(given.out, "gpu", before, device=result, seconds=seconds, found=whole)
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes")
    if failed := [model for model, one in found.items() if isinstance(one, SystemExit)]:
        raise SystemExit(
            f"no figures of {', '.join(failed)}; out of memory, --rows takes fewer a step"
        )


if __name__ == "__main__":
    main()
