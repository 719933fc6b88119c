"""The MiniMind decoder: token ids to hidden states, in the order in which the data flow.

Plain PyTorch in eager mode, without transformers. It runs alone:

    config = DecoderConfig(hidden_size=256, num_hidden_layers=4)
    decoder = Decoder(config).reset_parameters()
    hidden_BTE = decoder(torch.randint(config.vocab_size, (2, 64)))
    logits_BTV = hidden_BTE @ decoder.embed_tokens.weight.T  # embedding and output are tied

What a device and a compiler change is in kernels.py; padding, documents and caches are in
causal_lm.py. A tensor is named by its shape: B rows, T positions, S keys (cached ones included),
H query heads, K key/value heads, D channels per head, E model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimind.model.dropout import Dropout
from minimind.model.kernels import (
    AttentionMask,
    HeadNorm,
    HeadProjection,
    apply_rotary_real,
    flash_attention,
    half_heads,
    is_compiled,
    is_traced,
    recomputed,
    repeat_heads,
)
from minimind.model.rotary import Rotary, build_pos_cis, check_scaling, pos_cis_as_reals
from minimind.model.sequence import SequenceGroup
from minimind.model.sizes import feed_forward_width
from minimind.runtime.device import device_kind

INIT_STD = 0.02


@dataclass
class DecoderConfig:
    """Shape of the decoder, in the names of transformers."""

    vocab_size: int = 6400  # V
    hidden_size: int = 512  # E
    intermediate_size: int = 0  # of the feed-forward; 0: 8/3 E, rounded up
    num_hidden_layers: int = 8
    num_attention_heads: int = 8  # H
    num_key_value_heads: int = 2  # K, a divisor of H
    max_position_embeddings: int = 512
    head_dim: int = 0  # D; 0: E / H
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rope_scaling: dict[str, Any] | None = None  # of a context beyond the trained one (rotary.py)
    no_rope_layer_interval: int = 0  # every so many layers one does not rotate (SmolLM3)
    use_flash_attn: bool = True  # fused kernels instead of PlainAttention
    qkv_bias: bool = False  # of queries, keys and values (Qwen2); the output has none
    qk_norm: bool = False  # queries and keys are normalized before the rotation (Qwen3)

    def __post_init__(self) -> None:
        """Derive the widths that are 0; raise ValueError for a shape that cannot be built."""
        width, heads = self.hidden_size, self.num_attention_heads
        if not self.head_dim and width % heads:
            raise ValueError(
                f"hidden_size={width} cannot be divided by num_attention_heads={heads}."
            )
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={heads} cannot be divided by"
                f" num_key_value_heads={self.num_key_value_heads}."
            )
        self.head_dim = self.head_dim or width // heads
        self.intermediate_size = self.intermediate_size or feed_forward_width(width)
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} (by default hidden_size={width} / num_attention_heads="
                f"{heads}) must be even: rotary position rotates pairs of channels."
            )
        if self.rope_scaling is not None:
            check_scaling(self.head_dim, self.rope_theta, self.rope_scaling)

    @property
    def is_fused(self) -> bool:
        """Whether attention uses fused kernels, which return no weights."""
        return self.use_flash_attn


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean in fp32."""

    forward = recomputed(nn.RMSNorm.forward)


def apply_rotary(x_BTHD: Tensor, pos_cis: Tensor) -> Tensor:
    """Rotate x by pos_cis, complex64 (T, D/2) or (B, T, D/2); same shape and dtype.

    A pair of ADJACENT channels is one complex number, and is multiplied by that of its position.
    In fp32; in eager mode complex multiplication is the fastest form.
    """
    pairs = torch.view_as_complex(x_BTHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * pos_cis.unsqueeze(-2)).flatten(-2).type_as(x_BTHD)


def heads(
    x_BTE: Tensor, project: nn.Module, norm: nn.Module | None, rotary: Rotary | None, head_dim: int
) -> Tensor:
    """Queries or keys (B, T, H, D): projected, normalized if there is a norm, and rotated."""
    x_BTHD = project(x_BTE).unflatten(-1, (-1, head_dim))
    if norm is not None:
        x_BTHD = norm(x_BTHD)
    if rotary is None:
        return x_BTHD
    if rotary.cis is None:
        return apply_rotary_real(x_BTHD, rotary.reals)
    return apply_rotary(x_BTHD, rotary.cis)


