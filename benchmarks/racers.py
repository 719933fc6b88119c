"""Training loops that are compared at equal time; each runs in a process of its own.

    python -m benchmarks.racers NAME DATA OUT --steps N [--lr X] [--seed 0] [--points 10] [...]

DATA is a folder of `minimind prepare`. Started by benchmarks.time_to_loss. A contender of another
project is read from its checkout, --peer PATH (benchmarks/peers.py). Weights are kept after each of
--points equal parts of the run, and judged at its end by `minimind eval`, or as it does, on the
held-out documents, each document by itself. OUT/points.json has for each of them the step, the
seconds from the start of the first step without the time to save, by the clock and of CPU time of
all threads, the tokens with a loss, and with --judge bits per byte. All compute in fp32 on the CPU.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import peers
from benchmarks.contenders import llama_model
from benchmarks.peers import PEER_OF
from benchmarks.record import preset
from benchmarks.rows import packed_rows, padded_rows, shuffled
from minimind.config.parse import parse_flags
from minimind.model.loss import next_token_loss

if TYPE_CHECKING:
    from minimind.checkpoint.resume import TrainState
    from minimind.data.shards.token_shards import TokenShards

CLIP = 1.0


def now() -> np.ndarray:
    """Seconds on the clock, and of CPU time of all threads of this process."""
    return np.array([time.perf_counter(), time.process_time()])


class Clock:
    """Seconds of training and tokens trained on at the points where weights are saved."""

    def __init__(self, out: Path, steps: int, points: int) -> None:
        self.out = out
        if steps % points:
            raise SystemExit(f"--steps {steps} cannot be divided by --points {points}")
        self.marks = {steps * point // points for point in range(1, points + 1)}
        self.found: dict[int, dict[str, float]] = {}
        self.paused = self.started = np.zeros(2)

    def start(self) -> None:
        """Note the start of the first step."""
        self.started = now()

    def after(self, step: int, tokens: int, save: Callable[[Path], Any]) -> None:
        """Note the time and save the weights if `step` is one of the points."""
        if step not in self.marks:
            return
        reached = now()
        wall, cpu = (reached - self.started - self.paused).tolist()
        self.found[step] = {"seconds": wall, "cpu_seconds": cpu, "tokens": tokens}
        save(self.weights(step))
        self.paused = self.paused + now() - reached

    def weights(self, step: int) -> Path:
        """Folder of the weights after `step`."""
        return self.out / f"step_{step:08d}"


def minimind_style(
    args: argparse.Namespace,
    clock: Clock,
    rows_of: Callable[[Path, int], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """A plain loop: AdamW of torch's defaults, cosine from 1.1 to 0.1 of the rate, no warm-up."""
    run = parse_flags(["--model", args.model])
    inputs, targets = rows_of(args.data, run.max_seq_len)
    torch.manual_seed(args.seed)
    model = preset(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    order = shuffled(len(inputs), args.rows)
    tokens = torch.zeros((), dtype=torch.int64)
    clock.start()
    for step in range(args.steps):
        factor = 0.1 + 0.5 * (1 + math.cos(math.pi * step / args.steps))
        optimizer.param_groups[0]["lr"] = args.lr * factor
        batch = next(order)
        loss_sum, count = next_token_loss(model(inputs[batch]).logits, targets[batch])
        (loss_sum / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        tokens += count
        clock.after(step + 1, int(tokens), model.save_pretrained)


def trainer(args: argparse.Namespace, clock: Clock) -> None:
    """transformers' Trainer with its defaults: AdamW, linear decay; packed rows."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    run = parse_flags(["--model", args.model])
    inputs, _ = packed_rows(args.data, run.max_seq_len - 1)  # it shifts the targets itself
    set_seed(args.seed)
    model = llama_model(run)

    class Points(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            tokens = state.global_step * args.rows * (inputs.shape[1] - 1)
            clock.after(state.global_step, tokens, model.save_pretrained)

    arguments = TrainingArguments(
        output_dir=str(args.out / "trainer"),
        per_device_train_batch_size=args.rows,
        max_steps=args.steps,
        learning_rate=args.lr,
        seed=args.seed,
        dataloader_drop_last=True,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in inputs]
    data: Any = rows  # a list serves as well as a Dataset
    Trainer(model, arguments, train_dataset=data, callbacks=[Points()]).train()


def this_project(args: argparse.Namespace, clock: Clock, flags: str = "") -> None:
    """train_pretrain.py with `flags` and those of the command line."""
    from minimind.launch.train_pretrain import main
    from minimind.report.run_logger import RunLogger
    from minimind.train import initial_weights, loop
    from minimind.train.bigrams import start_as_bigrams

    line = f"--model {args.model} --seed {args.seed} --batch_size {args.rows} --device cpu"
    line += f" --data_path {args.data} --out_dir {args.out} --max_steps {args.steps} --resume none"
    part = args.steps // args.points
    line += f" --eval_rows 0 --keep_last {args.points} --save_minutes 0 --save_interval {part}"
    line += f" --log_interval {part} --no-async_save --dtype float32"
    line += " --deepspeed_config none"
    rate = ["--learning_rate", str(args.lr)] if args.lr else []

    def begin(logger: RunLogger, step: int, tokens: int) -> None:
        starts(logger, step, tokens)
        clock.start()
        clock.started = clock.started - spent

    def counting(model: Any, text: TokenShards) -> None:
        before = now()
        start_as_bigrams(model, text)
        spent[:] = now() - before

    def start_save(context: loop.RunContext, state: TrainState) -> None:
        clock.after(state.step, state.tokens, lambda _: saves(context, state))

    starts, saves, spent = RunLogger.begin, loop.start_save, np.zeros(2)
    with (
        patch.object(RunLogger, "begin", begin),
        patch.object(loop, "start_save", start_save),
        patch.object(initial_weights, "start_as_bigrams", counting),
    ):
        status = main([*line.split(), *flags.split(), *rate, *args.flags])
    if status:
        raise SystemExit(status)
    for mark in clock.marks:
        (args.out / "checkpoints" / clock.weights(mark).name).rename(clock.weights(mark))


def defaults_before(args: argparse.Namespace, clock: Clock) -> None:
    """This project with the numbers that it had for every size and text, before rules."""
    warmup = min(100, args.steps // 20)
    flags = f"--batch_size 8 --learning_rate 5e-4 --weight_decay 0.1 --warmup_steps {warmup}"
    this_project(args, clock, flags)


PADDED, PACKED = "MiniMind-style, padded", "MiniMind-style, packed"
TRAINER, DEFAULT, MUON = "Trainer, Llama", "ours, defaults", "ours, Muon"
BEFORE, RECIPE = "ours, defaults before", "ours, recipe strong"
MUON_FLAGS = "--optimizer muon --muon_scaling match_rms_adamw"  # one rate for all weights
RACERS: dict[str, Callable[[argparse.Namespace, Clock], None]] = {
    PADDED: partial(minimind_style, rows_of=padded_rows),
    PACKED: partial(minimind_style, rows_of=packed_rows),
    TRAINER: trainer,
    DEFAULT: this_project,
    BEFORE: defaults_before,
    MUON: partial(this_project, flags=MUON_FLAGS),
    RECIPE: partial(this_project, flags="--config strong"),
}


def judge(weights: Path, data: Path) -> float:
    """Bits per byte of the held-out documents by `minimind eval`."""
    from minimind.cli.main import main as minimind

    command = ["eval", "--data_path", str(data), "--batch_size", "16", "--json"]
    if (weights / "manifest.json").exists():
        command += ["--checkpoint", str(weights)]
    else:
        command += ["--model", str(weights), "--tokenizer", str(data / "tokenizer")]
    with redirect_stdout(io.StringIO()) as output:
        status = minimind(command)
    if status:
        raise SystemExit(status)
    bits: float = json.loads(output.getvalue())["bits_per_byte"]
    return bits


def main() -> None:
    """Train one contender, and judge it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*RACERS, *PEER_OF])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--peer", type=Path, help="checkout of the project")
    parser.add_argument("--judge", action="store_true")
    args, args.flags = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(args.out, args.steps, args.points)
    if args.name in RACERS:
        RACERS[args.name](args, clock)
        judged = partial(judge, data=args.data)
    elif args.peer:
        model = PEER_OF[args.name].contenders[args.name](args, clock)
        length = parse_flags(["--model", args.model]).max_seq_len
        judged = partial(peers.judge, model, data=args.data, length=length)
    else:
        parser.error(f"{args.name} is read from a checkout; give --peer PATH")
    points = [{"step": step, **clock.found[step]} for step in sorted(clock.found)]
    if args.judge:
        points = [{**p, "bits": judged(clock.weights(int(p["step"])))} for p in points]
    (args.out / "points.json").write_text(json.dumps(points))


if __name__ == "__main__":
    main()
