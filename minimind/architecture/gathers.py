"""Weights that ZeRO stage 3 gathers in a micro-batch: DeepSpeed's fetches, played through.

As partitioned_param_coordinator.py of DeepSpeed 0.19.8 does from the third step on. Every module
fetches its weights and prefetches some of the next ones. After it, a weight stays gathered if its
next use is near, or if the prefetch has come to that use and found the weight gathered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from minimind.architecture.shape import Shape

Order = list[Sequence[int]]  # weights of each module, in the order in which they are used


@dataclass(frozen=True)
class Module:
    """A module: its own weights, and its children in the order of the forward pass."""

    weights: Sequence[int] = ()
    children: Sequence[Module] = ()

    def forward(self) -> Order:
        return [self.weights, *chain.from_iterable(child.forward() for child in self.children)]

    def backward(self) -> Order:
        children = reversed(self.children)
        return [self.weights, *chain.from_iterable(child.backward() for child in children)]


@dataclass(frozen=True)
class Fetching:
    """Elements, by the keys `stage3_...` of a DeepSpeed JSON without the prefix; its defaults."""

    max_live_parameters: int = 10**9
    max_reuse_distance: int = 10**9
    prefetch_bucket_size: int = 5 * 10**7
    param_persistence_threshold: int = 10**5  # weights that are never released


DEFAULT_FETCHING = Fetching()


def used_in_order(shape: Shape, recomputes: bool) -> tuple[Order, set[int], list[int]]:
    """Return the weights of each module in the order of the forward and the backward pass, the
    places in it after which nothing is released, and the elements of each weight.

    Modules without weights of their own are in it: they prefetch too.
    """
    sizes: list[int] = []

    def module(*elements: int) -> Module:
        sizes.extend(elements)
        return Module(range(len(sizes) - len(elements), len(sizes)))

    def linear(inputs: int, outputs: int, has_bias: bool = False) -> Module:
        return module(inputs * outputs // shape.tensor, *[outputs] * has_bias)

    def feed_forward() -> Module:
        return Module(children=[linear(e, f), linear(e, f), linear(f, e)])

    e, q, kv, f = shape.dim, shape.q_dim, shape.kv_dim, shape.hidden_dim
    head_norm = [shape.head_width] * shape.qk_norm
    embedding = module(shape.vocab_size * e)
    blocks: list[Module] = []
    for _ in range(shape.n_layers):
        norm, attention = module(e), [linear(e, q, shape.qkv_bias)]
        attention += [module(size) for size in head_norm] + [linear(e, kv, shape.qkv_bias)]
        attention += [module(size) for size in head_norm] + [linear(e, kv, shape.qkv_bias)]
        attention += [linear(q, e)]
        parts = [norm, Module(children=attention), module(e)]
        if shape.use_moe:
            experts = shape.n_routed_experts + shape.n_shared_experts
            gate = linear(e, shape.n_routed_experts)
            parts.append(Module(children=[gate, *(feed_forward() for _ in range(experts))]))
        else:
            parts.append(feed_forward())
        blocks.append(Module(children=parts))
    last = module(e)
    head = embedding if shape.tie_word_embeddings else module(shape.vocab_size * e)
    order: Order = [(), (), *embedding.forward()]
    order += chain.from_iterable(block.forward() for block in blocks)
    order += [*last.forward(), *head.forward(), (), *head.backward(), (), *last.backward()]
    kept: set[int] = set()
    for block in reversed(blocks):
        backward = block.backward()
        if recomputes:
            # Recomputation starts where the first activation is needed and stops when it has the
            # last one. Both are in the last linear layer, which has fetched its weights and is left
            # before it releases them; without shared experts in the weighted sum of the routed.
            start = 2  # after the block and its experts
            if not shape.use_moe or shape.n_shared_experts:
                start = next(place for place, weights in enumerate(backward) if weights) + 1
                kept.add(len(order) + start - 1)
            backward[start:start] = block.forward()[1:]
        order += backward
    return [*order, *embedding.backward()], kept, sizes


def gathered(
    shape: Shape, world_size: int, fetching: Fetching, recomputes: bool = False
) -> tuple[int, int]:
    """Elements that are gathered in each micro-batch, and those once a step, with padding.

    The latter are persistent: they are gathered when they have been updated.
    """
    order, kept, sizes = used_in_order(shape, recomputes)
    padded = [-(-size // world_size) * world_size for size in sizes]
    persistent = {w for w, size in enumerate(sizes) if size <= fetching.param_persistence_threshold}
    ends = [*accumulate((sum(sizes[w] for w in module) for module in order), initial=0)]
    uses: list[list[int]] = [[] for _ in sizes]
    for step, module in enumerate(order):
        for weight in module:
            uses[weight].append(step)
    queue = deque((weight, step) for step, module in enumerate(order) for weight in module)
    here, reached = set(persistent), [-1] * len(sizes)  # the use that the prefetch has come to
    live = total = 0

    def gather(weights: Sequence[int]) -> None:
        nonlocal live, total
        here.update(weights)
        live += sum(sizes[weight] for weight in weights)
        total += sum(padded[weight] for weight in weights)

    for step, module in enumerate(order):
        gather([weight for weight in module if weight not in here])
        for _ in range(sum(reached[weight] < step for weight in module)):
            weight, use = queue.popleft()
            reached[weight] = use
        room = min(fetching.max_live_parameters - live, fetching.prefetch_bucket_size)
        chosen: dict[int, int] = {}  # elements by weight
        while queue and sum(chosen.values()) < room:
            weight, use = queue.popleft()
            reached[weight] = max(reached[weight], use)
            if weight not in here:
                chosen[weight] = sizes[weight]
        gather([*chosen])
        for weight in {*module} - persistent if step not in kept else ():
            later = uses[weight][bisect_left(uses[weight], step + 1) :]
            is_near = bool(later) and ends[later[0]] - ends[step + 1] < fetching.max_reuse_distance
            if reached[weight] <= step + 1 and not is_near:
                here.remove(weight)
                live -= sizes[weight]
    return total, sum(padded[weight] for weight in persistent)
