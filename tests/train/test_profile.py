"""The phase clock and the metrics file against hand-made marks and torn lines."""

import json
import math
import time
from pathlib import Path

import pytest
import torch

from minimind.metrics import Metrics
from minimind.train.profile import PHASES, PhaseClock, mean_ms, profile_table


def test_every_moment_of_a_step_is_charged_to_one_phase():
    clock, lasted = PhaseClock(torch.device("cpu")), 0.0
    for _ in range(2):
        clock.begin()
        started = time.perf_counter()
        for phase in ("data", "forward", "backward", "forward", "optimizer"):
            time.sleep(0.002)
            clock.mark(phase)
        lasted = (time.perf_counter() - started) * 1e3
    steps = clock.take()
    assert len(steps) == 2
    assert sum(steps[1][p] for p in PHASES) == pytest.approx(steps[1]["step"])
    assert steps[1]["step"] == pytest.approx(lasted, abs=1.0)
    assert steps[1]["forward"] > steps[1]["data"] > 1.9
    assert clock.take() == []


def test_means_and_table_say_the_same():
    steps = [{**dict.fromkeys(PHASES, float(n)), "step": 4.0 * n} for n in (1, 2, 3)]
    assert mean_ms(steps)["forward_ms"] == 2.0
    table = profile_table(steps, {"checkpoint": 12.5})
    assert "25.0%" in table
    assert "12.5" in table


def write(path: Path, **facts: object) -> None:
    metrics = Metrics(path)
    metrics.write("step", **facts)
    metrics.close()


def test_a_torn_last_line_is_closed_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "step", "lo')
    write(path, loss=1.0)
    write(path, loss=2.0)
    lines = path.read_text().splitlines()
    assert lines[0] == '{"event": "step", "lo'
    assert [json.loads(line)["loss"] for line in lines[1:]] == [1.0, 2.0]


def test_numbers_keep_full_precision_and_non_finite_ones_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, loss=0.1 + 0.2, norm=math.nan, rows=[math.inf, 1])
    line = json.loads(path.read_text())
    assert line["loss"] == 0.1 + 0.2
    assert line["norm"] is None
    assert line["rows"] == [None, 1]
