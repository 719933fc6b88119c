"""Flags of the model: its shape and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass

from minimind.config.training_flags import flag

MOST_EXPERTS = 1024  # per layer
MAX_ROPE_FACTOR = 1024  # also MAX_FACTOR of the model, which does not import this package
HUGGING_FACE = "hf:"  # prefix of --model for a model of transformers
SHAPE = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "hidden_dim",
    "max_seq_len",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rope_factor",
    "rope_original_length",
    "norm_eps",
    "qk_norm",
    "tie_word_embeddings",
    "use_moe",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "aux_loss_alpha",
    "norm_topk_prob",
)


@dataclass(frozen=True)
class ModelFlags:
    """Flags of the model."""

    model: str | None = flag(
        "preset (configs/models/*.yaml) or YAML file, overridden by the shape flags; or hf:DIR,"
        " the model that transformers builds from DIR/config.json, randomly initialized unless"
        " --init_from is given",
        None,
        "model",
    )
    dim: int = flag("width of the residual stream", 512, "model", at_least=1)
    n_layers: int = flag("decoder blocks", 8, "model", at_least=1)
    n_heads: int = flag("query heads", 8, "model", at_least=1)
    n_kv_heads: int = flag(
        "key/value heads, shared by groups of query heads", 2, "model", at_least=1
    )
    hidden_dim: int | None = flag(
        "width of the feed-forward layers (default: 8/3 dim, rounded up to a multiple of 64)",
        None,
        "model",
        at_least=1,
    )
    max_seq_len: int = flag(
        "tokens per row that are trained on; a row has one more", 512, "model", at_least=1
    )
    vocab_size: int = flag(
        "vocabulary size of the tokenizer trained on the data if --tokenizer is not given",
        6400,
        "model",
        at_least=512,
        at_most=2**31,
    )
    rope_theta: float = flag("base of the rotary frequencies", 1e6, "model", above=0.0)
    rope_scaling: str | None = flag(
        "extend the context of a trained model: linear (position interpolation), ntk (a larger"
        " --rope_theta) or yarn (default: that of --init_from)",
        None,
        "model",
        choices=("linear", "ntk", "yarn"),
    )
    rope_factor: float | None = flag(
        "with --rope_scaling: times by which the context grows (default: max_seq_len /"
        " rope_original_length); sets max_seq_len if that is not given",
        None,
        "model",
        above=1.0,
        at_most=MAX_ROPE_FACTOR,
    )
    rope_original_length: int | None = flag(
        "with --rope_scaling: positions that the model was trained on before (default: those of"
        " --init_from)",
        None,
        "model",
        at_least=1,
        at_most=2**20,
    )
    norm_eps: float = flag("added to the mean square in every norm", 1e-5, "model", above=0.0)
    use_flash_attn: bool = flag(
        "torch's fused attention; off: the explicit reference", True, "model"
    )
    qk_norm: bool = flag("normalize each head's queries and keys, as in Qwen3", False, "model")
    tie_word_embeddings: bool = flag(
        "share one matrix between token embedding and output head", True, "model"
    )
    use_moe: bool = flag(
        "replace every feed-forward layer by a mixture of experts of width hidden_dim",
        False,
        "model",
    )
    n_routed_experts: int = flag(
        "routed experts per layer", 4, "model", at_least=1, at_most=MOST_EXPERTS
    )
    num_experts_per_tok: int = flag("routed experts per token", 2, "model", at_least=1)
    n_shared_experts: int = flag(
        "experts that process every token", 1, "model", at_least=0, at_most=MOST_EXPERTS
    )
    aux_loss_alpha: float = flag("weight of the load-balancing loss", 0.01, "model", at_least=0.0)
    norm_topk_prob: bool = flag(
        "normalize the weights of a token's experts to a sum of 1", True, "model"
    )
    gradient_checkpointing: bool = flag(
        "recompute each block in the backward pass: less memory, a third more work, the same"
        " result",
        False,
        "model",
    )

    @property
    def feed_forward_width(self) -> int:
        """Width of the feed-forward; its default as in the model, which does not import this."""
        return self.hidden_dim or 64 * -(-8 * self.dim // (3 * 64))
