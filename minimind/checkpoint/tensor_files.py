"""Flat slices of parameters in safetensors files: write one file per rank, read them all.

A key is `kind|parameter|start`. A reader requests any range of any parameter and reads only those
bytes, wherever the slices were cut.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from minimind.checkpoint.validation import shard_name
from minimind.engine.state import AVERAGE, MASTER, MOMENTUM
from minimind.errors import CheckpointError, NumericError, which_memory
from minimind.runtime.checked_json import ELSEWHERE
from minimind.runtime.device import Moment, device_kind, milliseconds
from minimind.runtime.durable_files import sync_file
from minimind.runtime.panics import Panic, panics_caught

BUFFERS = "buffers.safetensors"
PIECE = 4 * 2**20
NOT_MAPPED = ("unable to open file", "unable to mmap")  # messages of torch's RuntimeError
WITHOUT_STEP = (MOMENTUM, AVERAGE)  # SGD and Muon count no updates
KEY = re.compile(r"([a-z0-9_]{1,40})\|([^|]{1,400})\|(0|[1-9][0-9]{0,15})")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to `path` and fsync it; raise OSError on failure."""
    try:
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:  # such as a full disk
        raise OSError(errno.EIO, str(error), str(path)) from error
    os.chmod(path, 0o644)  # safetensors writes 0600, unreadable for other users
    sync_file(path)


@dataclass(frozen=True)
class Part:
    """One tensor of a file: its header entry, and a function that reads it."""

    name: str
    dtype: str  # safetensors' name, such as F32
    shape: list[int]
    bytes: int
    read: Callable[[], Tensor]


