"""Ops of DeepSpeed that a run compiles at its start, and what replaces them without a compiler."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from minimind.config.deepspeed.auto_values import DEEPSPEED_ADAM, offloads
from minimind.config.deepspeed.schema import optimizer_name
from minimind.runtime.hardware import extension_fault

WITHOUT_ADAM = 'write "torch_adam": true in optimizer.params: torch\'s needs no compiler'
KINDS = {"Adam": "adam", "AdamW": "adam", "Lion": "lion", "Lamb": "lamb"}
OPS = ("fused_adam", "cpu_adam", "fused_lion", "cpu_lion", "fused_lamb", "cpu_adagrad")
CPU_OPS = ("fused_adam", "cpu_adam", "cpu_lion", "cpu_adagrad")  # those it has for CPU runs


def required_op(config: Mapping[str, Any]) -> str:
    """Return the op that the optimizer of a resolved configuration loads; empty if none."""
    block = config.get("optimizer", {})
    name, on_host = optimizer_name(block.get("type")), offloads(config, "optimizer")
    if name == "Adagrad" and on_host:
        return "cpu_adagrad"
    kind = KINDS.get(name or "")
    if kind is None or (kind == "adam" and block.get("params", {}).get("torch_adam") is True):
        return ""
    return f"{'cpu' if on_host and kind != 'lamb' else 'fused'}_{kind}"


def op_fault(op: str, device: str) -> str:
    """Return why `op` cannot be loaded on `device` (cpu or cuda); empty if it can.

    Only a fused op on a GPU is CUDA code.
    """
    if is_installed(op):
        return ""
    if op.startswith("cpu_") or device == "cpu":
        return extension_fault("cpu")
    return extension_fault(device) or architectures_fault(
        os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    )


def architectures_fault(written: str) -> str:
    """Return which word of TORCH_CUDA_ARCH_LIST DeepSpeed cannot read; empty if it reads all.

    torch reads 9.0a and names such as Hopper too.
    """
    words = written.replace(";", " ").split()
    unread = [word for word in words if not re.fullmatch(r"\d+\.\d+(\+PTX)?", word)]
    if not unread:
        return ""
    return f"TORCH_CUDA_ARCH_LIST is {written!r}, and DeepSpeed cannot read {unread[0]!r} in it"


def is_installed(op: str) -> bool:
    """Whether `op` was compiled when DeepSpeed was installed (DS_BUILD_OPS=1)."""
    spec = find_spec("deepspeed")
    folders = spec.submodule_search_locations or () if spec else ()
    return any(any(Path(folder).glob(f"ops/*/{op}_op.*so")) for folder in folders)


def is_compiled(op: str) -> bool:
    """Whether an earlier start has compiled `op`, in torch's folder of extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        from torch.utils.cpp_extension import get_default_build_root  # slow to import

        cuda = torch.version.cuda
        build = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
        major, minor = sys.version_info[:2]
        root = Path(get_default_build_root()) / f"py{major}{minor}{sys.abiflags}_{build}"
    return (Path(root) / op / f"{op}.so").exists()


def unbuildable_optimizer(config: Mapping[str, Any], device: str) -> str:
    """Describe the optimizer of DeepSpeed that cannot be compiled here; empty if there is none."""
    op, name = required_op(config), optimizer_name(config.get("optimizer", {}).get("type"))
    fault = op_fault(op, device) if op else ""
    if not fault:
        return ""
    remedy = WITHOUT_ADAM if "adam" in op else "install that, or use AdamW"
    params = config["optimizer"].get("params", {})
    if "adam" in op and (named := [key for key in DEEPSPEED_ADAM if key in params]):
        remedy = f'write "torch_adam": true and remove {", ".join(named)}, which only this one has'
    return f"{name} needs DeepSpeed's {op}, which cannot be compiled here ({fault}); {remedy}"


def replaceable_params(
    config: Mapping[str, Any], sources: Mapping[str, str], device: str
) -> tuple[list[str], str]:
    """Return parameters without which torch's AdamW does the same, and why DeepSpeed's cannot run.

    Both are empty unless `"torch_adam": "auto"` selected DeepSpeed's, for these parameters, and it
    cannot be compiled here.
    """
    source = sources.get("optimizer.params.torch_adam", "")
    op = required_op(config)
    if not op or not source.startswith("derived: "):
        return [], ""
    params = config["optimizer"]["params"]
    keys = [key for key in DEEPSPEED_ADAM if key in params]
    has_equal = all(params[key] in DEEPSPEED_ADAM[key] for key in keys)
    fault = op_fault(op, device) if has_equal else ""
    return (keys, f"DeepSpeed's {op} cannot be compiled: {fault}") if fault else ([], "")


def compilation_notice(config: Mapping[str, Any], device: str) -> str:
    """Notice of the op that the first start compiles; empty if there is none."""
    op = required_op(config)
    if not op or op_fault(op, device) or is_installed(op) or is_compiled(op):
        return ""
    return f"compile  {compilation_text(op)}"


def compilation_text(op: str) -> str:
    """Return the line that announces the compilation of `op`."""
    remedy = ' ("torch_adam": true in optimizer.params avoids it)' if "adam" in op else ""
    return f"DeepSpeed's {op} is compiled at the first start, which takes minutes{remedy}"
