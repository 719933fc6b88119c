"""Kernels of a step, as stated, against the operators and the graphs that torch builds."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from minimind.architecture.costs import LAUNCHES, Layout, step_launches
from minimind.architecture.shape import shape_of
from minimind.config.parse import parse_flags
from minimind.engine.build import leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from tests.engine.test_backends import engine_of
from tests.model.compiled_graphs import Graphs, schedule

LAYOUT = Layout(None, 1, "bfloat16", 32)
OUTSIDE = 13  # operators that a compiled model leaves to eager code: embedding, mean loss


class FusedNorm(torch.autograd.Function):
    """Stands in for the fused norm of a GPU: one operator forward, two backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x + 0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] - x, torch.ones_like(weight)


class Operators(TorchDispatchMode):
    """Counts the operators that launch kernels on a GPU.

    Not views, allocations and collectives; mul.out is what a multi-tensor norm does on a CPU.
    """

    FREE = ("empty", "new_empty", "detach", "_unsafe_view", "prim::", "profiler::", "c10d::")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if not func.is_view and not name.startswith(self.FREE) and name != "mul.out":
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def eager_step(monkeypatch: pytest.MonkeyPatch, n_layers: int, micro_batches: int) -> int:
    """Operators of a step without DeepSpeed in bf16, with the norm and optimizer of a GPU."""
    monkeypatch.setattr(F, "rms_norm", lambda x, _, weight, eps: FusedNorm.apply(x, weight))
    supported = "_get_foreach_kernels_supported_devices"
    monkeypatch.setattr(_foreach_utils, supported, lambda: ["cpu"])
    sizes: Any = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4}
    config = MiniMindConfig(**sizes, num_hidden_layers=n_layers, num_key_value_heads=2)
    flags = f"--dtype bfloat16 --accumulation_steps {micro_batches}"
    engine = engine_of(MiniMindForCausalLM(config), monkeypatch, flags)
    rows, clock = torch.randint(96, (2, 17)), PhaseClock(torch.device("cpu"))
    try:
        for counted in (nullcontext(), seen := Operators()):
            engine.seed(0)
            clock.begin()
            with counted:
                engine.step([rows] * micro_batches, 1e-3, clock)
    finally:
        leave_process_group()
    return seen.found.total()


def test_an_eager_step_launches_what_is_stated(monkeypatch: pytest.MonkeyPatch):
    small = shape_of(parse_flags(["--model", "26m"]))
    for n_layers, micro_batches in ((1, 1), (2, 1), (2, 3)):
        layout = replace(LAYOUT, accumulation_steps=micro_batches)
        stated = step_launches(replace(small, n_layers=n_layers), layout)
        assert eager_step(monkeypatch, n_layers, micro_batches) == stated


ROW = 128


@pytest.fixture(scope="module")
def graphs() -> list[Graphs]:
    """The compiled graphs of two and three layers of the 26m preset, in bf16."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for n_layers in (2, 3):
            sizes: Any = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
            config = MiniMindConfig(vocab_size=6400, num_hidden_layers=n_layers, **sizes)
            model = MiniMindForCausalLM(config).bfloat16().train()
            found.append(schedule(model, torch.randint(6400, (1, ROW + 1)), patch))
    return found


@pytest.mark.long
def test_a_compiled_model_launches_what_is_stated(graphs: list[Graphs]):
    two, three = (sum(map(len, found.kernels)) for found in graphs)
    block, rest = LAUNCHES["compiled"]
    assert three - two == block
    assert two == 2 * block + rest - OUTSIDE


@pytest.mark.long
def test_a_compiled_loss_stores_no_logits_in_float32(graphs: list[Graphs]):
    """Logits and their gradient are stored once each, in bf16."""
    stored = [
        dtype
        for kernels in graphs[0].kernels
        for kernel in kernels
        for size, dtype in kernel.stored
        if size[-2:] == (ROW, 6400)
    ]
    assert stored == [torch.bfloat16, torch.bfloat16]


@pytest.mark.long
def test_compiled_rotation_is_of_reals_in_halves(graphs: list[Graphs]):
    complexes = {torch.complex64, torch.complex128}
    stored = [s for found in graphs for ks in found.kernels for k in ks for s in k.stored]
    assert not [dtype for _, dtype in stored if dtype in complexes]
    halves = [size for size, _ in stored if size[-1:] == (512 // 8 // 2,)]
    assert halves  # channels j and j + D / 2 are stored side by side
