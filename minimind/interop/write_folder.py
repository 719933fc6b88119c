"""Whole tensors -> a new folder: safetensors of a bounded size, and small files beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from minimind.checkpoint.tensor_files import Part, write_parts
from minimind.errors import StorageError
from minimind.interop.tensor_sources import INDEX, WHOLE
from minimind.runtime.durable_files import free_bytes, mebibytes, write_durably
from minimind.runtime.output_folder import NewFolder

SHARDS = "model-*-of-*.safetensors"


def write_folder(
    out: NewFolder, parts: list[Part], texts: Mapping[str, bytes], max_shard_bytes: int
) -> list[str]:
    """The names of the tensor files written to `out`, which appears whole or not at all.

    A StorageError before anything is written where it does not fit on the disk.
    """
    needed = sum(part.bytes for part in parts) + sum(map(len, texts.values()))
    require_room(out.path, needed)
    with out.written_aside(needed) as draft:
        files = _write(parts, draft, max_shard_bytes)
        for name, content in texts.items():
            write_durably(draft / name, content)
    return files


def require_room(out: Path, needed: int) -> None:
    """Nothing, or a StorageError where fewer bytes are free for `out`."""
    free = free_bytes(out)
    if free < needed:
        raise StorageError(
            f"{out}: {needed:,} bytes ({mebibytes(needed)}) are needed and {free:,}"
            f" ({mebibytes(free)}) are free; free some space, or give another --out"
        )


def _write(parts: list[Part], draft: Path, most: int) -> list[str]:
    shards = list(_shared_out(parts, most))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else WHOLE
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
