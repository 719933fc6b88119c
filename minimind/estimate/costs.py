"""What a step costs: parameters, bytes held, bytes sent, FLOPs and seconds, by arithmetic alone.

P stands for all parameters, N for the processes, b for the bytes of a number in --dtype, K for
reduce_bucket_size. The bytes held follow "ZeRO" (Rajbhandari et al. 2020, sections 3 and 5) where
DeepSpeed 0.19.8 does, and its source where it differs; tests measure both on two processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from minimind.estimate.shape import Shape

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WIDE = 4  # bytes of the fp32 numbers that every optimizer here keeps
MASTER_AND_MOMENTS = 3 * WIDE
# DeepSpeed's defaults, in elements: what stage 0 flattens for one all-reduce, and how many weights
# stage 3 keeps gathered, or far from their next use, before it lets go of them.
FLATTENED, LIVE, REUSE = 5 * 10**8, 10**9, 10**9
NARROWEST_BY_BLOCKS = 16  # channels of a head, as minimind.model.attention_kernels has it


@dataclass(frozen=True)
class Layout:
    """How a model is trained; `stage` is None without DeepSpeed (DDP, or one process alone)."""

    stage: int | None
    world_size: int
    dtype: str
    rows: int  # in one micro-batch of one process
    accumulation_steps: int = 1
    reduce_bucket: int = 0  # elements
    overlap: bool = False  # DeepSpeed's overlap_comm: gradients leave during the backward pass
    offload_optimizer: bool = False
    offload_param: bool = False
    device: str = "cuda"
    recomputes: bool = False  # gradient checkpointing: of a block its input alone is kept


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, and on its host for one process, at their largest in a step.

    Weights and optimizer are held throughout. In the backward pass gradients, buffers and
    activations join them; in the update, when the activations are gone, `update` does.
    """

    weights: int
    optimizer: int
    gradients: int
    buffers: int  # buckets, the gradient being made, at stage 3 the gathered weights
    activations: int
    update: int
    host: int = 0

    @property
    def total(self) -> int:
        """The peak on the device; what the driver and the libraries take comes on top."""
        backward = self.gradients + self.buffers + self.activations
        return self.weights + self.optimizer + max(backward, self.update)


def memory(shape: Shape, layout: Layout) -> Memory:
    """Bytes by purpose for one process of `layout`.

    Stages 1 and 2 keep a whole low-precision copy of the weights and 1/N of the fp32 master and
    moments; in fp32 too the master is a second copy. What an update needs beside its gradients is
    their fp32 copy. Offloading is read in the source, not measured.
    """
    kinds = {None: _plain, 0: _replicated, 1: _partitioned, 2: _partitioned, 3: _sharded}
    return kinds[layout.stage](shape, layout, activation_bytes(shape, layout))


def _plain(shape: Shape, layout: Layout, activations: int) -> Memory:
    """No DeepSpeed: everything everywhere, with fp32 masters beside low-precision weights.

    Gradients are views of DDP's buckets, so that these stay while the fp32 copies are made. On a
    GPU torch's AdamW makes one list of intermediates as large as the parameters (its foreach form).
    """
    b, p = BYTES[layout.dtype], shape.parameters
    optimizer = (2 * WIDE if b == WIDE else MASTER_AND_MOMENTS) * p
    buckets = b * p if b == WIDE or layout.world_size > 1 else 0
    making = b * shape.largest if layout.world_size > 1 else 0  # before it is in its bucket
    foreach = WIDE * p if layout.device == "cuda" else 0
    update = buckets + (0 if b == WIDE else WIDE * p) + foreach
    return Memory(b * p, optimizer, b * p, making, activations, update)


