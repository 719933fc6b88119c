"""Steps, evaluations and whole runs on the pretended device; test_pretended_cuda.py runs them.

Every tensor is on the device, and the host reads what is documented and nothing else. `Device`
raises for tensors of two devices; faults that are planted show that it finds each kind.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn.attention.flex_attention import BlockMask

import minimind.train as training
from minimind.checkpoint import tensor_files
from minimind.checkpoint.tensor_files import Staging
from minimind.config.deepspeed.backend_choice import device_for, with_compile
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import Launch
from minimind.config.parse import parse_flags
from minimind.engine.build import Engine, build_engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.engine.flat_partitions import CHECKED
from minimind.model import kernels
from minimind.model.causal_lm import MiniMindForCausalLM, MiniMindModel, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.runtime import hardware
from minimind.runtime.device import CUDA, Copies
from tests.config.notices import notices_of
from tools import engines
from tools.engines import Case
from tools.pretended.device import PROPERTIES, Device
from tools.runs import sentences

train: Any = training  # a package that is called like a function
GPU = torch.device("cuda", 0)
MICRO_BATCHES, ROWS, LENGTH = 2, 2, 128
FLAGS = "--data_path x --device cuda --dtype bfloat16 --compile off"
FLAGS += f" --accumulation_steps {MICRO_BATCHES}"
SHAPE = {"vocab_size": 96, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": LENGTH}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with Device() as found:
        monkeypatch.setattr(CUDA, "use", found.use)
        yield found


def model_of(**changes: Any) -> Any:
    shape = {"n_layers": 1, **SHAPE, **changes}
    return MiniMindForCausalLM(MiniMindConfig(**shape)).train()


@pytest.fixture
def built() -> Iterator[Callable[..., Engine]]:
    def build(flags: str = "", recomputes: bool = False, **changes: Any) -> Engine:
        model = model_of(**changes)
        if recomputes:
            enable_checkpointing(model)
        run = parse_flags(f"{FLAGS} {flags}".split())
        return build_engine(ResolvedConfig(run, "single"), model, "cuda")

    yield build
    leave_process_group()


def step(engine: Engine, number: int, length: int = LENGTH) -> Any:
    clock = PhaseClock(engine.device)
    rows = torch.zeros((ROWS, length + 1), dtype=torch.int64, device=engine.device)
    engine.seed(number)
    clock.begin()
    return engine.step([rows] * MICRO_BATCHES, 1e-3, clock)


def evenly(tensor: Tensor) -> Tensor:
    """Visits of experts, two per token; other numbers are 0."""
    return torch.full_like(tensor, 2 * ROWS * LENGTH // len(tensor) if tensor.dim() == 1 else 0)


FLAG = {"minimind: step": 1}  # that the gradient is finite
MOE = {"use_moe": True, "n_layers": 2}
SIZES = {"minimind: forward": 2 * MICRO_BATCHES}  # in each layer
STEPS: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("", {}, {}),
    ("--dtype float32", {"qk_norm": True}, {}),
    ("--dtype float16 --grad_clip 0", {}, {}),
    ("--loss chunked --ema 0.9", {"tie_word_embeddings": False}, {}),
    ("", {"recomputes": True}, {}),
    ("", {"doc_mask": True, "recomputes": True}, {}),
    ("--dtype float32 --loss chunked", {"doc_mask": True}, {}),
    ("--task sft", {}, {}),
    ("--optimizer muon", {}, FLAG),
    ("--optimizer lion", {}, FLAG),
    ("", MOE, SIZES),
    ("--dtype float32", {**MOE, "recomputes": True}, {"minimind: forward": 8}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("flags", "changes", "reads"), STEPS)
def test_a_step_is_on_the_device_and_reads_what_is_documented(
    flags: str, changes: dict[str, Any], reads: dict[str, int], device: Device, built: Any
):
    device.values = evenly
    engine = built(flags, **changes)
    assert dist.get_backend() == "gloo"  # of a single process: no NCCL
    step(engine, 0)
    device.forget()
    result = step(engine, 1)
    assert device.reads == reads
    assert (device.waits, device.on_cpu, device.draws) == (0, {}, {})
    backend: Any = engine.backend
    model, optimizer = engine.model, backend.torch_optimizer
    held = [*model.parameters(), *model.buffers(), *result.loss_sums, *result.targets]
    held += [result.grad_norm, result.skipped_so_far, result.is_skipped]
    held += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert {tensor.device for tensor in held} == {GPU}
    assert len(optimizer.state) == len([*model.parameters()])


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Build an engine of DeepSpeed on the device."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    init = dist.init_process_group

    def without_nccl(backend: str, **options: Any) -> None:
        init("fake", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage] (documented, not listed)

    def placed(config: MiniMindConfig) -> Any:
        """On the device before DeepSpeed, which refers weakly to what could be swapped then."""
        model: Any = MiniMindForCausalLM(config)
        model = model.to(GPU)
        model.to = lambda *_: model
        return model

    monkeypatch.setattr(dist, "init_process_group", without_nccl)
    yield lambda case: engines.build(replace(case, model=placed), seed=1, on="cuda")
    leave_process_group()


NORM, COPIED = "deepspeed: is_invalid_grad_norm", "deepspeed: mask_nan_or_inf_with_val_inplace"
SCANNED, COMPARED = "deepspeed: has_overflow", "minimind: _check"
UNCLIPPED = {"gradient_clipping": 0.0}
# Reads of a step, and copies that are waited for, by DeepSpeed's own update of two groups.
ZERO: dict[str, tuple[Case, dict[str, int]]] = {
    "1, bf16": (Case(1, "bfloat16"), {SCANNED: 1, COPIED: 2, NORM: 3}),
    "2, bf16": (Case(2, "bfloat16"), {SCANNED: 1, COPIED: 2, NORM: 3}),
    "1, fp16": (Case(1, "float16"), {SCANNED: 1, COPIED: 2, NORM: 3}),
    "2, fp16": (Case(2, "float16"), {SCANNED: 1, COPIED: 2, NORM: 3}),
    "1, fp32": (Case(1, "float32"), {COPIED: 2, NORM: 3}),
    "2, fp32": (Case(2, "float32"), {COPIED: 2, NORM: 3}),
    "no clipping": (Case(2, "bfloat16", edits=UNCLIPPED), {SCANNED: 1, COPIED: 2, NORM: 1}),
}


SHORT = ("2, bf16",)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by DeepSpeed
@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")  # no NCCL
def test_updates_under_zero_read_what_is_documented(
    device: Device, zero: Any, pytestconfig: pytest.Config
):
    """One number by flat partitions; the first updates of a run compare each gradient besides.

    All in one test: the groups of DeepSpeed are those of the process.
    """
    found: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for name in ZERO if pytestconfig.getoption("--long") else SHORT:
        case, by_deepspeed = ZERO[name]
        for update in ("deepspeed", "auto"):
            flags = f"{case.flags} --compile off --zero_update {update}"
            engine = zero(replace(case, flags=flags, shape={"n_layers": 1}))
            gc.collect()  # the engine before waits for the device at its end
            seen = found[f"{name}, {update}"] = []
            for number in range(CHECKED + 1 if update == "auto" else 2):
                device.forget()
                step(engine, number, engines.LENGTH)
                seen.append(dict(device.reads))
                assert (device.waits, device.on_cpu, device.draws) == (0, {}, {})
        weights = len([*engine.model.parameters()])
        # Whether each is equal, and whether one of any rank is not, which is sent and read.
        compared = {COMPARED: weights + 2, NORM: 1}
        expected[f"{name}, deepspeed"] = [by_deepspeed] * 2
        expected[f"{name}, auto"] = [*[compared] * CHECKED, {NORM: 1}]
    assert found == expected


@pytest.mark.parametrize("is_fused", [False, True])
def test_documents_have_blocks_where_there_is_a_compiler(
    is_fused: bool, device: Device, built: Any, monkeypatch: pytest.MonkeyPatch
):
    """With a stand-in for flex attention, which looks at its mask; otherwise the mask is dense."""
    blocks: list[BlockMask] = []

    def fused(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
        blocks.append(block_mask)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)

    monkeypatch.setattr(kernels, "_compiled", lambda: fused)
    fault = "" if is_fused else "the package triton is not installed"
    monkeypatch.setattr(kernels, "_gpu_compiler_fault", lambda bf16: fault)
    engine = built(doc_mask=True, n_layers=2)
    device.forget()
    step(engine, 0)
    assert (device.reads, device.waits, device.on_cpu) == ({}, 0, {})
    assert len(blocks) == is_fused * 2 * MICRO_BATCHES
    lists = [tensor for mask in blocks for tensor in mask.as_tuple() if isinstance(tensor, Tensor)]
    assert {tensor.device for tensor in lists} == ({GPU} if is_fused else set())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float, int], None]]:
    """Let the device have this compute capability, and KiB of shared memory for a block."""

    def put(capability: float, shared: int) -> None:
        major, minor = int(capability), round(capability % 1 * 10)
        found = SimpleNamespace(
            **{**vars(PROPERTIES), "major": major, "minor": minor},
            shared_memory_per_block=48 * 2**10,
            shared_memory_per_block_optin=shared * 2**10,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))

    monkeypatch.setattr(hardware, "find_spec", lambda name: object())  # triton
    monkeypatch.setattr(hardware, "has_python_header", lambda: True)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name)
    kernels._gpu_compiler_fault.cache_clear()
    yield put
    kernels._gpu_compiler_fault.cache_clear()


# Compute capability, KiB of shared memory, dtype; then whether the model is compiled and documents
# have blocks, whether they have with heads of 256 channels, whether a kernel takes grouped heads.
CARDS = [
    (6.1, 48, "float16", False, False, False),  # GTX 10
    (7.0, 96, "bfloat16", False, False, False),  # V100
    (7.0, 96, "float16", True, False, False),
    (7.5, 64, "bfloat16", False, False, False),  # T4, RTX 20
    (7.5, 64, "float16", True, False, False),
    (8.0, 163, "bfloat16", True, True, True),  # A100
    (8.6, 99, "bfloat16", True, False, True),  # RTX 30
    (8.7, 163, "bfloat16", True, True, True),  # Jetson Orin
    (8.9, 99, "bfloat16", True, False, True),  # RTX 40
    (9.0, 227, "bfloat16", True, True, True),  # H100
    (9.0, 227, "float32", True, False, False),
    (10.0, 227, "bfloat16", True, True, True),  # B200
    (12.0, 99, "bfloat16", True, False, True),  # RTX 50
]


@pytest.mark.parametrize(
    ("capability", "shared", "dtype", "compiles", "is_wide", "is_grouped"), CARDS
)
def test_what_a_card_lacks_is_replaced_before_the_start(
    capability: float,
    shared: int,
    dtype: str,
    compiles: bool,
    is_wide: bool,
    is_grouped: bool,
    card: Callable[[float, int], None],
    device: Device,
):
    card(capability, shared)
    run = parse_flags(f"--data_path x --device cuda --dtype {dtype}".split())
    resolved = with_compile(ResolvedConfig(run, "single"), device_for("cuda", "", Launch()))
    assert resolved.run.compile == ("on" if compiles else "off")
    assert ("not compiled" in notices_of(resolved.run, "cuda")) != compiles
    numbers = getattr(torch, dtype)
    for channels, has_blocks in ((64, compiles), (256, is_wide)):
        found = kernels.has_flex_kernel(GPU, channels, LENGTH, numbers)
        assert found == has_blocks
    assert kernels.has_grouped_kernel(torch.empty(1, dtype=numbers, device=GPU)) == is_grouped


@pytest.mark.parametrize(
    ("capability", "shared", "dtype", "key_heads"),
    [
        (7.5, 64, "bfloat16", 4),
        (7.5, 64, "float16", 4),
        (8.6, 99, "bfloat16", 2),
        (12.0, 99, "float32", 4),
    ],
)
def test_key_heads_are_repeated_where_no_kernel_takes_groups(
    capability: float,
    shared: int,
    dtype: str,
    key_heads: int,
    card: Callable[[float, int], None],
    device: Device,
    built: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    card(capability, shared)
    heads: set[int] = set()
    attend = F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        heads.update((k.shape[1], v.shape[1]))
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    step(built(f"--dtype {dtype}"), 0)
    assert heads == {key_heads}


def test_autocast_computes_in_bf16_and_keeps_fp32_weights(device: Device):
    model = model_of().to(GPU)
    ids = torch.zeros((ROWS, LENGTH), dtype=torch.int64, device=GPU)
    device.forget()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(input_ids=ids).logits
    logits.float().sum().backward()
    assert (logits.dtype, logits.device) == (torch.bfloat16, GPU)
    assert {(p.grad.dtype, p.grad.device) for p in model.parameters()} == {(torch.float32, GPU)}
    assert (device.reads, device.waits, device.on_cpu) == ({}, 0, {})


def test_tied_weights_stay_tied_on_the_device(device: Device):
    model = model_of().to(GPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_evaluation_waits_for_no_batch(device: Device, built: Any):
    engine = built()
    device.forget()
    sums = [engine.loss_of(torch.zeros((ROWS, LENGTH + 1), dtype=torch.int64)) for _ in range(3)]
    assert {tensor.device for pair in sums for tensor in pair} == {GPU}
    assert (device.reads, device.waits) == ({}, 0)


def test_rows_and_saves_are_copied_from_and_to_pinned_memory(
    device: Device, monkeypatch: pytest.MonkeyPatch
):
    def copy() -> None:
        before = torch.accelerator.current_stream(GPU)
        copies = Copies(GPU)
        rows, arrived = copies.send(torch.zeros(ROWS, LENGTH + 1))
        copies.receive(rows, arrived)
        assert rows.device == GPU
        assert torch.accelerator.current_stream(GPU) == before
        Staging(rows.numel(), GPU).copy([("rows", rows.flatten())])

    copy()
    assert (device.reads, device.waits) == ({}, 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: rows)  # planted
    monkeypatch.setattr(tensor_files, "_host_memory", lambda elements, _: torch.empty(elements))
    copy()
    assert device.reads == {"minimind: send": 1, "minimind: copy": 1}


RUN: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "accumulation_steps": 2, "device": "cuda"},
    **{"deepspeed_config": "none", "log_interval": 100, "save_interval": 100, "eval_rows": 0},
    "val_fraction": 0.1,
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": text}) + "\n" for text in sentences(1, 60)]
    (place / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"data_path": str(place / "text.jsonl"), "cache_dir": str(place / "cache")}


@pytest.fixture
def ran(
    device: Device, places: dict[str, str], tmp_path: Path
) -> Callable[..., tuple[Counter[str], int]]:
    """Run, and return the reads after the start and all waits."""

    def run(out: str, **changes: Any) -> tuple[Counter[str], int]:
        device.forget()
        flags = {**RUN, **changes, **places}
        flags = {name: value for name, value in flags.items() if value is not None}
        assert train(flags, out_dir=str(tmp_path / out)) == 0
        start = ("minimind: move", "minimind: _fresh_moments")
        found = {place: count for place, count in device.reads.items() if place not in start}
        return Counter(found), device.waits

    return run


REPORT = {"minimind: log_step": 4, "minimind: check": 1}  # loss, tokens, norm, skipped steps; flags
SAVE = {"minimind: optimizer_step": 1, "minimind: counters": 1}


@pytest.mark.long  # the step above covers the reads; the cases below cover runs
def test_a_run_reads_at_its_reports_evaluations_and_saves_only(ran: Any, tmp_path: Path):
    few, few_waits = ran("few", max_steps=4)
    assert few == {**REPORT, **SAVE}
    # For the times of the report; for the copies of the save, to write them and for their time.
    assert few_waits == 1 + 2
    evaluated = {"log_interval": 6, "eval_interval": 6, "eval_rows": 16}
    many, many_waits = ran("many", max_steps=12, **evaluated)
    assert many - few == {**REPORT, "minimind: _sum_loss": 2 * 2}
    assert many_waits - few_waits == 1
    events = map(json.loads, (tmp_path / "many" / "metrics.jsonl").read_text().splitlines())
    assert next(events)["device"] == "cuda"


def test_the_first_step_is_held_against_the_estimate(ran: Any, tmp_path: Path):
    ran("fit", batch_size="auto", accumulation_steps=None, max_steps=2)
    lines = (tmp_path / "fit" / "metrics.jsonl").read_text().splitlines()
    (found,) = [event for event in map(json.loads, lines) if event["event"] == "memory"]
    assert (found["step"], found["peak_mib"], found["device_mib"]) == (1, 1024, 80 * 1024)
    assert 0 < found["estimate_mib"] < 1024


@pytest.mark.long  # as on a CPU, but for copies of the save, which another case covers
def test_a_run_goes_on_from_its_checkpoint(device: Device, ran: Any, tmp_path: Path):
    device.values = lambda tensor: torch.full_like(tensor, tensor.is_floating_point())  # 1 update
    ran("out", max_steps=2, save_interval=1)
    ran("out", max_steps=2, resume=str(tmp_path / "out/checkpoints/step_00000001"))
    events = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in events if line["event"] == "run_start"] == [0, 1]


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x.sum()),
    "tolist": lambda x: x.flatten().tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy to the host": lambda x: torch.empty(x.shape).copy_(x),
    "copy to memory that is not pinned": lambda x: torch.empty(x.shape).copy_(x, True),
    "mask": lambda x: x.clone().flatten().index_put_((x.flatten() > 0,), x.flatten()),
    "new tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "array": lambda x: torch.from_numpy(np.zeros(3)).to(x.device, non_blocking=True),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], Any]) -> None:
    """Do it with the hidden states of every forward pass."""
    forward: Any = MiniMindModel.forward

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        fault(out.last_hidden_state.detach())
        return out

    monkeypatch.setattr(MiniMindModel, "forward", faulty)


def test_planted_reads_waits_and_draws_are_counted(
    device: Device, built: Any, monkeypatch: pytest.MonkeyPatch
):
    engine = built()
    for way, read in READS.items():
        with monkeypatch.context() as planted:
            plant(planted, read)
            device.forget()
            step(engine, 0)
        assert sum(device.reads.values()) == MICRO_BATCHES, way
    plant(monkeypatch, lambda x: [torch.accelerator.synchronize(), F.dropout(x)])
    device.forget()
    step(engine, 0)
    assert (device.waits, sum(device.draws.values())) == (MICRO_BATCHES, MICRO_BATCHES)


def test_planted_sizes_that_depend_on_values_raise(
    device: Device, built: Any, monkeypatch: pytest.MonkeyPatch
):
    engine = built()
    for fault in (torch.nonzero, torch.unique, lambda x: x[x > 0]):
        with monkeypatch.context() as planted:
            plant(planted, fault)
            with pytest.raises(DynamicOutputShapeException):
                step(engine, 0)


def test_a_tensor_left_on_the_cpu_raises(device: Device, built: Any):
    engine = built(qk_norm=True)
    engine.model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    with pytest.raises(RuntimeError, match="at least two devices"):
        step(engine, 0)


def test_what_a_step_computes_on_the_cpu_is_counted(
    device: Device, built: Any, monkeypatch: pytest.MonkeyPatch
):
    engine = built()
    plant(monkeypatch, lambda x: torch.arange(9) + 1)
    device.forget()
    step(engine, 0)
    assert sum(device.on_cpu.values()) == 2 * MICRO_BATCHES


def test_a_thread_that_does_not_choose_its_device_finds_none(ran: Any, monkeypatch: Any):
    monkeypatch.setattr(CUDA, "use", lambda device: None)
    # What torch raises in a thread that has not entered the device.
    with pytest.raises(NotImplementedError, match="CUDA"):
        ran("out", max_steps=2, debug=True)
