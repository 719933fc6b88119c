"""bf16 on CPUs without instructions for it: what its products give, and that none is slow."""

from collections import Counter
from math import prod
from typing import Any
from weakref import finalize

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from minimind.model import bf16_matmul
from minimind.model.activation_checkpointing import enable_checkpointing
from minimind.runtime import hardware
from tests.model.references import build

B, T, E, V = 2, 16, 48, 97
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that has no instructions for bf16."""
    monkeypatch.setattr(bf16_matmul, "HAS_BF16", False)


class Narrow(TorchDispatchMode):
    """Counts products of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name.startswith(PRODUCTS) and args[0].dtype == torch.bfloat16:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def step(recomputes: bool = False, **changes: Any) -> tuple[list[str], Tensor, dict[str, Tensor]]:
    """The products of bf16 in one step of a small model; its loss and gradients."""
    model = build(dim=E, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=V, **changes).bfloat16()
    if recomputes:
        enable_checkpointing(model)
    torch.manual_seed(1)
    rows = torch.randint(V, (B, T + 1))
    with Narrow() as counted:
        out = model.train()(input_ids=rows[:, :-1], shift_labels=rows[:, 1:])
        out.loss.backward()
    grads = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return counted.found, out.loss.detach(), grads


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("leading", [(), (T,), (B, T)], ids=str)
def test_a_product_is_that_of_fp32_rounded_once(leading: tuple[int, ...]):
    torch.manual_seed(0)
    x = torch.randn(*leading, E).bfloat16().requires_grad_()
    weight = torch.randn(V, E).bfloat16().requires_grad_()
    grad = torch.randn(*leading, V).bfloat16()
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    product, true = bf16_matmul.linear(x, weight), F.linear(wide_x, wide_weight)
    product.backward(grad)
    true.backward(grad.double())
    pairs = ((product, true), (x.grad, wide_x.grad), (weight.grad, wide_weight.grad))
    for found, exact in pairs:
        assert found is not None
        assert exact is not None
        assert found.dtype == torch.bfloat16
        # Half of bf16's last place, and what fp32 loses where terms cancel.
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)


