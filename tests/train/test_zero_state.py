"""The adapters that DeepSpeed's own partitioning is not needed for, against hand-made wrappers.

Stages 1 to 3 keep their state in vectors that only DeepSpeed lays out: real runs resume those.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from minimind.train.backends import DeepSpeedBackend
from minimind.train.zero_state import zero_state


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
        for key, run in zero_state(source).runs(rank, 4):
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
    runs = dict(zero_state(source).runs(0, 1))
    assert torch.equal(runs["fp32|weight|0"], source.optimizer.fp32_groups[0][0].view(-1))


def test_padding_is_zeroed_before_fragments_are_filled():
    from minimind.train.zero_state import Fragment, ZeroState

    flat = torch.full((6,), float("nan"))
    base = torch.optim.AdamW([nn.Parameter(flat)])
    held = ZeroState(base, [Fragment("w", 0, 4, flat, 1)], lambda: None, lambda: None)
    held.fill(lambda kind, name, start, length: torch.ones(length), None)
    assert flat.tolist() == [0, 1, 1, 1, 1, 0]


def test_counters_come_back_and_micro_batches_are_counted_anew():
    source, target = engine(1), engine(2)
    target.global_steps = target.skipped_steps = 0
    DeepSpeedBackend(target).restore_counters(DeepSpeedBackend(source).counters())
    assert (target.global_steps, target.skipped_steps, target.global_samples) == (7, 2, 70)
    assert target.micro_steps == 21


def test_the_loss_scale_of_fp16_comes_back():
    source, target = engine(1, fp16=True), engine(2, fp16=True)
    source.optimizer.loss_scaler = SimpleNamespace(cur_scale=1024.0, cur_iter=5)
    target.optimizer.loss_scaler = SimpleNamespace(cur_scale=65536.0, cur_iter=0)
    DeepSpeedBackend(target).restore_counters(DeepSpeedBackend(source).counters())
    assert target.optimizer.loss_scaler.cur_scale == 1024.0
    assert target.optimizer.loss_scaler.cur_iter == 5
