"""Model FLOPs utilization (MFU): the peak of the device, its source, and the share reached."""

from __future__ import annotations

import torch

from minimind.architecture.costs import known_gpu
from minimind.architecture.select import Architecture
from minimind.config.run_config import RunConfig


def peak_of(run: RunConfig, device: torch.device) -> tuple[float, str] | None:
    """Return the peak of one device in TFLOP/s and its source; None if unknown."""
    if run.peak_tflops is not None:
        return run.peak_tflops, run.sources["peak_tflops"]
    if device.type != "cuda" or run.dtype == "float32":
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device))
    return gpu and (gpu.peak_tflops, f"NVIDIA's data sheet, {gpu.name}, dense bf16")


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
