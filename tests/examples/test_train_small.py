"""examples/train_small.py: a run, and the plain loop that repeats it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from examples import train_small
from minimind.cli.main import main
from tests.conftest import ROOT
from tests.examples.conftest import promised, shape

train: Any = training  # a package that is called like a function
TINY = ["--model", "tiny", "--dtype", "float32", "--log_interval", "1", "--device", "cpu"]
TINY += ["--deepspeed_config", "none", "--no-async_save"]


def repeated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path) -> str:
    """What the loop prints of a run."""
    monkeypatch.setattr(sys, "argv", ["train_small.py", str(run)])
    train_small.main()
    return capsys.readouterr().out


def rows_of(folder: Path) -> Path:
    text = "".join(
        page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))
    )
    lines = (json.dumps({"text": part}) for part in text.split("\n## "))
    (folder / "t.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = folder / "rows"
    assert (
        main(["prepare", str(folder / "t.jsonl"), "--out", str(out), "--vocab_size", "1024"]) == 0
    )
    return out


@pytest.mark.long
def test_100_steps_end_at_the_losses_of_the_run(monkeypatch, capsys, tmp_path: Path):
    run = tmp_path / "run"
    rows = rows_of(tmp_path)
    assert (
        train([*TINY, "--data_path", str(rows), "--max_steps", "100", "--out_dir", str(run)]) == 0
    )
    capsys.readouterr()
    printed = repeated(monkeypatch, capsys, run)
    assert shape(printed) == promised("train_small.py")
    assert float(printed.split()[-1]) < 1e-5


def test_a_short_run_is_repeated_and_another_kind_of_run_refused(
    monkeypatch, capsys, tmp_path: Path
):
    run, small = tmp_path / "run", "--dim 48 --n_heads 6 --n_layers 2 --batch_size 2".split()
    places = ["--data_path", str(rows_of(tmp_path)), "--out_dir", str(run)]
    assert train([*TINY, *small, *places, "--max_steps", "4"]) == 0
    capsys.readouterr()
    printed = repeated(monkeypatch, capsys, run)
    assert "largest difference in 4 steps" in printed
    assert float(printed.split()[-1]) < 1e-6
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("schedule: cosine", "schedule: linear"))
    with pytest.raises(SystemExit) as ended:
        repeated(monkeypatch, capsys, run)
    assert ended.value.code == 2
    assert "schedule linear; this loop does cosine only" in capsys.readouterr().err
