"""`minimind checkpoint consolidate`: a checkpoint as whole tensors, for any reader of safetensors.

One tensor at a time is in memory, whatever the model's size and the number of files.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minimind.errors import CheckpointError, UsageError
from minimind.files import mebibytes, storing, sync_directory, write_durably
from minimind.train.checkpoint import read_manifest
from minimind.train.claims import read_config, require_listed
from minimind.train.contents import Contents
from minimind.train.tensor_files import Part, write_parts
from minimind.train.zero_state import MASTER

TOKENIZER, MODEL_TYPE = "tokenizer.model", "minimind"
INDEX = "model.safetensors.index.json"
SPELT = {"float32": "F32", "bfloat16": "BF16"}  # in the header of a file
OWN = ("config.json", TOKENIZER, INDEX, "model.safetensors", "model-*-of-*.safetensors")


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
    require_free(out, force)
    contents = Contents(path)
    parts = list(_parts(contents, dtype))
    needed = sum(part.bytes for part in parts)
    texts = {"config.json": _config_of(path, dtype), TOKENIZER: _copied(path, TOKENIZER)}
    draft = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        with storing(str(out), "free some space, or give another --out", needed=needed):
            draft.mkdir(parents=True)
            files = _write(parts, draft, max_shard_bytes)
            for name, content in texts.items():
                write_durably(draft / name, content)
            sync_directory(draft)
            _replace(out, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    parameters = sum(math.prod(shape) for shape in contents.shapes.values())
    return Consolidated(files, parameters, needed)


def require_free(out: Path, force: bool) -> None:
    """Nothing, or a UsageError where `out` is taken; only what we wrote is ever replaced."""
    if not os.path.lexists(out):
        return
    if not force:
        raise UsageError(f"--out {out} exists; give another folder, or --force to replace it")
    if out.is_symlink() or not out.is_dir():
        raise UsageError(f"--out {out} is a file or a link, which --force does not replace")
    strangers = [p.name for p in sorted(out.iterdir()) if not any(p.match(own) for own in OWN)]
    if strangers:
        raise UsageError(
            f"--out {out} holds {strangers[0]!r}, which consolidate did not write, and --force"
            " replaces nothing else; give another folder"
        )


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


def _replace(out: Path, draft: Path) -> None:
    """Give `draft` the name `out`; what had it goes after that, so that one of them is there."""
    before = out.with_name(f"{out.name}.tmp-{os.getpid()}-before")
    if out.exists():
        out.rename(before)
    draft.rename(out)
    sync_directory(out.parent)
    if before.exists():
        shutil.rmtree(before)


def told(done: Consolidated, path: Path, out: Path, dtype: str) -> str:
    """What `consolidate` says when it is done."""
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    return (
        f"{out}: {done.parameters:,} parameters in {dtype}, {mebibytes(done.bytes)} in {files},"
        f" from {path}"
    )
