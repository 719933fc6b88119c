"""The directory protocol against what can happen to a directory: damage, leftovers, odd names."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minimind.checkpoint.directory import (
    Difference,
    describe_file,
    differences,
    newest_valid,
    publish,
    published_checkpoints,
    read_manifest,
    require_same_run,
    set_aside,
    start_over,
    step_directory,
    sweep,
    verify,
    with_sum,
    write_manifest,
)
from minimind.checkpoint.retention import Rules, prune
from minimind.checkpoint.tensor_files import ShardFiles, write_slices
from minimind.checkpoint.validation import shard_name
from minimind.errors import CheckpointError

SHARD = shard_name(0, 1)


def saved(root: Path, step: int, content: bytes = b"tensor bytes") -> Path:
    tmp = root / f"step_{step:08d}.tmp-x"
    tmp.mkdir(parents=True)
    (tmp / SHARD).write_bytes(content)
    facts = {"step": step, "tokens": 8 * step, "world_size": 1, "identity": {}}
    write_manifest(tmp, facts, [describe_file(tmp / SHARD)])
    final = step_directory(root, step)
    publish(tmp, final)
    return final


def test_a_published_checkpoint_verifies_and_the_newest_is_chosen(tmp_path):
    saved(tmp_path, 9)
    newest = saved(tmp_path, 100)
    assert verify(newest) is None
    assert newest_valid(published_checkpoints(tmp_path), verify) == (newest, [])
    assert [p.name for p in published_checkpoints(tmp_path)] == ["step_00000100", "step_00000009"]


def test_the_newest_is_the_highest_number_also_past_eight_digits(tmp_path):
    saved(tmp_path, 99_999_999)
    saved(tmp_path, 100_000_000)
    assert published_checkpoints(tmp_path)[0].name == "step_100000000"


def damage_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "harm", "report"),
    [
        (SHARD, damage_bit, "sha256"),
        (SHARD, lambda f: f.write_bytes(f.read_bytes()[:-1]), "11 of 12 bytes"),
        (SHARD, lambda f: f.unlink(), "missing"),
        (SHARD, lambda f: (f.unlink(), f.symlink_to("/etc/hostname")), "missing"),
        ("manifest.json", damage_bit, "manifest"),
        ("manifest.json", lambda f: f.write_bytes(f.read_bytes()[:-9]), "not JSON"),
        ("manifest.json", lambda f: f.unlink(), "cannot be read"),
        ("manifest.json", lambda f: f.write_text("[]"), "is not a JSON object"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(tmp_path, name, harm, report):
    older, newer = saved(tmp_path, 1), saved(tmp_path, 2)
    harm(newer / name)
    chosen, rejected = newest_valid(published_checkpoints(tmp_path), verify)
    assert chosen == older
    (bad,) = rejected
    assert (bad.path, bad.file) == (newer, name)
    if name == SHARD or report != "manifest":
        assert report in bad.reason


def test_when_all_are_damaged_nothing_starts_at_step_0(tmp_path):
    for step in (1, 2):
        damage_bit(saved(tmp_path, step) / SHARD)
    with pytest.raises(CheckpointError, match=r"step_00000002.*step_00000001"):
        newest_valid(published_checkpoints(tmp_path), verify)


def test_an_empty_folder_is_a_fresh_start(tmp_path):
    assert newest_valid(published_checkpoints(tmp_path), verify) == (None, [])


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", ".."])
def test_a_manifest_cannot_point_outside_its_directory(tmp_path, name):
    path = saved(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][0]["name"] = name
    del manifest["sha256"]
    (path / "manifest.json").write_bytes(with_sum(manifest))
    with pytest.raises(CheckpointError, match=r"has files\.0\.name = "):
        read_manifest(path)


def test_only_published_names_count_and_leftovers_are_swept(tmp_path):
    saved(tmp_path, 1)
    for name in ("step_00000002.tmp-ab", "rejected-step_00000003", "step_x", "latest"):
        (tmp_path / name).mkdir()
    assert [p.name for p in published_checkpoints(tmp_path)] == ["step_00000001"]
    sweep(tmp_path)
    assert not (tmp_path / "step_00000002.tmp-ab").exists()
    assert (tmp_path / "rejected-step_00000003").exists()


def test_the_newest_are_kept_and_a_taken_name_is_moved_aside(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    prune(tmp_path, Rules(2))
    assert [p.name for p in published_checkpoints(tmp_path)] == ["step_00000003", "step_00000002"]
    saved(tmp_path, 3, b"again")
    assert (tmp_path / "rejected-step_00000003" / SHARD).read_bytes() == b"tensor bytes"
    assert (tmp_path / "step_00000003" / SHARD).read_bytes() == b"again"


def test_a_fresh_start_moves_old_checkpoints_aside_without_deleting_any(tmp_path):
    root = tmp_path / "checkpoints"
    for aside in ("checkpoints-before", "checkpoints-before-2"):
        saved(root, 1)
        start_over(root)
        assert (tmp_path / aside / "step_00000001").is_dir()
        assert list(root.iterdir()) == []


def test_what_steps_aside_is_kept_but_no_candidate(tmp_path):
    for aside in ("rejected-step_00000001", "rejected-step_00000001-2"):
        set_aside(saved(tmp_path, 1), "rejected")
        assert (tmp_path / aside / "manifest.json").is_file()
    assert published_checkpoints(tmp_path) == []


def test_differences_name_old_and_new():
    assert differences({"lr": {"a": 1}}, {"lr": {"a": 1}}) == []
    assert differences({"lr": {"a": 1}}, {"lr": {"a": 2}}) == [Difference("lr", "a", 1, 2)]
    assert differences({}, {"seed": {"seed": 3}}) == [Difference("seed", "seed", None, 3)]
    with pytest.raises(CheckpointError, match=r"lr\.a: 1 -> 2"):
        require_same_run(Path("x"), {"lr": {"a": 1}}, {"lr": {"a": 2}})


@pytest.mark.parametrize(
    ("old", "new", "accumulation", "named"),
    [(4, 2, 1, 2), (12, 8, 2, 3), (2, 4, 2, 1), (2, 4, 1, None), (6, 4, 1, None)],
)
def test_other_rows_of_a_step_name_the_accumulation_that_gives_the_old_back(
    old: int, new: int, accumulation: int, named: int | None
):
    saved: dict[str, Any] = {"batch": {"rows_per_step": old}}
    now: dict[str, Any] = {"batch": {"rows_per_step": new}}
    with pytest.raises(CheckpointError) as refused:
        require_same_run(Path("x"), saved, now, accumulation_steps=accumulation)
    found = re.findall(r"--accumulation_steps (\d+)", str(refused.value))
    assert found == ([] if named is None else [str(named)])
    whole = re.findall(r"--global_batch_size (\d+)", str(refused.value))
    assert whole == ([str(old)] if named is None else [])
    now["batch"]["stages"] = [[new, 64]]
    with pytest.raises(CheckpointError) as staged:
        require_same_run(Path("x"), saved, now)
    assert not re.findall(r"--global_batch_size \d", str(staged.value))


def test_any_stretch_of_a_parameter_is_read_wherever_the_runs_were_cut(tmp_path):
    whole = torch.randn(101)
    cuts = [0, 7, 40, 41, 80, 101]
    runs = [(f"fp32|w|{a}", whole[a:b]) for a, b in itertools.pairwise(cuts)]
    write_slices(tmp_path / shard_name(0, 2), runs[::2])
    write_slices(tmp_path / shard_name(1, 2), runs[1::2])
    files = ShardFiles(tmp_path, 2)
    draw = np.random.default_rng(0)
    for _ in range(200):
        start, end = sorted(draw.integers(0, 102, 2).tolist())
        assert torch.equal(files.read("fp32", "w", start, end - start), whole[start:end])


def test_a_missing_run_is_named(tmp_path):
    write_slices(tmp_path / shard_name(0, 1), [("fp32|w|0", torch.ones(5))])
    files = ShardFiles(tmp_path, 1)
    for name, start, length in (("w", 3, 4), ("w", 6, 1), ("v", 0, 1)):
        with pytest.raises(CheckpointError, match=f"of {name} has no element"):
            files.read("fp32", name, start, length)