class Wide(TorchDispatchMode):
    """Counts how many numbers of fp32 there are at most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float32:
            storage = made.untyped_storage()
            at, size = storage._cdata, storage.nbytes() // 4
            if at not in self.known:
                self.known.add(at)
                self.now += size
                self.most = max(self.most, self.now)
                finalize(storage, self._gone, at, size)
        return made

    def _gone(self, at: int, size: int) -> None:
        self.known.remove(at)
        self.now -= size


SIZES = [(7, V), (V, 7), (70, 64), (64, 70), (200, 100), (100, 200), (0, V), (V, 0)]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("inner", [E, 0])
@pytest.mark.parametrize(
    ("at_once", "part"), [(2, 2**21), (7, 2**21), (100, 64 * E), (512, 128 * E), (512, 2**21)]
)
def test_parts_make_the_whole_product_and_no_more_is_held_in_fp32(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, inner: int, at_once: int, part: int
):
    torch.manual_seed(0)
    one = torch.randn(rows, 2 * inner).bfloat16()[:, ::2]
    other = torch.randn(columns, inner).bfloat16().t()
    exact = one.double() @ other.double()
    monkeypatch.setattr(bf16_matmul, "ROWS", at_once)
    monkeypatch.setattr(bf16_matmul, "PART", part)
    with Wide() as held:
        found = bf16_matmul.bf16_matmul(one, other)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
    fewer = min(rows, columns)
    longest = max(inner, fewer)
    largest = min(at_once * longest, max(part, 64 * longest))
    assert held.most <= fewer * inner + 2 * largest  # one factor, a part of the other, the result's


@pytest.mark.parametrize("is_transposed", [False, True])
def test_custom_op_passes_opcheck(is_transposed: bool):
    one = torch.randn(E, 5).bfloat16().t() if is_transposed else torch.randn(5, E).bfloat16()
    opcheck(bf16_matmul._opaque, (one, torch.randn(E, V).bfloat16()))


def kept_of(model: Any, rows: Tensor) -> dict[tuple[torch.dtype, tuple[int, ...]], int]:
    """How many tensors of which kind the compiled model keeps for its backward pass."""
    found: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (returned,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        for node in returned:
            if isinstance(node, torch.fx.Node) and node.op != "placeholder":
                kept = node.meta.get("val")
                if isinstance(kept, Tensor):
                    found[kept.dtype, tuple(kept.shape)] += 1
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    compiled(rows[:, :-1], shift_labels=rows[:, 1:]).loss.backward()
    return dict(found)


@pytest.mark.long
@pytest.mark.usefixtures("without")
def test_compiled_what_is_kept_is_bf16_and_units_and_norms_are_computed_again():
    layers = 2
    model = build(dim=E, n_layers=layers, n_heads=6, n_kv_heads=2, vocab_size=V).bfloat16().train()
    kept = kept_of(model, torch.randint(V, (B, T + 1)))
    wide = {shape for (dtype, shape) in kept if dtype == torch.float32}
    assert max(prod(shape) for shape in wide) < B * T * 2 * 8  # no key or value, let alone more
    units = model.config.intermediate_size
    of_units = sum(n for (_, shape), n in kept.items() if shape[-1:] == (units,))
    assert of_units == 2 * layers  # gate and up, not their product
    of_width = sum(n for (_, shape), n in kept.items() if shape in ((B, T, E), (B * T, E)))
    assert of_width == 3 * layers + 1  # the residual stream and attention's, no copy that is normed


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    "changes",
    [{}, {"use_flash_attn": False}, {"use_moe": True}, {"doc_mask": True}, {"qkv_bias": True}],
    ids=str,
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_no_product_of_a_step_is_taken_in_bf16(changes: dict[str, Any], recomputes: bool):
    found, loss, grads = step(recomputes, **changes)
    assert found == []
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads.values())


def test_with_the_instructions_products_stay_in_bf16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bf16_matmul, "HAS_BF16", True)
    found, _, _ = step()
    assert found


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "head_dim": 12}])
def test_a_step_is_the_same_within_rounding(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bf16_matmul, "HAS_BF16", True)
    _, loss, grads = step(**changes)
    monkeypatch.setattr(bf16_matmul, "HAS_BF16", False)
    _, other_loss, other_grads = step(**changes)
    torch.testing.assert_close(loss, other_loss, rtol=0, atol=2**-6)
    for name, grad in grads.items():
        # bf16 carries 8 bits; a dozen roundings follow one another here.
        assert (grad - other_grads[name]).norm() <= 0.05 * grad.norm(), name


@pytest.mark.usefixtures("without")
def test_what_is_frozen_gets_no_gradient():
    x, weight = torch.randn(3, E).bfloat16(), torch.randn(V, E).bfloat16()
    bf16_matmul.linear(x.requires_grad_(), weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    bf16_matmul.linear(x.detach(), weight.requires_grad_()).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, x.detach().float().sum(0).bfloat16().expand(V, E))


@pytest.mark.usefixtures("without")
def test_compiled_it_is_one_graph_with_the_same_gradients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bf16_matmul, "ROWS", 2)
    x = torch.randn(5, E).bfloat16().requires_grad_()
    weight = torch.randn(V, E).bfloat16().requires_grad_()
    compiled = torch.compile(bf16_matmul.linear, backend="aot_eager", fullgraph=True)
    found = []
    for linear in (bf16_matmul.linear, compiled):
        x.grad = weight.grad = None
        out = linear(x, weight)
        out.square().sum().backward()
        found.append((out, x.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("without")
def test_compiled_for_rows_of_any_number_it_is_one_graph():
    counted = CompileCounterWithBackend("aot_eager")
    weight = torch.randn(V, E).bfloat16().requires_grad_()
    compiled = torch.compile(bf16_matmul.linear, backend=counted, fullgraph=True, dynamic=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, E).bfloat16().requires_grad_()
        assert compiled(x, weight).shape == (rows, V)
    assert counted.frame_count == 1


@pytest.mark.usefixtures("without")
def test_its_result_may_be_changed_in_place_and_derived_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bf16_matmul, "ROWS", 2)
    x = torch.randn(1, 5, E).bfloat16().requires_grad_()
    weight = torch.randn(V, E).bfloat16().requires_grad_()
    bf16_matmul.linear(x, weight).add_(1).sum().backward()
    assert x.grad is not None
    (slope,) = torch.autograd.grad(bf16_matmul.linear(x, weight).sum(), x, create_graph=True)
    (of_weight,) = torch.autograd.grad(slope.sum(), weight)
    assert torch.equal(of_weight, torch.full_like(weight, 5))  # once for each row


@pytest.mark.parametrize(
    ("is_there", "by_onednn", "machine", "by_avx512", "found"),
    [
        (False, True, "x86_64", True, False),
        (True, False, "x86_64", False, False),
        (True, True, "x86_64", False, False),  # AVX-512 alone
        (True, True, "AMD64", True, True),
        (True, True, "aarch64", False, True),
        (True, False, "aarch64", False, False),
    ],
)
def test_which_cpus_multiply_bf16(
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool, by_onednn: bool, machine: str, by_avx512: bool, found: bool,
):  # fmt: skip
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: by_onednn)
    monkeypatch.setattr(hardware.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: by_avx512)
    assert hardware.has_bf16() is found


@pytest.mark.usefixtures("without")
def test_under_autocast_nothing_is_widened():
    x = torch.randn(2, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert not bf16_matmul.needs_fp32_matmul(x)
    assert bf16_matmul.needs_fp32_matmul(x)
    assert not bf16_matmul.needs_fp32_matmul(x.float())
    assert not bf16_matmul.needs_fp32_matmul(x.to("meta"))
