"""--freeze: what is not trained stays as it is, has no state, and costs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minimind.train
from minimind.checkpoint.directory import published_checkpoints, read_manifest
from minimind.checkpoint.tensor_files import ShardFiles
from minimind.cli.main import main
from minimind.data.prepare.prepared import open_prepared
from minimind.data.rows.order import Order
from minimind.errors import CheckpointError, UsageError
from minimind.interop.weights import load_weights_from
from minimind.model.causal_lm import MiniMindForCausalLM
from tests.conftest import sentences
from tests.train.starts import start_of
from tools.runs import events

train: Any = minimind.train  # a module that is called
LENGTH, ROWS, RATE, CLIP = 32, 4, 3e-3, 0.05
PATTERNS = ["*embed_tokens*", "model.layers.0.*", "*.q_proj.*"]
SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": LENGTH}
FIELDS = ("step", "loss", "grad_norm", "lr", "rows")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def places(tiny_tokenizer: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text in `data`, and in `start` a run whose weights the others start from."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "tokenizer.model").write_bytes(tiny_tokenizer)
    lines = (json.dumps({"text": text}) for text in sentences(4, 60))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    words = ["prepare", folder / "text.jsonl", "--out", folder / "data", "--processes", 1]
    assert main([*map(str, [*words, "--tokenizer", folder / "tokenizer.model"])]) == 0
    run(folder, folder / "start", max_steps=1, init_from=None, **SHAPE)
    return folder


def run(folder: Path, out_dir: Path, status: int = 0, **more: Any) -> list[dict[str, Any]]:
    """The steps of a run in this process, AdamW of a constant rate, clipped."""
    flags = {
        **{"data_path": [str(folder / "data")], "out_dir": str(out_dir), "max_steps": 6},
        **{"deepspeed_config": "none", "device": "cpu", "dtype": "float32", "eval_rows": 0},
        **{"batch_size": ROWS, "log_interval": 1, "learning_rate": RATE, "warmup_steps": 0},
        **{"schedule": "constant", "weight_decay": 0.1, "grad_clip": CLIP, "save_interval": 3},
        **{"init_from": str(folder / "start"), **more},
    }
    given = {name: value for name, value in flags.items() if value is not None}
    assert train(given) == status
    return events(out_dir, "step")


def weights_of(place: Path) -> Tensors:
    weights = load_weights_from(place)
    model = MiniMindForCausalLM(weights.config)
    weights.fill(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_loop(folder: Path, frozen: set[str], steps: int) -> tuple[list[float], Tensors]:
    """Losses and weights of torch's AdamW on the trained weights alone, in a loop of its own."""
    weights = load_weights_from(folder / "start")
    model = MiniMindForCausalLM(weights.config)
    weights.fill(model)
    trained = [p.requires_grad_(n not in frozen) for n, p in model.named_parameters()]
    trained = [p for p in trained if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    shards = open_prepared(folder / "data").train
    order, losses = Order(shards.rows(LENGTH + 1), ROWS, 42), []
    for step in range(steps):
        rows = torch.from_numpy(shards.read_rows(order.rows_for(step, 0, 1), LENGTH + 1)).long()
        logits = model(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def stored(checkpoint: Path) -> dict[str, set[str]]:
    """Names of the parameters in a checkpoint, by kind."""
    return ShardFiles(checkpoint, read_manifest(checkpoint)["world_size"]).kinds


@pytest.fixture(scope="module")
def whole(places: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run of six steps."""
    out_dir = tmp_path_factory.mktemp("whole") / "out"
    run(places, out_dir, freeze=PATTERNS)
    return out_dir


def test_losses_and_weights_are_those_of_a_plain_loop(places: Path, whole: Path):
    before, after = weights_of(places / "start"), weights_of(whole)
    frozen = {n for n in before if "embed" in n or ".layers.0." in n or "q_proj" in n}
    losses, weights = plain_loop(places, frozen, 6)
    steps = events(whole, "step")
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-6)
    assert min(step["grad_norm"] for step in steps) > CLIP
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    for name, weight in weights.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-4, atol=1e-6)


def test_state_is_exactly_of_what_is_trained_and_the_start_counts_it(
    places: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (checkpoint, *_), names = published_checkpoints(whole / "checkpoints"), {*weights_of(whole)}
    trained = {n for n in names if "layers.1" in n or "layers.2" in n or n == "model.norm.weight"}
    trained -= {n for n in names if "q_proj" in n}
    kinds = stored(checkpoint)
    assert kinds == {"fp32": names, "exp_avg": trained, "exp_avg_sq": trained}
    run(places, tmp_path / "out", freeze=PATTERNS, max_steps=1, ema=0.9)
    screen = start_of(capsys.readouterr().out)
    sizes = {name: p.numel() for name, p in weights_of(whole).items()}
    (start,) = events(tmp_path / "out", "run_start")
    assert start["trained"] == sum(sizes[name] for name in trained)
    assert f"{sum(sizes.values()):,} parameters, {start['trained']:,} of them trained" in screen[0]
    (averaged,) = published_checkpoints(tmp_path / "out" / "checkpoints")
    assert stored(averaged)["ema"] == trained
    size = 4 * (sum(sizes.values()) + 3 * start["trained"])  # fp32: all; an average, two moments
    assert f"{size / 2**20:.1f} MiB each" in "\n".join(screen)


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(places: Path, whole: Path, tmp_path: Path):
    out_dir = tmp_path / "out"
    run(places, out_dir, 75, freeze=PATTERNS, stop_at_step=3)
    named = ["model.embed_tokens.weight", "*.0.*", "*.layers.?.self_attn.q_proj.weight"]
    steps = run(places, out_dir, freeze=named)  # the same parameters by other patterns
    for name in FIELDS:
        assert [step[name] for step in steps] == [step[name] for step in events(whole, "step")]
    before, after = weights_of(whole), weights_of(out_dir)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("patterns", [None, ["*norm*"]], ids=["thawed", "others frozen"])
def test_other_parameters_are_another_run_that_allow_change_lets_through(
    patterns: list[str] | None, places: Path, tmp_path: Path
):
    out_dir = tmp_path / "out"
    run(places, out_dir, 75, freeze=PATTERNS, stop_at_step=3, ema=0.9)
    before = weights_of(out_dir)
    with pytest.raises(CheckpointError, match=r"freeze.*--allow_change lr"):
        run(places, out_dir, freeze=patterns, ema=0.9)
    run(places, out_dir, 75, freeze=patterns, ema=0.9, allow_change="lr", stop_at_step=4)
    # The moments of what is thawed are of one gradient, and corrected as if they were of four.
    name = "model.layers.0.mlp.up_proj.weight"
    first = (weights_of(out_dir)[name] - before[name] * (1 - 0.1 * RATE)).abs() / RATE
    of_one = (0.1 / (1 - 0.9**4)) / (0.05 / (1 - 0.95**4)) ** 0.5
    assert float(first.median()) == pytest.approx(of_one, rel=1e-2)  # eps beside clipped gradients
    steps = run(places, out_dir, freeze=patterns, ema=0.9)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    after = weights_of(out_dir)
    stays = {name for name in before if torch.equal(before[name], after[name])}
    assert stays == {name for name in before if patterns and "norm" in name}
    kinds = stored(published_checkpoints(out_dir / "checkpoints")[0])
    assert kinds["exp_avg"] == kinds["ema"] == {*before} - stays


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}], ids=["plain", "again"])
def test_a_model_of_transformers_is_frozen_likewise(
    more: dict[str, Any], places: Path, whole: Path, tmp_path: Path
):
    words = ["export", "--format", "llama", "--checkpoint", str(places / "start")]
    assert main([*words, "--out", str(tmp_path / "llama")]) == 0
    model = {"model": f"hf:{tmp_path / 'llama'}", "init_from": str(tmp_path / "llama")}
    steps = run(places, tmp_path / "out", freeze=PATTERNS, **model, **more)
    expected = [step["loss"] for step in events(whole, "step")]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-5)
    kinds = stored(published_checkpoints(tmp_path / "out" / "checkpoints")[0])
    assert len(kinds["fp32"]) - len(kinds["exp_avg"]) == 12  # 9 of block 0, 2 q_proj, embedding


def test_a_universal_checkpoint_needs_moments_of_all_and_is_refused(whole: Path, tmp_path: Path):
    words = ["export", "--checkpoint", str(whole), "--format", "deepspeed-universal"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_muon_without_a_matrix_to_train_is_refused(places: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=r"muon .*--freeze"):
        run(places, tmp_path / "out", freeze=["*proj*"], optimizer="muon", learning_rate=1e-3)
