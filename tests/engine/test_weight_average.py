"""The moving average of the weights: its values, in checkpoints, in evaluation and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.checkpoint.reader import Contents
from minimind.cli.main import main
from minimind.engine.optimizers import WeightAverage
from minimind.errors import CheckpointError
from minimind.inference.load_model import load_checkpoint
from tests.conftest import Launcher
from tests.engine.test_muon import backend_of, gradient_step
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 1, "device": "cpu", "log_interval": 1, "max_steps": 6},
    **{"deepspeed_config": "none", "learning_rate": 1e-2, "val_fraction": 0.05, "eval_rows": 8},
    "accumulation_steps": 2,
}


def weights(backend: Any) -> list[torch.Tensor]:
    return [f.view(f.owner).clone() for f in backend.state().fragments]


@pytest.mark.parametrize("line", ["--dtype float32", "--dtype bfloat16 --optimizer muon"])
def test_it_is_the_closed_form_and_what_it_replaces_comes_back_bit_for_bit(line: str):
    backend = backend_of(line)
    average = WeightAverage(backend, 0.75)
    expected = [w.double() for w in weights(backend)]
    for step in range(30, 33):
        gradient_step(backend)
        average.update(step)
        expected = [0.75 * e + 0.25 * w for e, w in zip(expected, weights(backend), strict=True)]
    state = average.state()
    for f, value in zip(state.fragments, expected, strict=True):
        assert torch.allclose(f.view(state.averages[id(f.owner)]).double(), value, atol=1e-6)
    before, model = weights(backend), backend.module
    rounded = [p.detach().clone() for p in model.parameters()]
    with average.in_force():
        for f, value in zip(state.fragments, expected, strict=True):
            p = model.get_parameter(f.name).detach().view(-1).double()
            assert torch.allclose(p, value, rtol=1e-2, atol=1e-5)
    assert all(map(torch.equal, weights(backend), before))
    assert all(map(torch.equal, model.parameters(), rounded))


@pytest.fixture(scope="module")
def averaged(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an average, and one of the same flags without."""
    folder = tmp_path_factory.mktemp("ema")
    places = {"data_path": str(corpus), "cache_dir": str(folder / "cache")}
    for name, more in {"with": {"ema": 0.9}, "without": {}}.items():
        cadence = {"save_interval": 3, "eval_interval": 3, "keep_last": 9}
        train({**FLAGS, **places, **cadence, **more}, out_dir=str(folder / name))
    return folder


def test_training_is_the_same_with_an_average_which_is_evaluated_too(averaged: Path):
    ours, plain = (
        [(e["loss"], e["grad_norm"]) for e in events(averaged / name, "step")]
        for name in ("with", "without")
    )
    assert ours == plain
    for one, other in zip(
        events(averaged / "with", "eval"), events(averaged / "without", "eval"), strict=True
    ):
        assert one["val_loss"] == other["val_loss"]
        assert one["val_loss"] < one["ema_val_loss"] < 7  # it lags behind while the loss falls
        assert "ema_val_loss" not in other


def test_a_checkpoint_holds_it_and_exports_it(averaged: Path, tmp_path: Path, capsys: Any):
    path = averaged / "with" / "checkpoints" / "step_00000006"
    assert "ema" in Contents(path).kinds
    (trained, _, _), (average, _, _) = (load_checkpoint(str(path), w) for w in ("trained", "ema"))
    name = "model.embed_tokens.weight"
    assert torch.equal(average.get_parameter(name), Contents(path).read("ema", name))
    assert not torch.equal(average.get_parameter(name), trained.get_parameter(name))
    words = ["--weights", "ema", "--out", str(tmp_path / "flat")]
    assert main(["checkpoint", "consolidate", str(path), *words]) == 0
    exported = ["export", "--checkpoint", str(path), "--format", "minimind", "--weights", "ema"]
    assert main([*exported, "--out", str(tmp_path / "exported")]) == 0
    for folder in ("flat", "exported"):
        from safetensors.torch import load_file

        tensors = load_file(tmp_path / folder / "model.safetensors")
        assert torch.equal(tensors[name], average.get_parameter(name))
    capsys.readouterr()
    without = ["checkpoint", "consolidate", str(averaged / "without"), *words]
    assert main([*without, "--force"]) == 2
    assert "has no average; remove --weights, or train with --ema" in capsys.readouterr().err
    again = ["export", "--checkpoint", str(tmp_path / "flat"), "--format", "llama"]
    assert main([*again, "--weights", "ema", "--out", str(tmp_path / "other")]) == 2
    assert "is not a checkpoint and has only one set of weights" in capsys.readouterr().err


def test_a_run_that_starts_to_average_is_another_one(averaged: Path, corpus: Path):
    places = {"data_path": str(corpus), "cache_dir": str(averaged / "cache")}
    start = averaged / "without" / "checkpoints" / "step_00000003"
    flags = {**FLAGS, **places, "ema": 0.9, "resume": str(start), "out_dir": str(averaged / "late")}
    with pytest.raises(CheckpointError, match=r"lr\.ema: None -> 0\.9"):
        train(flags)
    train({**flags, "allow_change": "lr", "save_interval": 1, "keep_last": 9})
    before, kind = Contents(start), "fp32"  # it starts at the weights of step 3
    for step in (4, 5):
        now = Contents(averaged / "late" / "checkpoints" / f"step_{step:08d}")
        for name in now.shapes:
            share = 9 / (9 + step)
            expected = torch.lerp(before.read(kind, name), now.read("fp32", name), share)
            assert torch.allclose(now.read("ema", name), expected, rtol=0, atol=1e-7)
        before, kind = now, "ema"


@pytest.mark.long  # tests/engine/test_adapters.py resumes with averages
def test_it_continues_over_two_processes_one_and_two_again(forked: Launcher, tmp_path: Path):
    flags, out = "--ema 0.75 --save_interval 1 --keep_last 9 --dtype float32", tmp_path / "out"
    for processes, stop in ((2, 3), (1, 4), (2, 6)):
        batch = f"--accumulation_steps {4 // processes} --stop_at_step {stop}"
        assert forked.run(out, f"{flags} {batch}", processes).status == 75
    before = Contents(out / "checkpoints" / "step_00000001")
    for step in range(2, 7):
        now = Contents(out / "checkpoints" / f"step_{step:08d}")
        for name in now.shapes:
            share = 1 - step / (9 + step)  # of step - 1, counted from 0; below 0.75 so early
            expected = torch.lerp(before.read("ema", name), now.read("fp32", name), share)
            assert torch.equal(now.read("ema", name), expected)
        before = now
