"""AdamW with 8-bit moments against its definition in float64, and moments that 8 bits hold."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from minimind.architecture.costs import Layout, memory
from minimind.architecture.plan import shape_of
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.parse import parse_flags
from minimind.engine.build import require_accepted
from minimind.engine.eight_bit import BLOCK, PART, AdamW8bit, quantized
from minimind.engine.state import Fragment, ZeroState
from minimind.errors import CheckpointError, UsageError
from minimind.runtime import installed
from tests.allocations import most_allocated

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.95), 1e-8, 0.1
MOMENTS = ("exp_avg", 1), ("exp_avg_sq", 2)


def stepped(size: int, steps: int) -> tuple[AdamW8bit, torch.nn.Parameter, list[torch.Tensor]]:
    """An optimizer after steps on one weight, whose gradients have many magnitudes."""
    torch.manual_seed(3)
    p = torch.nn.Parameter(torch.randn(size))
    optimizer = AdamW8bit([{"params": [p], "weight_decay": DECAY}], lr=LR, betas=BETAS, eps=EPS)
    gradients = []
    for _ in range(steps):
        p.grad = torch.randn(size) * 10.0 ** torch.randint(-6, 1, (size,))
        gradients.append(p.grad.clone())
        optimizer.step()
    return optimizer, p, gradients


@pytest.mark.parametrize("size", [BLOCK * 16, BLOCK * 16 + 77])
def test_an_update_is_that_of_adamw_and_its_moments_are_rounded_to_the_table(size: int):
    before, p, _ = stepped(size, 3)
    moments = [before.unpacked(p, kind, 0, size).double() for kind, _ in MOMENTS]
    optimizer, p, gradients = stepped(size, 4)
    weight, g = stepped(size, 3)[1].detach().double(), gradients[-1].double()
    first = BETAS[0] * moments[0] + (1 - BETAS[0]) * g
    second = BETAS[1] * moments[1] + (1 - BETAS[1]) * g * g
    step = first / (1 - BETAS[0] ** 4) / ((second / (1 - BETAS[1] ** 4)).sqrt() + EPS)
    assert torch.allclose(p.double(), weight * (1 - LR * DECAY) - LR * step, rtol=1e-5, atol=1e-6)
    for (kind, n), exact in zip(MOMENTS, (first, second), strict=True):
        state = optimizer.state[p]
        largest = torch.stack([block.abs().max() for block in exact.split(BLOCK)])
        assert torch.allclose(state[f"absmax{n}"].double(), largest, rtol=1e-6)
        error = (optimizer.unpacked(p, kind, 0, size) - exact).abs()
        half = state[f"qmap{n}"].sort().values.diff().max() / 2
        limit = 1.01 * half * largest.repeat_interleave(BLOCK)[:size]
        assert (error <= limit).all(), kind
        assert error.max() > 0


@pytest.mark.parametrize("size", [BLOCK * 16, BLOCK * 16 + 77])
def test_codes_and_scales_are_found_from_their_products(size: int):
    optimizer, p, _ = stepped(size, 5)
    state = optimizer.state[p]
    for kind, n in MOMENTS:
        values = optimizer.unpacked(p, kind, 0, size)
        found: Any = quantized(values, state[f"qmap{n}"])
        assert torch.equal(found[0], state[f"state{n}"].view(-1))
        assert torch.equal(found[1], state[f"absmax{n}"])
        assert torch.equal(optimizer.unpacked(p, kind, 300, 500), values[300:800])
        assert quantized(values[100:], state[f"qmap{n}"]) is None  # blocks that begin elsewhere
        assert quantized(values * 1.1 + 1e-3, state[f"qmap{n}"]) is None
    largest = [
        block.abs().max() for block in optimizer.unpacked(p, "exp_avg", 0, size).split(BLOCK)
    ]
    is_scale = torch.stack(largest) == state["absmax1"]
    assert 0 < is_scale.sum() < len(is_scale)  # a negative one is less than its scale
    zeros: Any = quantized(torch.zeros(5), state["qmap1"])
    assert state["qmap1"][zeros[0].int()].tolist() == [0.0] * 5


def test_a_small_weight_keeps_moments_in_fp32():
    optimizer, p, gradients = stepped(100, 1)
    assert torch.allclose(optimizer.unpacked(p, "exp_avg", 0, 100), 0.1 * gradients[0])


def test_memory_of_an_update_a_save_and_a_resume():
    """Bytes per element: the plan counts those of an update; the others stay below it."""
    size = 6 * PART
    optimizer, p, _ = stepped(size, 1)
    expected = 4 * OPTIMIZERS["adamw_8bit"].copies_on_cpu
    assert most_allocated(optimizer.step) / size == pytest.approx(expected, abs=0.5)
    tiny = shape_of(parse_flags(["--model", "tiny"]))
    on_gpu = Layout(2, 1, "bfloat16", 1, optimizer="adamw_8bit")
    more = memory(tiny, replace(on_gpu, device="cpu")).update - memory(tiny, on_gpu).update
    assert more / tiny.parameters == pytest.approx(expected, rel=1e-3)
    assert most_allocated(lambda: optimizer.unpacked(p, "exp_avg", 0, size)) / size < 12.5
    moments = {kind: optimizer.unpacked(p, kind, 0, size) for kind, _ in MOMENTS}
    assert most_allocated(lambda: optimizer.pack(p, {"step": 1, **moments})) / size < 16


def state_of(optimizer: torch.optim.Optimizer) -> ZeroState:
    (p,) = optimizer.param_groups[0]["params"]
    fragment = Fragment("w", 0, p.numel(), p, 0)
    return ZeroState(optimizer, [fragment], lambda: None, lambda: None)


def moved(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Fill the state of one optimizer from that of another, and compare both."""
    slices = {key: values.clone() for key, values in state_of(source).slices(0, 1)}
    step = state_of(source).optimizer_step()
    state_of(target).fill(lambda kind, name, start, length: slices[f"{kind}|{name}|{start}"], step)
    assert state_of(target).optimizer_step() == step
    found = dict(state_of(target).slices(0, 1))
    assert found.keys() == slices.keys()
    assert all(torch.equal(found[key], values) for key, values in slices.items())


