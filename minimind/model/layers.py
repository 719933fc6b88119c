"""The layers of the decoder: norm, attention, feed-forward and the block that joins them.

Shape letters: B rows, T positions, S keys (cached ones included), H query heads, K key/value heads,
D channels per head, E model width.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from minimind.model.activation_checkpointing import not_kept
from minimind.model.attention_kernels import blockwise_attention, document_attention
from minimind.model.attention_mask import Visible
from minimind.model.bf16_matmul import Linear, linear, widened
from minimind.model.configuration import MiniMindConfig
from minimind.model.experts import MixtureOfExperts
from minimind.model.rotary import in_halves, rotate, rotate_halves

CHOOSES = "cuda"
"""The kind of device that has several fused kernels of attention to choose from."""

# In the order they are asked. cuDNN's are planned for each shape anew, and come first for rows that
# are trained on, all of one shape. With a mask, or for a single query, they are not asked: there
# torch 2.13's give gradients that are no number (pytorch issue 196678) and wrong text (193893).
OF_ROWS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
OF_OTHERS = OF_ROWS[1:]


class RMSNorm(nn.Module):
    """x over its root mean square, times a weight; statistics in fp32 also for bf16 and fp16 x."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTE: Tensor) -> Tensor:
        """The same shape, in the dtype of x; the last dimension is normed."""
        return not_kept(partial(normed, eps=self.eps), x_BTE, self.weight)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root mean square of its last dimension, times the weight, in the shape of x."""
    return F.rms_norm(x, weight.shape, weight, eps)


class HeadNorm(RMSNorm):
    """The norm of every query or key, whose weight follows the order of their channels."""

    def forward(self, x_BTE: Tensor, is_split: bool = False) -> Tensor:
        """The same shape; is_split says that channels come as `in_halves` has them."""
        weight = in_halves(self.weight, len(self.weight)) if is_split else self.weight
        return normed(x_BTE, weight, self.eps)  # rotated at once: no copy need be kept


class HeadProjection(Linear):
    """The projection to queries or keys, with their channels in either order.

    Here and not in Attention, for ZeRO stage 3 has a weight only while its own module runs.
    """

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__(width, heads * head_dim)
        self.head_dim = head_dim

    def forward(self, input: Tensor, is_split: bool = False) -> Tensor:
        """(B, T, H, D) of input (B, T, E); is_split asks for channels as `in_halves` has them."""
        weight = in_halves(self.weight, self.head_dim) if is_split else self.weight
        return linear(input, weight).unflatten(-1, (-1, self.head_dim))


class ResidualOutput(Linear):
    """The projection that ends a branch and adds to the residual stream: it starts smaller."""


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share one key/value head."""

    def __init__(self, config: MiniMindConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.attend = flash_attention if config.use_flash_attn else reference_attention
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = HeadProjection(
            config.hidden_size, config.num_attention_heads, config.head_dim
        )
        self.k_proj = HeadProjection(
            config.hidden_size, config.num_key_value_heads, config.head_dim
        )
        self.v_proj = Linear(config.hidden_size, key_width)
        self.o_proj = ResidualOutput(query_width, config.hidden_size)
        eps = config.rms_norm_eps
        self.q_norm = HeadNorm(self.head_dim, eps) if config.qk_norm else None
        self.k_norm = HeadNorm(self.head_dim, eps) if config.qk_norm else None

    def forward(self, x_BTE: Tensor, turn: Tensor, visible: Visible, cache: Cache | None) -> Tensor:
        """(B, T, E); keys and values of x join the cache where there is one.

        turn is pos_cis of the positions, complex, or the same as reals for `rotate_halves`.
        """
        q_BTHD = self._turned(x_BTE, self.q_proj, self.q_norm, turn)
        k_BTKD = self._turned(x_BTE, self.k_proj, self.k_norm, turn)
        v_BTKD = self.v_proj(x_BTE).unflatten(-1, (-1, self.head_dim))
        k_BKSD, v_BKSD = k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(k_BKSD, v_BKSD, self.layer)
        k_BKSD, v_BKSD = widened(k_BKSD, v_BKSD)
        out_BHTD = self.attend(q_BTHD.transpose(1, 2), k_BKSD, v_BKSD, visible)
        return self.o_proj(out_BHTD.type_as(v_BTKD).transpose(1, 2).flatten(-2))

    @staticmethod
    def _turned(
        x_BTE: Tensor, project: HeadProjection, norm: HeadNorm | None, turn: Tensor
    ) -> Tensor:
        """(B, T, H, D): queries or keys where they stand."""
        is_split = not turn.is_complex()
        x_BTHD = project(x_BTE, is_split)
        if norm is not None:
            x_BTHD = norm(x_BTHD, is_split)
        return rotate_halves(x_BTHD, turn) if is_split else rotate(x_BTHD, turn)


def flash_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visible: Visible) -> Tensor:
    """(B, H, T, D) from torch's fused kernels; no mask tensor is built when visible is None.

    visible says which key a query may see, as bool (B or 1, 1, T, S) or added to the scores. None
    means causal over T == S positions or, for a single query, every key. No CUDA kernel but the
    slow one takes a mask and shared key heads together, in every precision: they are repeated.
    Blocks of documents are passed on to the kernels that skip what no query sees; compiled for a
    CPU, matrix products are faster than its fused kernel. Keys may be wider than queries: theirs is
    the precision in force.
    """
    is_causal = visible is None and q_BHTD.shape[2] > 1
    if is_causal and torch.compiler.is_compiling() and q_BHTD.device.type == "cpu":
        return blockwise_attention(q_BHTD, k_BKSD, v_BKSD)
    q_BHTD = q_BHTD.type_as(k_BKSD)
    if isinstance(visible, BlockMask):
        return document_attention(q_BHTD, k_BKSD, v_BKSD, visible)
    if visible is not None:
        k_BHSD, v_BHSD = _repeated(k_BKSD, q_BHTD), _repeated(v_BKSD, q_BHTD)
        return _fused(OF_OTHERS, q_BHTD, k_BHSD, v_BHSD, attn_mask=visible)
    kernels = OF_ROWS if is_causal else OF_OTHERS
    return _fused(kernels, q_BHTD, k_BKSD, v_BKSD, is_causal=is_causal, enable_gqa=True)


