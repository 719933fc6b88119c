"""--trace_steps: which steps, what is written, and where a run begins or ends within them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from minimind.errors import StorageError, UsageError
from minimind.flags import parse_flags
from minimind.train.architecture import Own
from minimind.train.peaks import VENDOR, is_model, mfu_per_speed, peak_of, peak_told
from minimind.train.profile import PhaseClock
from minimind.train.trace import Trace, traced_steps

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
            trace.write() if trace.is_recording else trace.begin()
        clock.is_traced = trace.is_recording
        clock.begin()
        for phase in ("data", "forward", "backward", "optimizer"):
            torch.dot(torch.ones(8), torch.ones(8))
            clock.mark(phase)
    assert ended == [(max(begins_at, 1), False), (3, True)]
    written = tmp_path / "traces" / "steps_2-3-rank_1.json.gz"
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [written.name]
    names = [
        event["name"] for event in json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
    ]
    steps = 3 - max(begins_at, 1)
    assert [names.count(phase) for phase in ("data", "forward", "optimizer")] == [steps] * 3
    assert names.count("aten::dot") == 4 * steps


def test_a_run_that_ends_early_writes_what_it_has_and_a_full_disk_is_told(tmp_path: Path):
    trace = Trace((1, 9), tmp_path, rank=0)
    assert trace.stop() is None  # nothing begun, nothing written
    assert not trace.is_due(0, is_over=True)
    assert list(tmp_path.iterdir()) == []
    trace.begin()
    torch.ones(2)
    assert (trace.is_due(4), trace.is_due(4, is_over=True)) == (False, True)
    trace.write()
    assert trace.path.exists()
    assert not trace.is_recording
    blocked = Trace((1, 9), tmp_path / "file", rank=0)
    (tmp_path / "file").write_text("")
    blocked.begin()
    with pytest.raises(StorageError, match="; free some space, or mend the path of --out_dir"):
        blocked.write()


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
    assert next((model for model in VENDOR if is_model(model, name)), None) == expected


def test_mfu_is_flops_over_a_stated_peak():
    run = parse_flags("--model tiny --peak_tflops 2".split())
    per_token = 0.0165e9  # as `minimind plan` has it
    assert peak_of(run, CPU) == (2.0, "--peak_tflops")
    share = mfu_per_speed(run, Own(), CPU, world_size=4)
    assert share == pytest.approx(per_token / (4 * 2e12), rel=5e-3)
    assert "MFU of 2 TFLOP/s (--peak_tflops)" in peak_told(run, CPU)
    unknown = parse_flags(["--model", "tiny"])
    assert (peak_of(unknown, CPU), mfu_per_speed(unknown, Own(), CPU, 1)) == (None, None)
    assert peak_told(unknown, CPU) == ""
