"""Named flat runs <-> safetensors files: one per rank to write, all of them to read.

A key is `kind|parameter|start`; where the runs were cut does not matter to a reader, who asks for
any stretch of any parameter and gets just those bytes.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, numpy, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minimind.errors import CheckpointError, NumericError
from minimind.files import sync_file


def shard_name(rank: int, world_size: int) -> str:
    """File name of what one rank wrote."""
    return f"shard-{rank}-of-{world_size}.safetensors"


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to `path` and fsync it; an OSError when that cannot be."""
    with _durable(path):
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, path)


def write_runs(path: Path, runs: Iterable[tuple[str, Tensor]]) -> None:
    """Write 1-D float32 runs under their keys; a NumericError before any that is not finite."""
    arrays = {}  # numpy's views may share memory, which safetensors refuses of tensors
    for key, run in runs:
        if not torch.isfinite(run).all():
            kind, parameter, _ = key.split("|")
            raise NumericError(
                f"{kind} of {parameter} is no longer finite, so nothing is saved; go back to the"
                " last checkpoint with a lower --learning_rate or --grad_clip"
            )
        arrays[key] = run.cpu().numpy()
    with _durable(path):
        numpy.save_file(arrays, path)


@contextmanager
def _durable(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:  # how it tells of a full disk
        raise OSError(errno.EIO, str(error)) from error
    os.chmod(path, 0o644)  # safetensors writes 0600, which a colleague could not resume from
    sync_file(path)


class RunFiles:
    """All runs of a checkpoint directory, readable by parameter and position."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self.directory = directory
        self._files = {}
        self._runs: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
        for rank in range(world_size):
            name = shard_name(rank, world_size)
            file = self._files[name] = safe_open(directory / name, framework="pt")
            for key in file.keys():
                kind, parameter, start = key.split("|")
                length = file.get_slice(key).get_shape()[0]
                self._runs.setdefault((kind, parameter), []).append((int(start), length, name))
        for pieces in self._runs.values():
            pieces.sort()

    def read(self, kind: str, parameter: str, start: int, length: int) -> Tensor:
        """float32 (length,): elements start..start + length; CheckpointError if one is missing."""
        pieces = self._runs.get((kind, parameter), [])
        at = max(0, bisect_right(pieces, (start, float("inf"), "")) - 1)
        parts, position = [], start
        for first, size, name in pieces[at:]:
            if position >= start + length or first > position:
                break
            end = min(first + size, start + length)
            if end > position:
                run = self._files[name].get_slice(f"{kind}|{parameter}|{first}")
                parts.append(run[position - first : end - first])
                position = end
        if position != start + length:
            raise CheckpointError(
                f"{self.directory}: {kind} of {parameter} has no element {position}; the checkpoint"
                " is of another model"
            )
        return torch.cat(parts) if parts else torch.empty(0)
