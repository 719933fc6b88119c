"""The figures of a page against metrics.jsonl."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from minimind.report.charts import downsample, draw, group_lines, group_means, run_style
from minimind.report.figures import smooth
from minimind.report.formats import log_ticks
from minimind.report.page import figures
from tests.report.made import (
    NOW,
    Drawn,
    crashed_and_resumed,
    end,
    evaluation,
    made_run,
    page_of,
    run_start,
    step_line,
    values_at,
    values_of,
    write_run,
)


def test_every_curve_has_the_values_of_its_lines(tmp_path):
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", crashed_and_resumed())))
    steps = np.arange(1, 41)
    expected = {
        ("loss", "loss"): 9.0 - steps / 8,
        ("lr", "learning rate"): 1e-3 / steps,
        ("memory_mib", "memory"): (300.0 + steps) / 1024,
        ("tokens_per_second", "throughput"): np.full(40, 1000.0),
        ("grad_norm", "gradient norm"): np.full(40, 0.5),
    }
    for (chart, name), values in expected.items():
        assert page.points(chart, name) == pytest.approx(np.column_stack([steps, values])), chart


def test_a_loss_of_ones_own_is_not_drawn_in_nats_or_bits(tmp_path):
    identity = {"model": {"loss": "mine:f (1a2b3c4d)"}}
    lines = [run_start(identity=identity), step_line(1), evaluation(1, 7.5, val_bpb=2.5)]
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    assert "nats" not in page.trace("loss", "loss")["meta"]
    assert "bits" in page.trace("loss", "validation")["meta"]
    unit = page.charts["loss"]["layout"]["meta"]["unit"]
    assert unit == "training: mine:f (1a2b3c4d); validation: nats per token"


def test_lost_lines_are_faint_and_validation_is_points(tmp_path):
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", crashed_and_resumed())))
    lost = page.points("loss", "lost")
    assert lost.tolist() == [[n, 7.75 if n == 10 else 1.0] for n in range(10, 17)]
    assert page.trace("loss", "lost")["opacity"] < 1
    assert page.points("loss", "validation").tolist() == [[10, 7.5], [20, 6.25], [40, 4.25]]
    assert "markers" in page.trace("loss", "validation")["mode"]
    assert page.points("loss", "validation, lost").tolist() == [[15, 0.5]]


def test_the_validation_of_the_average_is_a_curve_of_its_own(tmp_path):
    averages = {10: 7.0, 20: 6.0}  # --ema was given after step 5
    evals = [evaluation(n, 7.5, ema_val_loss=y, ema_val_bpb=y / 3) for n, y in averages.items()]
    lines = [run_start(), *map(step_line, range(1, 21)), evaluation(5, 8.0), *evals]
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    assert page.points("loss", "validation").tolist() == [[5, 8.0], [10, 7.5], [20, 7.5]]
    points = page.points("loss", "validation of the average")
    assert points.tolist() == [[10, 7.0], [20, 6.0]]
    lines = (page.trace("loss", f"validation{of}")["line"] for of in ("", " of the average"))
    assert len({(line["color"], line["dash"]) for line in lines}) == 2


def test_a_halved_micro_batch_is_no_crash(tmp_path):
    """In the process that went on, and where the launcher started another one."""
    halved = {"event": "micro_batch_halved", "micro_batch_rows": 8, "most_rows": 4, "step": 2}
    full = end(2, 10, "E_MEMORY", "the device is out of memory")
    lines = [run_start(), step_line(1), step_line(2), halved, run_start(), step_line(1), halved]
    run = made_run(tmp_path / "run", [*lines, full, run_start(), step_line(1), end(1)])
    assert [kind for kind, _ in run.outcomes(NOW)] == ["halved", "halved", "done"]
    assert "8 rows at once" in run.outcomes(NOW)[0][1]
    assert values_at(run, "crashes") == (0,)
    last = made_run(tmp_path / "last", [run_start(), step_line(1), halved, full])
    assert [kind for kind, _ in last.outcomes(NOW)] == ["failed"]


def test_crashes_resumes_and_changes_of_processes_are_marked_in_the_charts(tmp_path):
    text = page_of(tmp_path, write_run(tmp_path / "run", crashed_and_resumed()))
    page = Drawn(text)
    labels = {one["text"]: one["x"] for one in page.charts["loss"]["layout"]["annotations"]}
    assert labels == {
        "resumed at 10, 1 → 2 processes": 10,
        "crashed at 16": 16,
        "stopped at 20, resumed at 20": 20,
    }
    assert ">crashed: no end recorded<" in text
    assert page.points("loss", "1 checkpoint")[:, 0].tolist() == [10]
    for chart in page.charts.values():
        shapes = chart["layout"]["shapes"]
        (band,) = (shape for shape in shapes if shape["type"] == "rect")
        assert (band["x0"], band["x1"]) == (10, 16)
        lines = [shape["x0"] for shape in shapes if shape["type"] == "line"]
        assert lines == [10, 16, 20, 20]


def test_the_phases_are_stacked_over_the_steps_that_each_line_stands_for(tmp_path):
    lines = [run_start(), step_line(10), step_line(20, forward_ms=59.0, evaluate_ms=20.0)]
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    assert page.charts["phases"]["layout"]["template"]["layout"]["barmode"] == "stack"
    expected = {
        "data": [1, 1],
        "forward": [29, 59],
        "backward": [60, 60],
        "optimizer": [10, 10],
        "evaluation": [0, 20],
    }
    for name, heights in expected.items():
        trace = page.trace("phases", name)
        right, left = values_of(trace["x"]), values_of(trace["x"]) + values_of(trace["offset"])
        assert (left.tolist(), right.tolist()) == ([0, 10], [10, 20])
        assert values_of(trace["width"]).tolist() == [10, 10]
        assert 1e3 * values_of(trace["y"]) == pytest.approx(np.array(heights)), name


def test_clipped_steps_and_the_limit_are_marked(tmp_path):
    place = write_run(tmp_path / "run", crashed_and_resumed())
    (place / "config.yaml").write_text("grad_clip: 0.75  # --grad_clip\n")
    page = Drawn(page_of(tmp_path, place))
    assert page.points("grad_norm", "clipped in 2.5% of the lines")[:, 0].tolist() == [33]
    assert page.points("grad_norm", "--grad_clip")[:, 1].tolist() == [0.75, 0.75]


def test_the_load_of_experts_is_drawn_where_there_is_one(tmp_path):
    load: dict[str, Any] = {"expert_load": [0.75, 0.25], "expert_load_range": [0.125, 1.875]}
    lines = [run_start(), *(step_line(n, **load) for n in range(1, 4)), step_line(4)]
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    assert page.points("experts", "expert 0")[:3, 1].tolist() == [1.5] * 3
    assert page.points("experts", "most of any layer")[:3, 1].tolist() == [1.875] * 3
    assert np.isnan(page.points("experts", "expert 0")[3, 1])


def test_a_null_is_a_gap_and_a_lone_point_a_dot(tmp_path):
    lines = [
        run_start(),
        *(step_line(n, grad_norm=None if n in (3, 5) else 1.0) for n in range(1, 41)),
    ]
    lines[4]["grad_norm"] = 2.0
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    heights = page.points("grad_norm", "gradient norm")[:, 1]
    assert np.flatnonzero(np.isnan(heights)).tolist() == [2, 4]
    sizes = values_of(page.trace("grad_norm", "gradient norm")["marker"]["size"])
    assert sizes.tolist() == [0, 0, 0, 6, *[0] * 36]
    assert "marker" not in page.trace("lr", "learning rate")


@pytest.mark.parametrize("count", [1, 2])
def test_plotly_knows_every_property_and_value(count: int, tmp_path):
    more: dict[str, Any] = {"expert_load": [0.75, 0.25], "expert_load_range": [0.125, 1.875]}
    more |= {"cpu_percent": 50.0, "gpu_memory_gib": 2.0, "mfu": 0.5, "comm_ms": 9.0}
    lines = [{**one, **more} if one["event"] == "step" else one for one in crashed_and_resumed()]
    lines[1] |= {"loss": 99.0, "forward_ms": 9e5}
    tasks = {"a": {"value": 0.5, "chance": 0.25}, "b": {"value": 2.0}}
    at_end: dict[str, Any] = {"time": NOW, "step": 40}
    lines.append({"event": "scores", **at_end, "tasks": tasks, "average": 0.5, "seconds": 1.0})
    lines.append({"event": "floors", **at_end, "bits": {"zlib": 2.0, "trigram": 1.0}})
    runs = [made_run(tmp_path / f"run{n}", lines) for n in range(count)]
    found = json.loads(figures(draw(runs, [1.0], NOW)))
    assert {"loss", "mfu", "scores", "other_scores", "utilisation", "used_memory"} <= {*found}
    assert {key.rstrip("1") for key in found} >= {"phases", "experts", "grad_norm"}
    for figure in found.values():
        go.Figure(figure)  # raises ValueError
    found["loss"]["data"][0]["line"]["colour"] = "red"
    with pytest.raises(ValueError, match="colour"):
        go.Figure(found["loss"])


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_short_run_is_seen_in_every_chart(count: int, tmp_path):
    lines = [run_start(), *(step_line(10 * n) for n in range(1, count + 1))]
    run = write_run(tmp_path / "run", lines)
    (tmp_path / "run" / "config.yaml").write_text("grad_clip: 0.75  # --grad_clip\n")
    page = Drawn(page_of(tmp_path, run))
    curves = {"loss": "loss", "lr": "learning rate", "grad_norm": "gradient norm"}
    for chart, name in (
        curves | {"tokens_per_second": "throughput", "memory_mib": "memory"}
    ).items():
        trace = page.trace(chart, name)
        assert (trace["mode"], trace["cliponaxis"]) == ("lines+markers", False)
        assert values_of(trace["marker"]["size"]).tolist() == [6] * count
    names = [trace["name"] for trace in page.charts["loss"]["data"]]
    assert ("mean of 1 line" in names, len(names) == 1) == (False, count < 6)
    if count >= 6:
        assert names == ["loss", f"mean of {count // 3} lines"]
    assert page.trace("grad_norm", "--grad_clip")["mode"] == "lines"


def test_a_million_lines_keep_the_least_and_the_largest_of_every_column():
    draw = np.random.default_rng(5)
    x = np.arange(1.0, 1_000_001.0)
    y = draw.normal(size=len(x))
    y[654_321], y[123] = 99.0, np.nan
    kept = downsample(x, y, 1000, (0.0, 1e6))
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
    draws, lines = np.random.default_rng(1).normal(size=20_000).tolist(), [run_start()]
    for step, noise in enumerate(draws, 1):
        more = {"grad_norm": 1 + noise / 9, "tokens": step, "tokens_per_second": 1e5 + noise}
        lines.append(step_line(step, loss=3 + noise / 9, forward_ms=29 + noise, **more))
    run = made_run(tmp_path, lines)
    assert len(figures(draw([run], [1.0], NOW))) < 1_000_000


def test_the_smoothed_curve_is_a_mean_that_leaves_out_what_is_missing():
    y = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    assert smooth(y, 3).tolist() == [1.0, 1.5, 3.0, 4.5, 4.5]
    assert smooth(np.empty(0), 3).tolist() == []


def test_groups_weigh_lines_by_their_steps():
    begins, ends = np.array([0.0, 10.0, 11.0, 12.0]), np.array([10.0, 11.0, 12.0, 100.0])
    left, right, group = group_lines(begins, ends, 2)
    assert (left.tolist(), right.tolist()) == ([0.0, 12.0], [12.0, 100.0])
    means = group_means(np.array([1.0, 4.0, np.nan, 7.0]), ends - begins, group)
    assert means.tolist() == [pytest.approx(14 / 11), 7.0]


def test_a_few_values_beyond_all_others_are_cut_off_and_named(tmp_path):
    lines = [run_start(), *(step_line(n, forward_ms=9e4 if n == 1 else 29.0) for n in range(1, 99))]
    text = page_of(tmp_path, write_run(tmp_path / "run", lines))
    assert Drawn(text).charts["phases"]["layout"]["yaxis"]["range"][1] < 1
    assert "cut off: up to 90.1 s" in text


@pytest.mark.parametrize(
    ("values", "kind", "unit"),
    [
        ([1.0, 2.0], None, "nats per token"),
        ([0.1, 2.0], "log", "nats per token, log scale"),
        ([0.0, 2.0], None, "nats per token"),
        ([-2.0, 3.0], None, "nats per token"),
        ([9e99, -9e99], None, "nats per token"),
    ],
)
def test_an_axis_is_logarithmic_where_values_are_far_apart(tmp_path, values, kind, unit):
    lines = [run_start(), *(step_line(n, loss=y) for n, y in enumerate(values, 1))]
    charts = draw([made_run(tmp_path / "run", lines)], [], NOW)
    assert (charts[0].figure["layout"]["yaxis"].get("type"), charts[0].unit) == (kind, unit)


def test_labels_of_marks_do_not_cover_one_another(tmp_path):
    lines: list[Any] = []
    for n in range(0, 100, 2):
        lines += [run_start(n, resume_from="p"), step_line(n + 1), step_line(n + 2)]
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", lines)))
    at = sorted(one["x"] for one in page.charts["loss"]["layout"]["annotations"])
    assert 10 < len(at) < 49
    assert min(np.diff(at)) > 2.5


def test_a_name_with_html_stays_text(tmp_path):
    lines = [run_start(), *(step_line(n) for n in range(1, 5))]
    places = [write_run(tmp_path / name, lines) for name in ("<b>&", "other")]
    page = Drawn(page_of(tmp_path, *places))
    assert page.trace("loss", "&lt;b&gt;&amp;")


def test_two_dozen_runs_differ_in_color_or_dash():
    assert len({run_style(n) for n in range(24)}) == 24


def test_ticks_of_a_log_axis_are_labelled_with_their_values():
    assert log_ticks(0.3, 7) == [0.1, 0.2, 0.5, 1, 2, 5]
    assert log_ticks(0.3, 12) == [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
    assert log_ticks(1e-4, 30) == [1e-4, 1e-3, 1e-2, 0.1, 1, 10]
