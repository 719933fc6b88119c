"""examples/training_features.py: accumulation, clipping and precision do what they say."""

from __future__ import annotations

import re

import pytest
import torch

from tests.examples.conftest import Start, by_every_launcher, promised, shape

pytestmark = [pytest.mark.long, pytest.mark.launch]
NAME = "training_features.py"


def parameters(report: str) -> str:
    return report.splitlines()[-1]


@by_every_launcher
def test_a_prepared_schedule_moves_on_once_for_each_process(
    start: Start, launcher: str, processes: int
):
    report = start(NAME, "", launcher, processes)
    assert shape(report) == promised(NAME)
    steps = 8 // processes  # 128 rows, 8 of each process, two micro-batches a step
    assert f"{2 * steps} micro-batches each, {steps} steps" in report
    assert f"schedule moved on {steps * processes} times" in report


def test_more_micro_batches_of_fewer_rows_are_the_same_step(start: Start):
    report = [start(NAME, f"--accumulation_steps {n} --batch_size {16 // n}") for n in (1, 2, 4)]
    assert len({parameters(text) for text in report}) == 1


def test_clipping_by_norm_and_by_value_differ_and_hold_their_limits(start: Start):
    by_norm, by_value, free = (start(NAME, f"--clip {how}") for how in ("norm", "value", "none"))
    norm, value, unclipped = (
        float(re.findall(r"gradient norm (\S+)", report)[0]) for report in (by_norm, by_value, free)
    )
    assert norm == pytest.approx(0.05, abs=1e-3)
    assert norm < value < unclipped
    assert len({parameters(report) for report in (by_norm, by_value, free)}) == 3


def test_bf16_computes_in_bf16(start: Start):
    assert "no: torch.float32" in start(NAME)
    assert "bf16: torch.bfloat16" in start(NAME, "--mixed_precision bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_fp16_on_a_cpu_is_fp32_in_silence(start: Start):
    assert "fp16: torch.float32" in start(NAME, "--mixed_precision fp16")
