"""The estimate of a step's time: FLOPs, launches and bytes against the graphs that torch builds."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from minimind.architecture.costs import (
    ASSUMED,
    DATA_SHEET,
    GPUS,
    LAUNCHES,
    OUTSIDE,
    Layout,
    known_gpu,
    step_launches,
    step_time,
    step_work,
)
from minimind.architecture.shape import Shape, flops_per_token, shape_of
from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.engine.build import leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.model import layers
from minimind.model.decoder import MiniMindConfig, MiniMindForCausalLM
from tests.engine.test_backends import engine_of
from tests.model.compiled_graphs import Graphs, schedule

H100, H200 = (gpu for name in ("H100", "H200") if (gpu := known_gpu(name)))
LAYOUT = Layout(None, 1, "bfloat16", 32)


def shape(name: str = "26m") -> Shape:
    return replace(shape_of(parse_flags(["--model", name])), max_seq_len=1024)


def test_products_and_attention_have_the_flops_that_mfu_counts_but_for_causal_attention():
    flops: Counter[str] = Counter()
    for work in step_work(shape(), LAYOUT):
        flops[work.part] += int(work.flops)
    tokens = 32 * 1024
    attention = 12 * 8 * 512 * 1024 * tokens
    counted = flops["products"] + flops["head"]
    assert counted + attention == flops_per_token(shape()) * tokens
    # half of the positions; 2 products forward, 5 with the recomputed scores backward, of 4 + 8
    assert flops["attention"] == attention * 7 / 12


@pytest.mark.parametrize("name", ["26m", "104m", "0.4b"])
@pytest.mark.parametrize("how", ["compiled", "eager"])
def test_no_estimate_exceeds_the_data_sheet_and_more_bandwidth_is_faster(name: str, how: str):
    least, likely = (step_time(shape(name), LAYOUT, H100, r, how) for r in (DATA_SHEET, ASSUMED))
    assert 0 < likely.mfu < least.mfu < 1
    assert step_time(shape(name), LAYOUT, H200, ASSUMED, how).mfu > likely.mfu
    assert step_time(shape(name), LAYOUT, H100, ASSUMED, "eager").mfu <= likely.mfu


def test_accumulation_spreads_the_update_over_more_tokens():
    few = step_time(shape("0.4b"), replace(LAYOUT, rows=8), H100)
    many = step_time(shape("0.4b"), replace(LAYOUT, rows=8, accumulation_steps=8), H100)
    assert many.parts["update"] < 2 * few.parts["update"]
    assert many.mfu > few.mfu + 0.05


def test_a_small_step_is_bound_by_launches():
    small = step_time(shape(), replace(LAYOUT, rows=1), H100)
    assert small.bound == "launches"
    assert small.seconds == small.host
    assert step_time(shape(), LAYOUT, H100).bound == "products"


def planned(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def test_plan_estimates_a_step_of_a_named_gpu(capsys: pytest.CaptureFixture[str]):
    words = "--model 26m --max_seq_len 1024 --batch_size 32 --deepspeed_config none"
    out = planned(capsys, f"{words} --gpu_model H100 --tokens 1e9")
    likely = step_time(shape(), LAYOUT, H100)
    assert f"{likely.seconds * 1e3:.1f} ms ({likely.mfu:.0%} MFU" in out
    assert "not measured" in out
    assert "1 x 989.4 TFLOPS" in out
    assert "estimate" not in planned(capsys, words)
    assert "H100, eager" in planned(capsys, f"{words} --gpu_model H100 --compile off --loss full")


@pytest.mark.parametrize(
    "more",
    [
        "--use_moe",
        "--doc_mask",
        "--dtype float32",
        "--device cpu",
        "--gradient_checkpointing",
        "--loss chunked",
        "--compile off",
    ],
)
def test_plan_says_where_there_is_no_estimate(capsys: pytest.CaptureFixture[str], more: str):
    assert "estimate    none" in planned(capsys, f"--gpu_model H100 --batch_size 2 {more}")


def test_every_gpu_with_a_bandwidth_can_be_named():
    assert [known_gpu(gpu.name) for gpu in GPUS] == [*GPUS]


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
    monkeypatch.setattr(layers, "rms_norm", lambda x, weight, eps: FusedNorm.apply(x, weight))
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
    small = replace(shape(), n_layers=1)
    for n_layers, micro_batches in ((1, 1), (2, 1), (2, 3)):
        layout = replace(LAYOUT, accumulation_steps=micro_batches)
        stated = step_launches(replace(small, n_layers=n_layers), layout, "eager")
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
def test_a_compiled_block_moves_the_bytes_that_are_stated(graphs: list[Graphs]):
    """But for the rotary table, which every row of a batch shares."""
    moved: list[list[int]] = [
        [
            sum(k.moved for ks in found.kernels for k in ks if k.is_extern is extern)
            for extern in (False, True)
        ]
        for found in graphs
    ]
    few, many = (dict.fromkeys(("products", "attention", "elementwise"), 0.0) for _ in range(2))
    for found, n_layers in ((few, 2), (many, 3)):
        small = replace(shape(), n_layers=n_layers, max_seq_len=ROW)
        for work in step_work(small, replace(LAYOUT, rows=1)):
            if work.part in found:
                found[work.part] += work.bytes
    tables = 2 * 2 * 512 // 8 * 4 * ROW  # of q and k, forward and backward, fp32
    elementwise = many["elementwise"] - few["elementwise"] + tables
    assert moved[1][0] - moved[0][0] == pytest.approx(elementwise, rel=0.15)
    called = sum(many[part] - few[part] for part in ("products", "attention"))
    assert moved[1][1] - moved[0][1] == pytest.approx(called, rel=0.1)


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
