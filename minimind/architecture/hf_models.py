"""Causal language models of transformers under the contract of our own.

Their weights keep the names that transformers gives them, for it is its class that is extended.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import MiniMindForCausalLM
from minimind.model.experts import MiniMindOutput
from minimind.model.loss import next_token_loss


def model_of(config: PretrainedConfig) -> Any:
    """The model of a configuration, ours or transformers', with random fp32 weights.

    Whichever it is, `forward(input_ids=, shift_labels=, summed_by=)` gives loss_sum and targets.
    """
    if isinstance(config, MiniMindConfig):
        return MiniMindForCausalLM(config)
    return with_sums(transformers_model(config, dtype=torch.float32))


def transformers_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """The model of a configuration as transformers makes it, without code from its hub."""
    with _without_kernels():
        return AutoModelForCausalLM.from_config(config, **options)


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Hide the package `kernels`: some models ask it for FlashAttention when they are imported."""
    modules: dict[str, Any] = sys.modules
    imported = {name: modules[name] for name in ("kernels",) if name in modules}
    modules["kernels"] = None  # an import of it then fails
    try:
        yield
    finally:
        del modules["kernels"]
        modules.update(imported)


def with_sums(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, its class extended: summed losses, and tables that stay as exact as made.

    Without summed_by its forward is transformers' own, which its tools look at by signature.
    """
    kind: Any = type(model)

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, summed_by: int | None = None, **kwargs: Any) -> Any:
        if summed_by is None:
            return kind.forward(self, *args, **kwargs)
        logits = kind.forward(self, kwargs["input_ids"], use_cache=False).logits
        loss_sum, targets = next_token_loss(logits, kwargs["shift_labels"])
        return MiniMindOutput(loss_sum=loss_sum, targets=targets)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Move rotary frequencies without rounding them, as .to(bfloat16) would."""
        exact = _tables(self)
        kind._apply(self, fn, recurse)
        for name, table in exact.items():
            place, _, leaf = name.rpartition(".")
            module = self.get_submodule(place)
            setattr(module, leaf, table.to(getattr(module, leaf).device))
        return self

    own = {"forward": forward, "_apply": _apply, "__module__": kind.__module__}
    model.__class__ = type(kind.__name__, (kind,), own)
    return model


def _tables(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers that the configuration determines, and that are in no checkpoint."""
    kept = model.state_dict()
    found = ((name, table) for name, table in model.named_buffers() if name not in kept)
    return {name: table for name, table in found if table.is_floating_point()}


def rotary_dtype(model: nn.Module) -> str | None:
    """The dtype of the table that turns queries and keys; None where positions are learnt."""
    names = ("pos_cis", "inv_freq")
    found = [table for name, table in model.named_buffers() if name.endswith(names)]
    return str(found[0].dtype) if found else None


@torch.no_grad()
def sees_what_follows(model: Any) -> bool:
    """Whether a logit depends on later tokens, as in models that fill gaps: its loss would lie."""
    was_training = model.training
    length = min(8, model.config.max_position_embeddings)
    tokens = torch.zeros((2, length), dtype=torch.int64)
    tokens[:, :-1] = torch.arange(length - 1) % model.config.vocab_size
    tokens[1, -1] = 1 % model.config.vocab_size
    one, other = model.eval()(input_ids=tokens).logits.float()
    model.train(was_training)
    change = (one - other).abs().amax(-1)
    return length > 1 and bool(change[:-1].max() > 1e-3 * change[-1])


def matrix_weights(model: Any) -> int:
    """Weights that a token is multiplied by: all matrices but embeddings, and the head."""
    looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    looked_up.discard(model.get_output_embeddings().weight)  # tied: it does both
    return sum(p.numel() for p in model.parameters() if p.ndim > 1 and p not in looked_up)
