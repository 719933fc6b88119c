"""A checkpoint that is being read is not deleted; one that is gone, or unreadable, is reported."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from minimind.checkpoint import directory as directories
from minimind.checkpoint.directory import choose, delete, published_checkpoints, read_chosen, sweep
from minimind.checkpoint.retention import Rules, prune
from minimind.checkpoint.tensor_files import ShardFiles
from minimind.cli.main import main
from minimind.errors import CheckpointError
from minimind.inference.load_model import load_model
from minimind.interop.weights import load_weights_from
from tests.faults import tiny


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


def steps(run: Path) -> list[str]:
    return [path.name for path in published_checkpoints(run / "checkpoints")]


def remove(run: Path) -> None:
    """Delete the newest checkpoint, whoever reads it."""
    newest = published_checkpoints(run / "checkpoints")[0]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()


def test_a_checkpoint_that_is_read_retires_only_afterwards(run: Path):
    older = published_checkpoints(run / "checkpoints")[1]
    chosen = choose(str(older))
    assert chosen.path == older
    prune(run / "checkpoints", Rules(1))
    assert older.is_dir()
    assert not delete(older)
    del chosen
    prune(run / "checkpoints", Rules(1))
    assert steps(run) == ["step_00000004"]
    assert not list((run / "checkpoints").glob("*.tmp-*"))


def test_weights_keep_their_checkpoint_until_the_last_of_them_is_read(run: Path):
    found = load_weights_from(str(run))
    assert not delete(found.path)
    found.release()
    assert delete(found.path)


def test_a_loaded_model_keeps_nothing(run: Path):
    _, _, path = load_model(str(run), None)
    assert delete(path)


def retires_once(monkeypatch: pytest.MonkeyPatch, run: Path, place: Any, name: str) -> list[str]:
    """Delete the newest checkpoint at the first call of `place.name`; the steps then left."""
    whole, left = getattr(place, name), []

    def retiring(*args: Any, **more: Any) -> Any:
        if not left:
            remove(run)
            left.extend(steps(run))
        return whole(*args, **more)

    monkeypatch.setattr(place, name, retiring)
    return left


READERS = [
    (directories, "read_object"),  # before anything is read
    (directories, "sha256_of"),
    (ShardFiles, "__init__"),  # once it is verified
]


@pytest.mark.parametrize(("place", "name"), READERS)
@pytest.mark.parametrize(
    "words",
    [
        "generate --checkpoint RUN --prompt a --max_new_tokens 1",
        "export --checkpoint RUN --format llama --out OUT",
        "checkpoint consolidate RUN --out OUT",
        "checkpoint diff RUN RUN",
    ],
)
def test_without_locks_a_reader_chooses_again(
    words: str,
    place: Any,
    name: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """As on a file system that has none, or after an `rm -r`."""
    left = retires_once(monkeypatch, run, place, name)
    known = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    assert main([known.get(word, word) for word in words.split()]) == 0
    assert left == ["step_00000002"]
    output = capsys.readouterr()
    assert "step_00000002" in output.out + output.err
    assert "skipped checkpoint" not in output.err


@pytest.mark.parametrize(("place", "name"), READERS)
def test_one_that_was_named_and_is_gone_is_reported_so(
    place: Any,
    name: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    retires_once(monkeypatch, run, place, name)
    named = run / "checkpoints" / "step_00000004"
    assert main(["generate", "--checkpoint", str(named), "--prompt", "a"]) == 4
    output = f"error[E_CHECKPOINT]: {named}: was removed while it was read; name another"
    assert output in capsys.readouterr().err


def test_the_number_of_choices_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minimind.checkpoint.directory.TRIES", 2)

    def use(chosen: Any) -> None:
        remove(run)
        raise FileNotFoundError(chosen.path)

    with pytest.raises(CheckpointError, match=r"each of 2 checkpoints was removed while it was"):
        read_chosen(str(run), use)
    assert steps(run) == []


def unreadable(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Have the newest checkpoint's file `name` fail to open: as root one may read everything."""
    whole = open

    def failing(path: Any, *args: Any, **more: Any) -> Any:
        if str(path).endswith(f"step_00000004/{name}"):
            raise OSError(code, os.strerror(code), str(path))
        return whole(path, *args, **more)

    monkeypatch.setattr("builtins.open", failing)


FILES = ["manifest.json", "shard-0-of-1.safetensors", "config.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_newest_checkpoint_that_cannot_be_read_is_not_passed_over(
    code: int, name: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    unreadable(monkeypatch, name, code)
    named = run / "checkpoints" / "step_00000004" / name
    output = f"{named}: cannot be read ({os.strerror(code)}); it may be intact"
    assert main(["generate", "--checkpoint", str(run), "--prompt", "a"]) == 4
    assert f"error[E_CHECKPOINT]: {output}" in capsys.readouterr().err
    with pytest.raises(CheckpointError) as raised:
        tiny.resume(run)
    assert output in str(raised.value)
    assert steps(run) == ["step_00000004", "step_00000002"]
    assert main(["checkpoint", "verify", str(run)]) == 4
    assert f"UNREADABLE: {name} cannot be read" in capsys.readouterr().out
    assert main(["checkpoint", "prune", str(run), "--keep_last", "1"]) == 4
    assert len(steps(run)) == 2


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_not_empty(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    def refused(path: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(CheckpointError, match=r"checkpoints: cannot be read \(Permission denied\)"):
        tiny.resume(run)


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "folder"])
def test_what_has_the_name_of_an_unfinished_save_is_removed(kind: str, run: Path, tmp_path: Path):
    """Of a link the link alone."""
    target, stray = tmp_path / "kept", run / "checkpoints" / "step_00000009.tmp-abc"
    target.mkdir()
    (target / "file").write_text("mine")
    if kind == "file":
        stray.write_text("x")
    elif kind == "folder":
        stray.mkdir()
    else:
        stray.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    tiny.resume(run)
    assert not os.path.lexists(stray)
    assert (target / "file").read_text() == "mine"
    sweep(run / "checkpoints")
