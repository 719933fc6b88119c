"""Muon on whole matrices and on shards of them: which weights, which gradient, which rate."""

from __future__ import annotations

import json
import time
from threading import Barrier, Thread
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.optimizers import NEWTON_SCHULZ
from minimind.config.parse import parse_flags
from minimind.engine.clocks import CommunicationClock
from minimind.engine.optimizers import (
    MuonWithAdamW,
    ShardedMatrix,
    Shards,
    hidden_matrices,
    newton_schulz,
    optimizer_of,
    run_groups,
    stacks,
)
from minimind.engine.plain_backend import PlainBackend
from minimind.engine.state import Fragment
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.device import Host
from tests.distributed.muon_stacks import CASES, STACKS
from tools.forking import Nursery

SHAPE: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
GPT2_MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
ROWS = torch.arange(2 * 9).view(2, 9) % 96


def model_of(**changes: Any) -> MiniMindForCausalLM:
    torch.manual_seed(1)
    return MiniMindForCausalLM(MiniMindConfig(**SHAPE, **changes))


def backend_of(line: str) -> PlainBackend:
    run, model = parse_flags(f"--dtype bfloat16 {line}".split()), model_of()
    model.to(getattr(torch, run.dtype))
    return PlainBackend(model, model, ResolvedConfig(run, "single"), run_groups(model, run))


def momenta(backend: PlainBackend) -> dict[str, torch.Tensor]:
    slices = backend.state().slices(0, 1)
    return {key.split("|")[1]: v.clone() for key, v in slices if key.startswith("momentum_buffer")}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"qkv_bias": True},
        {"use_moe": True, "n_routed_experts": 2},
    ],
)
def test_muon_takes_the_matrices_of_the_blocks(changes):
    model = model_of(**changes)
    names = set(hidden_matrices(model))
    others = {name for name, _ in model.named_parameters()} - names
    assert all(name.startswith("model.layers.") for name in names)
    vectors = {name for name in others if "norm" in name or name.endswith("bias")}
    assert all("embed" in name or "lm_head" in name for name in others - vectors)
    assert sum(name.endswith("bias") for name in vectors) == (6 if "qkv_bias" in changes else 0)
    assert any("experts.1." in name for name in names) == bool(changes.get("use_moe"))
    groups = run_groups(model, parse_flags(["--optimizer", "muon"]))
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [group.get("use_muon", False) for group in groups] == [False, False, True]
    assert len(groups[1]["params"]) == len(vectors)
    assert groups[1]["weight_decay"] == 0


def test_the_flags_of_muon_reach_it():
    line = "--optimizer muon --muon_momentum 0.8 --muon_scaling match_rms_adamw --weight_decay 0.3"
    line += " --muon_steps 3 --muon_coefficients polar_express"
    group = backend_of(line).torch_optimizer.param_groups[-1]
    assert (group["ns_steps"], group["ns_coefficients"]) == (3, NEWTON_SCHULZ["polar_express"])
    names = ("momentum", "adjust_lr_fn", "weight_decay", "nesterov")
    assert [group[name] for name in names] == [0.8, "match_rms_adamw", 0.3, True]


def differences_to_torch(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, stack: int, **options: Any
) -> list[float]:
    """Largest difference of each matrix to torch.optim.Muon's after three steps."""
    monkeypatch.setattr(Host, "has_bf16", has_bf16)
    torch.manual_seed(2)
    shapes = [(8, 24), (24, 8), (8, 8)] * 3
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    group: Any = {"params": matrices, "lr": 0.05, **options}
    other = {"params": [torch.nn.Parameter(torch.zeros(1))]}
    quintic = {"ns_coefficients": NEWTON_SCHULZ["quintic"]}
    muon_group = {**group, **quintic, "use_muon": True, "names": frozenset()}
    optimizer = MuonWithAdamW([other, muon_group], lr=1e-3)
    optimizer.stack = stack
    expected = [torch.nn.Parameter(p.detach().clone()) for p in matrices]
    reference = torch.optim.Muon([{**group, "params": expected}])
    for _ in range(3):
        for p, copy in zip(matrices, expected, strict=True):
            p.grad = torch.randn_like(p)
            copy.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    return [
        float((p - copy).detach().abs().max()) for p, copy in zip(matrices, expected, strict=True)
    ]


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("stack", [0, 2**16])
def test_a_step_is_that_of_torch(monkeypatch, scaling, stack):
    options = {"adjust_lr_fn": scaling, "momentum": 0.9, "weight_decay": 0.2, "stack": stack}
    assert max(differences_to_torch(monkeypatch, True, **options)) < 1e-6
    assert 0 < max(differences_to_torch(monkeypatch, False, **options)) < 0.005


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (9, 9)])
def test_quintic_is_the_iteration_of_torch_bit_for_bit(shape):
    torch.manual_seed(3)
    update = torch.randn(shape).bfloat16()
    expected = _zeropower_via_newtonschulz(update, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert torch.equal(newton_schulz(update, NEWTON_SCHULZ["quintic"], 5, 1e-7), expected)


@pytest.mark.parametrize("name", NEWTON_SCHULZ)
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (9, 9)])
def test_the_iteration_in_fp32_is_that_in_float64(name, shape):
    torch.manual_seed(3)
    update, numbers = torch.randn(shape), (NEWTON_SCHULZ[name], 5, 1e-7)
    found = newton_schulz(update, *numbers)
    assert torch.allclose(found.double(), newton_schulz(update.double(), *numbers), atol=1e-5)
    values = torch.linalg.svdvals(found)
    assert 0.5 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
