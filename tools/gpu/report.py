"""The block of a part, and the files of results: one JSON, and one page for people."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from minimind.checkpoint.identity import hardware, source_commit, versions
from minimind.runtime.device import HOST
from minimind.runtime.hardware import list_gpus
from tools.gpu.findings import Result

HEAD = ("what", "found", "limit", "")
LOG_LINES = 15
WIDEST = 60  # characters to which columns of a block are padded


def machine(device: str) -> dict[str, Any]:
    """Hardware, driver and versions; nothing of it starts CUDA in this process."""
    found = nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "device": device,
        "gpus": [asdict(gpu) for gpu in list_gpus()] if device == "cuda" else [],
        "system": platform.platform(terse=True),
        "cpu": hardware(torch.device("cpu")),
        "memory_mib": HOST.memory() // 2**20,
        "cores": os.cpu_count(),
        "bf16 instructions": HOST.has_bf16,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": found and ".".join(map(str, found)),
        **versions(),
    }


def block(result: Result) -> str:
    """What is printed as a part ends."""
    lines = [f"== {result.name}: {result.status}, {result.seconds:.0f} s"]
    rows = [finding.cells() for finding in result.findings]
    widths = [min(WIDEST, max((len(row[at]) for row in rows), default=0)) for at in range(4)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("   " + "  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip())
    if result.error:
        lines.append(f"   {result.error}")
    if result.log:
        lines += [f"   | {line}" for line in result.log.splitlines()[-LOG_LINES:]]
    return "\n".join([*lines, ""])


def page(document: dict[str, Any], results: Sequence[Result]) -> str:
    """The page for people, in Markdown."""
    gpus = ", ".join(
        f"{gpu['name']} (driver {gpu['driver']}, {gpu['memory_mib']:,} MiB)"
        for gpu in document["machine"]["gpus"]
    )
    cpu = f"{document['machine']['cpu']}, {document['machine']['cores']} cores"
    where = gpus or f"{document['machine']['device']}: {cpu}"
    if failed := [result.name for result in results if not result.has_passed]:
        verdict = f"Not everything holds: {', '.join(failed)}."
    elif document["passed"]:
        verdict = "Everything that was run holds."
    else:
        verdict = f"Not finished: {len(results)} of {len(document['requested'])} parts have ended."
    known = {
        k: v for k, v in document["machine"].items() if k not in ("device", "gpus", "cpu", "cores")
    }
    lines = [
        f"# {verdict}",
        "",
        f"{where}. {document['date']}, commit {document['commit'][:12]},"
        f" {document['seconds'] / 60:.1f} minutes: `{document['command']}`.",
        "",
        ", ".join(f"{name} {value}" for name, value in known.items() if value is not None) + ".",
        "",
        "| part | | seconds | |",
        "|---|---|---|---|",
    ]
    for result in results:
        counted = [f for f in result.findings if f.is_right is not None]
        right = sum(bool(f.is_right) for f in counted)
        said = f"{right} of {len(counted)} hold{f'; {cell(result.error)}' if result.error else ''}"
        lines.append(f"| {result.name} | {result.status} | {result.seconds:.0f} | {said} |")
    for result in results:
        lines += ["", f"## {result.name}: {result.status}", "", result.about, ""]
        lines += [f"| {' | '.join(HEAD)} |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(map(cell, f.cells()))} |" for f in result.findings]
        lines += ["", cell(result.error)] * bool(result.error)
        log = result.log.splitlines()[-LOG_LINES:]
        lines += ["", "```text", *log, "```"] * bool(log)
    return "\n".join([*lines, ""])


def cell(text: str) -> str:
    """Text as a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def write(
    out: Path,
    requested: Sequence[str],
    machine: dict[str, Any],
    results: Sequence[Result],
    seconds: float,
) -> None:
    """Both files, whole at any moment; `requested` are the names of all parts of this start."""
    has_ended = len(results) == len(requested)
    document = {
        "command": f"python -m tools.gpu {' '.join(word.split('/')[-1] for word in sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d"),
        "requested": [*requested],
        "machine": machine,
        "commit": source_commit(),
        "seconds": seconds,
        "passed": has_ended and all(result.has_passed for result in results),
        "parts": {
            result.name: {
                **asdict(result),
                "not_run": {f.what: f.skipped for f in result.findings if f.skipped},
            }
            for result in results
        },
    }
    replace(out / "results.json", json.dumps(document, indent=1, default=str) + "\n")
    replace(out / "results.md", page(document, results))


def replace(path: Path, text: str) -> None:
    """Write a file that is never seen in part."""
    draft = path.with_suffix(f"{path.suffix}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
