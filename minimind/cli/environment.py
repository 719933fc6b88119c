"""`minimind env`: versions and hardware for a bug report, and what they mean for a run."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minimind.cli.command import Command, argument
from minimind.config.run_config import DISTRIBUTION

if TYPE_CHECKING:
    from minimind.launch.host_facts import HostFacts

MIN_SHARED_MIB = 1024  # what NVIDIA's containers ask for; Docker's default is 64 MiB
MIN_DISK_MIB_S = 100.0
SEVERITIES = ("refused", "may fail", "slow", "missing")


@dataclass(kw_only=True)
class Env(Command):
    """Print versions and hardware for a bug report, and which settings are slow or refused here.

    The hardware is GPUs, compilers, network and disk of this host. The output contains no host
    name, user name or address: it is safe to paste into an issue.
    """

    example = "minimind env --out_dir out"
    out_dir: Path = argument(Path("out"), metavar="DIR")
    """folder whose disk is timed; nothing is left there"""
    brief: bool = argument(False)
    """print only the build of torch, and why it cannot use the GPUs"""

    def execute(self) -> None:
        from minimind.launch.host_facts import read_facts

        if self.brief:
            print("\n".join(torch_build_lines()))
            return
        facts = read_facts(self.out_dir)
        print("\n".join([*facts_lines(facts), "", *consequences(facts)]))


def torch_build_lines() -> list[str]:
    """The build of torch, and a warning if this host's GPUs are out of its reach."""
    import torch

    from minimind.runtime.device import CUDA
    from minimind.runtime.hardware import invisible_gpus_fault, list_gpus, torch_build

    built = f"built for {build}" if (build := torch_build()) else "without CUDA"
    lines = [f"torch {torch.__version__}, {built}"]
    if not CUDA.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        fault, remedy = invisible_gpus_fault(list_gpus(), torch.version.cuda, visible)
        lines += [f"warning: it cannot use the GPUs, since {fault}; {remedy}"] if fault else []
    return lines


def facts_lines(facts: HostFacts) -> list[str]:
    """The facts as labelled lines."""
    built = f"for {facts.torch_build}" if facts.torch_build else "without CUDA"
    driver = f"; driver {facts.gpus[0].driver}" if facts.gpus else ""
    visible = "" if facts.visible is None else f"; CUDA_VISIBLE_DEVICES={facts.visible}"
    ops = [f"{name} {'no' if fault else 'yes'}" for name, fault in facts.ops.items()]
    bf16 = "yes" if facts.has_cpu_bf16 else "no"
    rows = {
        "minimind": f"{DISTRIBUTION}, {facts.system}",
        "versions": ", ".join(f"{name} {number}" for name, number in facts.versions.items()),
        "CUDA": f"torch is built {built}; NCCL {facts.nccl}{driver}",
        "GPUs": facts.accelerator
        or f"{_gpus(facts)}; torch sees {facts.torch_gpus} of {facts.host_gpus}{visible}",
        "support": _support(facts),
        "CPU": f"{facts.cpu}, bf16 instructions: {bf16}, huge pages: {facts.huge_pages}",
        "compilers": ", ".join(f"{name}: {text}" for name, text in facts.compilers.items()),
        "DeepSpeed": f"ops that can be compiled: {', '.join(ops)}",
        "network": f"{', '.join(facts.interfaces) or 'none'}; /dev/shm {facts.shared_mib:,} MiB",
        "disk": f"{facts.disk}, {facts.disk_mib_s:,.0f} MiB/s written",
    }
    return [f"{label:<10} {text}" for label, text in rows.items()]


def _gpus(facts: HostFacts) -> str:
    from minimind.runtime.hardware import dotted

    kinds = Counter((gpu.name, gpu.memory_mib, gpu.capability) for gpu in facts.gpus)
    gpus = []
    for (name, memory, capability), count in kinds.items():
        size = f", {memory / 1024:.0f} GiB" if memory else ""
        numbers = f", compute capability {dotted(capability)}" if capability else ""
        gpus.append(f"{count} x {name}{size}{numbers}")
    return "; ".join(gpus) or "none"


def _oldest(facts: HostFacts) -> tuple[int, int] | None:
    """The lowest compute capability of the GPUs; None if no GPU can be used."""
    known = [gpu.capability for gpu in facts.gpus if gpu.capability]
    return min(known) if known and facts.torch_gpus else None


