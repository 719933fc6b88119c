"""--global_batch_size: the rows of a step on any number of processes, some with rows of padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minimind.recovery.step_rows import documents_of, read_run, rows_at
from tests.conftest import Launcher, Run
from tests.distributed.conftest import FP32, largest_relative_difference
from tools.forking import Nursery
from tools.matrix import ALONE, CHAIN, STAGES, WITHIN, chained, difference, train
from tools.matrix import forked as start_of
from tools.runs import sentences

pytestmark = pytest.mark.launch


def test_three_processes_train_as_two_do_and_every_check_knows_the_padding(
    forked: Launcher, fp32: Run, tmp_path: Path
):
    flags = f"{FP32} --global_batch_size 8 --verify_interval 7 --spike_guard --save_interval 9"
    run = forked.run(tmp_path, flags, processes=3)
    assert run.status == 0, run.stderr
    rows = "2 rows x 2 micro-batches x 3 processes = 8 rows and 4 of padding, 512 tokens"
    assert rows in run.stdout
    manifest = json.loads((run.out_dir / "checkpoints/step_00000020/manifest.json").read_text())
    source = "accumulation_steps (derived: 8 rows and 4 of padding as 3 x 4)"
    assert manifest["sources"]["gradient_accumulation_steps"] == source
    config = manifest["configuration"]
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (12, 2)
    assert largest_relative_difference(run.losses(), fp32.losses()) < 2e-6
    for name in ("lr", "rows", "tokens"):
        assert [s[name] for s in run.events("step")] == [s[name] for s in fp32.events("step")]
    norms = [s["grad_norm"] for s in fp32.events("step")]
    assert [s["grad_norm"] for s in run.events("step")] == pytest.approx(norms, rel=1e-4)
    assert [event["passed"] for event in run.events("verified")] == [True] * 3
    validated, expected = (one.events("eval")[-1] for one in (run, fp32))
    assert validated["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    assert (validated["rows"], validated["tokens"]) == (expected["rows"], expected["tokens"])
    log, other = read_run(run.out_dir), read_run(fp32.out_dir)
    found, same = (rows_at(one.at(5), documents_of(one.at(5)), 5, None) for one in (log, other))
    assert [row.row for row in found] == [row.row for row in same]
    assert [row.rank for row in found] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [row.micro_batch for row in found] == [0, 0, 1, 0, 0, 1, 0, 0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text of the runs below."""
    place = tmp_path_factory.mktemp("chains")
    lines = (json.dumps({"text": text}) + "\n" for text in sentences(1, 400))
    (place / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def alone(root: Path, nursery: Nursery) -> dict[str, list[Any]]:
    """The steps of unbroken runs of one process without padding, by dtype."""
    return {dtype: train(root, None, dtype, 1, ALONE, start=start_of(nursery)) for dtype in WITHIN}


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "dtype", "chain", "more"),
    [
        *((stage, "float32", CHAIN, "") for stage in STAGES),
        (2, "bfloat16", CHAIN, ""),
        (1, "float32", (6, 2), "--tensor_parallel 2"),
        (2, "float32", (2, 6), "--sequence_parallel 2"),
        (None, "float32", (6, 4), "--sequence_parallel 2"),
    ],
)
def test_a_run_on_other_numbers_of_processes_is_the_run_of_one(
    stage: int | None,
    dtype: str,
    chain: tuple[int, ...],
    more: str,
    root: Path,
    nursery: Nursery,
    alone: dict[str, list[Any]],
):
    found = chained(root, stage, dtype, start_of(nursery), chain, more)
    largest = difference(dtype, found, alone[dtype])
    print(f"stage {stage}, {dtype}, {chain} {more}: {largest:.1e}")
    assert largest < WITHIN[dtype]
