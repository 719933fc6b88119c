"""Capabilities of this machine: GPUs, their driver, compilers.

Functions ending in `_fault` return one clause that says what is missing, or "" if nothing is.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from minimind.runtime.device import CUDA, MIN_BF16_CAPABILITY, device_kind
from minimind.runtime.environment import HIDDEN, command_output, visible_gpu_names

GPU_FIELDS = ("name", "driver_version", "memory.total", "compute_cap")
# CUDA major version: oldest driver, by "CUDA Toolkit and Minimum Required Driver Version for CUDA
# Minor Version Compatibility" in the release notes of CUDA 13.
MIN_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
MAX_IDLE_MIB = 1024  # memory that a desktop and the driver use on a GPU without other programs
MIN_TRITON_CAPABILITY = (7, 0)  # torch/_inductor/scheduler.py, GPUTooOldForTriton
MIN_FP8_CAPABILITY = (8, 9)
DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
DEFAULT_HIPCC = "/opt/rocm/bin/hipcc"


@dataclass(frozen=True)
class GPU:
    """A GPU as its driver describes it."""

    name: str
    driver: str
    memory_mib: int | None
    capability: tuple[int, int] | None


def torch_build() -> str:
    """What this build of torch computes on besides CPUs, with its version; empty for nothing."""
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built = [f"{name} {version}" for name, version in versions.items() if version]
    return built[0] if built else "Metal" * torch.backends.mps.is_built()


def list_gpus() -> list[GPU]:
    """Return the NVIDIA GPUs of this host, visible to this process or not."""
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    return parse_gpus(command_output(["nvidia-smi", query, "--format=csv,noheader,nounits"]))


def parse_gpus(text: str) -> list[GPU]:
    """Return the GPUs in the CSV output of nvidia-smi; fields it does not support are None."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(GPU_FIELDS):
            name, driver, memory, capability = fields
            numbers = _version(capability)
            memory_mib = int(memory) if memory.isdecimal() else None
            gpus.append(GPU(name, driver, memory_mib, numbers))
    return gpus


