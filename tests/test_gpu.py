"""One CUDA GPU against the CPU: the same losses, resumed bit for bit, and nothing waited for.

Command: make gpu. A few minutes, most of them for starting and compiling. Beside these,
tests/model/test_document_attention.py and tests/data/loader/test_batches.py have some of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minimind.model.layers import flash_attention, reference_attention
from tests.conftest import ROOT, Launcher, Run
from tests.distributed.test_runs import kill_all, wait_for

pytestmark = pytest.mark.gpu
launched = pytest.mark.launch
GPU, CPU = "--device cuda", "--device cpu --dtype float32 --deepspeed_config none"
DISTANCE = {"float32": 1e-5, "bfloat16": 2e-3}  # of losses; between two CPU runs 4.8e-4 in bf16


def ran(launch: Launcher, out_dir: Path, flags: str) -> Run:
    run = launch.run(out_dir, flags, processes=1)
    assert run.status == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def reference(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """In fp32 on the CPU, in one process without DeepSpeed; the other one with --doc_mask."""
    folder = tmp_path_factory.mktemp("reference")
    return {
        more: ran(launch, folder / f"out{more}", f"{CPU} {more}") for more in ("", "--doc_mask")
    }


@launched
@pytest.mark.parametrize("dtype", DISTANCE)
@pytest.mark.parametrize(
    ("more", "masked"),
    [
        ("--compile off", ""),
        ("", ""),  # compiled by default
        ("--deepspeed_config none", ""),
        ("", "--doc_mask"),
    ],
    ids=["eager", "compiled", "without DeepSpeed", "document mask"],
)
def test_a_gpu_has_the_losses_of_fp32_on_the_cpu(
    launch: Launcher, reference: dict[str, Run], tmp_path: Path, dtype: str, more: str, masked: str
):
    run = ran(launch, tmp_path, f"{GPU} --dtype {dtype} {more} {masked}")
    (start,) = run.events("run_start")
    assert start["device"] == "cuda"
    assert run.losses() == pytest.approx(reference[masked].losses(), rel=DISTANCE[dtype])
    assert run.events("step")[-1]["memory_mib"] > 0


@launched
def test_killed_and_resumed_a_deterministic_run_repeats_the_unbroken_one_bit_for_bit(
    launch: Launcher, tmp_path: Path
):
    """ZeRO-2, bf16, compiled."""
    flags = f"{GPU} --deterministic --max_steps 200 --save_interval 20"
    whole = ran(launch, tmp_path / "whole", flags)
    started = launch.start(tmp_path / "killed", flags, processes=1)
    wait_for(started, tmp_path / "killed", '"step": 30,')
    kill_all(started)
    resumed = ran(launch, tmp_path / "killed", flags)
    assert len(resumed.events("run_start")) == 2
    assert resumed.events("run_start")[1]["step"] > 0
    expected = dict(zip(range(1, 201), whole.curve(), strict=True))
    assert {int(line[0]) for line in resumed.curve()} == {*expected}
    for line in resumed.curve():
        assert line == expected[int(line[0])]


@launched
def test_between_reports_only_deepspeed_waits_for_the_gpu(tmp_path: Path):
    out = tmp_path / "reads.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.host_reads", str(out), "cuda"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())["stage 2, bfloat16"]
    assert {place.partition(":")[0] for place in found} == {"deepspeed"}


def attended(attend: Any, parts: list[Tensor], visible: Tensor | None, of_out: Tensor):
    """What attention gives, and its gradients to queries, keys and values."""
    q, k, v = (part.detach().requires_grad_() for part in parts)
    out = attend(q, k, v, visible)
    return [out.detach(), *torch.autograd.grad((out * of_out).sum(), (q, k, v))]


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("length", [1024, 704, 65])
def test_the_kernels_that_are_chosen_give_the_references_gradients(length: int, is_masked: bool):
    """Of shared key heads. With scores far below 0, torch 2.13's cuDNN has NaNs at 704."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(2, 8, length, 64), (2, 2, length, 64), (2, 2, length, 64)]
    parts = [torch.randn(shape, generator=draw).cuda().bfloat16() for shape in shapes]
    of_out = torch.randn(shapes[0], generator=draw).cuda()
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None].cuda()
    visible = causal if is_masked else None
    found = attended(flash_attention, parts, visible, of_out)
    wide = attended(reference_attention, [part.float() for part in parts], visible, of_out)
    for fused, expected in zip(found, wide, strict=True):
        assert float((fused.float() - expected).norm() / expected.norm()) < 1e-2  # 2e-3 on a CPU
    far = [part + shift for part, shift in zip(parts, (4, -4, 0), strict=True)]  # -128, about
    assert all(
        tensor.isfinite().all() for tensor in attended(flash_attention, far, visible, of_out)
    )
