"""Answers of the server are those of `minimind chat` and `minimind generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minimind.cli.main import main
from tests.serve.conftest import InProcess

SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    {"temperature": 1.5, "top_p": 1, "seed": 2},
    {"temperature": 1, "top_k": 20, "repetition_penalty": 1.3, "seed": 3},
]


def words(settings: dict[str, float]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize("settings", SETTINGS)
def test_an_answer_is_that_of_chat_once(
    server: InProcess, chat_model: Path, settings, capsys: pytest.CaptureFixture[str]
):
    line = ["chat", "--model", str(chat_model), "--device", "cpu", "--max_new_tokens", "30"]
    assert main([*line, *words(settings), "--once", "春眠 ab"]) == 0
    expected = capsys.readouterr().out.removesuffix("\n")
    answer = server.chat("春眠 ab", max_tokens=30, **settings)
    assert answer["choices"][0]["message"]["content"] == expected
