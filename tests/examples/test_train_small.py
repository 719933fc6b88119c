"""examples/train_small.py: a run, and the plain loop that repeats it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples import train_small
from tests.conftest import ROOT
from tests.examples.conftest import promised, shape

TINY = ["--model", "tiny", "--dtype", "float32", "--log_interval", "1", "--device", "cpu"]
TINY += ["--deepspeed_config", "none", "--no-async_save"]


def minimind(*arguments: object) -> None:
    line = [sys.executable, "-m", "minimind", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


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
    minimind("prepare", folder / "t.jsonl", "--out", folder / "rows", "--vocab_size", 1024)
    return folder / "rows"


@pytest.mark.long
def test_100_steps_end_at_the_losses_of_the_run(monkeypatch, capsys, tmp_path: Path):
    run = tmp_path / "run"
    rows = rows_of(tmp_path)
    minimind("train", *TINY, "--data_path", rows, "--max_steps", 100, "--out_dir", run)
    printed = repeated(monkeypatch, capsys, run)
    assert shape(printed) == promised("train_small.py")
    assert float(printed.split()[-1]) < 1e-5


def test_a_short_run_is_repeated_and_another_kind_of_run_refused(
    monkeypatch, capsys, tmp_path: Path
):
    run, small = tmp_path / "run", ["--dim", 48, "--n_heads", 6, "--n_layers", 2, "--batch_size", 2]
    rows = rows_of(tmp_path)
    minimind("train", *TINY, *small, "--data_path", rows, "--max_steps", 4, "--out_dir", run)
    printed = repeated(monkeypatch, capsys, run)
    assert "largest difference in 4 steps" in printed
    assert float(printed.split()[-1]) < 1e-6
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("schedule: cosine", "schedule: linear"))
    with pytest.raises(SystemExit) as ended:
        repeated(monkeypatch, capsys, run)
    assert ended.value.code == 2
    assert "schedule linear; this loop does cosine only" in capsys.readouterr().err
