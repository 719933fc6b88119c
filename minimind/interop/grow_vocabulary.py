"""Weights for more ids than the file has rows for: the new rows are the mean of the others.

The logit of a new id is then the mean of all others, which do not change: at the start a new id is
neither likely nor impossible.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from minimind.architecture.hf_models import model_of
from minimind.errors import UsageError
from minimind.interop.weights import Weights


def grow_vocabulary(weights: Weights, vocab_size: int) -> Weights:
    """Return the weights with `vocab_size` rows in each tensor that has a row per id.

    These are read as float32: the rows of the file, then their mean. Raise UsageError for a model
    whose other tensors depend on the size of its vocabulary.
    """
    config = deepcopy(weights.config)
    rows, config.vocab_size = config.vocab_size, vocab_size
    with torch.device("meta"):
        state = model_of(config).state_dict()
    source = weights.tensors
    shapes = {name: list(state[name].shape) for name in source.shapes}
    grown = {name for name, shape in shapes.items() if shape != source.shapes[name]}
    for name in sorted(grown):
        old, new = source.shapes[name], shapes[name]
        if old != [rows, *old[1:]] or new != [vocab_size, *old[1:]]:
            raise UsageError(
                f"{weights.path}: {source.file_names.get(name, name)} of shape {old} would be of"
                f" shape {new} with {vocab_size} ids; give a model with rows for them"
            )

    def read(name: str) -> Tensor:
        value = source.read(name)
        return with_mean_rows(value.float(), vocab_size) if name in grown else value

    dtypes = {**source.dtypes, **dict.fromkeys(grown, torch.float32)}
    return replace(
        weights, config=config, tensors=replace(source, shapes=shapes, dtypes=dtypes, read=read)
    )


def with_mean_rows(value: Tensor, rows: int) -> Tensor:
    """Return `value` of shape (old rows, ...), followed by its mean up to `rows` rows."""
    mean = value.mean(0, keepdim=True)
    return torch.cat([value, mean.expand(rows - len(value), *mean.shape[1:])])
