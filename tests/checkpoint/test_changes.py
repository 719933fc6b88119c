"""What may change between a checkpoint and the run that goes on from it, in runs of one process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.architecture.select import MiniMind
from minimind.checkpoint.directory import differences, published_checkpoints
from minimind.cli.main import main as minimind
from minimind.config.parse import parse_flags
from minimind.data.rows.batches import Batches
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.inference.engine import generate_texts
from minimind.inference.load_model import load_checkpoint
from minimind.inference.text import Sampling
from minimind.interop.export import consolidate
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.recovery.step_rows import read_run
from tests.checkpoint.weights import load_weights
from tests.conftest import sentences
from tools.runs import events

train: Any = training  # a package that is called like a function
BASE = {
    **{"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "accumulation_steps": 4, "max_steps": 12},
    **{"log_interval": 1, "eval_rows": 0, "device": "cpu", "learning_rate": 2e-3},
}


def steps(out_dir: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in events(out_dir, "step")}


@pytest.fixture(scope="module")
def flags(cached: dict[str, Any]) -> dict[str, Any]:
    return {**BASE, **cached}


@pytest.fixture(scope="module")
def stopped(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run saved at step 5, and its unbroken curve to step 12 in `whole`."""
    folder = tmp_path_factory.mktemp("changes")
    train(flags, out_dir=str(folder / "whole"), save_interval=5, keep_last=9)
    assert train(flags, out_dir=str(folder / "run"), stop_at_step=5) == 75
    return folder


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped / "run", tmp_path / "run"))


def test_nothing_changed_continues_bit_for_bit(stopped: Path, run: Path, flags: dict[str, Any]):
    assert train(flags, out_dir=str(run)) == 0
    names = ("loss", "lr", "grad_norm", "tokens", "rows")
    for step, line in steps(stopped / "whole").items():
        assert [steps(run)[step][n] for n in names] == [line[n] for n in names]
    at_end = [start["tokens_at_end"] for start in events(run, "run_start")]
    assert at_end == [steps(run)[12]["tokens"]] * 2


