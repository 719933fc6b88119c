"""Time of a step on one GPU and what bounds it: arithmetic, not a measurement.

A kernel takes the longer of its FLOPs at a peak and its bytes at the bandwidth (the roofline model,
Williams et al. 2009). Kernels run one after another on the GPU while the host issues the next ones,
so a step takes the longer of all kernels and all launches. Tests count launches and bytes in the
graphs that torch builds. Shape letters: N tokens of a micro-batch, E model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minimind.estimate.costs import BYTES, FP32, Layout, flops_per_token
from minimind.estimate.gpus import GPUModel
from minimind.estimate.shape import Shape


@dataclass(frozen=True)
class Rates:
    """Fractions of the data sheet's peak and bandwidth that kernels reach."""

    products: float = 1.0
    attention: float = 1.0
    memory: float = 1.0


# What no program can exceed.
DATA_SHEET = Rates()
# Assumptions, not measured here: shares of the peak and of the bandwidth that large kernels reach.
# attention: FlashAttention-2 on an H100, by the abstract of FlashAttention-3 (Shah et al. 2024).
ASSUMED = Rates(products=0.8, attention=0.35, memory=0.9)
# Microseconds of the host per launch, assumed. On a busy core of an AMD EPYC an eager operator with
# a tensor of a few elements took 14, its arithmetic included (`benchmarks/launches.py`).
LAUNCH_US = {"eager": 9.0, "compiled": 6.0}
# Operators of forward and backward pass, each of which launches one kernel or more: of a block, and
# of everything else. OUTSIDE is what a compiled model leaves to eager code: embedding, mean loss.
LAUNCHES = {"eager": (55, 25), "compiled": (40, 22)}
OUTSIDE = 13
UPDATE_LAUNCHES = 24  # of a step: copies, norm, clipping, AdamW, in multi-tensor kernels
WEIGHTS = (9, 2)  # of a block, and others; each further micro-batch adds to every gradient
FORWARD_AND_BACKWARD = 3  # products: the output, the gradients of its input and of its weight


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of the kernels of one part in one step."""

    part: str
    flops: float
    bytes: float

    def seconds(self, gpu: GPUModel, rates: Rates) -> float:
        """Seconds of these kernels on `gpu`."""
        share = rates.attention if self.part == "attention" else rates.products
        assert gpu.bandwidth is not None
        compute = self.flops / (gpu.peak_tflops * 1e12 * share)
        return max(compute, self.bytes / (gpu.bandwidth * 1e12 * rates.memory))


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one optimizer step of one process, by what they are spent on."""

    parts: dict[str, float]  # seconds of the GPU
    host: float  # seconds of the host for all launches
    flops: float  # of the model, as MFU counts them
    launches: int
    gpu: GPUModel

    @property
    def kernels(self) -> float:
        """Seconds of all kernels."""
        return sum(self.parts.values())

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return max(self.kernels, self.host)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization that these times give."""
        return self.flops / (self.seconds * self.gpu.peak_tflops * 1e12)

    @property
    def bound(self) -> str:
        """The part that takes longest, or `launches`."""
        return (
            "launches" if self.host > self.kernels else max(self.parts, key=self.parts.__getitem__)
        )


def step_time(
    shape: Shape, layout: Layout, gpu: GPUModel, rates: Rates = ASSUMED, how: str = "compiled"
) -> StepTime:
    """Estimate a step of a dense model with fused causal attention, without communication.

    `how` is compiled or eager. bf16 and fp16; in fp32 the peak of the data sheet does not apply.
    """
    parts: dict[str, float] = {}
    for work in step_work(shape, layout, how):
        parts[work.part] = parts.get(work.part, 0.0) + work.seconds(gpu, rates)
    launches = step_launches(shape, layout, how)
    tokens = layout.rows * shape.max_seq_len * layout.accumulation_steps
    return StepTime(
        parts, launches * LAUNCH_US[how] * 1e-6, flops_per_token(shape) * tokens, launches, gpu
    )


def step_work(shape: Shape, layout: Layout, how: str = "compiled") -> Iterator[Work]:
    """Yield the work of every part of one optimizer step."""
    tokens, b = layout.rows * shape.max_seq_len * layout.accumulation_steps, BYTES[layout.dtype]
    micro_batches = layout.accumulation_steps
    e, kv, f, layers = shape.dim, shape.kv_dim, shape.hidden_dim, shape.n_layers
    matrices = [(e, e, 2), (e, kv, 2), (e, f, 2), (f, e, 1)]  # inputs, outputs, number
    for inputs, outputs, number in matrices:
        yield _product("products", inputs, outputs, tokens, b, micro_batches, number * layers)
    yield _product("head", e, shape.vocab_size, tokens, b, micro_batches, 1)
    # A causal kernel computes half of the positions; the backward pass recomputes the scores.
    attention = 2 * tokens * shape.max_seq_len * e * (1 + 2.5) * layers
    # q, o, k, v; then q, o, their gradients, k, v and theirs
    yield Work("attention", attention, layers * tokens * b * (6 * e + 6 * kv))
    # Embedding, final norm; for a vocabulary its fp32 gradient, for q and k the permuted weights.
    fixed = 18 * shape.vocab_size * e + 4 * b * layers * e * (e + kv) * (how == "compiled")
    tokenwise = tokens * (layers * _block_bytes(shape, b, how) + 13 * b * e)
    yield Work("elementwise", 0, tokenwise + micro_batches * fixed)
    yield Work("loss", 0, tokens * shape.vocab_size * _loss_bytes(b, how))
    yield Work("update", 0, shape.parameters * _update_bytes(b, micro_batches))


def _product(
    part: str, inputs: int, outputs: int, tokens: int, b: int, micro_batches: int, number: int
) -> Work:
    """`number` products of (N, inputs) and (inputs, outputs), forward and backward."""
    flops = 2 * tokens * inputs * outputs
    moved = b * (tokens * (inputs + outputs) + micro_batches * inputs * outputs)
    return Work(part, FORWARD_AND_BACKWARD * number * flops, FORWARD_AND_BACKWARD * number * moved)


def _block_bytes(shape: Shape, b: int, how: str) -> int:
    """Bytes per token of norms, rotary position, SwiGLU and residual sums of a block.

    Compiled, each is one kernel per pass, with the sums of gradients in the norm's; the gradient of
    a norm's weight is one more. Eager, every operator reads its inputs and writes its result.
    """
    e, kv, f = shape.dim, shape.kv_dim, shape.hidden_dim
    if how == "compiled":
        forward = 10 * e + 2 * (e + kv) + 3 * f
        backward = (6 + 4 + 5 + 3) * e + 2 * (e + kv) + 5 * f
        return b * (forward + backward)
    rotary = (2 * b + 4 * FP32) * (e + kv)  # fp32 copy, complex product, rounded copy
    forward = b * (2 * 2 * e + 2 * 3 * e + 5 * f)  # norms, residual sums, silu and product
    backward = b * (2 * 5 * e + 5 * 3 * e + 9 * f)  # norms, sums of gradients, SwiGLU
    return forward + backward + 2 * rotary


def _loss_bytes(b: int, how: str) -> int:
    """Bytes per logit of the cross-entropy, without the product that makes the logits.

    Compiled: read once, read again in the backward pass, the gradient written, all in the dtype of
    the weights. Eager: an fp32 copy, log-probabilities, two fp32 gradients and a rounded one.
    """
    if how == "compiled":
        return 3 * b
    copies = 0 if b == FP32 else 2 * (b + FP32)
    return copies + 2 * FP32 + FP32 + 3 * FP32


def _update_bytes(b: int, micro_batches: int) -> int:
    """Bytes per parameter of clipping and AdamW in multi-tensor kernels, and of accumulation."""
    accumulate = 3 * b * (micro_batches - 1)
    clip, adamw = 3 * FP32, 7 * FP32
    masters = 0 if b == FP32 else 2 * (b + FP32)  # fp32 gradients, rounded weights
    return accumulate + clip + adamw + masters


def step_launches(shape: Shape, layout: Layout, how: str = "compiled") -> int:
    """Return the number of kernels that the host launches in one optimizer step."""
    steps, (block, rest), (weights, others) = layout.accumulation_steps, LAUNCHES[how], WEIGHTS
    added = (steps - 1) * (shape.n_layers * weights + others)
    return steps * (shape.n_layers * block + rest) + added + UPDATE_LAUNCHES


def likely_step(shape: Shape, layout: Layout, gpu: GPUModel) -> StepTime | None:
    """The estimate with assumed rates; None for what it does not cover."""
    is_covered = shape.use_flash_attn and not (shape.use_moe or shape.doc_mask)
    is_covered &= layout.dtype != "float32" and layout.device == "cuda"
    is_covered &= layout.optimizer == "adamw" and layout.sequence == 1
    if not is_covered or layout.recomputes or layout.chunks_loss:
        return None
    return step_time(shape, layout, gpu, ASSUMED, _how(layout))


def _how(layout: Layout) -> str:
    return "compiled" if layout.is_compiled else "eager"


def estimate_lines(
    shape: Shape, layout: Layout, gpu: GPUModel, mfu: float | None = None
) -> list[str]:
    """Lines of `minimind plan`: the least time of a step, and the one with assumed rates.

    `mfu`, if given, is what the time of the run is computed from in place of the estimate.
    """
    likely, how = likely_step(shape, layout, gpu), _how(layout)
    if likely is None:
        return [
            "estimate    none: only for dense models with fused causal attention in bf16 or fp16"
            " and AdamW, without --gradient_checkpointing, --sequence_parallel or --loss chunked"
            " (auto is chunked if nothing is compiled)"
        ]
    least = step_time(shape, layout, gpu, DATA_SHEET, how)
    reached = f" ({likely.mfu:.0%} MFU of {gpu.peak_tflops:g} TFLOP/s)" if mfu is None else ""
    parts = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in likely.parts.items())
    return [
        f"estimate    {gpu.name}, {how}: a step takes {least.seconds * 1e3:.1f} ms or more;",
        f"            at rates that kernels reach {likely.seconds * 1e3:.1f} ms{reached}:",
        f"            {parts};",
        f"            {likely.launches:,} launches take the host {likely.host * 1e3:.1f} ms"
        " meanwhile; not measured, without communication",
    ]


def exchanged_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes one process sends in a step to exchange positions for heads (--sequence_parallel N).

    Queries, keys, values and results of each block, in the forward and the backward pass, and again
    where blocks are recomputed; (N - 1) / N of them are for other processes.
    """
    n = layout.sequence
    tokens = layout.accumulation_steps * layout.rows * shape.max_seq_len // n
    keys = max(shape.kv_dim, n * shape.dim // shape.n_heads)  # fewer than N heads are repeated
    channels = shape.n_layers * (2 * shape.dim + 2 * keys)
    return BYTES[layout.dtype] * tokens * channels * (2 + layout.recomputes) * (n - 1) // n
