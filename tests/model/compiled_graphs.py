"""What torch's compiler makes of the model for a GPU, read from its scheduler on a CPU.

Nothing is generated or run by inductor: the graph is lowered and its kernels are scheduled, which is
the same for every device but for the choice of attention kernel. Gradients come from the graph itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from minimind.model import activation_checkpointing, layers


@dataclass
class Scheduled:
    """Kernels and bytes of the forward graph, then of the backward graph."""

    kernels: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    buffers: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=list)

    def compile(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        """Inner compiler of `compile_fx`: schedule the graph, then run it as it is."""
        _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, is_inference=False)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
            nodes = [n for n in lowering.scheduler.nodes if not n.is_nop() ]
            self.kernels.append(len(nodes))
            self.moved.append(lowering.count_bytes()[0])
            self.buffers.append(
                {b.get_name(): (tuple(map(int, b.get_size())), b.get_dtype()) for b in lowering.buffers if b.get_name() not in lowering.removed_buffers}
            )
        return make_boxed_func(graph.forward)


def schedule(model: Any, rows: torch.Tensor, monkeypatch: Any) -> Scheduled:
    """Schedule forward and backward pass of the loss of `rows`, as on a GPU."""
    monkeypatch.setattr(layers, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(
        layers,
        "blockwise_attention",
        lambda *qkv: layers._fused(layers.CAUSAL_KERNELS, *qkv, is_causal=True, enable_gqa=True),
    )
    monkeypatch.setattr(activation_checkpointing, "recompute", lambda function, *inputs: function(*inputs))
    found = Scheduled()
    torch._dynamo.reset()
    backend = partial(compile_fx, inner_compile=found.compile)
    forward = torch.compile(model.forward, dynamic=False, backend=backend)
    out = forward(input_ids=rows[:, :-1], shift_labels=rows[:, 1:], loss_chunk_size=0)
    (out.loss_sum / out.targets).backward()
    return found
