"""examples/own_run.py: its functions see the numbers of the run, and end it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from examples import own_run
from tests.examples.conftest import promised, shape
from tools.runs import events


def test_it_prints_its_metric_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    corpus: Path,
):
    words = "--dim 16 --n_layers 1 --n_heads 2 --n_kv_heads 1 --max_seq_len 32 --vocab_size 600"
    words += " --batch_size 2 --device cpu --dtype float32 --eval_rows 8 --val_fraction 0.1"
    words += " --max_steps 8 --log_interval 2 --eval_interval 4 --deepspeed_config none"
    words += f" --data_path {corpus} --out_dir {tmp_path}/run --cache_dir {tmp_path}/cache"
    monkeypatch.setattr(sys, "argv", ["own_run.py", *words.split()])
    monkeypatch.setattr(own_run, "GOOD", 1e9)
    assert own_run.main() == 0
    steps, evals = events(tmp_path / "run", "step"), events(tmp_path / "run", "eval")
    assert [line["step"] for line in steps] == [2, 4]
    assert [line["step"] for line in evals] == [4]
    printed = capsys.readouterr().out
    share, ppl = steps[1]["loss"] / steps[0]["loss"], evals[0]["val_ppl"]
    expected = [
        f"step 4: {share:.2f} of the loss of the first line",
        f"step 4: perplexity {ppl:.1f}",
    ]
    own = re.findall(r"^step 4: (?:\S+ of the loss|perplexity).*$", printed, re.MULTILINE)
    assert own == expected
    assert shape("\n".join(own)) == promised("own_run.py")
    assert events(tmp_path / "run", "exit")[0]["reason"] == "stopped by on_eval at step 4"
    assert own_run.main() == 0  # the process can train again
