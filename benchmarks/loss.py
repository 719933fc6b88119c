"""Time and memory of the loss from all logits at once, and from 1,024 positions at a time.

    python -m benchmarks.loss [--vocab_sizes 6400 64000] [--rows 8] [--rounds 3] [--out FILE.json]

What --loss full and --loss chunked cost: one layer 512 wide, rows of 512 tokens, eager, fp32,
forward and backward. Every measurement is a process of its own, so that its peak of resident memory
is; full and chunked take turns. Of its two steps the second counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.record import arguments, record
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.environment import peak_bytes

POSITIONS = {"full": 0, "chunked": 1024}  # of which logits are made at a time; 0: of all
WIDTH, LENGTH = 512, 512


def step(vocabulary: int, rows: int, positions: int) -> dict[str, float]:
    """Seconds of the second step, and MiB at most, of this process."""
    shape: Any = {"hidden_size": WIDTH, "num_hidden_layers": 1, "max_position_embeddings": LENGTH}
    model = MiniMindForCausalLM(MiniMindConfig(vocab_size=vocabulary, **shape))
    text = torch.randint(vocabulary, (rows, LENGTH + 1))
    started = 0.0
    for _ in range(2):
        started = time.perf_counter()
        out: Any = model(text[:, :-1], shift_labels=text[:, 1:], loss_chunk_size=positions)
        (out.loss_sum / out.targets).backward()
    return {"seconds": time.perf_counter() - started, "peak_mib": peak_bytes() / 2**20}


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--vocab_sizes", type=int, nargs="+", default=[6400, 64_000])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", help="a measurement: VOCABULARY,full or VOCABULARY,chunked")
    given = parser.parse_args()
    if given.alone:
        vocabulary, how = given.alone.split(",")
        print(json.dumps(step(int(vocabulary), given.rows, POSITIONS[how])))
        return
    load, found = os.getloadavg(), {}
    for size in given.vocab_sizes:
        turns: dict[str, list[dict[str, float]]] = {how: [] for how in POSITIONS}
        for _ in range(given.rounds):
            for how, steps in turns.items():
                command = [sys.executable, "-m", "benchmarks.loss", "--rows", str(given.rows)]
                result = subprocess.check_output([*command, "--alone", f"{size},{how}"], text=True)
                steps.append(json.loads(result))
        pairs = list(zip(turns["chunked"], turns["full"], strict=True))
        for what in ("seconds", "peak_mib"):
            values = {
                how: statistics.median(s[what] for s in steps) for how, steps in turns.items()
            }
            share = statistics.median(ours[what] / theirs[what] for ours, theirs in pairs)
            result = ", ".join(f"{how} {value:,.1f}" for how, value in values.items())
            print(f"{size:>8,} pieces, {what:<9} {result}: {share:.2f}")
        found[size] = turns
    record(given.out, "loss", load, found=found)


if __name__ == "__main__":
    main()