def visible_gpus(environ: Mapping[str, str]) -> dict[str, bool]:
    """UUIDs of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, and whether each is free.

    By UUID, as CUDA may count GPUs in another order than nvidia-smi.
    """
    query = "--query-gpu=index,uuid,memory.used"
    text = command_output(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    return parse_use(text, environ.get("CUDA_VISIBLE_DEVICES"))


def parse_use(text: str, allowed: str | None) -> dict[str, bool]:
    """The same from the CSV output of nvidia-smi and the variable's value (None: all)."""
    names = None if allowed is None else visible_gpu_names(allowed, "CUDA_VISIBLE_DEVICES")
    gpus = {}
    for line in text.splitlines():
        index, uuid, used = (field.strip() for field in line.split(","))
        is_named = names is None or any(n == index or uuid.startswith(n) for n in names)
        if is_named:
            gpus[uuid] = used.isdecimal() and int(used) <= MAX_IDLE_MIB
    return gpus


def _version(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version; None if there is none in the text."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def invisible_gpus_fault(
    gpus: Sequence[GPU], torch_cuda: str | None, visible: str | None
) -> tuple[str, str]:
    """Return why torch sees none of `gpus`, and the remedy; both "" if they are hidden on purpose.

    torch_cuda is torch.version.cuda, visible the value of CUDA_VISIBLE_DEVICES.
    """
    if not gpus or (visible is not None and visible.split(",")[0].strip() in HIDDEN):
        return "", ""
    driver, build = gpus[0].driver, f"torch {torch.__version__}"
    listed = f"nvidia-smi lists {len(gpus)} x {gpus[0].name} (driver {driver})"
    if torch_cuda is None:
        return f"{listed} and {build} is a build without CUDA", "install a CUDA build of torch"
    oldest = MIN_DRIVER.get(int(torch_cuda.partition(".")[0]))
    if oldest and (_version(driver) or oldest) < oldest:
        return (
            f"{listed} and {build} is built for CUDA {torch_cuda}, which needs driver"
            f" {oldest[0]}.{oldest[1]:02} or newer",
            "update the driver, or install a torch built for an older CUDA",
        )
    if visible is not None:
        return f"{listed} and CUDA_VISIBLE_DEVICES is {visible}", "correct or unset it"
    return (
        f"{listed} and {build} cannot use them",
        "`python -c 'import torch; torch.zeros(1).cuda()'` prints the reason: correct it",
    )


def compiler_fault(device: str, needs_bf16: bool = False) -> str:
    """Return what torch.compile lacks on this host for a type of device.

    Triton builds a launcher in C for every kernel on a GPU; a CPU's kernels are C++.
    """
    on_triton = device_kind(device).has_triton
    if on_triton:
        if not find_spec("triton"):
            return "the package triton is not installed"
        capability = CUDA.lowest_capability()
        if capability is not None and capability < MIN_TRITON_CAPABILITY:
            least = dotted(MIN_TRITON_CAPABILITY)
            has = dotted(capability)
            return f"Triton needs compute capability {least}, and a GPU has {has}"
        if needs_bf16 and capability is not None and capability < MIN_BF16_CAPABILITY:
            return (
                f"torch compiles bfloat16 from compute capability {dotted(MIN_BF16_CAPABILITY)} on,"
                f" and a GPU has {dotted(capability)} (--dtype float16 is compiled)"
            )
        names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    else:
        names = [os.environ.get("CXX") or "g++"]
    if not any(shutil.which(name) for name in names):
        language = "C" if on_triton else "C++"
        return f"no {language} compiler ({' or '.join(names)}) is on PATH"
    if not has_python_header():
        return "Python.h is missing (package python3-dev)"
    return ""


def has_python_header() -> bool:
    """Whether the C header of this Python is installed."""
    # Triton and torch ask for posix_prefix, where Debian's Pythons outside a venv have it.
    schemes = (sysconfig.get_default_scheme(), "posix_prefix")
    folders = [Path(sysconfig.get_path("include", scheme)) for scheme in schemes]
    return any((folder / "Python.h").exists() for folder in folders)


def dotted(version: tuple[int, int]) -> str:
    """Return `major.minor`."""
    return f"{version[0]}.{version[1]}"


def nvcc_path() -> str | None:
    """Return the CUDA compiler that torch's extensions use; None if there is none."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home:  # then torch searches nowhere else
            path = str(Path(home) / "bin" / "nvcc")
            return path if os.access(path, os.X_OK) else None
    return shutil.which("nvcc") or (DEFAULT_NVCC if os.access(DEFAULT_NVCC, os.X_OK) else None)


def nvcc_fault(torch_cuda: str | None, output: str) -> str:
    """Return why CUDA code cannot be compiled for torch, from the output of `nvcc --version`."""
    match = re.search(r"release (\d+\.\d+)", output)
    if not match:
        return "the CUDA compiler nvcc is not installed"
    if torch_cuda and match[1].partition(".")[0] != torch_cuda.partition(".")[0]:
        return f"nvcc has CUDA {match[1]} and torch has CUDA {torch_cuda}"
    return ""


def extension_fault(device: str) -> str:
    """Return what compiling an extension of torch for a type of device lacks."""
    compiler = os.environ.get("CXX") or "c++"
    if not shutil.which(compiler):
        return f"no C++ compiler ({compiler}) is on PATH"
    if not has_python_header():
        return "Python.h is missing (package python3-dev)"
    if not shutil.which("ninja"):
        return "ninja is not on PATH (pip install ninja)"
    if device == "xpu":
        return "" if shutil.which("icpx") else "the SYCL compiler icpx is not on PATH"
    if device != CUDA.name:
        return ""
    if torch.version.hip:
        has_hip = shutil.which("hipcc") or os.access(DEFAULT_HIPCC, os.X_OK)
        return "" if has_hip else "the HIP compiler hipcc is not installed"
    path = nvcc_path()
    return nvcc_fault(torch.version.cuda, command_output([path, "--version"]) if path else "")
