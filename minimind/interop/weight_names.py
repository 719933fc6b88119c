"""What a weight is called elsewhere, and how its channels are laid out there: one tensor at a time.

Ours are Hugging Face Llama's names with ADJACENT rotary pairs (rotary.py). Elsewhere:

    MiniMind2    names of its own, adjacent pairs: nothing moves
    Llama        our names; channel j is paired with j + D/2, so the rows of q and k move
    Qwen3        the same, and the weights of the norms of q and k move with them
    GGUF         names of its own; "llama" has adjacent pairs, "qwen3" pairs j with j + D/2

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
# Tables that some of its files carry, and that the configuration determines.
MINIMIND2_TABLES = re.compile(r"pos_cis|layers\.\d{1,6}\.attention\.mask")

# Ours, MiniMind2's, GGUF's; the last four inside a layer have no name in MiniMind2.
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
TURNED = tuple(f"self_attn.{side}.weight" for side in ("q_proj", "k_proj", "q_norm", "k_norm"))
_OURS = {theirs[0]: ours for ours, theirs in INNER.items() if theirs[0]}
_OURS_OUTER = {theirs[0]: ours for ours, theirs in OUTER.items()}


def from_minimind2(name: str) -> str | None:
    """Our name of a weight of MiniMind2's; None where it has none."""
    if found := MINIMIND2_LAYER.fullmatch(name):
        inner = _OURS.get(found[2])
        return f"model.layers.{found[1]}.{inner}.weight" if inner else None
    return _OURS_OUTER.get(name)


def to_minimind2(name: str) -> str | None:
    """MiniMind2's name of a weight of ours; None where it has none."""
    if found := LAYER.fullmatch(name):
        theirs, _ = INNER.get(found[2], ("", ""))
        return f"layers.{found[1]}.{theirs}.weight" if theirs else None
    return OUTER[name][0] if name in OUTER else None


def to_gguf(name: str) -> str | None:
    """GGUF's name of a weight of ours; None where it has none."""
    if found := LAYER.fullmatch(name):
        _, theirs = INNER.get(found[2], ("", ""))
        return f"blk.{found[1]}.{theirs}.weight" if theirs else None
    return OUTER[name][1] if name in OUTER else None


def to_halves(name: str, weight: Tensor, head_dim: int) -> Tensor:
    """A weight of ours as Hugging Face has it: channel j of a head beside j + D/2, not j + 1."""
    return interleaved_to_half(weight, head_dim) if name.endswith(TURNED) else weight


def from_halves(name: str, weight: Tensor, head_dim: int) -> Tensor:
    """The way back, exactly: numbers move, and none changes."""
    return half_to_interleaved(weight, head_dim) if name.endswith(TURNED) else weight
