"""`minimind report`: the page as a file, the summary, what is refused, and a browser's view."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

import minimind.train as training
from minimind.cli.main import main
from minimind.errors import StorageError
from minimind.report import page
from minimind.report.page import GENERATOR, write_report
from tests.browser import installed_browser
from tests.conftest import ROOT, SMALL, Trained
from tests.report.made import (
    Drawn,
    crashed_and_resumed,
    made_profile,
    page_of,
    run_start,
    step_line,
    verdict_line,
    write_run,
)

EVIL = "<script>alert('x')</script>\"&"
CONFIGURATION = """\
# The flags of this run; --config reads them back. Behind each: where it came from.
max_steps: 40  # --max_steps
learning_rate: 0.001  # run.yaml
compile: 'off'  # --compile
data_path: [one.jsonl,
  two.jsonl]  # --data_path
seed: 42  # default
"""


def refused(capsys: pytest.CaptureFixture[str], status: int, *words: object) -> str:
    assert main(["report", *map(str, words)]) == status
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", crashed_and_resumed())


def test_without_out_the_summary_of_each_run_is_printed(capsys, run, tmp_path):
    other = write_run(tmp_path / "other", [run_start(), "?\n", step_line(1)])
    assert main(["report", str(run), str(other / "metrics.jsonl")]) == 0
    output = capsys.readouterr().out
    assert output.index(str(other)) < output.index("  unread      1 line of metrics.jsonl")
    assert output.index(str(run)) < output.index(str(other))
    assert "step 40 of 40" in output
    assert "step 1 of 40" in output


def test_a_terminal_of_ascii_gets_ascii(monkeypatch, run):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["report", str(run)]) == 0
    stream.seek(0)
    assert "@@" in stream.read()


def test_a_folder_whose_name_is_not_utf8_is_reported_with_its_name_escaped(monkeypatch, tmp_path):
    run = write_run(tmp_path / "y\udcff", crashed_and_resumed())
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["report", str(run)]) == 0
    assert main(["report", str(run), "--out", str(tmp_path / "a.html")]) == 0
    stream.seek(0)
    assert r"y\udcff" in stream.read()
    assert r"y\udcff" in (tmp_path / "a.html").read_text()


def test_the_same_run_twice_is_a_mistake(capsys, run):
    assert "given twice" in refused(capsys, 2, run, f"{run}/../run")


def test_what_lies_at_out_stays_unless_it_is_a_report_and_force_is_given(capsys, run, tmp_path):
    out = tmp_path / "deep" / "report.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    capsys.readouterr()
    assert "--force to replace it" in refused(capsys, 2, run, "--out", out)
    out.write_text(f"<!doctype html>{GENERATOR}earlier one")
    assert main(["report", str(run), "--out", str(out), "--force"]) == 0
    assert "earlier one" not in out.read_text()
    capsys.readouterr()
    metrics = run / "metrics.jsonl"
    before = metrics.read_bytes()
    for taken, reason in ((metrics, "replaces nothing else"), (run, "is a folder")):
        assert reason in refused(capsys, 2, run, "--out", taken, "--force")
    assert metrics.read_bytes() == before


def test_a_full_disk_is_reported_and_leaves_nothing(capsys, monkeypatch, run, tmp_path):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(tmp_path.iterdir())
    output = refused(capsys, 5, run, "--out", tmp_path / "report.html")
    assert "No space left" in output
    assert "give another --out" in output
    assert sorted(tmp_path.iterdir()) == before


def test_an_out_under_a_file_is_refused(capsys, run, tmp_path):
    (tmp_path / "file").write_text("")
    assert "E_STORAGE" in refused(capsys, 5, run, "--out", tmp_path / "file" / "report.html")


def test_a_run_that_is_done_leaves_its_report(trained: Trained):
    page = (trained.run / "report.html").read_text()
    (line,) = [x for x in (trained.run / "metrics.jsonl").read_text().splitlines() if "exit" in x]
    assert json.loads(line)["code"] == "DONE"
    assert "Step 6 of 6" in page


@pytest.mark.parametrize("full", [True, False])
def test_a_report_that_cannot_be_written_does_not_fail_the_run(
    capsys, monkeypatch, trained, tmp_path, full
):
    def no_report(places: Sequence[Path], out: Path, remedy: str) -> int:
        if not full:
            (out.parent / "metrics.jsonl").rename(tmp_path / "taken_away")
            return write_report(places, out, remedy)
        raise StorageError(f"{out}: No space left on device; {remedy}")

    monkeypatch.setattr(page, "write_report", no_report)
    train: Any = training  # a package that is called like a function
    places = {"data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    out = tmp_path / "out"
    assert train({**SMALL, **places, "max_steps": 1}, out_dir=str(out)) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("no report: ")]
    assert ("No space left" if full else "metrics.jsonl") in line
    assert not (out / "report.html").exists()


def test_the_page_needs_nothing_from_elsewhere(run, tmp_path):
    text = page_of(tmp_path, run)
    assert "default-src 'none'" in text
    assert text.count("<script") == 3
    assert text.count(get_plotlyjs()) == 1
    own = text.replace(get_plotlyjs(), "")  # its addresses are those of maps, which the page lacks
    assert not re.search(r"https?:|\bsrc=|\bhref=\"(?!#)|url\(|@import", own)


def test_text_from_a_run_is_never_markup(tmp_path):
    place = tmp_path / "<b>&'run"
    sample = {"event": "sample", "step": 1, "number": 0, "prompt": EVIL, "text": EVIL}
    failed = {"event": "exit", "step": 1, "status": 3, "code": EVIL, "reason": EVIL}
    changed = {"event": "run_changed", "changes": [EVIL]}
    rejected = {"event": "checkpoint_rejected", "path": EVIL, "file": EVIL, "reason": EVIL}
    facts = dict.fromkeys(("dtype", "device", "backend", "commit"), EVIL)
    start = run_start(**facts, versions={EVIL: EVIL})
    write_run(place, [start, rejected, changed, step_line(1), sample, failed])
    (place / "config.yaml").write_text(f"wandb_run_name: {EVIL}  # {EVIL}\n")
    (place / "ds_config.resolved.json").write_text(json.dumps({EVIL: {EVIL: EVIL}}))
    other = write_run(tmp_path / "other", [run_start(), step_line(1)])
    for places in ((place,), (place, other)):
        text = page_of(tmp_path, *places)
        assert EVIL not in text
        assert "<script>alert" not in text
        assert Drawn(text).tags.count("script") == 3
        assert "<b>&'" not in text


def test_the_configuration_is_shown_with_its_sources(run, tmp_path):
    (run / "config.yaml").write_text(CONFIGURATION)
    (run / "ds_config.resolved.json").write_text('{"zero_optimization": {"stage": 2}}')
    text = page_of(tmp_path, run)
    row = "<td><code>{}</code></td>"
    for expected in (
        ("learning_rate", "0.001", "run.yaml"),
        ("compile", "off", "--compile"),
        ("data_path", "[one.jsonl, two.jsonl]", "--data_path"),
    ):
        assert "".join(map(row.format, expected)) in text.replace(' class="flag"', "")
    assert "<span>seed <code>42</code></span>" in text
    assert "<span>zero_optimization.stage <code>2</code></span>" in text


def test_several_runs_are_compared(run, tmp_path):
    other = write_run(tmp_path / "other", [run_start(), *(step_line(n) for n in range(1, 31))])
    (run / "config.yaml").write_text("seed: 1  # --seed\nout_dir: a  # --out_dir\n")
    (other / "config.yaml").write_text("seed: 2  # --seed\nout_dir: b  # --out_dir\n")
    text = page_of(tmp_path, run, other)
    page = Drawn(text)
    assert page.points("loss", "run loss")[-1, 0] == pytest.approx(40)
    assert page.points("loss", "other loss")[-1, 0] == pytest.approx(30)
    assert "<td><code>seed</code></td><td><code>1</code></td><td><code>2</code></td>" in text
    assert "<code>out_dir</code>" not in text
    assert {"phases", "phases1"} <= set(page.charts)


def test_runs_whose_steps_differ_in_size_are_compared_by_tokens(run, tmp_path):
    start = run_start(tokens_per_step=400)
    lines = (step_line(n, tokens=400 * n) for n in range(1, 11))
    text = page_of(tmp_path, run, write_run(tmp_path / "other", [start, *lines]))
    page = Drawn(text)
    assert page.charts["loss"]["layout"]["xaxis"]["title"]["text"] == "tokens"
    for name in ("run loss", "other loss"):
        assert page.points("loss", name)[-1, 0] == pytest.approx(4000, abs=1)


@pytest.mark.parametrize(
    "lines",
    [[], [run_start()], [run_start(), step_line(1)], [run_start(), step_line(1, loss=None)]],
)
def test_a_run_with_little_to_draw_has_a_page(tmp_path, lines):
    text = page_of(tmp_path, write_run(tmp_path / "run", lines))
    assert "nan" not in text.split("<script")[0].lower()
    Drawn(text)


def test_whatever_a_line_holds_there_is_a_page(tmp_path, request):
    odd = [None, "x", [], {}, [1], {"a": 1}, -1, 0, 1e308, 10**400, True, EVIL, 1e-320, 5e98, 0.5]
    for seed in range(40 if request.config.getoption("--long") else 8):
        draw = random.Random(seed)
        lines = crashed_and_resumed()
        lines[3] |= {"expert_load": [0.5, 0.5], "expert_load_range": [0.9, 1.1], "comm_ms": 3.0}
        lines.insert(5, {"event": "profile", "step": 5, "ranks": [{"rank": 0, "step_ms": 4}]})
        lines.insert(5, {"event": "sample", "step": 5, "number": 0, "prompt": "a", "text": "b"})
        lines[5:5] = [made_profile(5), made_profile(5), verdict_line("x", 5)][: seed % 4]
        for _ in range(draw.choice([1, 5, 40])):
            line = draw.choice(lines)
            name = draw.choice([*line])
            line[name] = draw.choice(odd)
            if draw.random() < 0.2 and len(line) > 1:
                del line[name]
        place = write_run(tmp_path / "run", lines)
        assert main(["report", str(place)]) == 0
        text = page_of(tmp_path, place)
        assert "nan" not in text.split("<script")[0], seed
        assert "loss" in Drawn(text).charts, seed


BY_RANK: dict[str, list[float]] = {
    **{"forward_ms": [10.0, 12.0, 50.0], "backward_ms": [70.0, 69.0, 30.0]},
    **{"step_ms": [90.0, 91.0, 90.5], "comm_ms": [41.0, 40.0, 2.0]},
    "memory_mib": [300.0, 420.0, 2048.0],
}


def test_ranks_are_compared_by_their_least_median_and_largest(tmp_path, capsys):
    profile = {"event": "profile", "step": 1, "ranks": BY_RANK}
    place = write_run(tmp_path / "run", [run_start(), step_line(1), profile])
    text = page_of(tmp_path, place)
    for cells in (
        ("forward", "10 ms", "12 ms", "50 ms", "rank 2"),
        ("step", "90 ms", "90.5 ms", "91 ms", "rank 1"),
        ("of it comm.", "2 ms", "40 ms", "41 ms", "rank 0"),
        ("memory peak", "300 MiB", "420 MiB", "2.0 GiB", "rank 2"),
    ):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    capsys.readouterr()
    assert main(["report", str(place)]) == 0
    assert (
        "  ranks       forward 10 ms to 50 ms (rank 2), comm. 2 ms to 41 ms (rank 0),"
        " memory 300 MiB to 2.0 GiB (rank 2)\n"
    ) in capsys.readouterr().out


def test_one_rank_is_not_compared_with_itself(tmp_path, capsys):
    alone = {"event": "profile", "step": 2, "ranks": {k: v[:1] for k, v in BY_RANK.items()}}
    place = write_run(tmp_path / "run", [run_start(), step_line(1), step_line(2), alone])
    assert "<h2>Ranks" not in page_of(tmp_path, place)
    several = {"event": "profile", "step": 1, "ranks": BY_RANK}  # before it went on in one process
    write_run(place, [run_start(), step_line(1), several, step_line(2), alone])
    assert "<h2>Ranks, up to step 1</h2>" in page_of(tmp_path, place)


def test_torch_is_not_imported_and_plotly_only_to_write_a_page(run, tmp_path):
    code = (
        "import sys; import minimind.report.page; from minimind.cli.main import main\n"
        "for words in (sys.argv[1:2], sys.argv[1:]):\n"
        "    main(['report', *words])\n"
        "    assert 'torch' not in sys.modules\n"
        "    assert ('plotly' in sys.modules) == ('--out' in words)\n"
    )
    words = [sys.executable, "-c", code, str(run), "--out", str(tmp_path / "report.html")]
    assert subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def in_browser(page: Path, hash: str = "", *options: str) -> str:
    """The document that a browser makes of a page; the test is skipped where there is none."""
    browser = installed_browser()
    words = "--headless --no-sandbox --disable-gpu --virtual-time-budget=4000 --dump-dom".split()
    words += [f"--user-data-dir={page.parent}/p", *options, f"file://{page}{hash}"]
    done = subprocess.run([browser, *words], capture_output=True, text=True, timeout=120)
    if GENERATOR not in done.stdout:  # a stub, or confined to another folder
        pytest.skip(f"{browser} does not open a file here: {done.stderr[-200:]}")
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def test_a_browser_draws_every_chart_and_reads_the_values_at_a_step(run, tmp_path):
    charts = Drawn(page_of(tmp_path, run)).charts
    seen = in_browser(tmp_path / "report.html", "#step=33")
    assert len(re.findall(r'class="main-svg"', seen)) >= len(charts) == 6
    boxes = re.findall(r'<g class="hoverlayer">(.*?)</svg>', seen, flags=re.DOTALL)
    read = [text for box in boxes for text in re.findall(r">([^<>]+)<", box)]
    assert read.count("step 33") == len(charts)
    for expected in ("loss : 4.8750", "learning rate : 0.0000303", "forward : 29ms"):
        assert expected in read, read
    assert "crashed at 16" in seen
