"""`minimind checkpoint consolidate`: a checkpoint as whole tensors, for any reader of safetensors.

One tensor at a time is in memory, whatever the model's size and the number of files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minimind.data.tokenizer_files import MODEL_NAME, TOKENIZER_FILES
from minimind.errors import CheckpointError
from minimind.files import mebibytes, write_durably
from minimind.new_folder import require_free, written_aside
from minimind.train.checkpoint import read_manifest
from minimind.train.claims import read_config, require_listed
from minimind.train.contents import Contents
from minimind.train.tensor_files import Part, write_parts
from minimind.train.zero_state import MASTER

MODEL_TYPE = "minimind"
INDEX = "model.safetensors.index.json"
SPELT = {"float32": "F32", "bfloat16": "BF16"}  # in the header of a file
OWN = ("config.json", *TOKENIZER_FILES, INDEX, "model.safetensors", "model-*-of-*.safetensors")


@dataclass(frozen=True)
class Consolidated:
    """What was written."""

    files: list[str]
    parameters: int
    bytes: int


def consolidate(
    path: Path, out: Path, dtype: str, max_shard_bytes: int, force: bool
) -> Consolidated:
    """Write the verified checkpoint `path` as safetensors, with config and tokenizer, to `out`.

    Written aside and renamed: an interrupted one leaves nothing under `out`. From any number of
    processes and any ZeRO stage the float32 files are the same byte for byte.
    """
    out = out.resolve()
    require_free(out, force, OWN, "consolidate")
    contents = Contents(path)
    parts = list(_parts(contents, dtype))
    needed = sum(part.bytes for part in parts)
    names = [name for name in TOKENIZER_FILES if (path / name).exists()] or [MODEL_NAME]
    texts = {"config.json": _config_of(path, dtype), **{n: _copied(path, n) for n in names}}
    with written_aside(out, needed) as draft:
        files = _write(parts, draft, max_shard_bytes)
        for name, content in texts.items():
            write_durably(draft / name, content)
    parameters = sum(math.prod(shape) for shape in contents.shapes.values())
    return Consolidated(files, parameters, needed)


def _parts(contents: Contents, dtype: str) -> Iterator[Part]:
    """Persistent buffers as they are, then the parameters by name."""
    kind = getattr(torch, dtype)
    for name in sorted(contents.buffers.keys()):
        value = contents.buffers.get_tensor(name)
        spelt = contents.buffers.get_slice(name).get_dtype()
        size = value.numel() * value.element_size()
        yield Part(name, spelt, list(value.shape), size, lambda value=value: value)
    for name in sorted(contents.shapes):
        shape = contents.shapes[name]

        def read(name: str = name) -> Tensor:
            return contents.read(MASTER, name).to(kind)

        yield Part(name, SPELT[dtype], shape, math.prod(shape) * kind.itemsize, read)


def _copied(path: Path, name: str) -> bytes:
    require_listed(read_manifest(path), path / name)
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path / name}: cannot be read ({error.strerror})") from error


def _config_of(path: Path, dtype: str) -> bytes:
    """The model's configuration, and nothing else that a config.json may ask a reader to do."""
    known = {**read_config(path, read_manifest(path)), "model_type": MODEL_TYPE, "dtype": dtype}
    return json.dumps(known, indent=2, sort_keys=True).encode() + b"\n"


def _write(parts: list[Part], draft: Path, most: int) -> list[str]:
    shards = list(_shared_out(parts, most))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        write_parts(draft / name, shard, {"format": "pt"})  # transformers asks for it
        index |= dict.fromkeys((part.name for part in shard), name)
    if len(shards) > 1:
        total = sum(part.bytes for part in parts)
        told = {"metadata": {"total_size": total}, "weight_map": index}
        write_durably(draft / INDEX, json.dumps(told, indent=2, sort_keys=True).encode())
    return sorted({*index.values()})


def _shared_out(parts: list[Part], most: int) -> Iterator[list[Part]]:
    """The parts of one file after another, each of at most `most` bytes or of one tensor."""
    shard: list[Part] = []
    for part in parts:
        if shard and sum(p.bytes for p in shard) + part.bytes > most:
            yield shard
            shard = []
        shard.append(part)
    yield shard


def told(done: Consolidated, path: Path, out: Path, dtype: str) -> str:
    """What `consolidate` says when it is done."""
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    return (
        f"{out}: {done.parameters:,} parameters in {dtype}, {mebibytes(done.bytes)} in {files},"
        f" from {path}"
    )
