"""Weights for a model of transformers, by the names that its save_pretrained gives them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import PretrainedConfig

from minimind.architecture.hf_models import model_of
from minimind.errors import CheckpointError
from minimind.interop.tensor_sources import ANEW, CONFIG, Source, require_same


def fitted(source: Source, path: Path, config: PretrainedConfig) -> Source:
    """The tensors of `source` that the model has, a tied one once; a CheckpointError if not all.

    As transformers does: names may lack the prefix of its base model, as GPT-2's do at the hub, and
    what it made of the configuration in former times may be there.
    """
    if config.num_hidden_layers > len(source.shapes):
        raise CheckpointError(
            f"{path}: has fewer tensors than {CONFIG} has layers ({config.num_hidden_layers});"
            f" {ANEW}"
        )
    with torch.device("meta"):
        model = model_of(config)
    own = {name: list(value.shape) for name, value in model.state_dict().items()}
    former = model._keys_to_ignore_on_load_unexpected or ()
    names = {}
    for name in source.shapes:
        full = f"{model.base_model_prefix}.{name}"
        if name in own or full not in own:
            if name not in own and any(re.search(pattern, name) for pattern in former):
                continue
            full = name
        names[full] = name
    for twin, first in model.all_tied_weights_keys.items():
        own.pop(twin)
        if twin not in names:
            continue
        if first in names and not torch.equal(source.read(names[twin]), source.read(names[first])):
            raise CheckpointError(
                f"{path}: {names[twin]} is not {names[first]}, though {CONFIG} ties them; correct"
                " tie_word_embeddings there"
            )
        names.setdefault(first, names[twin])
        names.pop(twin)
    found = source.renamed(names)
    require_same(found, path, own)
    for name in own:
        if not found.dtypes[name].is_floating_point:
            raise CheckpointError(f"{path}: {names[name]} is of {found.dtypes[name]}; {ANEW}")
    return found
