"""Every refusal: one line with the names in question and a way out, its status, and no trace.

The commands run in this process. A run is rank 0 of the two workers that a launcher starts.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from minimind.cli import main as commands
from minimind.config.command_line import all_parsers
from minimind.config.deepspeed.resolve import resolve
from minimind.config.parse import build_parser, parse_flags
from minimind.engine.build import require_accepted
from minimind.launch import train_pretrain
from minimind.runtime.device import CUDA, Host
from minimind.runtime.exit import Ending
from tests.refusals.rows import STATUSES, Row, all_rows, command_line, write_files
from tools.runs import MEETING

LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    **MEETING,
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "configs/ds_config.json",
    "ACCELERATE_MIXED_PRECISION": "no",
}
LINE = re.compile(r"(?P<program>\w+): error\[(?P<error>E_\w+)\][^:]*: (\S.*); (?P<remedy>\S.*)\n")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PROGRAMS = {"train_pretrain": train_pretrain.main, "minimind": commands.main}
# Flags of `accelerate launch`, and of the scripts of DeepSpeed.
OF_LAUNCHERS = {f"--{name}" for name in "use_deepspeed zero_stage multi_gpu cpu tag".split()} | {
    "--use_deepspeed",
    "--zero_stage",
    "--deepspeed_config_file",
    "--multi_gpu",
    "--cpu",
}
ROWS = all_rows()


@cache
def flags_of(program: str) -> set[str]:
    """The flags of a program: of a run, or of any command of `minimind`."""

    def all_of(parser: argparse.ArgumentParser) -> Iterator[str]:
        for one in all_parsers(parser):
            for action in one._actions:
                yield from action.option_strings

    run = {*all_of(build_parser())}
    return run if program == "train_pretrain" else run | {*all_of(commands.build_parser())}


def flags_that_are_none(program: str, line: str, argv: list[str]) -> set[str]:
    """Flags that the line names and no program has."""
    program = "minimind" if "minimind " in line or "plan " in line else program
    given = {word.partition("=")[0] for word in argv}
    named = set(FLAG.findall(line)) - given - OF_LAUNCHERS - {"--flag"}
    return {flag for flag in named if flag.replace("--no-", "--") not in flags_of(program)} - {
        flag for flag in named if flag in flags_of(program)
    }


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """DeepSpeed, whose import alone is full of warnings."""
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        require_accepted(resolve({}, "ds.json", parse_flags([]), 1, "cpu"), "cpu")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process as launchers leave it, in a directory of its own; what main changes is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Ending, "watch", lambda self: None)  # a thread without end
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MINI"))}
    with mock.patch.dict(os.environ, inherited, clear=True):
        yield


def outcome(
    row: Row, argv: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """The status of a row's command, and what it wrote to stderr."""
    monkeypatch.setattr(Host, "has_bf16", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: row.gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: row.gpus)
    monkeypatch.setattr(type(CUDA), "memory", lambda self, index: 80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(
        "minimind.config.deepspeed.backend_choice.parent_command", row.launcher.split
    )
    os.environ |= LAUNCHED if row.program == "train_pretrain" else {}
    for name, value in row.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    write_files(row)
    before = {*Path().rglob("*")}
    status = PROGRAMS[row.program](argv)
    left = {path for path in {*Path().rglob("*")} - before if path.parts[0] not in row.leaves}
    assert left == set(), "a refusal leaves nothing behind"
    output = capfd.readouterr().err
    lines = output.splitlines(keepends=True)
    return status, "".join(line for line in lines if not line.endswith(" ...\n"))  # phases


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.where)
def test_a_refusal_is_one_line_that_names_the_mistake_and_a_way_out(row: Row, monkeypatch, capfd):
    argv = command_line(row)
    status, output = outcome(row, argv, monkeypatch, capfd)
    line = LINE.fullmatch(output)
    assert line, output
    assert (line["error"], status) == (row.error, STATUSES[row.error]), output
    assert [name for name in row.names if name not in output] == [], output
    assert (f" {row.faults} faults: " in output) == (row.faults > 1), output
    assert ("faults: " in output) == (row.faults > 1), output
    assert flags_that_are_none(row.program, output, argv) == set(), output


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("row", [row for row in ROWS if row.near], ids=lambda row: row.where)
def test_the_nearest_right_command_is_taken(row: Row, monkeypatch, capfd):
    right = row.neighbour()
    status, output = outcome(right, [*command_line(right), "--dry_run"], monkeypatch, capfd)
    assert status == STATUSES[right.error], output
    assert [name for name in right.names if name not in output] == [], output
