"""Write tensors to a new folder: safetensors of bounded size, and small files beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minimind.checkpoint.tensor_files import Part, write_parts
from minimind.interop.tensor_sources import INDEX, WHOLE
from minimind.runtime import disk
from minimind.runtime.durable_files import mebibytes, write_durably
from minimind.runtime.output_folder import NewFolder

SHARDS = "model-*-of-*.safetensors"
PRODUCER = "minimind-deepspeed"  # stands in the first bytes of each file of tensors
METADATA = {"format": "pt", "producer": PRODUCER}  # transformers requires the format


@dataclass(frozen=True)
class WrittenModel:
    """What a command wrote: the tensor files, and the tensors in them."""

    files: list[str]
    shapes: Mapping[str, list[int]]
    parts: list[Part]
    note: str | None = None  # a note for users of the files

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def summary(self, form: str, source: Path, out: Path) -> str:
        """The line that a command prints at its end."""
        size = mebibytes(sum(part.bytes for part in self.parts))
        files = f"{len(self.files)} files" if len(self.files) > 1 else self.files[0]
        return f"{out}: {self.parameters:,} parameters {form}, {size} in {files}, from {source}"


def is_ours(folder: Path) -> bool:
    """Whether this package wrote the tensors in a folder."""
    beginnings = []
    for path in (*disk.matching(folder, "*.safetensors"), *disk.matching(folder, "*.gguf")):
        with open(path, "rb") as file:
            beginnings.append(file.read(1000))
    return bool(beginnings) and all(PRODUCER.encode() in start for start in beginnings)


@contextmanager
def new_folder(out: NewFolder, parts: list[Part], texts: Mapping[str, bytes]) -> Iterator[Path]:
    """Yield a draft of `out` to write `parts` to; `texts` are written after them.

    The folder appears complete or not at all. Raise StorageError first if it does not fit.
    """
    needed = sum(part.bytes for part in parts) + sum(map(len, texts.values()))
    with out.written_aside(needed) as draft:
        yield draft
        for name, content in texts.items():
            write_durably(draft / name, content)


def write_shards(parts: list[Part], folder: Path, max_bytes: int) -> list[str]:
    """Fill files in order, each of at most `max_bytes` or a single tensor; return their names."""
    shards: list[list[Part]] = [[]]
    for part in parts:
        if shards[-1] and sum(p.bytes for p in shards[-1]) + part.bytes > max_bytes:
            shards.append([])
        shards[-1].append(part)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else WHOLE
        write_parts(folder / name, shard, METADATA)
        weight_map |= dict.fromkeys((part.name for part in shard), name)
    if len(shards) > 1:
        total = sum(part.bytes for part in parts)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_durably(folder / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
    return sorted({*weight_map.values()})
