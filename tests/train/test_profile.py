"""The phase clock and the metrics file against hand-made marks and torn lines."""

import json
import math
import time
from pathlib import Path

import pytest
import torch

from minimind.metrics import Metrics
from minimind.report import records
from minimind.train.profile import PHASES, PhaseClock, mean_ms, profile_table
from minimind.train.report import PAUSES, Report


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


def test_a_straggler_shows_by_its_rank(tmp_path, capsys):
    report = Report(tmp_path, 4, torch.device("cpu"), is_speaker=True, is_profiling=True)
    steps = [{**dict.fromkeys(PHASES, ms), "step": 4 * ms, "comm": 1.0} for ms in (2.0, 3.0, 9.0)]
    report.took(steps)
    own = report.medians()
    assert (own["forward_ms"], own["step_ms"], own["comm_ms"]) == (3.0, 12.0, 1.0)
    assert own["memory_mib"] > 0
    late = {**own, "forward_ms": 40.0, "comm_ms": 0.25}
    report.profile(3, [own, late])
    report.close()
    shown = capsys.readouterr().out
    row = next(line for line in shown.split("over ranks")[1].splitlines() if "forward" in line)
    assert row.split() == ["forward", "3.0", "21.5", "40.0", "rank", "1"]
    event = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert event["ranks"]["forward_ms"] == [3.0, 40.0]
    assert event["ranks"]["comm_ms"] == [1.0, 0.25]
    assert event["comm_ms"] == 1.0
    assert event["forward_ms"] == pytest.approx(14 / 3)


def test_pauses_are_told_and_read_by_the_same_names():
    assert tuple(records.PAUSES) == tuple(PAUSES)
