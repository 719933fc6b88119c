"""The layers of the decoder: norm, attention, feed-forward and the block that joins them.

Apart from `decoder.py`: transformers reads the source of a model's module, and one with a class
of attention counts as unable to choose its implementation.

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

from minimind.model.activation_checkpointing import is_compiled, is_traced, recompute_if_compiled
from minimind.model.attention import (
    AttentionMask,
    SequenceGroup,
    blockwise_attention,
    document_attention,
    has_grouped_kernel,
)
from minimind.model.configuration import MiniMindConfig
from minimind.model.experts import MixtureOfExperts
from minimind.model.rotary import (
    Rotary,
    apply_rotary,
    apply_rotary_half,
    apply_rotary_traced,
    interleaved_to_half,
)
from minimind.runtime.device import CUDA

KERNEL_DEVICE = CUDA.name  # has several fused attention kernels to choose from

# In order of priority. cuDNN plans its kernels for each shape, so it comes first for the causal
# attention of training, which has one shape. Not with a mask or a single query: there torch 2.13
# gives NaN gradients (pytorch issue 196678) and wrong text (193893).
CAUSAL_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MASKED_KERNELS = CAUSAL_KERNELS[1:]


class RMSNorm(nn.Module):
    """Root mean square norm with a weight; statistics in fp32 for any dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Normalize the last dimension; same shape and dtype."""
        return recompute_if_compiled(partial(rms_norm, eps=self.eps), x_BTE, self.weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """F.rms_norm over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


class HeadNorm(RMSNorm):
    """Norm of each query or key head; its weight follows the channel layout."""

    def forward(self, x_BTE: Tensor, is_half: bool = False) -> Tensor:
        """Normalize; is_half: channels are in the half layout."""
        weight = interleaved_to_half(self.weight, len(self.weight)) if is_half else self.weight
        return rms_norm(x_BTE, weight, self.eps)  # rotated next, so no copy is saved


class HeadProjection(nn.Linear):
    """Projection to queries or keys, with channels in either layout.

    A module of its own, because ZeRO stage 3 gathers a weight only while its module runs.
    """

    def __init__(self, width: int, heads: int, head_dim: int, bias: bool):
        super().__init__(width, heads * head_dim, bias)
        self.head_dim = head_dim

    def forward(self, input: Tensor, is_half: bool = False) -> Tensor:
        """Project (B, T, E) to (B, T, H D); is_half: in the half layout."""
        weight, bias = self.weight, self.bias
        if is_half:
            weight = interleaved_to_half(weight, self.head_dim)
            bias = None if bias is None else interleaved_to_half(bias, self.head_dim)
        return F.linear(input, weight, bias)


