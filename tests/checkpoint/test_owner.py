"""`mirror.json` and what else is read from a URL: damaged, huge, of another kind."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from minimind.checkpoint.directory import MANIFEST
from minimind.checkpoint.mirror import claim, require_mirror, require_no_mirror
from minimind.checkpoint.remote_run import RemoteRun
from minimind.config.parse import parse_flags
from minimind.errors import LockedError, StorageError, UsageError
from tests.checkpoint.saves import facts_of, save
from tests.conftest import Trained
from tests.storage.servers import BUCKET, FaultyProxy, ObjectStore

IDENTITY = {"seed": {"seed": 42}}
WHOLE = json.dumps({"run": "0123", "start": "4567", "identity": IDENTITY}).encode()
DEEP = b'{"run": "0123", "identity": ' + b'{"a": [' * 50_000 + b"]}" * 50_000 + b"}"
# What mirror.json may be, by name, and the status of a start: 8 where it is another run's.
OWNERS: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 5),
    "cut": (WHOLE[:20], 5),
    "binary": (bytes(range(256)), 5),
    "a list": (b"[]", 5),
    "deep": (DEEP, 5),
    "deep, and cut": (DEEP[:200_000], 5),
    "huge": (WHOLE[:-1] + b" " * 9_000_000 + b"}", 5),
    "no run": (b'{"identity": {}}', 5),
    "a number": (b'{"run": 3, "identity": {}}', 5),
    "a list as identity": (b'{"run": "0123", "identity": []}', 5),
    "a group that is a number": (b'{"run": "0123", "identity": {"seed": 3}}', 5),
    "half of a surrogate pair": (b'{"run": "0123", "identity": {"seed": {"a": "\\ud800"}}}', 5),
    "many digits": (b'{"run": "0123", "identity": {"seed": {"seed": ' + b"9" * 5000 + b"}}}", 5),
    "another's": (WHOLE.replace(b"42", b"43"), 8),
    "long values": (WHOLE.replace(b"42", b'"' + b"x" * 100_000 + b'"'), 8),
    "an out_dir's": (b'{"run": "0123"}', 8),
}


@pytest.mark.parametrize("name", OWNERS)
def test_what_is_no_claim_of_this_run_is_refused(name: str, tmp_path: Path):
    content, status = OWNERS[name]
    out_dir, folder = tmp_path / "run", tmp_path / "mirror"
    for place in (out_dir, folder):
        place.mkdir()
    (folder / "mirror.json").write_bytes(content)
    with pytest.raises((StorageError, LockedError)) as raised:
        claim(RemoteRun(f"file://{folder}"), out_dir, "auto", IDENTITY, frozenset())
    assert raised.value.status == status
    assert "mirror" in str(raised.value)
    assert len(str(raised.value)) < 500
    assert (folder / "mirror.json").read_bytes() == content
    assert not any(out_dir.iterdir())


OF_SYSTEMS = ("lost+found/", ".DS_Store", "Thumbs.db", "desktop.ini", ".Trash-1000/", ".snapshot/")


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


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "mirror.json")
    with pytest.raises(StorageError, match=r"mirror\.json: cannot be used .*not a regular file"):
        require_mirror(f"file://{tmp_path}", tmp_path / "run", "auto")


def test_a_mirror_is_no_out_dir(tmp_path: Path):
    for content in (None, b"{", b'{"run": "0123"}'):  # that of an out_dir, or damaged
        if content is not None:
            (tmp_path / "mirror.json").write_bytes(content)
        require_no_mirror(tmp_path)
    (tmp_path / "mirror.json").write_bytes(WHOLE)
    with pytest.raises(LockedError, match="is the --mirror of a run; give another --out_dir, or d"):
        require_no_mirror(tmp_path)


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


URLS = ["s3://", "s3:", "s3:/", "s3:///", "s3:////", "s3:///key", "s3:// ", "gs://", "gs:"]
URLS += ["file://", "file:", "file:///", "file:////", "S3://bucket/x", "https://h/x", "b/x", " "]


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_names_no_place_is_a_mistake(url: str):
    with pytest.raises(UsageError, match=r"mirror = .* is no URL that can be written"):
        parse_flags(["--mirror", url])
