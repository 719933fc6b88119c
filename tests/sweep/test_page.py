"""The table and the page of a sweep against its trials."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from minimind.config.parse import parse_flags
from minimind.report.formats import LIGHT
from minimind.report.page import write_page
from minimind.sweep.page import render
from minimind.sweep.study import Row, best_command, table_text
from minimind.sweep.sweep_file import Sweep, read_sweep
from tests.report.made import Drawn, values_of
from tests.report.test_report_commands import in_browser
from tests.sweep.made import write_sweep


def row(n: int, rate: float, size: str, metric: float, kind: str = "done", **more: str) -> Row:
    status = more.get("status", kind)
    curve = {} if math.isnan(metric) else {10: metric + 1, 20: metric}
    parameters = {"learning_rate": rate, "batch_size": size}
    return Row(f"trial-{n:04d}", parameters, metric, curve, 20, kind, status)


ROWS = [
    row(0, 1e-3, "2", 2.0),
    row(1, 1e-1, "8", 1.25, "pruned", status="pruned at step 20"),
    row(2, 1e-2, "4", 1.5),
    row(3, 2e-2, "4", math.nan, "failed", status="status 3: <b>no & text</b>"),
    row(4, 5e-2, "8", 1.75),
]


def made_sweep(tmp_path: Path, **changes: object) -> Sweep:
    return read_sweep(str(write_sweep(tmp_path, **changes)))


def test_the_table_has_the_best_first_then_pruned_then_failed(tmp_path: Path):
    text = table_text(made_sweep(tmp_path), ROWS)
    assert text.splitlines()[0].split() == [
        *("trial", "val_bpb", "learning_rate", "batch_size", "steps", "status")
    ]
    assert [line.split()[0][-1] for line in text.splitlines()[1:]] == ["2", "4", "0", "1", "3"]
    assert text.splitlines()[1].split()[1:] == ["1.5000", "0.01", "4", "20", "done"]
    assert len({line.index("  20  ") for line in text.splitlines()[1:]}) == 1


def test_the_best_command_repeats_the_trial_in_another_folder(tmp_path: Path):
    command = shlex.split(best_command(made_sweep(tmp_path), ROWS[2], Path("out dir")))
    assert command[:2] == ["minimind", "train"]
    found = parse_flags(command[2:])
    assert (found.learning_rate, found.batch_size, found.max_steps) == (1e-2, 4, 40)
    assert found.out_dir == "out dir/best"


def test_the_charts_have_the_values_of_the_trials(tmp_path: Path):
    page = Drawn(render(made_sweep(tmp_path), ROWS, Path("out/mine")))
    names = ["history", "parallel", "over-learning-rate", "over-batch-size", "curves"]
    assert [*page.charts] == names
    assert page.points("history", "done").tolist() == [[0, 2.0], [2, 1.5], [4, 1.75]]
    assert page.points("history", "not finished").tolist() == [[1, 1.25]]  # 3 has no metric
    best = page.points("history", "best so far").tolist()
    assert best == [[0, 2.0], [1, 2.0], [2, 1.5], [3, 1.5], [4, 1.5]]
    (rates,) = page.charts["over-learning-rate"]["data"]
    assert [*zip(rates["x"], rates["y"], rates["marker"]["color"], strict=True)] == [
        *((1e-3, 2.0, 0), (1e-2, 1.5, 2), (5e-2, 1.75, 4))  # the last is the number of the trial
    ]
    assert page.charts["over-learning-rate"]["layout"]["xaxis"]["type"] == "log"
    (sizes,) = page.charts["over-batch-size"]["data"]
    axis = page.charts["over-batch-size"]["layout"]["xaxis"]
    shown = dict(zip(axis["tickvals"], axis["ticktext"], strict=True))
    assert [shown[x] for x in sizes["x"]] == ["2", "4", "8"]
    assert sizes["y"] == [2.0, 1.5, 1.75]
    assert axis["categoryarray"] == axis["tickvals"]


def test_lines_are_told_apart_by_how_good_a_trial_is(tmp_path: Path):
    page = Drawn(render(made_sweep(tmp_path), ROWS, Path("out")))
    names = {"curves": [], "parallel": []}
    for chart, trials in names.items():
        for line in page.charts[chart]["data"]:
            trial, look = line["hovertemplate"].partition(",")[0], line["line"]
            trials.append((trial, look["color"], look["dash"], look["width"]))
    assert names["curves"] == [
        ("trial-0001", LIGHT["sample"], "dot", 1.25),
        ("trial-0000", LIGHT["sample"], "solid", 1.25),
        ("trial-0004", LIGHT["run5"], "solid", 1.25),
        ("trial-0002", LIGHT["run0"], "solid", 2.5),  # the best on top
    ]
    assert names["parallel"] == names["curves"]
    curves = [values_of(line["y"]).tolist() for line in page.charts["curves"]["data"]]
    assert curves == [[2.25, 1.25], [3.0, 2.0], [2.75, 1.75], [2.5, 1.5]]


def test_lines_of_the_parallel_coordinates_meet_the_axes_at_their_values(tmp_path: Path):
    page = Drawn(render(made_sweep(tmp_path), ROWS, Path("out")))
    layout = page.charts["parallel"]["layout"]
    assert layout["xaxis"]["ticktext"] == ["val_bpb", "batch_size", "learning_rate"]
    labels = {(one["x"], one["text"]): one["y"] for one in layout["annotations"]}
    assert [labels[1, size] for size in ("2", "4", "8")] == [0, 0.5, 1]
    assert (labels[0, "1.25"], labels[0, "2"]) == (0, 1)
    heights = {
        line["hovertemplate"].partition(",")[0]: values_of(line["y"]).tolist()
        for line in page.charts["parallel"]["data"]
    }
    assert heights == {
        "trial-0000": [1.0, 0.0, 0.0],
        "trial-0001": [0.0, 1.0, 1.0],
        "trial-0002": [pytest.approx(1 / 3), 0.5, pytest.approx(0.5)],
        "trial-0004": [pytest.approx(2 / 3), 1.0, pytest.approx(0.5 + math.log10(5) / 2)],
    }


@pytest.mark.parametrize("sizes", [["8", "2", "4"], ["auto", "2", "4"]])
def test_choices_have_the_order_of_the_file_whatever_the_trials(tmp_path: Path, sizes: list[str]):
    sweep = made_sweep(tmp_path, dimensions={"batch_size": sizes, "schedule": ["wsd", "cosine"]})
    rows = [
        replace(ROWS[n], parameters={"batch_size": size, "schedule": schedule})
        for n, size, schedule in ((0, "4", "cosine"), (2, sizes[0], "cosine"))
    ]
    labels = Drawn(render(sweep, rows, Path("out"))).charts["parallel"]["layout"]["annotations"]
    texts = [(one["x"], one["text"]) for one in labels if one["x"]]
    assert texts == [*((1, size) for size in sizes), (2, "wsd"), (2, "cosine")]


@pytest.mark.parametrize("kinds", [("done",), ("pruned",), ("done", "done"), ("interrupted",) * 2])
def test_a_few_equal_trials_are_drawn(tmp_path: Path, kinds: tuple[str, ...]):
    rows = [row(n, 1e-2, "4", 1.5, kind) for n, kind in enumerate(kinds)]
    page = Drawn(render(made_sweep(tmp_path), rows, Path("out")))
    assert len(page.charts["parallel"]["data"]) == len(kinds)
    assert [key for key in page.charts if key.startswith("over-")] == (
        ["over-learning-rate", "over-batch-size"] if "done" in kinds else []
    )
    shown = {one["name"] for one in page.charts["history"]["data"] if one["showlegend"]}
    assert shown == ({"best so far", "done"} if "done" in kinds else {"not finished"})


def test_the_page_needs_no_network_and_shows_text_as_text(tmp_path: Path):
    text = render(made_sweep(tmp_path), ROWS, Path("out/a<i>b"))
    assert "&lt;b&gt;no &amp; text&lt;/b&gt;" in text
    assert "a&lt;i&gt;b" in text
    assert "<b>no" not in text
    assert "a<i>b" not in text
    assert "default-src 'none'" in text


def test_a_sweep_without_any_metric_has_a_page_with_its_table(tmp_path: Path):
    page = Drawn(render(made_sweep(tmp_path), [ROWS[3]], Path("out")))
    assert page.charts == {}
    assert "table" in page.tags


def test_a_browser_draws_every_chart(tmp_path: Path):
    page = tmp_path / "sweep.html"
    write_page(render(made_sweep(tmp_path), ROWS, tmp_path), page, "")
    charts = Drawn(page.read_text(encoding="utf-8")).charts
    seen = in_browser(page)
    assert len(re.findall(r'class="main-svg"', seen)) >= len(charts) == 5
    names = re.findall(r'<text class="legendtext"[^>]*>([^<]+)<', seen)
    assert {"best so far", "done", "not finished"} <= {*names}
    assert seen.count(">learning_rate<") >= 2  # an axis of the parallel coordinates, and its own
