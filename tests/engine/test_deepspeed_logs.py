"""DeepSpeed's comms_logger and flops_profiler: by themselves, in a run of two, and after one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine.deepspeed_backend import CollectivesLog, fix_start_time
from tests.conftest import ROOT, Launcher, Run

BLOCKS = {
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 3},
}
HIDDEN, LAYERS, HEADS, KV_HEADS, POSITIONS, VOCABULARY = 64, 2, 4, 2, 64, 600
ROWS, FEED_FORWARD = 2, 192  # of a micro-batch, and the width that HIDDEN leads to


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's module, as it is after an engine was built with a comms_logger block."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.comm import comm as module  # noqa: TID251 (its behaviour is what is tested)

    monkeypatch.setattr(module.comms_logger, "enabled", True)
    return module


def span(comm: Any, seconds: float) -> float:
    """What DeepSpeed takes for the milliseconds of a collective, called as it calls it."""
    comm.timers("all_reduce").start()
    time.sleep(seconds)
    comm.timers("all_reduce").stop()
    return comm.timers("all_reduce").elapsed(reset=False)


def test_each_collective_has_its_own_time(comm: Any):
    log = CollectivesLog(comm, {"enabled": True})
    try:
        assert span(comm, 0.05) >= 50
        assert span(comm, 0.0) < 40  # and not the 50 ms of the first one too
    finally:
        log.release()
    assert "Timer" not in vars(comm.timers)
    assert not comm.comms_logger.enabled


def test_a_block_that_is_not_enabled_logs_nothing(comm: Any):
    for block in ({"enabled": False}, {}):
        comm.comms_logger.enabled = True  # by DeepSpeed, of any block
        log = CollectivesLog(comm, block)
        assert not comm.comms_logger.enabled
        assert log.table() == ""
        log.release()
        assert not comm.comms_logger.enabled


def test_without_a_block_nothing_is_touched(comm: Any):
    for is_on in (True, False):
        comm.comms_logger.enabled = is_on
        log = CollectivesLog(comm, None)
        assert log.table() == ""
        log.release()
        assert comm.comms_logger.enabled is is_on
        assert "Timer" not in vars(comm.timers)


def test_a_table_is_of_the_collectives_since_the_last_one(comm: Any, monkeypatch, capsys):
    def summed(logger: Any) -> None:
        print("all_reduce  ", sum(logger.comms_dict.values()), "   ")

    monkeypatch.setattr(type(comm.comms_logger), "log_all", summed)
    log = CollectivesLog(comm, {"enabled": True})
    comm.comms_logger.comms_dict["1.0 B"] = 3
    assert log.table() == "all_reduce   3"
    assert log.table() == "all_reduce   0"
    log.release()
    assert capsys.readouterr().out == ""


def test_flops_profiler_gets_the_start_time():
    class Profiler:
        def start_profile(self, ignore_list: Any = None) -> None:
            model.__start_time__ = 0

    class Model:
        __start_time__ = -1.0

    model, profiler, before = Model(), Profiler(), time.time()
    fix_start_time(profiler, model)
    profiler.start_profile(ignore_list=None)
    assert before <= model.__start_time__ <= time.time()


@pytest.fixture(scope="module")
def logged(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six steps of two processes, with both blocks and --profile."""
    place = tmp_path_factory.mktemp("logged")
    config = {**json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text()), **BLOCKS}
    (place / "ds.json").write_text(json.dumps(config))
    flags = f"--deepspeed_config {place / 'ds.json'} --max_steps 6 --profile --profile_interval 3"
    run = launch.run(place / "out", flags)
    assert run.status == 0, run.stderr
    return run


@pytest.mark.long
@pytest.mark.launch
def test_the_table_of_collectives_is_reported_and_is_of_the_steps(logged: Run):
    first, second = (
        logged.stdout.split(f"DeepSpeed's comms_logger, up to step {step}:")[1] for step in (3, 6)
    )
    for output, event in zip((first, second), logged.events("profile"), strict=True):
        rows = re.findall(r"\n {20}(\S+ K?B) +(\d+) +([\d.]+) ", output.split("\nstep")[0])
        counts = {size: int(count) for size, count, _ in rows}
        assert counts["133.5 KB"] == 3  # the weights, gathered once a step
        assert counts["4.0 B"] == 6
        run_on_all_ranks = sum(float(total) for _, _, total in rows)
        # Ours are the same spans, a layer below, and none of them overlap on a CPU.
        assert 0.5 * event["comm_ms"] * 3 < run_on_all_ranks < event["step_ms"] * 3


@pytest.mark.long
@pytest.mark.launch
def test_verbose_lines_get_past_our_silence_with_a_time_each(logged: Run):
    times = [
        float(ms) for ms in re.findall(r"comm op: all_reduce \| time \(ms\): (\S+)", logged.stdout)
    ]
    assert len(times) == 6 * 9  # three buckets of two micro-batches, three numbers
    assert any(one > after for one, after in pairwise(times))  # no running sum


@pytest.mark.long
@pytest.mark.launch
def test_the_flops_of_the_model_are_reported_with_its_time(logged: Run):
    profiles = logged.stdout.split("DeepSpeed Flops Profiler ---")[1:]
    assert len(profiles) == 2  # one for each micro-batch of the fourth step
    attention = 2 * HEADS * POSITIONS**2 * (HIDDEN // HEADS)
    weights = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // HEADS * KV_HEADS + 3 * FEED_FORWARD)
    macs = ROWS * (LAYERS * (attention + POSITIONS * weights) + POSITIONS * HIDDEN * VOCABULARY)
    for output in profiles:
        assert f"{macs / 1e6:.4g} MMACs = 100% MACs" in output
        times = dict(re.findall(r"fwd latency - \{'(\w+)': '(\S+ \S+)'\}", output))
        assert "MiniMindForCausalLM" in times
        assert {time.split()[1] for time in times.values()} <= {"us", "ms"}  # the whole model's too


FAILS = """
import json, sys
import minimind.train as train
from minimind.engine.engine import Engine

step, taken = Engine.step, []
def failing(*given):
    taken.append(given)
    if len(taken) == 3:
        from deepspeed.comm import comm
        print(len(set(vars(comm.cdb)) & {"all_reduce", "broadcast"}), comm.comms_logger.enabled)
        raise RuntimeError("as if")
    return step(*given)

Engine.step = failing
try:
    train(**json.loads(sys.argv[1]))
except RuntimeError as error:
    from deepspeed.comm import comm
    print(error, set(vars(comm.cdb)) & {"all_reduce", "broadcast"}, comm.comms_logger.enabled)
"""


@pytest.mark.long
@pytest.mark.launch
def test_after_a_run_that_failed_nothing_is_timed_any_more(corpus: Path, tmp_path: Path):
    config = {**json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text()), **BLOCKS}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    flags = {
        **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
        **{"vocab_size": 600, "batch_size": 2, "max_steps": 4, "device": "cpu", "eval_rows": 0},
        **{"profile": True, "deepspeed_config": str(tmp_path / "ds.json")},
        **{"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")},
    }
    done = subprocess.run(
        [sys.executable, "-c", FAILS, json.dumps({**flags, "out_dir": str(tmp_path / "out")})],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert "2 True" in lines, done.stderr[-2000:]
    assert lines[-1] == "as if set() False"
