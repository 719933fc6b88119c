"""The table of whole training loops in docs/measurements.md, from the newest results file.

    python -m benchmarks.table [--write]

Prints it, or writes it between its two marks; a test checks that the page has it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.throughput import ratio

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measurements.md"
TRAINER = "Llama, Trainer, ZeRO-2"
BEGIN, END = "<!-- benchmarks.table -->", "<!-- /benchmarks.table -->"


def table() -> str:
    """Return the Markdown: one row per training loop, and a line on date and machine."""
    newest = max((ROOT / "benchmarks" / "results").glob("throughput-*.json"))
    result = json.loads(newest.read_text())
    lines = [
        "| loop | tokens/s | speed | by CPU time | against bare | against Trainer | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["table"].items():
        against = ratio(result["steps"], name, TRAINER, "seconds")
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['speed']:.2f} |"
            f" {row['speed_by_cpu']:.2f} | {row['speed_against_bare']:.2f} |"
            f" {against:.2f} |"
            f" {row['peak_mib']:,.0f} MiB ({row['memory']:.2f}) |"
        )
    versions, machine, load = result["versions"], result["machine"], result["load"]
    bf16 = "with" if machine["bf16"] else "without"
    rounds = len(next(iter(result["steps"].values())))
    lines.append("")
    lines.append(
        f"{result['date']}, {machine['cpus']} CPU cores ({machine['processor']}, {bf16}"
        f" instructions for bf16), {result['threads']} threads, load {load['before'][0]:.1f}"
        f" before and {load['after'][0]:.1f} after; torch {versions['torch']}, transformers"
        f" {versions['transformers']}, DeepSpeed {versions['deepspeed']};"
        f" medians of {rounds} rounds, `{result['command'].partition(' --')[0]}`"
        f" (`benchmarks/results/{newest.name}`)."
    )
    return "\n".join(lines)


def written(text: str) -> str:
    """Return `text` with the table between its marks."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
