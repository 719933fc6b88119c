"""A malicious pickle in every file of a checkpoint, under every command: it is never run."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minimind.checkpoint.directory import MANIFEST, published_checkpoints
from minimind.errors import CheckpointError
from tests.faults.tampering import COMMANDS, TOOLS, ending, files_of, manifest_of, reseal, seal


class Payload:
    """What creates a file as soon as it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.canary, "w")


def torch_file(payload: Payload, is_zip: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": payload}, file, _use_new_zipfile_serialization=is_zip)
    return file.getvalue()


def numpy_file(payload: Payload) -> bytes:
    file = io.BytesIO()
    array = np.empty(1, dtype=object)
    array[0] = payload
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def behind_a_header(payload: Payload) -> bytes:
    """A safetensors file with nothing in it but a pickle behind its end."""
    return (2).to_bytes(8, "little") + b"{}" + pickle.dumps(payload)


# How each is made, and who would fall for it.
PICKLES: dict[str, tuple[Callable[[Payload], bytes], Callable[[bytes], Any]]] = {
    **{
        f"protocol {number}": (lambda p, n=number: pickle.dumps(p, n), pickle.loads)
        for number in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "torch zip": (
        lambda p: torch_file(p, is_zip=True),
        lambda b: torch.load(io.BytesIO(b), weights_only=False),
    ),
    "torch legacy": (
        lambda p: torch_file(p, is_zip=False),
        lambda b: torch.load(io.BytesIO(b), weights_only=False),
    ),
    "numpy": (numpy_file, lambda b: np.load(io.BytesIO(b), allow_pickle=True)),
    "safetensors tail": (behind_a_header, lambda b: pickle.loads(b[10:])),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the canary's file is left open
@pytest.mark.parametrize("kind", PICKLES)
def test_the_pickles_are_live(kind: str, tmp_path: Path):
    make, fall_for = PICKLES[kind]
    canary = tmp_path / "canary"
    fall_for(make(Payload(canary)))
    assert canary.exists()


def restored(run: Path, place: Path) -> Path:
    """`run` copied to `place`, whatever was there."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(run, place))


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", PICKLES)
def test_no_pickle_in_any_file_is_run_by_any_command(
    kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    canary, copy = tmp_path / "canary", tmp_path / "run"
    content = PICKLES[kind][0](Payload(canary))
    unread = {"ds_config.resolved.json"}
    names = files_of(published_checkpoints(run / "checkpoints")[0])
    for name in names:
        # Unsealed, no content is looked at before its hash: one kind stands for all.
        for is_sealed in (False, True) if kind == "torch zip" else (True,):
            for command in COMMANDS:
                newer, _ = published_checkpoints(restored(run, copy) / "checkpoints")
                (newer / name).write_bytes(content)
                if is_sealed and name != MANIFEST:
                    reseal(newer)
                status, report = ending(command, copy, capsys)
                case = f"{kind} as {name}, sealed: {is_sealed}, {command}: {status} {report}"
                assert not canary.exists(), case
                assert "Traceback" not in report, case
                if not is_sealed or name == MANIFEST:
                    assert status == 0, case  # the one before is whole
                elif status:
                    assert status == CheckpointError.status, case
                    assert name in report, case
                    assert name not in unread, case
    assert not canary.exists()


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["torch zip", "torch legacy"])
@pytest.mark.parametrize("tool", TOOLS)
def test_no_pickle_in_any_file_is_run_by_any_tool(
    kind: str, tool: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    canary, copy = tmp_path / "canary", tmp_path / "run"
    content = PICKLES[kind][0](Payload(canary))
    for name in files_of(published_checkpoints(run / "checkpoints")[0]):
        for is_sealed in (False, True):
            newer, _ = published_checkpoints(restored(run, copy) / "checkpoints")
            (newer / name).write_bytes(content)
            if is_sealed and name != MANIFEST:
                reseal(newer)
            status, report = ending(tool, copy, capsys)
            case = f"{kind} as {name}, sealed: {is_sealed}, {tool}: {status} {report}"
            assert not canary.exists(), case
            assert "Traceback" not in report, case
            # `verify` answers 4 for one damaged among several, the others go on with what is whole.
            is_seen = not is_sealed or name == MANIFEST
            assert status in ((4,) if tool == "verify" and is_seen else (0, 4)), case
            assert status == 0 or is_sealed or tool == "verify", case


@pytest.mark.parametrize("command", COMMANDS)
def test_pickles_in_all_files_of_all_checkpoints_end_in_one_line(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    canary = tmp_path / "canary"
    copy = restored(run, tmp_path / "run")
    for checkpoint in published_checkpoints(copy / "checkpoints"):
        for name in files_of(checkpoint):
            (checkpoint / name).write_bytes(pickle.dumps(Payload(canary)))
    status, report = ending(command, copy, capsys)
    assert (status, report.count("\n") <= 1) == (CheckpointError.status, True)
    assert "step_00000002: manifest.json is a pickle of Python" in report
    assert not canary.exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["data.pkl", "../data.pkl", "/tmp/data.pkl", "optimizer.pt"])
def test_a_pickle_that_the_manifest_adds_is_not_run(
    command: str, name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    canary = tmp_path / "canary"
    copy = restored(run, tmp_path / "run")
    newer, _ = published_checkpoints(copy / "checkpoints")
    inside = newer / Path(name).name
    inside.write_bytes(torch_file(Payload(canary), is_zip=True))
    manifest = manifest_of(newer)
    entry = {**manifest["files"][0], "name": name}
    seal(newer, {**manifest, "files": [*manifest["files"], entry]})
    if "/" not in name:
        reseal(newer)
    assert ending(command, copy, capsys)[0] == 0  # as if it were not there, or by the one before
    assert not canary.exists()
