"""The actions of `minimind checkpoint` on runs of a tiny model."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimind.checkpoint.directory import published_checkpoints
from minimind.checkpoint.run_folder import lock_out_dir
from minimind.cli.main import main
from minimind.inference.load_model import load_checkpoint
from minimind.interop import tensor_sources, write_folder
from minimind.model.causal_lm import MiniMindForCausalLM
from tests.faults import tiny
from tests.runtime.test_terminal import use_screen

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole(tiny_tokenizer: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.new_run(tmp_path_factory.mktemp("whole") / "run", tiny_tokenizer, steps=(2, 4, 6))


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def checkpoint(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def step(out_dir: Path, number: int) -> Path:
    return out_dir / "checkpoints" / f"step_{number:08d}"


def leave_behind(out_dir: Path) -> None:
    """One of each that a run may leave beside its checkpoints."""
    root = out_dir / "checkpoints"
    (root / "step_00000009.tmp-ab12").mkdir()
    for aside in ("rejected-step_00000005", "abandoned-step_00000008"):
        shutil.copytree(step(out_dir, 4), root / aside)


def names(out_dir: Path) -> list[str]:
    return sorted(p.name for p in (out_dir / "checkpoints").iterdir())


def test_list_shows_one_aligned_line_for_each_and_what_lies_beside(run_dir, capsys):
    leave_behind(run_dir)
    assert checkpoint("list", run_dir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "checkpoint",
        *("step_00000006", "step_00000004", "step_00000002"),
        *("abandoned-step_00000008", "rejected-step_00000005", "step_00000009.tmp-ab12"),
    ]
    column = lines[0].index("state")
    output = [line[column:] for line in lines[1:]]
    assert output[:3] == ["complete, hashes not verified"] * 3
    assert output[3:] == ["set aside, never resumed from"] * 2 + ["unfinished"]
    for expected in (" 600 ", " 7 ", " 0.2 MiB ", " float32 "):
        assert expected in lines[1]


@pytest.mark.parametrize("columns", [80, 100])
def test_a_list_fits_the_screen(columns: int, run_dir, capsys, monkeypatch):
    leave_behind(run_dir)
    use_screen(monkeypatch, columns)
    assert checkpoint("list", run_dir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    starts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert starts[:2] == ["checkpoint", "step_00000006"]
    assert sum("step_00000009.tmp-ab12" in line for line in lines) == 1


def test_list_reports_damage_by_size_at_once_and_by_hash_when_requested(run_dir, capsys):
    damage(step(run_dir, 6) / "state.json")
    shard = step(run_dir, 4) / "shard-0-of-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert checkpoint("list", "--checkpoint", run_dir) == 0
    quick = capsys.readouterr().out.splitlines()
    assert "hashes not verified" in quick[1]
    size = shard.stat().st_size
    assert f"DAMAGED: shard-0-of-1.safetensors is {size} of {size + 1} bytes" in quick[2]
    assert checkpoint("list", run_dir, "--verify") == 0
    thorough = capsys.readouterr().out.splitlines()
    assert "DAMAGED: state.json does not match its sha256" in thorough[1]
    assert "ok, hashes verified" in thorough[3]


def test_list_for_programs(run_dir, capsys):
    assert checkpoint("list", step(run_dir, 4), "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert {"step": 4, "tokens": 400, "world_size": 1, "zero_stage": None, "files": 7}.items() <= (
        one.items()
    )
    assert one["bytes"] == sum(p.stat().st_size for p in step(run_dir, 4).iterdir())
    assert one["saved"] == (step(run_dir, 4) / "manifest.json").stat().st_mtime


def test_a_run_without_a_checkpoint_is_listed_as_such_and_cannot_be_verified(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert checkpoint("list", tmp_path / "run") == 0
    assert "no checkpoint yet" in capsys.readouterr().out
    assert checkpoint("verify", tmp_path / "run") == 4
    assert checkpoint("list", tmp_path / "nowhere") == 4
    assert capsys.readouterr().err.count("error[E_CHECKPOINT]") == 2


def test_verify_names_every_bad_file_and_those_that_no_one_vouches_for(run_dir, capsys):
    (step(run_dir, 6) / "core").write_bytes(b"dumped")
    assert checkpoint("verify", run_dir) == 0
    output = capsys.readouterr().out
    assert "step_00000006: note: 'core' is not in the manifest" in output
    assert output.count(": ok") == 3
    damage(step(run_dir, 4) / "state.json")
    (step(run_dir, 4) / "tokenizer.model").unlink()
    assert checkpoint("verify", "--checkpoint", run_dir) == 4
    output = capsys.readouterr().out
    assert "step_00000004: DAMAGED: state.json does not match its sha256" in output
    assert "step_00000004: DAMAGED: tokenizer.model is missing" in output
    assert output.count(": ok") == 2
    assert checkpoint("verify", step(run_dir, 2)) == 0
    assert checkpoint("verify", step(run_dir, 4)) == 4


def test_verify_of_a_directory_without_its_manifest(run_dir, capsys):
    (step(run_dir, 4) / "manifest.json").unlink()
    assert checkpoint("verify", step(run_dir, 4)) == 4
    assert "manifest.json cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_no_damage(
    run_dir, capsys, monkeypatch, is_damaged: bool
):
    """Deleted before it is examined, or after damage was found in what was deleted already."""
    from minimind.checkpoint import tools as checkpoint_tools

    examine, seen = checkpoint_tools.examine, list[str]()

    def examined(path: Path, how: Any) -> Any:
        seen.append(path.name)
        if path.name != "step_00000002":
            return examine(path, how)
        if not is_damaged:
            shutil.rmtree(path)
            return examine(path, how)
        (path / "state.json").unlink()
        found = examine(path, how)
        shutil.rmtree(path)
        return found

    monkeypatch.setattr(checkpoint_tools, "examine", examined)
    assert checkpoint("verify", run_dir) == 0
    assert "step_00000002" in seen
    assert capsys.readouterr().out.count(": ok") == 2


def test_diff_of_a_checkpoint_with_itself_saved_by_others_is_layout_alone(run_dir, capsys):
    assert checkpoint("diff", run_dir, step(run_dir, 6)) == 0
    assert "equal" in capsys.readouterr().out
    tiny.recut(step(run_dir, 6), run_dir / "three" / "checkpoints", 3, 2)
    assert checkpoint("diff", run_dir, run_dir / "three") == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  layout.world_size: 1 -> 3",
        "  layout.zero_stage: None -> 2",
    ]


def test_diff_counts_what_differs_and_names_where_most(run_dir, capsys):
    other = Path(shutil.copytree(step(run_dir, 6), run_dir / "step_00000006"))
    shard = other / "shard-0-of-1.safetensors"
    runs = load_file(shard)
    runs["fp32|model.norm.weight|0"][3] += 0.5
    runs["fp32|model.norm.weight|0"][5] -= 0.25
    save_file(runs, shard)
    identity = {**tiny.IDENTITY, "seed": {"seed": 2}}
    tiny.vouch(other, identity=identity, versions={"torch": "3"}, tokens=601)
    assert checkpoint("diff", step(run_dir, 6), other) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    elements = sum(p.numel() for p in tiny.Engine().model.parameters())
    assert lines == [
        "  counters.tokens: 600 -> 601",
        "  seed.seed: 1 -> 2",
        "  versions.torch: 2 -> 3",
        f"  fp32: 2 of {elements:,} differ, by at most 0.5 in model.norm.weight",
    ]


def test_diff_and_consolidate_pass_over_the_damaged_and_report_it(run_dir, tmp_path, capsys):
    damage(step(run_dir, 6) / "state.json")
    assert checkpoint("diff", run_dir, step(run_dir, 4)) == 0
    assert "step_00000006: state.json" in capsys.readouterr().err
    assert checkpoint("consolidate", step(run_dir, 6), "--out", tmp_path / "flat") == 4
    assert not (tmp_path / "flat").exists()


def test_consolidated_files_load_in_transformers_with_the_numbers_of_the_checkpoint(
    run_dir, tmp_path, capsys
):
    out = tmp_path / "deep" / "flat"
    assert checkpoint("consolidate", "--checkpoint", run_dir, "--out", out) == 0
    assert "step_00000006" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        *("tokenizer.model", "tokenizer_config.json"),
    ]
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == 0o644
    ours, _, _ = load_checkpoint(str(run_dir))
    theirs = MiniMindForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.float32
    for name, value in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value), name
    rows = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(theirs(rows).logits, ours(rows).logits)


def test_the_average_is_the_mean_of_the_weights_of_verified_checkpoints(run_dir, tmp_path, capsys):
    flat = {}
    for number in (2, 4, 6):
        out = tmp_path / f"flat-{number}"
        assert checkpoint("consolidate", step(run_dir, number), "--out", out) == 0
        flat[number] = load_file(out / "model.safetensors")
    out = tmp_path / "mean"
    assert checkpoint("average", step(run_dir, 2), step(run_dir, 4), run_dir, "--out", out) == 0
    assert "in float32, the mean of 3 checkpoints" in capsys.readouterr().out
    mean = load_file(out / "model.safetensors")
    assert mean.keys() == flat[2].keys()
    for name, value in mean.items():
        expected = torch.stack([flat[number][name].double() for number in flat]).mean(0)
        assert torch.allclose(value, expected.float(), rtol=1e-6, atol=0), name
    assert MiniMindForCausalLM.from_pretrained(out).dtype == torch.float32
    damage(step(run_dir, 2) / "state.json")
    words = ("average", step(run_dir, 2), run_dir, "--out", tmp_path / "other")
    assert checkpoint(*words) == 4
    assert not (tmp_path / "other").exists()


def test_checkpoints_of_two_models_or_the_same_twice_have_no_average(run_dir, tmp_path, capsys):
    other = Path(shutil.copytree(run_dir, tmp_path / "other_run"))
    tiny.vouch(step(other, 6), identity={**tiny.IDENTITY, "model": {"rope_theta": 5.0}})
    out = ("--out", tmp_path / "mean")
    assert checkpoint("average", run_dir, other, *out) == 4
    assert "has another model or tokenizer than" in capsys.readouterr().err
    assert checkpoint("average", run_dir, step(run_dir, 6), *out) == 2
    assert (
        "a checkpoint is named twice (2 names, 1 different); name each once"
        in capsys.readouterr().err
    )
    assert checkpoint("average", run_dir, *out) == 2
    assert not (tmp_path / "mean").exists()


def test_bfloat16_in_several_files_is_the_rounded_float32(run_dir, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    most = 6000
    assert checkpoint("consolidate", run_dir, "--out", one) == 0
    words = ("--dtype", "bfloat16", "--max_shard_size", "5.859375KiB")
    assert checkpoint("consolidate", run_dir, "--out", other, *words) == 0
    whole = load_file(one / "model.safetensors")
    index = json.loads((other / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for file in files:
        tensors = load_file(other / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        size = sum(2 * t.numel() for t in tensors.values())
        assert size <= most or len(tensors) == 1
        total += size
        for name, value in tensors.items():
            assert torch.equal(value, whole.pop(name).bfloat16())
    assert (whole, total) == ({}, index["metadata"]["total_size"])
    assert MiniMindForCausalLM.from_pretrained(other, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 2), (5, 3)])
def test_float32_files_are_the_same_bytes_whoever_saved_them(world_size, stage, run_dir, tmp_path):
    tiny.recut(step(run_dir, 6), tmp_path / "other" / "checkpoints", world_size, stage)
    for name in ("run", "other"):
        words = ("--max_shard_size", "20KB", "--out", tmp_path / f"{name}-flat")
        assert checkpoint("consolidate", tmp_path / name, *words) == 0
    ours, theirs = tmp_path / "run-flat", tmp_path / "other-flat"
    assert len(list(ours.iterdir())) > 4
    for file in ours.iterdir():
        assert file.read_bytes() == (theirs / file.name).read_bytes(), file.name
    assert len(list(ours.iterdir())) == len(list(theirs.iterdir()))


def test_a_buffer_that_the_model_does_not_have_is_refused(run_dir, tmp_path, capsys):
    path = step(run_dir, 6)
    save_file({"seen": torch.tensor([1, 2])}, path / "buffers.safetensors")
    tiny.vouch(path)
    assert checkpoint("consolidate", path, "--out", tmp_path / "flat") == 4
    assert f"{path}: has 'seen'" in capsys.readouterr().err


def test_what_exists_is_replaced_only_by_force_and_only_if_it_is_ours(run_dir, tmp_path, capsys):
    out = tmp_path / "flat"
    words = ("consolidate", run_dir, "--out", out)
    assert checkpoint(*words) == 0
    before = (out / "model.safetensors").read_bytes()
    assert checkpoint(*words, "--dtype", "bfloat16") == 2
    assert (out / "model.safetensors").read_bytes() == before
    assert checkpoint(*words, "--dtype", "bfloat16", "--force") == 0
    assert len((out / "model.safetensors").read_bytes()) < len(before)
    (out / "thesis.tex").write_text("mine")
    assert checkpoint(*words, "--force") == 2
    assert "'thesis.tex', which this version of consolidate does not" in capsys.readouterr().err
    assert (out / "thesis.tex").exists()
    for taken in (run_dir, step(run_dir, 6)):
        assert checkpoint("consolidate", run_dir, "--out", taken, "--force") == 2
    assert [p.name for p in tmp_path.iterdir() if ".tmp-" in p.name] == []


def test_what_appears_during_the_work_is_not_replaced(run_dir, tmp_path, capsys, monkeypatch):
    out = tmp_path / "flat"
    write_parts = write_folder.write_parts

    def meanwhile(*given):
        out.mkdir()
        (out / "model.safetensors").write_text("of another")
        write_parts(*given)

    monkeypatch.setattr(write_folder, "write_parts", meanwhile)
    assert checkpoint("consolidate", run_dir, "--out", out) == 2
    assert f"--out {out} exists; give another" in capsys.readouterr().err
    assert (out / "model.safetensors").read_text() == "of another"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flat", "run"]


def test_a_full_disk_leaves_nothing_and_reports_what_was_needed(
    run_dir, tmp_path, capsys, monkeypatch
):
    def full(path, parts, metadata):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    whole = tmp_path / "whole"
    assert checkpoint("consolidate", run_dir, "--out", whole) == 0
    size = sum(path.stat().st_size for path in whole.iterdir())
    shutil.rmtree(whole)
    monkeypatch.setattr(write_folder, "write_parts", full)
    assert checkpoint("consolidate", run_dir, "--out", tmp_path / "flat") == 5
    output = capsys.readouterr().err
    assert "error[E_STORAGE]" in output
    needed = re.search(r", ([\d,]+) bytes \(.*\) needed, ", output)
    assert needed
    assert int(needed[1].replace(",", "")) == pytest.approx(size, rel=0.1)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_one_tensor_at_a_time_is_in_memory(run_dir, tmp_path, monkeypatch):
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    read = tensor_sources.Contents.read

    def watched(self, kind, name):
        alive.append(sum(ref() is not None for ref in seen))
        value = read(self, kind, name)
        seen.append(weakref.ref(value))
        return value

    monkeypatch.setattr(tensor_sources.Contents, "read", watched)
    assert checkpoint("consolidate", run_dir, "--out", tmp_path / "flat") == 0
    assert len(seen) == len(tiny.Engine().model.state_dict()) - 1  # lm_head is tied
    assert max(alive) == 0


def test_prune_keeps_the_newest_and_sweeps_the_rest(run_dir, capsys):
    leave_behind(run_dir)
    before = names(run_dir)
    assert checkpoint("prune", run_dir, "--keep_last", 2, "--dry_run") == 0
    dry = capsys.readouterr().out
    assert names(run_dir) == before
    assert checkpoint("prune", run_dir, "--keep_last", 2) == 0
    assert capsys.readouterr().out == dry.replace("would delete", "deleted")
    assert dry.count("\n") == 5
    assert "step_00000002 (0.2 MiB)" in dry
    assert names(run_dir) == ["step_00000004", "step_00000006"]
    assert checkpoint("prune", run_dir, "--keep_last", 2) == 0
    assert "nothing to delete" in capsys.readouterr().out


def test_prune_counts_only_what_is_valid(run_dir, capsys):
    damage(step(run_dir, 6) / "state.json")
    assert checkpoint("prune", run_dir, "--keep_last", 1) == 0
    output = capsys.readouterr().out
    assert "step_00000006 stays, but is damaged and not counted: state.json" in output
    assert names(run_dir) == ["step_00000004", "step_00000006"]


def test_prune_deletes_nothing_where_all_are_damaged(run_dir, capsys):
    leave_behind(run_dir)
    before = names(run_dir)
    for path in published_checkpoints(run_dir / "checkpoints"):
        damage(path / "state.json")
    assert checkpoint("prune", run_dir, "--keep_last", 1) == 4
    assert "no checkpoint" in capsys.readouterr().err
    assert names(run_dir) == before


def test_prune_waits_for_no_run(run_dir, capsys):
    with lock_out_dir(run_dir):
        assert checkpoint("prune", run_dir, "--keep_last", 1) == 8
    assert "error[E_LOCKED]" in capsys.readouterr().err
    assert len(names(run_dir)) == 3


@pytest.mark.parametrize(
    "words", [("--keep_last", "0"), ("--keep_last", "-1"), (), ("--keep_las", "1"), ("--keep", "1")]
)
def test_prune_wants_to_know_how_many(words, run_dir):
    assert checkpoint("prune", run_dir, *words) == 2
    assert len(names(run_dir)) == 3


def test_prune_is_for_a_run_and_not_for_one_of_its_checkpoints(run_dir):
    assert checkpoint("prune", step(run_dir, 2), "--keep_last", 1) == 2
    assert len(names(run_dir)) == 3


def test_no_command_needs_deepspeed_and_looking_needs_no_torch(run_dir, tmp_path):
    """In a Python of their own, which imports more from group to group."""
    heavy = "deepspeed accelerate transformers"
    groups = [
        (
            [f"list {run_dir} --verify", f"prune {run_dir} --keep_last 2 --dry_run"],
            f"{heavy} torch numpy",
        ),
        ([f"verify {run_dir}", f"diff {run_dir} {run_dir}"], heavy),
        ([f"consolidate {run_dir} --out {tmp_path / 'flat'}"], "deepspeed"),
    ]
    code = f"""
import sys
from minimind.cli.main import main
for lines, modules in {groups!r}:
    statuses = [main(["checkpoint", *line.split()]) for line in lines]
    print("ended", statuses, [m for m in modules.split() if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ends == ["ended [0, 0] []", "ended [0, 0] []", "ended [0] []"]
