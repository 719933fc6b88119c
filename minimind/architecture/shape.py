"""The sizes of a model, and the parameter counts that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from minimind.config.flags import FLAGS
from minimind.config.origin import BY_TASK
from minimind.config.run_config import RunConfig
from minimind.errors import UsageError

Sizes = list[tuple[int, int]]  # elements of a weight, and how many weights have as many


def elements(sizes: Sizes) -> int:
    """Elements of all weights of `sizes`."""
    return sum(size * count for size, count in sizes)


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
        return elements(self.tables)

    @property
    def layer(self) -> int:
        """Parameters of one block: q and o, k and v, SwiGLU or its experts and gate, norms."""
        return (self.hidden_matrices + elements(self.vectors) - self.dim) // self.n_layers

    @property
    def hidden_matrices(self) -> int:
        """Parameters of the matrices of all blocks."""
        return elements(self.matrices)

    @property
    def tables(self) -> Sizes:
        """The token embedding and the output head; a tied one counts once."""
        return [(self.vocab_size * self.dim, 1 if self.tie_word_embeddings else 2)]

    @property
    def matrices(self) -> Sizes:
        """The matrices of all blocks."""
        experts = self.n_routed_experts + self.n_shared_experts if self.use_moe else 1
        return [(size, self.n_layers * count) for size, count in self._matrices(experts)]

    @property
    def vectors(self) -> Sizes:
        """Gains of the norms, and biases."""
        blocks = self.n_layers
        return [
            *((self.dim, 2 * blocks + 1), (self.head_width, 2 * blocks * self.qk_norm)),
            *((self.q_dim, blocks * self.qkv_bias), (self.kv_dim, 2 * blocks * self.qkv_bias)),
        ]

    @property
    def active(self) -> int:
        """Parameters of one block that multiply a token."""
        return elements(self._matrices(self.visits))

    @property
    def visits(self) -> int:
        """Feed-forward networks that a token passes through in one block."""
        return self.num_experts_per_tok + self.n_shared_experts if self.use_moe else 1

    def _matrices(self, experts: int) -> Sizes:
        """The matrices of one block: of attention, of the experts, and the experts' gate."""
        widths = ((self.q_dim, 2), (self.kv_dim, 2), (self.hidden_dim, 3 * experts))
        gate = (self.n_routed_experts, int(self.use_moe))
        return [(self.dim * width // self.tensor, count) for width, count in (*widths, gate)]

    @property
    def norms(self) -> int:
        """Parameters of all norms: two of a block, one each of a head's query and key, the last."""
        of_block = 2 * self.dim + self.qk_norm * 2 * self.head_width
        return self.n_layers * of_block + self.dim

    @property
    def parameters(self) -> int:
        return elements([*self.tables, *self.matrices, *self.vectors])

    @property
    def largest(self) -> int:
        """Elements of the largest single weight."""
        matrix = max(self.hidden_dim, self.q_dim) // self.tensor
        return self.dim * max(self.vocab_size, matrix)


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


def flops_per_token(shape: Shape) -> int:
    """FLOPs of one token's forward and backward pass: 6 M + 12 layers q_dim T.

    As in PaLM, appendix B (Chowdhery et al. 2022), and Kaplan et al. (2020): M counts the weights
    that multiply a token (with the head; without embedding, norms and experts not visited), and
    attention counts all T positions, although a causal kernel computes half of them.
    """
    matrices = shape.n_layers * shape.active + shape.vocab_size * shape.dim
    return 6 * matrices + 12 * shape.n_layers * shape.q_dim * shape.max_seq_len
