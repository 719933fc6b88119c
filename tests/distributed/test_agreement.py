"""Ranks that were started differently end at once, all with status 2 and one line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from tests.conftest import Launcher, Run
from tools.forking import Nursery

STARTS = [
    pytest.param("--grad_clip 0.01", {}, "--grad_clip", "1.0 (default)", id="other numbers"),
    pytest.param(  # its ranks would wait for each other
        *("--ema 0.9", {}, "--ema", "none (default)"),
        id="other collectives",
        marks=pytest.mark.long,
    ),
    pytest.param(
        *("", {"NVIDIA_TF32_OVERRIDE": "0"}, "NVIDIA_TF32_OVERRIDE in the environment", "none"),
        id="other environment",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("words", "environ", "name", "ours"), STARTS)
def test_all_ranks_end_with_2_and_the_difference_is_named(
    words: str,
    environ: dict[str, str],
    name: str,
    ours: str,
    launch: Launcher,
    nursery: Nursery,
    tmp_path: Path,
):
    argv = ["--deepspeed_config", str(DEFAULT_DEEPSPEED_CONFIG)]
    argv += launch.command(tmp_path / "out", "")[2:]
    statuses, _, said = nursery.run(
        "train_pretrain", argv, tmp_path / "said", seconds=60, of_last=(words.split(), environ)
    )
    assert statuses == [2, 2], said
    (line,) = [line for line in said.splitlines() if "error[" in line]
    assert f"error[E_USAGE] rank=0 step=0: {name} is not the same on all ranks: rank 0 (" in line
    assert f") has {ours}, rank 1 (" in line
    assert line.endswith("; give the same on all")
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_ranks_of_different_devices_train_in_one_dtype(
    launch: Launcher, nursery: Nursery, tmp_path: Path
):
    """The curve is the one of --dtype float32, and the value has its own origin."""

    def trained(module: str, name: str, flags: str) -> Run:
        argv = ["--deepspeed_config", str(DEFAULT_DEEPSPEED_CONFIG)]
        argv += launch.command(tmp_path / name, f"--max_steps 2 {flags}")[2:]
        statuses, out, err = nursery.run(module, argv, tmp_path / f"{name}-said", seconds=60)
        assert statuses == [0, 0], err
        return Run(tmp_path / name, 0, out, err)

    mixed = trained("tests.distributed.mixed_devices", "mixed", "--dtype auto")
    alike = trained("train_pretrain", "alike", "--dtype float32")
    assert mixed.events("run_start")[0]["dtype"] == "float32"
    assert mixed.curve() == alike.curve()
    assert "auto: a rank has no bf16 instructions" in (mixed.out_dir / "config.yaml").read_text()
