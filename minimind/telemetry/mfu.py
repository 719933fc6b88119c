"""Model FLOPs utilization (MFU): the peak of the device, its source, and the share reached."""

from __future__ import annotations

import re

import torch

from minimind.architecture.select import Architecture
from minimind.config.run_config import RunConfig

# Dense bf16 TFLOP/s with fp32 accumulation, from NVIDIA's data sheets and white papers (many print
# the sparse figure, which is twice as high). The first entry that matches the device name counts.
VENDOR = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "GH200": 989.0,
    "A100 PCIe": 312.0,
    "A100": 312.0,
    "A800": 312.0,
    "H800": 989.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 150.0,
    "A30": 165.0,
    "A10": 125.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_of(run: RunConfig, device: torch.device) -> tuple[float, str] | None:
    """Return the peak of one device in TFLOP/s and its source; None if unknown."""
    if run.peak_tflops is not None:
        return run.peak_tflops, run.sources["peak_tflops"]
    if device.type != "cuda" or run.dtype == "float32":
        return None
    name = torch.cuda.get_device_name(device)
    known = next((model for model in VENDOR if is_model(model, name)), None)
    return None if known is None else (VENDOR[known], f"NVIDIA's data sheet, {known}, dense bf16")


def is_model(model: str, name: str) -> bool:
    """Whether device `name` is exactly that model, not a variant, a laptop GPU or a MIG slice."""
    other = r"(?! Laptop| D\b| Ti\b| NVL| PCIe| .*\bMIG\b)"
    return re.search(rf"\b{model}\b{other}", name) is not None


def mfu_per_speed(
    run: RunConfig, model: Architecture, device: torch.device, world_size: int
) -> float | None:
    """Return the factor from tokens/s of all ranks to MFU; None if the peak is unknown."""
    peak = peak_of(run, device)
    return None if peak is None else model.flops_per_token(run) / (world_size * peak[0] * 1e12)


def peak_text(run: RunConfig, device: torch.device) -> str:
    """The peak as the start summary shows it; empty if unknown."""
    peak = peak_of(run, device)
    return "" if peak is None else f"MFU of {peak[0]:g} TFLOP/s ({peak[1]})"
