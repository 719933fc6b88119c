"""console.log: what a run printed, over its starts, of a bounded size."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from minimind.errors import DataError
from minimind.report.run_logger import RunLogger
from minimind.runtime import console
from minimind.runtime.console import BEFORE, CONSOLE, Console
from minimind.runtime.exit import Ending
from minimind.runtime.process import Progress

DATE = r"=== 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC: "


def logger_at(place: Path, is_rank_0: bool = True) -> RunLogger:
    return RunLogger(place, 2, torch.device("cpu"), is_rank_0, is_profiling=False)


def test_every_start_begins_with_a_date_and_keeps_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for number in range(2):
        logger = logger_at(tmp_path)
        logger.print(f"screen {number}\nof two lines")
        logger.close()
        logger.print("done")  # what follows once trackers have ended
        logger.close()
    other = logger_at(tmp_path, is_rank_0=False)
    other.print("of rank 1")
    other.close()
    start = rf"{DATE}start ===\nscreen {{}}\nof two lines\ndone\n"
    text = (tmp_path / CONSOLE).read_text()
    assert re.fullmatch(start.format(0) + "\n" + start.format(1), text)
    assert capsys.readouterr().out == "".join(
        f"screen {number}\nof two lines\ndone\n" for number in range(2)
    )


def test_each_line_is_in_the_file_at_once_and_moves_no_terminal(tmp_path: Path):
    (tmp_path / CONSOLE).write_bytes(b"cut off")
    logger = logger_at(tmp_path)
    logger.print("red \x1b[31m\udc80")
    lines = (tmp_path / CONSOLE).read_text().split("\n")
    assert lines[0] == "cut off"
    assert lines[2:] == [r"red \x1b[31m\udc80", ""]
    logger.close()


def test_the_newest_lines_stay_and_the_file_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console, "MOST", 100)
    written = Console(tmp_path)
    for number in range(50):
        written.write(f"line {number:04d}")  # of ten bytes with its end
    written.write("x" * 300)
    written.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONSOLE, BEFORE]
    both = (tmp_path / BEFORE).read_text() + (tmp_path / CONSOLE).read_text()
    assert both.splitlines()[-1] == "x" * 300
    assert both.splitlines()[-2] == "line 0049"


def test_the_error_that_ends_a_run_stands_below_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    progress = Progress(step=7, out_dir=tmp_path, has_started=True)
    logger = logger_at(tmp_path)
    logger.print("step 7")
    assert Ending(progress, debug=True).report(DataError("a.jsonl: is bad; mend it")) == 3
    logger.close()
    text = (tmp_path / CONSOLE).read_text()
    end = r"minimind.errors.DataError: a.jsonl: is bad; mend it\n"
    end += r"train_pretrain: error\[E_DATA\] rank=0 step=7: a.jsonl: is bad; mend it\n"
    assert re.fullmatch(rf"{DATE}start ===\nstep 7\n\n{DATE}end ===\n{end}", text)
    assert text.endswith(capsys.readouterr().err)


@pytest.mark.parametrize("kind", ["folder", "pipe", "full"])
def test_a_run_does_without_a_file_that_cannot_be_written(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    logger = logger_at(tmp_path)
    path = tmp_path / CONSOLE
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/full")
    logger.print("one")
    logger.print("two")
    logger.close()
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\n"
    assert shown.err.count("\n") == 1
    assert str(path) in shown.err


def test_standard_output_that_is_the_file_is_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = os.dup(1)
    with open(tmp_path / CONSOLE, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        os.dup2(out.fileno(), 1)
        try:
            logger = logger_at(tmp_path)
            logger.print("once")
            logger.close()
        finally:
            os.dup2(before, 1)
            os.close(before)
    assert (tmp_path / CONSOLE).read_text() == "once\n"
