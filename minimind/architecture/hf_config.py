"""Read a config.json of transformers without running its code.

Keys that fetch or run code are refused before the file reaches transformers. Errors that
transformers raises for the configuration or its model name the key that causes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minimind.architecture.hf_models import transformers_model
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import shown

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SIZES = (*NEEDED, "num_key_value_heads", "head_dim", "intermediate_size")
POSITIONS = "max_position_embeddings"
MAX_LAYERS = 4096  # modules are built for each before any weight is read
# transformers loads any other implementation from a hub or from another package.
OWN_IMPLEMENTATIONS = (None, "eager", "sdpa")
HARMLESS = "cache_implementation"  # a class of transformers, used in generation only
FETCHING = ("rwkv",)  # their code downloads a kernel if there is a GPU


def foreign_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration; raise CheckpointError if it cannot be trained.

    The error does not name the path. Special ids are dropped: those of the tokenizer are used.
    """
    kind = values.get("model_type")
    _require_no_code(values)
    require_unquantized(values)
    if type(kind) is not str or kind not in CONFIG_MAPPING:
        raise CheckpointError(f"has model_type = {shown(kind)}, which transformers does not know")
    if kind in FETCHING:
        raise CheckpointError(f"has model_type = {kind}, whose code comes from a hub")
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"has model_type = {kind}, which is no causal language model")
    original = deepcopy(values)  # transformers writes into nested objects
    try:
        config = _read(values)
    except Exception as error:  # each check of transformers raises its own type
        raise CheckpointError(_refusal(original, error, _read)) from error
    for name in (*NEEDED, POSITIONS):
        value = getattr(config, name, None)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"has {name} = {shown(value)}, unlike a plain decoder")
    if config.num_hidden_layers > MAX_LAYERS:
        raise CheckpointError(f"has more than {MAX_LAYERS} layers")
    experts = {n: v for n, v in config.to_dict().items() if "expert" in n and type(v) is int}
    if name := next((name for name, count in experts.items() if count > 1), ""):
        raise CheckpointError(
            f"has {name} = {experts[name]}, and experts are trained in our own decoder alone"
        )
    return config


def require_unquantized(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the configuration of a quantized model, also one in floats."""
    if values.get("quantization_config"):
        raise CheckpointError("has a quantization_config, and quantized weights are not trained")


def _require_no_code(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a key, at any depth, that fetches or runs code."""
    for path, key, value in _members(values):
        if key == "auto_map" and value:
            raise CheckpointError(f"requires its own code ({path}), which is not run")
        if key == "attribute_map":  # renames keys, so that no name can be trusted
            raise CheckpointError(f"has {path}, which belongs to the code of transformers")
        if "_implementation" in key and key != HARMLESS and not _is_own(value):
            raise CheckpointError(
                f'has {path} = {shown(value)}, and implementations other than "eager" and'
                ' "sdpa" are code of a hub or of another package (write one of these, or remove it)'
            )


def _members(value: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield dotted path, key and value of every member at any depth."""
    pairs = value.items() if isinstance(value, Mapping) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, below in pairs:
        yield f"{prefix}{key}", str(key), below
        yield from _members(below, f"{prefix}{key}.")


def _is_own(value: Any) -> bool:
    """Whether `value` names implementations of transformers itself, for all parts or for each."""
    if isinstance(value, Mapping):
        return all(map(_is_own, value.values()))
    return (
        isinstance(value, bool) or value in OWN_IMPLEMENTATIONS
    )  # bool: _attn_implementation_autoset


def require_model(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError if transformers cannot build or run the model of a config.json.

    Runs on fake tensors, which takes little time and memory; errors that depend on values pass.
    """
    original = deepcopy(dict(values))
    try:
        _try_model(original)
    except Exception as error:  # model code raises anything for an unusable value
        raise CheckpointError(_refusal(original, error, _try_model)) from error


def _read(values: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration without special ids. Raises anything."""
    config = CONFIG_MAPPING[values["model_type"]].from_dict({**values, **dict.fromkeys(IDS)})
    config.to_dict()  # raises if a part is not a configuration
    return config


def _try_model(values: Mapping[str, Any]) -> None:
    """Run one training and one generation pass on fake tensors. Raises anything."""
    config = _read(deepcopy(dict(values)))
    for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        setattr(config, name, number % config.vocab_size)  # any valid ids
    try:
        with FakeTensorMode():
            model = transformers_model(config, dtype=torch.float32)
            length = min(8, config.max_position_embeddings)
            tokens = torch.ones((2, length), dtype=torch.int64)
            model(input_ids=tokens, use_cache=False)
            model.eval()(input_ids=tokens)  # with its cache, as in generation
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    ):
        return  # the model reads a value


def _refusal(values: Mapping[str, Any], error: Exception, attempt: Callable[..., Any]) -> str:
    """Describe what transformers refuses: its error, and the key that makes `attempt` fail."""
    reason = first_line(error)
    if isinstance(error, LookupError):  # its text is only the missing name
        reason = f"{type(error).__name__}: {reason}"
    key = _key_at_fault(values, attempt)
    if key is None:
        return f"is refused by transformers ({reason})"
    return f"has {key} = {shown(values[key])}, which transformers refuses ({reason})"


def _key_at_fault(values: Mapping[str, Any], attempt: Callable[..., Any]) -> str | None:
    """Return the first key without which `attempt` succeeds; None if there is none."""
    before = logging.root.manager.disable
    logging.disable()  # transformers warns again in each attempt
    try:
        return next(
            (key for key, changed in _variants(values) if _succeeds(attempt, changed)), None
        )
    finally:
        logging.disable(before)


def _variants(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key with the file without it, then each integer key with the value 1.

    The latter because a default, such as the number of heads, may not fit the file either.
    """
    # Sizes last: their defaults describe another model, in which a wrong value may fit.
    order = [*values]
    keys = sorted(set(values) - {"model_type"}, key=lambda key: (key in SIZES, order.index(key)))
    for key in keys:
        yield key, {name: value for name, value in values.items() if name != key}
    for key in keys:
        if type(values[key]) is int:
            yield key, {**values, key: 1}


def _succeeds(attempt: Callable[..., Any], values: Mapping[str, Any]) -> bool:
    try:
        attempt(deepcopy(values))
    except Exception:  # another key is at fault
        return False
    return True


def first_line(error: Exception) -> str:
    """Return the first two lines of an error as one, or its type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__