def test_damaged_checkpoints_are_events_although_none_is_left(run: Path, flags: dict[str, Any]):
    (only,) = published_checkpoints(run / "checkpoints")
    (only / "shard-0-of-1.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"step_00000005 cannot be used \(step_00000005: shar"
    ):
        train(flags, out_dir=str(run))
    (found,) = events(run, "checkpoint_rejected")
    assert (found["path"], found["file"]) == (str(only), "shard-0-of-1.safetensors")
    assert minimind(["report", str(run)]) == 0


def test_a_start_that_saves_nothing_deletes_nothing(
    stopped: Path, flags: dict[str, Any], tmp_path: Path
):
    run = Path(shutil.copytree(stopped / "whole", tmp_path / "run"))
    before = published_checkpoints(run / "checkpoints")
    assert len(before) > 1
    assert train(flags, out_dir=str(run), save_interval=5, keep_last=1) == 0
    assert published_checkpoints(run / "checkpoints") == before


@pytest.mark.long
def test_variants_continue_bit_for_bit_and_recomputing_is_none_of_them(
    stopped: Path, flags: dict[str, Any], tmp_path: Path
):
    """Normed heads and a head of its own are trained, saved, resumed and consolidated."""
    variant = {**flags, "qk_norm": True, "tie_word_embeddings": False}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(variant, out_dir=str(whole)) == 0
    assert train(variant, out_dir=str(broken), stop_at_step=5) == 75
    assert train(variant, out_dir=str(broken), gradient_checkpointing=True) == 0
    names = ("loss", "lr", "grad_norm", "tokens", "rows")
    for step, line in steps(whole).items():
        assert [steps(broken)[step][n] for n in names] == [line[n] for n in names]
        assert line["loss"] != steps(stopped / "whole")[step]["loss"]
    assert "gradient_checkpointing: true" in (broken / "config.yaml").read_text()
    model, _, path = load_checkpoint(str(broken))
    assert (model.config.qk_norm, model.config.tie_word_embeddings) == (True, False)
    start = MiniMindForCausalLM(model.config)
    saved = load_weights(path)
    assert saved.keys() == dict(start.named_parameters()).keys()
    assert not torch.equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"])
    gains = saved["model.layers.0.self_attn.q_norm.weight"]
    assert gains.shape == (16,)
    assert not torch.equal(gains, torch.ones(16))
    done = consolidate([path], tmp_path / "out", "float32", 2**30, force=False)
    assert done.parameters == sum(p.numel() for p in start.parameters())
    again: Any = MiniMindForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_heads_biases_and_rotations_are_of_the_run():
    def identity(line: str) -> dict[str, Any]:
        return {"model": MiniMind().identity(parse_flags(f"--dim 32 --n_heads 4 {line}".split()))}

    plain = identity("")
    assert identity("--head_dim 8 --no-qkv_bias --no_rope_interval 0") == plain
    assert "head_dim" not in plain["model"]
    other = identity("--head_dim 16 --qkv_bias --no_rope_interval 4")
    changes = {"head_dim: None -> 16", "no_rope_interval: 0 -> 4", "qkv_bias: False -> True"}
    assert {str(one) for one in differences(plain, other)} == {f"model.{one}" for one in changes}
    assert len(differences(other, plain)) == 3


@pytest.mark.long
def test_documents_masked_apart_continue_bit_for_bit(
    stopped: Path, flags: dict[str, Any], tmp_path: Path
):
    masked = {**flags, "doc_mask": True, "eval_rows": 4}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(masked, out_dir=str(whole)) == 0
    assert train(masked, out_dir=str(broken), stop_at_step=5) == 75
    assert train(masked, out_dir=str(broken)) == 0
    names = ("loss", "lr", "grad_norm", "tokens", "rows")
    for step, line in steps(whole).items():
        assert [steps(broken)[step][n] for n in names] == [line[n] for n in names]
        assert line["loss"] != steps(stopped / "whole")[step]["loss"]
    assert events(whole, "eval")[-1]["val_loss"] == events(broken, "eval")[-1]["val_loss"]
    model, tokenizer, _ = load_checkpoint(str(broken))
    assert (model.config.doc_mask, model.config.eos_token_id) == (True, tokenizer.eos_id)
    how = Sampling(max_new_tokens=12, temperature=0.0)
    text = generate_texts(model, tokenizer, ["the "], how).texts[0]
    model.config.doc_mask = False
    assert generate_texts(model, tokenizer, ["the "], how).texts[0] == text


def test_another_split_of_the_same_global_batch_is_allowed_and_reported(
    stopped: Path, run: Path, flags: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    train(flags, out_dir=str(run), batch_size=4, accumulation_steps=2)
    assert "micro_batch_rows 2 -> 4, accumulation_steps 4 -> 2" in capsys.readouterr().out
    before, after = events(run, "run_start")
    assert (before["micro_batch_rows"], before["accumulation_steps"]) == (2, 4)
    assert (after["micro_batch_rows"], after["accumulation_steps"]) == (4, 2)
    assert events(run, "checkpoint_resharded") == []
    whole = steps(stopped / "whole")
    for step in range(6, 13):
        assert steps(run)[step]["rows"] == whole[step]["rows"]
        assert abs(steps(run)[step]["loss"] - whole[step]["loss"]) < 2e-3


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("change", "report", "group"),
    [
        ({"learning_rate": 1e-3}, "lr.learning_rate: 0.002 -> 0.001", "lr"),
        ({"mup_base_dim": 16}, "lr.mup_base_dim: None -> 16", "lr"),
        ({"beta2": 0.9}, "lr.betas: [0.9, 0.95] -> [0.9, 0.9]", "lr"),
        ({"batch_size": 4}, "batch.rows_per_step: 8 -> 16", "batch"),
        ({"max_seq_len": 16}, "batch.max_seq_len: 32 -> 16", "batch"),
        ({"max_steps": 20}, "schedule.total_steps: 12 -> 20", "schedule"),
        ({"dtype": "float32"}, "dtype.dtype: bfloat16 -> float32", "dtype"),
        ({"seed": 7}, "seed.seed: 42 -> 7", "seed"),
        ({"rope_theta": 1e4}, "model.rope_theta: 1000000.0 -> 10000.0", "model"),
        ({"doc_mask": True}, "model.doc_mask: False -> True", "model"),
        (
            {"rope_scaling": "ntk", "rope_factor": 2.0, "rope_original_length": 16},
            "model.rope_factor: None -> 2.0",
            "model",
        ),
    ],
)
def test_a_change_is_refused_with_old_and_new_and_the_flag_that_allows_it(
    run: Path, flags: dict[str, Any], change: dict[str, Any], report: str, group: str
):
    with pytest.raises(CheckpointError) as caught:
        train(flags, out_dir=str(run), **change)
    assert report in str(caught.value)
    assert f"--allow_change {group}" in str(caught.value)
    allowed = str(caught.value).split("--allow_change ")[1].split(", or")[0]
    train(flags, out_dir=str(run), stop_at_step=8, allow_change=allowed, **change)
    assert report in events(run, "run_changed")[0]["changes"]
    assert max(steps(run)) == 8
    # And what was changed is what the next start is held to.
    train(flags, out_dir=str(run), stop_at_step=9, **change)
    assert max(steps(run)) == 9
    assert len(events(run, "run_changed")) == 1


def test_a_new_rate_is_in_force_at_once(stopped: Path, run: Path, flags: dict[str, Any]):
    train(flags, out_dir=str(run), learning_rate=1e-3, allow_change="lr")
    whole = steps(stopped / "whole")
    for step in range(6, 13):
        assert steps(run)[step]["lr"] == pytest.approx(whole[step]["lr"] / 2)


def test_a_new_batch_reads_on_from_the_row_reached_and_a_kill_changes_nothing(
    run: Path, flags: dict[str, Any], tmp_path: Path
):
    changed = {**flags, "batch_size": 1}
    train(changed, out_dir=str(run), stop_at_step=7, allow_change="batch")
    again = Path(shutil.copytree(run, tmp_path / "again"))
    train(changed, out_dir=str(again), stop_at_step=8)
    train(changed, out_dir=str(run))
    train(changed, out_dir=str(again))
    assert [steps(run)[step]["rows"] for step in (5, 6, 7)] == [[32, 40], [40, 44], [44, 48]]
    for step in range(8, 13):
        assert steps(again)[step]["loss"] == steps(run)[step]["loss"]
        assert steps(again)[step]["rows"] == [40 + 4 * (step - 6), 44 + 4 * (step - 6)]


def test_rows_left_out_on_a_resume_are_not_read_and_the_others_keep_their_order(
    run: Path,
    stopped: Path,
    flags: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    assert minimind(["data", "at", str(stopped / "whole"), "--steps", "7:8", "--rows"]) == 0
    skip = tmp_path / "skip.txt"
    skip.write_text(capsys.readouterr().out)
    whole = read_run(stopped / "whole").at(1).order
    assert len(skip.read_text().split("\n")) > 2
    flags = {**flags, "skip_rows": str(skip)}
    with pytest.raises(CheckpointError, match=r"data\.rows_left_out.*--allow_change data"):
        train(flags, out_dir=str(run))
    assert train(flags, out_dir=str(run), allow_change="data", stop_at_step=7) == 75
    order = read_run(run).at(7).order
    out = set(whole.rows_for(6, 0, 1, 2).tolist())
    assert order.rows_per_epoch == whole.rows_per_epoch - len(out)
    read = [order.rows_for(step, 0, 1).tolist() for step in range(5, 9)]
    unbroken = [whole.rows_for(step, 0, 1).tolist() for step in (5, 8, 9, 10)]
    assert read == unbroken
    assert steps(run)[6]["loss"] == steps(stopped / "whole")[6]["loss"]
    assert steps(run)[7]["loss"] != steps(stopped / "whole")[7]["loss"]
    # A resume without a change goes on, and its checkpoint holds what it left out.
    assert train(flags, out_dir=str(run)) == 0
    assert read_run(run).at(12).order == order
    with pytest.raises(CheckpointError, match=r"data\.rows_left_out"):
        train({**flags, "skip_rows": None}, out_dir=str(run), max_steps=13)


def test_epochs_do_not_count_steps_of_two_sizes(run: Path, flags: dict[str, Any]):
    changed = {**flags, "batch_size": 1, "epochs": 1, "max_steps": None}
    with pytest.raises(UsageError, match=r"changed at step 5.*give --max_steps instead"):
        train(changed, out_dir=str(run), allow_change="batch,schedule")


def test_a_decay_branch_equals_a_run_that_decays_there_from_the_start(
    flags: dict[str, Any], tmp_path: Path
):
    wsd = {**flags, "schedule": "wsd", "warmup_steps": 2, "save_interval": 4, "keep_last": 9}
    stable, branch, direct = (tmp_path / name for name in ("stable", "branch", "direct"))
    assert train(wsd, out_dir=str(stable), max_steps=40, decay_steps=8, stop_at_step=6) == 75
    start = str(stable / "checkpoints" / "step_00000004")
    shorter = {**wsd, "max_steps": 9, "decay_steps": 5, "decay_shape": "linear"}
    with pytest.raises(CheckpointError, match=r"schedule\.decay_shape: .*1-sqrt.* -> .*linear"):
        train(shorter, out_dir=str(branch), resume=start)
    train(shorter, out_dir=str(branch), resume=start, allow_change="schedule")
    train(shorter, out_dir=str(direct))
    assert [line["lr"] for line in steps(direct).values()][3:5] == [2e-3, pytest.approx(1.64e-3)]
    for step in range(5, 10):
        for name in ("loss", "lr", "grad_norm", "rows", "tokens"):
            assert steps(branch)[step][name] == steps(direct)[step][name]
    weights = (folder / "checkpoints" / "step_00000009" for folder in (branch, direct))
    assert torch.equal(*(load_weights(path)["model.embed_tokens.weight"] for path in weights))


def test_the_moments_of_another_optimizer_are_refused_by_name(run: Path, flags: dict[str, Any]):
    muon = {**flags, "optimizer": "muon", "deepspeed_config": "none", "out_dir": str(run)}
    with pytest.raises(CheckpointError, match=r"lr\.optimizer: AdamW -> Muon"):
        train(muon)
    with pytest.raises(
        CheckpointError,
        match=r"has exp_avg and exp_avg_sq of model\.layers.* here needs momentum_buffer; use",
    ):
        train(muon, allow_change="lr")


def test_moments_of_which_only_some_are_needed_are_refused(
    run: Path, flags: dict[str, Any], tmp_path: Path
):
    lion = {**flags, "optimizer": "lion", "deepspeed_config": "none", "allow_change": "lr"}
    with pytest.raises(CheckpointError, match=r"exp_avg and exp_avg_sq of .* needs exp_avg; use"):
        train({**lion, "out_dir": str(run)})
    own = {**lion, "out_dir": str(tmp_path / "lion"), "resume": "none"}
    assert train(own, stop_at_step=2) == 75
    adamw = {**own, "optimizer": "adamw", "resume": "auto"}
    with pytest.raises(CheckpointError, match=r"has exp_avg of .* needs exp_avg and exp_avg_sq;"):
        train(adamw)


def test_a_budget_ends_a_run_and_is_no_change_on_resume(flags: dict[str, Any], tmp_path: Path):
    tokens = 9 * 8 * 32  # 9 steps of 8 rows
    budget = {**flags, "max_steps": None, "max_tokens": tokens + 100, "out_dir": str(tmp_path)}
    assert train(budget, stop_at_step=4) == 75
    assert train({**budget, "max_tokens": None, "max_steps": 9}) == 0
    assert events(tmp_path, "exit")[-1]["step"] == 9
    assert not events(tmp_path, "run_changed")


def test_new_text_with_the_old_tokenizer(run: Path, flags: dict[str, Any], tmp_path: Path):
    text = tmp_path / "more.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in sentences(5, 200)))
    new = {
        **flags,
        "data_path": str(text),
        "tokenizer": str(run / "tokenizer"),
        "out_dir": str(run),
    }
    with pytest.raises(CheckpointError, match=r"data\.sha256"):
        train(new)
    train(new, allow_change="data")
    assert steps(run)[6]["rows"] == [40, 48]  # places count on, the text begins anew
    assert events(run, "exit")[-1]["step"] == 12


def test_another_sequence_length_is_a_change_of_the_batch_alone(run: Path, flags: dict[str, Any]):
    changes = {"max_seq_len": 16, "allow_change": "batch,schedule"}
    assert train(flags, out_dir=str(run), **changes) == 0
    assert steps(run)[6]["rows"] == [40, 48]


def test_what_changed_is_reported_as_a_table(run: Path, flags: dict[str, Any]):
    changes = {"learning_rate": 1e-3, "seed": 7, "allow_change": "seed"}
    with pytest.raises(CheckpointError) as caught:
        train(flags, out_dir=str(run), **changes)
    assert [line.split() for line in caught.value.table] == [
        ["changed", "checkpoint", "this", "run", "allowed", "by"],
        ["lr.learning_rate", "0.002", "0.001", "--allow_change", "lr"],
        ["seed.seed", "42", "7", "--allow_change", "seed", "(given)"],
    ]


def test_text_changed_under_a_running_job_ends_it_before_the_next_save(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache, out = tmp_path / "cache", tmp_path / "run"
    rows_at = Batches.at

    def at(self: Batches, step: int) -> tuple[torch.Tensor, ...]:
        if step == 4:
            (shard,) = cache.glob("tokens-*/train-00000.bin")
            os.utime(shard)
        return rows_at(self, step)

    monkeypatch.setattr(Batches, "at", at)
    with pytest.raises(
        DataError, match=r"train-00000\.bin: was changed or removed while"
    ) as caught:
        train(flags, out_dir=str(out), cache_dir=str(cache), save_interval=3)
    assert caught.value.status == 3
    assert [path.name for path in (out / "checkpoints").glob("step_*")] == ["step_00000003"]


def test_a_run_beyond_its_end_is_reported(run: Path, flags: dict[str, Any]):
    with pytest.raises(UsageError, match="at step 5, and the run has 3 steps"):
        train(flags, out_dir=str(run), max_steps=3, allow_change="schedule")


def test_groups_are_the_ones_a_checkpoint_has(stopped: Path):
    from minimind.checkpoint.directory import published_checkpoints, read_manifest
    from minimind.config.flags import CHANGEABLE

    (path,) = published_checkpoints(stopped / "run" / "checkpoints")
    assert set(read_manifest(path)["identity"]) == set(CHANGEABLE)
    given = parse_flags(["--allow_change", "lr, data"]).allowed_changes()
    assert given == {"lr", "data"}
