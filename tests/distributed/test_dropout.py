"""Runs with --dropout: resumed, on three processes with uneven shares, and with another rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launcher, Run
from tests.distributed.conftest import FP32, largest_relative_difference

pytestmark = pytest.mark.launch
FLAGS = f"{FP32} --dropout 0.2 --global_batch_size 8 --save_interval 9 --verify_interval 9"
FIELDS = ("loss", "grad_norm", "lr", "rows")


@pytest.fixture(scope="module")
def alone(forked: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An unbroken run of one process."""
    run = forked.run(tmp_path_factory.mktemp("dropout") / "out", FLAGS, processes=1)
    assert run.status == 0, run.stderr
    assert [event["passed"] for event in run.events("verified")] == [True] * 3
    return run


def test_a_resumed_run_has_the_masks_of_the_unbroken_one_and_no_other_rate(
    forked: Launcher, alone: Run, tmp_path: Path
):
    stopped = forked.run(tmp_path / "out", f"{FLAGS} --stop_at_step 11", processes=1)
    assert stopped.status == 75, stopped.stderr
    other = forked.run(tmp_path / "out", FLAGS.replace("0.2", "0.1"), processes=1)
    assert other.status == 4
    assert "dropout" in other.stderr
    resumed = forked.run(tmp_path / "out", FLAGS, processes=1)
    steps, whole = resumed.events("step"), alone.events("step")
    assert [step["step"] for step in steps] == [step["step"] for step in whole]
    for name in FIELDS:
        assert [step[name] for step in steps] == [step[name] for step in whole], name
    assert resumed.events("eval")[-1]["val_loss"] == alone.events("eval")[-1]["val_loss"]


def test_three_processes_with_uneven_shares_have_the_masks_of_one(
    forked: Launcher, alone: Run, tmp_path: Path
):
    run = forked.run(tmp_path / "out", FLAGS, processes=3)
    assert run.status == 0, run.stderr
    assert largest_relative_difference(run.losses(), alone.losses()) < 2e-6
    validated, expected = (one.events("eval")[-1]["val_loss"] for one in (run, alone))
    assert validated == pytest.approx(expected, rel=1e-6)
    assert [event["passed"] for event in run.events("verified")] == [True] * 3
