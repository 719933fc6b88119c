"""A run in stages on 1, 2 and 4 ranks: the same rows and rates, and resumed across boundaries."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from minimind.recovery.step_rows import read_run
from tests.conftest import Launcher, Run
from tests.distributed.conftest import FP32

STAGES = """\
decay_from: last
stages:
  - {name: short, until: 2048, max_seq_len: 32, batch_size: 2}
  - {name: small, until: 0.8, batch_size: 1}
  - {name: last}
"""
# Steps 1 to 8 of 8 x 32 tokens, 9 to 24 of 4 x 64, and 25 to 27 of 8 x 64.
BOUNDARIES, STEPS = (8, 24), 27
BESIDE = (BOUNDARIES[0] - 1, BOUNDARIES[1], BOUNDARIES[1] + 1)
LENGTH = "--max_tokens 7680 --schedule wsd --log_interval 1"


def flags_of(folder: Path, processes: int) -> str:
    """The same step of 8 or 4 rows on any number of processes."""
    path = folder / "stages.yaml"
    path.write_text(STAGES)
    split = f"--accumulation_steps {4 // processes}"
    return f"{FP32} {LENGTH} --max_steps {STEPS} --stages {path} {split}"


@pytest.fixture(scope="module")
def runs(
    forked: Launcher, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[int, Run]:
    """Unbroken, by number of processes; on four with --long."""
    folder = tmp_path_factory.mktemp("stages")
    found = {}
    for processes in (1, 2, *([4] if request.config.getoption("--long") else [])):
        out_dir = folder / str(processes)
        found[processes] = forked.run(out_dir, flags_of(folder, processes), processes=processes)
        assert found[processes].status == 0, found[processes].stderr
    return found


def test_rows_and_rates_do_not_depend_on_the_ranks(runs: dict[int, Run]):
    names = ("step", "lr", "tokens", "rows", "stage")
    lines = {
        n: [[line[k] for k in names] for line in run.events("step")] for n, run in runs.items()
    }
    assert all(own == lines[1] for own in lines.values())
    assert [line[4] for line in lines[1]] == ["short"] * 8 + ["small"] * 16 + ["last"] * 3
    logs = {n: read_run(run.out_dir) for n, run in runs.items()}
    for step in range(1, STEPS + 1):
        whole = logs[1].at(step).order.rows_for(step - 1, 0, 1).tolist()
        for n, log in logs.items():
            order = log.at(step).order
            assert order.rows_for(step - 1, 0, 1).tolist() == whole
            shares = [order.rows_for(step - 1, rank, n).tolist() for rank in range(n)]
            assert [*itertools.chain(*shares)] == whole
    for one, other in itertools.combinations(runs.values(), 2):
        pairs = zip(one.losses(), other.losses(), strict=True)
        assert max(abs(a - b) / b for a, b in pairs) < 2e-6


@pytest.mark.long  # tests/train/test_stages.py stops one process there
@pytest.mark.parametrize("step", [*BESIDE, BOUNDARIES[0]])
def test_a_stop_beside_a_boundary_changes_no_bit(
    runs: dict[int, Run], forked: Launcher, tmp_path: Path, step: int
):
    flags = flags_of(tmp_path, 2)
    assert forked.run(tmp_path / "out", f"{flags} --stop_at_step {step}").status == 75
    resumed = forked.run(tmp_path / "out", flags)
    assert resumed.status == 0
    assert resumed.curve() == runs[2].curve()


@pytest.mark.long  # test_runs.py resumes on other numbers of ranks too
def test_it_goes_on_with_other_ranks_at_every_boundary(
    runs: dict[int, Run], forked: Launcher, tmp_path: Path
):
    for processes, stop in ((4, BOUNDARIES[0]), (1, BOUNDARIES[1]), (2, None)):
        flags = flags_of(tmp_path, processes)
        flags += f" --stop_at_step {stop}" if stop else ""
        run = forked.run(tmp_path / "out", flags, processes=processes)
        assert run.status == (75 if stop else 0), run.stderr
    names = ("step", "lr", "tokens", "rows", "stage")
    whole, broken = (
        [[line[name] for name in names] for line in one.events("step")] for one in (runs[2], run)
    )
    assert broken == whole
    assert run.losses()[: BOUNDARIES[0]] == runs[4].losses()[: BOUNDARIES[0]]
    pairs = zip(run.losses(), runs[2].losses(), strict=True)
    assert max(abs(a - b) / b for a, b in pairs) < 2e-6


@pytest.mark.long  # test_restarts.py chooses the processes and flags that go on
def test_a_batch_over_all_processes_goes_on_with_fewer_and_the_same_flags(
    forked: Launcher, tmp_path: Path
):
    """What a restart does (launch/restart.py): the rows of every stage stay."""
    path = tmp_path / "stages.yaml"
    path.write_text(STAGES.replace("batch_size: 2", "batch_size: 8").replace(": 1}", ": 4}"))
    flags = f"{FP32} {LENGTH} --max_steps {STEPS} --stages {path} --split_batches"
    flags += " --batch_size 8 --accumulation_steps 1"
    whole = forked.run(tmp_path / "whole", flags, processes=1)
    assert whole.status == 0, whole.stderr
    stopped = forked.run(tmp_path / "out", f"{flags} --stop_at_step 15", processes=2)
    assert stopped.status == 75, stopped.stderr
    run = forked.run(tmp_path / "out", flags, processes=1)
    assert run.status == 0, run.stderr
    assert [line["rows"] for line in run.events("step")] == [
        line["rows"] for line in whole.events("step")
    ]
