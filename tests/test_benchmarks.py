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

from benchmarks import gpu, mup_transfer, overhead, record, table, throughput
from benchmarks.gpu import NAMES
from benchmarks.overhead import KINDS, interval
from benchmarks.stages import PHASES, STAGES
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


def test_the_best_rate_of_each_width_is_marked_and_a_run_that_diverged_is_left_out():
    by_rate = {1e-3: 3.5, 2e-3: 3.25, 4e-3: math.inf}
    row = mup_transfer.row_of(64, by_rate, [*by_rate])
    assert row.split() == ["64", "3.5000", "3.2500", "inf", "best", "0.002"]
    losses = {"mup": {64: by_rate}, "plain": {64: by_rate, 128: {1e-3: 3.0, 2e-3: 4.0}}}
    page = mup_transfer.page_of(losses, steps=10)
    assert page.count("width 64, best 0.002") == 2
    assert page.count("width 128, best 0.001") == 1
