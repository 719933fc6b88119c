"""Flex attention compiled for NVIDIA GPUs that are not here: shared memory, registers, spills.

    python -m benchmarks.other_cards [--capabilities 7.5 8.0 ...] [--head_dims 32 64 ...]
        [--dtypes bfloat16 float32 tf32] [--out FILE.json]

The attention of --doc_mask (minimind/model/kernels.py) is compiled by inductor for each compute
capability, forward and backward, in bf16 (fp16 where torch compiles none), fp32 and fp32 with
--tf32, on tensors without values of the pretended CUDA device (tools/pretended), and its Triton
kernels are assembled. Nothing runs. The packages triton and torch have to belong together: `pip
install --no-deps --target DIR triton==3.8.0` for torch 2.13, with DIR on PYTHONPATH. A kernel fits
if its shared memory is within what a block of the card can have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.record import arguments, record
from tools.pretended.library import build_library

# KiB of shared memory that a block can have, and multiprocessors of one such card: CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability".
CARDS = {
    "7.5": (64, 40),
    "8.0": (163, 108),
    "8.6": (99, 84),
    "8.7": (163, 16),
    "8.9": (99, 128),
    "9.0": (227, 132),
    "10.0": (227, 148),
    "12.0": (99, 170),
}


def shown(rows: list[dict[str, Any]], failed: dict[str, str]) -> str:
    """The table."""
    heads = (
        "capability",
        "dtype",
        "head_dim",
        "pass",
        "warps",
        "stages",
        "shared",
        "registers",
        "spilled",
    )
    lines = ["".join(f"{head:>11}" for head in (*heads, "fits"))]
    for row in rows:
        cells = (*(row[head] for head in heads), "yes" if row["fits"] else "NO")
        lines.append("".join(f"{cell:>11}" for cell in cells))
    lines += [f"{kernel}: {error}" for kernel, error in failed.items()]
    return "\n".join(lines)


def main() -> None:
    """Compile for every card in a process of its own, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--capabilities", nargs="+", choices=CARDS, default=[*CARDS])
    parser.add_argument("--head_dims", nargs="+", type=int, default=[32, 64, 128, 256])
    dtypes = ("bfloat16", "float32", "tf32")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=[*dtypes])
    given = parser.parse_args()
    if not find_spec("triton"):
        raise SystemExit("the package triton is missing; --help says how it is installed")
    before = os.getloadavg()
    rows, failed = [], {}
    with tempfile.TemporaryDirectory() as folder:
        library = build_library(Path(folder))
        for capability, dtype in product(given.capabilities, given.dtypes):
            words = [capability, dtype, *map(str, given.head_dims)]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.card_compiler", *words],
                env={**os.environ, "PRETENDED_CUDA": str(library), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            rows += [json.loads(line) for line in done.stdout.splitlines()]
            if done.returncode:
                failed[f"{capability} in {dtype}"] = done.stderr.strip().splitlines()[-1]
            print(f"{capability} in {dtype}: {len(rows)} kernels so far", flush=True)
    print(shown(rows, failed))
    record(given.out, "other_cards", before, rows=rows, failed=failed)


if __name__ == "__main__":
    main()
