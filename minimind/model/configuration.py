"""The configuration of the decoder."""

from typing import Any, ClassVar

from transformers import PretrainedConfig

from minimind.model.rotary import check_scaling
from minimind.model.sizes import feed_forward_width


class MiniMindConfig(PretrainedConfig):
    """Shape of the model; dim, n_layers and the other short names are aliases.

    `doc_mask`: attention and positions restart at every eos_token_id, unless keys are cached.
    `qkv_bias`: queries, keys and values have biases (Qwen2), and the output has none.
    `no_rope_layer_interval`: every so many layers one does not rotate queries and keys (SmolLM3).
    `qk_norm`: queries and keys are normalized per head before the rotation (Qwen3). `use_moe`:
    every feed-forward is a mixture of experts, each of intermediate_size; else fields of experts
    are ignored. `rope_scaling`: of a context extended beyond the trained one (rotary.py).
    `use_flash_attn=False` means attn_implementation "eager", where none is given.
    """

    # In config.json only where they are given.
    rope_scaling: Any = None  # instead of transformers' property, which is deprecated
    qkv_bias = False
    no_rope_layer_interval = 0

    model_type = "minimind"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "hidden_dim": "intermediate_size",
        "max_seq_len": "max_position_embeddings",
    }

    def __init__(
        self,
        vocab_size: int = 6400,
        hidden_size: int = 512,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 8,
        num_key_value_heads: int = 2,
        max_position_embeddings: int = 512,
        head_dim: int | None = None,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 1e6,
        rope_scaling: dict[str, Any] | None = None,
        no_rope_layer_interval: int = 0,
        use_flash_attn: bool = True,
        doc_mask: bool = False,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        tie_word_embeddings: bool = True,
        use_moe: bool = False,
        n_routed_experts: int = 4,
        num_experts_per_tok: int = 2,
        n_shared_experts: int = 1,
        aux_loss_alpha: float = 0.01,
        norm_topk_prob: bool = True,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        pad_token_id: int | None = 3,
        use_cache: bool = True,
        **kwargs: Any,
    ):
        if kwargs.pop("rope_parameters", None) is not None:
            raise ValueError(
                "rope_parameters is not supported by MiniMind: give rope_theta and rope_scaling"
                " instead."
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        if head_dim is not None and head_dim * num_attention_heads != hidden_size:
            self.head_dim = head_dim
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        if rope_scaling is not None:  # null in config.json makes transformers warn
            self.rope_scaling = rope_scaling
        if no_rope_layer_interval:
            self.no_rope_layer_interval = no_rope_layer_interval
        if qkv_bias:
            self.qkv_bias = qkv_bias
        self.use_flash_attn = use_flash_attn
        self.doc_mask = doc_mask
        self.qk_norm = qk_norm
        self.tie_word_embeddings = tie_word_embeddings
        self.use_moe = use_moe
        self.n_routed_experts = n_routed_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.n_shared_experts = n_shared_experts
        self.aux_loss_alpha = aux_loss_alpha
        self.norm_topk_prob = norm_topk_prob
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.use_cache = use_cache
        if not use_flash_attn and kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = "eager"
        super().__init__(**kwargs)
        _check_shape(self)
        if self.intermediate_size is None:
            self.intermediate_size = feed_forward_width(self.hidden_size)

    @property
    def head_dim(self) -> int:
        """Channels per head; config.json has it if it is not hidden_size / num_attention_heads."""
        return self.__dict__.get("head_dim") or self.hidden_size // self.num_attention_heads

    @head_dim.setter
    def head_dim(self, value: int) -> None:
        self.__dict__["head_dim"] = value

    @property
    def is_fused(self) -> bool:
        """Whether attention uses fused kernels, which return no weights."""
        return self._attn_implementation != "eager"


def _check_shape(config: MiniMindConfig) -> None:
    width, heads, kv_heads = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    if config.doc_mask and config.eos_token_id is None:
        raise ValueError("doc_mask=True needs an eos_token_id, at which documents end.")
    if config.use_moe and not 0 < config.num_experts_per_tok <= config.n_routed_experts:
        raise ValueError(
            f"num_experts_per_tok={config.num_experts_per_tok} must be from 1 to"
            f" n_routed_experts={config.n_routed_experts}."
        )
    if "head_dim" not in vars(config) and width % heads:
        raise ValueError(f"hidden_size={width} cannot be divided by num_attention_heads={heads}.")
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} cannot be divided by num_key_value_heads={kv_heads}."
        )
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim={config.head_dim} (by default hidden_size={width} / num_attention_heads="
            f"{heads}) must be even: rotary position rotates pairs of channels."
        )
    if config.rope_scaling is not None:
        check_scaling(config.head_dim, config.rope_theta, config.rope_scaling)
