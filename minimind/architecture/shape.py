"""The sizes of a model, and the parameter counts that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

from minimind.config.flags import FLAGS
from minimind.config.origin import BY_TASK
from minimind.config.run_config import RunConfig
from minimind.errors import UsageError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Sizes(NamedTuple):
    """Elements of each weight: embedding and head, matrices of blocks, gains and biases."""

    tables: list[int]
    matrices: list[int]
    vectors: list[int]

    @classmethod
    def of(cls, named: Mapping[str, int]) -> Sizes:
        """Sort weights, given by name, into the three kinds."""
        sizes = cls([], [], [])
        for name, size in named.items():
            is_vector = "norm" in name or name.endswith("bias")
            kind = sizes.tables if name in (EMBEDDING, HEAD) else sizes.matrices
            (sizes.vectors if is_vector else kind).append(size)
        return sizes

    @property
    def parameters(self) -> int:
        return sum(chain(*self))

    @property
    def largest(self) -> int:
        """Elements of the largest single weight."""
        return max(chain(*self), default=0)


@dataclass(frozen=True)
class Shape:
    """The sizes that determine parameters and FLOPs of a model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    max_seq_len: int
    tie_word_embeddings: bool = True
    use_flash_attn: bool = True
    doc_mask: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    use_moe: bool = False
    n_routed_experts: int = 4
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    head_dim: int | None = None  # dim / n_heads
    freeze: tuple[str, ...] | None = None  # patterns of names
    tensor: int = 1  # ranks that share each matrix of a block; parameters are those of one

    @property
    def head_width(self) -> int:
        """Channels per head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def q_dim(self) -> int:
        """Width of the queries of one token, and of what attention returns."""
        return self.head_width * self.n_heads

    @property
    def kv_dim(self) -> int:
        """Width of the keys of one token, and of the values."""
        return self.head_width * self.n_kv_heads

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding and the output head; a tied one counts once."""
        return sum(self.sizes.tables)

    @property
    def layer(self) -> int:
        """Parameters of one block: q and o, k and v, SwiGLU or its experts and gate, norms."""
        return (self.hidden_matrices + sum(self.sizes.vectors) - self.dim) // self.n_layers

    @property
    def hidden_matrices(self) -> int:
        """Parameters of the matrices of all blocks."""
        return sum(self.sizes.matrices)

    @property
    def visits(self) -> int:
        """Feed-forward networks that a token passes through in one block."""
        return self.num_experts_per_tok + self.n_shared_experts if self.use_moe else 1

    @property
    def norms(self) -> int:
        """Parameters of all norms: two of a block, one each of a head's query and key, the last."""
        return sum(size for name, size in self.named.items() if "norm" in name)

    @property
    def parameters(self) -> int:
        return self.sizes.parameters

    @cached_property
    def named(self) -> dict[str, int]:
        """Elements of each weight by its name in the model; a tied head has none."""
        widths = {"q": self.q_dim, "k": self.kv_dim, "v": self.kv_dim, "o": self.q_dim}
        block = {"input_layernorm.weight": self.dim, "post_attention_layernorm.weight": self.dim}
        for name, width in widths.items():
            block[f"self_attn.{name}_proj.weight"] = self.dim * width // self.tensor
            if self.qkv_bias and name != "o":
                block[f"self_attn.{name}_proj.bias"] = width
        if self.qk_norm:
            block |= {f"self_attn.{name}_norm.weight": self.head_width for name in "qk"}
        networks = ["mlp"]
        if self.use_moe:
            block["mlp.gate.weight"] = self.dim * self.n_routed_experts // self.tensor
            networks = [f"mlp.experts.{k}" for k in range(self.n_routed_experts)]
            networks += [f"mlp.shared_experts.{k}" for k in range(self.n_shared_experts)]
        for network in networks:
            for name in ("gate", "up", "down"):
                block[f"{network}.{name}_proj.weight"] = self.dim * self.hidden_dim // self.tensor
        found = {EMBEDDING: self.vocab_size * self.dim, "model.norm.weight": self.dim}
        for layer in range(self.n_layers):
            found |= {f"model.layers.{layer}.{name}": size for name, size in block.items()}
        return found if self.tie_word_embeddings else {**found, HEAD: found[EMBEDDING]}

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of all weights."""
        return Sizes.of(self.named)

    @cached_property
    def trained(self) -> Sizes:
        """Sizes of the weights that are trained."""
        names = (name for name in self.named if not is_frozen(name, self.freeze))
        return Sizes.of({name: self.named[name] for name in names})


def is_frozen(name: str, patterns: Iterable[str] | None) -> bool:
    """Whether the patterns of --freeze have a parameter of this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns or ())


