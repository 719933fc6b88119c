"""--mirror in real runs on a real server of S3: what is uploaded, lost, fetched and refused."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.checkpoint import directory, mirror
from minimind.checkpoint.directory import published_checkpoints, set_aside, step_of, verify
from minimind.errors import CheckpointError, LockedError, StorageError, UsageError
from minimind.report.figures import Summary
from minimind.report.history import read_runs
from minimind.runtime import filesystem
from minimind.runtime.durable_files import sha256_of
from minimind.train import pretrain
from tests.conftest import Messages
from tests.runtime.servers import BUCKET, FaultyProxy, ObjectStore
from tools.runs import events

train: Any = training  # a package that is called like a function
URL = f"s3://{BUCKET}/runs/one"
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "log_interval": 1, "eval_rows": 8},
    **{"deepspeed_config": "none", "max_steps": 8, "save_minutes": 0, "val_fraction": 0.1},
    **{"save_interval": 2, "eval_interval": 8, "keep_last": 2, "mirror": URL},
}


def losses(out_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in events(out_dir, "step")}


def mirrored(store: ObjectStore) -> list[int]:
    """Steps of the complete checkpoints at URL."""
    keys = store.keys("runs/one/checkpoints/")
    return [int(key.split("/")[3][5:]) for key in keys if key.endswith("/manifest.json")]


def download(store: ObjectStore, place: Path) -> None:
    """A copy of everything under URL."""
    for key in store.keys("runs/one/"):
        path = place / key.removeprefix("runs/one/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def damage(store: ObjectStore, step: int) -> str:
    """Change a byte of the shard of a checkpoint."""
    key = f"runs/one/checkpoints/step_{step:08d}/shard-0-of-1.safetensors"
    content = bytearray(store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    content[-5] ^= 1
    return store.put(key, bytes(content))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "WAITS", (0.0,) * 5)


@pytest.fixture(scope="module")
def flags(cached: dict[str, Any]) -> dict[str, Any]:
    return {**FLAGS, **cached}


@pytest.fixture(scope="module")
def unbroken(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run without a mirror."""
    out_dir = tmp_path_factory.mktemp("unbroken")
    assert train({**flags, "mirror": None}, out_dir=str(out_dir)) == 0
    return losses(out_dir)


