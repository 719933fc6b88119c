"""Read whole tensors of a verified checkpoint, independent of how it was sharded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from minimind.checkpoint.directory import read_manifest
from minimind.checkpoint.tensor_files import BUFFERS, ShardFiles, readable
from minimind.checkpoint.validation import read_state
from minimind.engine.optimizer_state import MASTER
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import ELSEWHERE, require_listed

WITHOUT_STEP = ("momentum_buffer",)  # of SGD, which counts no updates


def require_optimizer_step(shards: ShardFiles, step: int, state: dict[str, Any]) -> None:
    """Raise CheckpointError if an optimizer that counts updates has counted none."""
    counting = {*shards.kinds} - {MASTER, *WITHOUT_STEP}
    updates = state["optimizer_step"]
    if counting and step > state["counters"]["skipped_steps"] and not updates:
        raise CheckpointError(
            f"{shards.directory}/state.json: has optimizer_step = {updates} at step {step}, though"
            f" {min(counting)} is there; {ELSEWHERE}"
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
        moments = [names for kind, names in self.shards.kinds.items() if kind != MASTER]
        if any(names != moments[0] for names in moments):
            odd = sorted(set().union(*moments) - set.intersection(*moments))[0]
            raise CheckpointError(f"{directory}: not every moment of {odd!r} is there")
        require_optimizer_step(self.shards, self.manifest["step"], self.state)

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
