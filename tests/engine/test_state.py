"""What needs no DeepSpeed to be shown: hand-made wrappers, counters, what is counted in C++.

Stages 1 to 3 keep their state in vectors that only DeepSpeed lays out:
test_adapters.py has those.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine import adapters
from minimind.engine.adapters import zero_state
from minimind.engine.deepspeed_backend import DeepSpeedBackend
from minimind.engine.plain_backend import PlainBackend
from minimind.engine.state import Fragment, ZeroState
from minimind.errors import CheckpointError
from tests.conftest import ROOT
from tools.elastic import shown
from tools.host_reads import counted


class FP16_UnfusedOptimizer:
    """Stage 0 in bf16: an fp32 copy beside each parameter, which the base optimizer updates."""

    def __init__(self, model: nn.Module) -> None:
        self.fp16_groups = [list(model.parameters())]
        self.fp32_groups = [[p.detach().clone().float() for p in model.parameters()]]
        self.optimizer = torch.optim.AdamW(self.fp32_groups[0], lr=0.1)

    def refresh_fp32_params(self) -> None:
        for low, master in zip(self.fp16_groups[0], self.fp32_groups[0], strict=True):
            master.data.copy_(low.data)

    def step(self) -> None:
        for master in self.fp32_groups[0]:
            master.grad = master.sign()
        self.optimizer.step()
        for low, master in zip(self.fp16_groups[0], self.fp32_groups[0], strict=True):
            low.data.copy_(master.data)


def engine(seed: int, fp16: bool = False) -> SimpleNamespace:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3).bfloat16()
    return SimpleNamespace(
        module=model,
        optimizer=FP16_UnfusedOptimizer(model),
        fp16_enabled=lambda: fp16,
        gradient_accumulation_steps=lambda: 3,
        train_batch_size=lambda: 10,
        lr_scheduler=None,
        global_steps=7,
        global_samples=70,
        micro_steps=0,
        skipped_steps=2,
    )


def test_masters_and_moments_of_every_rank_make_the_whole_again():
    source, target = engine(1), engine(2)
    source.optimizer.step()
    target.optimizer.step()
    written = {}
    for rank in range(4):
        for key, run in zero_state(source).slices(rank, 4):
            kind, name, start = key.split("|")
            for k, value in enumerate(run.tolist(), int(start)):
                assert (kind, name, k) not in written
                written[kind, name, k] = value

    def read(kind, name, start, length):
        return torch.tensor([written[kind, name, k] for k in range(start, start + length)])

    held = zero_state(target)
    held.fill(read, zero_state(source).optimizer_step())
    held.refresh()
    for one in (source, target):
        one.optimizer.step()
    for a, b in zip(source.module.parameters(), target.module.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(*(e.optimizer.fp32_groups[0] for e in (source, target)), strict=True):
        assert torch.equal(a, b)


def test_fp32_masters_are_not_read_off_the_bf16_weights():
    source = engine(1)
    source.optimizer.fp32_groups[0][0].add_(1e-4)  # too little for bf16 to show
    runs = dict(zero_state(source).slices(0, 1))
    assert torch.equal(runs["fp32|weight|0"], source.optimizer.fp32_groups[0][0].view(-1))


def test_padding_is_zeroed_before_fragments_are_filled():
    flat = torch.full((6,), float("nan"))
    base = torch.optim.AdamW([nn.Parameter(flat)])
    held = ZeroState(base, [Fragment("w", 0, 4, flat, 1)], lambda: None, lambda: None)
    held.fill(lambda kind, name, start, length: torch.ones(length), None)
    assert flat.tolist() == [0, 1, 1, 1, 1, 0]


def test_a_save_reads_the_step_counts_of_all_weights_at_once():
    """On a GPU the counts of a fused AdamW are there: each read alone would wait for it."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(20)]
    base = torch.optim.AdamW(weights, lr=0.1, fused=True)
    for step in range(3):
        for weight in weights[step:]:  # the first ones get a gradient less often
            weight.grad = torch.ones(3)
        base.step()
        base.zero_grad()
    fragments = [Fragment(f"w{n}", 0, 3, w, 0) for n, w in enumerate(weights)]
    held = ZeroState(base, fragments, lambda: None, lambda: None)
    with counted() as reads:
        assert len(list(held.slices(0, 1))) == 3 * len(weights)
        assert held.optimizer_step() == 3
    assert sum(reads.values()) == 1
    assert ZeroState(torch.optim.AdamW(weights), [], print, print).optimizer_step() is None


