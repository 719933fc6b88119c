"""What a config.json of transformers describes: its configuration, read without running its code.

Nothing of such a file reaches transformers before the keys that fetch or run code are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minimind.errors import CheckpointError
from minimind.train.claims import shown

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
POSITIONS = "max_position_embeddings"
DEEPEST = 4096  # layers; modules are made for each before any weight is looked at
# transformers takes any other name of an implementation from a hub, or needs another package.
OWN_IMPLEMENTATIONS = (None, "eager", "sdpa")
HARMLESS = "cache_implementation"  # a class of transformers' own, which only generation looks at
FETCHING = ("rwkv",)  # their code downloads a kernel whenever it sees a GPU


def foreign_config(told: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' configuration; a CheckpointError, without the path, for what is not trained.

    No code that a directory brings along is run. Special ids are left out: they are a tokenizer's.
    """
    kind = told.get("model_type")
    _require_no_code(told)
    if told.get("quantization_config"):
        raise CheckpointError("has a quantization_config, and quantized weights are not trained")
    if type(kind) is not str or kind not in CONFIG_MAPPING:
        raise CheckpointError(f"has model_type = {shown(kind)}, which transformers does not know")
    if kind in FETCHING:
        raise CheckpointError(f"has model_type = {kind}, whose code comes from a hub")
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"has model_type = {kind}, which is no causal language model")
    try:
        config = CONFIG_MAPPING[kind].from_dict({**told, **dict.fromkeys(IDS)})
    except Exception as error:  # of a kind of its own for each way of checking
        raise CheckpointError(f"is refused by transformers ({first_line(error)})") from error
    for name in (*NEEDED, POSITIONS):
        value = getattr(config, name, None)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"has {name} = {shown(value)}, as of no plain decoder")
    if config.num_hidden_layers > DEEPEST:
        raise CheckpointError(f"has more than {DEEPEST} layers")
    experts = {n: v for n, v in config.to_dict().items() if "expert" in n and type(v) is int}
    if name := next((name for name, count in experts.items() if count > 1), ""):
        raise CheckpointError(
            f"has {name} = {experts[name]}, and experts are trained in our own decoder alone"
        )
    return config


def _require_no_code(told: Mapping[str, Any]) -> None:
    """Raise a CheckpointError for a key, at any depth, that has code fetched or run."""
    for path, key, value in _members(told):
        if key == "auto_map" and value:
            raise CheckpointError(f"asks for code of its own ({path}), which is not run")
        if key == "attribute_map":  # makes one key another, so that no name below can be trusted
            raise CheckpointError(f"has {path}, which belongs to the code of transformers")
        if "_implementation" in key and key != HARMLESS and not _is_own(value):
            raise CheckpointError(
                f"has {path} = {shown(value)}, code that is not transformers' own, and no hub is"
                ' asked for any (write "eager" or "sdpa", or remove it)'
            )


def _members(value: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield dotted path, key and value of every member at any depth."""
    pairs = value.items() if isinstance(value, Mapping) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, below in pairs:
        yield f"{prefix}{key}", str(key), below
        yield from _members(below, f"{prefix}{key}.")


def _is_own(value: Any) -> bool:
    """Return whether it names implementations of transformers' own, for all parts or each."""
    if isinstance(value, Mapping):
        return all(map(_is_own, value.values()))
    return value in OWN_IMPLEMENTATIONS


def first_line(error: Exception) -> str:
    """Returns the first two lines of an error as one, or its type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__
