"""Peak and memory bandwidth of known GPUs, from NVIDIA's data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GPUModel:
    """Rates of one GPU as printed by its vendor; no kernel reaches them."""

    name: str
    peak_tflops: float  # dense bf16 with fp32 accumulation, 10^12 FLOPs a second
    bandwidth: float | None = None  # of its memory, 10^12 bytes a second; None: varies


# From NVIDIA's data sheets and white papers (many print the sparse peak, which is twice as high).
# The first entry that matches the device name counts. A100: of 80 GB.
GPUS = (
    GPUModel("GB200", 2500.0, 8.0),
    GPUModel("B200", 2250.0, 8.0),
    GPUModel("H200", 989.4, 4.8),
    GPUModel("H100 PCIe", 756.0, 2.0),
    GPUModel("H100 NVL", 835.0, 3.9),
    GPUModel("H100", 989.4, 3.35),
    GPUModel("GH200", 989.4),
    GPUModel("A100 PCIe", 312.0, 1.935),
    GPUModel("A100", 312.0, 2.039),
    GPUModel("A800", 312.0, 2.039),
    GPUModel("H800", 989.4, 3.35),
    GPUModel("L40S", 362.0, 0.864),
    GPUModel("L40", 181.0, 0.864),
    GPUModel("L4", 121.0, 0.3),
    GPUModel("A40", 150.0, 0.696),
    GPUModel("A30", 165.0, 0.933),
    GPUModel("A10", 125.0, 0.6),
    GPUModel("RTX 5090", 209.5, 1.792),
    GPUModel("RTX 4090", 165.2, 1.008),
    GPUModel("RTX 3090", 71.0, 0.936),
)


def known_gpu(name: str) -> GPUModel | None:
    """Return the entry for a device name such as `NVIDIA H100 80GB HBM3`; None if there is none."""
    return next((gpu for gpu in GPUS if is_model(gpu.name, name)), None)


def is_model(model: str, name: str) -> bool:
    """Whether device `name` is exactly that model, not a variant, a laptop GPU or a MIG slice."""
    other = r"(?! Laptop| D\b| Ti\b| NVL| PCIe| .*\bMIG\b)"
    return re.search(rf"\b{model}\b{other}", name) is not None


@dataclass(frozen=True)
class Machine:
    """GPUs, peak and token budget for the estimate; None if not given."""

    gpus: int = 1
    memory: int | None = None  # bytes of one device
    peak_tflops: float | None = None  # of one device, 10^12 FLOPs a second
    mfu: float = 0.4
    tokens: float | None = None
    gpu: GPUModel | None = None  # its model