def test_counters_come_back_and_micro_batches_are_counted_again():
    source, target = engine(1), engine(2)
    target.global_steps = target.skipped_steps = 0
    DeepSpeedBackend(target).restore_counters(DeepSpeedBackend(source).counters())
    assert (target.global_steps, target.skipped_steps, target.global_samples) == (7, 2, 70)
    assert target.micro_steps == 21


def scaler(**changed: float) -> SimpleNamespace:
    """DeepSpeed's, after 40 updates of which the last 8 did not overflow."""
    known = {"cur_scale": 1024.0, "cur_iter": 40, "last_overflow_iter": 31, "cur_hysteresis": 1}
    return SimpleNamespace(**{**known, "dynamic": True, **changed})


def is_torch_adam(scale: float = 1.0) -> PlainBackend:
    """fp16 without DeepSpeed."""
    model = nn.Linear(2, 2).half()
    groups = [{"params": list(model.parameters())}]
    backend = PlainBackend(
        model, model, ResolvedConfig(parse_flags(["--dtype", "float16"]), "x"), groups
    )
    backend.scaler.load_state_dict({**backend.scaler.state_dict(), "scale": scale})
    return backend


def test_the_loss_scale_of_fp16_comes_back():
    source, target = engine(1, fp16=True), engine(2, fp16=True)
    source.optimizer.loss_scaler = scaler()
    target.optimizer.loss_scaler = scaler(cur_scale=65536.0, cur_iter=0, last_overflow_iter=-1)
    DeepSpeedBackend(target).restore_counters(DeepSpeedBackend(source).counters())
    assert target.optimizer.loss_scaler == scaler()


def test_a_loss_scale_that_the_file_fixes_is_not_taken_from_a_checkpoint():
    source, target = engine(1, fp16=True), engine(2, fp16=True)
    source.optimizer.loss_scaler = scaler()
    target.optimizer.loss_scaler = SimpleNamespace(cur_scale=128.0, dynamic=False)
    DeepSpeedBackend(target).restore_counters(DeepSpeedBackend(source).counters())
    assert target.optimizer.loss_scaler.cur_scale == 128.0
    assert DeepSpeedBackend(target).counters()["loss_scaler"] == {}


def test_the_loss_scale_crosses_from_deepspeed_to_torch_and_back():
    source, target, plain = engine(1, fp16=True), engine(2, fp16=True), is_torch_adam()
    source.optimizer.loss_scaler = scaler()
    target.optimizer.loss_scaler = scaler(cur_scale=2.0, cur_iter=0, last_overflow_iter=-1)
    plain.restore_counters(DeepSpeedBackend(source).counters())
    saved = plain.counters()["loss_scaler"]
    assert (saved["cur_scale"], saved["_growth_tracker"]) == (1024.0, 8)
    DeepSpeedBackend(target).restore_counters(plain.counters())
    found = target.optimizer.loss_scaler
    assert found.cur_scale == 1024.0
    assert found.cur_iter - found.last_overflow_iter - 1 == 8


def test_a_run_without_a_loss_scale_leaves_the_first_one_of_fp16_alone():
    """Resumed in another precision: a scale of 1 would let small gradients vanish."""
    source, target, plain = engine(1), engine(2, fp16=True), is_torch_adam(512.0)
    target.optimizer.loss_scaler = scaler()
    unscaled = DeepSpeedBackend(source).counters()
    DeepSpeedBackend(target).restore_counters(unscaled)
    plain.restore_counters(unscaled)
    assert target.optimizer.loss_scaler == scaler()
    assert plain.counters()["loss_scaler"]["cur_scale"] == 512.0


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """Counts as the C++ does: beta^t is multiplied on, and a power when a number is out of turn."""

    def __init__(self, weights: nn.Parameter) -> None:
        super().__init__([weights], betas=(0.9, 0.95))
        self.param_groups[0]["bias_correction"] = True
        self.opt_id, self.ds_opt_adam = 3, self
        self.number, self.power = 0, torch.tensor(1.0)

    def adam_update(self, identity, number, lr, beta1, *others):
        assert identity == 3
        if number == self.number + 1:
            self.power = self.power * beta1
        elif number != self.number:
            self.power = torch.tensor(beta1) ** number
        self.number = number


