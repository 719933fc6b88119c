"""Cost of a step by arithmetic: memory and communication in bytes, seconds at a share of the peak.

P is the number of parameters, N of processes, b the size of a weight in bytes, K
reduce_bucket_size. Memory follows "ZeRO" (Rajbhandari et al. 2020, sections 3 and 5) where
DeepSpeed 0.19.8 does, and its source where it differs; tests measure both on two processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from minimind.architecture.shape import Shape, flops_per_token
from minimind.config.flags import MIXED
from minimind.config.optimizers import OPTIMIZERS, STACKS
from minimind.model.sizes import LOSS_CHUNK, MIN_FLEX_HEAD_DIM, MIN_FLEX_LENGTH

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, MIXED: 4}  # of a weight
FP32 = 4  # bytes
FLATTENED = 5 * 10**8  # elements of the flat buffer of stage 0's all-reduce, DeepSpeed's default


@dataclass(frozen=True)
class Layout:
    """How a model is trained; `stage` is None without DeepSpeed (DDP or a single process)."""

    stage: int | None
    world_size: int
    dtype: str
    rows: int  # rows in one micro-batch of one process
    accumulation_steps: int = 1
    reduce_bucket: int = 0  # elements
    overlap: bool = False  # DeepSpeed's overlap_comm
    offload_optimizer: bool = False
    offload_param: bool = False
    device: str = "cuda"
    recomputes: bool = False  # gradient checkpointing: only the inputs of blocks are kept
    compiles: bool = False  # on a GPU; never at stage 3
    averages: bool = False  # --ema
    drops: bool = False  # --dropout
    optimizer: str = "adamw"
    moments: int = 2  # fp32 numbers kept per weight; Muon keeps one fewer for matrices of blocks
    # full, chunked, or auto: chunked on a GPU if nothing is compiled; or MODULE:FUNCTION
    loss: str = "full"
    # Weights of --teacher, of which every process has all; None without it, 0 for its records.
    teacher: int | None = None
    sequence: int = 1  # processes that divide the positions of a row
    tensor: int = 1  # processes that share each matrix of a block
    # Elements at stage 3, DeepSpeed's defaults: of all gathered weights, and of the largest weight
    # that is not released.
    max_live_parameters: int = 10**9
    param_persistence_threshold: int = 10**5

    @property
    def is_compiled(self) -> bool:
        return self.compiles and self.on_cuda and self.stage != 3

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def product(self) -> int:
        """Bytes of a number that a matrix product takes."""
        return 2 if self.dtype == MIXED else BYTES[self.dtype]

    @property
    def iteration(self) -> int:
        """Bytes of a number in Muon's iteration: fp32 on a CPU without bf16 instructions."""
        return FP32 if self.device == "cpu" else 2

    @property
    def shards(self) -> int:
        """Parts into which ZeRO divides the optimizer's state."""
        return self.world_size if self.stage else 1

    @property
    def chunks_loss(self) -> bool:
        """Whether the loss computes LOSS_CHUNK positions at a time."""
        is_eager_gpu = self.device != "cpu" and not self.is_compiled and self.teacher is None
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
    Offloading is derived from DeepSpeed's source, not measured. Frozen weights have no optimizer
    and no gradients, but the activations count as if all were trained. Under tensor parallelism the
    activations are those of undivided matrices, and a save may need more than an update.
    """
    if layout.tensor > 1:
        part, ranks = own_part(shape, layout)
        needed = memory(part, ranks)
        return replace(needed, update=max(needed.update, saving_bytes(part, ranks)))
    kinds = {None: _plain, 0: _replicated, 1: _partitioned, 2: _partitioned, 3: _sharded}
    needed = kinds[layout.stage](shape, layout, activation_bytes(shape, layout))
    needed = replace(needed, weights=needed.weights + BYTES[layout.dtype] * (layout.teacher or 0))
    average = layout.averages * FP32 * shape.trained.parameters // layout.shards
    extra = _temporaries(shape, layout) if layout.stage != 0 else 0  # there _replicated adds it
    update = needed.update + max(0, extra)
    if layout.offload_optimizer:
        return replace(needed, host=needed.host + average + extra)
    return replace(needed, optimizer=needed.optimizer + average, update=update)


def _parts(shape: Shape, layout: Layout) -> tuple[int, int]:
    """Elements of one process's part of Muon's matrices and of others that are trained, padded.

    DeepSpeed pads each group of parameters to two elements per process at stages 1 and 2, and
    divides each weight by itself at stage 3. Matrices of other optimizers are with the others.
    """
    trained = shape.trained
    muon, others = [], [*trained.matrices, *trained.tables]
    if OPTIMIZERS[layout.optimizer].orthogonalizes:
        muon, others = trained.matrices, trained.tables
    n = layout.shards

    def part(sizes: Iterable[int]) -> int:
        if layout.stage == 3:
            return sum(-(-size // n) for size in sizes)
        return 2 * -(-sum(sizes) // (2 * n)) if layout.stage else sum(sizes)

    return part(muon), part(others) + part(trained.vectors)


def _state(shape: Shape, layout: Layout, has_masters: bool = True) -> int:
    """Bytes of fp32 masters and moments of one process."""
    muon, others = _parts(shape, layout)
    if blocks := OPTIMIZERS[layout.optimizer].blocks:  # a byte, and a share of the block's scale
        return FP32 * has_masters * others + layout.moments * (others + FP32 * others // blocks)
    numbers = has_masters + layout.moments
    return FP32 * (numbers * (muon + others) - muon)  # one moment less


def _temporaries(shape: Shape, layout: Layout) -> int:
    """Bytes of an update beyond those of AdamW.

    Other optimizers: fp32 copies of the largest weight, of the shard under ZeRO. Muon: its
    shard's update in two precisions, then the gathered updates and the stack that is iterated, less
    the gradients that ZeRO has freed.
    """
    shard, others = _parts(shape, layout)
    part = shard + others
    row = OPTIMIZERS[layout.optimizer]
    if not row.orthogonalizes:
        is_on_cpu = layout.device == "cpu" or layout.offload_optimizer
        copies = row.copies + is_on_cpu * row.copies_on_cpu
        return copies * FP32 * (part if layout.stage else shape.trained.largest)
    b, matrix = layout.iteration, shape.dim * max(shape.q_dim, shape.hidden_dim)
    matrices = sum(shape.trained.matrices)
    stack = max(matrix, min(STACKS.get(layout.device, 0), matrices))
    iterated = (FP32 + 2 * b) * stack
    if not layout.stage:
        return FP32 * stack + iterated
    freed = FP32 * (part - shard) + (BYTES[layout.dtype] * part if layout.stage != 3 else 0)
    return max((FP32 + b) * shard, b * (shard + matrices) + iterated) - freed


def _plain(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Without DeepSpeed: everything replicated, with fp32 masters of low-precision weights.

    DDP's buckets hold the gradients and are not freed before the update.
    """
    b, p = BYTES[layout.dtype], shape.trained.parameters
    optimizer = _state(shape, layout, has_masters=b < FP32)
    buckets = b * p if b == FP32 or layout.world_size > 1 else 0
    making = b * shape.trained.largest if layout.world_size > 1 else 0  # before it is in its bucket
    update = buckets + (0 if b == FP32 else FP32 * p)
    return Memory(b * shape.parameters, optimizer, b * p, making, activations, update)


