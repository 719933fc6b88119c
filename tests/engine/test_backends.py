"""The backends without DeepSpeed: what DDP sends, what it waits for, and the weights it keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import configure_libraries
from minimind.config.parse import parse_flags
from minimind.engine.build import (
    Engine,
    build_engine,
    count_devices_once,
    evaluation_accelerator,
    leave_process_group,
)
from minimind.engine.clocks import PhaseClock
from minimind.engine.optimizers import optimizer_of, parameter_groups
from minimind.engine.plain_backend import PlainBackend, prepare_for_ddp, unused_parameters
from minimind.model.causal_lm import MiniMindForCausalLM, MiniMindModel
from minimind.model.configuration import MiniMindConfig
from minimind.model.rotary import Rotary
from minimind.runtime.device import HOST, Host
from tests.conftest import ROOT

TINY = MiniMindConfig(
    vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
ROWS = torch.arange(2 * 9).view(2, 9) % 96


class WithIdleHead(MiniMindForCausalLM):
    """A model with a parameter that its forward pass never touches."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        self.idle = nn.Linear(4, 4, bias=False)


@pytest.mark.long  # a process imports torch to count page faults
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_kept_for_the_next_step_unless_the_user_set_the_allocator():
    code = """
import resource, torch
from minimind.engine.build import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory({"MALLOC_ARENA_MAX": "2"})
returned = min(faults() for _ in range(3))
keep_freed_memory({})
# What glibc cuts off before an aligned block lies between it and the one before, so that none of
# them fits the next, until its cache of such pieces is full: 7 of a size, of which there are 4.
for _ in range(4 * 7 + 2):
    faults()
kept = sum(faults() for _ in range(4))
keep_freed_memory({}, keeps=False)
print(returned, kept, faults())
"""
    environ = {k: v for k, v in os.environ.items() if "MALLOC" not in k and "THP" not in k}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True
    )
    returned, kept, after_the_run = map(int, done.stdout.split())
    assert kept < 100 < 10_000 < min(returned, after_the_run)


