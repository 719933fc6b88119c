"""`mirror.json` and what else is read from a URL: damaged, huge, of another kind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from minimind.checkpoint.directory import MANIFEST
from minimind.checkpoint.mirror import claim, require_mirror, require_no_mirror, require_owner
from minimind.checkpoint.remote_run import RemoteRun
from minimind.errors import LockedError, StorageError
from tests.checkpoint.saves import facts_of, save
from tests.conftest import Trained
from tests.runtime.servers import BUCKET, FaultyProxy, ObjectStore

IDENTITY = {"seed": {"seed": 42}}
WHOLE = json.dumps({"run": "0123", "start": "4567", "identity": IDENTITY}).encode()
DEEP = b'{"run": "0123", "identity": ' + b'{"a": [' * 50_000 + b"]}" * 50_000 + b"}"
# What mirror.json may be, by name, where it is not this run's.
OWNERS: dict[str, bytes] = {
    "empty": b"",
    "cut": WHOLE[:20],
    "binary": bytes(range(256)),
    "a list": b"[]",
    "deep": DEEP,
    "deep, and cut": DEEP[:200_000],
    "huge": WHOLE[:-1] + b" " * 9_000_000 + b"}",
    "no run": b'{"identity": {}}',
    "a number": b'{"run": 3, "identity": {}}',
    "a list as identity": b'{"run": "0123", "identity": []}',
    "a group that is a number": b'{"run": "0123", "identity": {"seed": 3}}',
    "half of a surrogate pair": b'{"run": "0123", "identity": {"seed": {"a": "\\ud800"}}}',
    "many digits": b'{"run": "0123", "identity": {"seed": {"seed": ' + b"9" * 5000 + b"}}}",
    "another's": WHOLE.replace(b"42", b"43"),
    "long values": WHOLE.replace(b"42", b'"' + b"x" * 100_000 + b'"'),
    "an out_dir's": b'{"run": "0123"}',
}


@pytest.mark.parametrize("name", OWNERS)
def test_what_is_no_claim_of_this_run_is_refused(name: str, tmp_path: Path):
    content = OWNERS[name]
    out_dir, folder = tmp_path / "run", tmp_path / "mirror"
    for place in (out_dir, folder):
        place.mkdir()
    (folder / "mirror.json").write_bytes(content)
    with pytest.raises(LockedError) as raised:
        claim(RemoteRun(f"file://{folder}"), out_dir, "auto", IDENTITY, frozenset())
    assert "mirror" in str(raised.value)
    assert len(str(raised.value)) < 500
    assert (folder / "mirror.json").read_bytes() == content
    assert not any(out_dir.iterdir())


OF_SYSTEMS = ("lost+found/", ".DS_Store", "Thumbs.db", "desktop.ini", ".Trash-1000/", ".snapshot/")
OF_SYSTEMS += ("$RECYCLE.BIN/", "System Volume Information/", ".Trashes/", ".Spotlight-V100/")
OF_SYSTEMS += (".fseventsd/",)


@pytest.mark.parametrize("name", OF_SYSTEMS)
def test_a_disk_with_what_its_system_puts_there_is_empty(name: str, tmp_path: Path):
    out_dir, folder = tmp_path / "run", tmp_path / "mirror"
    out_dir.mkdir()
    if name.endswith("/"):
        (folder / name).mkdir(parents=True)
    else:
        folder.mkdir()
        (folder / name).touch()
    require_mirror(f"file://{folder}", out_dir, "auto")
    claim(RemoteRun(f"file://{folder}"), out_dir, "auto", IDENTITY, frozenset())
    assert {path.name for path in folder.iterdir()} == {name.rstrip("/"), "mirror.json"}


@pytest.mark.parametrize("name", ["lost", "lost+found2", "notes.txt", ".Trash-mine", ".snapshots"])
def test_a_disk_with_something_else_is_not_empty(name: str, tmp_path: Path):
    folder = tmp_path / "mirror"
    for one in (name, "lost+found"):
        (folder / one).mkdir(parents=True)
    with pytest.raises(LockedError, match=f"holds '{re.escape(name)}' and is not the mirror"):
        require_mirror(f"file://{folder}", tmp_path / "run", "auto")


@pytest.mark.parametrize(
    "kind", ["pipe", "folder", "device", "link to a folder", "link to nothing"]
)
def test_what_is_no_file_is_no_claim(kind: str, tmp_path: Path):
    folder = tmp_path / "mirror"
    folder.mkdir()
    path = folder / "mirror.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "link to a folder": folder}.get(kind, "nothing"))
    with pytest.raises(
        LockedError, match=r"holds 'mirror\.json' and is not the mirror of this run; give an empty"
    ):
        require_mirror(f"file://{folder}", tmp_path / "run", "auto")


def test_an_id_in_out_dir_that_is_no_file_is_told_at_the_start(tmp_path: Path):
    (tmp_path / "run" / "mirror.json").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"run/mirror\.json: is a folder, .*; move it away"):
        require_mirror(f"file://{tmp_path}/new", tmp_path / "run", "auto")


def test_a_mirror_is_no_out_dir(tmp_path: Path):
    out_dir, other = tmp_path / "copy", tmp_path / "other"
    out_dir.mkdir()
    for content in (None, b"{", b'{"run": "0123"}'):  # that of an out_dir, or damaged
        if content is not None:
            (out_dir / "mirror.json").write_bytes(content)
        require_no_mirror(out_dir, None)
    (out_dir / "mirror.json").write_bytes(WHOLE)
    way = f"; to continue that run, give an empty --out_dir and --mirror file://{out_dir}, "
    other.mkdir()
    (other / "mirror.json").write_bytes(WHOLE.replace(b"0123", b"4567"))
    for url in (None, f"file://{tmp_path}/nothing", f"file://{other}"):
        with pytest.raises(
            LockedError, match=f"^--out_dir {out_dir} is the --mirror of a run{way}"
        ):
            require_no_mirror(out_dir, url)


def test_a_copy_of_a_mirror_is_an_out_dir_with_that_mirror(tmp_path: Path, trained: Trained):
    folder, out_dir = tmp_path / "mirror", tmp_path / "copy"
    save(folder / "checkpoints", 2, facts_of(trained.run))
    (folder / "mirror.json").write_bytes(WHOLE)
    shutil.copytree(folder, out_dir)
    require_no_mirror(out_dir, f"file://{folder}")
    require_mirror(f"file://{folder}", out_dir, "auto")
    remote = RemoteRun(f"file://{folder}")
    require_owner(remote, claim(remote, out_dir, "auto", IDENTITY, frozenset()))
    assert json.loads((out_dir / "mirror.json").read_bytes()) == {"run": "0123"}
    require_no_mirror(out_dir, None)
    require_no_mirror(out_dir, f"file://{out_dir}")
    (out_dir / "mirror.json").unlink()  # checkpoints of a run without an id
    with pytest.raises(
        LockedError, match="; to continue that run, give --resume auto and an empty --out_dir"
    ):
        require_mirror(f"file://{folder}", out_dir, "auto")
    require_mirror(f"file://{folder}", tmp_path / "empty", "auto")


def test_a_link_to_itself_is_not_followed(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match=r"loop.*Too many levels of symbolic links"):
        require_mirror(f"file://{tmp_path / 'loop'}", tmp_path / "run", "auto")


def test_a_prefix_that_somebody_copied_is_refused(
    tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    url = f"s3://{BUCKET}/runs/copied"
    store.put("runs/copied/checkpoints/step_00000002/manifest.json", b"{}")
    for resume in ("auto", "none"):
        with pytest.raises(LockedError, match=rf"^--mirror {url} holds 'checkpoints' and is not"):
            require_mirror(url, tmp_path, resume)
    assert store.keys() == ["runs/copied/checkpoints/step_00000002/manifest.json"]


def test_the_marker_of_a_folder_is_no_content(
    tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    store.put("runs/new/", b"")
    require_mirror(f"s3://{BUCKET}/runs/new/", tmp_path, "auto")
    assert store.keys() == ["runs/new/"]


MANIFESTS = {
    "deep": b"[" * 100_000,
    "huge": b" " * 9_000_000,
    "a list": b"[]",
    "binary": bytes(range(256)),
    "empty": b"",
    "no files": b'{"sha256": "a"}',
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_damaged_manifest_there_is_one_damaged_checkpoint(
    name: str, tmp_path: Path, trained: Trained
):
    folder = tmp_path / "mirror"
    path = save(folder / "checkpoints", 2, facts_of(trained.run))
    remote = RemoteRun(f"file://{folder}")
    assert remote.fetch(2, tmp_path / "whole") is None
    (path / MANIFEST).write_bytes(MANIFESTS[name])
    bad = remote.fetch(2, tmp_path / "damaged")
    assert bad is not None
    assert bad.file == MANIFEST


def test_a_full_disk_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Any, *rest: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalFileSystem, "pipe_file", full)
    with pytest.raises(StorageError, match=rf"^--mirror file://{tmp_path}/m: No space left .*; fr"):
        require_mirror(f"file://{tmp_path}/m", tmp_path / "run", "auto")
    monkeypatch.setattr(LocalFileSystem, "put_file", full)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=rf"^file://{tmp_path}/m/name: No space left"):
        RemoteRun(f"file://{tmp_path}/m").put(tmp_path / "file", "name")