class Attention(nn.Module):
    """Causal grouped-query attention: H / K query heads share a key/value head."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        width, head_dim, bias = config.hidden_size, config.head_dim, config.qkv_bias
        query_heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.layer, self.head_dim = config, layer, head_dim
        interval = config.no_rope_layer_interval
        self.rotates = not interval or (layer + 1) % interval != 0
        self.q_proj = HeadProjection(width, query_heads, head_dim, bias)
        self.k_proj = HeadProjection(width, key_heads, head_dim, bias)
        self.v_proj = nn.Linear(width, key_heads * head_dim, bias)
        self.o_proj = ResidualOutput(query_heads * head_dim, width)
        self.q_norm = HeadNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = HeadNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.plain = PlainAttention()

    def forward(
        self,
        x_BTE: Tensor,
        rotary: Rotary,
        mask: AttentionMask = None,
        cache: Any = None,
        sequence: SequenceGroup | None = None,
    ) -> Tensor:
        """Return (B, T, E). Without a mask attention is causal.

        Keys and values are added to the `cache` of transformers, if any. With `sequence` x and the
        result are of the positions of this rank, the mask of all.
        """
        is_half = self.rotates and cache is None and is_compiled()
        rotated: Callable[..., Tensor] = half_heads if is_half else heads
        at = rotary if self.rotates else None
        q_BTHD = rotated(x_BTE, self.q_proj, self.q_norm, at, self.head_dim)
        k_BTKD = rotated(x_BTE, self.k_proj, self.k_norm, at, self.head_dim)
        v_BTKD = self.v_proj(x_BTE).unflatten(-1, (-1, self.head_dim))
        if sequence is not None:
            q_BTHD, k_BTKD, v_BTKD = sequence.to_heads(q_BTHD, k_BTKD, v_BTKD)
        q_BHTD = q_BTHD.transpose(1, 2)
        k_BKSD, v_BKSD = k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(k_BKSD, v_BKSD, self.layer)
        if self.config.is_fused:
            out_BHTD = flash_attention(q_BHTD, k_BKSD, v_BKSD, mask)
        else:
            out_BHTD, _ = self.plain(q_BHTD, k_BKSD, v_BKSD, mask)
        out_BTHD = out_BHTD.transpose(1, 2)
        if sequence is not None:
            out_BTHD = sequence.to_positions(out_BTHD)
        return self.o_proj(out_BTHD.flatten(-2))


class PlainAttention(nn.Module):
    """Attention written out, equal to the fused kernels within rounding.

    A module without weights, so that its output can be captured.
    """

    def forward(
        self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return (B, H, T, D) and the weights (B, H, T, S); mask is boolean or additive."""
        k_BHSD, v_BHSD = repeat_heads(k_BKSD, q_BHTD), repeat_heads(v_BKSD, q_BHTD)
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

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualOutput(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Output (B, T, E)."""
        return self.down_proj(silu_gate(self.gate_proj(x_BTE), self.up_proj(x_BTE)))


@recomputed
def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    feed_forward: Callable[[Any], nn.Module] = FeedForward

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.feed_forward(config)

    def forward(self, x_BTE: Tensor, *context: Any, dropout: Dropout | None = None) -> Tensor:
        """Output (B, T, E); `context` is what Attention takes beside x.

        `dropout` has two places: the outputs of attention and of the feed-forward.
        """
        y_BTE = self.self_attn(self.input_layernorm(x_BTE), *context)
        x_BTE = x_BTE + (y_BTE if dropout is None else dropout(y_BTE, 0))
        y_BTE = self.mlp(self.post_attention_layernorm(x_BTE))
        return x_BTE + (y_BTE if dropout is None else dropout(y_BTE, 1))


class Decoder(nn.Module):
    """Token embedding, blocks and final norm, with the pos_cis table that all blocks share.

    pos_cis is complex64: its entry (t, j) turns the pair j of channels to position t. It is a
    buffer outside the state dict, because the configuration determines it. pos_reals has the same
    values for compiled code and for devices without complex numbers.
    """

    pos_cis: Tensor
    pos_reals: Tensor

    def __init__(self, config: Any):
        nn.Module.__init__(self)  # not super(): MiniMindModel has another base, set up before
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(map(self.make_block, range(config.num_hidden_layers)))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("pos_cis", self.build_pos_cis(), persistent=False)
        self.register_buffer("pos_reals", pos_cis_as_reals(self.pos_cis), persistent=False)

    def make_block(self, layer: int) -> nn.Module:
        """The block of a layer, from 0."""
        return Block(self.config, layer)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        *context: Any,
        also: list[Any] | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Return final hidden states (B, T, E) of token ids (B, T), or of embeddings (B, T, E).

        Positions begin at 0 if `rotary` is None; `context` is what Attention takes after it. A
        block with more outputs than its hidden states adds the others to `also`. `dropout` has the
        keys of tokens at 1 + 2 L places: the embedding, and two of each of L blocks.
        """
        x_BTE = x if x.is_floating_point() else self.embed_tokens(x)
        if rotary is None and is_traced():  # a graph is for any length: nothing to check
            rotary = self.rotary_at(torch.arange(x_BTE.shape[1], device=x_BTE.device))
        elif rotary is None:
            self.require_positions(x_BTE.shape[1])
            rotary = self.rotary_at(slice(x_BTE.shape[1]))
        if dropout is not None:
            x_BTE = dropout(x_BTE, 0)
        for layer, block in enumerate(self.layers):
            of_block = dropout and dropout.between(1 + 2 * layer, 3 + 2 * layer)
            x_BTE = block(x_BTE, rotary, *context, dropout=of_block)
            if also is not None:
                x_BTE, *others = x_BTE
                also.append(others)
        return self.norm(x_BTE)

    def require_positions(self, end: int) -> None:
        """Raise ValueError if the positions before `end` are more than the table has."""
        if end > len(self.pos_cis):
            raise ValueError(
                f"position {end - 1} is beyond max_position_embeddings={len(self.pos_cis)}:"
                " shorten the input or raise max_position_embeddings."
            )

    def rotary_at(self, index: Tensor | slice) -> Rotary:
        """Rotation at the positions `index`, without complex numbers in a graph for compilers."""
        reals = self.pos_reals[:, index]
        is_complex = self.pos_cis.device == reals.device and not is_traced()
        return Rotary(self.pos_cis[index] if is_complex else None, reals)

    def build_pos_cis(self) -> Tensor:
        """Build the complex64 table (max_position_embeddings, D/2) on the default device."""
        config = self.config
        return build_pos_cis(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Rebuild pos_cis when the module moves: .to(bfloat16) would drop its imaginary part, and
        .to_empty() would leave it uninitialized. It stays on the CPU where there are no complex
        operators.
        """

        def move(tensor: Tensor) -> Tensor:
            if not tensor.is_complex():
                return fn(tensor)
            device = fn(torch.empty(0, device=tensor.device)).device
            return self.build_pos_cis().to(device if device_kind(device).has_complex else "cpu")

        super()._apply(move, recurse)
        reals = pos_cis_as_reals(self.pos_cis)  # not rounded to the dtype of the weights
        self.pos_reals = reals.to(self.pos_reals.device)
        return self

    def reset_parameters(self) -> Self:
        """Draw all weights; return self."""
        for module in self.modules():
            draw_weights(module, self.config.num_hidden_layers)
        return self


class ResidualOutput(nn.Linear):
    """The output of a branch, which is added to the residual stream."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)


@torch.no_grad()
def draw_weights(module: nn.Module, layers: int) -> None:
    """Draw the tensors of a module: matrices normal with std 0.02, norms 1, biases 0.

    The residual stream sums 2 * layers branches, so their outputs are scaled by the inverse root of
    that (GPT-2, Radford et al. 2019, section 2.3).
    """
    if isinstance(module, ResidualOutput):
        nn.init.normal_(module.weight, std=INIT_STD / (2 * layers) ** 0.5)
    elif isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