def trained_parameters(run: RunConfig, sizes: Mapping[str, int]) -> int:
    """Number of the elements that --freeze leaves to be trained, of weights by name.

    Raise UsageError for a pattern without any, and if none is left.
    """
    where = run.sources["freeze"]
    for pattern in run.freeze or ():
        if not any(is_frozen(name, [pattern]) for name in sizes):
            wider = (f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
            every = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", name) for name in sizes))
            known = f"they are {every} (N counts from 0, and a tied head is the embedding)"
            near = [one for one in wider if any(is_frozen(name, [one]) for name in sizes)]
            hint = f"did you mean '{near[0]}'?" if near else known
            raise UsageError(f"freeze = {pattern} ({where}) is the name of no parameter; {hint}")
    trained = sum(size for name, size in sizes.items() if not is_frozen(name, run.freeze))
    if not trained:
        patterns = " ".join(run.freeze or ())
        raise UsageError(f"freeze = {patterns} ({where}) leaves nothing to train; drop a pattern")
    return trained


def shape_of(run: RunConfig) -> Shape:
    """Return the shape described by the flags."""
    flags = {f.name: getattr(run, f.name) for f in fields(Shape) if f.name in FLAGS}
    return Shape(**{**flags, "hidden_dim": run.feed_forward_width})


def with_special_tokens(run: RunConfig) -> tuple[RunConfig, str]:
    """Return a run of --task sft as its start resolves it, and a line on its vocabulary.

    The special tokens of the chat template count if --tokenizer lacks them, and all without a
    tokenizer. Another run is returned as it is, with an empty line.
    """
    if run.task != "sft":
        return run, ""
    # These load numpy, which a plan of pretraining does not need.
    from minimind.data.chat.template import special_names
    from minimind.data.prepare.chat_tokenizer import chosen_template
    from minimind.data.tokenizer.add_special import lacking
    from minimind.data.tokenizer.load import load_tokenizer

    before, source = run.vocab_size, run.sources["vocab_size"]
    if run.tokenizer is None:
        template, name, _ = chosen_template(run.chat_template, None)
        added = len(special_names(template, None, name))
    else:
        tokenizer = load_tokenizer(run.tokenizer)
        if run.is_explicit("vocab_size") and before != tokenizer.vocab_size:
            raise UsageError(
                f"vocab_size = {before} ({source}), but --tokenizer {run.tokenizer} has"
                f" {tokenizer.vocab_size}; remove one of them"
            )
        template, name, _ = chosen_template(run.chat_template, tokenizer)
        names = special_names(template, tokenizer, name)
        before, added = tokenizer.vocab_size, len(lacking(tokenizer, names))
    run = run.with_values(BY_TASK, vocab_size=before + added, doc_mask=True)
    return run, f"vocabulary  {before:,} and {added} special tokens of the chat template\n"


@cache
def flops_per_token(shape: Shape) -> int:
    """FLOPs of one token's forward and backward pass, by `flops_of`; of experts, those visited."""
    named, head = shape.named, EMBEDDING if shape.tie_word_embeddings else HEAD
    visited = shape.num_experts_per_tok / shape.n_routed_experts
    matrices = {
        name: size * (visited if ".experts." in name else 1)
        for name, size in named.items()
        if name == head or name.endswith(("proj.weight", "gate.weight"))
    }
    trained = {name for name in named if not is_frozen(name, shape.freeze)}
    products = shape.q_dim * shape.max_seq_len
    return flops_of(matrices, trained, {EMBEDDING}, shape.n_layers, products)


def flops_of(
    matrices: Mapping[str, float],
    trained: Set[str],
    embeddings: Set[str],
    n_layers: int,
    products: int,
) -> int:
    """FLOPs of one token's forward and backward pass: 6 M + 12 layers q_dim T.

    As in PaLM, appendix B (Chowdhery et al. 2022), and Kaplan et al. (2020): M counts the weights
    that multiply a token (with the head; without embedding, norms and experts not visited), and
    attention counts all T positions, although a causal kernel computes half of them. A frozen
    weight spares its gradient, 2 M. Blocks below the lowest one with a trained weight spare the
    gradients of their inputs, too, 2 M + 8 q_dim T a block, unless an embedding is trained.

    matrices: M by name. trained, embeddings: names of parameters. products: q_dim T.
    """
    lowest = min(
        (layer for name in trained if (layer := _layer_of(name)) is not None), default=n_layers
    )
    lowest = 0 if trained & embeddings else lowest
    weights = 0.0
    for name, size in matrices.items():
        layer = _layer_of(name)
        weights += (1 + (layer is None or layer >= lowest) + (name in trained)) * size
    return 2 * round(weights) + products * (12 * n_layers - 8 * lowest)


def _layer_of(name: str) -> int | None:
    """The block of a parameter; None for one outside of blocks."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
