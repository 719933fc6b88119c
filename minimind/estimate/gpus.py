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
    memory: int = 0  # GB on the label, which are about as many GiB; 0: varies


# From NVIDIA's data sheets and white papers (many print the sparse peak, which is twice as high).
# The first entry that matches the device name counts.
GPUS = (
    GPUModel("GB200", 2500.0, 8.0, 186),
    GPUModel("B200", 2250.0, 8.0, 180),
    GPUModel("H200", 989.4, 4.8, 141),
    GPUModel("H100 PCIe", 756.0, 2.0, 80),
    GPUModel("H100 NVL", 835.0, 3.9, 94),
    GPUModel("H100", 989.4, 3.35, 80),
    GPUModel("GH200", 989.4),
    GPUModel("A100-40GB", 312.0, 1.555, 40),
    GPUModel("A100 PCIe", 312.0, 1.935, 80),
    GPUModel("A100", 312.0, 2.039, 80),
    GPUModel("A800", 312.0, 2.039, 80),
    GPUModel("H800", 989.4, 3.35, 80),
    GPUModel("L40S", 362.0, 0.864, 48),
    GPUModel("L40", 181.0, 0.864, 48),
    GPUModel("L4", 121.0, 0.3, 24),
    GPUModel("A40", 150.0, 0.696, 48),
    GPUModel("A30", 165.0, 0.933, 24),
    GPUModel("A10", 125.0, 0.6, 24),
    GPUModel("RTX 5090", 209.5, 1.792, 32),
    GPUModel("RTX 4090", 165.2, 1.008, 24),
    GPUModel("RTX 3090", 71.0, 0.936, 24),
)


def known_gpu(name: str) -> GPUModel | None:
    """Return the entry for a device name such as `NVIDIA H100 80GB HBM3`; None if there is none."""
    return next((gpu for gpu in GPUS if is_model(gpu.name, name)), None)


def named_gpu(text: str) -> str:
    """Return the name of the entry that `text` means: `h100`, `4090`, `a100-sxm4-80gb`; else text.

    Case, vendor, form factor and kind of memory do not matter; a size of memory has to be right.
    """
    base, size = _plain_name(text)
    named = [(gpu, *_plain_name(gpu.name)) for gpu in GPUS if gpu.bandwidth]
    found = [gpu for gpu, name, _ in named if name == base and size in (0, gpu.memory)]
    return max(found, key=lambda gpu: gpu.memory).name if found else text


def _plain_name(text: str) -> tuple[str, int]:
    """A name without its common words and separators, and its GB of memory (0: none)."""
    text = re.sub(r"nvidia|geforce|rtx|tesla|sxm\d?|hbm\d?e?|oam", " ", text.lower())
    size = re.search(r"\b(\d+) ?g(?:i?b)?\b", text)
    base = text.replace(size[0], " ") if size else text
    return re.sub(r"[\W_]+", "", base), int(size[1]) if size else 0


def is_model(model: str, name: str) -> bool:
    """Whether device `name` is exactly that model, not a variant, a laptop GPU or a MIG slice."""
    other = r"(?! Laptop| D\b| Ti\b| NVL| PCIe| .*\bMIG\b)"
    return re.search(rf"\b{model}\b{other}", name) is not None


ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class Machine:
    """GPUs, peak and token budget for the estimate; None if not given."""

    gpus: int = 1
    memory: int | None = None  # bytes of one device
    peak_tflops: float | None = None  # of one device, 10^12 FLOPs a second
    mfu: float | None = None  # None: that of the estimate, else ASSUMED_MFU
    tokens: float | None = None
    gpu: GPUModel | None = None  # its model
