"""Muon on whole matrices and on shards of them: which weights, which gradient, which rate."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

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
)
from minimind.engine.plain_backend import PlainBackend
from minimind.engine.state import Fragment
from minimind.model.decoder import MiniMindConfig, MiniMindForCausalLM

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
    run, model = parse_flags(line.split()), model_of()
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
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, **options: Any
) -> list[float]:
    """Largest difference of each matrix to torch.optim.Muon's after three steps."""
    monkeypatch.setattr("minimind.engine.optimizers.HAS_BF16", has_bf16)
    torch.manual_seed(2)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 24), (24, 8), (8, 8))]
    group: Any = {"params": matrices, "lr": 0.05, **options}
    other = {"params": [torch.nn.Parameter(torch.zeros(1))]}
    quintic = {"ns_coefficients": NEWTON_SCHULZ["quintic"]}
    muon_group = {**group, **quintic, "use_muon": True, "names": frozenset()}
    optimizer = MuonWithAdamW([other, muon_group], lr=1e-3)
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
def test_a_step_is_that_of_torch(monkeypatch, scaling):
    options = {"adjust_lr_fn": scaling, "momentum": 0.9, "weight_decay": 0.2}
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


class Collectives:
    """DeepSpeed's communication backend of one process, with a gather of known length."""

    MS = 2.0

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, group: Any = None) -> None:
        time.sleep(self.MS / 1e3)
        output.copy_(input)


@pytest.mark.parametrize("more", ["", "--cautious_weight_decay"])
def test_a_step_on_flat_shards_is_that_on_whole_matrices(group: None, more: str):
    run = parse_flags(f"--optimizer muon --muon_lr 0.05 --learning_rate 1e-3 {more}".split())
    model = model_of()
    groups = run_groups(model, run)
    whole: Any = optimizer_of(groups, run)
    matrices = groups[-1]["params"]
    flat = torch.cat([p.detach().view(-1) for p in matrices])
    last = {**groups[-1], "params": [torch.zeros(2, 2)], "names": frozenset()}
    sharded = MuonWithAdamW([{"params": [torch.zeros(1)]}, last], lr=1e-3)
    sharded.param_groups[-1]["params"] = [flat]
    found, start = [], 0
    for p in matrices:
        fragment = Fragment("", 0, p.numel(), flat, start)
        place = slice(start, start + p.numel())
        found.append(ShardedMatrix(p.shape, fragment, place))
        start += p.numel()
    collectives, clock = Collectives(), CommunicationClock(torch.device("cpu"))
    sharded.shards = Shards({id(flat): found}, 1, collectives, None)
    clock.watch_deepspeed(collectives)
    for seed in range(3):
        torch.manual_seed(seed)
        gradients = [torch.randn_like(p) for p in matrices]
        for p, gradient in zip(matrices, gradients, strict=True):
            p.grad = gradient.clone()
        flat.grad = torch.cat([gradient.view(-1) for gradient in gradients])
        whole.step()
        sharded.step()
    for p, matrix in zip(matrices, found, strict=True):
        assert torch.allclose(matrix.fragment.view(flat), p.view(-1), rtol=0, atol=1e-7)
    stacked = torch.cat([whole.state[p]["momentum_buffer"].view(-1) for p in matrices])
    assert torch.equal(sharded.state[flat]["momentum_buffer"], stacked)
    assert clock.take() >= 3 * Collectives.MS  # comm_ms contains the gathers