class ResidualOutput(nn.Linear):
    """Output projection of a residual branch, initialized with a smaller std."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Causal grouped-query attention: H / K query heads share a key/value head."""

    def __init__(self, config: MiniMindConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.config = config
        self.head_dim = config.head_dim
        interval = config.no_rope_layer_interval
        self.rotates = not interval or (layer + 1) % interval != 0
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        project = partial(
            HeadProjection, config.hidden_size, head_dim=config.head_dim, bias=config.qkv_bias
        )
        self.q_proj = project(config.num_attention_heads)
        self.k_proj = project(config.num_key_value_heads)
        self.v_proj = nn.Linear(config.hidden_size, key_width, config.qkv_bias)
        self.o_proj = ResidualOutput(query_width, config.hidden_size)
        eps = config.rms_norm_eps
        self.q_norm = HeadNorm(self.head_dim, eps) if config.qk_norm else None
        self.k_norm = HeadNorm(self.head_dim, eps) if config.qk_norm else None

    def forward(
        self,
        x_BTE: Tensor,
        rotary: Rotary,
        mask: AttentionMask,
        cache: Cache | None,
        sequence: SequenceGroup | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (B, T, E) and the weights (B, H, T, S), None if fused; add keys and values,
        interleaved, to the cache, if any.

        With `sequence` x and the result are of the positions of this rank, the mask of all.
        """
        is_half = self.rotates and is_compiled() and cache is None
        q_BTHD = self._project(x_BTE, self.q_proj, self.q_norm, rotary, is_half)
        k_BTKD = self._project(x_BTE, self.k_proj, self.k_norm, rotary, is_half)
        v_BTKD = self.v_proj(x_BTE).unflatten(-1, (-1, self.head_dim))
        if sequence is not None:
            q_BTHD, k_BTKD, v_BTKD = sequence.to_heads(q_BTHD, k_BTKD, v_BTKD)
        k_BKSD, v_BKSD = k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(k_BKSD, v_BKSD, self.layer)
        q_BHTD, weights_BHTS = q_BTHD.transpose(1, 2), None
        if self.config.is_fused:
            out_BHTD = flash_attention(q_BHTD, k_BKSD, v_BKSD, mask)
        else:
            out_BHTD, weights_BHTS = reference_attention(q_BHTD, k_BKSD, v_BKSD, mask)
        out_BTHD = out_BHTD.transpose(1, 2)
        if sequence is not None:
            out_BTHD = sequence.to_positions(out_BTHD)
        return self.o_proj(out_BTHD.flatten(-2)), weights_BHTS

    def _project(
        self,
        x_BTE: Tensor,
        project: HeadProjection,
        norm: HeadNorm | None,
        rotary: Rotary,
        is_half: bool,
    ) -> Tensor:
        """Project, normalize and, if this layer does, rotate queries or keys (B, T, H, D).

        They are in the half layout or not.
        """
        # Under tensor parallelism `project` is DeepSpeed's, which has one argument and some heads.
        x_BTH = project(x_BTE, is_half) if is_half else project(x_BTE)
        x_BTHD = x_BTH.unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            x_BTHD = norm(x_BTHD, is_half)
        if not self.rotates:
            return x_BTHD
        if is_half:
            return apply_rotary_half(x_BTHD, rotary.reals)
        if is_traced() or rotary.cis is None:
            return apply_rotary_traced(x_BTHD, rotary.reals)
        return apply_rotary(x_BTHD, rotary.cis)


def flash_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: AttentionMask) -> Tensor:
    """Attention (B, H, T, D) by fused kernels; no mask tensor is built if mask is None.

    mask is boolean or additive, (B or 1, 1, T, S). None means causal over T == S positions or, for
    a single query, all keys. With a mask, and in fp32 on a GPU, key heads are repeated: only the
    slow CUDA kernel combines these with grouped heads. A BlockMask uses flex attention. Compiled
    for a CPU, matrix products are faster than its fused kernel. Keys may have a wider dtype than
    queries, which is then used.
    """
    is_causal = mask is None and bool(q_BHTD.shape[2] > 1)  # torch.jit.trace has tensors as sizes
    if is_causal and is_compiled() and q_BHTD.device.type == "cpu":
        return blockwise_attention(q_BHTD, k_BKSD, v_BKSD)
    if isinstance(mask, BlockMask):
        return document_attention(q_BHTD, k_BKSD, v_BKSD, mask)
    if mask is not None:
        k_BHSD, v_BHSD = _repeat_kv(k_BKSD, q_BHTD), _repeat_kv(v_BKSD, q_BHTD)
        return _fused(MASKED_KERNELS, q_BHTD, k_BHSD, v_BHSD, attn_mask=mask)
    kernels = CAUSAL_KERNELS if is_causal else MASKED_KERNELS
    if q_BHTD.device.type == KERNEL_DEVICE and not has_grouped_kernel(q_BHTD):
        k_BHSD, v_BHSD = _repeat_kv(k_BKSD, q_BHTD), _repeat_kv(v_BKSD, q_BHTD)
        return _fused(kernels, q_BHTD, k_BHSD, v_BHSD, is_causal=is_causal)
    return _fused(kernels, q_BHTD, k_BKSD, v_BKSD, is_causal=is_causal, enable_gqa=True)


def _fused(
    kernels: list[SDPBackend], q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, **options: Any
) -> Tensor:
    """Fused attention (B, H, T, D), on a GPU by the first of `kernels` that supports it.

    Selected per call, so that a recomputed block uses the same kernel in its backward pass.
    """
    if q_BHTD.device.type != KERNEL_DEVICE:
        return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, **options)
    with sdpa_kernel(kernels, set_priority=True):
        return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, **options)


def _repeat_kv(x_BKSD: Tensor, q_BHTD: Tensor) -> Tensor:
    """Repeat key/value heads for the query heads that share them (B, H, S, D)."""
    groups = q_BHTD.shape[1] // x_BKSD.shape[1]
    return x_BKSD if groups == 1 else x_BKSD.repeat_interleave(groups, dim=1)


def reference_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """Plain attention, equal to flash_attention within rounding, and its weights (B, H, T, S)."""
    assert not isinstance(mask, BlockMask)  # made for fused kernels only
    k_BHSD, v_BHSD = _repeat_kv(k_BKSD, q_BHTD), _repeat_kv(v_BKSD, q_BHTD)
    scores_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) * q_BHTD.shape[-1] ** -0.5
    if mask is None and q_BHTD.shape[2] > 1:
        mask = torch.ones_like(scores_BHTS[0, 0], dtype=torch.bool).tril()
    if mask is not None and mask.is_floating_point():
        scores_BHTS = scores_BHTS + mask
    elif mask is not None:
        scores_BHTS = torch.where(mask, scores_BHTS, float("-inf"))
    weights_BHTS = scores_BHTS.softmax(-1, dtype=torch.float32).type_as(v_BHSD)
    return weights_BHTS @ v_BHSD, weights_BHTS


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020) without biases."""

    def __init__(self, width: int, hidden_width: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden_width, bias=False)
        self.up_proj = nn.Linear(width, hidden_width, bias=False)
        self.down_proj = ResidualOutput(hidden_width, width)

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Output (B, T, E)."""
        gate, up = self.gate_proj(x_BTE), self.up_proj(x_BTE)
        return self.down_proj(recompute_if_compiled(silu_gate, gate, up))


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


class Block(GradientCheckpointingLayer):
    """Pre-norm attention and feed-forward, each added to the residual stream.

    With gradient checkpointing only its input is saved for the backward pass.
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
        self,
        x_BTE: Tensor,
        rotary: Rotary,
        mask: AttentionMask,
        cache: Cache | None,
        sequence: SequenceGroup | None = None,
    ) -> tuple[Tensor, ...]:
        """Output (B, T, E), followed by the fields of Routing while experts train.

        Flat, because reentrant checkpointing finds no gradient in a nested tuple.
        """
        x_BTE, normed_BTE = self._attend(x_BTE, rotary, mask, cache, sequence)
        if not isinstance(self.mlp, MixtureOfExperts):
            return (x_BTE + self.mlp(normed_BTE),)
        y_BTE, *routing = self.mlp(normed_BTE)
        return x_BTE + y_BTE, *routing

    def _attend(
        self,
        x_BTE: Tensor,
        rotary: Rotary,
        mask: AttentionMask,
        cache: Cache | None,
        sequence: SequenceGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """Add the attention; return the residual stream and the input of the feed-forward."""
        normed_BTE = self.input_layernorm(x_BTE)
        x_BTE = x_BTE + self.self_attn(normed_BTE, rotary, mask, cache, sequence)[0]
        return x_BTE, self.post_attention_layernorm(x_BTE)

    def compiled_methods(self) -> list[tuple[nn.Module, str]]:
        """Methods that --compile compiles: all, except for the routed experts."""
        if isinstance(self.mlp, MixtureOfExperts):
            return [(self, "_attend"), *self.mlp.compiled_methods()]
        return [(self, "forward")]
