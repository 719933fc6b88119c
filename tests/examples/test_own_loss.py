"""examples/own_loss.py: label smoothing, alone and as --loss of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import minimind
from examples import own_loss
from minimind.model.own_loss import OwnLoss
from tests.examples.conftest import promised, shape
from tools.runs import events

train: Any = minimind.train  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "dtype": "float32", "eval_rows": 8},
    **{"max_steps": 4, "val_fraction": 0.1, "log_interval": 1, "deepspeed_config": "none"},
}


def test_it_prints_what_it_promises_and_agrees_with_torch(capsys: pytest.CaptureFixture[str]):
    own_loss.main()
    printed = capsys.readouterr().out
    assert shape(printed) == promised("own_loss.py")
    assert printed.split()[2] == printed.split()[4]


def test_loss_and_gradient_are_torchs():
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5, 90, generator=draw, dtype=torch.float64)
    targets = torch.randint(90, (3, 5), generator=draw)
    targets[0, :2] = targets[2] = -100
    found = []
    for loss in (own_loss.smoothed, own_loss.by_torch):
        leaf = logits.clone().requires_grad_()
        total = loss(leaf, targets)
        found.append((total.detach(), *torch.autograd.grad(total, leaf)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_a_run_trains_with_it_and_validates_by_the_cross_entropy(corpus: Path, tmp_path: Path):
    OwnLoss.imported("examples.own_loss:smoothed").require_sums(600)
    shared = {**FLAGS, "data_path": str(corpus), "cache_dir": str(tmp_path / "cache")}
    curves: dict[str, list[list[float]]] = {}
    for name in ("smoothed", "by_torch"):
        out = tmp_path / name
        assert train(shared, loss=f"examples.own_loss:{name}", out_dir=str(out)) == 0
        lines = events(out, "step")
        curves[name] = [[line["loss"], line["grad_norm"]] for line in lines]
        assert f"loss     examples.own_loss:{name}; validation" in (out / "console.log").read_text()
    torch.testing.assert_close(*map(torch.tensor, curves.values()), rtol=1e-5, atol=0)
    assert curves["smoothed"][0][0] != pytest.approx(6.4, abs=0)
