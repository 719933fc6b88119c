"""Runs with --sequence_parallel and --tensor_parallel, from the command line to a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launcher, Run
from tests.distributed.conftest import FP32, largest_relative_difference

# test_sequence_parallel.py and test_tensor_parallel.py divide rows and weights in less time.
pytestmark = [pytest.mark.launch, pytest.mark.long]
# 4 x 2 rows, as two processes of 2 x 2 rows read.
ROWS = f"{FP32} --batch_size 4 --accumulation_steps 2 --eval_interval 10"
ALSO = "--sample_interval 10 --gradient_checkpointing --spike_guard"


@pytest.mark.parametrize("flag", ["sequence_parallel", "tensor_parallel"])
def test_a_divided_run_goes_on_as_one_process_with_the_same_losses(
    flag: str, fp32: Run, forked: Launcher, tmp_path: Path
):
    out_dir = tmp_path / "out"
    divided = forked.run(out_dir, f"{ROWS} {ALSO} --{flag} 2 --stop_at_step 10")
    assert divided.status == 75, divided.stderr
    run = forked.run(out_dir, f"{ROWS} {ALSO}", processes=1)
    assert run.status == 0, run.stderr
    assert largest_relative_difference(run.losses(), fp32.losses()) < 2e-6
    for name in ("step", "tokens", "rows"):
        own, others = ([line[name] for line in of.events("step")] for of in (run, fp32))
        assert own == others, name
    norms, others = ([line["grad_norm"] for line in of.events("step")] for of in (run, fp32))
    assert norms == pytest.approx(others, rel=1e-5)
    first, second = run.events("run_start")
    assert (first["world_size"], second["world_size"]) == (2, 1)
    assert f"{flag} 2 -> 1" in run.stdout
    assert [line["step"] for line in run.events("eval")][:1] == [10]
    assert len({line["text"] for line in run.events("sample") if line["step"] == 10}) == 1


def test_four_ranks_without_deepspeed_go_on_bit_for_bit(forked: Launcher, tmp_path: Path):
    """On more than two ranks the order of DDP's sums depends on its buckets."""
    flags = "--deepspeed_config none --sequence_parallel 2 --max_steps 8"
    unbroken = forked.run(tmp_path / "whole", f"{flags} --save_interval 4", processes=4)
    assert unbroken.status == 0, unbroken.stderr
    saved = tmp_path / "whole" / "checkpoints" / "step_00000004"
    run = forked.run(tmp_path / "resumed", f"{flags} --resume {saved}", processes=4)
    assert run.status == 0, run.stderr
    assert run.curve() == unbroken.curve()[4:]
