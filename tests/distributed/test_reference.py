"""A real two-process run against an independent training loop: torch's AdamW, written out plainly.

The loop below shares the model, the data and the schedule with the package, and nothing of its
engine: no DeepSpeed, no accumulation in the engine, no clipping or decay but what stands here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minimind.config.schedule import Schedule
from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
from minimind.data.rows.order import Order
from minimind.data.shards.manifest import Options
from minimind.data.text.inputs import Source
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from tests.checkpoint.weights import load_weights
from tests.conftest import Launcher, Run

pytestmark = pytest.mark.launch


def trained_by_hand(corpus: Path, cache: Path, steps: int) -> tuple[list[float], list[float], dict]:
    """(losses, gradient norms, final weights) of the fp32 yardstick's twenty steps."""
    sources = (Source("data", (str(corpus),)),)
    data = prepare_for_run(PrepareRequest(sources, None, 600, Options(val_fraction=0.05)), cache)
    torch.manual_seed(42)
    model = MiniMindForCausalLM(
        MiniMindConfig(vocab_size=600, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=64)
    )
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    order = Order(data.train.rows(65), 8, 42)
    schedule = Schedule("cosine", 2e-3, 0.1, steps * 3 // 10, steps)
    losses, norms = [], []
    for step in range(steps):
        rows = torch.from_numpy(data.train.read_rows(order.rows_for(step, 0, 1), 65))
        logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr_at(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def test_losses_norms_and_weights_are_those_of_a_plain_loop(
    corpus: Path, launch: Launcher, fp32: Run
):
    losses, norms, weights = trained_by_hand(corpus, launch.cache, 20)
    assert fp32.losses() == pytest.approx(losses, rel=2e-6)
    assert [s["grad_norm"] for s in fp32.events("step")] == pytest.approx(norms, rel=2e-5)
    assert any(s["clipped"] for s in fp32.events("step"))
    saved = load_weights(fp32.out_dir / "checkpoints" / "step_00000020")
    for name, value in saved.items():
        # Adam divides by the root of squared gradients: where those are near 0, rounding shows.
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-5)


def test_bits_per_byte_follow_from_the_loss_and_the_text(unbroken: Run):
    """bpb x bytes = loss x tokens / ln 2; a piece stands for one byte at the least."""
    last = unbroken.events("eval")[-1]
    bytes_per_token = last["val_loss"] / 0.6931471805599453 / last["val_bpb"]
    assert 1.0 < bytes_per_token < 12.0
