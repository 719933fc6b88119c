"""Ranks that compile for different times wait for each other, however short --dist_timeout is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.runtime.heartbeat import GONE_GRACE
from tests.conftest import Launcher, Run
from tests.distributed.slow_compiler import LATE

TIMEOUT = 6  # --dist_timeout of these runs
BACKENDS = {"ddp": "none", "stage 2": str(DEFAULT_DEEPSPEED_CONFIG)}


def run_with(launch: Launcher, nursery: Any, out_dir: Path, word: str, backend: str) -> Run:
    flags = f"--compile on --max_steps 3 --dist_timeout {TIMEOUT}"
    flags += f" --deepspeed_config {BACKENDS[backend]}"
    argv = [word, *launch.command(out_dir, flags)[2:]]
    statuses, out, err = nursery.run("tests.distributed.slow_compiler", argv, out_dir)
    return Run(out_dir, statuses[0], out, err)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["ddp", "stage 2"])
def test_a_rank_that_compiles_for_longer_than_dist_timeout_is_waited_for(
    backend: str, launch: Launcher, nursery: Any, tmp_path: Path
):
    seconds = TIMEOUT + GONE_GRACE + 2  # after which a rank counts as hung elsewhere
    run = run_with(launch, nursery, tmp_path / "out", str(seconds), backend)
    assert run.status == 0, run.stderr
    assert len(run.losses()) == 3
    assert run.stderr.count(LATE) == 1


@pytest.mark.long
def test_a_rank_that_dies_while_it_compiles_is_named(
    launch: Launcher, nursery: Any, tmp_path: Path
):
    run = run_with(launch, nursery, tmp_path / "out", "SIGKILL", "ddp")
    assert run.status == 7, run.stderr
    assert "error[E_PEER] rank=0 step=0: rank 1 (process " in run.stderr
