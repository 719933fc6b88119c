"""A mixture of experts in training: what is trained, reported, saved and read back."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import minimind.train as training
from minimind.checkpoint.validation import read_config
from minimind.cli.main import main
from minimind.engine.build import Engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.engine.engine import mean_loss
from minimind.errors import CheckpointError
from minimind.inference.engine import generate_texts
from minimind.inference.load_model import load_checkpoint
from minimind.inference.text import Sampling
from minimind.model.causal_lm import MiniMindForCausalLM, MiniMindOutput
from minimind.model.configuration import MiniMindConfig
from minimind.model.loss import next_token_loss
from minimind.train import loop
from tests.engine.test_backends import engine_of
from tools.runs import events

train: Any = training  # a package that is called like a function
ROWS = torch.randint(96, (8, 17), generator=torch.manual_seed(1))
SHAPE: dict[str, Any] = {"vocab_size": 96, "dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}
BASE: dict[str, Any] = {
    **{"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "accumulation_steps": 2, "max_steps": 12},
    **{"log_interval": 1, "eval_rows": 8, "device": "cpu", "learning_rate": 3e-3},
    **{"use_moe": True, "deepspeed_config": "none", "eval_interval": 6},
}


def built(**changes: Any) -> MiniMindForCausalLM:
    torch.manual_seed(2)
    return MiniMindForCausalLM(MiniMindConfig(**SHAPE, use_moe=True, **changes))


@pytest.mark.parametrize("at_fault", ["loss", "balance"])
def test_a_fault_of_the_loss_or_of_the_balance_is_seen_in_the_gradient(at_fault: str):
    weight = torch.ones(2, requires_grad=True)
    loss, balance = weight[0] * 3, weight[1] * 0 + 2
    found = {"loss": loss, "balance": balance}
    found[at_fault] = found[at_fault] + float("inf")  # whose gradient is as before
    out = MiniMindOutput(loss_sum=found["loss"], targets=torch.tensor(5), aux_loss=found["balance"])
    mean_loss(out).backward()
    assert weight.grad is not None
    assert weight.grad[0].isnan()


def step_of(engine: Engine, micro_batches: list[torch.Tensor]) -> Any:
    clock = PhaseClock(torch.device("cpu"))
    clock.begin()
    return engine.step(micro_batches, 1e-3, clock)


def test_the_balance_is_trained_and_the_loss_reported_is_the_cross_entropy(monkeypatch):
    reference = built(aux_loss_alpha=3.0).train()
    out = reference(ROWS[:, :-1])
    loss, count = next_token_loss(out.logits, ROWS[:, 1:])
    (loss / count + out.aux_loss).backward()
    cross_entropy = float((loss / count).detach())
    gradients = [p.grad for p in reference.parameters() if p.grad is not None]
    engine = engine_of(
        built(aux_loss_alpha=3.0), monkeypatch, "--dtype float32 --accumulation_steps 4"
    )
    try:
        result = step_of(engine, list(ROWS.split(2)))
        assert float(result.loss_sum / result.tokens) == pytest.approx(cross_entropy)
        assert float(result.aux_loss) == pytest.approx(float(out.aux_loss.detach()))
        torch.testing.assert_close(result.expert_load, out.expert_load)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        assert float(result.grad_norm) == pytest.approx(norm, rel=1e-5)
        held_out, count = engine.loss_of(ROWS)
        with torch.no_grad():
            logits = engine.model.eval()(ROWS[:, :-1]).logits
        assert float(held_out) == pytest.approx(float(next_token_loss(logits, ROWS[:, 1:])[0]))
    finally:
        leave_process_group()


def test_ddp_needs_no_search_for_idle_experts(monkeypatch):
    engine = engine_of(built(n_routed_experts=8, num_experts_per_tok=1), monkeypatch, "")
    try:
        forward: Any = engine.backend.forward
        assert isinstance(forward, DistributedDataParallel)
        assert not forward.find_unused_parameters
        for _ in range(3):  # DDP would complain of missing gradients in the second
            result = step_of(engine, [ROWS[:1, :4]])
            assert float(result.expert_load.min()) == 0  # three tokens, eight experts
    finally:
        leave_process_group()


def curve(out_dir: Path) -> list[list[Any]]:
    names = ("step", "loss", "lr", "grad_norm", "rows", "aux_loss", "expert_load")
    return [[line[n] for n in (*names, "expert_load_range")] for line in events(out_dir, "step")]


@pytest.fixture(scope="module")
def flags(cached: dict[str, Any]) -> dict[str, Any]:
    return {**BASE, **cached}


@pytest.fixture(scope="module")
def runs(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`, unbroken; `resumed`, stopped at step 5 and gone on; `stopped`, as it was then."""
    folder = tmp_path_factory.mktemp("experts")
    train(flags, out_dir=str(folder / "whole"))
    assert train(flags, out_dir=str(folder / "resumed"), stop_at_step=5) == 75
    shutil.copytree(folder / "resumed", folder / "stopped")
    assert train(flags, out_dir=str(folder / "resumed")) == 0
    return folder