def test_moments_of_adamw_are_refused_and_those_in_8_bits_are_adamws():
    optimizer, p, gradients = stepped(5000, 5)
    plain = torch.nn.Parameter(torch.zeros(5000))
    adamw = torch.optim.AdamW([plain], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    moved(optimizer, adamw)
    again = stepped(5000, 1)[0]
    moved(adamw, again)  # they still fit
    p.grad = gradients[0].clone()
    optimizer.step()
    (resumed,) = again.param_groups[0]["params"]
    resumed.grad = gradients[0].clone()
    again.step()
    assert torch.equal(resumed, p)
    plain.grad = gradients[1].clone()
    adamw.step()
    with pytest.raises(CheckpointError, match=r"w: its moments .* AdamW8bit here cannot hold"):
        moved(adamw, again)


def test_a_missing_package_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch):
    resolved = ResolvedConfig(parse_flags(["--optimizer", "adamw_8bit"]), "single")
    require_accepted(resolved, "cpu")
    hidden = "bitsandbytes"
    monkeypatch.setattr(
        installed, "find_spec", lambda name: None if name == hidden else find_spec(name)
    )
    with pytest.raises(UsageError, match=r"adamw_8bit needs the package bitsandbytes.*pip install"):
        require_accepted(resolved, "cpu")


def test_a_device_that_bitsandbytes_has_no_update_for_is_refused():
    resolved = ResolvedConfig(parse_flags(["--optimizer", "adamw_8bit"]), "single")
    with pytest.raises(UsageError, match=r"adamw_8bit has no update for --device mps"):
        require_accepted(resolved, "mps")
