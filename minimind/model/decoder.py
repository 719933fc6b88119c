"""The MiniMind decoder: its layers, its initialisation and its Hugging Face face.

Shape letters: B rows, T positions, S keys (cached ones included), H query heads, K key/value heads,
D channels per head, E model width, V vocabulary.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_outputs import CausalLMOutputWithPast

from minimind.model.configuration import MiniMindConfig
from minimind.model.document_attention import document_attention
from minimind.model.loss import IGNORED, next_token_loss
from minimind.model.rotary import build_pos_cis, rotate
from minimind.model.visibility import Visible, document_starts, own_positions, visible_in_layers


class RMSNorm(nn.Module):
    """x over its root mean square, times a weight; statistics in fp32 also for bf16 and fp16 x."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTE: Tensor) -> Tensor:
        """(B, T, E) in the dtype of x."""
        return F.rms_norm(x_BTE, self.weight.shape, self.weight, self.eps)


class ResidualOutput(nn.Linear):
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
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = ResidualOutput(query_width, config.hidden_size, bias=False)

    def forward(
        self, x_BTE: Tensor, pos_cis: Tensor, visible: Visible, cache: Cache | None
    ) -> Tensor:
        """(B, T, E); keys and values of x join the cache where there is one."""
        heads = (-1, self.head_dim)
        q_BTHD = rotate(self.q_proj(x_BTE).unflatten(-1, heads), pos_cis)
        k_BTKD = rotate(self.k_proj(x_BTE).unflatten(-1, heads), pos_cis)
        v_BTKD = self.v_proj(x_BTE).unflatten(-1, heads)
        k_BKSD, v_BKSD = k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(k_BKSD, v_BKSD, self.layer)
        out_BHTD = self.attend(q_BTHD.transpose(1, 2), k_BKSD, v_BKSD, visible)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(-2))


def flash_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visible: Visible) -> Tensor:
    """(B, H, T, D) from torch's fused kernels; no mask tensor is built when visible is None.

    visible says which key a query may see, as bool (B or 1, 1, T, S) or added to the scores. None
    means causal over T == S positions or, for a single query, every key. No CUDA kernel but the
    slow one takes a mask and shared key heads together, in every precision: they are repeated.
    Blocks of documents are passed on to the kernels that skip what no query sees.
    """
    if isinstance(visible, BlockMask):
        return document_attention(q_BHTD, k_BKSD, v_BKSD, visible)
    if visible is not None:
        k_BHSD, v_BHSD = _repeated(k_BKSD, q_BHTD), _repeated(v_BKSD, q_BHTD)
        return F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=visible)
    is_causal = q_BHTD.shape[2] > 1
    return F.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSD, is_causal=is_causal, enable_gqa=True
    )


