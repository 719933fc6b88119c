"""Weights of a model of transformers, under the names that its save_pretrained uses."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import PretrainedConfig

from minimind.architecture.hf_models import model_of
from minimind.errors import CheckpointError
from minimind.interop.tensor_sources import CONFIG, REPLACE, TensorSource, check_shapes


def match_tensors(source: TensorSource, path: Path, config: PretrainedConfig) -> TensorSource:
    """The tensors of the model that `config` describes, a tied one once; else CheckpointError.

    As in transformers, names may lack the prefix of the base model (GPT-2 on the hub), and tensors
    that earlier versions stored and the model now computes are ignored.
    """
    if config.num_hidden_layers > len(source.shapes):
        raise CheckpointError(
            f"{path}: has fewer tensors than {CONFIG} has layers ({config.num_hidden_layers});"
            f" {REPLACE}"
        )
    with torch.device("meta"):
        model = model_of(config)
    expected = {name: list(value.shape) for name, value in model.state_dict().items()}
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    names = {}
    for name in source.shapes:
        full = f"{model.base_model_prefix}.{name}"
        if name in expected or full not in expected:
            if name not in expected and any(re.search(pattern, name) for pattern in ignored):
                continue
            full = name
        names[full] = name
    for tied, first in model.all_tied_weights_keys.items():
        expected.pop(tied)
        if tied not in names:
            continue
        if first in names and not torch.equal(source.read(names[tied]), source.read(names[first])):
            raise CheckpointError(
                f"{path}: {names[tied]} is not {names[first]}, though {CONFIG} ties them; correct"
                " tie_word_embeddings there"
            )
        names.setdefault(first, names[tied])
        names.pop(tied)
    tensors = source.renamed(names)
    check_shapes(tensors, path, expected)
    for name in expected:
        if not tensors.dtypes[name].is_floating_point:
            raise CheckpointError(
                f"{path}: {names[name]} has dtype {tensors.dtypes[name]}; {REPLACE}"
            )
    return tensors