def _support(facts: HostFacts) -> str:
    """Dtypes and kernels that every GPU has in hardware."""
    from minimind.runtime.device import MIN_BF16_CAPABILITY
    from minimind.runtime.hardware import MIN_FP8_CAPABILITY

    oldest = _oldest(facts)
    if oldest is None:
        return "not known" if facts.accelerator else "no GPU in use"
    needs = {
        "bf16": MIN_BF16_CAPABILITY,
        "fp8": MIN_FP8_CAPABILITY,
        "flash attention": MIN_BF16_CAPABILITY,
    }
    return ", ".join(f"{name} {'yes' if oldest >= need else 'no'}" for name, need in needs.items())


def consequences(facts: HostFacts) -> list[str]:
    """What is refused, may fail or is slow here; one line each, with its remedy."""
    lines = _of_gpus(facts) if facts.torch_gpus else _of_the_cpu(facts)
    lines |= {
        f"slow: checkpoints, written at {facts.disk_mib_s:.0f} MiB/s; give --out_dir on a faster"
        " disk": 0 < facts.disk_mib_s < MIN_DISK_MIB_S,
        f"refused: --out_dir {facts.disk}; give another": not facts.disk_mib_s,
    }
    consequences = [line for line, applies in lines.items() if applies]
    consequences.sort(key=lambda line: SEVERITIES.index(line.partition(":")[0]))
    return consequences or ["nothing is refused or known to be slow here"]


def _of_gpus(facts: HostFacts) -> dict[str, bool]:
    """Consequences for training on GPUs, and whether each applies."""
    from minimind.runtime.device import MIN_BF16_CAPABILITY
    from minimind.runtime.hardware import dotted

    oldest, names = _oldest(facts), sorted({gpu.name for gpu in facts.gpus})
    is_old = oldest is not None and oldest < MIN_BF16_CAPABILITY
    return _of_ops(facts) | {
        f"slow: bfloat16 and attention, whose fast kernels need compute capability"
        f" {dotted(MIN_BF16_CAPABILITY)} and a GPU here has {dotted(oldest or (0, 0))}; use"
        " --dtype float16": is_old,
        f"slow: the model is not compiled, since {facts.compile_fault}; correct that": bool(
            facts.compile_fault
        ),
        f"slow: GPUs of different kinds ({', '.join(names)}), because every step waits for the"
        " slowest; choose equal ones with CUDA_VISIBLE_DEVICES": len(names) > 1
        and facts.torch_gpus > 1,
        f"may fail: NCCL between GPUs, with {facts.shared_mib} MiB of /dev/shm; start the"
        " container with --shm-size=8g or --ipc=host": facts.torch_gpus > 1
        and facts.shared_mib < MIN_SHARED_MIB,
    }


def _of_the_cpu(facts: HostFacts) -> dict[str, bool]:
    """Consequences for training on the CPU, and whether each applies."""
    fault, remedy = facts.gpu_fault()
    return _of_ops(facts) | {
        f"refused: training on the GPUs, since {fault}; {remedy}": bool(fault),
        "slow: every model but --model tiny, because there is no GPU": not (
            facts.gpus or facts.accelerator
        ),
        "slow: --dtype bfloat16, since this CPU has no bf16 instructions; remove it: the"
        " default here is float32": not facts.has_cpu_bf16,
        "slow: steps, since the kernel gives no huge pages; write madvise to"
        " /sys/kernel/mm/transparent_hugepage/enabled": facts.huge_pages == "never",
        f"refused: --compile on, since {facts.compile_fault}; remove it": bool(facts.compile_fault),
    }


def _of_ops(facts: HostFacts) -> dict[str, bool]:
    """Ops of DeepSpeed that cannot be compiled, by what is missing."""
    by_fault: dict[str, list[str]] = {}
    for op, fault in facts.ops.items():
        by_fault.setdefault(fault, []).append(op)
    return {
        f"missing: DeepSpeed's {', '.join(ops)}, since {fault}; AdamW then is torch's fused one"
        ' ("torch_adam": "auto"), other optimizers of DeepSpeed are refused': bool(fault)
        for fault, ops in by_fault.items()
    }
