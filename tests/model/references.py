"""The same weights in transformers' own models, whose rotary pairs are channels j and j + D/2."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig

# The argument of this transformers with cached keys and values, and the output.
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"


def build(seed: int = 0, **changes: Any) -> Any:
    """A small model in eval mode, weights large enough that every part changes the logits."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"vocab_size": 97, "dim": 48, "n_layers": 2, "n_heads": 6}
    shape |= {"n_kv_heads": 2, "max_seq_len": 64}
    model = MiniMindForCausalLM(MiniMindConfig(**{**shape, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


def paired_apart(name: str, weight: Tensor, head_dim: int) -> Tensor:
    """A weight whose channels are turned in pairs (of q, k and their norms) in the other order."""
    if not any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return weight
    heads = weight.view(-1, head_dim, *weight.shape[1:])
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).view_as(weight)


def as_reference(model: MiniMindForCausalLM) -> Any:
    """The weights of `model` in the class of transformers that has its biases, norms, rotations."""
    ours = model.config
    kinds: Any = (LlamaConfig, LlamaForCausalLM)
    if ours.qk_norm:
        kinds = (Qwen3Config, Qwen3ForCausalLM)
    if ours.qkv_bias:
        kinds = (Qwen2Config, Qwen2ForCausalLM)
    more = {}
    if ours.no_rope_layer_interval:
        kinds = (SmolLM3Config, SmolLM3ForCausalLM)
        more = {"no_rope_layer_interval": ours.no_rope_layer_interval}
    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    ).split()
    same += "num_key_value_heads max_position_embeddings rms_norm_eps tie_word_embeddings".split()
    config = kinds[0](
        **{name: getattr(ours, name) for name in same},
        head_dim=ours.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        pad_token_id=None,
        **more,
    )
    reference = kinds[1](config).eval()
    weights = model.state_dict().items()
    reference.load_state_dict({n: paired_apart(n, w, ours.head_dim) for n, w in weights})
    return reference
