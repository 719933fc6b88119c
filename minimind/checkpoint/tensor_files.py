"""Named flat runs <-> safetensors files: one per rank to write, all of them to read.

A key is `kind|parameter|start`; where the runs were cut does not matter to a reader, who asks for
any stretch of any parameter and gets just those bytes.
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
from minimind.errors import CheckpointError, NumericError
from minimind.runtime.checked_json import ELSEWHERE
from minimind.runtime.durable_files import sync_file

BUFFERS = "buffers.safetensors"
PIECE = 4 * 2**20
NOT_MAPPED = ("unable to open file", "unable to mmap")  # as torch says it, in a RuntimeError
RUN = re.compile(r"([a-z0-9_]{1,40})\|([^|]{1,400})\|(0|[1-9][0-9]{0,15})")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to `path` and fsync it; an OSError when that cannot be."""
    try:
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:  # how it tells of a full disk
        raise OSError(errno.EIO, str(error), str(path)) from error
    os.chmod(path, 0o644)  # safetensors writes 0600, which a colleague could not resume from
    sync_file(path)


@dataclass(frozen=True)
class Part:
    """One tensor of a file: what the header says of it, and where its numbers are."""

    name: str
    dtype: str  # as safetensors spells it: F32
    shape: list[int]
    bytes: int
    read: Callable[[], Tensor]


def write_parts(
    path: Path, parts: Sequence[Part], metadata: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write tensors one after another, fsync, and return the manifest's entry of the file.

    Hashed as it is written, so that nothing is read back. The format is safetensors' (a length, a
    JSON header, the bytes), written here because that library wants all tensors at once, copies
    each, and holds Python's lock meanwhile: a save in the background would stop the training.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for part in parts:
        start, end = end, end + part.bytes
        header[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [start, end]}
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)  # so that the numbers are aligned
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in _pieces(len(told).to_bytes(8, "little") + told, parts):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": 8 + len(told) + end, "sha256": digest.hexdigest()}


def _pieces(head: bytes, parts: Sequence[Part]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, a few MiB at a time: hashing and writing then let others run."""
    yield head
    for part in parts:
        content = part.read().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]


def write_runs(path: Path, runs: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Write 1-D float32 runs under their keys as `write_parts` does, and return its entry.

    A NumericError before anything is written where a run is not finite.
    """
    parts = []
    for key, run in runs:
        require_finite(key, run)
        parts.append(Part(key, "F32", [run.numel()], 4 * run.numel(), lambda run=run: run))
    return write_parts(path, parts)


def require_finite(key: str, run: Tensor) -> None:
    """Nothing, or a NumericError that names the parameter."""
    if not torch.isfinite(run).all():
        kind, parameter, _ = key.split("|")
        raise NumericError(
            f"{kind} of {parameter} is no longer finite, so nothing is saved; go back to the"
            " last checkpoint with a lower --learning_rate or --grad_clip"
        )


class Staging:
    """Memory for one rank's runs, used again at every save; training waits for the copy alone.

    On a GPU it is pinned and the copies are queued behind the step that made the numbers; whoever
    reads the copies waits for them by `settle`.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._memory = torch.empty(elements, dtype=torch.float32, pin_memory=self._on_gpu)
        self._memory.zero_()  # touched now, or the first save would pay for every page
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def take(self, runs: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The runs as they are now, under the same keys, copied here."""
        taken, end = [], 0
        if self._on_gpu:
            began, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events = began, copied
            began.record()
        for key, run in runs:
            start, end = end, end + run.numel()
            copy = self._memory[start:end]
            copy.copy_(run, non_blocking=True)
            taken.append((key, copy))
        if self._events:
            self._events[1].record()
        return taken

    def settle(self) -> float:
        """Wait until the copies are there; the ms for which they held up a GPU's stream."""
        if self._events is None:
            return 0.0
        began, copied = self._events
        copied.synchronize()
        return began.elapsed_time(copied)


class RunFiles:
    """All runs of a checkpoint directory, readable by parameter and position."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self.directory = directory
        self._files = {}
        self._runs: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
        for rank in range(world_size):
            name = shard_name(rank, world_size)
            with readable(directory / name):
                file = self._files[name] = safe_open(directory / name, framework="pt")
                for key in file.keys():
                    kind, parameter, start, length = _run(key, file.get_slice(key))
                    self._runs.setdefault((kind, parameter), []).append((start, length, name))
        for pieces in self._runs.values():
            pieces.sort()

    @property
    def kinds(self) -> dict[str, set[str]]:
        """The parameters of which there is anything, by kind."""
        found: dict[str, set[str]] = {}
        for kind, parameter in self._runs:
            found.setdefault(kind, set()).add(parameter)
        return found

    def require_whole(self, shapes: dict[str, list[int]]) -> None:
        """Nothing, or a CheckpointError unless the runs are these parameters, cut without a gap.

        Every parameter must have its weights; moments are whole or not there.
        """
        for (kind, parameter), pieces in self._runs.items():
            position, size = 0, math.prod(shapes.get(parameter, [0]))
            for first, length, name in pieces:
                end = first + length
                if first != position or end > size:
                    raise CheckpointError(
                        f"{self.directory / name}: {kind} of {parameter!r} at {first}..{end} does"
                        f" not follow on {position} of {size}; {ELSEWHERE}"
                    )
                position = end
            if position != size:
                raise CheckpointError(
                    f"{self.directory}: {kind} of {parameter!r} ends at {position} of {size};"
                    f" {ELSEWHERE}"
                )
        for parameter, shape in shapes.items():
            if math.prod(shape) and ("fp32", parameter) not in self._runs:
                raise CheckpointError(
                    f"{self.directory}: no shard has fp32 of {parameter!r}; {ELSEWHERE}"
                )

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
                with readable(self.directory / name):
                    run = self._files[name].get_slice(f"{kind}|{parameter}|{first}")
                    parts.append(run[position - first : end - first])
                position = end
        if position != start + length:
            raise CheckpointError(
                f"{self.directory}: {kind} of {parameter} has no element {position}; the checkpoint"
                " is of another model"
            )
        return torch.cat(parts) if parts else torch.empty(0)


def _run(key: str, stretch: Any) -> tuple[str, str, int, int]:
    """Kind, parameter, start and length of one run of a shard."""
    found = RUN.fullmatch(key)
    shape, dtype = stretch.get_shape(), stretch.get_dtype()
    if not found or dtype != "F32" or len(shape) != 1:
        raise CheckpointError(f"holds {key[:80]!r} of {dtype} {shape}, which is no run")
    return found[1], found[2], int(found[3]), shape[0]


@contextmanager
def readable(path: Path, way_out: str = ELSEWHERE) -> Iterator[None]:
    """Turn what is wrong with the file read inside into a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        told = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read ({told}); {way_out}") from error
    except RuntimeError as error:
        if not str(error).startswith(NOT_MAPPED):
            raise
        raise CheckpointError(f"{path}: cannot be read ({error}); {way_out}") from error
    except (SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}; {way_out}") from error


def read_buffers(path: Path, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, which must be some of `own`; a CheckpointError otherwise."""
    with readable(path):
        saved = load_file(path)
        for name, value in saved.items():
            if name not in own:
                raise CheckpointError(f"holds a buffer {name[:80]!r}, which this model has not")
            ours = own[name]
            if value.shape != ours.shape or not torch.can_cast(value.dtype, ours.dtype):
                raise CheckpointError(
                    f"holds {name} as {value.dtype} {list(value.shape)}, and this model"
                    f" {ours.dtype} {list(ours.shape)}"
                )
    return saved
