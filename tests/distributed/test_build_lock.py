"""A start killed while it compiles DeepSpeedCPUAdam does not stop the next one."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, Launcher

pytestmark = [pytest.mark.launch, pytest.mark.long]


def write_compiling(path: Path, adam: str = '"torch_adam": false') -> Path:
    """A file that asks for an op of DeepSpeed's which has to be compiled."""
    shipped = (ROOT / "configs" / "deepspeed" / "zero2_offload.json").read_text()
    path.write_text(shipped.replace('"torch_adam": "auto"', adam))
    return path


def is_compiling(process: psutil.Process) -> bool:
    for one in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if one.name().startswith(("cc1plus", "clang")):
                return True
    return False


def test_without_a_compiler_the_way_out_is_reported(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    compiling = write_compiling(tmp_path / "compiling.json")
    run = launch.run(tmp_path / "out", f"--deepspeed_config {compiling}", processes=1)
    assert run.status == 2
    assert f"{compiling}: AdamW needs DeepSpeed's cpu_adam, which cannot be comp" in run.stderr
    assert "no C++ compiler (/nowhere/c++) is on PATH" in run.stderr
    assert '"torch_adam": true' in run.stderr
    auto = write_compiling(compiling, '"torch_adam": "auto", "bias_correction": true')
    run = launch.run(tmp_path / "out", f"--deepspeed_config {auto} --max_steps 2", processes=1)
    assert run.status == 0, run.stderr
    said = " ".join(run.stdout.split())
    assert "warning DeepSpeed's cpu_adam cannot be compiled: no C++ compiler" in said
    assert "torch's fused AdamW takes its place, with equal updates" in said


def test_the_start_after_one_that_was_killed_while_compiling(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    lock = tmp_path / "ops" / "cpu_adam" / "lock"
    compiling = write_compiling(tmp_path / "compiling.json")
    flags = f"--deepspeed_config {compiling} --max_steps 2"
    killed = launch.start(tmp_path / "out", flags)
    family = psutil.Process(killed.pid)
    end = time.monotonic() + 120
    while not (lock.exists() and is_compiling(family)):
        assert killed.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    # The workers without their compiler, which goes on for a while.
    for process in [*family.children(recursive=True), family]:
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("python") or process.name() == "bash":
                process.kill()
    killed.communicate()
    assert lock.exists()
    line = "DeepSpeed's cpu_adam is compiled at the first start, which takes minutes"
    shown = launch.run(tmp_path / "out", f"{flags} --dry_run")
    assert f"compile  {line}" in shown.stdout
    run = launch.run(tmp_path / "out", flags)
    assert run.stdout.count(line) == 1  # of two processes
    assert run.status == 0, run.stderr
    assert [step["step"] for step in run.events("step")] == [1, 2]
    assert not lock.exists()
    assert line not in launch.run(tmp_path / "out", f"{flags} --dry_run").stdout
