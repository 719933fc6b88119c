"""What is drawn, read back from the page, against metrics.jsonl."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from minimind.report.charts import Chart, Line, scale_of
from minimind.report.drawing import drawn, non_empty_path
from minimind.report.labels import mark_labels
from minimind.report.numbers import linear_ticks, log_ticks, tick_labels
from minimind.report.panels import charts_of, tone_of
from minimind.report.thin import bins, extremes, grouped_mean, smoothed
from tests.report.made import (
    NOW,
    Drawn,
    crashed_and_resumed,
    made_run,
    page_of,
    run_start,
    step_line,
    write_run,
)


def one_pixel(page: Drawn, chart: str) -> float:
    edges = page.edges[chart]
    return (edges["y1"] - edges["y0"]) / 1000


def test_every_curve_has_the_values_of_its_lines(tmp_path):
    text = page_of(tmp_path, write_run(tmp_path / "run", crashed_and_resumed()))
    page = Drawn(text)
    steps = np.arange(1, 41)
    expected = {
        ("loss", "loss", "raw"): 9.0 - steps / 8,
        ("lr", "learning rate", ""): 1e-3 / steps,
        ("memory_mib", "memory", ""): 300.0 + steps,
        ("tokens_per_second", "throughput", ""): np.full(40, 1000.0),
        ("grad_norm", "gradient norm", ""): np.full(40, 0.5),
    }
    for (chart, name, look), values in expected.items():
        points = page.points(chart, name, look)
        assert points[:, 0] == pytest.approx(steps, abs=0.01), chart
        assert points[:, 1] == pytest.approx(values, abs=one_pixel(page, chart)), chart
        told = page.values(text)[chart][name]
        assert told[0] == steps.tolist()
        assert told[1] == pytest.approx(values, rel=1e-5)


def test_what_a_crash_undid_is_drawn_faintly_and_validation_as_points(tmp_path):
    text = page_of(tmp_path, write_run(tmp_path / "run", crashed_and_resumed()))
    page = Drawn(text)
    lost = page.points("loss", "lost")
    assert lost[:, 0] == pytest.approx([10, 11, 12, 13, 14, 15, 16], abs=0.01)
    assert lost[:, 1] == pytest.approx([7.75, *[1.0] * 6], abs=one_pixel(page, "loss"))
    held = page.points("loss", "validation", "dots")
    assert held == pytest.approx(np.array([[10, 7.5], [20, 6.25], [40, 4.25]]), abs=0.05)
    undone = page.points("loss", "validation, lost")
    assert undone == pytest.approx(np.array([[15, 0.5]]), abs=0.05)


def test_crash_resume_and_change_of_processes_are_told_on_the_curve(tmp_path):
    text = page_of(tmp_path, write_run(tmp_path / "run", crashed_and_resumed()))
    for label in (
        "crashed at 16",
        "resumed at 10, 1 → 2 processes",
        "stopped at 20",
        "resumed at 20",
        "crashed: no end recorded",
        "1 checkpoint",
    ):
        assert f">{label}<" in text, label
    marks = {
        kind.split()[1]: float(d[1:].split()[0])
        for (chart, _, kind), d in Drawn(text).paths.items()
        if chart == "loss" and kind.startswith("mark")
    }
    assert marks["crashed"] == pytest.approx(1000 * 16 / 40, abs=0.1)
    assert marks["stopped"] == pytest.approx(1000 * 20 / 40, abs=0.1)


def test_the_phases_are_stacked_over_the_steps_that_each_line_stands_for(tmp_path):
    lines = [run_start(), step_line(10), step_line(20, forward_ms=59.0, evaluate_ms=20.0)]
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    tops = {
        name: page.points("phases", name)
        for name in ("data", "forward", "backward", "optimizer", "evaluation")
    }
    assert tops["data"][:4, 0] == pytest.approx([0, 10, 10, 20])
    expected = {
        "data": (1, 1),
        "forward": (30, 60),
        "backward": (90, 120),
        "optimizer": (100, 130),
        "evaluation": (100, 150),
    }
    for name, (first, second) in expected.items():
        assert tops[name][:4, 1] == pytest.approx([first, first, second, second], abs=0.2), name


def test_clipped_steps_and_the_limit_are_marked(tmp_path):
    place = write_run(tmp_path / "run", crashed_and_resumed())
    (place / "config.yaml").write_text("grad_clip: 0.75  # --grad_clip\n")
    text = page_of(tmp_path, place)
    page = Drawn(text)
    (feet,) = (d for (c, _, k), d in page.paths.items() if (c, k) == ("grad_norm", "foot clipped"))
    assert feet == f"M{1000 * 33 / 40:.0f} 1000v-30"
    assert page.points("grad_norm", "--grad_clip")[:, 1] == pytest.approx([0.75] * 2, abs=0.01)
    assert "clipped in 2.5% of the lines" in text


def test_the_load_of_experts_is_drawn_where_there_is_one(tmp_path):
    load: dict[str, Any] = {"expert_load": [0.75, 0.25], "expert_load_range": [0.125, 1.875]}
    lines = [run_start(), *(step_line(n, **load) for n in range(1, 4)), step_line(4)]
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    assert page.points("experts", "expert 0")[:, 1] == pytest.approx([1.5] * 3, abs=0.01)
    assert page.points("experts", "most of any layer")[:, 1] == pytest.approx([1.875] * 3, abs=0.01)


def test_a_null_is_a_gap_and_a_lone_point_a_dot():
    x = np.arange(6.0)
    assert non_empty_path(x, np.array([1, 2, np.nan, 4, np.nan, 6.0])) == (
        "M0.0 1.0L1.0 2.0M3.0 4.0h0M5.0 6.0h0"
    )
    assert non_empty_path(x, np.full(6, np.nan)) == ""


def test_a_million_lines_keep_the_least_and_the_largest_of_every_column():
    draw = np.random.default_rng(5)
    x = np.arange(1.0, 1_000_001.0)
    y = draw.normal(size=len(x))
    y[654_321], y[123] = 99.0, np.nan
    kept = extremes(x, y, 1000, (0.0, 1e6))
    assert len(kept) <= 4001
    assert (np.diff(kept) > 0).all()
    columns = np.minimum(x / 1000, 999).astype(int)
    for pick, start in ((np.fmax, -np.inf), (np.fmin, np.inf)):
        found = [np.full(1000, start) for _ in range(2)]
        for height, at in zip(found, (np.arange(len(x)), kept), strict=True):
            pick.at(height, columns[at], y[at])
        assert found[0].tolist() == found[1].tolist()
    assert np.isnan(y[kept]).sum() == 1


def test_a_long_run_is_a_small_page(tmp_path):
    run = made_run(tmp_path, [run_start()])
    start = run.records.starts[0]
    line = step_line(1)
    draw = np.random.default_rng(1).normal(size=50_000).tolist()
    for step, noise in enumerate(draw, 1):
        line |= {"step": step, "loss": 3 + noise / 9, "grad_norm": 1 + noise / 9, "tokens": step}
        start.add_step({**line, "tokens_per_second": 1e5 + noise, "forward_ms": 29 + noise})
    assert sum(len(drawn(chart)) for chart in charts_of([run], [1.0], NOW)) < 800_000


def test_the_smoothed_curve_is_a_mean_that_leaves_out_what_is_missing():
    y = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    assert smoothed(y, 3).tolist() == [1.0, 1.5, 3.0, 4.5, 4.5]
    assert smoothed(np.empty(0), 3).tolist() == []


def test_bins_weigh_lines_by_their_steps():
    begins, ends = np.array([0.0, 10.0, 11.0, 12.0]), np.array([10.0, 11.0, 12.0, 100.0])
    left, right, group = bins(begins, ends, 2)
    assert (left.tolist(), right.tolist()) == ([0.0, 12.0], [12.0, 100.0])
    means = grouped_mean(np.array([1.0, 4.0, np.nan, 7.0]), ends - begins, group)
    assert means.tolist() == [pytest.approx(14 / 11), 7.0]


def test_a_few_values_beyond_all_others_are_cut_off_and_told(tmp_path):
    lines = [run_start(), *(step_line(n, forward_ms=9e4 if n == 1 else 29.0) for n in range(1, 99))]
    text = page_of(tmp_path, write_run(tmp_path / "run", lines))
    assert Drawn(text).edges["phases"]["y1"] < 1000
    assert "cut off: up to 90.1 s" in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0, 20000, ["0", "5k", "10k", "15k", "20k"]),
        (0, 5.2e5, ["0", "100k", "200k", "300k", "400k", "500k"]),
        (0, 2.1e-3, ["0", "5e-4", "1e-3", "1.5e-3", "2e-3"]),
        (5.1, 8.6, ["6", "7", "8"]),
        (2.31, 2.33, ["2.31", "2.315", "2.32", "2.325", "2.33"]),
        (-1, 1, ["-1", "-0.5", "0", "0.5", "1"]),
    ],
)
def test_ticks_are_round_and_told_apart(low, high, expected):
    assert tick_labels(linear_ticks(low, high, 6)) == expected


def test_ticks_of_a_logarithm_are_ones_twos_and_fives():
    assert tick_labels(log_ticks(0.9, 60, 6)) == ["1", "2", "5", "10", "20", "50"]
    assert tick_labels(log_ticks(1e-3, 2e3, 6)) == ["0.01", "1", "100"]


@pytest.mark.parametrize(
    "values", [[], [math.nan], [3.0], [0.0], [5.0, 5.0], [1e-9, 1e9], [-2.0, 3.0], [9e99, -9e99]]
)
def test_a_scale_has_room_for_whatever_there_is(values):
    for from_zero in (False, True):
        scale = scale_of(np.array(values, dtype=float), from_zero, True)
        assert scale.low < scale.high
        known = np.array([v for v in values if math.isfinite(v)])
        assert np.isfinite(scale.at(known)).all()


def test_labels_of_marks_do_not_cover_one_another():
    from minimind.report.charts import Mark

    marks = [Mark(float(n), "crashed", f"crashed at {n}") for n in range(0, 100, 2)]
    html = mark_labels(Chart("loss", "Loss", "", (0.0, 100.0), marks=marks))
    assert 10 < html.count("no-narrow") < html.count("crashed at")
    assert html.count("no-wide") < html.count("no-narrow")


def test_a_name_with_marks_of_html_stays_text():
    line = Line('"><script>', "k0", np.arange(3.0), np.arange(3.0))
    html = drawn(Chart("loss", "<b>", "</svg>", (0.0, 2.0), [line]))
    assert "<script>" not in html
    assert "</svg>," not in html
    assert json.dumps(Drawn(html).tags).count("script") == 0


def test_two_dozen_runs_are_told_apart():
    assert len({tone_of(n) for n in range(24)}) == 24