def _fused(
    kernels: list[SDPBackend], q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, **options: Any
) -> Tensor:
    """(B, H, T, D): torch's fused attention, on a GPU by the first of `kernels` that can do it.

    Said here and not once for all layers: a block that is computed again for its backward pass has
    to take the same kernel.
    """
    if q_BHTD.device.type != CHOOSES:
        return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, **options)
    with sdpa_kernel(kernels, set_priority=True):
        return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, **options)


def _repeated(x_BKSD: Tensor, q_BHTD: Tensor) -> Tensor:
    """(B, H, S, D): each key/value head once for every query head that shares it."""
    return x_BKSD.repeat_interleave(q_BHTD.shape[1] // x_BKSD.shape[1], dim=1)


def reference_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visible: Visible) -> Tensor:
    """What flash_attention gives within rounding, with every intermediate in sight."""
    assert not isinstance(visible, BlockMask)  # they are for fused kernels alone
    k_BHSD, v_BHSD = _repeated(k_BKSD, q_BHTD), _repeated(v_BKSD, q_BHTD)
    scores_BHTS = q_BHTD.type_as(k_BHSD) @ k_BHSD.transpose(-2, -1) * q_BHTD.shape[-1] ** -0.5
    if visible is None and q_BHTD.shape[2] > 1:
        visible = torch.ones_like(scores_BHTS[0, 0], dtype=torch.bool).tril()
    if visible is not None:
        scores_BHTS = torch.where(visible, scores_BHTS, float("-inf"))
    return scores_BHTS.softmax(-1, dtype=torch.float32).type_as(v_BHSD) @ v_BHSD


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): a gate of SiLU units, without biases."""

    def __init__(self, width: int, hidden_width: int):
        super().__init__()
        self.gate_proj = Linear(width, hidden_width)
        self.up_proj = Linear(width, hidden_width)
        self.down_proj = ResidualOutput(hidden_width, width)

    def forward(self, x_BTE: Tensor) -> Tensor:
        """(B, T, E)."""
        gate, up = self.gate_proj(x_BTE), self.up_proj(x_BTE)
        return self.down_proj(not_kept(gated, gate, up))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The units of a feed-forward, in the shape of both."""
    return F.silu(gate) * up


class Block(GradientCheckpointingLayer):
    """Attention, then feed-forward; each reads a normed copy and adds to the residual stream.

    With gradient checkpointing its input is all that is kept of it for the backward pass.
    """

    def __init__(self, config: MiniMindConfig, layer: int):
        super().__init__()
        assert config.intermediate_size is not None
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        expert = partial(FeedForward, config.hidden_size, config.intermediate_size)
        self.mlp = MixtureOfExperts(config, expert) if config.use_moe else expert()

    def forward(
        self, x_BTE: Tensor, turn: Tensor, visible: Visible, cache: Cache | None
    ) -> tuple[Tensor, ...]:
        """(B, T, E), and while experts train what Routing has.

        Flat: a reentrant checkpoint sees no gradient in a tuple within.
        """
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), turn, visible, cache)
        normed_BTE = self.post_attention_layernorm(x_BTE)
        if not isinstance(self.mlp, MixtureOfExperts):
            return (x_BTE + self.mlp(normed_BTE),)
        y_BTE, *routing = self.mlp(normed_BTE)
        return x_BTE + y_BTE, *routing
