"""The table and the page of a sweep against its trials."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from minimind.config.parse import parse_flags
from minimind.report.formats import PALETTE
from minimind.report.page import write_page
from minimind.sweep.page import render, validations
from minimind.sweep.sweep_file import Sweep, read_sweep
from minimind.sweep.trial import Result, best_command, table, table_text
from tests.report.made import Drawn, values_of
from tests.report.test_report_commands import in_browser
from tests.sweep.made import write_sweep


def row(n: int, rate: float, size: str, metric: float, kind: str = "done", **more: str) -> Result:
    status = more.get("status", kind)
    curve = {} if math.isnan(metric) else {10: metric + 1, 20: metric}
    parameters = {"learning_rate": rate, "batch_size": size}
    told: dict[str, Any] = {"state": kind, "reason": status, "curve": curve, "steps": 20}
    return Result(folder=f"trial-{n:04d}", parameters=parameters, **told)


ROWS = [
    row(0, 1e-3, "2", 2.0),
    row(1, 1e-1, "8", 1.25, "pruned", status="pruned at step 20"),
    row(2, 1e-2, "4", 1.5),
    row(3, 2e-2, "4", math.nan, "failed", status="status 3: <b>no & text</b>"),
    row(4, 5e-2, "8", 1.75),
]


def made_sweep(tmp_path: Path, **changes: object) -> Sweep:
    return read_sweep(str(write_sweep(tmp_path, **changes)))


def test_the_table_has_the_best_first_then_pruned_then_failed():
    text = table_text(table(ROWS, "val_bpb", ["learning_rate", "batch_size"]))
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
    curves = [values_of(line["y"]).tolist() for line in page.charts["curves"]["data"]]
    assert sorted(curves) == [[2.25, 1.25], [2.5, 1.5], [2.75, 1.75], [3.0, 2.0]]
    history = {line["name"]: line for line in page.charts["history"]["data"]}
    assert {name: values_of(line["x"]).tolist() for name, line in history.items()} == {
        "not finished": [1],
        "finished": [0, 4],
        "best": [2],
        "best so far": [0, 1, 2, 4],
    }
    assert [*history["best so far"]["y"]] == [2.0, 2.0, 1.5, 1.5]


def test_parallel_coordinates_are_logarithmic_where_the_range_is(tmp_path: Path):
    chart = Drawn(render(made_sweep(tmp_path), ROWS, Path("out"))).charts["parallel"]
    lines = {line["text"][0].partition(":")[0]: line for line in chart["data"]}
    assert values_of(lines["trial-0002"]["y"]) == pytest.approx([1 / 3, 2 / 3, 1 / 2])
    assert {name: line["line"]["dash"] for name, line in lines.items()} == {
        "trial-0000": "solid",
        "trial-0001": "dot",  # pruned
        "trial-0002": "solid",
        "trial-0004": "solid",
    }
    labels = [note["text"] for note in chart["layout"]["annotations"] if note["x"] == 1]
    assert labels == ["0.0001", "0.001", "0.01", "0.1"]


def test_colors_of_a_page_are_those_that_differ_enough_from_light_and_dark(tmp_path: Path):
    for chart in Drawn(render(made_sweep(tmp_path), ROWS, Path("out"))).charts.values():
        for found in re.findall(r"#[0-9a-f]{6}", json.dumps(chart["data"])):
            light_and_dark = next(both for both in PALETTE.values() if both[0] == found)
            for color, paper in zip(light_and_dark, PALETTE["paper"], strict=True):
                assert contrast(color, paper) > 3


def contrast(color: str, other: str) -> float:
    """As in WCAG 2.2, 1.4.11."""

    def luminance(text: str) -> float:
        parts = [int(text[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(color), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_values_of_the_curves_are_a_table_too(tmp_path: Path):
    assert validations(ROWS) == (
        ["trial", "step 10", "step 20"],
        [
            ["trial-0002", "2.5000", "1.5000"],
            ["trial-0004", "2.7500", "1.7500"],
            ["trial-0000", "3.0000", "2.0000"],
            ["trial-0001", "2.2500", "1.2500"],
        ],
    )
    long = row(0, 1e-3, "2", 2.0).model_copy(update={"curve": dict.fromkeys(range(1, 101), 2.0)})
    head, (cells,) = validations([long])
    assert (head[-1], len(head), len(cells)) == ("step 100", 13, 13)


def test_ticks_of_a_logarithmic_axis_are_not_rounded_to_whole_numbers(tmp_path: Path):
    # Plotly writes these ticks by the format of the box at the pointer.
    layout = Drawn(render(made_sweep(tmp_path), ROWS, Path("out"))).charts["over-learning-rate"]
    axis = layout["layout"]["xaxis"]
    assert (axis["type"], axis["hoverformat"]) == ("log", "")


@pytest.mark.parametrize("kinds", [("done",), ("pruned",), ("done", "done"), ("interrupted",) * 2])
def test_a_few_equal_trials_are_drawn(tmp_path: Path, kinds: tuple[str, ...]):
    rows = [row(n, 1e-2, "4", 1.5, kind) for n, kind in enumerate(kinds)]
    page = Drawn(render(made_sweep(tmp_path), rows, Path("out")))
    assert [key for key in page.charts if key.startswith("over-")] == (
        ["over-learning-rate", "over-batch-size"] if "done" in kinds else []
    )


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
