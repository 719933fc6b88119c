"""Frozen parameters on two processes: under ZeRO, DDP and tensor parallelism, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launcher, Run
from tests.distributed.conftest import FP32, largest_relative_difference
from tools.runs import config_of_stage

pytestmark = pytest.mark.launch
FLAGS = f"{FP32} --freeze *embed_tokens* model.layers.0.* *.q_proj.* --global_batch_size 4"
FLAGS += " --save_interval 9 --verify_interval 9 --ema 0.9"


@pytest.fixture(scope="module")
def alone(forked: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An unbroken run of one process without DeepSpeed."""
    flags = f"{FLAGS} --deepspeed_config none"
    run = forked.run(tmp_path_factory.mktemp("alone") / "out", flags, processes=1)
    assert run.status == 0, run.stderr
    return run


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (3, None),
        pytest.param(None, 2, marks=pytest.mark.long),
        pytest.param(1, 0, marks=pytest.mark.long),
        pytest.param(2, 3, marks=pytest.mark.long),
    ],
)
def test_two_processes_train_like_one_at_two_stages(
    before: int | None, after: int | None, forked: Launcher, alone: Run, tmp_path: Path
):
    for stage, status, more in ((before, 75, "--stop_at_step 11"), (after, 0, "")):
        config = "none" if stage is None else config_of_stage(stage, tmp_path)
        flags = f"{FLAGS} --deepspeed_config {config} {more}"
        run = forked.run(tmp_path / "out", flags, processes=2)
        assert run.status == status, run.stderr
    assert largest_relative_difference(run.losses(), alone.losses()) < 2e-6
    norms, expected = ([s["grad_norm"] for s in one.events("step")] for one in (run, alone))
    assert norms == pytest.approx(expected, rel=1e-5)
    assert all(event["passed"] for event in run.events("verified"))
    validated, single = (one.events("eval")[-1]["val_loss"] for one in (run, alone))
    assert validated == pytest.approx(single, rel=1e-6)


@pytest.mark.long
def test_ranks_that_share_matrices_train_like_one(forked: Launcher, alone: Run, tmp_path: Path):
    flags = FLAGS.replace("--verify_interval 9 ", "")
    run = forked.run(tmp_path / "out", f"{flags} --tensor_parallel 2", processes=2)
    assert run.status == 0, run.stderr
    assert largest_relative_difference(run.losses(), alone.losses()) < 2e-6