def test_a_resumed_run_continues_bit_for_bit(runs: Path):
    assert curve(runs / "resumed") == curve(runs / "whole")
    assert events(runs / "resumed", "eval")[-1]["val_loss"] == pytest.approx(
        events(runs / "whole", "eval")[-1]["val_loss"], abs=0
    )
    one, other = (load_checkpoint(str(runs / name))[0] for name in ("whole", "resumed"))
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    assert [name for (name, value), again in pairs if not torch.equal(value, again)] == []


def test_a_step_line_reports_the_balance_and_the_load(runs: Path):
    for line in events(runs / "whole", "step"):
        assert line["aux_loss"] == pytest.approx(2 * 0.01, rel=0.2)  # of two layers
        assert sum(line["expert_load"]) == pytest.approx(1)
        least, most = line["expert_load_range"]
        assert least <= 4 * min(line["expert_load"]) <= 4 * max(line["expert_load"]) <= most


def test_the_load_is_read_only_for_a_step_that_is_reported(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read = []
    true_facts = loop.routing_fields
    monkeypatch.setattr(loop, "routing_fields", lambda *given: read.append(1) or true_facts(*given))
    train(flags, out_dir=str(tmp_path), log_interval=5, max_steps=11)
    assert [line["step"] for line in events(tmp_path, "step")] == [5, 10, 11]
    assert len(read) == 3


def test_a_dense_run_reports_nothing_of_experts(flags: dict[str, Any], tmp_path: Path):
    train(flags, out_dir=str(tmp_path), use_moe=False, max_steps=1)
    assert not {"aux_loss", "expert_load"} & {*events(tmp_path, "step")[0]}


@pytest.mark.parametrize(
    ("changes", "report"),
    [
        ({"aux_loss_alpha": 0.1}, r"aux_loss_alpha"),
        ({"num_experts_per_tok": 1}, r"num_experts_per_tok"),
        ({"use_moe": False}, r"use_moe: True -> False"),
    ],
)
def test_another_mixture_is_another_run(
    runs: Path, flags: dict[str, Any], changes: dict[str, Any], report: str
):
    with pytest.raises(CheckpointError, match=report):
        train({**flags, **changes}, out_dir=str(runs / "stopped"))


def test_a_checkpoint_generates_and_consolidated_it_gives_the_same_logits(
    runs: Path, tmp_path: Path
):
    model, tokenizer, path = load_checkpoint(str(runs / "whole"))
    assert model.config.use_moe
    how = Sampling(max_new_tokens=8, temperature=0)
    text = "ab" + generate_texts(model, tokenizer, ["ab"], how).texts[0]
    assert text.startswith("ab")
    out = tmp_path / "whole"
    assert main(["checkpoint", "consolidate", str(path), "--out", str(out)]) == 0
    again = MiniMindForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(again(ROWS).logits, model(ROWS).logits)


def test_recomputed_blocks_train_to_the_same_loss(
    runs: Path, flags: dict[str, Any], tmp_path: Path
):
    train(flags, out_dir=str(tmp_path), gradient_checkpointing=True, max_steps=12, stop_at_step=3)
    assert curve(tmp_path) == curve(runs / "whole")[:3]


@pytest.mark.long
def test_compiled_it_reports_the_same_losses_and_loads(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = {**flags, "dtype": "float32", "stop_at_step": 4}  # bf16 rounds ties of the router
    train(flags, out_dir=str(tmp_path / "eager"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    train(flags, out_dir=str(tmp_path / "compiled"), compile="on")
    curves = curve(tmp_path / "compiled"), curve(tmp_path / "eager")
    assert len(curves[0]) == 4
    for compiled, eager in zip(*curves, strict=True):
        for value, expected in zip(compiled, eager, strict=True):
            assert value == pytest.approx(expected, rel=1e-5)
    assert [line["step"] for line in events(tmp_path / "compiled", "compiled")] == [1]


@pytest.mark.parametrize("number", [0.5, -1, 10**9])
def test_a_configuration_of_too_many_experts_is_refused(runs: Path, tmp_path: Path, number: Any):
    path = load_checkpoint(str(runs / "whole"))[2]
    manifest = json.loads((path / "manifest.json").read_text())
    claimed = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**claimed, "n_routed_experts": number}))
    with pytest.raises(CheckpointError, match=r"n_routed_experts = .*, which should be "):
        read_config(tmp_path, manifest)


@pytest.mark.long
def test_in_200_steps_the_loss_falls_and_the_load_comes_within_twice_of_even(
    flags: dict[str, Any], tmp_path: Path
):
    """Stopped halfway and resumed it is the same bit for bit; without the loss it never is even."""
    longer = {**flags, "max_steps": 200, "warmup_steps": 10, "batch_size": 8, "max_seq_len": 64}
    train(longer, out_dir=str(tmp_path / "whole"))
    report = events(tmp_path / "whole", "step")
    assert report[-1]["loss"] < report[0]["loss"] / 2
    for line in report[50:]:
        least, most = line["expert_load_range"]
        assert 0.5 < least < most < 2
    assert train(longer, out_dir=str(tmp_path / "resumed"), stop_at_step=100) == 75
    assert train(longer, out_dir=str(tmp_path / "resumed")) == 0
    assert curve(tmp_path / "resumed") == curve(tmp_path / "whole")
    train({**longer, "aux_loss_alpha": 0.0}, out_dir=str(tmp_path / "without"))
    least = [line["expert_load_range"][0] for line in events(tmp_path / "without", "step")]
    assert max(least[50:]) < 0.5
