"""--trace_steps: which steps, what is written, and where a run begins or ends within them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimind.architecture.costs import known_gpu
from minimind.architecture.select import MiniMind
from minimind.config.parse import parse_flags
from minimind.data.rows.order import Order
from minimind.engine.clocks import PHASES, PhaseClock
from minimind.errors import StorageError, UsageError
from minimind.report import trace as trace_module
from minimind.report.trace import Trace
from minimind.runtime.device import device_kind
from minimind.train.speed import mfu_per_speed, peak_of
from minimind.train.start import traced_steps

CPU = torch.device("cpu")


def test_the_flag_names_first_and_last_step():
    assert traced_steps(parse_flags([])) is None
    assert traced_steps(parse_flags(["--trace_steps", "10:13"])) == (10, 13)
    for wrong in ("10", "0:3", "5:4", "a:b", "1:2:3", "-1:4", " "):
        with pytest.raises(UsageError, match=r"trace_steps = .* is not FIRST:LAST .*; write 10:13"):
            traced_steps(parse_flags([f"--trace_steps={wrong}"]))


@pytest.mark.parametrize("begins_at", [0, 2])
def test_a_trace_has_the_phases_of_its_steps_and_no_others(tmp_path: Path, begins_at: int):
    trace, clock = Trace((2, 3), tmp_path, rank=1), PhaseClock(CPU)
    ended = []
    for taken in range(begins_at, 5):
        if trace.is_due(taken):
            ended.append((taken, trace.is_recording))
            trace.write(taken) if trace.is_recording else trace.begin(taken)
        clock.is_traced = trace.is_recording
        clock.begin()
        for is_last in (False, True):  # two micro-batches
            for phase in PHASES:
                torch.dot(torch.ones(8), torch.ones(8))
                clock.mark(phase, is_last and phase == PHASES[-1])
    assert ended == [(max(begins_at, 1), False), (3, True)]
    written = tmp_path / "traces" / f"steps_{max(begins_at, 1) + 1}-3-rank_1.json.gz"
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [written.name]
    names = [
        event["name"] for event in json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
    ]
    steps = 3 - max(begins_at, 1)
    assert [names.count(phase) for phase in PHASES] == [2 * steps] * 4
    assert names.count("aten::dot") == 8 * steps


def test_a_run_that_ends_early_writes_what_it_has_and_a_full_disk_is_reported(tmp_path: Path):
    trace = Trace((1, 9), tmp_path, rank=0)
    assert trace.stop() is None  # nothing begun, nothing written
    assert not trace.is_recording
    assert list(tmp_path.iterdir()) == []
    trace.begin(0)
    torch.ones(2)
    assert (trace.is_due(4), trace.is_recording) == (False, True)
    assert trace.write(4) == tmp_path / "traces" / "steps_1-4-rank_0.json.gz"
    assert (tmp_path / "traces" / "steps_1-4-rank_0.json.gz").stat().st_size > 0
    assert not trace.is_recording
    blocked = Trace((1, 9), tmp_path / "file", rank=0)
    (tmp_path / "file").write_text("")
    blocked.begin(0)
    with pytest.raises(StorageError, match="Not a directory; correct the path of --out_dir"):
        blocked.write(1)


@pytest.mark.parametrize(("device", "kinds"), [("cpu", ["CPU"]), ("cuda", ["CPU", "CUDA"])])
def test_only_a_run_on_a_gpu_records_what_the_gpu_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, kinds: list[str]
):
    """With a stand-in for the profiler, on a host that has GPUs."""
    asked: list[str] = []

    def profile(activities: list[Any], **_: Any) -> SimpleNamespace:
        asked.extend(activity.name for activity in activities)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(trace_module, "profile", profile)
    Trace((1, 2), tmp_path, 0, device_kind(device)).begin(0)
    assert asked == kinds


def test_a_start_within_the_steps_leaves_the_traces_before_it(tmp_path: Path):
    def recorded(begins: int, ends: int, rank: int = 0) -> str:
        trace = Trace((3, 9), tmp_path, rank)
        trace.begin(begins)
        return trace.write(ends).name

    assert recorded(2, 5) == "steps_3-5-rank_0.json.gz"  # stopped there
    first = (tmp_path / "traces" / "steps_3-5-rank_0.json.gz").read_bytes()
    assert recorded(5, 9) == "steps_6-9-rank_0.json.gz"  # resumed there
    assert recorded(2, 5) == "steps_3-5-again_2-rank_0.json.gz"  # resumed from before it all
    assert recorded(2, 9, rank=3) == "steps_3-9-again_3-rank_3.json.gz"  # one rank is as another
    assert (tmp_path / "traces" / "steps_3-5-rank_0.json.gz").read_bytes() == first
    assert len(list((tmp_path / "traces").iterdir())) == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_known_by_whole_words(name, expected):
    gpu = known_gpu(name)
    assert (gpu and gpu.name) == expected


def test_mfu_is_flops_over_a_stated_peak():
    run = parse_flags("--model tiny --peak_tflops 2".split())
    per_token = 0.0165e9  # as `minimind plan` has it
    assert peak_of(run, CPU) == (2.0, "--peak_tflops")
    order = Order(64, 8, seed=0)
    share = mfu_per_speed(run, MiniMind(), CPU, 4, order)[""]
    assert share == pytest.approx(per_token / (4 * 2e12), rel=5e-3)
    unknown = parse_flags(["--model", "tiny"])
    assert (peak_of(unknown, CPU), mfu_per_speed(unknown, MiniMind(), CPU, 1, order)) == (None, {})
