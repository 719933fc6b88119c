"""examples/trl_sft.py: an adapter is trained, merged, imported, and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimind.cli.main import main as minimind
from tests.examples.conftest import Start, losses_of, needs_trl, promised, shape

pytestmark = [pytest.mark.long, pytest.mark.launch]
NAME = "trl_sft.py"
OTHER = {"sky": "cold", "sea": "hard", "bread": "deep", "stone": "warm", "wind": "blue"}


def talk(place: Path) -> Path:
    """Conversations with other answers than those that the model was trained on."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"what is {word}?"},
                {"role": "assistant", "content": f"{word} is {OTHER[word]}"},
            ]
        }
        for word in [*OTHER] * 20
    ]
    path = place / "other.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_an_adapter_comes_back_merged_and_answers(
    start: Start, launcher: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    needs_trl()
    out, data = tmp_path / "lora", talk(tmp_path)
    flags = f"--model {exported} --data {data} --out {out} --max_steps 90 --learning_rate 5e-3"
    report = start(NAME, flags, launcher, 2)
    assert shape(report)[:2] == promised(NAME)[:2]
    assert report.startswith("2 processes, ZeRO stage 2, ")
    first, last = losses_of(report)
    assert last < 0.7 * first
    imported = str(tmp_path / "imported")
    assert minimind(["import", "--from", "llama", str(out), "--out", imported]) == 0
    capsys.readouterr()
    words = ["chat", "--model", imported, "--temperature", "0", "--once", "what is sky?"]
    assert minimind([*words, "--max_new_tokens", "30"]) == 0
    answer = capsys.readouterr().out.strip()
    assert " is " in answer
    assert answer.split()[-1] in OTHER.values()
