"""`minimind checkpoint diff`: compare two checkpoints, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from minimind.checkpoint.directory import differences
from minimind.checkpoint.reader import Contents
from minimind.engine.optimizer_state import MASTER

LAYOUT = ("world_size", "zero_stage", "backend", "micro_batch_rows", "accumulation_steps")


def compare(one: Path, other: Path) -> Iterator[str]:
    """Yield a line per difference between two verified checkpoints.

    Identity, versions, layout and counters as `old -> new`, then each kind of tensor, independent
    of the number of processes and the stage of each.
    """
    a, b = Contents(one), Contents(other)
    yield from map(str, differences(_facts(a), _facts(b)))
    for name in sorted({*a.shapes, *b.shapes}):
        if a.shapes.get(name) != b.shapes.get(name):
            yield f"shape of {name}: {a.shapes.get(name)} -> {b.shapes.get(name)}"
    yield from _compare_buffers(a, b)
    for kind in sorted({*a.kinds, *b.kinds}, key=lambda kind: (kind != MASTER, kind)):
        yield from _compare_kind(kind, a, b)


def _facts(contents: Contents) -> dict[str, Any]:
    manifest, state = contents.manifest, contents.state
    versions = manifest.get("versions")
    return {
        **manifest["identity"],
        "versions": versions if isinstance(versions, dict) else {},
        "layout": {name: manifest.get(name) for name in LAYOUT},
        "counters": {
            "step": manifest["step"],
            "tokens": manifest["tokens"],
            "optimizer_step": state["optimizer_step"],
            **state["counters"],
        },
    }


def _compare_buffers(a: Contents, b: Contents) -> Iterator[str]:
    one, other = a.buffers, b.buffers
    for name in sorted({*one.keys()} ^ {*other.keys()}):
        yield f"buffer {name}: only in one of them"
    for name in sorted({*one.keys()} & {*other.keys()}):
        if not torch.equal(one.get_tensor(name), other.get_tensor(name)):
            yield f"buffer {name}: differs"


def _compare_kind(kind: str, a: Contents, b: Contents) -> Iterator[str]:
    there = [contents.shards.kinds.get(kind, set()) for contents in (a, b)]
    for side, own, others in (("first", *there), ("second", *reversed(there))):
        if missing := len(own - others):
            yield f"{kind}: {missing} parameters have it only in the {side}"
    differing, total, largest, where = 0, 0, 0.0, ""
    for name in sorted(there[0] & there[1]):
        if a.shapes[name] != b.shapes[name]:
            continue
        gap = a.read(kind, name).sub_(b.read(kind, name)).abs_()
        differing += int(gap.count_nonzero())
        total += gap.numel()
        most = float(gap.max()) if gap.numel() else 0.0
        if most > largest:
            largest, where = most, name
    if differing:
        yield f"{kind}: {differing:,} of {total:,} differ, by at most {largest:.3g} in {where}"