@pytest.mark.parametrize("steps", [4, 5])
def test_polar_express_on_the_short_side_is_that_on_the_whole_matrix(shape, steps):
    def one_by_one(update: Tensor) -> Tensor:
        x = (update if shape[0] < shape[1] else update.T) / update.norm()
        for a, b, c in rows[:steps]:
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x if shape[0] < shape[1] else x.T

    torch.manual_seed(4)
    update, rows = torch.randn(shape, dtype=torch.float64), NEWTON_SCHULZ["polar_express"]
    found = newton_schulz(update, rows, steps, 1e-7)
    assert torch.allclose(found, one_by_one(update), rtol=0, atol=1e-12)
    assert not torch.equal(found, one_by_one(update))  # other operations
    bf16 = update.bfloat16()
    assert torch.equal(newton_schulz(bf16, rows, steps, 1e-7), one_by_one(bf16))


def minimax(low: float, high: float) -> tuple[float, float, float]:
    """(a, b, c) by which a x + b x^3 + c x^5 is nearest to 1 from `low` to `high`: Remez."""
    a, b, c = 1.875, -1.25, 0.375  # the limit of a narrow interval
    points = torch.linspace(low, high, 4, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    for _ in range(30 if high - low > 1e-5 else 0):
        system = torch.stack([points, points**3, points**5, signs], 1)
        a, b, c, _ = torch.linalg.solve(system, torch.ones_like(points)).tolist()
        root = (9 * b * b - 20 * a * c) ** 0.5  # of the derivative
        points[1:3] = torch.tensor([(-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)]).sqrt()
    return a, b, c


def test_polar_express_brings_singular_values_to_1_as_its_analysis_says():
    """Each polynomial is the minimax one of the interval to which those before bring the values.

    The first is that of a narrower interval, scaled so that the ends lie alike around 1 (section
    3.4 of the paper), as large values would else become small ones.
    """
    rows, safety = NEWTON_SCHULZ["polar_express"], 1.01
    low = bottom = 1e-3
    high, bounds = 1.0, []
    for found in rows:
        a, b, c = minimax(max(low, 0.02407327424182761 * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        a, b, c = (2 / sum(ends) * number for number in (a, b, c))
        scale = 1.0 if found is rows[-1] else safety
        assert found == pytest.approx((a / scale, b / scale**3, c / scale**5), rel=1e-6)
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
        bottom = found[0] * bottom + found[1] * bottom**3 + found[2] * bottom**5
        bounds.append((bottom, high))
    assert bounds[4] == pytest.approx((0.84618, 1.12356), abs=1e-5)
    for x in torch.logspace(-3, 0, 200, dtype=torch.float64).tolist():
        matrix = torch.tensor([[x, 0], [0, (1 - x * x) ** 0.5]], dtype=torch.float64)  # norm 1
        for steps, (smallest, largest) in enumerate(bounds, 1):
            value = newton_schulz(matrix, rows, steps, 1e-7)[0, 0].item()
            assert smallest - 1e-9 < value < largest + 1e-9
    further = newton_schulz(torch.eye(2, dtype=torch.float64), rows, 12, 1e-7)
    assert torch.allclose(further, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_cautious_decay_is_where_the_update_makes_a_weight_smaller():
    """Of every matrix, by Muon or AdamW; the weights without a decay give the update."""

    def weights_after_a_step(line: str) -> dict[str, Tensor]:
        torch.manual_seed(5)
        run, model = parse_flags(f"--optimizer muon --muon_lr 0.1 {line}".split()), model_of()
        optimizer = optimizer_of(run_groups(model, run), run)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    before = {name: p.detach() for name, p in model_of().named_parameters()}
    without = weights_after_a_step("--weight_decay 0")
    always = weights_after_a_step("--weight_decay 0.5")
    cautious = weights_after_a_step("--weight_decay 0.5 --cautious_weight_decay")
    for name, weight in before.items():
        decays = (without[name] - weight) * weight <= 0
        expected = torch.where(decays, always[name], without[name])
        assert torch.allclose(cautious[name], expected, rtol=0, atol=1e-7), name
        if weight.ndim == 2:
            assert 0.2 < decays.float().mean() < 0.8


def test_a_table_of_positions_is_no_matrix_for_muon():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=96, n_positions=16)
    names = set(hidden_matrices(GPT2LMHeadModel(config)))
    assert names == {f"transformer.h.0.{n}.weight" for n in GPT2_MATRICES}


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ("", 0.02),
        ("--muon_lr 0.01", 0.01),
        ("--muon_scaling match_rms_adamw", 2e-3),
        ("--muon_scaling match_rms_adamw --muon_lr 0.004", 0.004),
    ],
)
def test_both_rates_follow_the_schedule(flags, rate):
    backend = backend_of(f"--optimizer muon --learning_rate 2e-3 {flags}")
    for share in (1.0, 0.25):
        assert backend.begin(2e-3 * share) == 2e-3 * share
        rates = [group["lr"] for group in backend.torch_optimizer.param_groups]
        assert rates == pytest.approx([2e-3 * share, 2e-3 * share, rate * share])


def gradient_step(backend: PlainBackend, scale: float = 1.0) -> Any:
    backend.begin(2e-3)
    logits = backend.module(input_ids=ROWS).logits.float()
    backend.backward(logits.pow(2).sum() * scale)
    return backend.update(is_last=True)


def test_the_gradient_is_clipped_before_the_momentum_and_its_norm_is_that_of_adamw():
    clipped = backend_of("--dtype float32 --optimizer muon --grad_clip 0.25")
    norm = gradient_step(clipped)
    assert norm == gradient_step(backend_of("--dtype float32 --grad_clip 0.25"))
    whole = backend_of("--dtype float32 --optimizer muon --grad_clip 0")
    assert gradient_step(whole) == norm > 0.25
    for name, expected in momenta(whole).items():
        assert torch.allclose(momenta(clipped)[name], expected * (0.25 / norm), rtol=1e-4)


def reference(update: Tensor, rows: Any, steps: int) -> Tensor:
    """The iteration of matrices in their own dtype, written out."""
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.mT if is_tall else update
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt()
    for step in range(steps):
        a, b, c = rows[min(step, len(rows) - 1)]
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


@pytest.mark.parametrize("name", NEWTON_SCHULZ)
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (9, 9), (16, 32), (64, 192)])
def test_matrices_together_are_as_exact_as_one_by_one(name: str, shape: tuple[int, int]):
    """In float64 they are the polynomials; else as far from them on average as one by one."""
    torch.manual_seed(1)
    updates, numbers = torch.randn(48, *shape), (NEWTON_SCHULZ[name], 5, 1e-7)
    exact = reference(updates.double(), NEWTON_SCHULZ[name], 5)
    found = newton_schulz(updates.double(), *numbers)
    assert torch.allclose(found, exact, rtol=0, atol=1e-12)

    def errors(found: Tensor, expected: Tensor) -> Tensor:
        """The error of each matrix, relative to its norm."""
        return (found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))

    for dtype, mean, difference in ((torch.float32, 5e-6, 4e-6), (torch.bfloat16, 0.05, 0.02)):
        alone = torch.stack([newton_schulz(one, *numbers) for one in updates.to(dtype)]).double()
        together = newton_schulz(updates.to(dtype), *numbers).double()
        assert errors(alone, exact).mean() < mean
        assert errors(together, exact).mean() < 1.05 * errors(alone, exact).mean()
        assert errors(together, alone).max() < difference


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0, [[0], [2], [3], [5], [6], [1], [4]]),
        (15, [[0], [2], [3], [5], [6], [1], [4]]),
        (16, [[0], [2, 3], [5, 6], [1], [4]]),
        (31, [[0, 2], [3, 5, 6], [1], [4]]),
        (32, [[0, 2], [3, 5, 6], [1, 4]]),
        (2**24, [[0, 2, 3, 5, 6], [1, 4]]),
    ],
)
def test_a_stack_has_matrices_of_one_shape_and_a_bounded_number_of_elements(most, expected):
    shapes = [(2, 4), (4, 4), (2, 4), (2, 4), (4, 4), (2, 4), (2, 4)]
    assert [*stacks(shapes, most)] == expected
    assert [*stacks([], most)] == []


