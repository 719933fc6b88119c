"""on_step and on_eval of minimind.train: what they are given, and how they end a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, step_of
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine.clocks import PhaseClock
from minimind.errors import MemoryFull, UsageError
from minimind.launch import own_script
from minimind.report.findings import diagnose
from minimind.report.history import read_runs
from minimind.runtime.process import STATUS_FILE
from minimind.train import loop
from tests.conftest import Launcher
from tests.train import own_code_of_two
from tools.forking import Nursery
from tools.runs import PACE, SHAPE, events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "dtype": "float32", "eval_rows": 8},
    **{"max_steps": 8, "save_minutes": 0, "val_fraction": 0.1, "deepspeed_config": "none"},
    **{"log_interval": 2, "eval_interval": 3},
}
Numbers = dict[str, Any]


@pytest.fixture
def given(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    shared = {"data_path": str(corpus), "cache_dir": str(tmp_path.parent / "cache")}
    return {**FLAGS, **shared, "out_dir": str(tmp_path / "run")}


def recorded(out_dir: Path, name: str) -> list[Numbers]:
    """The fields of the events of a run."""
    lines = events(out_dir, name)
    return [{key: line[key] for key in line if key not in ("event", "time")} for line in lines]


def test_they_are_given_the_numbers_of_metrics_jsonl(given: dict[str, Any], tmp_path: Path):
    steps: list[Numbers] = []
    evals: list[tuple[int, Numbers]] = []
    assert (
        train(given, lambda step, n: steps.append(n), lambda step, n: evals.append((step, n))) == 0
    )
    assert steps == recorded(tmp_path / "run", "step")
    assert [one["step"] for one in steps] == [2, 4, 6, 8]
    assert [{"step": step, **n} for step, n in evals] == recorded(tmp_path / "run", "eval")
    assert [step for step, _ in evals] == [3, 6, 8]
    assert steps[-1]["own_code_ms"] > 0


def test_true_ends_the_run_at_its_step_and_the_same_command_goes_on(
    given: dict[str, Any], tmp_path: Path
):
    run = tmp_path / "run"
    assert train(given, on_step=lambda step, n: step == 4) == 0
    (end,) = events(run, "exit")
    assert (end["status"], end["step"]) == (0, 4)
    assert end["reason"] == "stopped by on_step at step 4"
    assert [one["step"] for one in events(run, "eval")] == [3, 4]  # what a last step has
    assert [step_of(path) for path in published_checkpoints(run / "checkpoints")] == [4]
    assert not [one for one in diagnose(read_runs([run])[0], 0.0) if one.kind == "ended_early"]
    assert train(given, on_eval=lambda step, n: step == 8) == 0  # at the last step there is no stop
    assert events(run, "exit")[-1]["reason"] == "done"
    unbroken = {**given, "out_dir": str(tmp_path / "unbroken")}
    assert train(unbroken) == 0
    names = ("step", "loss", "lr", "grad_norm", "rows")
    curves = [
        {line["step"]: [line[name] for name in names] for line in events(out, "step")}
        for out in (run, tmp_path / "unbroken")
    ]
    assert curves[0] == curves[1]


def test_a_run_may_end_before_its_first_step(given: dict[str, Any], tmp_path: Path):
    good = np.True_  # as of np.mean(losses) < 3
    assert train(given, on_eval=lambda step, n: good, eval_at_start=True) == 0
    (end,) = events(tmp_path / "run", "exit")
    assert (end["step"], end["reason"]) == (0, "stopped by on_eval at step 0")


def test_what_a_function_raises_or_returns_else_names_it(given: dict[str, Any]):
    def fails(step: int, numbers: Numbers) -> bool:
        return numbers["val_los"] < 1

    with pytest.raises(
        UsageError, match=r"^on_eval raised KeyError: 'val_los', at step 3"
    ) as error:
        train(given, on_eval=fails)
    assert error.value.table[-1] == "KeyError: 'val_los'"
    assert "in fails" in "\n".join(error.value.table)
    with pytest.raises(UsageError, match=r"^on_eval raised SystemExit: 4, at step 3"):
        train(given, on_eval=lambda step, n: sys.exit(4), out_dir=given["out_dir"] + "1")
    with pytest.raises(UsageError, match=r"^on_step returned 0\.5 \(float\) at step 2"):
        train(given, on_step=lambda step, n: 0.5, resume="none", out_dir=given["out_dir"] + "2")
    for wrong in (3, lambda step: None):
        with pytest.raises(UsageError, match=r"^on_step = "):
            train(given, on_step=wrong)
    with pytest.raises(TypeError):
        train(["--max_steps", "3"], max_steps=4)


def test_a_rank_that_hangs_in_a_function_is_named_by_it(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    clocks: list[PhaseClock] = []
    seen: dict[str, set[str]] = {"on_step": set(), "on_eval": set()}

    def made(*args: Any) -> PhaseClock:
        clocks.append(PhaseClock(*args))
        return clocks[-1]

    monkeypatch.setattr(loop, "PhaseClock", made)
    noted = {name: lambda step, n, name=name: seen[name].add(clocks[-1].phase) for name in seen}
    assert train(given, **noted) == 0
    assert seen == {name: {name} for name in seen}
    assert clocks[-1].phase == "data"


def test_the_last_step_of_a_run_that_a_function_ends_has_a_fingerprint(
    given: dict[str, Any], tmp_path: Path
):
    given |= {"fingerprints": 3, "log_interval": 1}
    assert train(given, on_step=lambda step, n: step == 5) == 0
    found = events(tmp_path / "run", "fingerprint")
    assert [one["step"] for one in found] == [1, 3, 5]
    assert [*found[-1]["numbers"]] == ["exp_avg", "exp_avg_sq", "fp32"]
    assert found[-1]["loss"] == events(tmp_path / "run", "step")[-1]["loss"]


def test_words_are_a_command_line(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        train(["--max_stepz", "3"])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("train_pretrain: error[E_USAGE] rank=0")


def test_one_rank_of_two_ends_the_run_of_both_and_an_own_loss_is_that_of_one_process(
    launch: Launcher, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = "--dtype float32 --eval_interval 4 --eval_rows 8"
    words = ["--deepspeed_config", str(DEFAULT_DEEPSPEED_CONFIG)]
    words += launch.command(tmp_path / "two", f"{flags} --loss {own_code_of_two.__name__}:ce")[2:]
    statuses, out, err = nursery.run(own_code_of_two.__name__, words, tmp_path / "said")
    assert statuses == [0, 0], err
    (end,) = events(tmp_path / "two", "exit")
    assert (end["status"], end["reason"]) == (0, "stopped by on_eval at step 8")
    assert [one["step"] for one in events(tmp_path / "two", "eval")] == [4, 8]
    # Rank 1 is given what rank 0 wrote.
    assert f"seen {events(tmp_path / 'two', 'eval')[0]['val_loss']!r}\n" in out
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = f"{SHAPE} {PACE} {flags} --accumulation_steps 4 --deepspeed_config none"
    alone += f" --data_path {launch.corpus} --cache_dir {launch.cache}"
    words = alone.replace("--", "").split()
    given = {
        name: yaml.safe_load(value) for name, value in zip(words[::2], words[1::2], strict=True)
    }
    given["out_dir"] = str(tmp_path / "one")
    assert train(given, on_eval=lambda step, numbers: step == 8) == 0
    found = [[one["loss"] for one in events(tmp_path / n, "step")] for n in ("two", "one")]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_script_that_fails_before_it_trains_says_so(launch: Launcher, tmp_path: Path):
    # As one piece, since the output of two ranks is not buffered.
    script = "import sys\nsys.stderr.write(f\"mine {' '.join(sys.argv[2:])}\\n\")\n"
    (tmp_path / "mine.py").write_text(f"{script}import minimind, beside\n")
    (tmp_path / "beside.py").write_text("raise ValueError(__name__)")
    words = launch.command(tmp_path / "run", "--eval_interval 4")
    words.insert(2, "mine.py")
    done = subprocess.run(
        words, cwd=tmp_path, env=launch.environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert f"mine {' '.join(words[4:])}" in done.stderr
    assert "ValueError: beside" in done.stderr


@pytest.mark.long
def test_what_one_rank_of_two_raises_ends_both_with_its_sentence(launch: Launcher, tmp_path: Path):
    words = launch.command(tmp_path / "run", "--dtype float32 --eval_interval 4 --debug")
    words.insert(2, str(Path(own_code_of_two.__file__)))
    done = subprocess.run(
        words, cwd=tmp_path, env=launch.environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "error[E_USAGE] rank=1 step=4: on_eval raised KeyError: 'val_los'" in done.stderr
    assert "stopped because rank 1 failed" in done.stderr
    assert "KeyError: 'val_los'" in (tmp_path / "run" / "console.log").read_text()


@pytest.mark.parametrize(
    ("error", "status"), [("MemoryFull('', {})", MemoryFull.status), ("OSError()", 2)]
)
def test_a_script_that_is_out_of_memory_ends_with_the_status_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, status: int
):
    claim, script = tmp_path / "status", tmp_path / "mine.py"
    script.write_text(f"from minimind.errors import MemoryFull\nraise {error}\n")
    monkeypatch.setenv(STATUS_FILE, str(claim))
    with pytest.raises((MemoryFull, OSError)):
        own_script.main(str(script))
    assert claim.read_text() == f"{status} 0\n"
