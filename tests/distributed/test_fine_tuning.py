"""Fine-tuning that is killed, or goes on with other processes, is that of one unbroken process."""

from __future__ import annotations

import gzip
import json
import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import minimind.train as training
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.recovery.step_rows import read_run
from tests.train.test_fine_tuning import BASE, conversations, write
from tools.forking import Nursery

train: Any = training  # a package that is called like a function
pytestmark = pytest.mark.launch
STEPS = 12
ONE = {"batch_size": 4, "accumulation_steps": 2}  # 8 rows a step
ALONE = {**ONE, "deepspeed_config": "none"}
ZERO = {"deepspeed_config": str(DEFAULT_DEEPSPEED_CONFIG)}
TENSOR, SEQUENCE = {"tensor_parallel": 2}, {"sequence_parallel": 2}
Stages = list[tuple[int, dict[str, int], int]]  # processes, flags of their groups, last step


def logged(out_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of every line, also of steps that were taken again."""
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["event"] == "step"]


@dataclass(frozen=True)
class Place:
    """Flags of a run, and the losses of one process that nothing interrupts."""

    flags: dict[str, Any]
    losses: dict[int, float]

    def words(self, out_dir: Path, **more: Any) -> list[str]:
        """A command line."""
        given = {**self.flags, **more, "out_dir": str(out_dir)}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def one(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = tmp_path_factory.mktemp("tuned")
    cache = str(place / "cache")
    base = {**BASE, "n_kv_heads": 2, "data_path": str(corpus), "cache_dir": cache, "max_steps": 3}
    assert train(base, out_dir=str(place / "base")) == 0
    talk = write(place / "talk.jsonl", conversations(300, seed=5))
    flags = {"task": "sft", "init_from": str(place / "base"), "data_path": str(talk)}
    flags |= {"cache_dir": cache, "device": "cpu", "dtype": "float32", "log_interval": 1}
    flags |= {"learning_rate": 5e-3, "max_steps": STEPS, "val_fraction": 0.05, "eval_rows": 8}
    flags["save_interval"] = 4
    assert train({**flags, **ALONE}, out_dir=str(place / "one")) == 0
    losses = dict(logged(place / "one"))
    assert len(losses) == STEPS
    return Place(flags, losses)


def test_killed_twice_it_takes_the_same_steps(nursery: Nursery, one: Place, tmp_path: Path):
    out_dir, words = tmp_path / "killed", one.words(tmp_path / "killed", **ALONE)
    for step in (6, 9):
        killed = nursery.run("tests.distributed.kill_at_step", [str(step), *words], out_dir, 1)
        assert killed[0] == [-signal.SIGKILL], killed
        assert logged(out_dir)[-1][0] == step
    assert train({**one.flags, **ALONE}, out_dir=str(out_dir)) == 0
    lines = logged(out_dir)
    assert len(lines) > STEPS  # some steps were taken again
    assert {step for step, _ in lines} == set(one.losses)
    assert all(loss == one.losses[step] for step, loss in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([(2, {}, 6), (1, {}, STEPS)], id="2-1"),
        pytest.param([(2, {}, 4), (1, {}, 8), (4, {}, STEPS)], id="2-1-4", marks=pytest.mark.long),
        pytest.param(
            [(2, TENSOR, 4), (4, TENSOR, 8), (1, {}, STEPS)], id="tp", marks=pytest.mark.long
        ),
        pytest.param(
            [(2, SEQUENCE, 4), (4, SEQUENCE, 8), (1, {}, STEPS)], id="sp", marks=pytest.mark.long
        ),
    ],
)
def test_on_other_processes_it_takes_the_same_steps(
    stages: Stages, nursery: Nursery, one: Place, tmp_path: Path
):
    out_dir = tmp_path / "out"
    for processes, divided, last in stages:
        stop = {"stop_at_step": last} if last < STEPS else {}
        rows = ONE["batch_size"] * math.prod(divided.values()) // processes
        words = one.words(out_dir, **{**ONE, "batch_size": rows}, **divided, **ZERO, **stop)
        statuses, _, text = nursery.run("train_pretrain", words, out_dir, processes)
        assert statuses == [75 if stop else 0] * processes, text
        expected = {step: loss for step, loss in one.losses.items() if step <= last}
        assert dict(logged(out_dir)) == pytest.approx(expected, rel=2e-6)
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    starts = [line for line in lines if line["event"] == "run_start"]
    assert [start["world_size"] for start in starts] == [processes for processes, *_ in stages]
    assert {(start["backend"], start["zero_stage"]) for start in starts} == {("deepspeed", 2)}


def test_two_processes_read_the_rows_of_one_mixture(nursery: Nursery, one: Place, tmp_path: Path):
    """Seven rows a step, and one of padding on two processes; some targets count three times."""
    write(tmp_path / "more.jsonl", conversations(60, seed=9))
    mixed = [f"talk={one.flags['data_path']}:1", f"more={tmp_path / 'more.jsonl'}:2"]
    flags = {**one.flags, "global_batch_size": 7, "batch_size": 2}
    given = {name: value for name, value in flags.items() if name != "data_path"}
    more = {"source": mixed, "loss_weight": ["more=3"], "deepspeed_config": "none"}
    assert train({**given, **more}, out_dir=str(tmp_path / "one")) == 0
    words = Place(given, {}).words(tmp_path / "two", **ZERO, loss_weight="more=3")
    words += [word for text in mixed for word in ("--source", text)]
    statuses, _, text = nursery.run("train_pretrain", words, tmp_path / "two", 2)
    assert statuses == [0, 0], text
    alone, both = (read_run(tmp_path / name) for name in ("one", "two"))
    for step in range(1, STEPS + 1):
        assert both.at(step).parallel.world_size == 2
        first, other = (log.at(step).order.rows_for(step - 1, 0, 1) for log in (alone, both))
        np.testing.assert_array_equal(first, other)
        assert len(first) == 7
    expected = dict(logged(tmp_path / "one"))
    assert dict(logged(tmp_path / "two")) == pytest.approx(expected, rel=2e-6)


def test_bad_conversations_end_a_run_with_3(nursery: Nursery, one: Place, tmp_path: Path):
    bad = {"messages": [{"role": "user", "content": "x"}, {"role": "boss", "content": "y"}]}
    good = conversations(4)
    byte = sum(len(json.dumps(line)) + 1 for line in good)
    packed = gzip.compress(write(tmp_path / "good.jsonl", good).read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-4])
    write(tmp_path / "bad.jsonl", [*good, bad])
    table = pyarrow.table({"messages": [good[1]["messages"], bad["messages"]]})
    parquet.write_table(table, tmp_path / "bad.parquet")
    for name, said in (
        ("bad.jsonl", f':5 (byte {byte}): turn 2: "role" is "boss"; write one of system, user,'),
        ("bad.parquet", ':2 (row 2): turn 2: "role" is "boss"; write one of system, user,'),
        ("cut.jsonl.gz", f":5 (byte {byte}): the compressed stream is cut off, and what it lacks"),
    ):
        given = {**ALONE, "data_path": tmp_path / name}
        words = one.words(tmp_path / "out", **given)
        statuses, _, text = nursery.run("train_pretrain", words, tmp_path / "out", 1)
        assert statuses == [3], text
        assert "error[E_DATA]" in text
        assert f"{tmp_path / name}{said}" in text
