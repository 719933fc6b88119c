"""Uploads while the storage, the disk or the run fails: no fault of one change holds up others."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimind.checkpoint import mirror
from minimind.checkpoint.directory import MANIFEST, OWNER, set_aside
from minimind.checkpoint.mirror import Mirror, Uploads
from minimind.checkpoint.remote_run import RemoteRun
from minimind.checkpoint.retention import VALIDATION, Rules, prune, record_validation, saved_of
from minimind.errors import StorageError
from tests.checkpoint.saves import facts_of, save
from tests.checkpoint.test_uploads import Fixture
from tests.conftest import Trained

BEST = Rules(keep_last=2, keep_best=1, compared_every=1)


@pytest.fixture
def make(tmp_path: Path, trained: Trained, request: pytest.FixtureRequest):
    def made(rules: Rules) -> Fixture:
        run = Fixture(tmp_path, facts_of(trained.run), rules)
        request.addfinalizer(run.uploads.close)
        return run

    return made


def refusing(monkeypatch: pytest.MonkeyPatch, name: str, is_refused: Callable[..., bool]) -> None:
    """Have a method of RemoteRun fail for some arguments."""
    real = getattr(RemoteRun, name)

    def method(self: RemoteRun, *args: Any) -> Any:
        if is_refused(*args):
            raise StorageError("access is refused")
        return real(self, *args)

    monkeypatch.setattr(RemoteRun, name, method)


def test_a_delete_that_is_refused_holds_up_no_upload(make: Any, monkeypatch: pytest.MonkeyPatch):
    run = make(Rules(keep_last=1))
    refusing(monkeypatch, "delete", lambda step: True)
    for step in (1, 2, 3, 4):
        run.mirror(step)
    assert run.remote.published() == [4, 3, 2, 1]
    failed = [fields for name, fields in run.uploads.events if name == "mirror_failed"]
    assert len(failed) <= 5  # not one for each checkpoint at each save
    assert all("could not be deleted: access is refused" in one["reason"] for one in failed)
    monkeypatch.undo()
    run.mirror(5)
    assert run.remote.published() == [5]


def test_a_record_that_is_refused_holds_up_no_upload(make: Any, monkeypatch: pytest.MonkeyPatch):
    run = make(BEST)
    refusing(monkeypatch, "write", lambda name, content: name.endswith(VALIDATION))
    for step in (1, 2, 3, 4):
        record_validation(run.mirror(step), 1.0 + step)
    assert run.remote.published() == [4, 3, 1]
    assert all(fields["step"] for _, fields in run.uploads.events)
    monkeypatch.undo()
    record_validation(run.mirror(5), 9.0)
    assert run.remote.published() == [5, 4, 1]


def unreadable(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def too_large(path: Path) -> None:
    path.write_bytes(b"[" * 9_000_000)


@pytest.mark.parametrize("damage", [unreadable, too_large])
def test_a_record_that_is_damaged_here_holds_up_no_upload(make: Any, damage: Any):
    run = make(BEST)
    first = run.mirror(1)
    damage(first / VALIDATION)
    for step in (2, 3, 4):
        run.mirror(step)
    assert run.remote.published() == [4, 3, 2, 1]
    assert {name for name, _ in run.uploads.events} == {"checkpoint_mirrored"}
    assert VALIDATION not in run.remote.steps()[1]


def test_a_listing_that_lags_behind_is_not_followed_forever(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    run = make(Rules(keep_last=2))
    real = RemoteRun.steps
    monkeypatch.setattr(RemoteRun, "steps", lambda self: {})
    path = save(run.root, 1, run.facts)
    run.uploads.offer(1, None)
    assert run.uploads.wait(5)
    assert run.told() == [("checkpoint_mirrored", 1)]
    monkeypatch.setattr(RemoteRun, "steps", real)
    shutil.rmtree(run.remote.folder / "checkpoints" / path.name)  # and a later one tries again
    run.mirror(2)
    assert run.remote.published() == [2, 1]


def test_a_checkpoint_whose_manifest_is_not_listed_is_not_deleted(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    run = make(BEST)
    record_validation(run.mirror(1), 1.0)
    record_validation(run.mirror(2), 2.0)
    run.mirror(3)
    shutil.rmtree(run.root / "step_00000001")  # there alone
    real = RemoteRun.steps

    def steps(self: RemoteRun) -> dict[int, dict[str, int]]:
        found = real(self)
        found[1].pop(MANIFEST)
        return found

    monkeypatch.setattr(RemoteRun, "steps", steps)
    before = run.remote.steps()[1]
    run.mirror(4)
    monkeypatch.undo()
    assert {*run.remote.steps()[1]} == {*before, MANIFEST}


def test_what_a_run_goes_back_from_is_set_aside_before_the_next_upload(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    run, order = make(Rules(keep_last=4)), []
    real, real_abandon = RemoteRun.upload, RemoteRun.abandon

    def upload(self: RemoteRun, directory: Path, before: Any) -> int:
        order.append(int(directory.name[5:]))
        if order[-1] == 3:  # 2 is missing there, too
            run.uploads.go_back(2)
        return real(self, directory, before)

    def abandon(self: RemoteRun, step: int) -> None:
        order.append(-step)
        real_abandon(self, step)

    run.mirror(1)
    for step in (2, 3):
        save(run.root, step, run.facts)
    monkeypatch.setattr(RemoteRun, "upload", upload)
    monkeypatch.setattr(Uploads, "_require_current", lambda self, step: None)  # too late for that
    monkeypatch.setattr(RemoteRun, "abandon", abandon)
    run.uploads.offer(3, None)
    assert run.uploads.wait(60)
    assert order == [3, -3, 2]


def test_what_is_set_aside_here_during_its_upload_is_no_failure(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    run, real = make(Rules(keep_last=2)), RemoteRun.upload

    def upload(self: RemoteRun, directory: Path, before: Any) -> int:
        set_aside(directory, "abandoned")  # by a rollback, which says so later
        return real(self, directory, before)

    run.mirror(1)
    monkeypatch.setattr(RemoteRun, "upload", upload)
    run.mirror(2)
    run.uploads.go_back(1)
    monkeypatch.undo()
    run.mirror(2)
    assert run.told() == [("checkpoint_mirrored", 1), ("checkpoint_mirrored", 2)]
    assert run.remote.published() == [2, 1]


class Logger:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[str] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def print(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(("stuck", "word"), [("abandon", "set aside"), ("delete", "be deleted")])
def test_the_end_tells_what_was_not_done_in_time(
    make: Any, monkeypatch: pytest.MonkeyPatch, stuck: str, word: str
):
    run, is_over, is_stuck = make(Rules(keep_last=1)), threading.Event(), threading.Event()
    run.mirror(3)
    save(run.root, 5, run.facts)
    monkeypatch.setattr(mirror, "MIRROR_WAIT_S", 0.1)
    monkeypatch.setattr(RemoteRun, stuck, lambda *rest: (is_stuck.set(), is_over.wait(60)))
    at_end: Any = object.__new__(Mirror)
    at_end._uploads, at_end.logger, at_end._restored = run.uploads, Logger(), []
    at_end.ranks = None
    run.uploads.offer(5, None)
    if stuck == "abandon":
        assert run.uploads.wait(60)
        run.uploads.go_back(3)
    assert is_stuck.wait(60)
    monkeypatch.setattr(Uploads, "look", lambda self, good=None: None)  # or it is told as not begun
    at_end._finish()
    at_end.report()
    is_over.set()
    failed = [fields["reason"] for name, fields in at_end.logger.events if name == "mirror_failed"]
    (reason,) = failed
    assert word in reason
    assert "within 0.1 s" in reason
    assert not any("upload of" in line for line in at_end.logger.lines)


def test_a_record_there_is_read_once(make: Any, monkeypatch: pytest.MonkeyPatch):
    run, read, real = make(BEST), [], RemoteRun.read
    monkeypatch.setattr(
        RemoteRun, "read", lambda self, name: (read.append(name), real(self, name))[1]
    )
    for step in range(1, 9):
        record_validation(run.mirror(step), 2.0 - step / 10)
    assert max(read.count(name) for name in read if VALIDATION in name) <= 2  # and once written
    assert saved_of(run.remote.folder / "checkpoints" / "step_00000007").value == 1.3


def test_what_the_rules_delete_here_after_a_rollback_is_deleted_there(make: Any):
    run, rules = make(Rules(keep_last=1, keep_best=1, compared_every=1)), Rules(1, keep_best=1)
    record_validation(run.mirror(3), 1.0)
    run.uploads.begin(5)
    run.uploads.go_back(3)
    record_validation(run.mirror(4), 2.0)  # after its upload
    record_validation(save(run.root, 5, run.facts), 3.0)
    prune(run.root, rules)
    run.uploads.offer(5, None)
    assert run.uploads.wait(60)
    assert run.remote.published() == [5, 3]


def test_what_a_wiped_disk_has_lost_is_not_taken_for_deleted_by_the_rules(make: Any):
    run = make(Rules(keep_last=1, keep_best=1, compared_every=1))
    for step in (1, 2):  # killed before their validations
        run.mirror(step)
    shutil.rmtree(run.root / "step_00000001")
    run.uploads.begin(2)
    for step in (3, 4):
        record_validation(run.mirror(step), 3.0)
    run.mirror(5)
    assert run.remote.published() == [5, 4, 2, 1]


def test_once_another_start_writes_there_this_one_changes_nothing(make: Any):
    run = make(Rules(keep_last=1))
    for step in (1, 2):
        run.mirror(step)
    run.remote.write(OWNER, b"{}")
    before = run.remote.steps()
    run.uploads.go_back(1)
    assert run.uploads.wait(60)
    run.mirror(3)
    run.uploads.look()
    assert run.uploads.wait(60)
    assert run.remote.steps() == before
    assert run.told()[2:] == [("mirror_failed", 1)]


def test_a_step_that_is_saved_again_is_judged_anew(make: Any):
    run = make(Rules(keep_last=1, keep_best=1, compared_every=1))
    record_validation(run.mirror(1), 9.0)
    path = save(run.root, 2, run.facts)
    (path / "state.json").write_bytes(bytes(2_000))
    run.uploads.offer(2, None)
    assert run.uploads.wait(60)
    assert run.told()[-1] == ("mirror_failed", 2)
    for value in (1.0, 5.0):
        set_aside(path, "abandoned")
        run.uploads.go_back(1)
        record_validation(run.mirror(2), value)
        for _ in range(2):  # it is copied, and read there
            run.uploads.look()
            assert run.uploads.wait(60)
    assert run.told().count(("checkpoint_mirrored", 2)) == 2
    shutil.rmtree(path)
    for step, value in ((3, 3.0), (4, 4.0)):
        record_validation(run.mirror(step), value)
    run.mirror(5)
    assert run.remote.published() == [5, 3]


def test_two_rollbacks_that_the_storage_did_not_follow_leave_nothing_of_before(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    run = make(Rules(keep_last=4))
    for step in (1, 2, 3):
        run.mirror(step)
    refusing(monkeypatch, "abandon", lambda step: True)
    for step in (1, 2):
        for later in range(step + 1, 4):
            path = run.root / f"step_{later:08d}"
            if path.is_dir():
                set_aside(path, "abandoned")
        run.uploads.go_back(step)
        assert run.uploads.wait(60)
        run.mirror(step + 1)  # not uploaded, for the mirror has not followed
    monkeypatch.undo()
    run.mirror(4)
    for step in (2, 3):
        name = f"checkpoints/step_{step:08d}/{MANIFEST}"
        assert run.remote.read(name) == (run.root.parent / name).read_bytes()
