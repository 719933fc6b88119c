"""MiniMind2's dense model, written from its published definition: what its weights have to mean.

RMSNorm before each branch, rotations by complex numbers of adjacent channels, key/value heads each
shared by n_heads / n_kv_heads query heads, SwiGLU, a head that is the embedding. Names are those of
its files. Nothing of this package is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    dim: int = 32
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = 512
    multiple_of: int = 24
    norm_eps: float = 1e-5
    rope_theta: float = 1e4
    max_seq_len: int = 64

    @property
    def hidden_dim(self) -> int:
        least = int(2 * (4 * self.dim) / 3)
        return self.multiple_of * ((least + self.multiple_of - 1) // self.multiple_of)


def random_weights(shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """As training leaves them: no norm is 1 all over."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) / math.sqrt(columns)

    def norm() -> Tensor:
        return 1 + 0.3 * torch.randn(shape.dim, generator=draw)

    keys = shape.dim // shape.n_heads * shape.n_kv_heads
    found = {"tok_embeddings.weight": matrix(shape.vocab_size, shape.dim)}
    for n in range(shape.n_layers):
        found |= {
            f"layers.{n}.attention.wq.weight": matrix(shape.dim, shape.dim),
            f"layers.{n}.attention.wk.weight": matrix(keys, shape.dim),
            f"layers.{n}.attention.wv.weight": matrix(keys, shape.dim),
            f"layers.{n}.attention.wo.weight": matrix(shape.dim, shape.dim),
            f"layers.{n}.attention_norm.weight": norm(),
            f"layers.{n}.ffn_norm.weight": norm(),
            f"layers.{n}.feed_forward.w1.weight": matrix(shape.hidden_dim, shape.dim),
            f"layers.{n}.feed_forward.w2.weight": matrix(shape.dim, shape.hidden_dim),
            f"layers.{n}.feed_forward.w3.weight": matrix(shape.hidden_dim, shape.dim),
        }
    return {**found, "norm.weight": norm(), "output.weight": found["tok_embeddings.weight"]}


def logits(shape: Shape, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """(B, T, V) for token ids (B, T)."""
    length = ids.shape[1]
    x = weights["tok_embeddings.weight"][ids]
    width = shape.dim // shape.n_heads
    rates = 1 / shape.rope_theta ** (torch.arange(0, width, 2).double() / width)
    angles = torch.outer(torch.arange(length).double(), rates)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    for n in range(shape.n_layers):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if f"layers.{n}." in name}
        x = x + _attention(shape, own, _normed(shape, x, own["attention_norm.weight"]), turn)
        y = _normed(shape, x, own["ffn_norm.weight"])
        gate = y @ own["feed_forward.w1.weight"].T
        inner = gate * torch.sigmoid(gate) * (y @ own["feed_forward.w3.weight"].T)
        x = x + inner @ own["feed_forward.w2.weight"].T
    return _normed(shape, x, weights["norm.weight"]) @ weights["output.weight"].T


def _normed(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.norm_eps) * weight


def _attention(shape: Shape, own: dict[str, Tensor], x: Tensor, turn: Tensor) -> Tensor:
    rows, length, _ = x.shape
    q = (x @ own["attention.wq.weight"].T).view(rows, length, shape.n_heads, -1)
    k = (x @ own["attention.wk.weight"].T).view(rows, length, shape.n_kv_heads, -1)
    v = (x @ own["attention.wv.weight"].T).view(rows, length, shape.n_kv_heads, -1)
    q, k = _rotated(q, turn), _rotated(k, turn)
    out = torch.empty_like(q)
    shared_by = shape.n_heads // shape.n_kv_heads
    for head in range(shape.n_heads):
        keys, values = k[:, :, head // shared_by], v[:, :, head // shared_by]
        scores = q[:, :, head] @ keys.transpose(1, 2) / math.sqrt(q.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        out[:, :, head] = scores.masked_fill(future, -math.inf).softmax(-1) @ values
    return out.flatten(2) @ own["attention.wo.weight"].T


def _rotated(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn[None, :, None]).flatten(3)
