"""`minimind checkpoint consolidate`: a checkpoint as whole tensors, for any reader of safetensors.

One tensor at a time is in memory, whatever the model's size and the number of files.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from minimind.checkpoint.directory import read_manifest
from minimind.checkpoint.validation import read_config
from minimind.data.tokenizer.files import MODEL_NAME, TOKENIZER_FILES
from minimind.errors import CheckpointError
from minimind.interop.tensor_sources import INDEX, WHOLE, Source, of_checkpoint
from minimind.interop.write_folder import SHARDS, write_folder
from minimind.runtime.checked_json import require_listed, told_by_config
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.output_folder import NewFolder

MODEL_TYPE = "minimind"
OWN = ("config.json", "generation_config.json", *TOKENIZER_FILES, INDEX, WHOLE, SHARDS)


@dataclass(frozen=True)
class Consolidated:
    """What was written."""

    files: list[str]
    parameters: int
    bytes: int
    note: str | None = None  # what a reader of the files should know


def consolidate(
    path: Path, out: Path, dtype: str, max_shard_bytes: int, force: bool
) -> Consolidated:
    """Write the verified checkpoint `path` as safetensors, with config and tokenizer, to `out`.

    Written aside and renamed: an interrupted one leaves nothing under `out`. From any number of
    processes and any ZeRO stage the float32 files are the same byte for byte.
    """
    folder = NewFolder(out.resolve(), force, OWN, "consolidate")
    folder.require_free()
    source = of_checkpoint(path)
    parts = source.parts(getattr(torch, dtype))
    texts, note = _texts(path, source, dtype)
    files = write_folder(folder, parts, texts, max_shard_bytes)
    parameters = sum(math.prod(shape) for shape in source.shapes.values())
    return Consolidated(files, parameters, sum(part.bytes for part in parts), note)


def _texts(path: Path, source: Source, dtype: str) -> tuple[dict[str, bytes], str | None]:
    """The small files beside the weights, and a note on them.

    A config.json of the MiniMind decoder has its shape, and nothing that a reader would act upon.
    """
    manifest = read_manifest(path)
    names = [name for name in TOKENIZER_FILES if (path / name).exists()] or [MODEL_NAME]
    copied = {name: _copied(path, name) for name in names}
    if told_by_config(path, manifest).get("model_type", MODEL_TYPE) == MODEL_TYPE:
        told = {**read_config(path, manifest), "model_type": MODEL_TYPE, "dtype": dtype}
        written = json.dumps(told, indent=2, sort_keys=True).encode() + b"\n"
        return {"config.json": written, **copied}, None
    from minimind.interop.hf_folder import foreign_files  # with all of transformers
    from minimind.interop.weights import weights_in

    found = weights_in(path, source)
    return foreign_files(found.config, found.load_tokenizer(), dtype)


def _copied(path: Path, name: str) -> bytes:
    require_listed(read_manifest(path), path / name)
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path / name}: cannot be read ({error.strerror})") from error


def told(done: Consolidated, path: Path, out: Path, dtype: str) -> str:
    """What `consolidate` says when it is done."""
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    return (
        f"{out}: {done.parameters:,} parameters in {dtype}, {mebibytes(done.bytes)} in {files},"
        f" from {path}"
    )