def _replicated(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stage 0: everything replicated, torch's optimizers.

    The all-reduce uses a flat copy. Low-precision gradients are freed as fp32 copies are made.
    """
    b, p = BYTES[layout.dtype], shape.trained.parameters
    optimizer = _state(shape, layout, has_masters=b < FP32)
    flat = b * min(p, FLATTENED) if layout.world_size > 1 else 0
    update = max(b * p + flat, FP32 * p + _temporaries(shape, layout))
    return Memory(b * shape.parameters, optimizer, b * p, 0, activations, update)


def _partitioned(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stages 1 and 2 by flat partitions; with an offloaded optimizer by stage_1_and_2.py.

    Several ranks put their part of each reduced bucket into a vector: at stage 1 of the last
    micro-batch, after it unless buckets are reduced as they are computed. The update makes fp32
    copies.
    """
    b, p, largest = BYTES[layout.dtype], shape.trained.parameters, shape.trained.largest
    weights = b * shape.parameters
    part, state = sum(_parts(shape, layout)), _state(shape, layout)
    bucket = b * layout.reduce_bucket
    is_early = layout.stage == 2 or (layout.overlap and layout.accumulation_steps == 1)
    if layout.offload_optimizer:
        # master, moments and fp32 gradients; the new weights and the accumulated gradients
        host = state + (FP32 + 2 * b) * part + b * largest
        kept = 0 if is_early else b * p
        buffers = bucket * (2 if layout.overlap else 1) + 2 * b * largest
        return Memory(weights, 0, kept, buffers, activations, kept + buffers, host)
    if layout.world_size == 1:
        return Memory(weights, state, b * p, 0, activations, (b + FP32) * p)
    update = part * (b if b == FP32 else b + FP32)
    if is_early:
        # gradients of a bucket, their copy, the copy being reduced, and the next gradient
        buffers = bucket * (3 if layout.overlap else 2) + b * largest
        return Memory(weights, state, b * part, buffers, activations, update)
    gradients = b * (p + part * layout.overlap)
    return Memory(weights, state, gradients, 0, activations, max(update, b * (p + part)))


def _sharded(shape: Shape, layout: Layout, activations: int) -> Memory:
    """Stage 3 (stage3.py): 1/N of everything, and gathered weights up to max_live_parameters.

    A model below half of max_reuse_distance is complete on every device when the backward pass
    begins.
    """
    b, p = BYTES[layout.dtype], shape.parameters
    part = sum(_parts(shape, layout))
    bucket = b * layout.reduce_bucket
    # gathered weights, bucket, its flat copy for the reduce-scatter, the gradient being computed
    buffers = b * min(p, layout.max_live_parameters) + 2 * bucket + b * shape.trained.largest
    frozen = -(-(p - shape.trained.parameters) // layout.shards)
    shard, host = b * (part + frozen), 0
    state, gradients = _state(shape, layout), b * part
    update = bucket + (b + FP32) * part
    if layout.offload_optimizer:
        host = state + (FP32 + b) * part
        state, gradients, update = 0, 0, bucket
    if layout.offload_param:
        shard, host = 0, host + shard
    return Memory(shard, state, gradients, buffers, activations, update, host)


def activation_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes of saved activations at the start of the backward pass of one micro-batch.

    Counted as by Korthikanti et al. (2022), section 4, for this block: SwiGLU, grouped key heads,
    the experts that a token visits, and dropout of the embedding and of two outputs. Reference
    attention adds the scores and their fp32 softmax. Fused kernels need repeated key heads in fp32
    on a GPU, and with a document mask, which adds a rotary table per row and the mask; flex
    attention on a GPU takes one number per token instead. The peak adds the larger of the loss
    (`_loss_bytes`) and the softmax of the last block (two fp32 gradients, after its feed-forward).
    With gradient checkpointing one block is alive at a time, with the gradients of its feed-forward
    or softmax, and not during the loss.

    Under autocast the residual stream is in fp32, every matrix has a copy in bf16, and of its input
    each linear layer has one, which are one if compiled.
    """
    b, tokens = layout.product, layout.rows * shape.max_seq_len // layout.sequence
    is_mixed, stream = layout.dtype == MIXED, BYTES[layout.dtype]
    e, q, f = shape.dim, shape.q_dim, shape.hidden_dim
    # A fused norm saves its input and one scale per token; the CPU's saves two fp32 copies instead.
    norm_bytes = stream if layout.on_cuda else 2 * FP32
    norm = norm_bytes * e + FP32
    heads = norm_bytes * (q + shape.kv_dim) + FP32 * (shape.n_heads + shape.n_kv_heads)
    copies = 2  # inputs of q, k, v and of gate, up
    if is_mixed and not layout.is_compiled:
        copies = 5 + shape.use_moe * (2 * shape.n_shared_experts - 1 + shape.num_experts_per_tok)
    inputs = b * e * copies
    of_blocks, of_head = is_mixed * b * shape.hidden_matrices, is_mixed * b * shape.vocab_size * e
    feed_forward = 4 * b * f * shape.visits + (_routing_bytes(shape, b) if shape.use_moe else 0)
    scores = softmax = 0
    is_flex = layout.on_cuda and shape.head_width >= MIN_FLEX_HEAD_DIM
    is_flex = is_flex and shape.use_flash_attn and shape.max_seq_len >= MIN_FLEX_LENGTH
    mask = FP32 if is_flex else (b if shape.use_flash_attn else 1) * shape.max_seq_len
    mask *= shape.doc_mask * layout.sequence  # the mask spans all positions
    rotations = shape.doc_mask * FP32 * shape.head_width
    if shape.use_flash_attn:
        is_gpu_fp32 = layout.on_cuda and b == FP32
        repeats_keys = not is_flex if shape.doc_mask else is_gpu_fp32
        keys = q if repeats_keys else shape.kv_dim
        attention = b * (2 * q + 2 * keys) + FP32 * shape.n_heads
    else:
        attention = b * 4 * q
        per_token = shape.n_heads * shape.max_seq_len
        scores = per_token * (FP32 if b == FP32 else FP32 + b)
        softmax = 2 * FP32 * per_token - feed_forward
    kept = layout.drops * e  # a byte for each element
    layer = 2 * (norm + kept) + inputs + attention + scores + feed_forward + shape.qk_norm * heads
    head = norm + b * e + kept
    loss = _loss_bytes(shape, layout, tokens)
    if layout.recomputes:
        working = 3 * b * f + stream * e + is_mixed * b * e
        if softmax:
            low = b * shape.n_heads * shape.max_seq_len if b < FP32 else 0  # its copy is freed
            working = max(working, softmax + 3 * b * e - norm - low)
        inputs = shape.n_layers * stream * e
        forward = of_blocks + is_mixed * loss * 5 // 6  # the copies are freed at its end
        peak = tokens * head + of_head + max(loss, forward)
        peak = max(peak, of_blocks // shape.n_layers + tokens * (layer + working))
        return tokens * (inputs + mask + rotations) + peak
    layers = tokens * (shape.n_layers * layer + mask + rotations + head)
    return of_blocks + of_head + layers + max(loss, tokens * softmax)


def _loss_bytes(shape: Shape, layout: Layout, tokens: int) -> int:
    """Bytes of the loss of `tokens` positions, or of a chunk of them, at its peak.

    Eager: fp32 log-probabilities and two gradients of that size. Compiled: the logits and their
    gradient in the dtype of products. A loss of the user's own is not compiled. With a teacher: the
    logits of both, two log-probabilities of the student, and four tensors of `kl_div`, all fp32.
    With records of one: without its logits, as much for those of the student.
    """
    if layout.chunks_loss:
        tokens = min(tokens, LOSS_CHUNK)
    is_fused = layout.is_compiled and ":" not in layout.loss
    per_logit = 2 * layout.product if is_fused else 3 * FP32
    if layout.teacher is not None:
        per_logit = (2 if layout.teacher else 1) * layout.product + 6 * FP32
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
    DeepSpeed 0.19.8 uses all-reduce, at stage 2 after every micro-batch. Stage 3 gathers each
    weight once in every micro-batch, and the small ones that it does not release once a step. Above
    half of max_reuse_distance it gathers some twice, which is not counted. Muon gathers updates.
    Ranks that share matrices or positions send activations, too.
    """
    if layout.tensor > 1:
        return bytes_sent(*own_part(shape, layout)) + reduced_bytes(shape, layout)
    n, exchanged = layout.world_size, exchanged_bytes(shape, layout)
    b, p, micro_batches = BYTES[layout.dtype], shape.trained.parameters, layout.accumulation_steps
    muon, others = (layout.shards * part for part in _parts(shape, layout))
    padded = muon + others
    if layout.stage in (None, 0):
        passes = 2 * p
    elif layout.stage == 3:
        threshold = layout.param_persistence_threshold
        kept = sum(n * -(-size // n) for size in shape.named.values() if size <= threshold)
        frozen = shape.parameters - p
        passes = micro_batches * (2 * padded + frozen - kept) + kept
    else:
        passes = 2 * p * (micro_batches if layout.stage == 2 else 1) + padded
    if OPTIMIZERS[layout.optimizer].orthogonalizes and layout.stage:
        return exchanged + (b * passes + layout.iteration * muon) * (n - 1) // n
    return exchanged + b * passes * (n - 1) // n


def seconds(shape: Shape, tokens: float, world_size: int, peak_tflops: float, mfu: float) -> float:
    """Seconds for `tokens` at a share `mfu` of `peak_tflops` (10^12 FLOPs a second per device)."""
    return tokens * flops_per_token(shape) / (world_size * peak_tflops * 1e12 * mfu)


@dataclass(frozen=True)
class GPUModel:
    """Peak and memory of one GPU as printed by its vendor; no kernel reaches the peak."""

    name: str
    peak_tflops: float  # dense bf16 with fp32 accumulation, 10^12 FLOPs a second
    memory: int = 0  # GB on the label, which are about as many GiB; 0: varies


# From NVIDIA's data sheets and white papers (many print the sparse peak, which is twice as high).
# The first entry that matches the device name counts.
GPUS = (
    GPUModel("GB200", 2500.0, 186),
    GPUModel("B200", 2250.0, 180),
    GPUModel("H200", 989.4, 141),
    GPUModel("H100 PCIe", 756.0, 80),
    GPUModel("H100 NVL", 835.0, 94),
    GPUModel("H100", 989.4, 80),
    GPUModel("GH200", 989.4),
    GPUModel("A100-40GB", 312.0, 40),
    GPUModel("A100 PCIe", 312.0, 80),
    GPUModel("A100", 312.0, 80),
    GPUModel("A800", 312.0, 80),
    GPUModel("H800", 989.4, 80),
    GPUModel("L40S", 362.0, 48),
    GPUModel("L40", 181.0, 48),
    GPUModel("L4", 121.0, 24),
    GPUModel("A40", 150.0, 48),
    GPUModel("A30", 165.0, 24),
    GPUModel("A10", 125.0, 24),
    GPUModel("RTX 5090", 209.5, 32),
    GPUModel("RTX 4090", 165.2, 24),
    GPUModel("RTX 3090", 71.0, 24),
)


def known_gpu(name: str) -> GPUModel | None:
    """Return the entry for a device name such as `NVIDIA H100 80GB HBM3`; None if there is none.

    A variant, a laptop GPU or a MIG slice is another model.
    """
    other = r"(?! Laptop| D\b| Ti\b| NVL| PCIe| .*\bMIG\b)"
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu.name}\b{other}", name)), None)


def named_gpu(text: str) -> str:
    """Return the name of the entry that `text` means: `h100`, `4090`, `a100-sxm4-80gb`; else text.

    Case, vendor, form factor and kind of memory do not matter; a size of memory has to be right.
    """
    base, size = _plain_name(text)
    named = [(gpu, *_plain_name(gpu.name)) for gpu in GPUS if gpu.memory]
    matches = [gpu for gpu, name, _ in named if name == base and size in (0, gpu.memory)]
    return max(matches, key=lambda gpu: gpu.memory).name if matches else text


def _plain_name(text: str) -> tuple[str, int]:
    """A name without its common words and separators, and its GB of memory (0: none)."""
    text = re.sub(r"nvidia|geforce|rtx|tesla|sxm\d?|hbm\d?e?|oam", " ", text.lower())
    size = re.search(r"\b(\d+) ?g(?:i?b)?\b", text)
    base = text.replace(size[0], " ") if size else text
    return re.sub(r"[\W_]+", "", base), int(size[1]) if size else 0


ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class Machine:
    """GPUs, peak and token budget for the estimate; None if not given."""

    gpus: int = 1
    memory: int | None = None  # bytes of one device
    peak_tflops: float | None = None  # one device, 10^12 FLOPs a second
    mfu: float | None = None  # None: ASSUMED_MFU
    tokens: float | None = None


# Operators of forward and backward pass, each of which launches one kernel or more: of a block, and
# of everything else. OUTSIDE is what a compiled model leaves to eager code: embedding, mean loss.
LAUNCHES = {"eager": (55, 25), "compiled": (40, 22)}
OUTSIDE = 13
UPDATE_LAUNCHES = 24  # launches of a step: copies, norm, clipping, AdamW, in multi-tensor kernels
WEIGHTS = (9, 2)  # weights of a block, and others; each further micro-batch adds to every gradient
# Operators that DeepSpeed's own path adds per weight and update, by stage: those of version 0.19.8
# with 146 weights in bf16, counted on a CPU, less those without DeepSpeed.
ZERO_LAUNCHES = {0: 21, 1: 18, 2: 18, 3: 5}


def step_launches(shape: Shape, layout: Layout) -> int:
    """Return about how many kernels the host launches in one optimizer step of a dense model."""
    block, rest = LAUNCHES["compiled" if layout.is_compiled else "eager"]
    steps, (weights, others) = layout.accumulation_steps, WEIGHTS
    added = (steps - 1) * (shape.n_layers * weights + others)
    return steps * (shape.n_layers * block + rest) + added + UPDATE_LAUNCHES


def exchanged_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes one process sends in a step to exchange positions for heads (--sequence_parallel N).

    Queries, keys, values and results of each block, in the forward and the backward pass, and again
    where blocks are recomputed; (N - 1) / N of them are for other processes.
    """
    n = layout.sequence
    tokens = layout.accumulation_steps * layout.rows * shape.max_seq_len // n
    keys = max(shape.kv_dim, n * shape.head_width)  # fewer than N heads are repeated
    channels = shape.n_layers * (2 * shape.q_dim + 2 * keys)
    return layout.product * tokens * channels * (2 + layout.recomputes) * (n - 1) // n


# All-reduces of a block: in the forward pass the outputs of two layers, in the backward pass the
# gradients of the inputs of q, k, v, gate and up, one by one.
FORWARD, BACKWARD = 2, 5


def own_part(shape: Shape, layout: Layout) -> tuple[Shape, Layout]:
    """Weights of one of the ranks that share matrices, and ranks that divide their state."""
    n = layout.tensor
    return replace(shape, tensor=n), replace(layout, world_size=layout.world_size // n, tensor=1)


def reduced_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes that a rank sends in a step to its group, by ring all-reduces of (rows, T, dim)."""
    passes = FORWARD * (1 + layout.recomputes) + BACKWARD
    tokens = layout.rows * shape.max_seq_len * layout.accumulation_steps
    values = shape.n_layers * passes * tokens * shape.dim
    return BYTES[layout.dtype] * values * 2 * (layout.tensor - 1) // layout.tensor


def gathered_bytes(part: Shape, ranks: Layout) -> int:
    """Bytes of the rows of o and down that a rank gathers to save them, weights and moments."""
    columns = (part.q_dim + part.hidden_dim) * part.dim // part.tensor
    kinds = 1 + ranks.averages + ranks.moments
    return FP32 * kinds * -(-part.n_layers * columns // ranks.world_size)


def saving_bytes(part: Shape, ranks: Layout) -> int:
    """Bytes that a save needs on the device.

    Gathered rows are kept until they are copied to the host or written. Beside them is one weight
    or moment with the parts of all ranks of the group.
    """
    groups = ranks.world_size
    largest = part.dim * max(part.q_dim, part.hidden_dim) // part.tensor
    of_rank = min(largest, -(-part.parameters // groups)) if ranks.stage else largest // groups
    return gathered_bytes(part, ranks) + FP32 * of_rank * part.tensor
