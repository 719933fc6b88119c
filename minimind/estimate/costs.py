"""Cost of a step by arithmetic: memory and communication in bytes, FLOPs, seconds.

P is the number of parameters, N of processes, b the size of --dtype in bytes, K
reduce_bucket_size. Memory follows "ZeRO" (Rajbhandari et al. 2020, sections 3 and 5) where
DeepSpeed 0.19.8 does, and its source where it differs; tests measure both on two processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minimind.estimate.shape import Shape
from minimind.model.sizes import LOSS_CHUNK, MIN_FLEX_HEAD_DIM, MIN_FLEX_LENGTH

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FP32 = 4  # bytes
ITERATION = {"cuda": 2, "cpu": FP32}  # of Muon; on a CPU those without bf16 instructions
# DeepSpeed's defaults, in elements: the flat buffer of stage 0's all-reduce, and of stage 3
# max_live_parameters and max_reuse_distance.
FLATTENED, LIVE, REUSE = 5 * 10**8, 10**9, 10**9


@dataclass(frozen=True)
class Layout:
    """How a model is trained; `stage` is None without DeepSpeed (DDP or a single process)."""

    stage: int | None
    world_size: int
    dtype: str
    rows: int  # in one micro-batch of one process
    accumulation_steps: int = 1
    reduce_bucket: int = 0  # elements
    overlap: bool = False  # DeepSpeed's overlap_comm
    offload_optimizer: bool = False
    offload_param: bool = False
    device: str = "cuda"
    recomputes: bool = False  # gradient checkpointing: only the inputs of blocks are kept
    compiles: bool = False  # on a GPU; never at stage 3
    averages: bool = False  # --ema
    optimizer: str = "adamw"
    moments: int = 2  # fp32 numbers that it keeps per weight; Muon one less of a matrix of a block
    loss: str = "full"  # full, chunked, or auto: chunked on a GPU if nothing is compiled
    sequence: int = 1  # processes that divide the positions of a row

    @property
    def is_compiled(self) -> bool:
        """Whether a GPU runs compiled code."""
        return self.compiles and self.device == "cuda" and self.stage != 3

    @property
    def shards(self) -> int:
        """Parts into which ZeRO divides the optimizer's state."""
        return self.world_size if self.stage else 1

    @property
    def chunks_loss(self) -> bool:
        """Whether the loss computes LOSS_CHUNK positions at a time."""
        is_eager_gpu = self.device == "cuda" and not self.is_compiled
        return self.loss == "chunked" or (self.loss == "auto" and is_eager_gpu)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one process in a step, on its device and on the host.

    Weights and optimizer are held throughout; gradients, buffers and activations in the backward
    pass; `update` in the optimizer step, when the activations are freed.
    """

    weights: int
    optimizer: int
    gradients: int
    buffers: int  # buckets, the gradient being computed, gathered weights (stage 3)
    activations: int
    update: int
    host: int = 0

    @property
    def total(self) -> int:
        """Peak on the device, without the driver and the libraries."""
        backward = self.gradients + self.buffers + self.activations
        return self.weights + self.optimizer + max(backward, self.update)


def memory(shape: Shape, layout: Layout) -> Memory:
    """Peak memory of one process of `layout`.

    Stages 1 and 2 keep a full low-precision copy of the weights and 1/N of the fp32 masters and
    moments; masters are a second copy in fp32 too. An update needs an fp32 copy of the gradients.
    Offloading is derived from DeepSpeed's source, not measured.
    """
    kinds = {None: _plain, 0: _replicated, 1: _partitioned, 2: _partitioned, 3: _sharded}
    needed = kinds[layout.stage](shape, layout, activation_bytes(shape, layout))
    average = layout.averages * FP32 * shape.parameters // layout.shards
    extra = _temporaries(shape, layout) if layout.stage != 0 else 0  # there _replicated adds it
    update = needed.update + max(0, extra)
    if layout.offload_optimizer:
        return replace(needed, host=needed.host + average + extra)
    return replace(needed, optimizer=needed.optimizer + average, update=update)


def _state(shape: Shape, layout: Layout, has_masters: bool = True) -> int:
    """Bytes of fp32 masters and moments of one process."""
    numbers = (has_masters + layout.moments) * shape.parameters
    numbers -= shape.hidden_matrices if layout.optimizer == "muon" else 0
    return FP32 * -(-numbers // layout.shards)


def _temporaries(shape: Shape, layout: Layout) -> int:
    """Bytes of an update of Lion or Muon beyond those of AdamW.

    Lion's is the direction of a weight or a shard. Muon's is a shard's update in two precisions,
    then all gathered updates, one of them iterated; ZeRO has freed gradients of others by then.
    """
    part = -(-shape.parameters // layout.shards)
    if layout.optimizer != "muon":
        return (layout.optimizer == "lion") * FP32 * (part if layout.stage else shape.largest)
    b, matrix = ITERATION[layout.device], shape.dim * max(shape.dim, shape.hidden_dim)
    iterated = (FP32 + 2 * b) * matrix
    if not layout.stage:
        return FP32 * matrix + iterated
    shard = -(-shape.hidden_matrices // layout.shards)
    freed = FP32 * (part - shard) + (BYTES[layout.dtype] * part if layout.stage != 3 else 0)
    return max((FP32 + b) * shard, b * (shard + shape.hidden_matrices) + iterated) - freed


def _plain(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Without DeepSpeed: everything replicated, with fp32 masters of low-precision weights.

    Gradients are views of DDP's buckets, which stay while the fp32 copies are made.
    """
    b, p = BYTES[layout.dtype], shape.parameters
    optimizer = _state(shape, layout, has_masters=b < FP32)
    buckets = b * p if b == FP32 or layout.world_size > 1 else 0
    making = b * shape.largest if layout.world_size > 1 else 0  # before it is in its bucket
    update = buckets + (0 if b == FP32 else FP32 * p)
    return Memory(b * p, optimizer, b * p, making, activations, update)


