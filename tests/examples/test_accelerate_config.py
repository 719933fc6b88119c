"""`accelerate config`, asked and unasked, and `accelerate env`."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import accelerate
import pytest
import torch
import yaml
from accelerate.commands.accelerate_cli import main
from accelerate.utils import write_basic_config

from minimind.launch.plan import LaunchSettings, plan
from tests.conftest import ROOT
from tests.examples.conftest import environment

PATIENCE = 120.0
# A menu takes the number of a line and Return; \r is Return where the terminal is in raw mode.
ANSWERS = [
    ("In which compute environment", "\r"),
    ("Which type of machine", "4\r"),  # multi-GPU
    ("How many different machines", "\n"),
    ("checked while running for errors", "\n"),
    ("torch dynamo", "\n"),
    ("Do you want to use DeepSpeed", "yes\n"),
    ("specify a json file to a DeepSpeed config", "yes\n"),
    ("path to the json DeepSpeed config file", "configs/ds_config.json\n"),
    ("deepspeed.zero.Init", "\n"),
    ("Mixture-of-Experts", "\n"),
    ("How many GPU(s)", "2\n"),
]


def test_config_default_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "default.yaml"
    words = ["config", "default", "--config_file", str(path), "--mixed_precision", "bf16"]
    monkeypatch.setattr(sys, "argv", ["accelerate", *words])
    main()
    assert f"saved at {path}" in capsys.readouterr().out
    written = yaml.safe_load(path.read_text())
    assert (written["mixed_precision"], written["num_machines"]) == ("bf16", 1)
    if not torch.cuda.is_available():
        output = (written["use_cpu"], written["num_processes"], written["distributed_type"])
        assert output == (True, 1, "NO")


def test_env_reports_versions_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "basic.json"
    assert write_basic_config(mixed_precision="bf16", save_location=str(path))
    monkeypatch.setattr(sys, "argv", ["accelerate", "env", "--config_file", str(path)])
    main()
    output = capsys.readouterr().out
    for line in (
        f"- `Accelerate` version: {accelerate.__version__}",
        f"- PyTorch version: {torch.__version__}",
        "- `Accelerate` config passed:",
        "\t- mixed_precision: bf16",
    ):
        assert f"{line}\n" in output


def until(terminal: int, report: str, question: str, seen: int, raw: bool) -> str:
    """The output, once the question is in it and the terminal reads as its kind does."""
    end = time.monotonic() + PATIENCE
    while question not in report[seen:] or raw == bool(
        termios.tcgetattr(terminal)[3] & termios.ICANON
    ):
        assert time.monotonic() < end, f"not asked: {question}\n{report}"
        if select.select([terminal], [], [], 0.05)[0]:
            report += os.read(terminal, 65536).decode()
    return report


@pytest.mark.long
@pytest.mark.launch
def test_answers_typed_at_a_terminal_give_what_this_project_ships(tmp_path: Path):
    path = tmp_path / "asked.yaml"
    line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"]
    terminal, theirs = pty.openpty()
    line += ["--config_file", str(path)]
    own = environment(tmp_path / "hf")
    requested = subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=own)
    os.close(theirs)
    output, seen = "", 0
    for question, answer in ANSWERS:
        output = until(terminal, output, question, seen, raw=answer.endswith("\r"))
        seen = len(output)
        os.write(terminal, answer.encode())
    assert requested.wait(timeout=PATIENCE) == 0
    os.close(terminal)
    written = yaml.safe_load(path.read_text())
    shipped = yaml.safe_load((ROOT / "configs" / "accelerate_config.yaml").read_text())
    same = {name for name, value in shipped.items() if written.get(name) == value}
    assert set(shipped) - same == {"num_processes"}
    assert written["num_processes"] == 2
    assert "mixed_precision" not in written  # DeepSpeed's file or --dtype says
    launched = plan(LaunchSettings(written, str(path), {}), 0)
    assert (launched["distributed_type"], launched["num_processes"]) == ("DEEPSPEED", 2)
