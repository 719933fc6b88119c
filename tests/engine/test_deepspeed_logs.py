"""DeepSpeed's comms_logger and flops_profiler print what DeepSpeed has them print."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine.deepspeed_backend import configuration
from tests.conftest import Launcher, Run

BLOCKS = {
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 3},
}
HIDDEN, LAYERS, HEADS, KV_HEADS, POSITIONS, VOCABULARY = 64, 2, 4, 2, 64, 600
ROWS, FEED_FORWARD = 2, 192  # of a micro-batch, and the width that HIDDEN leads to


@pytest.mark.parametrize(
    ("block", "is_given"), [({"enabled": True}, True), ({"enabled": False}, False), ({}, False)]
)
def test_a_log_that_is_off_is_not_given_to_deepspeed(block: dict[str, Any], is_given: bool):
    """DeepSpeed 0.19.8 switches it on by any block, and waits for every collective."""
    resolved = ResolvedConfig(parse_flags([]), "deepspeed", {"comms_logger": block})
    assert ("comms_logger" in configuration(resolved)) is is_given


@pytest.fixture(scope="module")
def logged(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six steps of two processes, with both blocks."""
    place = tmp_path_factory.mktemp("logged")
    config = {**json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text()), **BLOCKS}
    (place / "ds.json").write_text(json.dumps(config))
    flags = f"--deepspeed_config {place / 'ds.json'} --max_steps 6 --dtype bfloat16"
    run = launch.run(place / "out", flags)
    assert run.status == 0, run.stderr
    return run


@pytest.mark.long
@pytest.mark.launch
def test_the_table_of_collectives_is_printed_at_the_end(logged: Run):
    (table,) = logged.stdout.split("Comm. Op ")[1:]
    rows = re.findall(r"\n {20}(\S+ K?B) +(\d+) +[\d.]+ ", table)
    assert {size: int(count) for size, count in rows}["133.5 KB"] >= 6  # the weights, gathered


@pytest.mark.long
@pytest.mark.launch
def test_verbose_lines_get_past_our_silence(logged: Run):
    assert (
        len(re.findall(r"comm op: all_reduce \| time \(ms\): \S+", logged.stdout)) == 6 * 8
    )  # three buckets of two micro-batches, two numbers


@pytest.mark.long
@pytest.mark.launch
def test_the_flops_of_the_model_are_reported(logged: Run):
    profiles = logged.stdout.split("DeepSpeed Flops Profiler ---")[1:]
    assert len(profiles) == 2  # one for each micro-batch of the fourth step
    attention = 2 * HEADS * POSITIONS**2 * (HIDDEN // HEADS)
    weights = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // HEADS * KV_HEADS + 3 * FEED_FORWARD)
    macs = ROWS * (LAYERS * (attention + POSITIONS * weights) + POSITIONS * HIDDEN * VOCABULARY)
    for output in profiles:
        assert f"{macs / 1e6:.4g} MMACs = 100% MACs" in output
