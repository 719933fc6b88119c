"""Read whole tensors of a verified checkpoint, however it was sharded, and compare two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from minimind.checkpoint.directory import differences, read_manifest
from minimind.checkpoint.tensor_files import BUFFERS, ShardFiles, readable
from minimind.checkpoint.validation import read_state
from minimind.engine.state import AVERAGE, MASTER, MOMENTUM
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import require_listed

LAYOUT = (
    "world_size",
    "tensor_parallel",
    "sequence_parallel",
    "zero_stage",
    "backend",
    "micro_batch_rows",
    "accumulation_steps",
)


class Contents:
    """A checkpoint opened without DeepSpeed, for any number of saved shards.

    Raise CheckpointError unless every parameter is complete, unique and of its shape; only headers
    are read for that.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self.state: dict[str, Any] = read_state(directory, self.manifest)
        self.shapes: dict[str, list[int]] = self.state["parameters"]
        require_listed(self.manifest, directory / BUFFERS)
        with readable(directory / BUFFERS):
            self.buffers = safe_open(directory / BUFFERS, framework="pt")
        self.shards = ShardFiles(directory, self.manifest["world_size"])
        self.shards.require_whole(self.shapes)
        self._require_all_kinds()
        self.shards.require_optimizer_step(self.manifest["step"], self.state)

    def _require_all_kinds(self) -> None:
        """Raise CheckpointError if a parameter lacks a moment or the average that others have.

        Which moments a parameter has depends on its optimizer.
        """
        kinds = dict(self.shards.kinds)
        kinds.pop(MASTER, None)
        average, of_muon = (kinds.pop(kind, set()) for kind in (AVERAGE, MOMENTUM))
        of_others = list(kinds.values())
        complete = set.intersection(*of_others) - of_muon if of_others else set[str]()
        odd = set[str]().union(*of_others) - complete
        if average:
            odd |= (complete | of_muon) - average
        if odd:
            raise CheckpointError(
                f"{self.directory}: the optimizer state of {min(odd)!r} is incomplete"
            )

    def require_finite(self) -> None:
        """Read all tensors; raise CheckpointError for the first with non-finite values."""
        for kind in self.kinds:
            for name in sorted(self.shards.kinds[kind]):
                if not torch.isfinite(self.read(kind, name)).all():
                    raise CheckpointError(
                        f"{self.directory}: {kind} of {name!r} has numbers that are not finite"
                    )

    @property
    def kinds(self) -> list[str]:
        """`fp32` and the moments present."""
        return sorted(self.shards.kinds, key=lambda kind: (kind != MASTER, kind))

    def read(self, kind: str, name: str) -> Tensor:
        """Read a tensor as float32 in the parameter's shape."""
        shape = self.shapes[name]
        return self.shards.read(kind, name, 0, math.prod(shape)).view(shape)


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
