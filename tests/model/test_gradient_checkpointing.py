"""Blocks computed again in the backward pass: the same gradients, from less that was kept."""

from typing import Any

import pytest
import torch
from torch import Tensor

from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import Block

V, B, T, LAYERS = 97, 2, 24, 4


def build(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": V, "dim": 32, "n_layers": LAYERS, "n_heads": 4}
    return MiniMindForCausalLM(MiniMindConfig(**{**shape, "max_seq_len": T, **changes})).train()


def ids_BT() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.manual_seed(1))


def trained(model: Any) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """The loss, the gradients, and every tensor that the forward pass kept for the backward one."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids_BT(), labels=ids_BT()).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, kept


def size(kept: list[Tensor]) -> int:
    """Bytes of the storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in kept]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


VARIANTS = {
    "plain": {},
    "documents apart": {"doc_mask": True},
    "reference attention": {"use_flash_attn": False},
    "normed heads": {"qk_norm": True},
    "a layer without rotation": {"no_rope_layer_interval": 2},
    "wide heads with biases": {"qkv_bias": True, "head_dim": 24},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradients_are_the_same_bit_for_bit(changes: dict[str, Any], reentrant: bool):
    model = build(**changes)
    loss, gradients, _ = trained(model)
    enable_checkpointing(model, use_reentrant=reentrant)
    again, recompute, _ = trained(model)
    assert torch.equal(again, loss)
    assert gradients.keys() == recompute.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().sum() > 0
        assert torch.equal(recompute[name], gradient), name


def test_of_each_block_its_input_alone_is_kept():
    model = build()
    weights = {p.data_ptr() for p in model.parameters()}

    def activations() -> int:
        kept = trained(model)[2]
        return size([t for t in kept if t.untyped_storage().data_ptr() not in weights])

    whole = activations()
    enable_checkpointing(model)
    inputs = LAYERS * B * T * model.config.hidden_size * 4
    others = B * T * (3 * model.config.hidden_size + 2 * V) * 4  # norm, head and loss
    assert inputs < activations() < inputs + others < whole / 3
    enable_checkpointing(model, False)
    assert activations() == whole


def test_every_block_is_computed_twice_and_only_in_training(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr("minimind.model.decoder.apply_rotary", lambda x, _: calls.append(1) or x)
    model = build()
    for enabled, is_training, passes in ((0, 1, 1), (1, 1, 2), (1, 0, 1)):
        if enabled:
            enable_checkpointing(model)
        calls.clear()
        trained(model.train(bool(is_training)))
        assert len(calls) == 2 * LAYERS * passes  # queries and keys


@pytest.mark.skipif(
    not hasattr(MiniMindForCausalLM, "activation_checkpointing_enable"),
    reason="this transformers has the name of before alone",
)
def test_the_name_that_transformers_had_before_still_works():
    model = build()
    with pytest.warns(FutureWarning, match="activation_checkpointing_enable"):
        model.gradient_checkpointing_enable()
    assert all(block.gradient_checkpointing for block in model.model.layers)
    assert sum(isinstance(module, Block) for module in model.modules()) == LAYERS


def test_nothing_is_cached_meanwhile_and_generation_caches_as_ever():
    model = build()
    enable_checkpointing(model)
    assert model(ids_BT(), use_cache=True).past_key_values is None
    cache = model.eval()(ids_BT()[:, :4], use_cache=True).past_key_values
    assert cache.get_seq_length() == 4
    with pytest.raises(ValueError, match="a cache cannot be used while gradients are"):
        model.train()(ids_BT()[:, 4:], past_key_values=cache)
