"""Measures this host: versions, GPUs, compilers, network and disk."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from minimind.config.deepspeed.backend_choice import CPU_OPS, OPS, op_fault
from minimind.runtime import disk
from minimind.runtime.device import CUDA, HOST, accelerator, cpu_name
from minimind.runtime.durable_files import why_unwritable
from minimind.runtime.environment import command_output, usable_cores
from minimind.runtime.hardware import (
    GPU,
    compiler_fault,
    invisible_gpus_fault,
    list_gpus,
    nvcc_path,
    torch_build,
)

LIBRARIES = ("triton", "accelerate", "deepspeed", "transformers", "sentencepiece", "numpy")
INFINIBAND = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROBE_MIB = 64
GIB = 2**30


@dataclass(frozen=True)
class HostFacts:
    """What this host has, as measured by `read_facts`."""

    versions: Mapping[str, str]
    system: str
    cpu: str
    has_cpu_bf16: bool
    huge_pages: str  # whether the kernel gives them: always, madvise (to who asks) or never
    gpus: Sequence[GPU]  # GPUs that torch sees; if it sees none, those of the host
    torch_gpus: int  # visible to torch
    host_gpus: int  # GPUs that nvidia-smi lists, or more if torch sees more
    torch_build: str  # what torch is built for
    torch_cuda: str | None  # of it, the version of CUDA
    visible: str | None  # CUDA_VISIBLE_DEVICES
    accelerator: str  # another than CUDA that --device auto takes; empty without one
    nccl: str
    compilers: Mapping[str, str]
    compile_fault: str  # what torch.compile lacks
    ops: Mapping[str, str]  # DeepSpeed's ops: why one cannot be compiled, empty if it can
    interfaces: Sequence[str]
    shared_mib: int
    disk: str
    disk_mib_s: float  # 0 if it cannot be written

    def gpu_fault(self) -> tuple[str, str]:
        """Why torch sees none of the GPUs, and the remedy; both empty if it does."""
        if self.torch_gpus:
            return "", ""
        return invisible_gpus_fault(self.gpus, self.torch_cuda, self.visible)


def read_facts(out_dir: Path) -> HostFacts:
    """Measure this host; takes a second or two."""
    torch_gpus = CUDA.count()
    device = (CUDA if torch_gpus else HOST).name
    memory = psutil.virtual_memory().total / GIB
    place, speed = measure_disk(out_dir)
    on_host = list_gpus()
    driver = on_host[0].driver if on_host else "unknown (no nvidia-smi)"
    # nvidia-smi also lists GPUs that are hidden from torch, and may be missing.
    of_torch = [
        GPU(gpu.name, driver, gpu.total_memory // 2**20, (gpu.major, gpu.minor))
        for gpu in CUDA.properties()
    ]
    versions = {name: package_version(name) for name in LIBRARIES}
    return HostFacts(
        versions={"torch": torch.__version__} | versions,
        system=f"{platform.system()} {platform.release()} {platform.machine()},"
        f" Python {platform.python_version()}",
        cpu=f"{cpu_name()}, {usable_cores()} cores for this process, {memory:.1f} GiB of memory",
        has_cpu_bf16=HOST.has_bf16,
        huge_pages=_huge_pages(),
        gpus=of_torch or on_host,
        torch_gpus=torch_gpus,
        host_gpus=max(len(on_host), torch_gpus),
        torch_build=torch_build(),
        torch_cuda=torch.version.cuda,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        accelerator=_accelerator(),
        nccl=_nccl_version(),
        compilers=_compilers(),
        compile_fault=compiler_fault(device),
        ops={op: op_fault(op, device) for op in (OPS if torch_gpus else CPU_OPS)},
        interfaces=_interfaces(),
        shared_mib=shutil.disk_usage(SHARED_MEMORY).total // 2**20
        if disk.exists(SHARED_MEMORY)
        else 0,
        disk=place,
        disk_mib_s=speed,
    )


def _accelerator() -> str:
    kind = accelerator()
    if kind is CUDA or not kind.count():
        return ""
    whose = ", shared with the host" if kind.shares_memory else ""
    model = kind.model_of(torch.device(kind.name, 0))
    return f"{kind.count()} x {model} ({kind.name}), {kind.memory() / GIB:.1f} GiB{whose}"


def _huge_pages() -> str:
    """The kernel's setting, in brackets among the others; "unknown" where it has none."""
    try:
        settings = HUGE_PAGES.read_text()
    except OSError:
        return "unknown"
    return settings.partition("[")[2].partition("]")[0]


def package_version(name: str) -> str:
    """Version of an installed distribution; "none" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _nccl_version() -> str:
    if not torch.distributed.is_nccl_available():
        return "none"
    return ".".join(map(str, CUDA.module.nccl.version()))


def _compilers() -> dict[str, str]:
    """The first line of what each compiler prints of itself; "none" if it is missing."""
    commands = {
        "C": [os.environ.get("CC") or "gcc", "--version"],
        "C++": [os.environ.get("CXX") or "c++", "--version"],
        "ninja": ["ninja", "--version"],
    }
    lines = {name: command_output(words).strip().splitlines() for name, words in commands.items()}
    nvcc = command_output([nvcc_path() or "nvcc", "--version"])
    releases = [line.partition("release ")[2] for line in nvcc.splitlines() if "release " in line]
    lines["nvcc"] = releases
    return {name: text[0] if text else "none" for name, text in lines.items()}


def _interfaces() -> list[str]:
    """Network interfaces that are up, with their speed; InfiniBand adapters."""
    names = [
        f"{name} {found.speed} Mbit/s" if found.speed else name  # virtual ones may have none
        for name, found in sorted(psutil.net_if_stats().items())
        if found.isup and "loopback" not in found.flags
    ]
    return names + [f"{path.name} (InfiniBand)" for path in sorted(disk.matching(INFINIBAND, "*"))]


def measure_disk(out_dir: Path) -> tuple[str, float]:
    """Write and flush PROBE_MIB MiB; return the folder with its free space, and MiB/s.

    The nearest folder that exists is used if `out_dir` does not; 0 if it cannot be written.
    """
    path = out_dir.expanduser().absolute()
    folder = next(p for p in (path, *path.parents) if disk.is_dir(p))
    piece = os.urandom(2**20)  # a disk that compresses is not flattered
    try:
        free = shutil.disk_usage(folder).free / GIB
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            for _ in range(PROBE_MIB):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            speed = PROBE_MIB / (time.perf_counter() - start)
    except OSError as error:
        return f"{out_dir}: cannot be written ({why_unwritable(error)})", 0.0
    return f"{out_dir}: {free:.1f} GiB free", speed
