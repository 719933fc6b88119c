"""The configuration of the decoder for transformers."""

from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PretrainedConfig

from minimind.model.decoder import DecoderConfig


class MiniMindConfig(PretrainedConfig, DecoderConfig):
    """Shape of the model, as in DecoderConfig; dim, n_layers and the other short names are aliases.

    `doc_mask`: attention and positions restart at every eos_token_id, unless keys are cached.
    `use_moe`: every feed-forward is a mixture of experts, each of intermediate_size; else fields of
    experts are ignored. `use_flash_attn=False` means attn_implementation "eager", where none is
    given.
    """

    rope_scaling: Any = None  # again: instead of transformers' property, which is deprecated
    doc_mask: bool = False
    tie_word_embeddings: bool = True
    use_moe: bool = False
    n_routed_experts: int = 4
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    aux_loss_alpha: float = 0.01
    norm_topk_prob: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    pad_token_id: int | None = 3
    use_cache: bool = True

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

    if TYPE_CHECKING:  # fields of transformers and short names are arguments, too

        def __init__(self, **fields: Any) -> None: ...

    def __post_init__(self, **kwargs: Any) -> None:
        """Apply the short names, then derive and check the shape."""
        if kwargs.pop("rope_parameters", None) is not None:
            raise ValueError(
                "rope_parameters is not supported by MiniMind: give rope_theta and rope_scaling"
                " instead."
            )
        if not self.use_flash_attn and kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = "eager"
        PretrainedConfig.__post_init__(self, **kwargs)
        DecoderConfig.__post_init__(self)
        if self.rope_scaling is None:
            del self.rope_scaling  # of the instance: a null in config.json makes transformers warn
        if self.doc_mask and self.eos_token_id is None:
            raise ValueError("doc_mask=True needs an eos_token_id, at which documents end.")
        if self.use_moe and not 0 < self.num_experts_per_tok <= self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be from 1 to"
                f" n_routed_experts={self.n_routed_experts}."
            )

    @property
    def is_fused(self) -> bool:
        """Whether attention uses fused kernels, which return no weights."""
        return self._attn_implementation != "eager"