def test_what_deepspeed_counts_in_cpp_is_counted_again():
    flat = nn.Parameter(torch.zeros(4))
    unbroken, resumed = DeepSpeedCPUAdam(flat), DeepSpeedCPUAdam(flat)
    for number in range(1, 13):
        unbroken.adam_update(3, number, 0.1, 0.9)
    resumed.adam_update(3, 5, 0.1, 0.9)  # was elsewhere before
    held = ZeroState(resumed, [Fragment("w", 0, 4, flat, 0)], lambda: None, lambda: None)
    held.fill(lambda kind, name, start, length: torch.ones(length), 12)
    assert torch.equal(resumed.power, unbroken.power)
    assert not torch.equal(torch.tensor(0.9) ** 12, unbroken.power)  # or nothing would be shown
    assert resumed.state[flat]["step"] == 12


def test_no_more_is_counted_again_than_can_be_reported():
    """From there on the factor of the moments is 1 in float32."""
    flat = nn.Parameter(torch.zeros(4))
    resumed = DeepSpeedCPUAdam(flat)
    held = ZeroState(resumed, [Fragment("w", 0, 4, flat, 0)], lambda: None, lambda: None)
    held.fill(lambda kind, name, start, length: torch.ones(length), 10**9)
    assert resumed.number < 1000
    assert 1 - torch.tensor(0.95) ** resumed.number == 1


def test_a_frozen_weight_is_saved_and_restored_without_moments():
    source, target = engine(1), engine(2)
    for one in (source, target):
        one.module.bias.requires_grad_(False)
        one.optimizer.fp16_groups[0].pop()
        one.optimizer.fp32_groups[0].pop()
    runs = dict(zero_state(source).slices(0, 1))
    assert {key for key in runs if "bias" in key} == {"fp32|bias|0"}
    assert runs["fp32|bias|0"].dtype == torch.float32
    zero_state(target).fill(lambda kind, name, start, _: runs[f"{kind}|{name}|{start}"], None)
    assert torch.equal(target.module.bias, source.module.bias)


def test_an_untested_deepspeed_is_refused_by_name(monkeypatch):
    found = DeepSpeedBackend(engine(1))
    monkeypatch.setattr(adapters, "version", lambda name: f"{adapters.TESTED}+local")
    assert found.state().fragments
    monkeypatch.setattr(adapters, "version", lambda name: "0.20.0")
    with pytest.raises(CheckpointError, match=r"DeepSpeed 0\.20\.0 .* deepspeed==0\.19\.8"):
        found.state()
    assert is_torch_adam().state().fragments  # without DeepSpeed its version is nobody's concern


@pytest.mark.parametrize("file", ["constraints.txt", "pyproject.toml"])
def test_the_tested_version_is_the_pinned_one(file):
    pinned = re.findall(r"deepspeed==([\w.]+)", Path(ROOT / file).read_text())
    assert pinned == [adapters.TESTED]


@pytest.mark.parametrize(
    ("change", "is_same", "report", "is_right"),
    [
        ({}, True, "bit for bit", True),
        ({}, False, "bit for bit", True),
        ({"loss": 4.0 + 1e-6}, False, "1.0e-06", True),
        ({"loss": 4.0 + 1e-6}, True, "1.0e-06 TOO MUCH", False),
        ({"norm": 2.0}, True, "0.0e+00 TOO MUCH", False),
        ({"loss": 4.0 + 3e-6}, False, "3.0e-06 TOO MUCH", False),
        ({"loss": float("nan")}, False, "nan TOO MUCH", False),
        ({"rows": [2, 1]}, False, "OTHER ROWS", False),
    ],
)
def test_the_table_of_make_elastic_reports_what_is_not_within_its_limit(
    change, is_same, report, is_right
):
    unbroken = [{"rows": [1, 2], "loss": 4.0, "norm": 1.0}]
    assert shown([{**unbroken[0], **change}], unbroken, 2e-6, is_same) == (report, is_right)


def test_gradients_of_groups_that_are_taken_one_by_one_count_once():
    """As DeepSpeed does it, which with offload keeps the gradients of all groups meanwhile."""
    weights = [torch.ones(size, requires_grad=True) for size in (3, 2)]
    base = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)
    parts = [Fragment(str(len(w)), 0, len(w), w, 0) for w in weights]
    state, groups, seen = ZeroState(base, parts, lambda: None, lambda: None), base.param_groups, []
    base.register_step_pre_hook(lambda *_: seen.extend(state.gradients(0, 1)))
    for weight in weights:
        weight.grad = weight.detach() * len(weight)
    for group in groups:
        base.param_groups = [group]
        base.step()
    assert {key: values.tolist() for key, values in seen} == {
        "gradient|3|0": [3.0] * 3, "gradient|2|0": [2.0] * 2
    }  # fmt: skip
    assert len(seen) == 2
