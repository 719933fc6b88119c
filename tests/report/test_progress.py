"""What a run says, and what becomes of it where nobody can hear."""

import errno
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from minimind.errors import StorageError
from minimind.report.run_logger import RunLogger


class Full(io.StringIO):
    """A file on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_behind_standard_output_is_reported(tmp_path, monkeypatch):
    logger = RunLogger(tmp_path, 10, torch.device("cpu"), is_rank_0=True, is_profiling=False)
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(StorageError, match="standard output: No space left"):
        logger.print("step 1")
    logger.close()


def test_when_the_reader_is_gone_the_run_continues_and_is_still_recorded(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    logger = RunLogger(tmp_path, 10, torch.device("cpu"), is_rank_0=True, is_profiling=False)
    monkeypatch.setattr(sys, "stdout", Closed())
    logger.print("step 1")
    logger.print("step 2")
    logger.event("exit", step=2)
    logger.close()
    assert '"exit"' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("how", ["folder removed", "folder renamed", "file removed", "replaced"])
def test_a_log_that_is_no_longer_there_ends_the_run(how: str, tmp_path: Path):
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    logger = RunLogger(out_dir, 10, torch.device("cpu"), is_rank_0=True, is_profiling=False)
    logger.event("step", step=1)
    if how == "folder removed":
        shutil.rmtree(out_dir)
    elif how == "folder renamed":
        out_dir.rename(tmp_path / "elsewhere")
    else:
        (out_dir / "metrics.jsonl").unlink()
        if how == "replaced":
            (out_dir / "metrics.jsonl").write_text("")
    with pytest.raises(StorageError, match=r"jsonl: was .* while a run writes it; correct"):
        logger.event("step", step=2)
    logger.close()