def _replicated(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stage 0: everything everywhere, torch's AdamW; the all-reduce goes through a flat copy."""
    b, p = BYTES[layout.dtype], shape.parameters
    optimizer = (2 * WIDE if b == WIDE else MASTER_AND_MOMENTS) * p
    wide_gradients = 0 if b == WIDE else WIDE * p
    foreach = WIDE * p if layout.device == "cuda" else 0
    update = b * p + max(b * min(p, FLATTENED), wide_gradients + foreach)
    return Memory(b * p, optimizer, b * p, 0, activations, update)


def _partitioned(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stages 1 and 2 (stage_1_and_2.py).

    Stage 2 holds its part of the gradients, and a second one while later micro-batches add to the
    first. Stage 1 holds all of them, then its part too, unless they leave as they are made.
    """
    b, p = BYTES[layout.dtype], shape.parameters
    part = -(-p // layout.world_size)
    bucket = b * layout.reduce_bucket * (2 if layout.overlap else 1)
    accumulates = layout.accumulation_steps > 1
    if layout.stage == 1 and (accumulates or not layout.overlap):
        gradients, making, reduced = b * (p + part * layout.overlap), 0, b * (p + part)
    else:
        gradients, making, reduced = b * part * (2 if accumulates else 1), b * shape.largest, 0
    update = max((b + WIDE) * part, reduced)
    if not layout.offload_optimizer:
        master = MASTER_AND_MOMENTS * part
        return Memory(b * p, master, gradients, bucket + making, activations, update)
    # master, moments and fp32 gradients; the new weights and the accumulated gradients
    host = (MASTER_AND_MOMENTS + WIDE + 2 * b) * part + b * shape.largest
    kept = b * p if making == 0 else 0
    buffers = bucket + 2 * b * shape.largest
    return Memory(b * p, 0, kept, buffers, activations, kept + buffers, host)


def _sharded(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stage 3 (stage3.py): 1/N of everything, and up to LIVE weights gathered.

    A weight whose next use is nearer than REUSE stays gathered, so that a model below half of
    that is whole on every device when the backward pass begins.
    """
    b, p = BYTES[layout.dtype], shape.parameters
    part = -(-p // layout.world_size)
    bucket = b * layout.reduce_bucket
    # gathered weights, bucket, the flat copy of it that is scattered, the gradient being made
    buffers = b * min(p, LIVE) + 2 * bucket + b * shape.largest
    shard, host = b * part, 0
    master, gradients = MASTER_AND_MOMENTS * part, b * part
    update = bucket + (b + WIDE) * part
    if layout.offload_optimizer:
        host = (MASTER_AND_MOMENTS + WIDE + b) * part
        master, gradients, update = 0, 0, bucket
    if layout.offload_param:
        shard, host = 0, host + b * part
    return Memory(shard, master, gradients, buffers, activations, update, host)


def activation_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes at the start of the backward pass of one micro-batch: all that it will read again.

    Counted as Korthikanti et al. (2022), section 4, count a GPT block, for this one: no dropout,
    SwiGLU, shared key heads, and of experts those that a token visits. Reference attention adds the
    scores, of which the softmax is kept in fp32. Documents masked apart add one table of rotations
    by row, and one mask with key heads repeated for the fused kernels; where a GPU goes by blocks,
    a number a token instead. Upon that comes the larger of the loss (fp32 log-probabilities and two
    gradients of that size) and of the last block's softmax (two fp32 gradients, when its
    feed-forward is done with). Where blocks are recomputed there is one at a time, with the
    gradients of its feed-forward or softmax, and not beside the loss.
    """
    b, tokens = BYTES[layout.dtype], layout.rows * shape.max_seq_len
    e, f = shape.dim, shape.hidden_dim
    # A fused norm keeps its input and a root per token, the CPU's two fp32 copies and the root.
    of_normed = b if layout.device == "cuda" else 2 * WIDE
    norm = of_normed * e + WIDE
    heads = of_normed * (e + shape.kv_dim) + WIDE * (shape.n_heads + shape.n_kv_heads)
    inputs = b * e * 2  # what q, k, v read, and what gate, up read
    feed_forward = 4 * b * f * shape.visits + (_routing_bytes(shape, b) if shape.use_moe else 0)
    scores = softmax = 0
    is_by_blocks = layout.device == "cuda" and e // shape.n_heads >= NARROWEST_BY_BLOCKS
    is_by_blocks = is_by_blocks and shape.use_flash_attn
    mask = WIDE if is_by_blocks else (b if shape.use_flash_attn else 1) * shape.max_seq_len
    mask *= shape.doc_mask
    rotations = shape.doc_mask * WIDE * e // shape.n_heads
    if shape.use_flash_attn:
        keys = e if shape.doc_mask and not is_by_blocks else shape.kv_dim
        attention = b * (2 * e + 2 * keys) + WIDE * shape.n_heads
    else:
        attention = b * 4 * e
        per_token = shape.n_heads * shape.max_seq_len
        scores = per_token * (WIDE if b == WIDE else WIDE + b)
        softmax = 2 * WIDE * per_token - feed_forward
    layer = 2 * norm + inputs + attention + scores + feed_forward + shape.qk_norm * heads
    head = norm + b * e
    loss = 3 * WIDE * shape.vocab_size
    if layout.recomputes:
        working = b * (3 * f + e)
        if softmax:
            low = b * shape.n_heads * shape.max_seq_len if b < WIDE else 0  # its copy is done with
            working = max(working, softmax + 3 * b * e - norm - low)
        kept = shape.n_layers * b * e
        return tokens * (kept + mask + rotations + max(head + loss, layer + working))
    return tokens * (shape.n_layers * layer + mask + rotations + head + max(loss, softmax))


def _routing_bytes(shape: Shape, b: int) -> int:
    """What one mixture of experts keeps of a token beside what its experts keep.

    Of each visit its input and its result, three int64 (where it went, its place among the others
    and back), its weight in fp32 and as it was used; of the token its scores and their sum.
    """
    visit = 2 * b * shape.dim + 3 * 8 + WIDE + b
    return shape.num_experts_per_tok * visit + WIDE * shape.n_routed_experts + WIDE


def bytes_sent(shape: Shape, layout: Layout) -> int:
    """Bytes one device sends for one optimizer step.

    Of S bytes a ring sends S (N-1)/N for an all-gather or a reduce-scatter and twice that for an
    all-reduce (Patarasuk and Yuan 2009). ZeRO, section 7, counts reduce-scatters at stages 1 and
    2; DeepSpeed 0.19.8 all-reduces there, at stage 2 after every micro-batch. At stage 3 weights
    are gathered once per micro-batch, and again for the backward pass those it has let go of.
    """
    n = layout.world_size
    b, p, micro_batches = BYTES[layout.dtype], shape.parameters, layout.accumulation_steps
    if layout.stage in (None, 0):
        passes = 2 * p
    elif layout.stage == 3:
        passes = micro_batches * (2 * p + max(0, p - REUSE // 2))
    else:
        passes = 2 * p * (micro_batches if layout.stage == 2 else 1) + p
    return b * passes * (n - 1) // n


def flops_per_token(shape: Shape) -> int:
    """FLOPs of one token's forward and backward pass: 6 M + 12 layers dim T.

    PaLM, appendix B (Chowdhery et al. 2022), as Kaplan et al. (2020) count: M are the weights that
    multiply (the head does, the embedding, the norms and the experts that a token does not visit
    do not); attention is counted as if
    every position saw all T, though a causal kernel does half of it.
    """
    matrices = shape.n_layers * shape.active + shape.vocab_size * shape.dim
    return 6 * matrices + 12 * shape.n_layers * shape.dim * shape.max_seq_len


def seconds(shape: Shape, tokens: float, world_size: int, peak_tflops: float, mfu: float) -> float:
    """Seconds for `tokens` at a share `mfu` of `peak_tflops` (10^12 FLOPs a second per device)."""
    return tokens * flops_per_token(shape) / (world_size * peak_tflops * 1e12 * mfu)
