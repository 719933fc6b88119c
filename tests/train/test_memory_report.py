"""Out of memory ends with status 10, in one line with the micro-batch and what would fit."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.architecture.plan import GIB
from minimind.checkpoint.directory import published_checkpoints, verify
from minimind.cli.main import main
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import build_config, parse_flags
from minimind.engine.build import leave_process_group
from minimind.engine.engine import Engine
from minimind.errors import MemoryFull, known_error, which_memory
from minimind.runtime.exit import Ending
from minimind.runtime.process import SCRIPT_PID, Progress
from minimind.train import memory
from minimind.train.memory import remedy
from minimind.train.pretrain import pretrain
from tests.conftest import SMALL, Launcher, Trained, sentences
from tools.runs import events

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of"
    " which 5.20 GiB is free.\nOf the allocated memory 70.00 GiB is allocated by PyTorch"
)


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError(CUDA), "device"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "device"),
        (RuntimeError("HIP error: out of memory"), "device"),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling"), "device"),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 GiB (NPU 0; 60.97"), "device"),
        (RuntimeError("failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"), "device"),
        (RuntimeError("unhandled cuda error\nCuda failure 2 'out of memory'"), "device"),
        (RuntimeError("inductor raised:\nOutOfMemoryError: CUDA out of memory."), "device"),
        (MemoryError("Unable to allocate 8.00 GiB for an array"), "host"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't"
                      " allocate memory: you tried to allocate 8000 bytes."), "host"),
        (RuntimeError("out of resource: shared memory, Required: 262144"), ""),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ""),
        (ValueError("CUDA out of memory"), ""),
        (OSError(12, "Cannot allocate memory"), ""),
    ],
)  # fmt: skip
def test_a_failed_allocation_is_known_by_its_type_or_its_words(error: Exception, where: str):
    assert which_memory(error) == where


def test_a_driver_without_expandable_segments_is_named_with_the_way_out():
    error = RuntimeError("CUDA driver error: operation not supported\nException raised from map")
    known = known_error(error)
    assert isinstance(known, MemoryFull)
    assert str(known).endswith("run again with PYTORCH_ALLOC_CONF=expandable_segments:False")
    assert known_error(RuntimeError("CUDA driver error: unknown error")) is None


def test_torch_raises_what_is_known_of_the_host():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert which_memory(raised.value) == "host"


def fail_at(monkeypatch: pytest.MonkeyPatch, step: int, error: Exception) -> None:
    """Have the engine raise `error` in that optimizer step."""
    taken, whole = [0], Engine.step

    def failing(self: Engine, *args: Any) -> Any:
        taken[0] += 1
        if taken[0] == step:
            raise error
        return whole(self, *args)

    monkeypatch.setattr(Engine, "step", failing)


def ended(flags: dict[str, Any]) -> int:
    """The exit status of a run in this process, reported as train_pretrain.py does."""
    environ, progress = dict(os.environ), Progress()
    ending = Ending(progress, debug=False)
    try:
        return ending.done(pretrain(build_config(flags, "{name}"), progress))
    except Exception as error:
        return ending.report(error)
    finally:
        leave_process_group()
        os.environ.clear()
        os.environ.update(environ)
        if progress.lock:
            progress.lock.close()


def test_a_run_out_of_memory_ends_with_10_in_one_line_and_keeps_its_checkpoint(
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    places = {"data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    saved = {"save_interval": 2, "async_save": False}  # else the failure may overtake the save
    flags = {**SMALL, **places, **saved, "out_dir": str(tmp_path)}
    with monkeypatch.context() as patched:
        fail_at(patched, 4, torch.OutOfMemoryError(CUDA))
        assert ended(flags) == 10
    output = capsys.readouterr().err
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if "error[" in line]
    assert line.startswith("train_pretrain: error[E_MEMORY] rank=0 step=3: the device is out of")
    assert "tried to allocate 20.00 GiB" in line
    assert "4 rows (--batch_size 4) x 64 tokens (--max_seq_len 64)" in line
    assert "`minimind plan` counts" in line
    *_, end = events(tmp_path)
    assert (end["event"], end["code"], end["status"]) == ("exit", "E_MEMORY", 10)
    (kept,) = published_checkpoints(tmp_path / "checkpoints")
    assert kept.name == "step_00000002"
    assert verify(kept) is None
    assert ended(flags) == 0


@pytest.mark.parametrize(
    ("processes", "by_script", "words"),
    [
        (1, False, "; the run continues with at most 4 rows at once"),
        (2, True, "; the run continues with at most 4 rows at once"),
        (2, False, "; run the same command again, which continues with at most 4 rows at once"),
    ],
)
def test_a_halved_micro_batch_is_said_to_go_on_by_itself_where_it_does(
    processes: int, by_script: bool, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(SCRIPT_PID, raising=False)
    if by_script:
        monkeypatch.setenv(SCRIPT_PID, "1")
    launch = SimpleNamespace(world_size=processes, local_world_size=processes)
    setup: Any = SimpleNamespace(device="cpu", launch=launch)
    resolved = ResolvedConfig(parse_flags("--dtype float32 --batch_size 8".split()), "single")
    with pytest.raises(MemoryFull) as raised:
        with memory.report_out_of_memory(setup, resolved, memory.Fit(8, "", {})):
            raise torch.OutOfMemoryError(CUDA)
    assert str(raised.value).endswith(words)


@pytest.mark.parametrize("place", ["evaluate", "build_engine", "Saver.begin"])
def test_wherever_it_happens(
    place: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError(CUDA)

    module = {
        "evaluate": "train.evaluate",
        "build_engine": "train.pretrain",
        "Saver.begin": "checkpoint.saver",
    }[place]
    monkeypatch.setattr(f"minimind.{module}.{place}", fail)
    run: Any = training
    places = {"data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    with pytest.raises(MemoryFull, match="micro-batch of 4 rows"):
        run({**SMALL, **places}, out_dir=str(tmp_path))


def advice(line: str, gib: float, world_size: int = 1, device: str = "cuda", **more: Any) -> str:
    run = parse_flags(["--model", "104m", "--dtype", "bfloat16", *line.split()])
    resolved = ResolvedConfig(run, "single", **more)
    return remedy(run, resolved, world_size, device, int(gib * GIB))


def test_the_advice_is_what_fits_by_plan(capsys: pytest.CaptureFixture[str]):
    output = advice("--batch_size 64 --accumulation_steps 2 --deepspeed_config none", 12)
    found = re.search(r"--batch_size (\d+) --accumulation_steps (\d+) fits", output)
    assert found, output
    rows, steps = map(int, found.groups())
    assert (rows * steps, rows < 64) == (128, True)
    flags = f"--model 104m --batch_size {rows} --accumulation_steps {steps}"
    assert main(["plan", *flags.split(), "--deepspeed_config", "none", "--memory", "12GiB"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("*")]
    assert row.endswith("yes")


def test_the_advice_where_it_should_fit_and_where_nothing_does():
    assert "should fit: end other processes" in advice("--batch_size 1", 80)
    assert "or give --gradient_checkpointing" in advice("--batch_size 1", 80)
    assert "give" not in advice("--batch_size 1 --gradient_checkpointing", 80)
    assert "nothing fits; lower --dim" in advice("--batch_size 1", 0.1)
    apple = advice("--batch_size 1", 80, device="mps")
    assert "end other programs, whose memory the GPU shares" in apple
    assert "ZeRO" in advice("--batch_size 1", 1.4)
    assert "nothing fits" in advice("--batch_size 1", 1.4, device="mps")  # no DeepSpeed there
    sharded = advice("--batch_size 1", 1.6, world_size=8)
    assert "ZeRO-1 with --batch_size 1 --accumulation_steps 1 fits" in sharded


def test_the_advice_with_a_global_batch_makes_the_micro_batch_smaller():
    """Also where --batch_size is far above the 11 rows that a process takes at once."""
    flags = "--global_batch_size 32 --batch_size 32"
    whole = advice(f"{flags} --deepspeed_config none", 4, world_size=3)
    divided = advice(f"{flags} --tensor_parallel 2", 4, world_size=6)
    for output in (whole, divided):
        assert "accumulation" not in output
        (rows,) = map(int, re.findall(r"--batch_size (\d+)", output))
        run = parse_flags([*flags.split()[:2], "--batch_size", str(rows)])
        assert run.micro_batch_rows(3) < 11, output


def test_a_gpu_run_without_host_memory_is_reported_so(monkeypatch: pytest.MonkeyPatch):
    launch = SimpleNamespace(world_size=1, local_world_size=1)
    setup: Any = SimpleNamespace(device="cuda", launch=launch)
    monkeypatch.setattr(memory, "capacity", lambda setup: 80 * GIB)
    resolved = ResolvedConfig(parse_flags(["--dtype", "bfloat16"]), "single")
    with pytest.raises(MemoryFull, match=r"^the host is out of memory, not the GPU; give --no-"):
        with memory.report_out_of_memory(setup, resolved):
            raise MemoryError


def test_a_command_out_of_memory_ends_with_10(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*args: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr("minimind.inference.engine.generate_texts", fail)
    requested = ["generate", "--checkpoint", str(trained.run), "--prompt", "a"]
    assert main(requested) == 10
    output = capsys.readouterr().err
    assert "error[E_MEMORY]: the device is out of memory (CUDA out of memory." in output
    assert "Traceback" not in output


@pytest.mark.long
def test_the_script_answers_10_and_the_other_rank_does_not_hang(launch: Launcher, tmp_path: Path):
    """Attention scores of 51 GB, under a limit that holds on every machine: torch's own error.

    A CPU with instructions for bfloat16 keeps them in that: two tensors of 26 GB.
    """
    text = tmp_path / "long.txt"
    text.write_text(" ".join(sentences(3, 2000)))
    flags = (
        f"--data_path {text} --max_seq_len 40000 --n_heads 8 --no-use_flash_attn --val_fraction 0"
    )
    limit = 40 * 2**30
    done = launch.run(
        tmp_path / "run",
        f"{flags} --batch_size 1 --accumulation_steps 1 --max_steps 1",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.status == 10, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error[" in line]
    assert re.search(r"host is out of memory \(tried to allocate (51|25)\d{9} bytes\)", line)
    assert "1 rows (--batch_size 1) x 40000 tokens (--max_seq_len 40000)" in line
    assert "Traceback" not in done.stderr
