"""The folder of a run: what prevents claiming it is reported as a storage error."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minimind.checkpoint.directory import OWNER
from minimind.checkpoint.run_folder import lock_before_imports, lock_out_dir, require_writable
from minimind.config.parse import parse_flags
from minimind.errors import LockedError, StorageError
from minimind.report.run_logger import RunLogger
from minimind.runtime.durable_files import Metrics, read_small
from minimind.runtime.file_kinds import kind_of_file
from tests.conftest import ROOT


@pytest.fixture
def full():
    """No file may grow, as on a full disk; undone at once by its second call."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def switch(on: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if on else soft, hard))

    yield switch
    switch(False)


def test_a_folder_that_cannot_be_claimed_for_want_of_room_is_reported_as_storage(tmp_path, full):
    full(True)
    try:
        with pytest.raises(StorageError, match=str(tmp_path)):
            lock_out_dir(tmp_path)
    finally:
        full(False)
    with lock_out_dir(tmp_path), pytest.raises(LockedError, match=r"in use by process \d+ on "):
        lock_out_dir(tmp_path)


def test_a_folder_in_use_is_refused_before_the_imports(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("some words")
    flags = ["--data_path", str(text), "--out_dir", str(tmp_path / "out")]
    program = "import sys; from minimind.train.program import main\n"
    program += f"status = main({flags}); print(status, 'torch' in sys.modules)"
    with lock_out_dir(tmp_path / "out"):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
        )
    assert done.stdout == "8 False\n", done.stderr
    assert "error[E_LOCKED]" in done.stderr


@pytest.mark.parametrize(
    ("words", "rank", "owner"),
    [
        ("", 0, False),
        ("", 1, False),
        ("--dry_run", 0, False),
        ("--mirror s3://bucket/run", 0, False),
        ("", 0, True),  # the folder is itself a mirror
    ],
)
def test_only_rank_0_of_a_run_without_a_mirror_locks_a_folder_early(tmp_path, words, rank, owner):
    run = parse_flags(["--out_dir", str(tmp_path / "out"), *words.split()])
    assert lock_before_imports(run, rank) is None
    assert not (tmp_path / "out").exists()
    with lock_out_dir(tmp_path / "out"):
        if owner:
            (tmp_path / "out" / OWNER).write_text("")
        if words or rank or owner:
            assert lock_before_imports(run, rank) is None
        else:
            with pytest.raises(LockedError):
                lock_before_imports(run, rank)


def test_a_line_of_metrics_that_cannot_be_written_names_the_file(tmp_path, full):
    logger = RunLogger(tmp_path, 1, torch.device("cpu"), is_rank_0=True, is_profiling=False)
    full(True)
    try:
        with pytest.raises(StorageError, match=str(tmp_path / "metrics.jsonl")):
            logger.event("step", step=1)
        logger.close()  # must not fail too: its error would take the place of the first
    finally:
        full(False)


def test_a_line_that_the_disk_took_a_part_of_is_closed_by_the_next_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write("step", step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            metrics.write("step", step=2)
        metrics.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics = Metrics(path)
    metrics.write("step", step=2)
    metrics.close()
    whole, torn, again = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (whole, again)] == [1, 2]
    assert len(torn) == 10


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a pipe"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "ds_config.resolved.json", "report.html"]
)
def test_files_of_a_run_that_are_none_are_refused_at_the_start(
    name: str, kind: str, tmp_path: Path
):
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    report = f"{path}: is a folder, a pipe or a device, not a file; move it away"
    with pytest.raises(StorageError) as raised:
        require_writable(tmp_path)
    assert str(raised.value).startswith(report)
    with pytest.raises(OSError, match="not a file"):
        Metrics(path)


def test_a_folder_in_place_of_a_small_file_is_named_and_closed(tmp_path: Path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError) as raised:
        read_small(tmp_path)
    assert raised.value.filename == str(tmp_path)
    assert kind_of_file(tmp_path) is None
    assert os.listdir("/proc/self/fd") == before


def test_metrics_may_be_a_link_to_a_file(tmp_path: Path):
    (tmp_path / "elsewhere.jsonl").touch()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    require_writable(tmp_path)
