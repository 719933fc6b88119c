"""What torch's compiler makes of a model for a GPU, read from its scheduler on a CPU.

The graphs are lowered and their kernels scheduled, with the attention of a GPU and without what is
recomputed for a CPU. No kernel is generated: the graphs run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    compile_fx,
    fake_tensor_prop,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import Layout
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V

from minimind.config.parse import parse_flags
from minimind.engine.compile import compile_model
from minimind.model import kernels as of_model


@dataclass(frozen=True)
class Kernel:
    """A kernel that inductor schedules: bytes it reads and writes, and the tensors it stores."""

    name: str
    is_extern: bool  # a product or attention, which inductor calls
    moved: int
    stored: list[tuple[tuple[int, ...], torch.dtype]]


@dataclass
class Graphs:
    """Kernels of every graph that ran, in order."""

    kernels: list[list[Kernel]] = field(default_factory=list)

    def compile(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        """Inner compiler for `compile_fx`: schedule the graph, then run it as it is."""
        _recursive_record_original_output_strides(graph)
        fake_mode = fake_tensor_prop(graph, inputs)
        with V.set_fake_mode(fake_mode):
            _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, is_inference=False)
        with V.set_fake_mode(fake_mode), DebugContext(), V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
            nodes = lowering.scheduler.nodes
            kernels = [kernel_of(n) for n in nodes if not isinstance(n, NopKernelSchedulerNode)]

        def run(*args: Any) -> Any:
            self.kernels.append([kernel for kernel in kernels if kernel.moved])  # no mere views
            return graph.forward(*args)

        return make_boxed_func(run)


def kernel_of(node: Any) -> Kernel:
    """The kernel of a scheduled node; what only the kernel itself reads is not stored."""
    inside = node.get_buffer_names()
    stored = []
    for buffer in node.get_outputs():
        is_read = any(user.get_name() not in node.get_operation_names() for user in buffer.users)
        if is_read and isinstance(buffer.node.layout, Layout):
            stored.append((tuple(map(int, buffer.node.get_size())), buffer.node.get_dtype()))
    is_extern = isinstance(node, ExternKernelSchedulerNode)
    return Kernel("+".join(sorted(inside)), is_extern, node.get_read_write_buffers_sizes(), stored)


def schedule(model: Any, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Schedule forward and backward pass of the loss of `rows`, as for a GPU."""
    fused = partial(of_model._fused, of_model.CAUSAL_KERNELS, is_causal=True, enable_gqa=True)
    monkeypatch.setattr(of_model, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(of_model, "blockwise_attention", fused)
    monkeypatch.setattr(of_model, "recompute", lambda function, *inputs: function(*inputs))
    graphs = Graphs()
    torch._dynamo.reset()
    inner_compile: Any = graphs.compile
    backend = partial(compile_fx, inner_compile=inner_compile)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compile_model(model, parse_flags(["--compile", "on"]), "cuda")
    out = model(input_ids=rows[:, :-1], shift_labels=rows[:, 1:], loss_chunk_size=0)
    (out.loss_sum / out.targets).backward()
    torch._dynamo.reset()
    return graphs
