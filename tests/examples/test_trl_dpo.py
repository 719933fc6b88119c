"""examples/trl_dpo.py: an adapter is trained on preferences, merged, imported, and answers."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from minimind.cli.main import main as minimind
from tests.examples.conftest import EXAMPLES, Start, losses_of, needs_trl, promised, shape
from tests.examples.test_trl_sft import talk

NAME = "trl_dpo.py"


def test_a_pair_is_of_two_answers_and_one_prompt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = importlib.import_module("trl_dpo")
    one, two = ([{"role": "user", "content": c}, {"role": "assistant", "content": c}] for c in "ab")
    assert example.pairs([one, two, two]) == [
        {"prompt": one[:1], "chosen": one[1:], "rejected": two[1:]},
        {"prompt": two[:1], "chosen": two[1:], "rejected": one[1:]},
    ]


@pytest.mark.long
@pytest.mark.launch
def test_preferences_are_learnt_and_the_model_comes_back(
    start: Start, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    needs_trl()
    out, data = tmp_path / "dpo", talk(tmp_path)
    flags = f"--model {exported} --data {data} --out {out} --learning_rate 5e-3"
    report = start(NAME, flags, "torchrun", 2)
    assert shape(report)[:2] == promised(NAME)[:2]
    first, last = losses_of(report)
    assert first < math.log(2) + 0.1  # of a model that is the reference
    assert last < 0.5 * first
    imported = str(tmp_path / "imported")
    assert minimind(["import", "--from", "llama", str(out), "--out", imported]) == 0
    capsys.readouterr()
    words = ["generate", "--model", imported, "--prompt", "what", "--max_new_tokens", "5"]
    assert minimind(words) == 0
    assert capsys.readouterr().out.startswith("what")
