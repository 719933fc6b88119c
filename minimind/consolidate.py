"""`minimind checkpoint consolidate`: a checkpoint as whole tensors, for any reader of safetensors.

One tensor at a time is in memory, whatever the model's size and the number of files.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from minimind.data.tokenizer_files import MODEL_NAME, TOKENIZER_FILES
from minimind.errors import CheckpointError
from minimind.files import mebibytes
from minimind.new_folder import NewFolder
from minimind.tensor_sources import INDEX, WHOLE, of_checkpoint
from minimind.train.checkpoint import read_manifest
from minimind.train.claims import read_config, require_listed, told_by_config
from minimind.whole_files import SHARDS, write_folder

MODEL_TYPE = "minimind"
OWN = ("config.json", *TOKENIZER_FILES, INDEX, WHOLE, SHARDS)


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
    folder = NewFolder(out.resolve(), force, OWN, "consolidate")
    folder.require_free()
    source = of_checkpoint(path)
    parts = source.parts(getattr(torch, dtype))
    names = [name for name in TOKENIZER_FILES if (path / name).exists()] or [MODEL_NAME]
    texts = {"config.json": _config_of(path, dtype), **{n: _copied(path, n) for n in names}}
    files = write_folder(folder, parts, texts, max_shard_bytes)
    parameters = sum(math.prod(shape) for shape in source.shapes.values())
    return Consolidated(files, parameters, sum(part.bytes for part in parts))


def _copied(path: Path, name: str) -> bytes:
    require_listed(read_manifest(path), path / name)
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path / name}: cannot be read ({error.strerror})") from error


def _config_of(path: Path, dtype: str) -> bytes:
    """The model's configuration, and nothing else that a config.json may ask a reader to do."""
    manifest = read_manifest(path)
    told = told_by_config(path, manifest)
    if told.get("model_type", MODEL_TYPE) == MODEL_TYPE:
        told = {**read_config(path, manifest), "model_type": MODEL_TYPE}
    else:
        from minimind.train.architecture import foreign_config_of  # with all of transformers

        foreign_config_of(path, manifest)  # may refuse it
    known = {**told, "dtype": dtype}
    return json.dumps(known, indent=2, sort_keys=True).encode() + b"\n"


def told(done: Consolidated, path: Path, out: Path, dtype: str) -> str:
    """What `consolidate` says when it is done."""
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    return (
        f"{out}: {done.parameters:,} parameters in {dtype}, {mebibytes(done.bytes)} in {files},"
        f" from {path}"
    )
