"""examples/save_and_load.py: what is written, and that a run taken up again ends the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load, load_file

from tests.examples.conftest import Start, by_every_launcher, promised, shape
from tests.runtime.hub_server import TOKEN, USER, running_hub

pytestmark = [pytest.mark.long, pytest.mark.launch]
NAME = "save_and_load.py"


@by_every_launcher
def test_weights_come_back_from_shards_and_from_a_models_folder(
    start: Start, launcher: str, processes: int, tmp_path: Path
):
    report = start(NAME, f"--out {tmp_path / 'saved'}", launcher, processes)
    assert shape(report) == promised(NAME)
    assert report.count("the same: True") == 2
    weights = tmp_path / "saved" / "weights"
    assert not (weights / "pytorch_model.bin").exists()
    index = json.loads((weights / "model.safetensors.index.json").read_text())
    shards = {name: load_file(weights / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 1
    assert all(name in shards[shard] for name, shard in index["weight_map"].items())
    assert (tmp_path / "saved" / "pretrained" / "model.safetensors").is_file()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_stopped_and_resumed_ends_with_the_same_parameters(
    start: Start, processes: int, tmp_path: Path
):
    whole = start(NAME, f"--out {tmp_path / 'whole'}", processes=processes)
    cut = f"--out {tmp_path / 'cut'}"
    stopped = start(NAME, f"{cut} --stop_after 7", processes=processes)
    assert stopped.startswith("step 7: ")  # two steps after the state was saved, and lost
    resumed = start(NAME, cut, processes=processes)
    assert resumed.splitlines()[0] == "goes on after step 5"
    assert resumed.splitlines()[1:] == whole.splitlines()


@pytest.mark.parametrize("processes", [1, 2])
def test_one_process_pushes_to_the_hub_once(start: Start, processes: int, tmp_path: Path):
    """The real client against a stand-in on the loopback interface; the hub itself is not asked."""
    with running_hub() as hub:
        flags = f"--out {tmp_path / 'saved'} --push_to {USER}/tiny"
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
        report = start(NAME, flags, processes=processes, **online, HF_HUB_DISABLE_XET="1")
    _, (sha, commit) = hub.commits["model", f"{USER}/tiny"]  # the first made the repository
    assert report.endswith(f"push_to_hub: {hub.url}/{USER}/tiny/commit/{sha}\n")
    assert {"README.md", "config.json", "model.safetensors"} <= set(commit)
    saved = load_file(tmp_path / "saved" / "pretrained" / "model.safetensors")
    sent = load(commit["model.safetensors"])
    assert sent.keys() == saved.keys()
    assert all((sent[name] == saved[name]).all() for name in saved)
