"""Causal language models of transformers with the interface of ours.

The class of a model is extended, so its weights keep the names of transformers.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from minimind.errors import UsageError
from minimind.model.attention_mask import document_positions
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import MiniMindForCausalLM
from minimind.model.experts import MiniMindOutput
from minimind.model.loss import next_token_loss


def model_of(config: PretrainedConfig) -> Any:
    """Build the model of a configuration, ours or transformers', with random fp32 weights.

    Either has `forward(input_ids=, shift_labels=, loss_chunk_size=, document_starts=)`, which
    returns loss_sum and targets.
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
    kind: Any = type(model)

    @wraps(kind.forward)
    def forward(
        self: Any,
        *args: Any,
        loss_chunk_size: int | None = None,
        document_starts: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if document_starts is not None:
            kwargs["position_ids"] = document_positions(0, None, document_starts)
        if loss_chunk_size is None:
            return kind.forward(self, *args, **kwargs)
        targets_BT = kwargs.pop("shift_labels")
        logits = kind.forward(self, *args, use_cache=False, **kwargs).logits
        loss_sum, targets = next_token_loss(logits, targets_BT)
        return MiniMindOutput(loss_sum=loss_sum, targets=targets)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Move rotary frequencies without rounding them to the new dtype."""
        exact = _rotary_tables(self)
        kind._apply(self, fn, recurse)
        for name, table in exact.items():
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            setattr(module, leaf, table.to(getattr(module, leaf).device))
        return self

    own = {"forward": forward, "_apply": _apply, "__module__": kind.__module__}
    model.__class__ = type(kind.__name__, (kind,), own)
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
            " which --task sft needs; name another model"
        )


def _rotary_tables(model: nn.Module) -> dict[str, Tensor]:
    """Non-persistent floating-point buffers, which the configuration determines."""
    persistent = model.state_dict()
    buffers = ((name, table) for name, table in model.named_buffers() if name not in persistent)
    return {name: table for name, table in buffers if table.is_floating_point()}


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


def matrix_weights(model: Any) -> int:
    """Number of weights that multiply a token: all matrices but embeddings, and the head."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    embeddings.discard(model.get_output_embeddings().weight)  # tied
    return sum(p.numel() for p in model.parameters() if p.ndim > 1 and p not in embeddings)
