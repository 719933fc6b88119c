"""Folders of other software are told as what they are, with the way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minimind.errors import CheckpointError
from minimind.interop.weights import load_weights_from
from tests.interop.hostile import good_folder

ZERO = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
WHOLE = "mp_rank_00_model_states.pt"


def made(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("file", [ZERO, WHOLE])
def test_a_file_of_it_is_told_too(file: str, tmp_path: Path):
    folder = made(tmp_path / "global_step10", (ZERO, WHOLE))
    with pytest.raises(CheckpointError, match=f"{file}: is a checkpoint of DeepSpeed; continue"):
        load_weights_from(folder / file)


@pytest.mark.parametrize("name", ["state_dict", "model", "module"])
def test_weights_beside_other_state_are_told(name: str, tmp_path: Path):
    state = {"epoch": 3, "optimizer": {"state": {}}, name: {"a.weight": torch.zeros(2)}}
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(CheckpointError) as caught:
        load_weights_from(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/model.pth: has weights under {name!r}, beside what else training saved; save"
        f" these alone (torch.save(torch.load(FILE)[{name!r}], 'model.pth')), and name that file"
    )


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_shards_that_an_index_lists_and_that_are_missing(index: str, tmp_path: Path):
    folder = good_folder(tmp_path / "folder")
    (folder / "model.safetensors").rename(folder / "part-1")
    weight_map = {"lm_head.weight": "part-1", "model.norm.weight": "part-2", "a": "part-3"}
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    match = f"{index}: has 2 of its 3 files not beside it \\(part-2 for one\\); get the file again"
    with pytest.raises(CheckpointError, match=match):
        load_weights_from(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "more"), [(2, ()), (2, ("--max_shard_size", "100KB")), (0, ()), ("dcp", ())]
)
def test_the_way_out_gives_the_weights(stage: int | str, more: tuple[str, ...], tmp_path: Path):
    source, out = good_folder(tmp_path / "source"), tmp_path / "out"
    written, whole = tmp_path / "written", 0 if stage == "dcp" else stage
    made = [sys.executable, "-m", "tests.interop.write_deepspeed", source, written, str(whole)]
    subprocess.run([*map(str, made)], check=True, capture_output=True, timeout=600)
    with pytest.raises(CheckpointError) as caught:
        load_weights_from(written / ("dcp" if stage == "dcp" else "deepspeed"))
    if stage == 0:
        name = str(caught.value).split("save what ")[1].split(" has under")[0]
        out.mkdir()
        torch.save(torch.load(name)["module"], out / "model.pth")
    else:
        command = str(caught.value).split("`")[-2].replace("OUT", str(out)).split()
        bin_of = Path(sys.executable).parent
        subprocess.run([bin_of / command[0], *command[1:], *more], check=True, timeout=600)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((source / name).read_bytes())
    found, expected = load_weights_from(out).tensors, load_weights_from(source).tensors
    assert {*found.shapes} == {*expected.shapes}
    for name in expected.shapes:
        assert torch.equal(found.read(name), expected.read(name))