def write_parts(
    path: Path, parts: Sequence[Part], metadata: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write tensors one after another, fsync, and return the file's manifest entry.

    The hash is computed while writing. The format is safetensors' (header length, JSON header,
    data). Its library needs all tensors at once, copies each and holds the GIL while it writes, so
    that a background save would block training.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for part in parts:
        start, end = end, end + part.bytes
        header[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # aligns the data
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in _pieces(len(head).to_bytes(8, "little") + head, parts):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": 8 + len(head) + end, "sha256": digest.hexdigest()}


def _pieces(head: bytes, parts: Sequence[Part]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file in pieces, between which other threads can run."""
    yield head
    for part in parts:
        content = part.read().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]


def write_slices(path: Path, slices: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Write 1-D float32 slices under their keys; return the file's manifest entry.

    Raise NumericError, before anything is written, if a slice has non-finite values.
    """
    parts = []
    for key, values in slices:
        require_finite(key, values)
        parts.append(
            Part(key, "F32", [values.numel()], 4 * values.numel(), lambda values=values: values)
        )
    return write_parts(path, parts)


def require_finite(key: str, values: Tensor) -> None:
    """Raise NumericError, naming the parameter, if a value is not finite."""
    if not torch.isfinite(values).all():
        kind, parameter, _ = key.split("|")
        raise NumericError(
            f"{kind} of {parameter} is no longer finite, so nothing is saved; go back to the"
            " last checkpoint with a lower --learning_rate or --grad_clip"
        )


class Staging:
    """Host memory for one rank's slices, reused by every save; training waits only for the copy.

    For a GPU it is pinned, and the copies are queued on the stream after the step; call
    `synchronize` before reading them.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._kind = device_kind(device)
        self._memory = _host_memory(elements, self._kind.pins)
        self._memory.zero_()  # commits the pages now instead of in the first save
        self._span: tuple[Moment, Moment] = 0.0, 0.0  # of the copies of the last save

    def copy(self, slices: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy the current slices; return the copies under the same keys."""
        copies, end = [], 0
        started = self._kind.moment()
        for key, values in slices:
            start, end = end, end + values.numel()
            copy = self._memory[start:end]
            copy.copy_(values, non_blocking=self._kind.pins)
            copies.append((key, copy))
        self._span = started, self._kind.moment()
        return copies

    def synchronize(self) -> float:
        """Wait for the copies; return the ms they took on the GPU's stream, 0 on the CPU."""
        started, ended = self._span
        if not isinstance(ended, torch.Event):
            return 0.0
        ended.synchronize()
        return milliseconds(started, ended)


def _host_memory(elements: int, pinned: bool) -> Tensor:
    """Allocate fp32 host memory; raise MemoryError if there is too little.

    CUDA reports too little pinned memory as its own being out.
    """
    try:
        return torch.empty(elements, dtype=torch.float32, pin_memory=pinned)
    except RuntimeError as error:
        if not which_memory(error):
            raise
        raise MemoryError(f"tried to allocate {4 * elements / 2**30:.2f} GiB") from error


# Start, length and file of each slice, by kind and parameter, ascending.
Slices = dict[tuple[str, str], list[tuple[int, int, str]]]


class ShardFiles:
    """All slices of a checkpoint directory, readable by parameter and position.

    With the `slices` of another reader of the directory only the files that are read are opened.
    """

    def __init__(self, directory: Path, world_size: int, slices: Slices | None = None) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        self.slices: Slices = {} if slices is None else slices
        for rank in range(world_size) if slices is None else ():
            name = shard_name(rank, world_size)
            with readable(directory / name):
                file = self._open(name)
                for key in file.keys():
                    kind, parameter, start, length = _parse_slice(key, file.get_slice(key))
                    self.slices.setdefault((kind, parameter), []).append((start, length, name))
        for pieces in self.slices.values() if slices is None else ():
            pieces.sort()

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self.directory / name, framework="pt")
        return self._files[name]

    @property
    def kinds(self) -> dict[str, set[str]]:
        """Names of the stored parameters, by kind."""
        kinds: dict[str, set[str]] = {}
        for kind, parameter in self.slices:
            kinds.setdefault(kind, set()).add(parameter)
        return kinds

    def require_whole(self, shapes: dict[str, list[int]]) -> None:
        """Raise CheckpointError unless the slices cover these parameters without gap or overlap.

        Every parameter must have weights; its moments must be complete or absent.
        """
        for (kind, parameter), pieces in self.slices.items():
            position, size = 0, math.prod(shapes.get(parameter, [0]))
            for first, length, name in pieces:
                end = first + length
                if first != position or end > size:
                    raise CheckpointError(
                        f"{self.directory / name}: {kind} of {parameter!r} at {first}..{end} does"
                        f" not continue at {position} of {size}; {ELSEWHERE}"
                    )
                position = end
            if position != size:
                raise CheckpointError(
                    f"{self.directory}: {kind} of {parameter!r} ends at {position} of {size};"
                    f" {ELSEWHERE}"
                )
        for parameter, shape in shapes.items():
            if math.prod(shape) and ("fp32", parameter) not in self.slices:
                raise CheckpointError(
                    f"{self.directory}: no shard has fp32 of {parameter!r}; {ELSEWHERE}"
                )

    def require_optimizer_step(self, step: int, state: dict[str, Any]) -> None:
        """Raise CheckpointError if an optimizer that counts updates has counted none."""
        counting = {*self.kinds} - {MASTER, *WITHOUT_STEP}
        updates = state["optimizer_step"]
        if counting and step > state["counters"]["skipped_steps"] and not updates:
            raise CheckpointError(
                f"{self.directory}/state.json: has optimizer_step = {updates} at step {step}, but"
                f" the optimizer state has {min(counting)}; {ELSEWHERE}"
            )

    def read(self, kind: str, parameter: str, start: int, length: int) -> Tensor:
        """Read elements start..start + length, float32; raise CheckpointError if one is missing."""
        pieces = self.slices.get((kind, parameter), [])
        at = max(0, bisect_right(pieces, (start, float("inf"), "")) - 1)
        parts, position = [], start
        for first, size, name in pieces[at:]:
            if position >= start + length or first > position:
                break
            end = min(first + size, start + length)
            if end > position:
                with readable(self.directory / name):
                    values = self._open(name).get_slice(f"{kind}|{parameter}|{first}")
                    parts.append(values[position - first : end - first])
                position = end
        if position != start + length:
            raise CheckpointError(
                f"{self.directory}: {kind} of {parameter} has no element {position}; the checkpoint"
                " belongs to another model"
            )
        return torch.cat(parts) if parts else torch.empty(0)


def _parse_slice(key: str, stored: Any) -> tuple[str, str, int, int]:
    """Kind, parameter, start and length of one slice of a shard."""
    match = KEY.fullmatch(key)
    shape, dtype = stored.get_shape(), stored.get_dtype()
    if not match or dtype != "F32" or len(shape) != 1:
        raise CheckpointError(
            f"holds {key[:80]!r} of {dtype} {shape}, which is not a slice of a parameter"
        )
    return match[1], match[2], int(match[3]), shape[0]


@contextmanager
def readable(path: Path, remedy: str = ELSEWHERE) -> Iterator[None]:
    """Convert errors of reading `path` in the block to a CheckpointError that names it."""
    try:
        with panics_caught():
            yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); {remedy}") from error
    except RuntimeError as error:
        if not (isinstance(error, Panic) or str(error).startswith(NOT_MAPPED)):
            raise
        raise CheckpointError(f"{path}: cannot be read ({error}); {remedy}") from error
    except (SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}; {remedy}") from error


def read_buffers(path: Path, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a file; raise CheckpointError for one that does not fit `own`."""
    with readable(path):
        saved = load_file(path)
        for name, value in saved.items():
            if name not in own:
                raise CheckpointError(
                    f"holds a buffer {name[:80]!r}, which this model does not have"
                )
            ours = own[name]
            if value.shape != ours.shape or not torch.can_cast(value.dtype, ours.dtype):
                raise CheckpointError(
                    f"holds {name} as {value.dtype} {list(value.shape)}, and this model"
                    f" {ours.dtype} {list(ours.shape)}"
                )
    return saved
