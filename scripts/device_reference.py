"""Write the table of devices in docs/launching.md: what runs where, and how that is known.

python -m scripts.device_reference

`run` is read from the results of `make gpu` in benchmarks/results; what is refused, from the
constants that refuse it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

if not __package__:  # run as a script: the package is that of this checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import_module("minimind")
    del sys.path[0]
from minimind.config.flags import ALONE
from minimind.runtime.device import KINDS, MIN_BF16_CAPABILITY
from minimind.runtime.hardware import dotted

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "launching.md"
COMMAND = "python -m scripts.device_reference"
# Columns, and the parts of `make gpu` by which a column counts as run.
TRAINS, COMPILED, MASKED = "trains, bf16", "compiled", "document mask, fused"
KERNELS = (COMPILED, MASKED)  # of Triton
WIDEST = 128  # channels of a head
COLUMNS = {
    TRAINS: ("losses",),
    COMPILED: ("compiled",),
    MASKED: ("kernels",),
    "ZeRO 0 to 3": ("losses", "elastic"),
    "several": ("ranks",),
    "killed and resumed": ("resume",),
    "out of memory": ("out_of_memory",),
}
Known = dict[tuple[str, tuple[int, int] | None], set[str]]  # by device and capability
MARKED = re.compile(rf"(<!-- devices: {re.escape(COMMAND)} -->\n).*?(<!-- /devices -->)", re.DOTALL)
LEGEND = """
- **run**: on this hardware; for GPUs by `make gpu`, whose results are in `benchmarks/results`.
- **stand-in**: the code that differs runs in tests, with a stand-in for the device.
- **pretended**: steps and runs, eager, on a CUDA device without values (`tools/pretended`).
- **compiled for**: kernels for heads of up to 128 channels in bf16 are compiled for this card,
  without one, and fit its memory ([table](measurements.md#on-a-gpu)).
- **read**: in the sources of the libraries; the code is that of hardware that was run.
- **plain**: by plain operators: eager, with a dense mask, or in emulated bf16; fp16 has kernels.
- **no**: not used there.
"""


@dataclass(frozen=True)
class Hardware:
    """A row."""

    name: str
    device: str
    capability: tuple[int, int] | None = None  # of CUDA
    is_tested: bool = False  # by the suite, which is run on it


ROWS = (
    Hardware("CPU, x86-64, Linux", "cpu", is_tested=True),
    Hardware("CPU, Arm, Linux or macOS", "cpu"),
    Hardware("NVIDIA Pascal and older: GTX 10, P100", "cuda", (6, 1)),
    Hardware("NVIDIA Volta: V100", "cuda", (7, 0)),
    Hardware("NVIDIA Turing: T4, RTX 20", "cuda", (7, 5)),
    Hardware("NVIDIA Ampere: A100, A30", "cuda", (8, 0)),
    Hardware("NVIDIA Ampere: RTX 30, A10, A40", "cuda", (8, 6)),
    Hardware("NVIDIA Jetson Orin", "cuda", (8, 7)),
    Hardware("NVIDIA Ada: RTX 40, L4, L40", "cuda", (8, 9)),
    Hardware("NVIDIA Hopper: H100, torch 2.11", "cuda", (9, 0)),
    Hardware("NVIDIA Blackwell: B200, GB200", "cuda", (10, 0)),
    Hardware("NVIDIA Blackwell: RTX 50", "cuda", (12, 0)),
    Hardware("NVIDIA under Windows: WSL 2", "cuda"),
    Hardware("AMD, ROCm", "cuda"),
    Hardware("Apple silicon, its GPU", "mps"),
    Hardware("Intel GPU", "xpu"),
    Hardware("Ascend, `torch_npu`", "npu"),
)


def passed_parts() -> Known:
    """Parts of `make gpu` that passed and checked something."""
    found: Known = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("gpu-parts-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        machine = document["machine"]
        capabilities = [tuple(gpu["capability"]) for gpu in machine["gpus"] if gpu["capability"]]
        key = (machine.get("device", "cuda"), min(capabilities, default=None))
        found.setdefault(key, set()).update(
            name
            for name, part in document["parts"].items()
            if part["status"] == "passed" and any(row["is_right"] for row in part["findings"])
        )
    return found


def fitting_capabilities() -> set[str]:
    """Capabilities for which every kernel of heads of up to 128 channels in bf16 fits."""
    paths = (ROOT / "benchmarks" / "results").glob("other_cards-*.json")
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    usual = [row for row in rows if row["dtype"] == "bfloat16" and row["head_dim"] <= WIDEST]
    return {row["capability"] for row in usual} - {r["capability"] for r in usual if not r["fits"]}


def cell(row: Hardware, column: str, passed: Known) -> str:
    """How a column of a row is known."""
    if row.device == "cpu":  # results do not tell one processor from another
        return "run" if row.is_tested else "read"
    if set(COLUMNS[column]) <= passed.get((row.device, row.capability), set()):
        return "run"
    if row.device in ALONE and column in ("ZeRO 0 to 3", "several"):
        return "no"
    is_old = row.capability is not None and row.capability < MIN_BF16_CAPABILITY
    if column in KERNELS and (is_old or not KINDS[row.device].has_triton):
        return "plain"
    if row.device in ALONE or (row.device != "cuda" and column == TRAINS):
        return "stand-in"
    if column == TRAINS and row.capability:
        return "plain" if is_old else "pretended"
    if column == MASKED and row.capability:
        return "compiled for" if dotted(row.capability) in fitting_capabilities() else "read"
    return "read"


def lines() -> Iterator[str]:
    """The table; hardware of which the same is known shares a row."""
    yield f"| | `--device` | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    passed = passed_parts()
    found: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        cells = (f"`{row.device}`", *(cell(row, column, passed) for column in COLUMNS))
        capability = f" ({dotted(row.capability)})" if row.capability else ""
        found.setdefault(cells, []).append(row.name + capability)
    for cells, names in found.items():
        yield f"| {'; '.join(names)} | {' | '.join(cells)} |"


def with_table(text: str) -> str:
    """Return docs/launching.md with the table between its marks, and what its words mean."""
    table = "\n".join(lines())
    return MARKED.sub(lambda match: f"{match[1]}\n{table}\n{LEGEND}\n{match[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