@pytest.mark.parametrize("cut", [pytest.param(0.0, marks=pytest.mark.long), 0.05])
def test_a_wiped_disk_is_resumed_from_the_mirror_bit_for_bit(
    flags: dict[str, Any],
    unbroken: dict[int, float],
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
    cut: float,
):
    proxy.set(cut=cut)
    assert train(flags, out_dir=str(tmp_path / "a"), stop_at_step=4) == 75
    assert mirrored(store)[-1] == 4
    before = losses(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert train(flags, out_dir=str(tmp_path / "a")) == 0
    after = losses(tmp_path / "a")
    assert sorted(after) == [5, 6, 7, 8]
    assert {**before, **after} == unbroken
    assert (proxy.injected > 0) == (cut > 0)
    (fetched,) = events(tmp_path / "a", "checkpoint_fetched")
    assert fetched["step"] == 4
    summary = Summary(read_runs([tmp_path / "a"])[0], time.time())
    assert "in 1 start" in summary.figures["time"].remark
    assert summary.figures["crashes"].value == 0
    assert "mirror      step 8, the newest of" in summary.as_text()
    assert 8 in [one["step"] for one in events(tmp_path / "a", "checkpoint_mirrored")]
    download(store, tmp_path / "copy")
    copies = published_checkpoints(tmp_path / "copy" / "checkpoints")
    assert step_of(copies[0]) == 8
    assert len(copies) <= 2
    assert [verify(path) for path in copies] == [None] * len(copies)
    assert (tmp_path / "copy" / "config.yaml").read_bytes()
    assert (tmp_path / "copy" / "tokenizer" / "tokenizer.model").read_bytes()
    assert not [key for key in store.keys() if ".probe" in key]


@pytest.mark.long  # tests/checkpoint/test_choose.py skips damaged ones without a mirror
def test_damaged_checkpoints_are_skipped_and_never_a_silent_step_0(
    flags: dict[str, Any],
    unbroken: dict[int, float],
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
):
    for stop in (2, 4):
        assert train(flags, out_dir=str(tmp_path / "a"), stop_at_step=stop) == 75
    assert mirrored(store) == [2, 4]
    damage(store, 4)
    assert train(flags, out_dir=str(tmp_path / "b"), stop_at_step=3) == 75
    (skipped,) = events(tmp_path / "b", "checkpoint_rejected")
    assert skipped["path"] == f"{URL}/checkpoints/step_00000004"
    assert losses(tmp_path / "b") == {3: unbroken[3]}
    assert mirrored(store) == [2, 3]
    damage(store, 2)
    damage(store, 3)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step_00000003: shard-0-of-1\.safetensors"):
            train(flags, out_dir=str(tmp_path / "c"))
    names = [Path(one["path"]).name for one in events(tmp_path / "c", "checkpoint_rejected")]
    assert names == ["step_00000003", "step_00000002"] * 2


@pytest.mark.long
def test_a_newer_checkpoint_here_is_used_and_uploaded(
    flags: dict[str, Any],
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
):
    out_dir = str(tmp_path / "a")
    assert train(flags, out_dir=out_dir, stop_at_step=2) == 75
    assert train({**flags, "mirror": None}, out_dir=out_dir, stop_at_step=6) == 75
    assert train(flags, out_dir=out_dir, stop_at_step=7) == 75
    assert not events(tmp_path / "a", "checkpoint_fetched")
    assert train({**flags, "mirror": None}, out_dir=out_dir) == 0
    looked: list[bool] = []
    look, write = mirror.Uploads.look, pretrain.write_reference
    monkeypatch.setattr(
        mirror.Uploads, "look", lambda self, *args: (looked.append(True), look(self, *args))
    )
    # Files that are uploaded beside the checkpoint are not written meanwhile.
    monkeypatch.setattr(
        pretrain,
        "write_reference",
        lambda *args: (write(*args), looked and pytest.fail("too early")),
    )
    assert train(flags, out_dir=out_dir) == 0
    assert looked
    assert mirrored(store)[-1] == 8


@pytest.mark.long
def test_a_start_at_the_end_of_a_run_uploads_what_is_missing(
    flags: dict[str, Any], tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    out_dir = str(tmp_path / "a")
    assert train(flags, out_dir=out_dir) == 0
    for key in store.keys("runs/one/checkpoints/step_00000006"):
        store.client.delete_object(Bucket=BUCKET, Key=key)
    assert train(flags, out_dir=out_dir) == 0
    assert mirrored(store) == [6, 8]
    assert events(tmp_path / "a", "checkpoint_mirrored")[-1]["step"] == 6


@pytest.mark.long
def test_a_fresh_start_leaves_no_checkpoint_that_a_restart_would_take(
    flags: dict[str, Any],
    unbroken: dict[int, float],
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
):
    out_dir = str(tmp_path / "a")
    assert train(flags, out_dir=out_dir, stop_at_step=4) == 75
    assert train(flags, out_dir=out_dir, resume="none", stop_at_step=2) == 75
    assert mirrored(store) == [2]
    assert train(flags, out_dir=out_dir, stop_at_step=3) == 75
    assert events(tmp_path / "a", "run_start")[-1]["step"] == 2


def test_wrong_credentials_are_refused_before_training(
    flags: dict[str, Any], tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    store.require_credentials(True)
    try:
        with pytest.raises(StorageError, match=r"access is refused .*AWS_ACCESS_KEY_ID"):
            train(flags, out_dir=str(tmp_path / "a"))
    finally:
        store.require_credentials(False)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


def test_a_missing_bucket_is_refused(flags: dict[str, Any], tmp_path: Path, proxy: FaultyProxy):
    with pytest.raises(StorageError, match=r"^--mirror s3://none/run: there is no such bucket"):
        train(flags, out_dir=str(tmp_path / "a"), mirror="s3://none/run")


@pytest.mark.parametrize("place", ["a", "a/copy", "link"])
def test_a_mirror_in_out_dir_is_refused(flags: dict[str, Any], tmp_path: Path, place: str):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(
        UsageError, match=r"--mirror file://.* is inside --out_dir .*another folder"
    ):
        train(flags, out_dir=str(tmp_path / "a"), mirror=f"file://{tmp_path / place}")
    assert not any((tmp_path / "a").iterdir())


def test_a_storage_that_goes_down_is_told_and_ends_no_run(
    flags: dict[str, Any],
    unbroken: dict[int, float],
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
):
    def upload(self: Any, *rest: Any) -> int:
        proxy.is_down = True
        return real(self, *rest)

    real = mirror.RemoteRun.upload
    monkeypatch.setattr(mirror.RemoteRun, "upload", upload)
    assert train(flags, out_dir=str(tmp_path / "a")) == 0
    assert losses(tmp_path / "a") == unbroken
    failed = events(tmp_path / "a", "mirror_failed")
    assert failed[-1]["step"] == 8
    assert "does not answer" in failed[-1]["reason"]
    assert not events(tmp_path / "a", "checkpoint_mirrored")
    assert mirrored(store) == []
    assert [step_of(path) for path in published_checkpoints(tmp_path / "a/checkpoints")] == [8, 6]


def test_without_network_at_the_start_each_try_is_a_line_and_no_traceback(
    flags: dict[str, Any],
    tmp_path: Path,
    proxy: FaultyProxy,
    capsys: pytest.CaptureFixture[str],
    messages: Messages,
):
    proxy.is_down = True
    with pytest.raises(StorageError, match=r"--mirror s3://bucket/runs/one: does not answer .*6 t"):
        train(flags, out_dir=str(tmp_path / "a"))
    assert capsys.readouterr().err.count("trying again") == 5
    gc.collect()  # asyncio logs an error of a task that nobody asked for when it is collected
    assert [one for one in messages.found if one.startswith("asyncio: ")] == []


def test_the_mirror_of_another_run_is_refused(
    flags: dict[str, Any], tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    assert train(flags, out_dir=str(tmp_path / "a"), stop_at_step=2) == 75
    with pytest.raises(LockedError, match=r"another run \(seed.seed: 42 -> 43\)"):
        train(flags, out_dir=str(tmp_path / "b"), seed=43)
    with pytest.raises(LockedError, match=r"another run than"):
        train(flags, out_dir=str(tmp_path / "c"), resume="none")
    assert LockedError.status == 8


def test_of_two_starts_of_a_run_the_later_one_writes(
    flags: dict[str, Any],
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
):
    real = mirror.RemoteRun.upload

    def upload(self: Any, directory: Path, before: Any) -> int:
        if step_of(directory) == 4:
            store.put("runs/one/mirror.json", b"{}")
        return real(self, directory, before)

    monkeypatch.setattr(mirror.RemoteRun, "upload", upload)
    assert train(flags, out_dir=str(tmp_path / "a"), stop_at_step=2) == 75
    assert train(flags, out_dir=str(tmp_path / "a"), stop_at_step=4) == 75
    (failed,) = events(tmp_path / "a", "mirror_failed")
    assert "another start of the run writes there now" in failed["reason"]
    assert mirrored(store) == [2]


def test_the_end_waits_for_uploads_only_so_long(
    flags: dict[str, Any],
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    is_over = threading.Event()
    monkeypatch.setattr(mirror, "MIRROR_WAIT_S", 0.1)
    monkeypatch.setattr(mirror.RemoteRun, "upload", lambda *rest: is_over.wait(60))
    assert train(flags, out_dir=str(tmp_path / "a"), stop_at_step=2) == 75
    is_over.set()
    assert "step 2: waiting up to 0.1 s for the upload of its checkpoint" in capsys.readouterr().out
    (failed,) = events(tmp_path / "a", "mirror_failed")
    assert failed["reason"] == "not uploaded within 0.1 s after the last step"


@pytest.mark.long
def test_resuming_from_elsewhere_leaves_nothing_of_before(
    flags: dict[str, Any], tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    out_dir = tmp_path / "a"
    other = {**flags, "mirror": None, "out_dir": str(tmp_path / "b")}
    assert train(other, stop_at_step=2) == 75
    for stop in (2, 4):
        assert train(flags, out_dir=str(out_dir), stop_at_step=stop) == 75
    path = str(tmp_path / "b" / "checkpoints" / "step_00000002")
    assert train(flags, out_dir=str(out_dir), resume=path, stop_at_step=3) == 75
    assert mirrored(store) == [3]


@pytest.mark.long
def test_what_the_disk_knows_as_abandoned_is_not_fetched(
    flags: dict[str, Any], tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    out_dir = tmp_path / "a"
    for stop in (2, 4):
        assert train(flags, out_dir=str(out_dir), stop_at_step=stop) == 75
    (path, _) = published_checkpoints(out_dir / "checkpoints")
    set_aside(path, "abandoned")  # by a rollback, killed before it reached the storage
    assert train(flags, out_dir=str(out_dir), stop_at_step=3) == 75
    assert events(out_dir, "run_start")[-1]["step"] == 2
    assert mirrored(store) == [2, 3]


def test_a_start_that_saves_nothing_deletes_nothing_by_its_own_rules(corpus: Path, tmp_path: Path):
    flags = {**FLAGS, "data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    flags |= {"mirror": f"file://{tmp_path}/mirror", "out_dir": str(tmp_path / "out")}
    assert train({**flags, "keep_last": 3}) == 0
    assert train({**flags, "keep_last": 1}) == 0
    for place in ("out", "mirror"):
        found = published_checkpoints(tmp_path / place / "checkpoints")
        assert [step_of(path) for path in found] == [8, 6, 4]


def test_a_resume_hashes_each_file_of_its_checkpoint_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = {**FLAGS, "data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    flags |= {"mirror": f"file://{tmp_path}/mirror", "out_dir": str(tmp_path / "out")}
    assert train(flags, stop_at_step=2) == 75
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(directory, "sha256_of", counted)
    monkeypatch.setattr(pretrain, "train_to_end", lambda context, resumed: 0)
    assert train(flags) == 0
    assert len(hashed) > 3
    assert len(set(hashed)) == len(hashed)
