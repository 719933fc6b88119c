"""Runs that several tests look at: started once, because starting costs more than training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launcher, Run
from tools.runs import config_of_stage

FP32 = "--dtype float32"
BF16 = "--dtype bfloat16"  # also on a CPU that emulates it
STEPS = 36  # long enough to be killed in the middle
LONGER = f"--max_steps {STEPS} --save_interval 6"


def largest_relative_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == 20
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="session")
def unbroken(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """bf16, ZeRO-2, two processes, saved and validated on the way."""
    out_dir = tmp_path_factory.mktemp("unbroken") / "out"
    return launch.run(
        out_dir, f"{BF16} {LONGER} --eval_interval 18 --profile --profile_interval 16"
    )


@pytest.fixture(scope="session")
def fp32(forked: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The yardstick of the equivalences: fp32, ZeRO-2, two processes of two micro-batches."""
    out_dir = tmp_path_factory.mktemp("fp32") / "out"
    return forked.run(out_dir, f"{FP32} --save_interval 9 --keep_last 3")


@pytest.fixture(
    scope="session", params=[pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 3)]
)
def other_stage(
    request: pytest.FixtureRequest, forked: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, Run]:
    """The yardstick again, with another stage in the DeepSpeed JSON and nothing else changed.

    Long: the chain of stages in test_runs.py compares losses with the yardstick too.
    """
    directory = tmp_path_factory.mktemp(f"stage{request.param}")
    config = config_of_stage(request.param, directory)
    flags = f"{FP32} --deepspeed_config {config} --save_interval 9 --keep_last 3"
    flags += " --sample_interval 10"
    return request.param, config, forked.run(directory / "out", flags)
