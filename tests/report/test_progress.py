"""What a run says, and what becomes of it where nobody can hear."""

import errno
import io
import os
import sys

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