class Counted(TorchDispatchMode):
    """Operators, and the most bytes at a time that they have allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(made)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, at: int, size: int) -> None:
        self._known.remove(at)
        self.now -= size


class Collectives:
    """DeepSpeed's communication backend of threads, with a gather of known length."""

    MS = 2.0

    def __init__(self, ranks: int) -> None:
        self._barrier, self._inputs = Barrier(ranks), dict[int, Tensor]()

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, group: int) -> None:
        """`group` is the rank."""
        time.sleep(self.MS / 1e3)
        self._inputs[group] = input
        self._barrier.wait(20)
        output.copy_(torch.cat([self._inputs[rank] for rank in sorted(self._inputs)]))
        self._barrier.wait(20)


def sharded(matrices: list[Tensor], ranks: int, rank: int, stage: int) -> tuple[Tensor, list[Any]]:
    """The shard of a rank and its matrices, as DeepSpeed divides them."""
    found = []
    if stage == 3:
        parts, offset = [], 0
        for p in matrices:
            size = -(-p.numel() // ranks)
            padded = torch.nn.functional.pad(p.detach().view(-1), (0, size * ranks - p.numel()))
            parts.append(padded.view(ranks, size)[rank])
            start = min(rank * size, p.numel())
            place = start, min(size, p.numel() - start), offset
            found.append((p.shape, place, slice(offset, offset + size)))
            offset += size
        flat = torch.cat(parts)
    else:
        vector = torch.cat([p.detach().view(-1) for p in matrices])
        size = -(-len(vector) // ranks)
        vector, at = torch.nn.functional.pad(vector, (0, size * ranks - len(vector))), 0
        for p in matrices:
            start, end = max(at, rank * size), min(at + p.numel(), (rank + 1) * size)
            if start < end:
                place = start - at, end - start, start - rank * size
                found.append((p.shape, place, slice(at, at + p.numel())))
            at += p.numel()
        flat = vector[rank * size : (rank + 1) * size].clone()
    return flat, [
        ShardedMatrix(shape, Fragment("", start, length, flat, offset), columns)
        for shape, (start, length, offset), columns in found
    ]


@pytest.mark.parametrize("more", ["", "--cautious_weight_decay --muon_coefficients polar_express"])
@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (2, 2), (2, 5), (3, 2), (3, 3)])
@pytest.mark.parametrize("stack", [0, 1200, 2**16])
def test_a_step_on_flat_shards_is_that_on_whole_matrices(
    monkeypatch: pytest.MonkeyPatch, more: str, stage: int, ranks: int, stack: int
):
    run = parse_flags(f"--optimizer muon --muon_lr 0.05 --learning_rate 1e-3 {more}".split())
    groups = run_groups(model_of(), run)
    whole: Any = optimizer_of(groups, run)
    whole.stack = stack
    matrices = groups[-1]["params"]
    monkeypatch.setattr("minimind.engine.optimizers.dist.get_world_size", lambda group: ranks)
    collectives, clock = Collectives(ranks), CommunicationClock(torch.device("cpu"))
    shards = [sharded(matrices, ranks, rank, stage) for rank in range(ranks)]
    optimizers = []
    for rank, (flat, found) in enumerate(shards):
        last = {**groups[-1], "params": [torch.zeros(2, 2)], "names": frozenset()}
        optimizer = MuonWithAdamW([{"params": [torch.zeros(1)]}, last], lr=1e-3)
        optimizer.param_groups[-1]["params"] = [flat]
        rows = ranks if stage == 3 else 1
        optimizer.shards = Shards({id(flat): found}, rows, collectives, rank)  # pyright: ignore[reportArgumentType] (a thread)
        optimizer.stack = stack
        optimizers.append(optimizer)
    clock.watch_deepspeed(collectives)
    for seed in range(3):
        torch.manual_seed(seed)
        gradients = [torch.randn_like(p) for p in matrices]
        for p, gradient in zip(matrices, gradients, strict=True):
            p.grad = gradient.clone()
        for rank, (flat, _) in enumerate(shards):
            flat.grad = sharded(gradients, ranks, rank, stage)[0]
        whole.step()
        threads = [Thread(target=optimizer.step) for optimizer in optimizers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    momenta = [whole.state[p]["momentum_buffer"] for p in matrices]
    for rank, (flat, _) in enumerate(shards):
        expected = sharded(matrices, ranks, rank, stage)[0]
        if ranks == 1:
            assert torch.equal(flat, expected)
        assert torch.allclose(flat, expected, rtol=0, atol=1e-7)
        buffer = optimizers[rank].state[flat]["momentum_buffer"]
        assert torch.equal(buffer, sharded(momenta, ranks, rank, stage)[0])
    assert clock.take() >= 3 * Collectives.MS  # comm_ms contains the gathers


@pytest.mark.parametrize("is_cautious", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_operators_do_not_grow_with_the_matrices_nor_memory_beyond_a_stack(
    monkeypatch: pytest.MonkeyPatch, is_cautious: bool, is_sharded: bool
):
    """At most 10 bytes for an element of a stack of square matrices, and ZeRO's of the shard."""
    monkeypatch.setattr(Host, "has_bf16", True)
    monkeypatch.setattr("minimind.engine.optimizers.dist.get_world_size", lambda group: 1)

    def of_a_step(count: int, stack: int) -> Counted:
        matrices = [torch.randn(32, 32) for _ in range(count)]
        group = {"params": [torch.zeros(2, 2)], "lr": 0.05, "use_muon": True, "names": frozenset()}
        group |= {"is_cautious": is_cautious, "ns_coefficients": NEWTON_SCHULZ["quintic"]}
        optimizer = MuonWithAdamW([{"params": [torch.zeros(1)]}, group], lr=1e-3)
        optimizer.stack = stack
        params = matrices
        if is_sharded:
            flat, found = sharded(matrices, 1, 0, 2)
            optimizer.shards = Shards({id(flat): found}, 1, Collectives(1), 0)  # pyright: ignore[reportArgumentType] (a thread)
            params = [flat]
        optimizer.param_groups[-1]["params"] = params
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()  # allocates the momenta
        with Counted() as counted:
            optimizer.step()
        return counted

    few, many, bounded = of_a_step(8, 2**20), of_a_step(64, 2**20), of_a_step(64, 2**13)
    assert many.operators == few.operators < 60
    assert bounded.operators <= 8 * few.operators
    # A shard's update in both dtypes; then that in bf16, what is gathered, and the stack.
    most = max(2**16 * 6, 2**16 * 4 + 2**13 * 10) if is_sharded else 2**13 * 10
    assert bounded.most < most + 100 < many.most
    assert of_a_step(64, 0).operators > 64 * 25


def test_a_resumed_run_iterates_as_before(monkeypatch: pytest.MonkeyPatch):
    """Elements in a stack: of the checkpoint, or of the table before a first update."""
    line, table = "--optimizer muon --dtype float32", "minimind.engine.optimizers.STACKS"
    assert gradient_step(backend_of("--dtype float32"))
    assert backend_of("--dtype float32").counters()["muon_stack"] is None
    monkeypatch.setattr(table, {"cpu": 0})
    first = backend_of(line)
    fresh = first.counters()
    gradient_step(first)
    monkeypatch.setattr(table, {"cpu": 2**20})
    for saved, expected in ((first.counters(), 0), (fresh, 2**20)):
        other = backend_of(line)
        gradient_step(other)
        other.restore_counters(saved)
        assert other.counters()["muon_stack"] == saved["muon_stack"]
        gradient_step(other)
        assert other.counters()["muon_stack"] == expected
    monkeypatch.setattr(table, {})
    other = backend_of(line)
    gradient_step(other)
    assert other.counters()["muon_stack"] == 0


@pytest.fixture(scope="module")
def studied(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("stacks")
    words = [str(root / "found.json")]
    run = nursery.run("tests.distributed.muon_stacks", words, root / "rank", processes=1)
    statuses, _, report = run
    assert statuses == [0], report[-3000:]
    return json.loads((root / "found.json").read_text())


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("how", STACKS)
@pytest.mark.parametrize("name", CASES)
def test_an_engine_resumes_in_its_stacks_bit_for_bit(studied: dict[str, Any], how: str, name: str):
    """Also from the checkpoint of a run without DeepSpeed, whose numbers are the same."""
    found, without = studied[f"{how}, {name}"], studied[f"{how}, none, {CASES[name].dtype}"]
    after = found["after"]
    assert found["resumed"] == after
    assert after["recorded"] == STACKS[how]
    assert max(after["together"]) == {"one by one": 1, "pairs": 4, "all": 15}[how]
    assert after["losses"] == without["after"]["losses"]
    assert after["digest"] == without["after"]["digest"]
    if CASES[name].stage is not None:
        assert found["crossed"] == after
    assert after["losses"][-1] < found["before"]["losses"][0]
