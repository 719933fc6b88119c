"""What a tensor-parallel rank holds and sends, by arithmetic."""

from __future__ import annotations

from dataclasses import replace

from minimind.estimate import costs
from minimind.estimate.costs import BYTES, FP32, Layout, Memory
from minimind.estimate.shape import Shape

MIB = 2**20
# Of the output of two layers in the forward pass; DeepSpeed reduces the gradient of the input of q,
# k, v, gate and up one by one in the backward pass.
FORWARD, BACKWARD = 2, 5


def own_part(shape: Shape, layout: Layout, size: int) -> tuple[Shape, Layout]:
    """Weights of one rank of `size`, and the ranks over which ZeRO divides their state."""
    return replace(shape, tensor=size), replace(layout, world_size=layout.world_size // size)


def activation_bytes_sent(shape: Shape, layout: Layout, size: int) -> int:
    """Bytes that a rank sends in a step to its group, by ring all-reduces of (rows, T, dim)."""
    passes = FORWARD * (1 + layout.recomputes) + BACKWARD
    tokens = layout.rows * shape.max_seq_len * layout.accumulation_steps
    values = shape.n_layers * passes * tokens * shape.dim
    return BYTES[layout.dtype] * values * 2 * (size - 1) // size


def gathered_bytes(part: Shape, ranks: Layout) -> int:
    """Bytes of the rows of o and down that a rank gathers to save them, weights and moments."""
    columns = (part.dim + part.hidden_dim) * part.dim // part.tensor
    kinds = 1 + ranks.averages + ranks.moments
    return FP32 * kinds * -(-part.n_layers * columns // ranks.world_size)


def saving_bytes(part: Shape, ranks: Layout) -> int:
    """Bytes that a save needs on the device.

    Gathered rows are kept until they are copied to the host or written. Beside them is one weight
    or moment with the parts of all ranks of the group.
    """
    groups = ranks.world_size
    largest = part.dim * max(part.dim, part.hidden_dim) // part.tensor
    of_rank = min(largest, -(-part.parameters // groups)) if ranks.stage else largest // groups
    return gathered_bytes(part, ranks) + FP32 * of_rank * part.tensor


def memory_of_rank(shape: Shape, layout: Layout, size: int) -> Memory:
    """Peak memory of a rank, with the activations of undivided matrices; `update` or a save."""
    part, ranks = own_part(shape, layout, size)
    held = costs.memory(part, ranks)
    return replace(held, update=max(held.update, saving_bytes(part, ranks)))


def tensor_parallel_lines(shape: Shape, layout: Layout, size: int) -> list[str]:
    """Lines of a plan, in place of the table of ZeRO stages."""
    part, ranks = own_part(shape, layout, size)
    held = costs.memory(part, ranks)
    saving = saving_bytes(part, ranks)
    parts = {
        "weights": held.weights,
        "optimizer": held.optimizer,
        "gradients": held.gradients,
        "buffers": held.buffers,
        "activations at most": held.activations,
        "update": held.update,
        "saving": saving,
    }
    shown = ", ".join(f"{name} {value / MIB:,.1f}" for name, value in parts.items())
    to_group = activation_bytes_sent(shape, layout, size) / MIB
    to_others = costs.bytes_sent(part, ranks) / MIB
    return [
        f"ranks       {size} share each matrix of a block: {part.parameters:,} parameters per rank,"
        f" ZeRO-{layout.stage} over {ranks.world_size} of them",
        f"memory      MiB per process: {shown}",
        f"            {memory_of_rank(shape, layout, size).total / MIB:,.1f} in all: weights +"
        " optimizer + the largest of (gradients + buffers + activations, those of undivided"
        " matrices), update and saving",
        f"sent        MiB per process and step: {to_group:,.1f} of activations within the group"
        f" ({FORWARD} all-reduces per block forward, {BACKWARD} backward),"
        f" {to_others:,.1f} of gradients and weights",
    ]
