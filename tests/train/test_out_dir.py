"""The folder of a run: what stands in the way of claiming it is told as storage."""

from __future__ import annotations

import resource

import pytest
import torch

from minimind.errors import LockedError, StorageError
from minimind.train.out_dir import claim
from minimind.train.report import Report


@pytest.fixture
def full():
    """No file may grow, as on a full disk; undone at once by its second call."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def switch(on: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if on else soft, hard))

    yield switch
    switch(False)


def test_a_folder_that_cannot_be_claimed_for_want_of_room_is_told_as_storage(tmp_path, full):
    full(True)
    try:
        with pytest.raises(StorageError, match=str(tmp_path)):
            claim(tmp_path)
    finally:
        full(False)
    with claim(tmp_path), pytest.raises(LockedError, match=r"in use by process \d+ on "):
        claim(tmp_path)


def test_a_line_of_metrics_that_cannot_be_written_names_the_file(tmp_path, full):
    report = Report(tmp_path, 1, torch.device("cpu"), is_speaker=True, is_profiling=False)
    full(True)
    try:
        with pytest.raises(StorageError, match=str(tmp_path / "metrics.jsonl")):
            report.event("step", step=1)
    finally:
        full(False)
    report.close()
