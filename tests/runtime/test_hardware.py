"""What a host lacks for GPUs, compilation and extensions, from recorded output of its tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimind.config.deepspeed import backend_choice
from minimind.config.deepspeed.backend_choice import device_for, with_compile
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import Launch
from minimind.config.parse import parse_flags
from minimind.errors import RendezvousError, UsageError
from minimind.runtime import hardware
from minimind.runtime.environment import GPU_VARIABLES
from minimind.runtime.hardware import (
    GPU,
    compiler_fault,
    extension_fault,
    invisible_gpus_fault,
    list_gpus,
    nvcc_fault,
    parse_gpus,
)
from tests.config.notices import notices_of

H100 = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 9.0\n"
OLD = "NVIDIA GeForce RTX 3090, 535.183.01, 24576, 8.6\n"
NVCC_13 = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n"
NVCC_12 = NVCC_13.replace("13.0, V13.0.88", "12.4, V12.4.131")


def tool(folder: Path, name: str, output: str = "", status: int = 0) -> None:
    """Write a program that prints `output`."""
    (folder / f"{name}.txt").write_text(output)
    (folder / name).write_text(f"#!/bin/sh\ncat {folder / name}.txt\nexit {status}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with `cat` and no tools, and no settings that name others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "sh"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_the_gpus_of_the_driver_are_listed_with_fields_it_does_not_know(path: Path):
    assert list_gpus() == []
    tool(path, "nvidia-smi", H100 + "Tesla K80, 470.82.01, [N/A], [Not Supported]\n")
    assert list_gpus() == [
        GPU("NVIDIA H100 80GB HBM3", "580.65.06", 81559, (9, 0)),
        GPU("Tesla K80", "470.82.01", None, None),
    ]
    tool(path, "nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch\n", 18)
    assert list_gpus() == []


@pytest.mark.parametrize(
    ("gpus", "cuda", "visible", "fault", "remedy"),
    [
        ("", "13.0", None, "", ""),
        (OLD, None, None, "is a build without CUDA", "install a CUDA build of torch"),
        (OLD, "13.0", None, "(driver 535.183.01)", "update the driver"),
        (OLD, "13.0", None, "needs driver 580.00 or newer", "older CUDA"),
        (OLD, None, "0", "is a build without CUDA", "install a CUDA build of torch"),
        (OLD, "13.0", "0", "needs driver 580.00 or newer", "older CUDA"),
        (OLD, "12.8", None, "cannot use them", "prints the reason"),
        (H100 * 8, "13.0", None, "lists 8 x NVIDIA H100", "prints the reason"),
        (H100, "13.0", "7", "CUDA_VISIBLE_DEVICES is 7", "unset it"),
        (H100, "13.0", "", "", ""),
        (H100, None, "-1", "", ""),
        (H100, "13.0", "-1,0", "", ""),
        (H100, "13.0", " ", "", ""),
    ],
)
def test_why_torch_sees_none_of_the_gpus(gpus, cuda, visible, fault, remedy):
    found = invisible_gpus_fault(parse_gpus(gpus), cuda, visible)
    assert fault in found[0]
    assert remedy in found[1]
    assert bool(found[0]) == bool(fault)


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_a_run_that_would_miss_the_gpus_is_refused(path: Path, requested: str, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    tool(path, "nvidia-smi", OLD)
    with pytest.raises(UsageError, match=r"RTX 3090 \(driver 535.*update the driver.*--device cpu"):
        device_for(requested, "default", Launch())
    assert device_for("cpu", "--device", Launch()) == "cpu"
    tool(path, "nvidia-smi", status=9)
    assert device_for("auto", "default", Launch()) == "cpu"


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("variable", GPU_VARIABLES)
def test_a_malformed_list_of_gpus_is_9_in_every_process(
    variable: str, gpus: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for visible in ("0;1", "0-3", "cuda:0", '"0"', "all", "none", "0,0", "[0, 1]"):
        monkeypatch.setenv(variable, visible)
        with pytest.raises(RendezvousError, match=f"^{variable} is "):
            device_for("auto", "default", Launch())
        assert device_for("cpu", "--device", Launch()) == "cpu"
    for visible in ("0", "", "-1"):
        monkeypatch.setenv(variable, visible)
        assert device_for("auto", "default", Launch()) == ("cuda" if gpus else "cpu")


def test_what_the_compiler_of_a_gpu_lacks(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    assert compiler_fault("cuda") == "the package triton is not installed"
    monkeypatch.setattr(hardware, "find_spec", lambda name: object())
    assert compiler_fault("cuda") == "no C compiler (gcc or clang) is on PATH"
    assert compiler_fault("cpu") == "no C++ compiler (g++) is on PATH"
    tool(path, "clang")
    tool(path, "g++")
    monkeypatch.setattr(hardware, "has_python_header", lambda: True)
    assert compiler_fault("cuda") == compiler_fault("cpu") == ""
    monkeypatch.setenv("CC", "icc")
    assert "icc" in compiler_fault("cuda")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(hardware, "has_python_header", lambda: False)
    assert "Python.h" in compiler_fault("cuda")


def test_the_oldest_of_several_kinds_of_gpus_decides_for_all_ranks(path, monkeypatch):
    """A rank on GPU 1 would fail in the first step if GPU 0 decided."""
    monkeypatch.setattr(hardware, "find_spec", lambda name: object())
    monkeypatch.setattr(hardware, "has_python_header", lambda: True)
    tool(path, "gcc")
    kinds = [(9, 0), (6, 1)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu=0: kinds[gpu])
    assert "has 6.1" in compiler_fault("cuda")
    kinds[1] = (7, 5)
    assert compiler_fault("cuda") == ""
    assert "bfloat16 from compute capability 8.0 on, and a GPU has 7.5" in compiler_fault(
        "cuda", True
    )
    run = parse_flags(["--dtype", "bfloat16"])
    eager = with_compile(ResolvedConfig(run, "single"), "cuda").run
    assert eager.compile == "off"
    assert "--dtype float16 is compiled" in notices_of(eager, "cuda")
    half = parse_flags(["--dtype", "float16"])
    assert with_compile(ResolvedConfig(half, "single"), "cuda").run.compile == "on"
    kinds.pop()
    assert compiler_fault("cuda", True) == ""


def test_without_a_compiler_auto_is_eager_with_a_warning_and_on_is_refused(monkeypatch):
    monkeypatch.setattr(backend_choice, "compiler_fault", lambda *_: "no C compiler is here")
    auto = with_compile(ResolvedConfig(parse_flags([]), "single"), "cuda").run
    assert auto.compile == "off"
    assert "which is slower: no C compiler is here" in notices_of(auto, "cuda")
    on_cpu = with_compile(ResolvedConfig(parse_flags([]), "single"), "cpu").run
    for run, device in ((on_cpu, "cpu"), (parse_flags(["--compile", "off"]), "cuda")):
        assert "not compiled" not in notices_of(run, device)
    with pytest.raises(UsageError, match=r"on \(--compile\), but no C compiler .* --compile off"):
        with_compile(ResolvedConfig(parse_flags(["--compile", "on"]), "single"), "cuda")


def test_the_cuda_compiler_has_to_be_of_torchs_major_version():
    assert nvcc_fault("13.0", NVCC_13) == nvcc_fault("12.8", NVCC_12) == ""
    assert nvcc_fault("13.0", NVCC_12) == "nvcc has CUDA 12.4 and torch has CUDA 13.0"
    assert nvcc_fault("13.0", "") == "the CUDA compiler nvcc is not installed"


def test_what_an_extension_lacks(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(hardware, "has_python_header", lambda: True)
    assert extension_fault("cpu") == "no C++ compiler (c++) is on PATH"
    tool(path, "c++")
    assert extension_fault("cpu").startswith("ninja is not on PATH")
    tool(path, "ninja")
    assert extension_fault("cpu") == ""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "runtime"))  # of a runtime without compiler
    tool(path, "nvcc", NVCC_13)
    assert extension_fault("cuda") == "the CUDA compiler nvcc is not installed"
    monkeypatch.delenv("CUDA_HOME")
    assert extension_fault("cuda") == ""
    assert extension_fault("xpu") == "the SYCL compiler icpx is not on PATH"
    tool(path, "icpx")
    assert extension_fault("xpu") == extension_fault("npu") == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(hardware, "DEFAULT_HIPCC", str(tmp_path / "nowhere"))
    assert extension_fault("cuda") == "the HIP compiler hipcc is not installed"
    tool(path, "hipcc")
    assert extension_fault("cuda") == ""
