"""How long it takes to read the rows of a step, against random windows of one mapped file.

    python -m benchmarks.loader [--tokens 100000000] [--rounds 7] [--folder DIR]

One thread. Every round reads the same number of tokens, interleaved: with Batches as training does,
without pause between steps, so that no reading is hidden behind computation; the same from a
mixture of two sources; and with windows at random places of a memory-mapped file, each turned to
int64 and stacked (as nanoGPT does; it needs no order, and may read a token twice or never). Prints
milliseconds per 4,096 tokens: minimum, median and maximum of the rounds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.record import arguments, record
from minimind.data.rows.batches import Batches
from minimind.data.rows.order import Mixture, Order
from minimind.data.shards.token_shards import ShardWriter, TokenShards
from tests.data.made import describe

UNIT = 4096
READ = 2**22  # tokens a round
ROW_TOKENS = 513
CPU = torch.device("cpu")


def write(folder: Path, tokens: int) -> TokenShards:
    """Random tokens in shards of 64 MiB."""
    draw = np.random.default_rng(0)
    shards = []
    for start in range(0, tokens, 2**25):
        with closing(ShardWriter(folder, f"train-{len(shards):05d}", np.dtype("<u2"))) as writer:
            for first in range(start, min(start + 2**25, tokens), 2**22):
                ids = draw.integers(0, 6400, min(2**22, tokens - first))
                writer.add(ids, np.array([len(ids)]))
            shards.append(writer.finish() or {})
    describe(folder, "uint16", shards, vocab_size=6400)
    return TokenShards(folder, "train")


def by_steps(shards: TokenShards, rows: int, mixture: Mixture | None) -> Callable[[], int]:
    """Reads the next steps of `rows` rows of an endless run; the tokens read."""
    n_rows = mixture.n_rows if mixture else shards.rows(ROW_TOKENS)
    order = Order(n_rows, rows, 1, mixture=mixture)
    batches = Batches(shards, order, ROW_TOKENS, rows, 0, 1, CPU)
    started = [0]

    def read() -> int:
        steps = READ // (rows * ROW_TOKENS)
        for step in range(started[0], started[0] + steps):
            batches.at(step)
        started[0] += steps
        return steps * rows * ROW_TOKENS

    return read


def by_windows(path: Path, rows: int) -> Callable[[], int]:
    """Reads windows at random places of one file; the tokens read."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    draw = torch.Generator().manual_seed(0)

    def read() -> int:
        steps = READ // (rows * ROW_TOKENS)
        for _ in range(steps):
            places = torch.randint(len(tokens) - ROW_TOKENS, (rows,), generator=draw).tolist()
            windows = [tokens[at : at + ROW_TOKENS].astype(np.int64) for at in places]
            torch.stack([torch.from_numpy(window) for window in windows])
        return steps * rows * ROW_TOKENS

    return read


def milliseconds(read: Callable[[], int]) -> float:
    """Per UNIT tokens."""
    started = time.perf_counter()
    tokens = read()
    return (time.perf_counter() - started) * 1e3 / tokens * UNIT


def measure(folder: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per UNIT tokens by what was timed, one number a round; the first is dropped."""
    shards = write(folder, tokens)
    n_rows = shards.rows(ROW_TOKENS)
    mixture = Mixture((n_rows // 4, n_rows - n_rows // 4), (0.5, 0.5))
    readers = {}
    for rows in (8, 64):
        readers[f"{rows} rows a step"] = by_steps(shards, rows, None)
        readers[f"{rows} rows, mixed"] = by_steps(shards, rows, mixture)
        readers[f"{rows} windows"] = by_windows(folder / "train-00000.bin", rows)
    found = [{n: milliseconds(read) for n, read in readers.items()} for _ in range(rounds + 1)]
    return {name: [one[name] for one in found[1:]] for name in readers}


def main() -> None:
    """Measure, print, and write the figures to --out."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=10**8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write (default: a temporary one)")
    args, load = parser.parse_args(), os.getloadavg()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder), args.tokens, args.rounds)
    print(f"{args.tokens:,} tokens, rows of {ROW_TOKENS}, {args.rounds} rounds")
    for name, times in found.items():
        low, middle, high = min(times), statistics.median(times), max(times)
        print(f"  {name:<14}{low:>8.3f}{middle:>8.3f}{high:>8.3f}  ms per {UNIT:,} tokens")
    ratios = {}
    for rows in (8, 64):
        pairs = zip(found[f"{rows} rows a step"], found[f"{rows} windows"], strict=True)
        ratios[rows] = [ours / theirs for ours, theirs in pairs]
        print(
            f"  {rows} rows a step / {rows} windows: {statistics.median(ratios[rows]):.2f} (median)"
        )
    result = {"tokens": args.tokens, "ms_per_4096_tokens": found, "ratios": ratios}
    record(args.out, "loader", load, **result)


if __name__ == "__main__":
    main()
