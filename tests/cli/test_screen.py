"""What commands print fits the screen, and has the same words and numbers as in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from minimind.cli.main import main
from minimind.runtime.terminal import columns_of
from tests.report.made import crashed_and_resumed, end, evaluation, step_line, write_run
from tests.runtime.test_terminal import use_screen


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(words) in (0, 1)  # doctor: something stands out
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", ["report", "doctor", "plan", "plan of much"])
def test_lines_of_a_command_are_no_longer_than_the_screen(
    command: str,
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    lines = [*crashed_and_resumed(), step_line(200), evaluation(200, 3.0)]
    place = write_run(tmp_path / "r", [*lines, end(200, 6, "E_NONFINITE", "损失不是有限值，" * 15)])
    words = [command, str(place)]
    if command.startswith("plan"):
        words = ["plan", *"--model 104m --gpus 8 --memory 24GiB --batch_size 16".split()]
        words += "--tokens 1e10 --peak_tflops 100 --ema 0.999".split() * (command != "plan")
    in_pipe = printed(words, capsys)
    use_screen(monkeypatch, columns)
    on_screen = printed(words, capsys)
    assert "".join("".join(on_screen).split()) == "".join("".join(in_pipe).split())
    assert [
        line for line in on_screen if columns_of(line) > columns and str(place) not in line
    ] == []
    assert max(map(columns_of, in_pipe)) > 80
