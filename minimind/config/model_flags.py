"""Flags of the model: its shape and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass

from minimind.config.training_flags import flag

MOST_EXPERTS = 1024  # per layer
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
        "preset (configs/models/*.yaml) or a YAML file, which the shape flags override; or hf: and"
        " a directory with a config.json, or that file: the causal language model that transformers"
        " makes of it, with random weights, whatever else is there, unless --init_from names some",
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
        "width of the feed-forward (default: 8/3 dim, up to a multiple of 64)",
        None,
        "model",
        at_least=1,
    )
    max_seq_len: int = flag(
        "positions per row that are trained on; a row holds one token more",
        512,
        "model",
        at_least=1,
    )
    vocab_size: int = flag(
        "pieces of the tokenizer trained on the data when --tokenizer is not given",
        6400,
        "model",
        at_least=512,
        at_most=2**31,
    )
    rope_theta: float = flag("base of the rotary frequencies", 1e6, "model", above=0.0)
    norm_eps: float = flag("added to the mean square in every norm", 1e-5, "model", above=0.0)
    use_flash_attn: bool = flag(
        "torch's fused attention; off: the reference written out", True, "model"
    )
    qk_norm: bool = flag("norm every head's query and key, as Qwen3 does", False, "model")
    tie_word_embeddings: bool = flag(
        "one matrix as token embedding and output head; off: two", True, "model"
    )
    use_moe: bool = flag(
        "a mixture of experts, each of width hidden_dim, in the place of every feed-forward",
        False,
        "model",
    )
    n_routed_experts: int = flag(
        "experts that a token may choose", 4, "model", at_least=1, at_most=MOST_EXPERTS
    )
    num_experts_per_tok: int = flag("routed experts that a token chooses", 2, "model", at_least=1)
    n_shared_experts: int = flag(
        "experts that every token visits", 1, "model", at_least=0, at_most=MOST_EXPERTS
    )
    aux_loss_alpha: float = flag(
        "weight of the loss, of every layer, that asks for equally visited experts",
        0.01,
        "model",
        at_least=0.0,
    )
    norm_topk_prob: bool = flag(
        "make the weights of a token's experts add up to 1; off: the gate's probabilities",
        True,
        "model",
    )
    gradient_checkpointing: bool = flag(
        "keep each block's input alone and compute the rest again in the backward pass: less memory"
        " for a third more work, the same numbers",
        False,
        "model",
    )
