"""What the speed of a run is judged by: the peak of its devices, its layout, its kernels."""

from __future__ import annotations

import torch

from minimind.architecture.select import Architecture
from minimind.config.deepspeed.document import leaves
from minimind.config.flags import MIXED
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.rows.order import Order
from minimind.engine.build import Engine
from minimind.report.slowness import Setting
from minimind.runtime.device import CUDA


def setting_of(engine: Engine, schedule: Schedule) -> Setting:
    """The layout and the flags that the verdict of --profile depends on."""
    resolved = engine.resolved
    facts = {
        "world_size": engine.world_size,
        "zero_stage": resolved.zero_stage,
        "device": engine.device.type,
        "total_steps": schedule.total_steps,
        "zero_update": engine.zero_update,
        "kernels": kernels_of(engine) if resolved.run.profile else 0,
    }
    return Setting.read({**vars(resolved.run), **leaves(resolved.config), **facts})


def kernels_of(engine: Engine) -> int:
    """About as many kernels as the host launches in a step; 0 where they are not counted."""
    from minimind.architecture.costs import ZERO_LAUNCHES, step_launches
    from minimind.architecture.plan import layout_of
    from minimind.architecture.shape import shape_of

    resolved, run = engine.resolved, engine.resolved.run
    is_counted = run.hugging_face is None and run.optimizer == "adamw" and run.dtype != MIXED
    if not is_counted or run.use_moe or run.gradient_checkpointing or run.teacher:
        return 0
    layout = layout_of(run, engine.world_size, resolved.config, engine.device.type)
    kernels = step_launches(shape_of(run), layout)
    if engine.zero_update.startswith("by DeepSpeed"):
        weights = sum(p.requires_grad for p in engine.model.parameters())
        kernels += ZERO_LAUNCHES[resolved.zero_stage or 0] * weights
    return kernels


def peak_of(run: RunConfig, device: torch.device) -> tuple[float, str] | None:
    """Return the peak of one device in TFLOP/s and its source; None if unknown."""
    if run.peak_tflops is not None:
        return run.peak_tflops, run.sources["peak_tflops"]
    if device.type != CUDA.name or run.dtype == "float32":
        return None
    from minimind.architecture.costs import known_gpu

    gpu = known_gpu(CUDA.model_of(device))
    return gpu and (gpu.peak_tflops, f"NVIDIA's data sheet, {gpu.name}, dense bf16")


def mfu_per_speed(
    run: RunConfig, model: Architecture, device: torch.device, world_size: int, order: Order
) -> dict[str, float]:
    """Return the factor from tokens/s of all ranks to MFU, by name of the stage, "" without stages.

    Empty if the peak is unknown.
    """
    if (peak := peak_of(run, device)) is None:
        return {}
    runs = order.stage_runs or {"": run}
    return {
        name: model.flops_per_token(own) / (world_size * peak[0] * 1e12)
        for name, own in runs.items()
    }