def test_rtx_40_with_an_old_driver_run_as_under_accelerate_launch(monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for the GPUs: under other launchers Accelerate raised NotImplementedError."""
    for place in ("accelerate.utils", "accelerate.state"):
        monkeypatch.setattr(f"{place}.check_cuda_p2p_ib_support", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR", "ACCELERATE_TORCH_DEVICE")
    for name in (*names, "NCCL_P2P_DISABLE"):
        monkeypatch.setenv(name, "")  # so that the end of the test removes what the call sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    with evaluation_accelerator("cuda", 60) as accelerator:
        assert accelerator.device == torch.device("cuda")
        assert accelerator.num_processes == 1
    assert os.environ["NCCL_P2P_DISABLE"] == "1"
    assert os.environ["NCCL_IB_DISABLE"] == "0"  # the user's


def sent_by_ddp(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every tensor that DDP broadcasts, at its construction and in a forward pass."""
    sent: list[torch.Tensor] = []
    broadcast: Any = getattr(dist, "_broadcast_coalesced")  # noqa: B009 (not listed by torch)

    def record(group: Any, tensors: list[torch.Tensor], *more: Any) -> None:
        sent.extend(tensors)
        broadcast(group, tensors, *more)

    monkeypatch.setattr(dist, "_broadcast_coalesced", record)
    wrapped = DistributedDataParallel(module)
    sent.extend(wrapped.modules_buffers)  # what every forward pass synchronises
    return sent


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")])
def test_ddp_never_sends_pos_cis_which_nccl_would_refuse(wrap, group, monkeypatch):
    module = wrap(MiniMindForCausalLM(TINY))
    names = [name for name, buffer in module.named_buffers() if buffer.is_complex()]
    assert len(names) == 1
    assert names[0].endswith("model.pos_cis")
    prepare_for_ddp(module)
    sent = sent_by_ddp(module, monkeypatch)
    assert len(sent) >= len(list(module.parameters()))
    assert not [tensor for tensor in sent if tensor.is_complex()]


def test_without_our_hand_ddp_would_send_it(group, monkeypatch):
    model = MiniMindForCausalLM(TINY)
    model._ddp_params_and_buffers_to_ignore = []  # type: ignore[misc] (shadows the class's list)
    assert [t for t in sent_by_ddp(model, monkeypatch) if t.is_complex()]


def test_the_model_alone_reports_ddp_too(group, monkeypatch):
    assert not [t for t in sent_by_ddp(MiniMindForCausalLM(TINY), monkeypatch) if t.is_complex()]


def test_unused_parameters_are_found_and_leave_no_gradient_behind():
    model = WithIdleHead(TINY)
    assert unused_parameters(model) == ["idle.weight"]
    assert all(p.grad is None for p in model.parameters())
    assert unused_parameters(MiniMindForCausalLM(TINY)) == []


def engine_of(model: MiniMindForCausalLM, monkeypatch: pytest.MonkeyPatch, line: str) -> Engine:
    """One rank that takes itself for one of a DDP group."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    return build_engine(
        ResolvedConfig(parse_flags(f"--dtype bfloat16 {line}".split()), "ddp"), model, "cpu"
    )


def test_the_flag_names_which_device_the_two_libraries_take(monkeypatch):
    """Not a variable that a launcher left: with it DeepSpeed sent from the CPU, over NCCL."""
    for name in ("DS_ACCELERATOR", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.setenv(name, "cpu")  # restored behind this test
    configure_libraries("cuda")
    assert os.environ["DS_ACCELERATOR"] == "cuda"
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ
    configure_libraries("mps")
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "mps"
    configure_libraries("cpu")
    assert os.environ["DS_ACCELERATOR"] == os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"


def test_the_ranks_are_torchs_where_the_launcher_is_itself_a_task_of_mpi(monkeypatch):
    """Accelerate took the size of MPI; DeepSpeed ended where the local rank was another."""
    task = ("OMPI_COMM_WORLD_LOCAL_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
    for name in (*task, "LOCAL_RANK", "DS_ACCELERATOR", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.setenv(name, "2")
    configure_libraries("cpu")
    assert not {*task} & {*os.environ}
    assert os.environ["LOCAL_RANK"] == "2"


@pytest.mark.parametrize(("model", "needs"), [(MiniMindForCausalLM, False), (WithIdleHead, True)])
def test_ddp_searches_for_unused_parameters_only_where_there_are_some(model, needs, monkeypatch):
    engine = engine_of(model(TINY), monkeypatch, "--accumulation_steps 2")
    try:
        forward: Any = engine.backend.forward
        assert isinstance(forward, DistributedDataParallel)
        assert forward.find_unused_parameters is needs
        clock = PhaseClock(torch.device("cpu"))
        for _ in range(2):  # DDP complains of missing gradients in the second
            clock.begin()
            assert engine.step([ROWS, ROWS], 1e-3, clock).grad_norm is not None
    finally:
        leave_process_group()


def plain(line: str) -> tuple[PlainBackend, MiniMindForCausalLM]:
    run = parse_flags(line.split())
    torch.manual_seed(1)
    model = MiniMindForCausalLM(TINY).to(getattr(torch, run.dtype))
    groups = parameter_groups(model, run.weight_decay)
    return PlainBackend(model, model, ResolvedConfig(run, "single"), groups), model


def test_bf16_weights_are_the_rounded_fp32_ones_of_a_plain_adamw():
    backend, model = plain("--dtype bfloat16 --grad_clip 0")
    groups = parameter_groups(model, 0.1)
    copies = [
        {**group, "params": [p.detach().float().requires_grad_() for p in group["params"]]}
        for group in groups
    ]
    reference = optimizer_of(copies, parse_flags([]))
    backend.begin(5e-4)
    model(input_ids=ROWS).logits.float().sum().backward()
    pairs = [
        (p, copy)
        for group, copied in zip(groups, copies, strict=True)
        for p, copy in zip(group["params"], copied["params"], strict=True)
    ]
    for p, copy in pairs:
        assert p.grad is not None
        copy.grad = p.grad.float()
    backend.update(is_last=True)
    reference.step()
    for p, copy in pairs:
        assert torch.equal(p, copy.bfloat16())
        assert p.grad is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moments_are_there_before_the_first_step_as_torch_makes_them(dtype):
    """Made in the first update, they would split the memory that the step has left."""
    backend, _ = plain(f"--dtype {dtype}")
    optimizer = backend.torch_optimizer
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    lazy = torch.optim.AdamW([p.detach().clone() for p in updated], lr=0.0, fused=True)
    for p in lazy.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    lazy.step()
    for ours, theirs in zip(updated, lazy.param_groups[0]["params"], strict=True):
        made, expected = optimizer.state[ours], lazy.state[theirs]
        assert made.keys() == expected.keys()
        for name, tensor in made.items():
            assert not tensor.any()
            assert tensor.dtype == expected[name].dtype
            assert tensor.stride() == expected[name].stride()
    assert backend.state().optimizer_step() == 0


def test_gradients_are_clipped_to_the_flags_norm():
    backend, model = plain("--dtype float32 --grad_clip 0.25 --weight_decay 0")
    groups = [{"params": [p]} for p in model.parameters()]
    backend.torch_optimizer = torch.optim.SGD(groups, lr=1.0, fused=True)
    before = [p.detach().clone() for p in model.parameters()]
    backend.begin(1.0)
    model(input_ids=ROWS).logits.pow(2).sum().backward()
    norm = backend.update(is_last=True)
    assert norm is not None
    assert float(norm) > 0.25
    moved = [(p - b).detach().double() for p, b in zip(model.parameters(), before, strict=True)]
    assert float(torch.cat([m.flatten() for m in moved]).norm()) == pytest.approx(0.25, rel=1e-5)


def test_ddp_reduces_once_in_a_step_of_several_micro_batches(monkeypatch):
    engine = engine_of(MiniMindForCausalLM(TINY), monkeypatch, "--accumulation_steps 3")
    calls: list[int] = []

    def count(state, bucket):  # DDP would want the very types it knows, or none
        calls.append(1)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    try:
        forward: Any = engine.backend.forward
        forward.register_comm_hook(None, count)
        clock = PhaseClock(torch.device("cpu"))
        counted = []
        for micro_batches in ([ROWS], [ROWS], [ROWS, ROWS, ROWS]):
            calls.clear()
            clock.begin()
            engine.step(micro_batches, 1e-3, clock)
            counted.append(len(calls))
        assert counted[2] == counted[1] > 0
    finally:
        leave_process_group()


def test_a_run_in_reals_and_without_float64_has_the_losses_of_the_cpu(monkeypatch):
    """With a stand-in for an Apple GPU: what torch lacks there is not used, on the CPU."""
    losses = []
    for is_apple in (False, True):
        if is_apple:
            for name in ("has_float64", "skips_by_flag"):
                monkeypatch.setattr(Host, name, False)
            monkeypatch.setattr(
                MiniMindModel, "rotary_at", lambda self, i: Rotary(None, self.pos_reals[:, i])
            )
        torch.manual_seed(1)
        line = "--accumulation_steps 2 --dtype float32"
        engine = engine_of(MiniMindForCausalLM(TINY), monkeypatch, line)
        clock, found = PhaseClock(torch.device("cpu")), []
        try:
            for _ in range(4):
                clock.begin()
                result = engine.step([ROWS, ROWS + 1], 1e-2, clock)
                assert result.loss_sum.dtype == (torch.float32 if is_apple else torch.float64)
                found.append(float(result.loss_sum))
        finally:
            leave_process_group()
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] > losses[0][-1]


def numbers_of(backend: PlainBackend) -> dict[str, torch.Tensor]:
    """Copies of all weights and moments, and how many updates are counted."""
    held = backend.state()
    count = torch.tensor(held.optimizer_step() or 0)
    return {"steps": count} | {key: run.clone() for key, run in held.slices(0, 1)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spoilt", [float("inf"), float("nan")])
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_gradient_that_is_not_finite_is_no_update_and_is_counted(
    dtype, spoilt, by_flag, monkeypatch
):
    """With a stand-in for a device whose fused AdamW does not read the flag."""
    monkeypatch.setattr(HOST, "skips_by_flag", by_flag)
    steps: list[bool] = []
    step = torch.optim.AdamW.step

    def noting(optimizer: Any) -> None:
        steps.append(bool(optimizer.found_inf))
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    backend, model = plain(f"--dtype {dtype}")
    scale = backend.scaler.get_scale()
    for factor, skipped in ((spoilt, 1), (1.0, 1), (spoilt, 2), (1.0, 2)):
        before = numbers_of(backend)
        backend.begin(5e-4)
        loss = model(input_ids=ROWS).logits.float().sum() * 1e-3
        backend.backward(loss * factor)
        backend.update(is_last=True)
        after = numbers_of(backend)
        assert before.keys() <= after.keys()
        none = torch.zeros(())  # moments that are not there yet: they begin with 0
        same = all(bool((run == before.get(key, none)).all()) for key, run in after.items())
        assert same is (factor != 1.0)
        assert backend.skipped_steps == skipped
        assert all(p.grad is None for p in model.parameters())
    assert steps == ([True, False, True, False] if by_flag else [False, False])
    assert backend.scaler.get_scale() == scale / (4 if dtype == "float16" else 1)
    other, _ = plain(f"--dtype {dtype}")
    other.restore_counters(backend.counters())
    assert (other.steps, other.skipped_steps) == (4, 2)


def test_deepspeed_starts_no_program_to_count_processors_twice(monkeypatch: pytest.MonkeyPatch):
    """Its stage 3 asks with every bucket."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
    numa, started = import_module("deepspeed.utils.numa"), []
    two = b"available: 2 nodes (0-1)\nnode 0 cpus: 0 1\nnode 1 cpus: 2 3"
    monkeypatch.setattr(numa.subprocess, "check_output", lambda words: started.append(words) or two)
    monkeypatch.setattr(accelerator, "device_count", None, raising=False)  # taken back at the end
    count_devices_once()
    assert [accelerator.device_count() for _ in range(3)] == [2, 2, 2]
    assert started == [["numactl", "--hardware"]]
