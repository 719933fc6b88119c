"""`minimind env`: this machine's output, and that of hosts whose tools' output was recorded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from minimind.cli import environment
from minimind.cli.main import main
from minimind.launch import host_facts
from minimind.runtime import device, hardware
from minimind.runtime.device import KINDS
from tests.runtime.test_hardware import NVCC_12, NVCC_13, path, tool

__all__ = ["path"]  # a fixture

# As `list_gpus` queries them.
H100 = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 9.0\n"
A100 = "NVIDIA A100-SXM4-80GB, 580.65.06, 81920, 8.0\n"
V100 = "Tesla V100-SXM2-16GB, 580.65.06, 16384, 7.0\n"
RTX = "NVIDIA GeForce RTX 3090, 535.183.01, 24576, 8.6\n"
LABELS = "minimind versions CUDA GPUs support CPU compilers DeepSpeed network disk".split()


class Host:
    """A machine: its nvidia-smi and nvcc print what was recorded; torch sees `seen` GPUs."""

    def __init__(self, path: Path, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self.patch, self.out_dir = path, patch, tmp_path / "out"
        for name in ("gcc", "c++", "g++", "ninja"):
            tool(path, name, f"{name} 13.3.0\n")
        patch.setattr(hardware, "find_spec", lambda name: object())
        patch.setattr(hardware, "has_python_header", lambda: True)
        patch.setattr(hardware, "DEFAULT_NVCC", str(path / "nowhere"))
        patch.setattr(device.Host, "has_bf16", True)
        patch.setattr(host_facts, "HUGE_PAGES", tmp_path / "huge_pages")
        patch.setattr(host_facts, "PROBE_MIB", 1)
        patch.setattr(environment, "MIN_DISK_MIB_S", 0.0)  # this machine's may be busy
        patch.setattr(environment, "MIN_SHARED_MIB", 0)

    def has(self, smi: str = "", cuda: str | None = "13.0", seen: int = 0, nvcc: str = "") -> None:
        if smi:
            tool(self.path, "nvidia-smi", smi)
        if nvcc:
            tool(self.path, "nvcc", nvcc)
        gpus = [
            SimpleNamespace(
                name=gpu.name,
                total_memory=(gpu.memory_mib or 0) * 2**20,
                major=(gpu.capability or (0, 0))[0],
                minor=(gpu.capability or (0, 0))[1],
            )
            for gpu in hardware.parse_gpus(smi)
        ]
        self.patch.setattr(torch.version, "cuda", cuda)
        self.patch.setattr(torch.cuda, "is_available", lambda: seen > 0)
        self.patch.setattr(torch.cuda, "device_count", lambda: seen)
        self.patch.setattr(torch.cuda, "get_device_properties", lambda number: gpus[number])
        capabilities = [(gpu.major, gpu.minor) for gpu in gpus]
        self.patch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)

    def env(self, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, list[str]]:
        """Print the facts; return them, and the lines about what is refused or slow."""
        assert main(["env", "--out_dir", str(self.out_dir), *flags]) == 0
        facts, _, rest = capsys.readouterr().out.partition("\n\n")
        return facts, rest.splitlines()


@pytest.fixture
def host(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(path, tmp_path, monkeypatch)


FINE = ["nothing is refused or known to be slow here"]


def test_this_machine_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["env", "--out_dir", str(tmp_path / "not" / "there")]) == 0
    facts, _, rest = capsys.readouterr().out.partition("\n\n")
    rows = dict(re.split(r"\s+", line, maxsplit=1) for line in facts.splitlines())
    assert list(rows) == LABELS
    assert f"torch {torch.__version__}, triton" in rows["versions"]
    assert re.search(r"not/there: [\d.]+ GiB free, [\d,]*[1-9][\d,]* MiB/s written", rows["disk"])
    assert re.search(r"C\+\+: \S", rows["compilers"])
    assert f"torch sees {torch.cuda.device_count()}" in rows["GPUs"]
    assert rest.strip()
    assert all(
        line.startswith(("refused: ", "slow: ", "may fail: ", "missing: ", "nothing"))
        for line in rest.splitlines()
    )
    assert not [*tmp_path.iterdir()]


def test_eight_h100_with_all_tools_have_nothing_to_remark(host, capsys):
    host.has(H100 * 8, seen=8, nvcc=NVCC_13)
    facts, remarks = host.env(capsys)
    assert remarks == FINE
    assert "8 x NVIDIA H100 80GB HBM3, 80 GiB, compute capability 9.0; torch sees 8 of 8" in facts
    assert re.search(r"torch is built for CUDA 13.0; NCCL \S+; driver 580.65.06\n", facts)
    assert "bf16 yes, fp8 yes, flash attention yes" in facts
    assert "nvcc: 13.0, V13.0.88" in facts
    assert "fused_adam yes, cpu_adam yes, fused_lion yes" in facts


def test_an_apple_gpu_is_shown_and_not_called_slow(
    host: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    host.has(cuda=None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    for name, answer in (("is_available", True), ("count", 1), ("memory", 12 * 2**30)):
        monkeypatch.setattr(KINDS["mps"], name, lambda answer=answer: answer)
    monkeypatch.setattr(KINDS["mps"], "model_of", lambda device: "Apple M2")
    facts, remarks = host.env(capsys)
    assert "GPUs       1 x Apple M2 (mps), 12.0 GiB, shared with the host\n" in facts
    assert not [line for line in remarks if "there is no GPU" in line]


@pytest.mark.parametrize(
    ("name", "version", "built"),
    [("hip", "7.0.51831", "ROCm 7.0.51831"), ("xpu", "20250301", "XPU 20250301")],
)
def test_a_build_of_torch_for_other_gpus_is_named(host, capsys, name, version, built):
    host.has(cuda=None)
    host.patch.setattr(torch.version, name, version)
    facts, _ = host.env(capsys)
    assert f"torch is built for {built}; NCCL" in facts
    brief, _ = host.env(capsys, "--brief")
    assert brief == f"torch {torch.__version__}, built for {built}\n"


def test_a_build_of_torch_for_macos_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert hardware.torch_build() == ""
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    assert hardware.torch_build() == "Metal"


def test_a_driver_too_old_for_the_wheel_refuses_the_gpus(host, capsys):
    host.has(RTX)
    facts, remarks = host.env(capsys)
    (gpus,) = [line for line in remarks if "GPU" in line]
    assert gpus.startswith(
        "refused: training on the GPUs, since nvidia-smi lists 1 x NVIDIA GeForce RTX"
    )
    assert "which needs driver 580.00 or newer; update the driver, or install a torch" in gpus
    assert "support    no GPU in use" in facts
    (build, warning) = host.env(capsys, "--brief")[0].splitlines()
    assert build == f"torch {torch.__version__}, built for CUDA 13.0"
    assert warning.startswith("warning: it cannot use the GPUs, since")
    assert warning.endswith("update the driver, or install a torch built for an older CUDA")


def test_without_nvcc_torchs_adamw_is_taken(host, capsys):
    host.has(H100, seen=1)
    facts, remarks = host.env(capsys)
    assert remarks == [
        "missing: DeepSpeed's fused_adam, fused_lion, since the CUDA compiler nvcc is"
        ' not installed; AdamW then is torch\'s fused one ("torch_adam": "auto"), other optimizers'
        " of DeepSpeed are refused"
    ]
    assert "nvcc: none" in facts
    assert "fused_adam no, cpu_adam yes" in facts
    tool(host.path, "nvcc", NVCC_12)
    assert "since nvcc has CUDA 12.4 and torch has CUDA 13.0;" in host.env(capsys)[1][0]


def test_one_gpu_of_another_kind_holds_the_others_up(host, capsys):
    host.has(H100 * 3 + A100, seen=4, nvcc=NVCC_13)
    facts, remarks = host.env(capsys)
    assert remarks == [
        "slow: GPUs of different kinds (NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3), because"
        " every step waits for the slowest; choose equal ones with CUDA_VISIBLE_DEVICES"
    ]
    assert "3 x NVIDIA H100 80GB HBM3, 80 GiB, compute capability 9.0; 1 x NVIDIA A100" in facts
    assert "bf16 yes, fp8 no, flash attention yes" in facts


def test_hidden_gpus_do_not_count(host, capsys):
    host.has(H100 + V100, seen=1, nvcc=NVCC_13)
    host.patch.setenv("CUDA_VISIBLE_DEVICES", "0")
    facts, remarks = host.env(capsys)
    assert remarks == FINE
    assert "compute capability 9.0; torch sees 1 of 2; CUDA_VISIBLE_DEVICES=0" in facts


def test_gpus_are_known_without_nvidia_smi(host, capsys):
    host.has(H100, seen=1, nvcc=NVCC_13)
    (host.path / "nvidia-smi").unlink()
    facts, remarks = host.env(capsys)
    assert remarks == FINE
    assert "driver unknown (no nvidia-smi)" in facts
    assert "1 x NVIDIA H100 80GB HBM3, 80 GiB, compute capability 9.0; torch sees 1 of 1" in facts


def test_a_v100_has_no_bf16(host, capsys):
    host.has(V100, seen=1, nvcc=NVCC_13)
    facts, remarks = host.env(capsys)
    assert "bf16 no, fp8 no, flash attention no" in facts
    assert remarks == [
        "slow: bfloat16 and attention, whose fast kernels need compute capability 8.0 and a GPU"
        " here has 7.0; use --dtype float16"
    ]


def test_a_laptop_without_compiler_says_what_is_missing(host, capsys):
    host.has(cuda=None)
    for name in ("gcc", "g++", "c++"):
        (host.path / name).unlink()
    host.patch.setattr(device.Host, "has_bf16", False)
    facts, remarks = host.env(capsys)
    assert "C: none, C++: none, ninja: ninja 13.3.0, nvcc: none" in facts
    assert "GPUs       none; torch sees 0 of 0" in facts
    starts = [line.partition(", since")[0] for line in remarks]
    assert starts == [
        "refused: --compile on",
        "slow: every model but --model tiny, because there is no GPU",
        "slow: --dtype bfloat16",
        "missing: DeepSpeed's fused_adam, cpu_adam, cpu_lion",
    ]
    assert host.env(capsys, "--brief")[0] == f"torch {torch.__version__}, without CUDA\n"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("always [madvise] never\n", "madvise"),
        ("always madvise [never]\n", "never"),
        ("[always] madvise never\n", "always"),
        (None, "unknown"),
    ],
)
def test_a_kernel_without_huge_pages_is_named(host, capsys, tmp_path, setting, told):
    if setting:
        (tmp_path / "huge_pages").write_text(setting)
    host.has(cuda=None)
    facts, remarks = host.env(capsys)
    assert f"huge pages: {told}\n" in facts
    slow = [line for line in remarks if line.startswith("slow: steps, since the kernel gives no")]
    assert len(slow) == (told == "never")


def test_a_small_shared_memory_and_a_slow_disk_are_named(host, capsys):
    host.has(H100 * 2, seen=2, nvcc=NVCC_13)
    host.patch.setattr(environment, "MIN_SHARED_MIB", 10**9)
    host.patch.setattr(environment, "MIN_DISK_MIB_S", 1e9)
    remarks = host.env(capsys)[1]
    assert remarks[0].startswith("may fail: NCCL between GPUs, with ")
    assert remarks[0].endswith("start the container with --shm-size=8g or --ipc=host")
    assert remarks[1].startswith("slow: checkpoints, written at ")


def test_an_out_dir_that_cannot_be_written_is_refused(host, capsys, monkeypatch):
    host.has(H100, seen=1, nvcc=NVCC_13)

    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host_facts.tempfile, "TemporaryFile", refuse)
    refusal = (
        f"refused: --out_dir {host.out_dir}: cannot be written (Permission denied); give another"
    )
    assert host.env(capsys)[1] == [refusal]


def test_interfaces_have_their_speed(monkeypatch, tmp_path):
    found = {
        "veth": SimpleNamespace(isup=True, speed=0, flags="up,broadcast,running"),
        "eth0": SimpleNamespace(isup=True, speed=100_000, flags="up,broadcast,running"),
        "eth1": SimpleNamespace(isup=False, speed=1000, flags="broadcast"),
        "lo": SimpleNamespace(isup=True, speed=0, flags="up,loopback,running"),
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: found)
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(host_facts, "INFINIBAND", tmp_path)
    assert host_facts._interfaces() == ["eth0 100000 Mbit/s", "veth", "mlx5_0 (InfiniBand)"]


# Every kind of argument, given as a Chinese name.
NAMED = ("prepare WORD --out out", "prepare a.jsonl --out WORD", "report WORD", "chat --once WORD")
NAMED += ("train --data_path WORD", "train --out_dir WORD", "train --wandb_run_name WORD")
READ_IN_C = """
import sys
from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.data.text.inputs import find_files
from minimind.errors import RunError
for command in sys.argv[2:]:
    words = command.replace("WORD", sys.argv[1]).split()
    try:
        parse_flags(words[1:]) if words[0] == "train" else main(words)
    except RunError as error:
        print(error, file=sys.stderr)
try:
    find_files(["."])
except RunError as error:
    print(error, file=sys.stderr)
"""


def test_a_name_that_another_locale_hides_is_not_called_wrong(tmp_path: Path):
    (tmp_path / "数据.jsonl").touch()
    environ = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", READ_IN_C, "数据.jsonl", *NAMED]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    lines = done.stderr.splitlines()
    assert len(lines) == len(NAMED) + 1, done.stderr
    for line in lines:
        assert "is UTF-8, but the locale has Python read it as ascii; unset PYTHO" in line
        assert "rename" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["数据.jsonl"]
