"""Every optimizer state adapter saved, resumed, rewound and crossed.

Worker of tests/engine/test_adapters.py.

Usage: torchrun ... -m tests.distributed.adapters OUT.json NAME...    (of a case, or A -> B of two)

There is no fp16 on a CPU that DeepSpeed accepts: its check is answered for it here, and the numbers
are those of torch's fp16 on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.engines import (
    MUON,
    Case,
    Recomputing,
    WithFrozenParts,
    build,
    course,
    load,
    save,
    state_of,
)

SAVED, LAST = 5, 13
# By these a product of 6 to 13 factors is another float32 than a power, begun anew after 5.
BETAS = "--beta1 0.85 --beta2 0.97"
BF16, FP16, FP32, MIXED = "bfloat16", "float16", "float32", "bf16-mixed"
ZERO, PARAMS = "zero_optimization.", "optimizer.params."
OFFLOAD = {f"{ZERO}offload_optimizer": {"device": "cpu"}, "zero_force_ds_cpu_optimizer": False}
CPU_ADAM = {f"{ZERO}offload_optimizer": {"device": "cpu"}, f"{PARAMS}torch_adam": False}
FUSED = {f"{PARAMS}torch_adam": False}
ROUND_ROBIN = {f"{ZERO}round_robin_gradients": True, f"{ZERO}parameter_alignment": True}
BLOCKS = {
    f"{ZERO}leaf_module": {"classes": ["minimind.model.causal_lm.DenseBlock"]}
}  # gathered at once
# Of the layers of this class, not of its subclasses, gradients are sent in bf16.
LOW_SENT = {"torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"]}
WIDE_SUMS = {"data_types.grad_accum_dtype": "fp32"}
# The scale doubles every 3 steps, overflows, and is halved: all of it before and after the save.
SCALED = {"fp16.initial_scale_power": 20, "fp16.loss_scale_window": 3, "fp16.hysteresis": 2}
# With few tokens a micro-batch of a rank leaves some expert idle that others visit.
EXPERTS = {"use_moe": True, "n_routed_experts": 8, "num_experts_per_tok": 1}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}}}
AVERAGE = "--ema 0.9"
MUP = "--mup_base_dim 128"  # a quarter of the dim of the flags
MUON_FLAGS = "--optimizer muon --muon_lr 0.01"
CPU_LION: dict[str, Any] = {
    "optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": "auto"}},
    f"{ZERO}offload_optimizer": {"device": "cpu"},
}
LION_FLAGS, SGD_FLAGS = "--optimizer lion", "--optimizer sgd"
EIGHT_BIT = "--optimizer adamw_8bit"

CASES = {
    "ddp, fp32": Case(None, FP32),
    "ddp, bf16": Case(None, BF16),
    "0, fp32": Case(0, FP32),
    "0, bf16": Case(0, BF16, flags=AVERAGE),
    "1, bf16": Case(1, BF16),
    "1, bf16, fp32 sums": Case(1, BF16, edits=WIDE_SUMS),
    "1, fp16": Case(1, FP16, edits=SCALED),
    "2, fp32, SGD": Case(2, FP32, edits=SGD, flags=AVERAGE),
    "2, fp32": Case(2, FP32),
    "2, bf16": Case(2, BF16),
    "2, bf16, fp32 sums": Case(2, BF16, edits=WIDE_SUMS),
    "2, bf16, round robin": Case(2, BF16, edits=ROUND_ROBIN),
    "2, bf16, offload": Case(2, BF16, edits=OFFLOAD),
    "2, fp16": Case(2, FP16, edits=SCALED),
    "ddp, fp32, experts": Case(None, FP32, shape=EXPERTS),
    "2, bf16, experts": Case(2, BF16, shape=EXPERTS),
    "0, fp32, FusedAdam": Case(0, FP32, edits=FUSED),
    "0, bf16, FusedAdam": Case(0, BF16, edits=FUSED),
    "2, bf16, FusedAdam": Case(2, BF16, edits=FUSED),
    "1, bf16, CPUAdam": Case(1, BF16, edits=CPU_ADAM),
    "2, fp32, CPUAdam": Case(2, FP32, edits=CPU_ADAM),
    "2, fp32, recomputing": Case(2, FP32, model=Recomputing),
    "2, bf16, one graph": Case(2, BF16, flags="--compile on"),
    "ddp, bf16, one graph": Case(None, BF16, flags="--compile on"),
    "ddp, fp32, Muon": Case(None, FP32, flags=MUON_FLAGS),
    "ddp, bf16, Muon": Case(None, BF16, flags=f"{MUON_FLAGS} {AVERAGE}"),
    "0, fp32, Muon": Case(0, FP32, edits=MUON),
    "0, bf16, Muon": Case(0, BF16, edits=MUON),
    "1, bf16, fp32 sums, Muon": Case(1, BF16, edits=MUON | WIDE_SUMS, flags=AVERAGE),
    "2, fp32, Muon": Case(2, FP32, edits=MUON),
    "2, bf16, round robin, Muon": Case(2, BF16, edits=MUON | ROUND_ROBIN, flags=AVERAGE),
    "2, fp16, Muon": Case(2, FP16, edits=MUON | SCALED),
    "2, bf16, experts, Muon": Case(2, BF16, edits=MUON, shape=EXPERTS),
    "3, fp32, Muon": Case(3, FP32, edits=MUON),
    "3, bf16, Muon": Case(3, BF16, edits=MUON, flags=AVERAGE),
    "ddp, bf16, muP": Case(None, BF16, flags=MUP),
    "0, fp32, FusedAdam, muP": Case(0, FP32, edits=FUSED, flags=MUP),
    "2, bf16, muP": Case(2, BF16, flags=MUP),
    "2, bf16, experts, muP, Muon": Case(2, BF16, edits=MUON, shape=EXPERTS, flags=MUP),
    "3, bf16, muP": Case(3, BF16, flags=MUP),
    "ddp, bf16, Lion": Case(None, BF16, flags=LION_FLAGS),
    "0, fp32, Lion": Case(0, FP32, flags=LION_FLAGS),
    "0, bf16, Lion": Case(0, BF16, flags=LION_FLAGS),
    "1, bf16, fp32 sums, Lion": Case(1, BF16, edits=WIDE_SUMS, flags=LION_FLAGS),
    "2, bf16, offload, Lion": Case(2, BF16, edits=OFFLOAD, flags=f"{LION_FLAGS} {AVERAGE}"),
    "2, bf16, CPULion": Case(2, BF16, edits=CPU_LION),
    "3, bf16, Lion": Case(3, BF16, flags=LION_FLAGS),
    "ddp, bf16, SGD": Case(None, BF16, flags=SGD_FLAGS),
    "0, bf16, SGD": Case(0, BF16, flags=SGD_FLAGS),
    "3, fp32, SGD": Case(3, FP32, flags=SGD_FLAGS),
    "ddp, fp32, 8 bits": Case(None, FP32, flags=EIGHT_BIT),
    "ddp, bf16, 8 bits": Case(None, BF16, flags=f"{EIGHT_BIT} {AVERAGE}"),
    "0, fp32, 8 bits": Case(0, FP32, flags=EIGHT_BIT),
    "0, bf16, 8 bits": Case(0, BF16, flags=EIGHT_BIT),
    "1, bf16, fp32 sums, 8 bits": Case(1, BF16, edits=WIDE_SUMS, flags=EIGHT_BIT),
    "2, fp32, 8 bits": Case(2, FP32, flags=EIGHT_BIT),
    "2, bf16, 8 bits": Case(2, BF16, flags=EIGHT_BIT),
    "2, bf16, round robin, 8 bits": Case(2, BF16, edits=ROUND_ROBIN, flags=EIGHT_BIT),
    "2, fp16, 8 bits": Case(2, FP16, edits=SCALED, flags=EIGHT_BIT),
    "2, bf16, offload, 8 bits": Case(2, BF16, edits=OFFLOAD, flags=EIGHT_BIT),
    "2, mixed, 8 bits": Case(2, MIXED, flags=EIGHT_BIT),
    "3, fp32, 8 bits": Case(3, FP32, flags=EIGHT_BIT),
    "3, bf16, 8 bits": Case(3, BF16, flags=EIGHT_BIT),
    "3, fp32": Case(3, FP32),
    "3, fp32, recomputing": Case(3, FP32, model=Recomputing),
    "3, bf16": Case(3, BF16),
    "3, fp16": Case(3, FP16, edits=SCALED),
    "3, bf16, experts": Case(3, BF16, shape=EXPERTS),
    "3, bf16, experts, blocks": Case(3, BF16, edits=BLOCKS, shape=EXPERTS),
    "3, fp32, recomputing, blocks": Case(3, FP32, edits=BLOCKS, model=Recomputing),
    "ddp, mixed": Case(None, MIXED),
    "0, mixed": Case(0, MIXED),
    "1, mixed": Case(1, MIXED, flags=AVERAGE),
    "2, mixed": Case(2, MIXED),
    "2, mixed, low sent": Case(2, MIXED, edits=LOW_SENT),
    "2, mixed, offload": Case(2, MIXED, edits=OFFLOAD),
    "2, mixed, Muon": Case(2, MIXED, edits=MUON),
    "2, mixed, experts": Case(2, MIXED, shape=EXPERTS),
    "2, mixed, recomputing": Case(2, MIXED, model=Recomputing),
    "2, mixed, one graph": Case(2, MIXED, flags="--compile on"),
    "3, mixed": Case(3, MIXED),
    "3, bf16, offload": Case(3, BF16, edits=OFFLOAD, flags=AVERAGE),
    "3, bf16, FusedAdam": Case(3, BF16, edits=FUSED),
    "3, bf16, CPUAdam": Case(3, BF16, edits=CPU_ADAM),
}


def study(name: str, root: Path) -> dict[str, Any]:
    """The unbroken course of a case, and the same resumed: rewound, made anew, from the start."""
    case = _with_everything(name)
    engine = build(case, seed=1)
    save(engine, root, 0)
    before, saved = course(engine, 0, SAVED), state_of(engine)
    save(engine, root, SAVED)
    unbroken, end = course(engine, SAVED, LAST), state_of(engine)
    load(engine, root, 0)
    restarted = course(engine, 0, SAVED), _differing(saved, state_of(engine))
    load(engine, root, SAVED)
    rewound = course(engine, SAVED, LAST), _differing(end, state_of(engine))
    other = build(case, seed=2)
    load(other, root, SAVED)
    anew = course(other, SAVED, LAST), _differing(end, state_of(other))
    return {
        "wrapper": type(engine.backend.optimizer).__name__,
        "keys": {key: numbers.numel() for key, numbers in end.items()},
        "seen": int(engine.model.get_buffer("seen")),
        "unbroken": before + unbroken,
        "rewound": rewound,
        "restarted": restarted,
        "anew": anew,
    }


def _with_everything(name: str) -> Case:
    case, flags = CASES[name], "" if name.endswith("SGD") else BETAS
    model = case.model if issubclass(case.model, WithFrozenParts) else WithFrozenParts
    return replace(case, model=model, flags=f"{flags} {case.flags}")


def _differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    equal = {key for key in {*one} & {*other} if torch.equal(one[key], other[key])}
    return sorted({*one, *other} - equal)


def cross(source: Path, target: str) -> list[dict[str, Any]]:
    """The course of `target` from the checkpoint of another case on."""
    engine = build(_with_everything(target), seed=2)
    load(engine, source, SAVED)
    return course(engine, SAVED, LAST)


def main() -> None:
    """Study every case of the command line, then `source -> target`; rank 0 writes what it saw."""
    get_accelerator: Any = import_module("deepspeed.accelerator").get_accelerator
    os.environ["DS_ACCELERATOR"] = "cpu"
    get_accelerator().is_fp16_supported = lambda: True
    out, found = Path(sys.argv[1]), {}
    root = out.parent / "checkpoints"
    for name in sys.argv[2:]:
        source, arrow, target = name.partition(" -> ")
        place = root / source.replace(", ", "-").replace(" ", "-")
        found[name] = cross(place, target) if arrow else study(name, place)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
