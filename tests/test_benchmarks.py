"""Benchmarks that nobody runs for months: that they run, and that their figures belong together."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu,
    mup_transfer,
    overhead,
    race_page,
    racers,
    record,
    table,
    throughput,
    time_to_loss,
)
from benchmarks.gpu import NAMES
from benchmarks.overhead import KINDS, interval
from benchmarks.stages import PHASES, STAGES
from minimind.cli.main import main as minimind
from tests.conftest import ROOT

PLACE: dict[str, Any] = {
    "env": {**os.environ, "OMP_NUM_THREADS": "1"},
    "cwd": ROOT,
    "capture_output": True,
    "text": True,
}


@pytest.mark.long
@pytest.mark.launch
def test_the_benchmark_of_stages_has_each_at_one_process(tmp_path: Path):
    out, text = tmp_path / "stages.json", tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} is a number"}) + "\n" for i in range(3000)))
    small = "--model tiny --rows 2 --rounds 3 --processes 1 --max_seq_len 64"
    command = [sys.executable, "-m", "benchmarks.stages", str(text), *small.split()]
    done = subprocess.run([*command, "--out", str(out)], **PLACE)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    table = json.loads(out.read_text())["table"]
    assert [*table] == [f"1 x 2 rows, {name}" for name in STAGES]
    for name, row in table.items():
        assert name in done.stdout
        assert row["tokens_per_second"] == pytest.approx(2 * 64 * 1e3 / row["ms"])
        assert all(row[phase] > 0 for phase in PHASES)


@pytest.mark.long
@pytest.mark.launch
def test_the_benchmark_for_gpus_runs_whole_on_a_cpu(tmp_path: Path):
    out, small = tmp_path / "gpu.json", "--models tiny --rows 3 --max_seq_len 64"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", *small.split()),
            *("--steps", "2", "--rounds", "3", "--out", str(out)),
        ],
        **PLACE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    output = json.loads(out.read_text())
    peak = output["device"]["peak_tflops"]
    assert peak["vendor"] is None
    assert peak["measured"] > 0
    (found,) = output["found"].values()
    assert [*found["table"]] == [*found["turns"]] == list(NAMES)
    for name, row in found["table"].items():
        assert name in done.stdout
        assert len(found["turns"][name]) == 3
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(3 * 64)
        assert row["mfu"]["vendor"] is None
        per_token = row["mfu"]["measured"] * peak["measured"] * 1e12 / row["tokens_per_second"]
        # Six for each weight that multiplies, and attention's 12 x layers x dim x T.
        assert per_token == pytest.approx(6 * 2_361_024 + 12 * 4 * 192 * 64, rel=2e-3)
        assert row["peak_mib"] > 100


def test_a_model_whose_process_ends_costs_the_others_no_figures(tmp_path, monkeypatch, capsys):
    out, minutes = tmp_path / "gpu.json", []

    def of_model(model: str, rows: int, given: Any, folder: Path, peaks: Any, share: float) -> Any:
        minutes.append(share)
        if model == "104m":
            raise SystemExit("ours, ZeRO-2, compiled ended: out of memory")
        row = {"seconds": 1.0, "tokens_per_second": 2.0, "speed": 1.0, "peak_mib": 3.0}
        return {"rows": rows, "table": {NAMES[0]: {**row, "mfu": dict.fromkeys(peaks)}}}

    monkeypatch.setattr(gpu, "of_model", of_model)
    monkeypatch.setattr(gpu, "write_corpus", lambda words: None)
    monkeypatch.setattr(gpu, "measured_peak", lambda device: 1.0)
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--device", "cpu", "--minutes", "6", "--out", str(out)]
    )
    with pytest.raises(SystemExit, match=r"^no figures of 104m; out of memory, --rows"):
        gpu.main()
    assert [*json.loads(out.read_text())["found"]] == ["26m", "0.4b"]
    assert "104m: ours, ZeRO-2, compiled ended: out of memory" in capsys.readouterr().out
    assert minutes == pytest.approx([2, 3, 6], abs=0.5)


@pytest.mark.parametrize("steps", [0, 5, 6, 8])
def test_no_figures_are_reported_of_a_race_that_was_stopped(
    steps: int, tmp_path, monkeypatch, capsys
):
    """A signal ends the run as any other, saved and without an error, wherever it is."""
    out = tmp_path / "overhead.json"

    def stopped(race: Any, given: Any, folder: Path) -> None:
        race.pairs = [
            {"bare": 1.0, "loop": 2.0, "kind": KINDS[step % len(KINDS)]} for step in range(steps)
        ]

    monkeypatch.setattr(overhead, "run", stopped)
    monkeypatch.setattr(sys, "argv", ["overhead", "text.jsonl", "--pairs", "3", "--out", str(out)])
    with pytest.raises(
        SystemExit, match=rf"^the run ended after {steps} of 9 steps: there are no figures"
    ):
        overhead.main()
    assert not out.exists()
    assert not capsys.readouterr().out


def test_a_race_that_was_not_stopped_has_its_figures(tmp_path, monkeypatch):
    out, took = tmp_path / "overhead.json", {"as ever": 2.5, "hooks": 2.2, "neither": 2.0}

    def whole(race: Any, given: Any, folder: Path) -> None:
        race.pairs = [
            {"bare": 1.0, "loop": took[kind] + more, "kind": kind}
            for more in (-1e-3, 0.0, 1e-3)
            for kind in race.kinds
        ]

    monkeypatch.setattr(overhead, "run", whole)
    requested = ["overhead", "text.jsonl", "--pairs", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", requested)
    overhead.main()
    report = json.loads(out.read_text())
    found = report["found"]
    assert found["loop_over_engine_ms"] == pytest.approx(1500)
    assert found["loop_over_engine_ms, 95 %"] == pytest.approx([1499, 1501])
    assert found["hooks_ms"] == pytest.approx(200)
    assert found["hooks_ms, 95 %"] == pytest.approx([200, 200])
    assert found["hooks_share"] == pytest.approx(0.1)
    assert found["profile_ms"] == pytest.approx(-300)
    assert report["microseconds_of_pairs"]["hooks"][1] == [1_000_000, 2_200_000]

    monkeypatch.setattr(sys, "argv", [*requested, "--hooks_only"])
    overhead.main()
    report = json.loads(out.read_text())
    assert report["found"]["hooks_share"] == pytest.approx(0.1)
    assert not {"bare_ms", "profile_ms", "loop_over_engine_ms"} & {*report["found"]}
    assert report["microseconds_of_pairs"]["neither"][1] == [2_000_000]


def test_the_interval_holds_the_median_as_often_as_promised():
    draws = random.Random(5)
    held = 0
    for _ in range(2000):
        low, high = interval([draws.expovariate(1.0) for _ in range(60)])
        held += low <= math.log(2) <= high
    assert 0.94 <= held / 2000 <= 0.985  # ranks are whole: a little more than asked for


def test_results_state_whether_the_cpu_multiplies_bf16(tmp_path, monkeypatch):
    for has in (True, False):
        monkeypatch.setattr(record, "HAS_BF16", has)
        record.record(tmp_path / "of.json", "of", None)
        assert json.loads((tmp_path / "of.json").read_text())["machine"]["bf16"] is has


def test_every_contender_of_a_race_compiles_again(tmp_path, monkeypatch):
    """A cache of the race before hides what compiling takes: 120 to 240 MiB of ours."""
    caches, text = [], tmp_path / "text.jsonl"
    text.write_text("{}")

    def started(command: list[str], env: dict[str, str], **more: Any) -> Any:
        caches.append(Path(env["TORCHINDUCTOR_CACHE_DIR"]))
        folder = Path(command[8])
        assert (folder / "text.jsonl").exists()
        assert caches[-1].is_relative_to(folder)  # which lasts as long as the race
        assert " " not in str(caches[-1])
        return SimpleNamespace(wait=lambda: 0)

    def race(starts: Any, *more: Any) -> Any:
        for start in starts.values():
            start().close()
        raise SystemExit("seen")

    monkeypatch.setattr(throughput.subprocess, "Popen", started)
    monkeypatch.setattr(throughput, "race", race)
    monkeypatch.setattr(sys, "argv", ["throughput", str(text)])
    with pytest.raises(SystemExit, match="seen"):
        throughput.main()
    assert len({*caches}) == len(caches) >= 6


@pytest.mark.parametrize("bf16", [True, False])
def test_the_table_states_whose_figures_they_are(bf16: bool, tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    newest = max((ROOT / "benchmarks" / "results").glob("throughput-*.json"))
    report = json.loads(newest.read_text())
    report["machine"] = {"cpus": 3, "processor": "Abacus", "bf16": bf16}
    report["load"] = {"before": [0.25, 0, 0], "after": [2.5, 0, 0]}
    report["command"] = "python -m benchmarks.throughput kjv.jsonl --rounds 9 --out of.json"
    (results / newest.name).write_text(json.dumps(report))
    monkeypatch.setattr(table, "ROOT", tmp_path)
    last = table.table().splitlines()[-1]
    assert f"(Abacus, {'with' if bf16 else 'without'} instructions for bf16)" in last
    assert "load 0.2 before and 2.5 after" in last
    assert "rounds, `python -m benchmarks.throughput kjv.jsonl` (`benchmarks/results/" in last


def raced_run(name: str, bits: list[float], rate: float = 1e-3) -> dict[str, Any]:
    """Ten minutes with a point after every second one."""
    curve = [
        {"step": 10 * n, "tokens": 1000 * n, "seconds": 120.0 * n, "bits": value}
        for n, value in enumerate(bits, 1)
    ]
    return {"name": name, "rate": rate, "seed": 0, "wall": 600.0, "curve": curve}


def test_the_race_interpolates_between_its_points_and_takes_medians(tmp_path: Path):
    slow = [raced_run("slow", [3.0, 2.5, 2.2, 2.1, 2.0 + seed / 100]) for seed in range(3)]
    fast = [raced_run("fast", [2.21 - seed / 100, 2.0, 1.9, 1.8, 1.7]) for seed in range(3)]
    assert time_to_loss.bits_at(slow[0], 180) == pytest.approx(2.75)
    assert time_to_loss.needed(slow[0], 2.35) == pytest.approx(300)
    assert time_to_loss.needed(slow[0], 3.5) == 120  # nothing is known before the first point
    assert time_to_loss.needed(slow[0], 1.9) == math.inf
    found = time_to_loss.summary({"slow": slow, "fast": fast}, 10)
    assert found["slow"]["bits"]["10"] == {"median": 2.01, "range": [2.0, 2.02]}
    assert found["slow"]["bits"]["5"]["median"] == pytest.approx(2.35)
    # 2.01, the median at the end, is crossed by the fast one of seed 1 at 120 + 120 * 19 / 20 s.
    both = {"seconds": pytest.approx(600 / 234), "tokens": pytest.approx(5000 / 1950)}
    assert found["fast"]["sooner"]["slow"] == both
    assert found["slow"]["sooner"]["fast"] == {"seconds": 0, "tokens": 0}
    text = time_to_loss.shown({"ours, Muon": found["fast"], "slow": found["slow"]}, ["slow"])
    assert "2.56 times sooner at the final value of slow" in text
    page = tmp_path / "race.html"
    race_page.write_page(page, {"slow": slow, "fast": fast}, found, "Two of them.")
    assert "2.0000 to 2.0200" in page.read_text()


def test_rows_of_the_race_hold_the_documents(tmp_path: Path, corpus: Path):
    data = tmp_path / "data"
    words = f"prepare {corpus} --out {data} --vocab_size 600 --val_fraction 0.1"
    assert minimind(words.split()) == 0
    tokens, eos = racers.all_tokens(data)
    inputs, targets = racers.padded_rows(data, 16)
    assert len(inputs) == (tokens == eos).sum()
    assert (inputs[:, 0] == eos).all()
    first = tokens[: tokens.tolist().index(eos) + 1][:16]
    assert targets[0, : len(first)].tolist() == first.tolist()
    assert inputs[0, 1 : len(first)].tolist() == first[:-1].tolist()
    assert ((targets == -100) | (targets < 600)).all()
    inputs, targets = racers.packed_rows(data, 16)
    joined = torch.cat([inputs[:, :1], targets], 1).flatten()
    assert joined.tolist() == tokens[: len(joined)].tolist()


def test_times_of_the_race_are_those_of_the_lines_without_saving(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    steps = {"event": "step", "step_ms": 500.0}
    lines = [
        {**steps, "step": 10, "time": 105.0, "checkpoint_ms": 0.0, "tokens": 80},
        {"event": "checkpoint_saved", "step": 10},
        {**steps, "step": 20, "time": 113.0, "checkpoint_ms": 200.0, "tokens": 160},  # a mean
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert racers.times_of(metrics, {10, 20}) == {
        10: {"seconds": 5.0, "tokens": 80},
        20: {"seconds": 11.0, "tokens": 160},
    }


def test_what_a_race_found_is_of_one_command_and_data(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "manifest.json").write_text("{}")

    def keys(rows: int = 2, flags: str = "--qk_norm") -> list[str]:
        race = time_to_loss.Race(tmp_path, "tiny", rows, {"a b": flags, "a-b": ""})
        rates = [race.key(racers.DEFAULT, "--lr", str(rate)) for rate in (5e-4, 8e-4)]
        return [*rates, race.key(racers.MUON), race.key("a b"), race.key("a-b")]

    first = keys()
    assert len({*first}) == 5
    assert keys() == first
    assert not {*keys(rows=4)} & {*first}
    assert [a == b for a, b in zip(keys(flags=""), first, strict=True)][3] is False
    (data / "manifest.json").write_text('{"documents": 2}')
    assert not {*keys()} & {*first}


@pytest.mark.long
@pytest.mark.launch
def test_the_race_runs_whole_and_does_nothing_twice(tmp_path: Path, corpus: Path):
    out, folder = tmp_path / "race.json", tmp_path / "race"
    names = [racers.PACKED, racers.TRAINER, racers.MUON]
    line = f"{corpus} --folder {folder} --minutes 0.3 --search_minutes 0.03 --seeds 1 --rows 2"
    more = ["--rates", "1e-3", "2e-3", "--only", *names, "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.time_to_loss", *line.split(), *more]
    command += ["--page", str(tmp_path / "race.html")]
    done = subprocess.run(command, **PLACE)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    found = json.loads(out.read_text())
    assert list(found["table"]) == names
    runs = [*found["search"], *(run for own in found["runs"].values() for run in own)]
    settings = [(run["name"], run["rate"], run["curve"][-1]["step"]) for run in runs]
    assert len({*settings}) == len(settings) == 9
    for run in runs:
        pace = found["pace"][run["name"]]
        assert len(run["curve"]) == time_to_loss.POINTS
        end = run["curve"][-1]["seconds"]
        assert end == pytest.approx(60 * run["minutes"], abs=10 * pace["step"] + pace["start"])
        assert run["curve"][-1]["tokens"] == pytest.approx(run["curve"][-1]["step"] * 2 * 256, 0.01)
    again = subprocess.run(command, **PLACE)
    assert again.returncode == 0
    assert json.loads(out.read_text())["runs"] == found["runs"]


def test_the_best_rate_of_each_width_is_marked_and_a_run_that_diverged_is_left_out():
    by_rate = {1e-3: 3.5, 2e-3: 3.25, 4e-3: math.inf}
    row = mup_transfer.row_of(64, by_rate, [*by_rate])
    assert row.split() == ["64", "3.5000", "3.2500", "inf", "best", "0.002"]
    losses = {"mup": {64: by_rate}, "plain": {64: by_rate, 128: {1e-3: 3.0, 2e-3: 4.0}}}
    page = mup_transfer.page_of(losses, steps=10)
    assert page.count("width 64, best 0.002") == 2
    assert page.count("width 128, best 0.001") == 1
