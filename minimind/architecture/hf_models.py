"""Causal language models of transformers with the interface of ours.

The class of a model is extended, so its weights keep the names of transformers. A config.json is
read without running its code: keys that fetch or run code are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minimind.errors import CheckpointError, UsageError
from minimind.model.causal_lm import MiniMindForCausalLM, MiniMindOutput
from minimind.model.configuration import MiniMindConfig
from minimind.model.loss import next_token_loss, own_sum
from minimind.model.masks import document_positions
from minimind.runtime.checked_json import shown
from minimind.runtime.terminal import first_lines


def model_of(config: PretrainedConfig) -> Any:
    """Build the model of a configuration, ours or transformers', with random fp32 weights.

    Either has `forward(input_ids=, shift_labels=, loss_chunk_size=, loss_by_row=, own_loss=,
    document_starts=)`, which returns loss_sum and targets.
    """
    if isinstance(config, MiniMindConfig):
        return MiniMindForCausalLM(config)
    return with_sums(transformers_model(config, dtype=torch.float32))


def transformers_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model of transformers without code from a hub."""
    with _without_kernels():
        return AutoModelForCausalLM.from_config(config, **options)


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Hide the package `kernels`: some models fetch FlashAttention from it when imported."""
    modules: dict[str, Any] = sys.modules
    imported = {name: modules[name] for name in ("kernels",) if name in modules}
    modules["kernels"] = None  # makes its import fail
    try:
        yield
    finally:
        del modules["kernels"]
        modules.update(imported)


def with_sums(model: PreTrainedModel) -> PreTrainedModel:
    """Extend the class of the model: summed losses, and rotary tables that keep their precision.

    Without loss_chunk_size, forward is that of transformers, with its signature. From
    `document_starts` positions follow that restart there, and from them transformers derives the
    attention mask.
    """
    model_class: Any = type(model)

    @wraps(model_class.forward)
    def forward(
        self: Any,
        *args: Any,
        loss_chunk_size: int | None = None,
        loss_by_row: bool = False,
        own_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        document_starts: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if document_starts is not None:
            kwargs["position_ids"] = document_positions(0, None, document_starts)
        if loss_chunk_size is None:
            return model_class.forward(self, *args, **kwargs)
        targets_BT = kwargs.pop("shift_labels")
        logits = model_class.forward(self, *args, use_cache=False, **kwargs).logits
        if own_loss is None:
            loss_sum, targets = next_token_loss(logits, targets_BT, by_row=loss_by_row)
        else:
            loss_sum, targets = own_sum(own_loss, logits, targets_BT, loss_by_row)
        return MiniMindOutput(loss_sum=loss_sum, targets=targets)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Move rotary frequencies without rounding them to the new dtype."""
        persistent = self.state_dict()  # the configuration determines the other buffers
        buffers = [one for one in self.named_buffers() if one[0] not in persistent]
        exact = {name: table for name, table in buffers if table.is_floating_point()}
        model_class._apply(self, fn, recurse)
        for name, table in exact.items():
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            setattr(module, leaf, table.to(getattr(module, leaf).device))
        return self

    attributes = {"forward": forward, "_apply": _apply, "__module__": model_class.__module__}
    model.__class__ = type(model_class.__name__, (model_class,), attributes)
    return model


@torch.no_grad()
def require_separate_documents(model: Any) -> None:
    """Raise UsageError for a model of `with_sums` that ignores `document_starts`."""
    was_training = model.training
    length = min(8, model.config.max_position_embeddings)
    ids = torch.arange(length)[None] % model.config.vocab_size
    at = length // 2
    starts = torch.arange(length)[None] == at
    model.eval()
    whole = model(input_ids=ids, use_cache=False, document_starts=starts).logits[:, at:].float()
    alone = model(input_ids=ids[:, at:], use_cache=False).logits.float()
    model.train(was_training)
    if (whole - alone).abs().max() > 1e-5 * alone.abs().max():
        raise UsageError(
            f"{type(model).__name__} of transformers does not keep the documents of a row apart,"
            " which --task sft and --doc_mask need; name another model"
        )


def rotary_dtype(model: nn.Module) -> str | None:
    """The dtype of the rotary table; None if positions are learnt."""
    names = ("pos_cis", "inv_freq")
    tables = [table for name, table in model.named_buffers() if name.endswith(names)]
    return str(tables[0].dtype) if tables else None


@torch.no_grad()
def is_bidirectional(model: Any) -> bool:
    """Whether logits depend on later tokens, as in masked language models."""
    was_training = model.training
    length = min(8, model.config.max_position_embeddings)
    tokens = torch.zeros((2, length), dtype=torch.int64)
    tokens[:, :-1] = torch.arange(length - 1) % model.config.vocab_size
    tokens[1, -1] = 1 % model.config.vocab_size
    first, second = model.eval()(input_ids=tokens).logits.float()
    model.train(was_training)
    change = (first - second).abs().amax(-1)
    return length > 1 and bool(change[:-1].max() > 1e-3 * change[-1])


def matrices_and_embeddings(model: Any) -> tuple[dict[str, int], set[str]]:
    """Sizes by name of all weights that multiply a token, and the names of the embeddings.

    The first are all matrices but the embeddings, and the head; a tied one is both.
    """
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    only_read = tables - {model.get_output_embeddings().weight}
    named = dict(model.named_parameters())
    matrices = {n: p.numel() for n, p in named.items() if p.ndim > 1 and p not in only_read}
    return matrices, {name for name, p in named.items() if p in tables}


IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
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
        raise CheckpointError(f"has model_type = {kind}, which is not a causal language model")
    try:
        config = _read(values)
    except Exception as error:  # each check of transformers raises its own type
        raise _refusal(error) from error
    for name in (*NEEDED, POSITIONS):
        value = getattr(config, name, None)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"has {name} = {shown(value)}, unlike a plain decoder")
    if config.num_hidden_layers > MAX_LAYERS:
        raise CheckpointError(f"has more than {MAX_LAYERS} layers")
    experts = {n: v for n, v in config.to_dict().items() if "expert" in n and type(v) is int}
    if name := next((name for name, count in experts.items() if count > 1), ""):
        raise CheckpointError(
            f"has {name} = {experts[name]}, and experts can only be trained in the built-in decoder"
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
    try:
        _try_model(values)
    except Exception as error:  # model code raises anything for an unusable value
        raise _refusal(error) from error


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
            model.eval()(input_ids=tokens)  # generation uses the cache, too
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    ):
        return  # the model reads a value


def _refusal(error: Exception) -> CheckpointError:
    """What transformers refuses, in its words."""
    reason = first_lines(error, 2)
    if isinstance(error, LookupError):  # its text is only the missing name
        reason = f"{type(error).__name__}: {reason}"
    return CheckpointError(f"is refused by transformers ({reason})")