def _replicated(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stage 0: everything replicated, torch's optimizers; the all-reduce uses a flat copy."""
    b, p = BYTES[layout.dtype], shape.parameters
    optimizer = _state(shape, layout, has_masters=b < FP32)
    in_step = _temporaries(shape, layout) + (0 if b == FP32 else FP32 * p)
    update = b * p + max(b * min(p, FLATTENED), in_step)
    return Memory(b * p, optimizer, b * p, 0, activations, update)


def _partitioned(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stages 1 and 2 (stage_1_and_2.py).

    Stage 2 holds its part of the gradients, twice while micro-batches accumulate. Stage 1 holds all
    gradients and then its part, unless they are reduced as they are computed.
    """
    b, p = BYTES[layout.dtype], shape.parameters
    part = -(-p // layout.world_size)
    bucket = b * layout.reduce_bucket * (2 if layout.overlap else 1)
    accumulates = layout.accumulation_steps > 1
    if layout.stage == 1 and (accumulates or not layout.overlap):
        gradients, making, reduced = b * (p + part * layout.overlap), 0, b * (p + part)
    else:
        gradients, making, reduced = b * part * (2 if accumulates else 1), b * shape.largest, 0
    update = max((b + FP32) * part, reduced)
    if not layout.offload_optimizer:
        state = _state(shape, layout)
        return Memory(b * p, state, gradients, bucket + making, activations, update)
    # master, moments and fp32 gradients; the new weights and the accumulated gradients
    host = _state(shape, layout) + (FP32 + 2 * b) * part + b * shape.largest
    kept = b * p if making == 0 else 0
    buffers = bucket + 2 * b * shape.largest
    return Memory(b * p, 0, kept, buffers, activations, kept + buffers, host)


def _sharded(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stage 3 (stage3.py): 1/N of everything, and up to LIVE gathered weights.

    A weight whose next use is nearer than REUSE stays gathered: a model below half of that is
    complete on every device when the backward pass begins.
    """
    b, p = BYTES[layout.dtype], shape.parameters
    part = -(-p // layout.world_size)
    bucket = b * layout.reduce_bucket
    # gathered weights, bucket, its flat copy for the reduce-scatter, the gradient being computed
    buffers = b * min(p, LIVE) + 2 * bucket + b * shape.largest
    shard, host = b * part, 0
    state, gradients = _state(shape, layout), b * part
    update = bucket + (b + FP32) * part
    if layout.offload_optimizer:
        host = state + (FP32 + b) * part
        state, gradients, update = 0, 0, bucket
    if layout.offload_param:
        shard, host = 0, host + b * part
    return Memory(shard, state, gradients, buffers, activations, update, host)


def activation_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes of saved activations at the start of the backward pass of one micro-batch.

    Counted as by Korthikanti et al. (2022), section 4, for this block: no dropout, SwiGLU, grouped
    key heads, and the experts that a token visits. Reference attention adds the scores and their
    fp32 softmax. Fused kernels need repeated key heads in fp32 on a GPU, and with a document mask,
    which adds a rotary table per row and the mask; flex attention on a GPU takes one number per
    token instead. The peak adds the larger of the loss (`_loss_bytes`) and the softmax of the last
    block (two fp32 gradients, after its feed-forward). With gradient checkpointing one block is
    alive at a time, with the gradients of its feed-forward or softmax, and not during the loss.
    """
    b, tokens = BYTES[layout.dtype], layout.rows * shape.max_seq_len // layout.sequence
    e, f = shape.dim, shape.hidden_dim
    # A fused norm saves its input and one scale per token; the CPU's saves two fp32 copies instead.
    norm_bytes = b if layout.device == "cuda" else 2 * FP32
    norm = norm_bytes * e + FP32
    heads = norm_bytes * (e + shape.kv_dim) + FP32 * (shape.n_heads + shape.n_kv_heads)
    inputs = b * e * 2  # inputs of q, k, v and of gate, up
    feed_forward = 4 * b * f * shape.visits + (_routing_bytes(shape, b) if shape.use_moe else 0)
    scores = softmax = 0
    is_flex = layout.device == "cuda" and e // shape.n_heads >= MIN_FLEX_HEAD_DIM
    is_flex = is_flex and shape.use_flash_attn and shape.max_seq_len >= MIN_FLEX_LENGTH
    mask = FP32 if is_flex else (b if shape.use_flash_attn else 1) * shape.max_seq_len
    mask *= shape.doc_mask * layout.sequence  # of all positions
    rotations = shape.doc_mask * FP32 * e // shape.n_heads
    if shape.use_flash_attn:
        is_gpu_fp32 = layout.device == "cuda" and b == FP32
        repeats_keys = not is_flex if shape.doc_mask else is_gpu_fp32
        keys = e if repeats_keys else shape.kv_dim
        attention = b * (2 * e + 2 * keys) + FP32 * shape.n_heads
    else:
        attention = b * 4 * e
        per_token = shape.n_heads * shape.max_seq_len
        scores = per_token * (FP32 if b == FP32 else FP32 + b)
        softmax = 2 * FP32 * per_token - feed_forward
    layer = 2 * norm + inputs + attention + scores + feed_forward + shape.qk_norm * heads
    head = norm + b * e
    loss = _loss_bytes(shape, layout, tokens)
    if layout.recomputes:
        working = b * (3 * f + e)
        if softmax:
            low = b * shape.n_heads * shape.max_seq_len if b < FP32 else 0  # its copy is freed
            working = max(working, softmax + 3 * b * e - norm - low)
        inputs = shape.n_layers * b * e
        peak = max(tokens * head + loss, tokens * (layer + working))
        return tokens * (inputs + mask + rotations) + peak
    return tokens * (shape.n_layers * layer + mask + rotations + head) + max(loss, tokens * softmax)


def _loss_bytes(shape: Shape, layout: Layout, tokens: int) -> int:
    """Bytes of the loss of `tokens` positions, or of a chunk of them, at its peak.

    Eager: fp32 log-probabilities and two gradients of that size. Compiled: the logits and their
    gradient in the dtype of the weights.
    """
    if layout.chunks_loss:
        tokens = min(tokens, LOSS_CHUNK)
    per_logit = 2 * BYTES[layout.dtype] if layout.is_compiled else 3 * FP32
    return tokens * shape.vocab_size * per_logit


def _routing_bytes(shape: Shape, b: int) -> int:
    """Bytes a mixture of experts saves per token, without those of the experts.

    Per visit the input, the result, three int64 indices, and the weight in fp32 and in --dtype; per
    token the scores and their sum.
    """
    visit = 2 * b * shape.dim + 3 * 8 + FP32 + b
    return shape.num_experts_per_tok * visit + FP32 * shape.n_routed_experts + FP32


def bytes_sent(shape: Shape, layout: Layout) -> int:
    """Bytes one device sends for one optimizer step.

    For S bytes a ring sends S (N-1)/N in an all-gather or reduce-scatter and twice that in an
    all-reduce (Patarasuk and Yuan 2009). ZeRO, section 7, uses reduce-scatter at stages 1 and 2;
    DeepSpeed 0.19.8 uses all-reduce, at stage 2 after every micro-batch. Stage 3 gathers weights
    once per micro-batch, and released ones again for the backward pass. Muon gathers its updates.
    """
    n = layout.world_size
    b, p, micro_batches = BYTES[layout.dtype], shape.parameters, layout.accumulation_steps
    if layout.stage in (None, 0):
        passes = 2 * p
    elif layout.stage == 3:
        passes = micro_batches * (2 * p + max(0, p - REUSE // 2))
    else:
        passes = 2 * p * (micro_batches if layout.stage == 2 else 1) + p
    updates = shape.hidden_matrices if layout.optimizer == "muon" and layout.stage else 0
    return (b * passes + ITERATION[layout.device] * updates) * (n - 1) // n


def flops_per_token(shape: Shape) -> int:
    """FLOPs of one token's forward and backward pass: 6 M + 12 layers dim T.

    As in PaLM, appendix B (Chowdhery et al. 2022), and Kaplan et al. (2020): M counts the weights
    that multiply a token (with the head; without embedding, norms and experts not visited), and
    attention counts all T positions, although a causal kernel computes half of them.
    """
    matrices = shape.n_layers * shape.active + shape.vocab_size * shape.dim
    return 6 * matrices + 12 * shape.n_layers * shape.dim * shape.max_seq_len


def seconds(shape: Shape, tokens: float, world_size: int, peak_tflops: float, mfu: float) -> float:
    """Seconds for `tokens` at a share `mfu` of `peak_tflops` (10^12 FLOPs a second per device)."""
    return tokens * flops_per_token(shape) / (world_size * peak_tflops * 1e12 * mfu)