def _repeated(x_BKSD: Tensor, q_BHTD: Tensor) -> Tensor:
    """(B, H, S, D): each key/value head once for every query head that shares it."""
    return x_BKSD.repeat_interleave(q_BHTD.shape[1] // x_BKSD.shape[1], dim=1)


def reference_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visible: Visible) -> Tensor:
    """What flash_attention gives within rounding, with every intermediate in sight."""
    assert not isinstance(visible, BlockMask)  # they are for fused kernels alone
    k_BHSD, v_BHSD = _repeated(k_BKSD, q_BHTD), _repeated(v_BKSD, q_BHTD)
    scores_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) * q_BHTD.shape[-1] ** -0.5
    if visible is None and q_BHTD.shape[2] > 1:
        visible = torch.ones_like(scores_BHTS[0, 0], dtype=torch.bool).tril()
    if visible is not None:
        scores_BHTS = torch.where(visible, scores_BHTS, float("-inf"))
    return scores_BHTS.softmax(-1, dtype=torch.float32).type_as(v_BHSD) @ v_BHSD


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): a gate of SiLU units, without biases."""

    def __init__(self, width: int, hidden_width: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden_width, bias=False)
        self.up_proj = nn.Linear(width, hidden_width, bias=False)
        self.down_proj = ResidualOutput(hidden_width, width, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        """(B, T, E)."""
        return self.down_proj(F.silu(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))


class Block(nn.Module):
    """Attention, then feed-forward; each reads a normed copy and adds to the residual stream."""

    def __init__(self, config: MiniMindConfig, layer: int):
        super().__init__()
        assert config.intermediate_size is not None
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(
        self, x_BTE: Tensor, pos_cis: Tensor, visible: Visible, cache: Cache | None
    ) -> Tensor:
        """(B, T, E)."""
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), pos_cis, visible, cache)
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class MiniMindModel(nn.Module):
    """Token embedding, blocks and final norm, with the one pos_cis table all blocks share.

    pos_cis is complex64 and no part of the state dict: three numbers of the configuration
    determine it, so a checkpoint cannot disagree with them.
    """

    pos_cis: Tensor

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("pos_cis", self.build_pos_cis(), persistent=False)

    def build_pos_cis(self) -> Tensor:
        """A fresh complex64 (max_position_embeddings, D/2) table on the default device."""
        config = self.config
        return build_pos_cis(config.head_dim, config.max_position_embeddings, config.rope_theta)

    def _apply(self, fn: Any, recurse: bool = True) -> "MiniMindModel":
        """Rebuild pos_cis wherever the module moves: .to(bfloat16) would drop its imaginary part,
        and .to_empty() would leave it uninitialised.
        """

        def move(tensor: Tensor) -> Tensor:
            if not tensor.is_complex():
                return fn(tensor)
            device = fn(torch.empty(0, device=tensor.device)).device
            return self.build_pos_cis().to(device)

        super()._apply(move, recurse)
        return self

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Final hidden states (B, T, E); the arguments are those of MiniMindForCausalLM."""
        rows, length = input_ids.shape
        past = cache.get_seq_length() if cache is not None else 0
        if attention_mask is not None and attention_mask.shape != (rows, past + length):
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} must be"
                f" {(rows, past + length)}: one entry per position, cached ones included."
            )
        border = self.config.eos_token_id if self.config.doc_mask and cache is None else None
        starts_BT = None if border is None else document_starts(input_ids, attention_mask, border)
        is_below = (
            position_ids is None and attention_mask is None
        )  # past + length, and not read back
        if position_ids is None:
            position_ids = own_positions(past, attention_mask, starts_BT)
        end = past + length if is_below or position_ids is None else int(position_ids.max()) + 1
        pos_cis = self._pos_cis_at(past, end, position_ids)
        x_BTE = self.embed_tokens(input_ids)
        visible = visible_in_layers(self.config, x_BTE, past, attention_mask, starts_BT)
        for block in self.layers:
            x_BTE = block(x_BTE, pos_cis, visible, cache)
        return self.norm(x_BTE)

    def _pos_cis_at(self, past: int, end: int, position_ids: Tensor | None) -> Tensor:
        """(T, D/2) for the positions from past to end, (B, T, D/2) for given ones below end."""
        if end > len(self.pos_cis):
            raise ValueError(
                f"position {end - 1} is beyond max_position_embeddings={len(self.pos_cis)}:"
                " shorten the input or raise max_position_embeddings."
            )
        return self.pos_cis[past:end] if position_ids is None else self.pos_cis[position_ids]


class MiniMindForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with its output projection, trainable by our loop and by Hugging Face tools."""

    config_class = MiniMindConfig
    config: MiniMindConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = False  # Trainer divides by the accumulation steps, not forward
    _no_split_modules = {"Block"}  # noqa: RUF012 (declared mutable by the base class)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (likewise)
    # DDP broadcasts buffers, and NCCL refuses complex numbers (gloo does not).
    _ddp_params_and_buffers_to_ignore: ClassVar[list[str]] = ["model.pos_cis"]

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Fill what the module itself owns: matrices from a normal of 0.02, norms with 1.

        2 * n_layers branches add up in the residual stream, so the projections that end one are
        divided by the root of that (GPT-2, Radford et al. 2019, section 2.3). `initialization`
        skips what a checkpoint has filled. That is never pos_cis, so from_pretrained, which
        builds on the meta device, gets its values here. transformers passes over modules that own
        no tensor, such as Attention: what they hold cannot be drawn from there.
        """
        std = 0.02
        if isinstance(module, ResidualOutput):
            branches = 2 * self.config.num_hidden_layers
            initialization.normal_(module.weight, std=std / branches**0.5)
        elif isinstance(module, nn.Linear | nn.Embedding):
            initialization.normal_(module.weight, std=std)
        elif isinstance(module, RMSNorm):
            initialization.ones_(module.weight)
        elif isinstance(module, MiniMindModel):
            initialization.copy_(module.pos_cis, module.build_pos_cis())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), or (B, logits_to_keep, V) for the last positions when that is not 0.

        attention_mask (B, S) is 0 at padding, which may stand on the left; without position_ids,
        positions count the others. shift_labels (B, T) are targets already shifted; labels (B, T)
        are input_ids, shifted here. Targets of -100 are ignored, and the loss is the mean over the
        rest (0 where none is left). Other keywords, which Hugging Face's tools pass, are ignored.
        """
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        x_BTE = self.model(input_ids, attention_mask, position_ids, past_key_values)
        logits = self.lm_head(x_BTE[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            if shift_labels is not None:
                raise ValueError("labels and shift_labels were both given: give one of them.")
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if shift_labels is not None:
            loss_sum, count = next_token_loss(logits, shift_labels)
            loss = loss_sum / count.clamp(min=1)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
