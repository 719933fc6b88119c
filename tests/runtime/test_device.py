"""The one place that asks torch of the device, by stand-ins for the devices that are not here."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from minimind.config.deepspeed.backend_choice import (
    advice,
    choose_device,
    device_for,
    read_setup,
    with_compile,
)
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.deepspeed.rules import precision_faults
from minimind.config.flags import ALONE, DEVICES
from minimind.config.launcher_env import Launch
from minimind.config.parse import parse_flags
from minimind.errors import UsageError, which_memory
from minimind.runtime import device as device_module
from minimind.runtime.collectives import collective_backend
from minimind.runtime.device import (
    CUDA,
    HOST,
    KINDS,
    Copies,
    Cuda,
    device_kind,
    milliseconds,
    widened,
)
from tests.config.notices import notices_of

MPS = KINDS["mps"]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch for macOS, with a GPU."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check=False: torch.device("mps")
    )
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)


def test_every_device_of_the_flag_has_its_row():
    assert ("auto", *KINDS) == DEVICES
    assert {*ALONE} <= {*KINDS}
    assert all(kind.name == name for name, kind in KINDS.items())


def test_a_device_without_values_is_as_a_cpu():
    assert device_kind(torch.device("meta")) is device_kind("cpu") is HOST


def test_on_a_cpu_nothing_is_late():
    started = HOST.moment()
    time.sleep(0.002)
    assert milliseconds(started, HOST.moment()) > 1.9
    assert HOST.copies(torch.device("cpu")) is None
    assert HOST.count() == 0
    assert HOST.memory() > HOST.peak_memory(torch.device("cpu")) > 2**20


def test_how_busy_a_gpu_is_is_asked_until_it_is_not_told(monkeypatch: pytest.MonkeyPatch):
    answers: list[Any] = [80, ModuleNotFoundError("nvidia-ml-py")]

    def utilization(device: torch.device) -> int:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    gpu = Cuda("cuda")
    assert [gpu.busy_percent(torch.device("cuda", 0)) for _ in range(3)] == [80, None, None]


def test_an_extension_that_is_not_installed_has_no_device():
    npu: Any = KINDS["npu"]
    assert not hasattr(torch, "npu")
    assert (npu.is_available(), npu.count(), npu.was_forked()) == (False, 0, False)
    with pytest.raises(UsageError, match=r"^device = npu \(--device\), but torch sees no such"):
        device_for("npu", "--device", Launch())


def test_a_device_that_is_not_there_is_refused_in_favour_of_the_one_that_is(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"torch sees no such device here; use --device xpu$"):
        device_for("mps", "--device", Launch())
    with pytest.raises(UsageError, match="2 processes were started here and 1 GPU is visible"):
        device_for("xpu", "--device", Launch(world_size=2, local_world_size=2))


def test_another_accelerator_is_asked_as_torch_has_it(monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for torch.xpu."""
    properties = SimpleNamespace(total_memory=16 * 2**30, has_fp64=False)
    for name, answer in (
        ("is_available", True),
        ("device_count", 2),
        ("get_device_name", "Arc"),
        ("current_device", 0),
        ("get_device_properties", properties),
        ("max_memory_allocated", 5),
        ("memory_reserved", 6),
    ):
        monkeypatch.setattr(torch.xpu, name, lambda *device, answer=answer: answer)
    seeds: list[int] = []
    monkeypatch.setattr(torch.xpu, "manual_seed", seeds.append)
    xpu, device = KINDS["xpu"], torch.device("xpu", 1)
    assert device_for("xpu", "--device", Launch(world_size=2, local_world_size=2)) == "xpu"
    assert "or hide the others with ZE_AFFINITY_MASK" in notices_of(parse_flags([]), "xpu")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1")
    visible = r"3 processes were started here and 2 GPUs are visible \(ZE_AFFINITY_MASK = 0,1\)"
    with pytest.raises(UsageError, match=visible):
        device_for("xpu", "--device", Launch(world_size=3, local_world_size=3))
    assert (xpu.model_of(device), xpu.peak_memory(device)) == ("Arc", 5)
    assert (xpu.reserved_memory(device), xpu.busy_percent(device)) == (6, None)
    assert xpu.memory() == 16 * 2**30
    assert not xpu.has_float64
    properties.has_fp64 = True
    assert xpu.has_float64
    xpu.seed(3)
    assert seeds == [3]
    assert xpu.activity == ProfilerActivity.XPU
    assert collective_backend("xpu", 60)[0] == "xccl"
    assert with_compile(ResolvedConfig(parse_flags([]), "ddp"), "xpu").run.compile == "off"


@pytest.mark.parametrize("found", ["xpu", "npu"])
def test_auto_takes_the_accelerator_of_torch(found: str, monkeypatch: pytest.MonkeyPatch):
    there = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    monkeypatch.setattr(torch, found, there, raising=False)
    current = SimpleNamespace(type=found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check=False: current)
    assert device_for("auto", "default", Launch()) == found
    there.is_available = lambda: False
    assert device_for("auto", "default", Launch()) == "cpu"


