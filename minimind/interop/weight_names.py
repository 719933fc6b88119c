"""Tensor names and channel layouts of other formats.

Ours are Hugging Face Llama's names with ADJACENT rotary pairs (rotary.py). The others:

    MiniMind2    own names, adjacent pairs: no values move
    Llama        our names; channel j is paired with j + D/2, so the rows of q and k move
    Qwen3        as Llama, and the weights of the norms of q and k move too
    GGUF         own names; "llama" has adjacent pairs, "qwen3" pairs j with j + D/2

Shape letters: D channels per head.
"""

from __future__ import annotations

import re

from torch import Tensor

from minimind.model.rotary import half_to_interleaved, interleaved_to_half

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.weight")
MINIMIND2_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)\.weight")
# Tables in some of its files, which the configuration determines.
MINIMIND2_TABLES = re.compile(r"pos_cis|layers\.\d{1,6}\.attention\.mask")

# Our name -> those of MiniMind2 and GGUF; MiniMind2 has no norms of q and k.
OUTER = {
    EMBEDDING: ("tok_embeddings.weight", "token_embd.weight"),
    "model.norm.weight": ("norm.weight", "output_norm.weight"),
    HEAD: ("output.weight", "output.weight"),
}
INNER = {
    "self_attn.q_proj": ("attention.wq", "attn_q"),
    "self_attn.k_proj": ("attention.wk", "attn_k"),
    "self_attn.v_proj": ("attention.wv", "attn_v"),
    "self_attn.o_proj": ("attention.wo", "attn_output"),
    "mlp.gate_proj": ("feed_forward.w1", "ffn_gate"),
    "mlp.down_proj": ("feed_forward.w2", "ffn_down"),
    "mlp.up_proj": ("feed_forward.w3", "ffn_up"),
    "input_layernorm": ("attention_norm", "attn_norm"),
    "post_attention_layernorm": ("ffn_norm", "ffn_norm"),
    "self_attn.q_norm": ("", "attn_q_norm"),
    "self_attn.k_norm": ("", "attn_k_norm"),
}
ROTARY = tuple(f"self_attn.{side}.weight" for side in ("q_proj", "k_proj", "q_norm", "k_norm"))
_OUR_INNER = {theirs[0]: ours for ours, theirs in INNER.items() if theirs[0]}
_OUR_OUTER = {theirs[0]: ours for ours, theirs in OUTER.items()}


def from_minimind2(name: str) -> str | None:
    """Our name of a MiniMind2 tensor, or None."""
    if match := MINIMIND2_LAYER.fullmatch(name):
        inner = _OUR_INNER.get(match[2])
        return f"model.layers.{match[1]}.{inner}.weight" if inner else None
    return _OUR_OUTER.get(name)


def to_minimind2(name: str) -> str | None:
    """MiniMind2's name of one of our tensors, or None."""
    return _translate(name, 0, "layers")


def to_gguf(name: str) -> str | None:
    """GGUF's name of one of our tensors, or None."""
    return _translate(name, 1, "blk")


def _translate(name: str, column: int, layers: str) -> str | None:
    if match := LAYER.fullmatch(name):
        inner = INNER.get(match[2], ("", ""))[column]
        return f"{layers}.{match[1]}.{inner}.weight" if inner else None
    return OUTER[name][column] if name in OUTER else None


def to_rotate_half(name: str, weight: Tensor, head_dim: int) -> Tensor:
    """Our tensor in Hugging Face's layout: channel j of a head is paired with j + D/2."""
    return interleaved_to_half(weight, head_dim) if name.endswith(ROTARY) else weight


def to_interleaved(name: str, weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `to_rotate_half`: adjacent channels are paired."""
    return half_to_interleaved(weight, head_dim) if name.endswith(ROTARY) else weight
