"""--dtype bf16-mixed without DeepSpeed: what a plain loop under torch.autocast computes.

test_adapters.py has the same on two processes, with DeepSpeed, and resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine.build import Engine, build_engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.recovery.corruption import replay

CONFIG = MiniMindConfig(
    vocab_size=96, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=16, qk_norm=True
)
ROWS = torch.randint(96, (6, 2, 17), generator=torch.Generator().manual_seed(5))
RATE = 2e-3


def model_of() -> Any:
    torch.manual_seed(3)
    return MiniMindForCausalLM(CONFIG)


def build(line: str = "") -> Engine:
    run = parse_flags(f"--dtype bf16-mixed --batch_size 2 {line}".split())
    return build_engine(ResolvedConfig(run, "single"), model_of(), "cpu")


def train(engine: Engine) -> list[float]:
    clock, losses = PhaseClock(engine.device), []
    for step, rows in enumerate(ROWS):
        engine.seed(step)
        clock.begin()
        result = engine.step([rows], RATE, clock)
        losses.append(float(result.loss_sum / result.tokens))
    return losses


@pytest.fixture
def engine() -> Iterator[Engine]:
    yield build()
    leave_process_group()


def test_losses_and_weights_are_those_of_a_plain_loop_under_autocast(engine: Engine):
    model, losses = model_of(), []
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    for rows in ROWS:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows[:, :-1]).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = train(engine)
    assert found[0] == pytest.approx(losses[0], rel=1e-6)  # in bf16 and in fp32 1e-5 apart
    assert found == pytest.approx(losses, rel=1e-5)
    for name, weight in engine.model.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), rtol=1e-3, atol=1e-5)


def test_only_products_are_in_bf16(engine: Engine):
    model, found = engine.model, dict[str, torch.dtype]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.RMSNorm):

            def note(_: Any, __: Any, output: torch.Tensor, name: str = name) -> None:
                found[name] = output.dtype

            module.register_forward_hook(note)
    train(engine)
    engine.state()
    linear = {n for n, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {found[name] for name in linear} == {torch.bfloat16}
    assert found["model.norm"] == torch.float32
    held = [*model.parameters()]
    for state in engine.backend.optimizer.state.values():
        held += [state["exp_avg"], state["exp_avg_sq"]]
    assert {tensor.dtype for tensor in held} == {torch.float32}


def test_an_evaluation_and_a_check_compute_as_the_training_does(engine: Engine):
    """Both call the model otherwise than the training: with a mask, or past the backend."""
    rows = ROWS[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model_of()(rows[:, :-1], shift_labels=rows[:, 1:], loss_chunk_size=0)
    assert float(engine.loss_of(rows)[0]) == pytest.approx(float(out.loss_sum), rel=1e-6)
    checked = replay(engine, rows, 0, is_whole=True)
    assert checked.loss == pytest.approx(float(out.loss_sum / out.targets), rel=1e-6)
    assert engine.model.generate(rows[:, :5], max_new_tokens=3, do_sample=False).shape == (2, 8)


@pytest.mark.long
def test_a_compiled_model_evaluates_under_autocast_too():
    try:
        engine = build("--compile on")
        before = float(engine.loss_of(ROWS[0])[0])
        losses = train(engine)
        leave_process_group()
        plain = build()
        assert before == float(plain.loss_of(ROWS[0])[0])
        assert losses == pytest.approx(train(plain), rel=1e-3)
    finally:
        leave_process_group()
