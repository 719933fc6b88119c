"""What a disk, a copy or a hand can do to a checkpoint: it is found, and the one before is taken.

Choose-and-verify in one process, over two checkpoints of a real run.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minimind.checkpoint.directory import (
    MANIFEST,
    Rejected,
    newest_valid,
    published_checkpoints,
    read_manifest,
    step_directory,
    verify,
)
from minimind.checkpoint.tensor_files import write_slices
from minimind.checkpoint.validation import shard_name
from minimind.errors import CheckpointError
from tests.checkpoint.weights import load_weights
from tests.faults.tampering import (
    copied,
    files_of,
    flipped,
    manifest_of,
    reseal,
    seal,
    trained,
    truncated,
)

SHARD = shard_name(0, 1)


@pytest.fixture
def pair(run: Path, tmp_path: Path) -> tuple[Path, Path]:
    return copied(run, tmp_path / "run")


def shared_out(world_size: int) -> Callable[[Path], Rejected | None]:
    """`verify` as so many ranks do it, each its share of the files."""

    def check(path: Path) -> Rejected | None:
        found = [verify(path, rank, world_size) for rank in range(world_size)]
        return next((bad for bad in found if bad), None)

    return check


def taken(newer: Path, world_size: int = 1) -> tuple[Path | None, list[tuple[Path, str]]]:
    chosen, rejected = newest_valid(published_checkpoints(newer.parent), shared_out(world_size))
    return chosen, [(bad.path, bad.file) for bad in rejected]


def test_flipped_bits_and_truncations_are_all_found(
    pair: tuple[Path, Path], request: pytest.FixtureRequest
):
    trials = 500 if request.config.getoption("--long") else 60
    older, newer = pair
    names = files_of(newer)
    assert {MANIFEST, SHARD, "state.json", "config.json", "tokenizer.model"} < set(names)
    draw = random.Random(500)
    undetected = []
    for trial in range(trials):
        name = names[trial % len(names)]
        harm = draw.choice((flipped, truncated))
        content = (newer / name).read_bytes()
        damaged = harm(content, draw)
        assert damaged != content
        (newer / name).write_bytes(damaged)
        if taken(newer, draw.choice((1, 2, 3))) != (older, [(newer, name)]):
            undetected.append((trial, name, harm.__name__))
        (newer / name).write_bytes(content)
    assert undetected == []
    assert taken(newer) == (newer, [])


def test_every_bit_of_the_manifest_counts(pair: tuple[Path, Path]):
    _, newer = pair
    content = (newer / MANIFEST).read_bytes()
    manifest = manifest_of(newer)
    manifest["identity"]["lr"]["learning_rate"] = 1e-05  # 1E-05 is the same number
    manifest["versions"]["minimind"] = "\u00eb"  # \u00EB is the same letter
    seal(newer, manifest)
    sealed = (newer / MANIFEST).read_bytes()
    assert verify(newer) is None
    assert b"1e-05" in sealed
    assert rb"\u00eb" in sealed
    draw = random.Random(1)
    places = {sealed.index(b"1e-05") + 1, *range(sealed.index(rb"\u00eb"), len(sealed), 7)}
    for place in sorted(places):
        damaged = bytearray(sealed)
        bit = 0x20 if damaged[place] in b"ebE" else 1 << draw.randrange(8)
        damaged[place] ^= bit
        (newer / MANIFEST).write_bytes(damaged)
        assert verify(newer) is not None, (place, sealed[place - 9 : place + 9])
    (newer / MANIFEST).write_bytes(content)
    assert verify(newer) is None


def test_clean_loads_raise_no_alarm(pair: tuple[Path, Path], request: pytest.FixtureRequest):
    _, newer = pair
    first = load_weights(newer)
    for number in range(100 if request.config.getoption("--long") else 12):
        assert taken(newer, number % 4 + 1) == (newer, [])
        if number % 10 == 0:
            again = load_weights(newer)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_every_missing_or_renamed_file_is_found(pair: tuple[Path, Path]):
    older, newer = pair
    for name in files_of(newer):
        (newer / name).rename(newer / f"{name}.bak")
        assert taken(newer) == (older, [(newer, name)])
        (newer / f"{name}.bak").rename(newer / name)
    assert taken(newer) == (newer, [])


def test_a_file_too_many_is_passed_over(pair: tuple[Path, Path]):
    _, newer = pair
    (newer / ".nfs0001").write_bytes(b"left by a file server")
    (newer / "shard-1-of-2.safetensors").write_bytes(b"never listed, so never read")
    assert taken(newer) == (newer, [])
    assert load_weights(newer)


@pytest.mark.parametrize("name", [SHARD, "state.json", MANIFEST])
def test_a_link_in_place_of_a_file_is_found(pair: tuple[Path, Path], tmp_path: Path, name: str):
    older, newer = pair
    (newer / name).rename(tmp_path / "elsewhere")  # the very same content
    (newer / name).symlink_to(tmp_path / "elsewhere")
    assert taken(newer) == (older, [(newer, name)])


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_found(pair: tuple[Path, Path], name: str):
    older, newer = pair
    (newer / name).unlink()
    os.mkfifo(newer / name)  # reading it would wait for ever
    assert taken(newer) == (older, [(newer, name)])
    (newer / name).unlink()
    (newer / name).mkdir()
    assert taken(newer) == (older, [(newer, name)])


def test_a_shard_of_another_step_or_run_is_found(
    pair: tuple[Path, Path], corpus: Path, tmp_path: Path
):
    older, newer = pair
    other = trained(corpus, tmp_path / "other", seed=7) / "checkpoints" / newer.name
    for foreign in (older, other):
        assert (foreign / SHARD).stat().st_size == (newer / SHARD).stat().st_size
        own = (newer / SHARD).read_bytes()
        shutil.copyfile(foreign / SHARD, newer / SHARD)
        assert taken(newer) == (older, [(newer, SHARD)])
        (newer / SHARD).write_bytes(own)
    shutil.copyfile(other / MANIFEST, newer / MANIFEST)
    _, ((path, name),) = taken(newer)
    assert (path, name != MANIFEST) == (newer, True)  # whole, but of other files


def in_two_shards(checkpoint: Path) -> None:
    """Cut the one shard of a checkpoint in two, as two ranks would have written it."""
    manifest = manifest_of(checkpoint)
    halves: list[list[tuple[str, torch.Tensor]]] = [[], []]
    for key, whole in load_file(checkpoint / SHARD).items():
        assert key.endswith("|0")
        middle = len(whole) // 2
        halves[0].append((key, whole[:middle]))
        halves[1].append((f"{key.removesuffix('0')}{middle}", whole[middle:]))
    entries = [entry for entry in manifest["files"] if entry["name"] != SHARD]
    entries += [write_slices(checkpoint / shard_name(n, 2), half) for n, half in enumerate(halves)]
    (checkpoint / SHARD).unlink()
    seal(checkpoint, {**manifest, "world_size": 2, "files": entries})


def test_swapped_shards_are_found(pair: tuple[Path, Path]):
    older, newer = pair
    before = load_weights(newer)
    in_two_shards(newer)
    assert taken(newer) == (newer, [])
    assert all(torch.equal(value, before[name]) for name, value in load_weights(newer).items())
    one, two = newer / shard_name(0, 2), newer / shard_name(1, 2)
    one.rename(newer / "x")
    two.rename(one)
    (newer / "x").rename(two)
    assert taken(newer) == (older, [(newer, one.name)])
    reseal(newer)  # who swaps and seals gets the same weights: every run says where it belongs
    assert all(torch.equal(value, before[name]) for name, value in load_weights(newer).items())


def test_a_manifest_that_leaves_out_a_shard_is_found(pair: tuple[Path, Path]):
    older, newer = pair
    manifest = manifest_of(newer)
    entries = [entry for entry in manifest["files"] if entry["name"] != SHARD]
    seal(newer, {**manifest, "files": entries})
    assert taken(newer) == (older, [(newer, MANIFEST)])


def test_a_checkpoint_under_the_name_of_another_step_is_found(pair: tuple[Path, Path]):
    older, newer = pair
    renamed = step_directory(newer.parent, 9)
    shutil.copytree(older, renamed)
    assert taken(newer) == (newer, [(renamed, MANIFEST)])
    kept = newer.with_name("best")  # a copy by another name, given to --resume, is none
    shutil.copytree(newer, kept)
    assert read_manifest(kept)["step"] == 2


def test_when_both_are_damaged_nothing_starts_at_step_0(pair: tuple[Path, Path]):
    for path in pair:
        (path / "state.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"00002: state\.json is 0 of .*_00000001"):
        taken(pair[1])
