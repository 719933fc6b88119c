"""minimind export --format deepspeed-universal: DeepSpeed goes on from it, as an import does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minimind.checkpoint.reader import Contents, compare
from minimind.checkpoint.retention import Rules
from minimind.checkpoint.saver import Saver
from minimind.cli.main import main
from minimind.model.configuration import MiniMindConfig
from minimind.model.rotary import interleaved_to_half
from tests.faults import tiny
from tests.interop.continued import BOUNDS, RATE, STEPS, Engine, cases, run_deepspeed
from tools.forking import Nursery

CONFIG = MiniMindConfig(**tiny.SHAPE, qk_norm=True)
LR: dict[str, Any] = {
    **{"learning_rate": RATE, "weight_decay": 0.1, "betas": [0.9, 0.95], "grad_clip": 1.0},
    **{"optimizer": "AdamW", "optimizer_params": {"eps": 1e-8}},
}
SGD = {"optimizer": "SGD", "optimizer_params": {"momentum": 0.9}}
SCHEDULE = {"shape": "constant", "total_steps": 8, "warmup_steps": 0, "min_lr_ratio": 0.1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny.tokenizer_bytes(tmp_path_factory.mktemp("tokenizer"))


def trained(
    out: Path,
    tokenizer: bytes,
    dtype: str = "float32",
    config: MiniMindConfig = CONFIG,
    optimizer: str = "adamw",
    **groups: dict[str, Any],
) -> Engine:
    """A run with a checkpoint after some steps; return its engine, which can go on."""
    engine = Engine(config, dtype, optimizer)
    engine.losses(0, STEPS)
    texts = {
        "config.json": json.dumps(config.to_dict()).encode(),
        "tokenizer.model": tokenizer,
        "ds_config.resolved.json": b"{}",
    }
    groups = {"lr": LR, "schedule": SCHEDULE, "dtype": {"dtype": dtype}} | groups
    saver = Saver(engine, engine, out / "checkpoints", Rules(1), texts)  # type: ignore[arg-type] (a stand-in)
    saver.begin(tiny.FACTS | {"identity": tiny.IDENTITY | groups, "step": STEPS, "tokens": 100})
    saver.poll(wait=True)
    saver.close()
    return engine


def export(run: Path, out: Path, *more: str) -> int:
    words = ["export", "--checkpoint", str(run), "--format", "deepspeed-universal"]
    return main([*words, "--out", str(out), *more])


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


def test_the_export_has_what_deepspeed_reads_and_the_import_gives_the_same_bits(
    tokenizer: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    schedule = SCHEDULE | {"shape": "linear", "total_steps": 5, "min_lr_ratio": 0.0}
    schedule |= {"patience": 3, "min_delta": 0.0, "keep_best_by": "val_loss"}
    trained(tmp_path / "run", tokenizer, "bfloat16", schedule=schedule)
    out, again = tmp_path / "universal", tmp_path / "again"
    assert export(tmp_path / "run", out) == 0
    said = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in said
    assert '"gradient_clipping": 1.0, "bf16": {"enabled": true}' in said
    folder = out / (out / "latest_universal").read_text()
    contents = Contents(tiny.newest(tmp_path / "run"))
    name = "model.layers.0.self_attn.q_proj.weight"
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        value = load(folder / "zero" / name / f"{kind}.pt")["param"]
        assert torch.equal(value, interleaved_to_half(contents.read(kind, name), 8))
    state = load(folder / "zero" / "optimizer_state.pt")
    first, second = state["param_groups"]
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert first["lr"] == RATE / 4 == second["lr"]  # of the next step
    (of_all,) = state["optimizer_state_dict"]["param_groups"]  # stage 3 reads it into each group
    assert "weight_decay" not in of_all
    counts = [
        state["optimizer_state_dict"]["state"][0],
        {"step": load(folder / f"zero/{name}/step.pt")},
    ]
    assert [int(one["step"]) for one in counts] == [STEPS, STEPS]
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        found = load(folder / file)
        assert (found["global_steps"], found["lr_scheduler"]["last_epoch"]) == (STEPS, STEPS)
        assert found["ds_config"]["checkpoint"] == {"load_universal": True}
        assert not sum(value.numel() for value in found["module"].values())
    assert not (out / "latest").exists()  # a load that is not universal loads no weights
    assert main(["import", "--from", "deepspeed", str(out), "--out", str(again)]) == 0
    lines = [*compare(tiny.newest(tmp_path / "run"), tiny.newest(again))]
    assert not [line for line in lines if line.startswith(("fp32", "exp_avg", "shape"))], lines
    lr = Contents(tiny.newest(again)).manifest["identity"]["lr"]
    assert {**lr, "optimizer_params": {}} == {**LR, "optimizer_params": {}}
    assert Contents(tiny.newest(again)).state["optimizer_step"] == STEPS


@pytest.mark.parametrize(
    ("names", "model"),
    [
        ({}, "Llama"),
        ({"qkv_bias": True, "qk_norm": True}, "MiniMind"),
        ({"use_moe": True, "n_routed_experts": 2}, "MiniMind"),
    ],
)
def test_the_names_are_those_of_a_model_that_has_the_shape(
    names: dict[str, Any],
    model: str,
    tokenizer: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """Rotary pairs are reordered for transformers, and stay as they are in our own code."""
    run, out = tmp_path / "run", tmp_path / "universal"
    trained(run, tokenizer, config=MiniMindConfig(**tiny.SHAPE, **names))
    assert export(run, out) == 0
    assert json.loads((out / "config.json").read_text())["architectures"] == [f"{model}ForCausalLM"]
    is_own = model == "MiniMind"
    assert ("trust_remote_code=True" in capsys.readouterr().out) == is_own
    config = AutoConfig.from_pretrained(out, trust_remote_code=is_own)
    built = AutoModelForCausalLM.from_config(config, trust_remote_code=is_own)
    folders = (out / "global_step3_universal" / "zero").glob("*/")
    assert {name for name, _ in built.named_parameters()} == {folder.name for folder in folders}
    name = "model.layers.1.self_attn.k_proj.weight"
    value = load(out / "global_step3_universal" / "zero" / name / "exp_avg.pt")["param"]
    moment = Contents(tiny.newest(run)).read("exp_avg", name)
    assert torch.equal(value, moment) == (model == "MiniMind")
    assert torch.equal(value, interleaved_to_half(moment, 8)) == (model == "Llama")


@pytest.mark.parametrize(
    ("optimizer", "kinds"), [("lion", ["exp_avg"]), ("sgd", ["momentum_buffer"])]
)
def test_other_state_is_for_stages_1_and_2(
    optimizer: str,
    kinds: list[str],
    tokenizer: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    run, out, again = tmp_path / "run", tmp_path / "universal", tmp_path / "again"
    trained(run, tokenizer, optimizer=optimizer)
    assert export(run, out) == 0
    said = capsys.readouterr().out
    assert "at ZeRO stages 1 and 2," in said
    assert ('"zero_allow_untested_optimizer": true' in said) == (optimizer == "sgd")
    assert main(["import", "--from", "deepspeed", str(out), "--out", str(again)]) == 0
    assert Contents(tiny.newest(again)).kinds == ["fp32", *kinds]
    lines = [*compare(tiny.newest(run), tiny.newest(again))]
    assert not [line for line in lines if line.startswith(("fp32", *kinds))], lines


def test_what_is_not_carried_over_is_told(
    tokenizer: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """The rate of a run that --patience ends is not that of its schedule."""
    for ran_out in (None, 2):
        run, out = tmp_path / f"run {ran_out}", tmp_path / f"out {ran_out}"
        monkeypatch.setitem(tiny.FACTS, "patience", {"ran_out": ran_out})
        trained(run, tokenizer, lr=LR | {"mup_base_dim": 8})
        assert export(run, out) == 0
        said = capsys.readouterr().out
        assert "(muP)" in said
        assert ("0.01 in the next step" in said) == (ran_out is None)


def test_what_cannot_be_such_a_checkpoint_is_refused(tokenizer: bytes, tmp_path: Path):
    run, out = tmp_path / "run", tmp_path / "universal"
    trained(run, tokenizer)
    assert export(run, out, "--dtype", "bfloat16") == 2
    assert export(run, out, "--weights", "ema") == 2
    assert export(run, out, "--force") == 2
    assert main(["export", str(run), "--format", "llama", "--out", str(tmp_path / "llama")]) == 0
    assert export(tmp_path / "llama", out) == 2
    trained(tmp_path / "muon", tokenizer, optimizer="muon")
    assert export(tmp_path / "muon", out) == 2
    (tmp_path / "none" / "checkpoints").mkdir(parents=True)
    assert export(tmp_path / "none", out) == 4
    assert not out.exists()
    assert export(run, out) == 0
    assert export(run, out) == 2


# --- DeepSpeed itself ---------------------------------------------------------------------------

ALL = tuple(f"{stage}{dtype}" for stage in (1, 2, 3) for dtype in "fb")


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_deepspeed_goes_on(processes: int, tokenizer: bytes, nursery: Nursery, tmp_path: Path):
    """Its weights and moments are ours to the last bit, and the next losses are ours too."""
    own, source, out = {}, tmp_path / "source", tmp_path / "out"
    out.mkdir()
    for dtype in ("float32", "bfloat16"):
        engine = trained(tmp_path / dtype, tokenizer, dtype)
        assert export(tmp_path / dtype, source / dtype) == 0
        own[dtype] = torch.tensor(engine.losses(STEPS, STEPS + 5))
    run_deepspeed(nursery, processes, source, out, ALL)
    for name, _, dtype in cases(*ALL):
        contents, after = Contents(tiny.newest(tmp_path / dtype)), load(out / name / "after.pt")
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            assert {*after[kind]} == {*contents.shapes}
            for weight, value in after[kind].items():
                held = contents.read(kind, weight)
                is_rotated = "q_" in weight or "k_" in weight
                held = interleaved_to_half(held, 8) if is_rotated else held
                assert torch.equal(value, held), (name, kind, weight)
        assert (torch.tensor(after["losses"]) - own[dtype]).abs().max() <= BOUNDS[dtype], name


@pytest.mark.launch
@pytest.mark.long
def test_deepspeed_goes_on_with_a_momentum(tokenizer: bytes, nursery: Nursery, tmp_path: Path):
    engine = trained(tmp_path / "run", tokenizer, optimizer="sgd", lr=LR | SGD)
    source, out = tmp_path / "source", tmp_path / "out"
    assert export(tmp_path / "run", source / "float32") == 0
    (source / "SGD").touch()
    out.mkdir()
    run_deepspeed(nursery, 2, source, out, ("1f", "2f"))
    own = torch.tensor(engine.losses(STEPS, STEPS + 5))
    for name in ("1f", "2f"):
        losses = torch.tensor(load(out / name / "after.pt")["losses"])
        assert (losses - own).abs().max() <= BOUNDS["float32"], name


@pytest.mark.launch
@pytest.mark.long
def test_the_trainer_goes_on(tokenizer: bytes, tmp_path: Path):
    engine = trained(tmp_path / "run", tokenizer)
    source, out = tmp_path / "universal", tmp_path / "trainer"
    assert export(tmp_path / "run", source) == 0
    command = [sys.executable, "-m", "tests.interop.trainer_run", str(source), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    own = torch.tensor(engine.losses(STEPS, STEPS + 5))
    assert (torch.tensor(load(out / "after.pt")["losses"]) - own).abs().max() <= BOUNDS["float32"]
