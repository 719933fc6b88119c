"""The controls and tables of a page in a browser, and what of it is there without script."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from minimind.report import history
from minimind.report.axes import kept_knots, lost_knots
from minimind.report.charts import draw
from minimind.report.figures import nats_of_a_bit
from minimind.report.formats import FLOORS, PALETTE
from minimind.report.history import console_size, read_console, read_runs
from tests.browser import opened
from tests.contrast import contrast
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
    write_run,
)

FLOORED = {
    **{"event": "floors", "time": 1_800_000_000.0, "step": 0, "text": "a", "bytes_per_token": 4.0},
    "bits": {"unigram": 2.639, "trigram": 1.825, "zlib": 2.334, "xz": 2.273, "zstd": 2.248},
}
USED = {"cpu_percent": 50.0, "host_memory_gib": 2.0}
CONFIGURATION = "learning_rate: {}  # --flag\nseed: 42  # default\nout_dir: {}  # --out_dir\n"


def floored(count: int = 400, **floors: Any) -> list[dict[str, Any]]:
    """A run of a loss from 9 to 3 with validations, floors and the use of its host."""
    found = [run_start(total_steps=count), FLOORED | floors]
    for n in range(1, count + 1):
        found.append(step_line(n, loss=3 + 6 / n + 0.1 * (n % 2), grad_norm=0.5 + n % 3, **USED))
        if n % (count // 4) == 0:
            found.append(evaluation(n, 3 + 6 / n))
    return [*found, end(count)]


@contextmanager
def shown(tmp_path: Path, *places: Path, hash: str = "", **options: Any) -> Iterator[Page]:
    page_of(tmp_path, *places)
    with opened(f"file://{tmp_path}/report.html{hash}", **options) as page:
        yield page


def of(page: Page, key: str, what: str) -> Any:
    return page.evaluate(f"document.querySelector('#{key} .plot').{what}")


def named(page: Page, key: str, name: str) -> dict[str, Any]:
    """x and y of a trace."""
    found = (
        f"const one = document.querySelector('#{key} .plot').data.find(one => one.name === name)"
    )
    return page.evaluate(f"name => {{ {found}; return {{ x: [...one.x], y: [...one.y] }} }}", name)


def test_text_lines_and_controls_are_told_from_the_paper():
    written = {"ink", "soft", "bad", "good", "run0", *(tone for tone, _ in FLOORS.values())}
    for n, theme in enumerate(("light", "dark")):
        paper = PALETTE["paper"][n]
        for name, colors in PALETTE.items():
            least = 4.5 if name in written else 3.0 if name not in ("paper", "rule") else 1.0
            assert contrast(colors[n], paper) >= least, (theme, name)
    # The page changes a light color to its dark one.
    assert len({light for light, _ in PALETTE.values()}) == len({*PALETTE.values()})


def test_lines_have_a_step_tokens_and_the_time_of_the_starts(tmp_path):
    run = made_run(tmp_path / "run", crashed_and_resumed())
    kept, (lost,) = kept_knots(run), lost_knots(run)
    assert kept["step"] == [*range(11), *range(10, 21), *range(20, 41)]
    assert kept["tokens"] == [100 * n for n in kept["step"]]
    first = [n / 10 for n in range(11)]
    second = [1.6, *(round(1.6 + n / 10, 2) for n in range(11, 21))]
    third = [3.6, *(round(3.6 + n / 10, 2) for n in range(21, 41))]
    assert kept["time"] == pytest.approx([*first, *second, *third])
    assert (lost["step"], lost["time"][0], lost["time"][-1]) == ([*range(10, 17)], 1.0, 1.6)
    marks = draw([run], [], NOW)[0].meta["marks"]
    (band,) = (one for one in marks["time"]["shapes"] if one["type"] == "rect")
    assert (band["x0"], band["x1"]) == pytest.approx((1.0, 1.6))
    assert [one["x"] for one in marks["time"]["annotations"]] == pytest.approx([1.6, 3.6])
    assert [one["x"] for one in marks["tokens"]["annotations"]] == [1000, 1600, 2000]


def test_many_lines_have_few_knots(tmp_path):
    run = made_run(tmp_path, [run_start(), *(step_line(n) for n in range(1, 5000))])
    knots = kept_knots(run)
    assert len(knots["step"]) <= 1002
    assert knots["time"][-1] == pytest.approx(499.9)


def test_lines_without_a_time_have_no_time_axis(tmp_path):
    run = made_run(tmp_path, [run_start(), *(step_line(n, time=None) for n in range(1, 9))])
    assert [*draw([run], [], NOW)[0].meta["spans"]] == ["step", "tokens"]


def test_a_loss_is_turned_into_bits_by_the_bytes_of_its_own_text(tmp_path):
    run = made_run(tmp_path, floored())
    assert nats_of_a_bit(run) == pytest.approx((4 * math.log(2), 3.0))
    without = made_run(tmp_path, [run_start(), step_line(1), evaluation(1, 3.0)])
    assert nats_of_a_bit(without) == (3.0, 3.0)
    nothing = made_run(tmp_path, [run_start(), step_line(1)])
    assert all(map(math.isnan, nats_of_a_bit(nothing)))


def test_a_chart_has_a_table_of_its_values(tmp_path):
    charts = {one.key: one for one in draw([made_run(tmp_path, floored())], [1.0], NOW)}
    head, rows, beside = charts["loss"].values()
    assert head[0] == "step"
    assert head[1::2] == ["loss", "mean of 5 lines", "validation"]
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    assert (cells[0]["step"], cells[0]["loss"]) == ("1", "9.1000")
    (last,) = (one for one in cells if one["step"] == "400")
    assert last["loss"] == "3.0150"
    assert last["loss, bits per byte"] == f"{3.015 / 4 / math.log(2):.4f}"
    assert last["validation, bits per byte"] == f"{3.015 / 3:.4f}"
    assert sum(one["validation"] != "" for one in cells) == 4
    assert sum(one["loss"] != "" for one in cells) <= 16
    assert "zlib of the held-out text 7.0020" in beside
    assert "validation: first 3.0600, last 3.0150, least 3.0150 at step 400" in (
        charts["loss"].description()
    )
    assert charts["lr"].values()[1][-1] == ["400", "2.50e-6"]


def test_what_a_run_uses_is_drawn_where_it_is_recorded(tmp_path):
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", floored())))
    assert page.points("utilisation", "CPU")[-1].tolist() == [400, 50]
    assert page.points("used_memory", "host")[-1].tolist() == [400, 2]
    assert [trace["name"] for trace in page.charts["utilisation"]["data"]] == ["CPU"]
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "other", crashed_and_resumed())))
    assert not {"utilisation", "used_memory"} & {*page.charts}


def test_the_last_lines_of_the_console_are_shown_as_a_terminal_shows_them(tmp_path):
    place = write_run(tmp_path / "run", crashed_and_resumed())
    assert read_console(place) == []
    lines = [f"line {n}" for n in range(999)] + ["\x1b[31mred <b>\x1b[0m", " 1%\r 50%\r100%\r"]
    (place / "console.log").write_text("\n".join(lines))
    shown = read_console(place)
    assert (len(shown), shown[-3:]) == (200, ["line 998", "red <b>", "100%"])
    text = page_of(tmp_path, place)
    assert "<h2>Console</h2>" in text
    assert "red &lt;b&gt;" in text
    (place / "console.log").write_bytes(b"\xff" * (1 << 18) + b"\nend\n")
    assert read_console(place) == ["end"]


def test_a_console_that_is_renamed_before_it_is_opened_is_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(history.disk, "is_file", lambda path: True)
    assert (console_size(tmp_path), read_console(tmp_path)) == (0, [])


def test_runs_of_equal_folders_are_named_by_what_differs(tmp_path):
    places = [write_run(tmp_path / name / "run", floored()) for name in "ab"]
    for rate, place in zip(("0.003", "0.001"), places, strict=True):
        (place / "config.yaml").write_text(CONFIGURATION.format(rate, place))
    text = page_of(tmp_path, *places)
    names = [one["name"] for one in Drawn(text).charts["lr"]["data"]]
    assert names == ["learning_rate 0.003", "learning_rate 0.001"]
    assert text.index("What differs") < text.index("Where the time went")
    (places[1] / "config.yaml").write_text(CONFIGURATION.format("0.003", places[1]))
    names = [one["name"] for one in Drawn(page_of(tmp_path, *places)).charts["lr"]["data"]]
    assert names == ["a/run", "b/run"]


def test_runs_on_other_text_are_compared_in_bits_per_byte(tmp_path):
    places = [write_run(tmp_path / name, floored(text=name)) for name in ("a", "b")]
    text = page_of(tmp_path, *places)
    assert "The loss is drawn in bits per byte." in text
    assert Drawn(text).charts["loss"]["layout"]["meta"]["is_bits"]
    assert "<td>1.0050</td>" in text  # of the validation in the table
    write_run(places[1], floored(text="a"))
    text = page_of(tmp_path, *places)
    assert "do not compare" not in text
    assert not Drawn(text).charts["loss"]["layout"]["meta"]["is_bits"]
    write_run(places[1], [run_start(text=["c"]), step_line(1)])
    assert "Not all of them record bits per byte." in page_of(tmp_path, *places)


def test_the_controls_change_all_charts_and_are_kept_in_the_address(tmp_path):
    place = write_run(tmp_path / "run", floored())
    with shown(tmp_path, place) as page:
        titles = "layout.xaxis.title.text"
        assert (of(page, "loss", titles), of(page, "lr", titles)) == ("step", "step")
        before = named(page, "loss", "loss")
        page.get_by_label("x axis").select_option("tokens")
        assert (of(page, "loss", titles), of(page, "lr", titles)) == ("tokens", "tokens")
        assert named(page, "loss", "validation")["x"] == [10000, 20000, 30000, 40000]
        page.get_by_label("x axis").select_option("time")
        assert of(page, "loss", titles) == "time, s"
        assert named(page, "loss", "validation")["x"] == pytest.approx([10, 20, 30, 40])
        page.get_by_role("combobox", name="Loss").select_option("bits")
        assert named(page, "loss", "validation")["y"][-1] == pytest.approx(3.015 / 3)
        assert named(page, "loss", "zlib of the held-out text")["y"] == pytest.approx([2.334] * 2)
        bits = named(page, "loss", "loss")["y"]
        assert bits == pytest.approx([nats / 4 / math.log(2) for nats in before["y"]])
        expect(page.locator("#loss .unit")).to_have_text("bits per byte")
        page.get_by_label("Smoothing").select_option("ema")
        page.get_by_label("EMA weight").fill("0.5")
        smooth = named(page, "loss", "loss, EMA 0.5")["y"]
        assert smooth[:2] == pytest.approx([bits[0], (bits[0] / 4 + bits[1] / 2) / 0.75])
        assert any("EMA" in name for name in of(page, "grad_norm", "data.map(one => one.name)"))
        page.get_by_label("y axis").select_option("log")
        assert (of(page, "loss", "layout.yaxis.type"), of(page, "lr", "layout.yaxis.type")) == (
            *("log", "log"),
        )
        assert of(page, "phases", "layout.yaxis.type") != "log"
        kept = page.url
        page.reload()
        assert page.url == kept
        assert named(page, "loss", "loss, EMA 0.5")["y"] == pytest.approx(smooth)
        expect(page.get_by_label("x axis")).to_have_value("time")
        page.get_by_role("button", name="Reset", exact=True).click()
        expect(page.get_by_label("x axis")).to_have_value("step")
        assert named(page, "loss", "loss") == before
        assert "#" not in page.url


@pytest.mark.long
def test_the_time_of_lost_and_resumed_steps_is_their_own(tmp_path):
    place = write_run(tmp_path / "run", crashed_and_resumed())
    with shown(tmp_path, place, hash="#x=time") as page:
        assert named(page, "loss", "lost")["x"] == pytest.approx([n / 10 for n in range(10, 17)])
        bars = of(page, "phases", "data[0]")
        left = [x + offset for x, offset in zip(bars["x"], bars["offset"], strict=True)]
        assert (bars["x"][9], left[10], bars["x"][10]) == pytest.approx((1.0, 1.6, 2.7))


def test_a_chart_has_one_stop_for_the_keyboard_and_its_values_as_a_file(tmp_path):
    place = write_run(tmp_path / "run", floored())
    with shown(tmp_path, place) as page:
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the charts")).to_be_focused()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "curves"
        stops = page.evaluate(
            """[...document.querySelectorAll("figure")].map(one => [...one.querySelectorAll("*")]
                .filter(inner => inner.tabIndex >= 0 && inner.checkVisibility()).length)"""
        )
        assert {*stops} == {1}
        summary = page.locator("#loss summary")
        summary.focus()
        assert summary.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        table = page.get_by_role("region", name="Values of Loss").get_by_role("table")
        expect(table.get_by_role("columnheader").first).to_have_text("step")
        expect(table.get_by_role("rowheader").first).to_have_text("1")
        expect(page.get_by_role("img", name="Learning rate")).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("link", name="CSV of Loss").click()
        assert download.value.suggested_filename == "loss.csv"
        with open(download.value.path(), newline="") as file:
            rows = [*csv.DictReader(file)]
        assert [float(row["step"]) for row in rows] == [*range(1, 401)]
        assert float(rows[-1]["loss"]) == pytest.approx(3.015)
        assert float(rows[-1]["validation, bits per byte"]) == pytest.approx(1.005)
        assert rows[0]["validation"] == ""


def test_the_headings_are_in_order_and_the_settings_are_searched(tmp_path):
    place = write_run(tmp_path / "run", floored())
    (place / "config.yaml").write_text(CONFIGURATION.format(0.003, "out"))
    with shown(tmp_path, place) as page:
        levels = page.evaluate(
            "[...document.querySelectorAll('h1, h2, h3, h4')].map(one => Number(one.tagName[1]))"
        )
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))
        page.get_by_label("Filter").fill("RATE")
        expect(page.locator("#settings tbody tr:visible")).to_have_count(1)
        expect(page.locator("#found")).to_have_text("1 of 3")
        page.get_by_label("Filter").fill("")
        expect(page.locator("#settings tbody tr:visible")).to_have_count(2)


@pytest.mark.parametrize("count", [1, 3])
def test_a_phone_shows_charts_beside_their_legends(tmp_path, count):
    places = [write_run(tmp_path / f"a_long_name_of_a_run_{n}", floored()) for n in range(count)]
    look: dict[str, Any] = {"is_mobile": True, "has_touch": True}
    with shown(tmp_path, *places, width=390, **look) as page:
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        sizes = page.evaluate(
            """[...document.querySelectorAll(".plot")].map(one => [one.closest("figure").id,
                one._fullLayout.yaxis._length])"""
        )
        assert [one for one in sizes if one[1] < 220] == []
        texts = page.evaluate(
            """[...document.querySelectorAll("#loss .annotation-text")].map(one =>
                [one.textContent, one.getBoundingClientRect().top])"""
        )
        names = [one for one in texts if one[0] in FLOORS]
        assert len(names) == (5 if count == 1 else 0)
        heights = sorted(top for _, top in names)
        assert all(b - a > 11 for a, b in pairwise(heights))


def test_without_script_a_page_has_its_figures_and_tables(tmp_path):
    place = write_run(tmp_path / "run", floored())
    with shown(tmp_path, place, java_script_enabled=False) as page:
        expect(page.locator("noscript p")).to_have_text("The charts need JavaScript.")
        page.locator("#loss summary").click()
        expect(page.get_by_role("region", name="Values of Loss")).to_be_visible()
        expect(page.locator(".plot:visible, #controls:visible, .csv:visible")).to_have_count(0)


def test_a_folder_that_is_no_run_has_no_charts(tmp_path):
    page = Drawn(page_of(tmp_path, write_run(tmp_path / "run", [])))
    assert page.charts == {}
    assert read_runs([tmp_path / "run"])[0].starts == []
