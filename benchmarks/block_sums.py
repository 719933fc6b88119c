"""What the sums of blocks of prepared text cost: reading with and without them, and a step.

    OMP_NUM_THREADS=1 python -m benchmarks.block_sums [--tokens 100000000] [--rows 16] [--steps 12]
        [--model tiny] [--folder DIR]

Rows at random places, nearly all in blocks that were not read before, as in the first part of an
epoch: the most that sums cost. Steps of a model on the CPU take their rows in turn from a reading
with sums and from one without; a step's time is the processor's, of all threads. The cost of
reading is that of more rows, without steps, in turn too, over a step's time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.loader import ROW_TOKENS, write
from benchmarks.record import arguments, preset, record
from minimind.data.rows.batches import Batches
from minimind.data.rows.order import Order
from minimind.data.shards.block_sums import BLOCK_BYTES
from minimind.data.shards.token_shards import TokenShards

CPU = torch.device("cpu")
READ_STEPS = 64  # of which the reading is timed at once


class Unchecked(TokenShards):
    """Shards that are read without their sums."""

    def _check(self, shard: int, starts: np.ndarray, length: int) -> None:
        pass


def read(shards: TokenShards, steps: Sequence[np.ndarray]) -> None:
    """Read the rows of some steps."""
    for rows in steps:
        shards.read_rows(rows, ROW_TOKENS)


def cpu_ms(work: Callable[[], object]) -> float:
    """Milliseconds of the processor, of all threads."""
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3


def main() -> None:
    """Measure, print, and write the figures to --out."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=10**8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--folder", help="where to write (default: a temporary one)")
    args, load = parser.parse_args(), os.getloadavg()
    model = preset(args.model, ROW_TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    found: dict[str, dict[str, list[float]]] = {"step": {}, "reading": {}}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        summed = write(Path(folder), args.tokens)
        plain = Unchecked(folder, "train")
        order = Order(plain.rows(ROW_TOKENS), args.rows, 1)
        ways = {
            name: Batches(shards, order, ROW_TOKENS, args.rows, 0, 1, CPU)
            for name, shards in (("without", plain), ("with", summed))
        }

        def train(batches: Batches, step: int) -> None:
            (rows,) = batches.at(step)
            rows %= model.config.vocab_size
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=rows[:, :-1], labels=rows[:, :-1]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        for step in range(args.steps + 1):
            for name in sorted(ways, reverse=bool(step % 2)):
                spent = cpu_ms(partial(train, ways[name], step))
                found["step"].setdefault(name, []).append(spent)
        for batches in ways.values():
            batches.close()
        first = 10 * args.steps
        for part in range(args.steps):
            steps = range(first + part * READ_STEPS, first + (part + 1) * READ_STEPS)
            places = [order.rows_for(step, 0, 1) for step in steps]
            readers = {"without": plain, "with": summed}
            for name in sorted(readers, reverse=bool(part % 2)):
                spent = cpu_ms(partial(read, readers[name], places))
                found["reading"].setdefault(name, []).append(spent / READ_STEPS)
    pairs = zip(found["step"]["with"][1:], found["step"]["without"][1:], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    step = statistics.median(found["step"]["without"][1:])
    with_sums, without = (statistics.median(found["reading"][n]) for n in ("with", "without"))
    share = (with_sums - without) / step
    print(f"{args.tokens:,} tokens, {args.rows} rows of {ROW_TOKENS}, blocks of {BLOCK_BYTES:,}")
    print(f"  reading a step's rows {without:.3f} ms, with sums {with_sums:.3f} ms")
    print(f"  a step of {args.model} {step:,.1f} ms; sums are {share:.3%} of it")
    print(f"  steps with sums / without: {ratio:.3f} (median)")
    record(args.out, "block_sums", load, cpu_ms=found, share=share, ratio=ratio)


if __name__ == "__main__":
    main()
