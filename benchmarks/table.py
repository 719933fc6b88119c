"""The table of whole training loops in both READMEs, from the newest results file.

    python -m benchmarks.table [--write]

Prints it, or puts it between its two marks; a test holds the READMEs to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.throughput import ratio

ROOT = Path(__file__).resolve().parent.parent
TRAINER = "Llama, Trainer, ZeRO-2"
BEGIN, END = "<!-- benchmarks.table -->", "<!-- /benchmarks.table -->"


def table() -> str:
    """Markdown: a line per loop of a race of all of them, and one that says where and when."""
    newest = max((ROOT / "benchmarks" / "results").glob("throughput-*.json"))
    told = json.loads(newest.read_text())
    lines = [
        "| loop | tokens/s | speed | by CPU time | against bare | against Trainer | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in told["table"].items():
        against = ratio(told["steps"], name, TRAINER, "seconds")
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['speed']:.2f} |"
            f" {row['speed_by_cpu']:.2f} | {row['speed_against_bare']:.2f} |"
            f" {against:.2f} |"
            f" {row['peak_mib']:,.0f} MiB ({row['memory']:.2f}) |"
        )
    versions = told["versions"]
    rounds = len(next(iter(told["steps"].values())))
    lines.append("")
    lines.append(
        f"{told['date']}, {told['machine']['cpus']} CPU cores ({told['machine']['processor']}),"
        f" {told['threads']} threads, load"
        f" {told['load']['before'][0]:.1f} before; torch {versions['torch']}, transformers"
        f" {versions['transformers']}, DeepSpeed {versions['deepspeed']}; medians of {rounds}"
        f" rounds, `python -m benchmarks.throughput` (`benchmarks/results/{newest.name}`)."
    )
    return "\n".join(lines)


def written(text: str) -> str:
    """`text` with the table between its marks."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    if "--write" not in sys.argv:
        print(table())
    for readme in (ROOT / "README.md", ROOT / "README_zh.md"):
        if "--write" in sys.argv:
            readme.write_text(written(readme.read_text(encoding="utf-8")), encoding="utf-8")
