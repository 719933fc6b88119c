"""Real sweeps, killed in the middle and finished by the same command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.conftest import ROOT

FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "device": "cpu", "deepspeed_config": "none", "val_fraction": 0.05},
    **{"eval_rows": 8, "eval_interval": 25, "save_interval": 25, "log_interval": 25},
}
PATIENCE = 300.0  # seconds


def write(place: Path, corpus: Path, trials: int, steps: int, **more: Any) -> Path:
    places = {"data_path": str(corpus), "cache_dir": str(place / "cache"), "max_steps": steps}
    dimensions = {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "batch_size": [2, 4]}
    content = {"flags": {**FLAGS, **places}, "dimensions": dimensions, "trials": trials, **more}
    path = place / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(path: Path, out: Path, command: str = "sweep") -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "minimind.cli.main", *command.split()]
    words += [str(path), "--out_dir", str(out)]
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
    return [line for line in lines if line["event"] == name]


def wait_for_checkpoint(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not events(folder, "checkpoint_saved"):
        assert time.monotonic() < deadline, folder
        time.sleep(0.02)


def check_finished(sweep: subprocess.Popen[str], out: Path, trials: int) -> str:
    text, errors = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 0, errors
    assert errors == ""
    folders = sorted(path.name for path in out.glob("trial-*"))
    assert folders == [f"trial-{n:04d}" for n in range(trials)]
    assert (out / "sweep.html").stat().st_size > 1e6
    table = re.findall(
        r"^(trial-\d{4}) +([\d.]+) .* (done|pruned at step \d+)$", text, re.MULTILINE
    )
    assert sorted(name for name, *_ in table) == folders
    for name, metric, status in table:
        ends = events(out / name, "eval")
        assert float(metric) == pytest.approx(ends[-1]["val_bpb"], abs=1e-4)
        # 7: the end of a killed sweep's trial, which was pruned before it listened to signals.
        statuses = [end["status"] for end in events(out / name, "exit")]
        assert statuses[-1] in ((0,) if status == "done" else (75, 7))
    best = re.search(r"^best: (trial-\d{4})\n(minimind train .*)$", text, re.MULTILINE)
    assert best
    assert best[1] == table[0][0]
    return text


@pytest.mark.launch
@pytest.mark.long
def test_a_killed_sweep_goes_on_where_its_trial_was_saved(corpus: Path, tmp_path: Path):
    path, out = write(tmp_path, corpus, trials=3, steps=150), tmp_path / "out"
    sweep = start(path, out)
    wait_for_checkpoint(out / "trial-0001")
    sweep.kill()
    sweep.communicate()
    again = start(path, out)
    text = check_finished(again, out, 3)
    assert text.startswith("trial-0001: was interrupted, and continues\n")
    first, second = events(out / "trial-0001", "run_start")
    assert first["resume_from"] is None
    assert second["resume_from"]
    assert second["step"] > 0
    assert len(events(out / "trial-0000", "run_start")) == 1


@pytest.mark.launch
@pytest.mark.long
def test_twelve_trials_killed_twice_and_stopped_once(corpus: Path, tmp_path: Path):
    limits = {"pruner_startup_trials": 3}
    path, out = write(tmp_path, corpus, trials=12, steps=300, **limits), tmp_path / "out"
    for folder, number in (("0002", signal.SIGKILL), ("0005", signal.SIGTERM), ("0008", 9)):
        sweep = start(path, out)
        wait_for_checkpoint(out / f"trial-{folder}")
        sweep.send_signal(number)
        sweep.communicate(timeout=PATIENCE)
        assert sweep.returncode == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    text = check_finished(start(path, out), out, 12)
    assert "pruned at step" in text
    assert max(len(events(out / f"trial-{n:04d}", "run_start")) for n in range(12)) == 2


def trial_of(sweep: subprocess.Popen[str]) -> psutil.Process:
    (trial,) = psutil.Process(sweep.pid).children()
    return trial


@pytest.mark.launch
@pytest.mark.long
def test_a_trial_that_is_killed_or_suspended_alone_is_not_lost(corpus: Path, tmp_path: Path):
    path, out = write(tmp_path, corpus, trials=2, steps=300), tmp_path / "out"
    first = start(path, out)
    wait_for_checkpoint(out / "trial-0000")
    trial_of(first).kill()
    wait_for_checkpoint(out / "trial-0001")
    suspended = trial_of(first)
    suspended.suspend()
    first.kill()
    first.communicate()
    try:
        text, errors = start(path, out).communicate(timeout=PATIENCE)
        again = start(path, out)
    finally:
        suspended.kill()
    assert "trial-0001: was interrupted, and continues\n" in text
    assert f"is in use by process {suspended.pid} on " in errors
    assert "as before, which says nothing of its flags" in errors
    check_finished(again, out, 2)
    starts = [len(events(out / f"trial-{n:04d}", "run_start")) for n in range(2)]
    assert starts == [2, 2]


@pytest.mark.launch
@pytest.mark.long
def test_a_killed_scaling_run_goes_on_and_predicts_its_last_run(corpus: Path, tmp_path: Path):
    places = {"data_path": str(corpus), "cache_dir": str(tmp_path / "cache"), "batch_size": 4}
    content = {
        "flags": {**FLAGS, **places, "learning_rate": 3e-3},
        "sizes": [{"dim": dim} for dim in (8, 16, 24, 32)],
        "tokens": [128 * 100],
        "predict": {"size": {"dim": 40, "learning_rate": "2e-3"}, "tokens": 128 * 100},
    }
    path, out = tmp_path / "ladder.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(content))
    first = start(path, out, "scaling run")
    wait_for_checkpoint(out / "trial-0001")
    first.kill()
    first.communicate()
    again = start(path, out, "scaling run")
    text, errors = again.communicate(timeout=PATIENCE)
    assert (again.returncode, errors) == (0, "")
    assert "trial-0001: was interrupted, and continues\n" in text
    found = re.search(
        r"^prediction for dim 40 learning_rate 2e-3, 12800 .* loss [\d.]+, 95% interval ([\d.]+) to"
        r" ([\d.]+)\nmeasured: loss ([\d.]+), (within|outside) the interval, [+-][\d.]+%$",
        text,
        re.MULTILINE,
    )
    assert found
    low, high, measured = map(float, found.groups()[:3])
    assert measured == pytest.approx(events(out / "trial-0004", "eval")[-1]["val_loss"], abs=1e-4)
    assert found[4] == ("within" if low <= measured <= high else "outside")
    (parameters,) = {one["parameters"] for one in events(out / "trial-0004", "run_start")}
    assert re.search(rf"^trial-0004 .* {parameters:,} +12,800 .* predicted$", text, re.MULTILINE)
    starts = [len(events(out / f"trial-{n:04d}", "run_start")) for n in range(5)]
    assert starts == [1, 2, 1, 1, 1]
    assert (out / "scaling.html").stat().st_size > 1e6


@pytest.mark.launch
@pytest.mark.long
def test_a_tuner_that_is_killed_and_stopped_goes_on_and_measures_nothing_twice(
    corpus: Path, tmp_path: Path
):
    """Two processes a trial, and room for some settings only."""
    flags: dict[str, Any] = {name: FLAGS[name] for name in list(FLAGS)[:6]}
    flags |= {"data_path": str(corpus), "cache_dir": str(tmp_path / "cache"), "batch_size": 4}
    flags |= {"device": "cpu", "dtype": "float32"}
    words = ["tune", "--minutes", "5", "--"]
    words += [word for name, value in flags.items() for word in (f"--{name}", str(value))]

    def begin() -> subprocess.Popen[str]:
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "minimind.cli.main", *words]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(program, env=environ, cwd=tmp_path, text=True, **streams)

    def wait_for_step(folder: Path) -> None:
        deadline = time.monotonic() + PATIENCE
        while not events(folder, "step"):
            assert time.monotonic() < deadline, folder
            time.sleep(0.02)

    out = tmp_path / "out" / "tune"
    for number, name in ((signal.SIGKILL, "trial-0001"), (signal.SIGTERM, "trial-0002")):
        command = begin()
        wait_for_step(out / name)
        command.send_signal(number)
        _, errors = command.communicate(timeout=PATIENCE)
        assert command.returncode == (75 if number == signal.SIGTERM else -signal.SIGKILL), errors
    text, errors = begin().communicate(timeout=2 * PATIENCE)
    assert errors == ""
    found = json.loads((out / "tune.json").read_text())
    assert "NUM_PROCESSES=2 " in found["command"]
    assert f"\n{found['chosen']} " in text
    assert not [one for one in found["candidates"] if "other loss" in one["fault"]]
    records = {one.parent.name: json.loads(one.read_text()) for one in out.glob("*/trial.json")}
    assert sum(one["seconds"] for one in records.values()) <= 5 * 60 + 15
    done = [name for name, record in records.items() if record["state"] == "done"]
    assert {*done} >= {"trial-0000", "trial-0001", "trial-0002"}  # the last may come to no end
    for name in done:
        starts = events(out / name, "run_start")
        assert len(starts) == (2 if name in ("trial-0001", "trial-0002") else 1), name
        assert {one["world_size"] for one in starts} == {2}
        assert len(events(out / name, "exit")) == len(starts)
    assert sum(len(one["speeds"]) for one in found["candidates"]) == len(done)
