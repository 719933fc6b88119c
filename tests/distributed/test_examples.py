"""Every file of configs/deepspeed trains, and all of those with our schedule to the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import resolve
from minimind.config.parse import parse_flags
from minimind.errors import UsageError
from tests.conftest import PACE, ROOT, SHAPE, Launcher, Run
from tests.distributed.conftest import FP32, largest_relative_difference

EXAMPLES = {path.stem: path for path in sorted((ROOT / "configs" / "deepspeed").glob("*.json"))}
# The first rates of DeepSpeed's schedulers. WarmupCosineLR begins after the second update.
OWN_RATES = {"warmup_cosine": [0.0, 0.0, 5e-4], "lr_range_test": [2e-3, 4e-3, 6e-3]}


def run_alone(launch: Launcher, out_dir: Path, flags: str) -> Run:
    """One process started by hand."""
    command = [sys.executable, str(ROOT / "train_pretrain.py"), "--data_path", str(launch.corpus)]
    places = ["--cache_dir", str(launch.cache), "--out_dir", str(out_dir)]
    words = f"{SHAPE} {PACE} --accumulation_steps 4 {flags}".split()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *places, *words], env=environ, capture_output=True, text=True, timeout=300
    )
    return Run(out_dir, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def trained(launch: Launcher, fp32: Run, tmp_path_factory: pytest.TempPathFactory):
    """The run of each example by name, and `single` without DeepSpeed; two at a time."""
    root = tmp_path_factory.mktemp("examples")
    flags = {name: f"{FP32} --deepspeed_config {path}" for name, path in EXAMPLES.items()}
    flags["warmup_cosine"] += " --warmup_steps 4 --save_interval 9 --keep_last 9"
    flags |= {"single": FP32, "bf16 single": "--dtype bfloat16"}
    flags["bf16 zero0"] = f"--dtype bfloat16 --deepspeed_config {EXAMPLES['zero0']}"
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(run_alone, launch, root / name, line) for name, line in flags.items()
        }
    return {name: run.result() for name, run in started.items()}


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("name", sorted({*EXAMPLES, "single"}))
def test_an_example_trains_as_the_shipped_file_does(name: str, trained: dict[str, Run], fp32: Run):
    run = trained[name]
    assert run.status == 0, run.stderr
    backend = "single" if name == "single" else "deepspeed"
    (start,) = run.events("run_start")
    assert (start["backend"], start["world_size"]) == (backend, 1)
    rates = [s["lr"] for s in run.events("step")]
    if name in OWN_RATES:
        assert "rate     DeepSpeed's " in run.stdout
        assert rates[:3] == pytest.approx(OWN_RATES[name], rel=1e-9)
        assert max(rates) < (2e-3 if name == "warmup_cosine" else 0.05)
        return
    if name == "muon":
        assert run.losses()[0] == pytest.approx(fp32.losses()[0], rel=2e-6)
        assert run.losses()[-1] < run.losses()[0]
        assert largest_relative_difference(run.losses(), fp32.losses()) > 1e-3
        assert "of Muon 0.02" in run.stdout
        return
    assert largest_relative_difference(run.losses(), fp32.losses()) < 2e-6
    assert rates == [s["lr"] for s in fp32.events("step")]


@pytest.mark.long
@pytest.mark.launch
def test_a_schedule_of_deepspeeds_continues_where_it_was(
    launch: Launcher, trained: dict[str, Run], tmp_path: Path
):
    whole = trained["warmup_cosine"]
    saved = whole.out_dir / "checkpoints" / "step_00000009"
    flags = f"{FP32} --deepspeed_config {EXAMPLES['warmup_cosine']} --warmup_steps 4"
    resumed = run_alone(launch, tmp_path, f"{flags} --resume {saved}")
    assert resumed.status == 0, resumed.stderr
    assert resumed.curve() == whole.curve()[9:]


@pytest.mark.long
@pytest.mark.launch
def test_bf16_means_the_same_at_stage_0_and_without_deepspeed(trained: dict[str, Run]):
    """DeepSpeed's first step at stage 0 would be Adam's second, if it were left as it is."""
    zero0, single = trained["bf16 zero0"].losses(), trained["bf16 single"].losses()
    assert len(zero0) == 20
    assert zero0 == pytest.approx(single, abs=2e-3)


def test_fp16_is_resolved_for_a_gpu_with_its_loss_scaling():
    written = read_deepspeed_json(str(EXAMPLES["fp16"]))
    run = parse_flags(["--dtype", "float16"])
    found = resolve(written, "fp16.json", run, 2, "cuda").config
    assert found["fp16"]["enabled"] is True
    assert found["fp16"]["initial_scale_power"] == 16
    assert found["bf16"]["enabled"] is False
    with pytest.raises(UsageError, match="needs a GPU"):
        resolve(written, "fp16.json", run, 2, "cpu")