def test_rows_are_sent_beside_the_computation_and_waited_for(monkeypatch: pytest.MonkeyPatch):
    """With stand-ins for streams and events, which note the order of the calls."""
    calls: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = f"another of {device}"

        def wait_event(self, event: Any) -> None:
            calls.append(("wait", event.name))

    class Event:
        name = "arrival"

        def __init__(self, device: torch.device) -> None: ...

        def record(self, stream: Stream) -> None:
            calls.append(("record", stream.name))

    class Rows:
        def pin_memory(self) -> Rows:
            calls.append("pin")
            return self

        def to(self, device: torch.device, non_blocking: bool) -> Rows:
            calls.append(("to", str(device), non_blocking))
            return self

        def record_stream(self, stream: Stream) -> None:
            calls.append(("keep", stream.name))

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    current = Stream(torch.device("cuda", 1))
    current.name = "the current one"
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    monkeypatch.setattr(
        torch.accelerator, "set_stream", lambda stream: calls.append(("on", stream.name))
    )
    rows: Any = Rows()
    copies = Copies(torch.device("cuda", 1))
    sent: Any = copies.send(rows)
    assert calls == [
        ("on", "another of cuda:1"),
        "pin",
        ("to", "cuda:1", True),
        ("record", "another of cuda:1"),
        ("on", "the current one"),
    ]
    calls.clear()
    copies.receive(*sent)
    assert calls == [("wait", "arrival"), ("keep", "the current one")]


def no_file(path: str, **options: Any) -> Any:
    raise FileNotFoundError(path)


def test_what_an_apple_gpu_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 2**30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2**30)
    monkeypatch.setattr(device_module, "command_output", lambda command: "Apple M3 Pro\n")
    monkeypatch.setattr(device_module.sys, "platform", "darwin")
    monkeypatch.setattr(device_module, "open", no_file, raising=False)
    device = torch.device("mps", 0)
    assert MPS.model_of(device) == "Apple M3 Pro"
    assert (MPS.memory(), MPS.peak_memory(device)) == (12 * 2**30, 2**30)
    assert MPS.reserved_memory(device) == 2**30
    assert MPS.copies(device) is None
    assert (MPS.pins, MPS.has_float64, MPS.has_complex, MPS.has_triton) == (False,) * 4
    assert collective_backend("mps", 60)[0] == "gloo"
    full = "MPS backend out of memory (MPS allocated: 9.05 GiB). Tried to allocate 512.00 MiB"
    assert which_memory(RuntimeError(full)) == "device"
    assert which_memory(RuntimeError("Invalid buffer size: 20.00 GiB")) == "device"


@pytest.mark.usefixtures("mac")
def test_on_a_mac_auto_is_its_gpu_in_one_process_and_the_cpu_in_several():
    assert device_for("auto", "default", Launch()) == "mps"
    two = Launch(world_size=2, local_world_size=2)
    assert device_for("auto", "default", two) == "cpu"
    with pytest.raises(UsageError, match=r"^device = mps \(--device\) trains in one process, and"):
        device_for("mps", "--device", two)
    assert device_for("mps", "--device", Launch()) == "mps"
    resolved = with_compile(ResolvedConfig(parse_flags([]), "single"), "mps")
    assert resolved.run.sources["compile"] == "derived: on mps only by --compile on"


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize(
    ("words", "launch"),
    [
        ("--deepspeed_config zero3", Launch()),
        ("--deepspeed_config configs/ds_config.json", Launch()),
        ("", Launch(uses_deepspeed=True)),
    ],
)
def test_a_shipped_deepspeed_file_gives_way_on_a_mac(words: str, launch: Launch):
    setup = read_setup(parse_flags(words.split()), launch)
    assert (setup.device, setup.backend) == ("mps", "single")
    resolved = setup.resolve()
    assert resolved.backend == "single"
    (notice,) = advice(setup, resolved, is_start=False)
    assert notice.startswith("DeepSpeed does not run on mps: one process trains")
    plain = read_setup(parse_flags([]), Launch())
    assert [*advice(plain, plain.resolve(), is_start=False)] == []


@pytest.mark.usefixtures("mac")
def test_a_deepspeed_file_of_the_user_is_refused_on_a_mac(tmp_path):
    path = tmp_path / "own.json"
    path.write_text("{}")
    run = parse_flags(["--deepspeed_config", str(path)])
    with pytest.raises(UsageError, match=r"own\.json \(--deepspeed_config\), and DeepSpeed does"):
        read_setup(run, Launch())
    cpu = parse_flags(["--deepspeed_config", str(path), "--device", "cpu"])
    assert read_setup(cpu, Launch()).backend == "deepspeed"


def test_a_dry_run_for_a_mac_needs_none():
    run = parse_flags(["--device", "mps", "--dry_run"])
    assert choose_device(run, Launch()) == "mps"
    with pytest.raises(UsageError, match="trains in one process, and 2 were started"):
        choose_device(run, Launch(world_size=2))
    (fault,) = precision_faults(parse_flags("--dtype float32 --tf32".split()), "mps")
    assert fault.sentence == "tf32 = true (--tf32) has no effect on mps; remove --tf32"


def test_sums_are_in_the_widest_floats_that_a_device_has(monkeypatch: pytest.MonkeyPatch):
    values = torch.ones(2, dtype=torch.bfloat16)
    assert widened(values).dtype == torch.float64
    monkeypatch.setitem(KINDS, "cpu", MPS)
    assert widened(values).dtype == torch.float32


def test_without_a_gpu_no_capability_is_known():
    assert CUDA.count() > 0 or CUDA.lowest_capability() is None


@pytest.mark.parametrize(
    ("is_there", "by_onednn", "machine", "by_avx512", "found"),
    [
        (False, True, "x86_64", True, False),
        (True, False, "x86_64", False, False),
        (True, True, "x86_64", False, False),  # AVX-512 alone
        (True, True, "AMD64", True, True),
        (True, True, "aarch64", False, True),
        (True, False, "aarch64", False, False),
    ],
)
def test_which_cpus_multiply_bf16(
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool, by_onednn: bool, machine: str, by_avx512: bool, found: bool,
):  # fmt: skip
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: by_onednn)
    monkeypatch.setattr(device_module.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: by_avx512)
    assert HOST.has_bf16 is found
