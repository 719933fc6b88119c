"""examples/ray_train.py: workers of Ray train the run of torchrun, also after one is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from tests.conftest import PACE, ROOT, SHAPE, Run
from tests.examples.conftest import EXAMPLES, TORCHRUN, environment

LENGTH = "--dtype float32 --max_steps 60 --save_interval 6"
pytestmark = [pytest.mark.long, pytest.mark.launch]


@pytest.fixture(autouse=True)
def _needs_ray() -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install -e '.[ray]'")


@pytest.fixture(scope="module")
def flags(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    words = f"{SHAPE} {PACE} {LENGTH}".replace("--", "").split()
    cache = tmp_path_factory.mktemp("cache")
    places = {"data_path": str(corpus), "cache_dir": str(cache)}
    given = dict(zip(words[::2], words[1::2], strict=True))
    return {**given, **places, "deepspeed_config": str(DEFAULT_DEEPSPEED_CONFIG)}


@pytest.fixture(scope="module")
def unbroken(flags: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run under torchrun."""
    place = tmp_path_factory.mktemp("torchrun")
    config = written(place, flags)
    command = [sys.executable, *TORCHRUN, "2", str(ROOT / "train_pretrain.py")]
    command += ["--config", str(config)]
    done = subprocess.run(
        command, env=environment(place), capture_output=True, text=True, timeout=300, cwd=place
    )
    assert done.returncode == 0, done.stderr
    return Run(place / "out", done.returncode, done.stdout, done.stderr)


def written(place: Path, flags: dict[str, str]) -> Path:
    """The flags as --config, with a relative out_dir."""
    path = place / "run.yaml"
    path.write_text(yaml.safe_dump({**flags, "out_dir": "out"}))
    return path


def start(place: Path, flags: dict[str, str], *more: str) -> subprocess.Popen[str]:
    config = written(place, flags)
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "ray_train.py"), "--config", str(config), *more],
        env={**environment(place), "RAY_USAGE_STATS_ENABLED": "0"},
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(started: subprocess.Popen[str], place: Path) -> Run:
    output, _ = started.communicate(timeout=300)
    return Run(place / "out", started.returncode, output, output)


def test_two_workers_give_the_losses_of_torchrun_bit_for_bit(
    flags: dict[str, str], unbroken: Run, tmp_path: Path
):
    run = ended(start(tmp_path, flags), tmp_path)
    assert run.status == 0, run.stdout
    assert "\nstatus 0\n" in run.stdout
    (began,) = run.events("run_start")
    assert (began["backend"], began["world_size"]) == ("deepspeed", 2)
    assert run.curve() == unbroken.curve()


def test_after_a_killed_worker_the_run_resumes_bit_for_bit(
    flags: dict[str, str], unbroken: Run, tmp_path: Path
):
    started = start(tmp_path, flags)
    checkpoint = tmp_path / "out" / "checkpoints" / "step_00000012"
    deadline = time.monotonic() + 200
    while not checkpoint.exists():
        assert started.poll() is None, ended(started, tmp_path).stdout
        assert time.monotonic() < deadline
        time.sleep(0.05)
    below = psutil.Process(started.pid).children(recursive=True)
    workers = [one for one in below if "RayTrainWorker" in " ".join(one.cmdline())]
    assert len(workers) == 2
    workers[-1].kill()
    run = ended(started, tmp_path)
    assert run.status == 0, run.stdout
    first, second = run.events("run_start")
    assert first["resume_from"] is None
    assert second["step"] >= 12
    assert {line[0]: line for line in run.curve()} == {line[0]: line for line in unbroken.curve()}


def test_an_error_that_would_come_again_is_the_exit_status_without_a_restart(
    flags: dict[str, str], tmp_path: Path
):
    wrong = {**flags, "data_path": str(tmp_path / "nowhere.jsonl")}
    run = ended(start(tmp_path, wrong), tmp_path)
    assert run.status == 3, run.stdout
    assert run.stdout.count("error[E_DATA]") >= 1
    assert "\nstatus 3\n" in run.stdout
