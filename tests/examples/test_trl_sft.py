"""examples/trl_sft.py: an adapter is trained, merged, imported, and answers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minimind.cli.main import main as minimind
from tests.examples.conftest import EXAMPLES, Start, losses_of, needs_trl, promised, shape

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


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("trl_sft")


@pytest.mark.parametrize("content", ["a", "a\u2028b", "a\u0085b"])
def test_a_conversation_is_a_line_of_any_form(example: Any, content: str, tmp_path: Path):
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    pair = {"prompt": content, "completion": content}
    lines = [{"messages": turns}, {"conversations": turns}, pair]
    path = tmp_path / "talk.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    assert example.messages_of(str(path)) == [turns] * 3


def test_a_single_step_is_reported(example: Any, capsys: pytest.CaptureFixture[str]):
    def ignored(*_: Any) -> None:
        pass

    model = SimpleNamespace(
        get_nb_trainable_parameters=lambda: (1, 2),
        merge_and_unload=lambda: SimpleNamespace(save_pretrained=ignored),
    )
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=2))
    trainer = SimpleNamespace(
        remove_callback=ignored,
        train=ignored,
        model=model,
        processing_class=SimpleNamespace(save_pretrained=ignored),
        state=SimpleNamespace(log_history=[{"loss": 1.5}]),
        accelerator=SimpleNamespace(
            is_main_process=True, unwrap_model=lambda one: one, num_processes=1, state=state
        ),
    )
    example.run(trainer, "out")
    assert losses_of(capsys.readouterr().out) == [1.5, 1.5]


@pytest.mark.long
@pytest.mark.launch
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
