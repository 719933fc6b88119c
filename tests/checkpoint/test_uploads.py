"""Uploads without training: rollbacks, validations, locks, parts, and two ranks."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from s3fs import S3FileSystem

from minimind.checkpoint import remote_run
from minimind.checkpoint.directory import MANIFEST, published_checkpoints, set_aside
from minimind.checkpoint.mirror import Change, Uploads, claim
from minimind.checkpoint.remote_run import ABANDONED, RemoteRun
from minimind.checkpoint.retention import Rules, prune, record_validation
from minimind.errors import StorageError
from minimind.runtime import filesystem
from tests.checkpoint.saves import facts_of, save
from tests.conftest import Launcher, Trained
from tests.runtime.servers import BUCKET, FaultyProxy, ObjectStore


class Fixture:
    """A run of fake checkpoints and its uploads to a folder."""

    def __init__(self, place: Path, facts: dict[str, Any], rules: Rules) -> None:
        self.facts, self.root = facts, place / "run" / "checkpoints"
        self.root.mkdir(parents=True)
        self.remote = RemoteRun(f"file://{place}/mirror")
        claimed = claim(self.remote, place / "run", "auto", {}, frozenset())
        self.uploads = Uploads(self.remote, claimed, place / "run", rules)

    def mirror(self, step: int) -> Path:
        """Save and upload."""
        path = save(self.root, step, self.facts)
        self.uploads.offer(step, None)
        assert self.uploads.wait(60)
        return path

    def told(self) -> list[tuple[str, int]]:
        return [(name, fields["step"]) for name, fields in self.uploads.events]


@pytest.fixture
def run(tmp_path: Path, trained: Trained) -> Iterator[Fixture]:
    found = Fixture(tmp_path, facts_of(trained.run), Rules(keep_last=2, keep_best=1))
    yield found
    found.uploads.close()


def test_what_a_rollback_leaves_behind_is_set_aside(run: Fixture):
    run.mirror(3)
    abandoned = run.mirror(5)
    set_aside(abandoned, "abandoned")
    run.uploads.go_back(3)
    run.mirror(4)
    assert run.remote.published() == [4, 3]
    assert ABANDONED in run.remote.steps()[5]
    run.mirror(5)
    assert run.remote.published() == [5, 4]
    assert ABANDONED not in run.remote.steps()[5]


def test_a_rollback_during_an_upload_ends_it(run: Fixture, monkeypatch: pytest.MonkeyPatch):
    real = RemoteRun.upload

    def upload(self: RemoteRun, directory: Path, before: Any) -> int:
        run.uploads.go_back(3)
        return real(self, directory, before)

    run.mirror(3)
    monkeypatch.setattr(RemoteRun, "upload", upload)
    run.mirror(5)
    assert run.remote.published() == [3]
    assert run.told() == [("checkpoint_mirrored", 3)]
    monkeypatch.undo()
    run.mirror(5)
    assert run.remote.published() == [5, 3]


def test_the_best_is_kept_by_a_validation_that_ends_after_its_upload(run: Fixture):
    record_validation(run.mirror(1), 2.0)
    for step in (2, 3, 4):
        record_validation(run.mirror(step), 3.0)
        prune(run.root, Rules(keep_last=2, keep_best=1))
    assert run.remote.published() == [4, 3, 1]
    shutil.rmtree(run.root)  # its loss is there, too
    run.root.mkdir()
    for step in (5, 6):
        run.mirror(step)
    assert run.remote.published() == [6, 5, 1]


def test_what_is_uploaded_is_not_pruned_and_the_newest_waits(
    run: Fixture, monkeypatch: pytest.MonkeyPatch
):
    real, paths = RemoteRun.upload, {}

    def upload(self: RemoteRun, directory: Path, before: Any) -> int:
        if not paths:
            for step in (2, 3, 4, 5):
                paths[step] = save(run.root, step, run.facts)
                run.uploads.offer(step, None)
                prune(run.root, Rules(keep_last=1))
            assert directory.is_dir()
        return real(self, directory, before)

    monkeypatch.setattr(RemoteRun, "upload", upload)
    run.mirror(1)
    assert run.told() == [("checkpoint_mirrored", 1), ("checkpoint_mirrored", 5)]
    prune(run.root, Rules(keep_last=1))
    assert [path.name for path in run.root.iterdir()] == [paths[5].name]


def test_a_slow_mirror_leaves_out_only_what_no_rule_keeps(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
):
    rules = Rules(keep_last=1, keep_every=3, keep_best=1)
    run = Fixture(tmp_path, facts_of(trained.run), rules)
    real, order = RemoteRun.upload, []

    def upload(self: RemoteRun, directory: Path, before: Any) -> int:
        order.append(directory.name)
        if len(order) == 1:  # meanwhile
            for step in range(2, 9):
                path = save(run.root, step, run.facts)
                record_validation(path, 1.0 if step == 4 else 2.0)
                run.uploads.offer(step, None)
                prune(run.root, rules)
        return real(self, directory, before)

    monkeypatch.setattr(RemoteRun, "upload", upload)
    run.mirror(1)
    assert [int(name[5:]) for name in order] == [1, 8, 3, 4, 6]
    assert run.remote.published() == [8, 6, 4, 3]
    prune(run.root, rules)
    assert run.remote.published() == [int(p.name[5:]) for p in published_checkpoints(run.root)]
    run.uploads.close()


def test_what_could_not_be_uploaded_is_uploaded_after_a_later_one(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
):
    run = Fixture(tmp_path, facts_of(trained.run), Rules(keep_last=1, keep_every=2))
    real = RemoteRun.upload

    def refused(self: RemoteRun, directory: Path, before: Any) -> int:
        raise StorageError("does not answer")

    monkeypatch.setattr(RemoteRun, "upload", refused)
    run.mirror(2)
    path = run.mirror(4)
    (path / "state.json").write_bytes(bytes(2_000))
    monkeypatch.setattr(RemoteRun, "upload", real)
    run.mirror(5)
    run.mirror(7)
    told = [("mirror_failed", 2), ("mirror_failed", 4), ("checkpoint_mirrored", 5)]
    told += [("checkpoint_mirrored", 2), ("mirror_failed", 4), ("checkpoint_mirrored", 7)]
    assert run.told() == told  # the damaged one is tried only once more
    assert run.remote.published() == [7, 2]
    run.uploads.close()


def test_one_that_cannot_be_read_does_not_hold_up_the_others(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
):
    run = Fixture(tmp_path, facts_of(trained.run), Rules(keep_last=1, keep_every=2))

    def refused(self: RemoteRun, directory: Path, before: Any) -> int:
        raise StorageError("does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "upload", refused)
        for step in (2, 4, 6):
            run.mirror(step)
    path = run.root / "step_00000002" / "state.json"
    path.unlink()
    path.mkdir()
    run.mirror(7)
    assert run.remote.published() == [7, 6, 4]
    name, fields = run.uploads.events[4]
    assert (name, fields["step"]) == ("mirror_failed", 2)
    assert "state.json: cannot be read (Is a directory)" in fields["reason"]
    run.uploads.close()


def test_a_start_uploads_what_the_one_before_did_not(tmp_path: Path, trained: Trained):
    run = Fixture(tmp_path, facts_of(trained.run), Rules(keep_last=1, keep_every=2))
    run.mirror(7)
    for step in (2, 4, 8):  # 8: not reported yet
        save(run.root, step, run.facts)
    run.uploads.begin(7)
    run.uploads.look(None)
    assert run.uploads.wait(60)
    assert run.remote.published() == [7, 4, 2]
    run.uploads.close()


def test_a_save_while_the_mirror_is_looked_at_is_one_upload_to_wait_for(
    run: Fixture, monkeypatch: pytest.MonkeyPatch
):
    """A run that ended then waited "for the upload of 2 checkpoints", of which one was step 0."""
    looks, goes_on, steps = threading.Event(), threading.Event(), RemoteRun.steps

    def slow(self: RemoteRun) -> dict[int, dict[str, int]]:
        looks.set()
        goes_on.wait(60)
        return steps(self)

    run.uploads.begin(0)
    monkeypatch.setattr(RemoteRun, "steps", slow)
    run.uploads.look(None)
    assert looks.wait(60)
    save(run.root, 2, run.facts)
    run.uploads.offer(2, None)
    assert run.uploads.pending() == [Change("look", 2)]
    goes_on.set()
    assert run.uploads.wait(60)
    assert run.remote.published() == [2]


def test_a_storage_that_is_down_at_a_start_is_told(run: Fixture, monkeypatch: pytest.MonkeyPatch):
    def refused(self: RemoteRun) -> dict[int, dict[str, int]]:
        raise StorageError("does not answer")

    for step in (7, -1):  # -1: of a run that begins
        run.uploads.begin(step)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteRun, "steps", refused)
            run.uploads.look(None)
            assert run.uploads.wait(60)
        name, fields = run.uploads.events.popleft()
        assert (name, fields["step"]) == ("mirror_failed", max(step, 0))
        assert fields["reason"] == "does not answer"


def test_a_folder_that_cannot_be_listed_is_not_left_out(
    run: Fixture, monkeypatch: pytest.MonkeyPatch
):
    for step in (1, 2):
        run.mirror(step)
    real = LocalFileSystem.ls

    def failing(self: LocalFileSystem, path: str, *rest: Any, **options: Any) -> Any:
        if path.endswith("step_00000002"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(self, path, *rest, **options)

    monkeypatch.setattr(LocalFileSystem, "ls", failing)
    with pytest.raises(StorageError, match="Permission denied"):
        run.remote.published()


def test_an_interrupted_upload_is_deleted_there_and_a_damaged_local_one_is_not_uploaded(
    run: Fixture,
):
    shutil.rmtree(run.mirror(1))
    run.remote.remove(f"checkpoints/step_00000001/{MANIFEST}")
    run.mirror(2)
    assert [*run.remote.steps()] == [2]
    path = save(run.root, 3, run.facts)
    (path / "state.json").write_bytes(bytes(2_000))
    run.uploads.offer(3, None)
    assert run.uploads.wait(60)
    assert run.told()[-1] == ("mirror_failed", 3)
    assert run.remote.published() == [2]


def test_a_large_file_is_verified_by_the_etag_of_its_parts(
    tmp_path: Path, store: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote_run, "PART", 5 * 2**20)
    content = bytes(range(256)) * 45_000
    (tmp_path / "file").write_bytes(content)
    remote = RemoteRun(f"s3://{BUCKET}/run")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "_sha256", None)  # would read it back
        assert remote.put(tmp_path / "file", "file") == len(content)
    head = store.client.head_object(Bucket=BUCKET, Key="run/file")
    assert head["ETag"].endswith('-3"')
    monkeypatch.setattr(remote_run, "etag_of", lambda info: "of an encrypted object")
    assert remote.put(tmp_path / "file", "file") == len(content)


def test_an_upload_whose_last_answer_is_lost_counts_if_the_file_is_whole(
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The library asks again, and is told that there is no such upload."""
    monkeypatch.setattr(remote_run, "PART", 5 * 2**20)
    monkeypatch.setattr(filesystem, "WAITS", (0.0,) * 5)
    content = bytes(range(256)) * 45_000
    (tmp_path / "file").write_bytes(content)
    remote = RemoteRun(f"s3://{BUCKET}/run")
    call, losses, sent = S3FileSystem._call_s3, ["answer"], Counter[str]()

    async def lose(self: S3FileSystem, method: str, *rest: Any, **options: Any) -> Any:
        found = await call(self, method, *rest, **options)
        sent[method] += 1
        if method == "complete_multipart_upload" and losses:
            if losses.pop() == "file":
                store.put("run/file", b"another")
            return await call(self, method, *rest, **options)
        return found

    monkeypatch.setattr(S3FileSystem, "_call_s3", lose)
    assert remote.put(tmp_path / "file", "file") == len(content)
    assert (sent["create_multipart_upload"], capsys.readouterr().err) == (1, "")
    losses.append("file")
    assert remote.put(tmp_path / "file", "file") == len(content)
    assert sent["create_multipart_upload"] == 3
    assert "NoSuchUpload" in capsys.readouterr().err
    body = store.client.get_object(Bucket=BUCKET, Key="run/file")["Body"]
    assert body.read() == content


