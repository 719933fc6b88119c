"""`minimind checkpoint consolidate | average`: write checkpoints as whole tensors in safetensors.

One tensor of each checkpoint at a time is in memory, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch

from minimind.checkpoint.directory import differences, read_manifest
from minimind.checkpoint.reader import Contents
from minimind.checkpoint.validation import read_config
from minimind.data.tokenizer.vocabulary import MODEL_NAME, TOKENIZER_FILES
from minimind.errors import CheckpointError
from minimind.interop.tensor_sources import INDEX, TRAINED, WHOLE, TensorSource, open_checkpoint
from minimind.interop.write_folder import (
    SHARDS,
    WrittenModel,
    is_ours,
    new_folder,
    small_json,
    write_shards,
)
from minimind.runtime import disk
from minimind.runtime.checked_json import read_checkpoint_config, require_listed
from minimind.runtime.output_folder import NewFolder

MODEL_TYPE = "minimind"
OWN = ("config.json", "generation_config.json", *TOKENIZER_FILES, INDEX, WHOLE, SHARDS)


def consolidate(
    paths: Sequence[Path],
    out: Path,
    dtype: str,
    max_shard_bytes: int,
    force: bool,
    weights: str = TRAINED,
) -> WrittenModel:
    """Write a verified checkpoint as safetensors, with config and tokenizer, to `out`.

    Several checkpoints give the mean of each weight. `out` appears complete or not at all.
    The float32 files are the same byte for byte for any number of processes and any ZeRO stage.
    """
    path = paths[0]
    author = "average" if len(paths) > 1 else "consolidate"
    folder = NewFolder(disk.resolve(out), force, OWN, author, is_ours)
    folder.require_free()
    source = average(paths, weights) if len(paths) > 1 else open_checkpoint(path, weights)
    parts = source.parts(getattr(torch, dtype))
    texts, note = _small_files(path, source, dtype)
    with new_folder(folder, parts, texts) as draft:
        files = write_shards(parts, draft, max_shard_bytes)
    return WrittenModel(files, source.shapes, parts, note)


def average(paths: Sequence[Path], weights: str = TRAINED) -> TensorSource:
    """Return the mean of the weights of several checkpoints, summed in float64.

    Buffers, config and tokenizer are those of the first. Raise CheckpointError if a checkpoint has
    another model or tokenizer.
    """
    first, *others = (read_manifest(path)["identity"] for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        groups = ("model", "tokenizer")
        saved, its = ({group: side.get(group, {}) for group in groups} for side in (first, other))
        changed = differences(saved, its)
        if changed:
            raise CheckpointError(
                f"{path} has another model or tokenizer than {paths[0]}"
                f" ({'; '.join(map(str, changed))}); average checkpoints of one model"
            )
    sources = [open_checkpoint(path, weights) for path in paths]

    parameters = Contents(paths[0]).shapes

    def read(name: str) -> torch.Tensor:
        if name not in parameters:
            return sources[0].read(name)
        values = [source.read(name) for source in sources]
        total = reduce(torch.add, (value.double() for value in values))
        return (total / len(values)).to(values[0].dtype)

    return replace(sources[0], read=read)


def _small_files(
    path: Path, source: TensorSource, dtype: str
) -> tuple[dict[str, bytes], str | None]:
    """The small files beside the weights, and a note on them.

    For the MiniMind decoder config.json holds only what was validated.
    """
    manifest = read_manifest(path)
    names = [name for name in TOKENIZER_FILES if disk.exists(path / name)] or [MODEL_NAME]
    tokenizer_files = {}
    for name in names:
        require_listed(manifest, path / name)
        try:
            tokenizer_files[name] = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path / name}: cannot be read ({error.strerror})") from error
    if read_checkpoint_config(path, manifest).get("model_type", MODEL_TYPE) == MODEL_TYPE:
        config = {**read_config(path, manifest), "model_type": MODEL_TYPE, "dtype": dtype}
        return {"config.json": small_json(config), **tokenizer_files}, None
    from minimind.interop.hf_folder import transformers_files  # imports all of transformers
    from minimind.interop.weights import read_checkpoint_weights

    weights = read_checkpoint_weights(path, source)
    return transformers_files(weights.config, weights.load_tokenizer(), dtype)
