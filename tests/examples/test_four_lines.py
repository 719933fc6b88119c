"""examples/four_lines.py: the same lines predicted right by one process and by two."""

from __future__ import annotations

import re

import pytest

from tests.examples.conftest import Start, by_every_launcher, promised, shape

pytestmark = [pytest.mark.long, pytest.mark.launch]
NAME = "four_lines.py"


@by_every_launcher
def test_the_launcher_changes_nothing(start: Start, launcher: str, processes: int):
    report = start(NAME, "--split_batches", launcher, processes)
    assert shape(report) == promised(NAME)
    assert report.startswith(f"{processes} processes, 16 rows a step, 80 steps\n")


def test_one_process_and_two_report_the_same_lines_right(start: Start):
    alone, both = (start(NAME, "--split_batches", processes=n).splitlines()[1] for n in (1, 2))
    assert alone == both
    found = re.search(r"(\d+) of 201 lines right", alone)
    assert found
    assert int(found[1]) > 140  # 101 by guessing


def test_without_split_batches_a_step_has_the_rows_of_all_processes(start: Start):
    report = start(NAME, "--no_device_placement", processes=2)
    assert report.startswith("2 processes, 32 rows a step, 40 steps\n")
    assert "of 201 lines" in report