@pytest.mark.parametrize("status", [403, 404, 200])
def test_a_file_that_is_refused_gone_or_changed_while_it_is_fetched(
    run: Fixture, store: ObjectStore, proxy: FaultyProxy, tmp_path: Path, monkeypatch, status: int
):
    """Only what has other bytes is called damaged; nothing is deleted for it."""
    path, into = save(run.root, 1, run.facts), tmp_path / "into"
    remote = RemoteRun(f"s3://{BUCKET}/run")
    remote.upload(path, lambda: None)
    key, get = "run/checkpoints/step_00000001/state.json", RemoteRun.manifest

    def manifest(self: RemoteRun, step: int) -> Any:  # and what happens right after it
        found = get(self, step)
        if status == 403:
            store.require_credentials(True)
        elif status == 404:
            store.client.delete_object(Bucket=BUCKET, Key=key)
        else:
            size = store.client.head_object(Bucket=BUCKET, Key=key)["ContentLength"]
            store.put(key, b"x" * size)
        return found

    monkeypatch.setattr(RemoteRun, "manifest", manifest)
    before = store.keys()
    try:
        if status == 403:
            with pytest.raises(StorageError, match=r": access is refused "):
                remote.fetch(1, into)
        else:
            bad = remote.fetch(1, into)
            assert bad is not None
            assert bad.file == "state.json"
            assert ("is missing" if status == 404 else "does not match its sha256") in bad.reason
    finally:
        store.require_credentials(False)
    assert {*before} - {*store.keys()} == ({key} if status == 404 else set())


def test_a_manifest_that_is_gone_is_missing(tmp_path: Path):
    bad = RemoteRun(f"file://{tmp_path}/mirror").fetch(3, tmp_path / "into")
    assert str(bad) == f"DAMAGED: {MANIFEST} is missing"


@pytest.mark.long
def test_two_ranks_resume_from_the_mirror(forked: Launcher, tmp_path: Path):
    mirror = tmp_path / "mirror"
    flags = f"--mirror file://{mirror} --max_steps 6 --save_interval 3 --eval_rows 0"
    run = forked.run(tmp_path / "run", flags)
    assert run.status == 0, run.stderr
    before = run.curve()
    assert {one["step"] for one in run.events("checkpoint_mirrored")} == {3, 6}
    (mirror / "checkpoints" / "step_00000006" / MANIFEST).unlink()
    shutil.rmtree(run.out_dir)
    run = forked.run(tmp_path / "run", flags)
    assert run.status == 0, run.stderr
    assert [one["step"] for one in run.events("checkpoint_fetched")] == [3]
    assert run.curve() == before[3:]
