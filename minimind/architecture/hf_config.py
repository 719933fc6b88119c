"""What a config.json of transformers describes: its configuration, read without running its code.

Nothing of such a file reaches transformers before the keys that fetch or run code are refused, and
whatever transformers then raises, of the configuration or of its model, names the key at fault.
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
    original = deepcopy(told)  # transformers writes into nested objects
    try:
        config = _read(told)
    except Exception as error:  # of a kind of its own for each way of checking
        raise CheckpointError(_refusal(original, error, _read)) from error
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
    """Return whether it names implementations of transformers' own, for all parts or each."""
    if isinstance(value, Mapping):
        return all(map(_is_own, value.values()))
    return isinstance(value, bool) or value in OWN_IMPLEMENTATIONS  # ..._autoset is true or false


def require_model(told: Mapping[str, Any]) -> None:
    """Raise a CheckpointError where transformers cannot build or run the model of `told`.

    The model has no numbers, so this takes neither memory nor much time. What only numbers would
    show is left to the model itself.
    """
    original = deepcopy(dict(told))
    try:
        _try_model(original)
    except Exception as error:  # whatever its code happens to raise for a value it cannot use
        raise CheckpointError(_refusal(original, error, _try_model)) from error


def _read(told: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration; special ids are left out. Raises anything."""
    config = CONFIG_MAPPING[told["model_type"]].from_dict({**told, **dict.fromkeys(IDS)})
    config.to_dict()  # of a part that is no configuration
    return config


def _try_model(told: Mapping[str, Any]) -> None:
    """Build the model; one training pass and one as in generation, without numbers.

    Raises anything.
    """
    config = _read(deepcopy(dict(told)))
    for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        setattr(config, name, number % config.vocab_size)  # as a tokenizer will say
    try:
        with FakeTensorMode():
            model = transformers_model(config, dtype=torch.float32)
            length = min(8, config.max_position_embeddings)
            tokens = torch.ones((2, length), dtype=torch.int64)
            model(input_ids=tokens, use_cache=False)
            model.eval()(input_ids=tokens)  # with its cache, as it generates
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    ):
        return  # it asks for a number


def _refusal(told: Mapping[str, Any], error: Exception, attempt: Callable[..., Any]) -> str:
    """Return what transformers refuses and why: the key that makes `attempt` fail."""
    words = first_line(error)
    if isinstance(error, LookupError):  # its text is the missing name alone
        words = f"{type(error).__name__}: {words}"
    key = _key_at_fault(told, attempt)
    if key is None:
        return f"is refused by transformers ({words})"
    return f"has {key} = {shown(told[key])}, which transformers refuses ({words})"


def _key_at_fault(told: Mapping[str, Any], attempt: Callable[..., Any]) -> str | None:
    """Return the first key without which `attempt` succeeds; None if there is none."""
    before = logging.root.manager.disable
    logging.disable()  # transformers warns anew in each attempt
    try:
        return next((key for key, changed in _changed(told) if _succeeds(attempt, changed)), None)
    finally:
        logging.disable(before)


def _changed(told: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key and the file without it, then each count and the file with 1 instead.

    The latter because a default, as of the number of heads, may not fit the file either.
    """
    # The sizes last: a default of theirs is another model, in which a wrong value may fit.
    keys = sorted(set(told) - {"model_type"}, key=lambda key: (key in SIZES, [*told].index(key)))
    for key in keys:
        yield key, {name: value for name, value in told.items() if name != key}
    for key in keys:
        if type(told[key]) is int:
            yield key, {**told, key: 1}


def _succeeds(attempt: Callable[..., Any], told: Mapping[str, Any]) -> bool:
    try:
        attempt(deepcopy(told))
    except Exception:  # another key is at fault
        return False
    return True


def first_line(error: Exception) -> str:
    """Returns the first two lines of an error as one, or its type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__
