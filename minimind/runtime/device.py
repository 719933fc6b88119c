"""What a run asks of the device that it computes on.

Nothing else calls torch.cuda or torch.mps: a row of `KINDS` has what differs between types of
device, and torch.accelerator does the rest. A row can be replaced, in tests by a stand-in.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from minimind.runtime.environment import command_output, peak_bytes

MIN_BF16_CAPABILITY = (8, 0)  # of a CUDA device; also of the flash attention kernels of torch
Moment = float | torch.Event  # seconds of the host's clock, or a place in the queue of a device


class Copies:
    """Copies of host memory to a device, beside what is computed there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def send(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
        """Queue a copy, from any thread; return it, and the event of its arrival."""
        # `with self._stream` keeps what it restores in the stream, which several threads share.
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            sent = values.pin_memory().to(self._device, non_blocking=True)
            arrived = torch.Event(self._device)
            arrived.record(self._stream)
        finally:
            torch.accelerator.set_stream(before)
        return sent, arrived

    def receive(self, values: torch.Tensor, arrived: torch.Event) -> None:
        """Let the current stream wait for the copy, and keep its memory until it was read."""
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(arrived)
        values.record_stream(stream)


class Host:
    """A CPU: what is called has been done when the call returns."""

    name = "cpu"
    has_queue = False  # calls return before the device has done the work
    pins = False  # copies from and to pinned memory are queued, and waited for by an event
    has_complex = True
    has_triton = False  # torch.compile and flex attention make its kernels
    has_tf32 = False
    shares_memory = False  # a GPU in the memory of the host
    skips_by_flag = True  # fused optimizers read found_inf
    activity: ProfilerActivity | None = None  # of a trace, besides the CPU's

    @property
    def has_float64(self) -> bool:
        return True

    @property
    def has_bf16(self) -> bool:
        """Whether every device of this type here has instructions for bfloat16.

        oneDNN also reports support for AVX-512 without them, and then emulates them slowly.
        """
        mkldnn = torch.ops.mkldnn
        if not torch.backends.mkldnn.is_available() or not mkldnn._is_mkldnn_bf16_supported():
            return False
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        return not is_x86 or torch.cpu._is_avx512_bf16_supported()

    def is_available(self) -> bool:
        return True

    def count(self) -> int:
        """Devices that this process sees; 0 of a CPU, whose cores are shared."""
        return 0

    def use(self, device: torch.device) -> None:
        """Make `device` the current one of this thread; call first in every thread that uses it.

        A new thread uses GPU 0: every rank would create a context of about 500 MiB there, and pin
        memory for the wrong device.
        """

    def seed(self, seed: int) -> None:
        """Seed the generator of the current device; the CPU's is separate."""

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait for all that is queued."""

    def moment(self) -> Moment:
        """Now, or when what is queued so far is done; `milliseconds` tells the difference."""
        return time.perf_counter()

    def copies(self, device: torch.device) -> Copies | None:
        """Copies beside the computation; None where rows are sent when they are used."""
        return None

    def model_of(self, device: torch.device) -> str:
        """Name of the product."""
        return cpu_name()

    def memory(self, index: int | None = None) -> int:
        """Bytes of a device (None: the current one); of a CPU, for all processes."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_memory(self, device: torch.device) -> int:
        """Most bytes of this process so far."""
        return peak_bytes()

    def begin_anew(self) -> None:
        """Return the freed blocks of a device of its own to it, and count its peak from now on."""

    def reserved_memory(self, device: torch.device) -> int | None:
        """Bytes that this process holds on a device of its own, freed blocks included."""
        return None

    def busy_percent(self, device: torch.device) -> int | None:
        """Share of the driver's last sample, of 1 s or less, in which a kernel ran."""
        return None


class Accelerator(Host):
    """A device that works through a queue, as torch.accelerator has it: xpu and npu are no more."""

    has_queue = True
    pins = True

    def __init__(
        self, name: str, activity: ProfilerActivity | None = None, variable: str = ""
    ) -> None:
        self.name = name
        self.activity = activity
        self.variable = variable  # of the environment, which lists the visible devices

    @property
    def module(self) -> Any:
        """torch.cuda, torch.xpu, ...; an empty one for a device that an extension would add."""
        return getattr(torch, self.name, ModuleType(self.name))

    @property
    def has_float64(self) -> bool:
        """An Intel Arc of the A series has none."""
        return getattr(self.module.get_device_properties(), "has_fp64", True)

    @property
    def has_bf16(self) -> bool:
        """Whether it converts from and to bfloat16; torch tells of xpu alone."""
        return getattr(self.module.get_device_properties(), "has_bfloat16_conversions", True)

    def is_available(self) -> bool:
        is_available = getattr(self.module, "is_available", None)
        return bool(is_available and is_available())

    def count(self) -> int:
        return self.module.device_count() if self.is_available() else 0

    def was_forked(self) -> bool:
        """Whether a parent of this process used it, after which torch finds none here."""
        is_in_bad_fork = getattr(self.module, "_is_in_bad_fork", None)
        return bool(is_in_bad_fork and is_in_bad_fork())

    def use(self, device: torch.device) -> None:
        if device.index is not None:
            torch.accelerator.set_device_index(device)

    def seed(self, seed: int) -> None:
        self.module.manual_seed(seed)

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.accelerator.synchronize(device)

    def moment(self) -> Moment:
        event = torch.Event(self.name, enable_timing=True)
        event.record()
        return event

    def copies(self, device: torch.device) -> Copies | None:
        return Copies(device)

    def model_of(self, device: torch.device) -> str:
        return self.module.get_device_name(device)

    def memory(self, index: int | None = None) -> int:
        index = self.module.current_device() if index is None else index
        return self.module.get_device_properties(index).total_memory

    def peak_memory(self, device: torch.device) -> int:
        return self.module.max_memory_allocated(device)

    def begin_anew(self) -> None:
        self.module.empty_cache()
        self.module.reset_peak_memory_stats()

    def reserved_memory(self, device: torch.device) -> int | None:
        return self.module.memory_reserved(device)


class Cuda(Accelerator):
    """An NVIDIA GPU, or an AMD one under ROCm, which torch calls by the same name."""

    has_triton = True
    has_tf32 = True
    tells_busy = True  # until it does not

    @property
    def has_float64(self) -> bool:
        return True

    @property
    def has_bf16(self) -> bool:
        """As torch.cuda.is_bf16_supported(including_emulation=False), of all GPUs."""
        lowest = self.lowest_capability()
        return lowest is not None and lowest >= MIN_BF16_CAPABILITY

    def properties(self) -> list[Any]:
        """Name, memory and capability of every GPU that torch sees."""
        return [torch.cuda.get_device_properties(number) for number in range(self.count())]

    def lowest_capability(self) -> tuple[int, int] | None:
        """That of all GPUs, which may differ: every rank has to decide alike. None: no GPU."""
        gpus = range(self.count())
        return min((torch.cuda.get_device_capability(gpu) for gpu in gpus), default=None)

    def busy_percent(self, device: torch.device) -> int | None:
        """None without the package nvidia-ml-py (AMD: amdsmi), and of a part of a GPU (MIG)."""
        if self.tells_busy:
            try:
                return torch.cuda.utilization(device)
            except Exception:  # torch raises what those packages do
                self.tells_busy = False
        return None


class Metal(Accelerator):
    """An Apple GPU: one per host, in the memory of the host, without 64-bit floats.

    torch has no complex operators for it, no pinned memory, no second stream, no collectives.
    """

    pins = False
    has_complex = False
    shares_memory = True
    skips_by_flag = False  # ATen/native/mps/operations/FusedAdamWKernelImpl.mm has no use for it

    @property
    def has_float64(self) -> bool:
        return False

    @property
    def has_bf16(self) -> bool:
        return True

    def copies(self, device: torch.device) -> Copies | None:
        return None

    def model_of(self, device: torch.device) -> str:
        return cpu_name()  # of which it is a part

    def memory(self, index: int | None = None) -> int:
        return torch.mps.recommended_max_memory()

    def peak_memory(self, device: torch.device) -> int:
        return torch.mps.driver_allocated_memory()  # what was once allocated stays cached

    def begin_anew(self) -> None:
        torch.mps.empty_cache()

    def reserved_memory(self, device: torch.device) -> int | None:
        return torch.mps.driver_allocated_memory()


class Ascend(Accelerator):
    """An NPU; torch_npu turns 64-bit floats into 32-bit ones, with a warning each time."""

    @property
    def has_float64(self) -> bool:
        return False


def milliseconds(start: Any, end: Any) -> float:
    """Time between two moments of one device, which has reached both."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


HOST = Host()
CUDA = Cuda("cuda", ProfilerActivity.CUDA, "CUDA_VISIBLE_DEVICES")
KINDS: dict[str, Host] = {
    kind.name: kind
    for kind in (
        HOST,
        CUDA,
        Metal("mps"),
        Accelerator("xpu", ProfilerActivity.XPU, "ZE_AFFINITY_MASK"),
        Ascend("npu", ProfilerActivity.PrivateUse1, "ASCEND_RT_VISIBLE_DEVICES"),
    )
}


def device_kind(device: torch.device | str) -> Host:
    """What `device`, or a device type, has; tensors without values (meta) are as on a CPU."""
    return KINDS.get(device if isinstance(device, str) else device.type, HOST)


def accelerator(requested: str = "auto") -> Host:
    """The kind of device `requested`, there or not; auto: what this build of torch is for.

    A build for none stands for CUDA, whose GPUs it would miss.
    """
    current = torch.accelerator.current_accelerator() if requested == "auto" else None
    return device_kind(current or (requested if requested != "auto" else CUDA.name))


def widened(values: torch.Tensor) -> torch.Tensor:
    """The values in float64, or in float32 on a device that has none."""
    return values.double() if device_kind(values.device).has_float64 else values.float()


def major_capability(device: torch.device) -> int:
    """First number of a CUDA device's compute capability; a constant in compiled code."""
    return torch.cuda.get_device_properties(device).major


def block_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads of a CUDA device can have."""
    properties = torch.cuda.get_device_properties(device)
    # ROCm has no other limit than the usual one.
    usual = properties.shared_memory_per_block
    return getattr(properties, "shared_memory_per_block_optin", usual)


def set_numerics(device: str, deterministic: bool, tf32: bool) -> None:
    """Set deterministic kernels, and the precision of float32 products on a GPU, in this process.

    Without `deterministic` the former is left as it is; the latter is always set.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
    if device_kind(device).has_tf32:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")


def cpu_name() -> str:
    """Model of the CPU, or the architecture where the system does not tell."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # Linux only
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        apple = command_output(["sysctl", "-n", "machdep.cpu.brand_string"]).strip()
        return apple or platform.machine()
    return platform.processor() or platform.machine()
