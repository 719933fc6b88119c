"""Which backend is in force, by which file and on what device; asked before any work is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from minimind.config.deepspeed.auto_values import offloads
from minimind.config.deepspeed.effects import keys_without_effect
from minimind.config.deepspeed.incompatible import precision_faults
from minimind.config.deepspeed.literals import AUTO, adopt_launch, get, put
from minimind.config.deepspeed.resolve import Resolved, Sections, read_deepspeed_json, resolve
from minimind.config.launcher_env import Launch, parent_command, with_dropped_config
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, RunConfig
from minimind.config.schedule import Schedule
from minimind.errors import UsageError, fault_error
from minimind.runtime.hardware import HAS_BF16


@dataclass(frozen=True)
class Setup:
    """A run as asked for by flags and launcher, and the DeepSpeed JSON as written."""

    run: RunConfig
    launch: Launch
    device: str
    backend: str  # deepspeed, ddp or single
    document: Mapping[str, Any]
    path: str

    def resolve(
        self, schedule: Schedule | None = None, sections: Sections = lambda config, path: []
    ) -> Resolved:
        """Flags, files and launcher made to agree; a UsageError tells every fault."""
        world_size, run = self.launch.world_size, self.run
        if self.backend == "deepspeed":
            place = (self.document, self.path, run, world_size, self.device)
            return with_compile(resolve(*place, schedule, self.launch, sections), self.device)
        faults: list[str] = []
        run = adopt_launch(run, self.launch, faults)
        faults += precision_faults(run, self.device)
        if faults:
            raise fault_error(faults)
        run.micro_batch_rows(world_size)  # raises where they cannot be shared out
        return with_compile(Resolved(run, self.backend), self.device)


def read_setup(run: RunConfig, launch: Launch) -> Setup:
    """What flags and launcher ask for; a UsageError where a file or a GPU is not there.

    DeepSpeed is in force when a file is named, by flag or in the Accelerate YAML, or when
    `accelerate launch` was told to use it; the shipped file then stands in for one.
    """
    launch = with_dropped_config(launch, run.deepspeed_config, parent_command())
    faults: list[str] = []  # told by resolve(), with those of the file
    heard = adopt_launch(run, launch, faults)
    try:
        device = choose_device(heard, launch)
    except UsageError as error:
        raise fault_error(faults or [str(error)]) from error
    path = heard.deepspeed_config
    if path == "none" or (path is None and not launch.uses_deepspeed):
        backend = "ddp" if launch.world_size > 1 else "single"
        return Setup(run, launch, device, backend, {}, "none")
    if path is not None:
        document = read_deepspeed_json(path, heard.sources["deepspeed_config"])
        return Setup(run, launch, device, "deepspeed", document, path)
    shipped = str(DEFAULT_DEEPSPEED_CONFIG)
    document = read_deepspeed_json(shipped)
    if "zero_optimization.stage" in launch.deepspeed:  # else 2, which is Accelerate's default too
        put(document, "zero_optimization.stage", AUTO)
    return Setup(run, launch, device, "deepspeed", document, shipped)


def with_compile(resolved: Resolved, device: str) -> Resolved:
    """The same, with --compile auto settled."""
    run = resolved.run
    if run.compile != "auto":
        return resolved
    because = {
        "no GPU": device != "cuda",
        "ZeRO stage 3": resolved.zero_stage == 3,
        "experts": run.use_moe,
        "DeepSpeed's flops_profiler": get(resolved.config, "flops_profiler.enabled") is True,
        "a model of transformers": run.hugging_face is not None,
    }
    against = [reason for reason, holds in because.items() if holds]
    told = f"derived: {against[0]}" if against else "derived: GPU"
    return replace(resolved, run=run.with_values(told, compile="off" if against else "on"))


def choose_device(run: RunConfig, launch: Launch) -> str:
    """`cuda` or `cpu`; a UsageError when there are too few GPUs for what was asked."""
    return device_for(run.device, run.sources["device"], launch)


def device_for(asked: str, source: str, launch: Launch) -> str:
    """The same of `auto`, `cuda` or `cpu`, asked for by `source`."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not gpus:
        raise UsageError(f"device = cuda ({source}), but torch sees no GPU here; use --device cpu")
    if asked == "cpu" or not gpus:
        return "cpu"
    if launch.local_world_size > gpus:
        raise UsageError(
            f"{launch.local_world_size} processes were started here and {gpus} GPUs are visible;"
            f" start {gpus} (NUM_PROCESSES={gpus} bash run_accelerate.sh ...), or use --device cpu"
        )
    return "cuda"


def advice(setup: Setup, resolved: Resolved) -> list[str]:
    """What could be had for less; nothing where nothing could."""
    launch = setup.launch
    told = (
        dropped_config_notice(launch),
        idle_gpus(setup.device, launch),
        single_process_advice(resolved, launch.world_size),
        slow_bf16(resolved.run, setup.device),
        without_effect(resolved),
    )
    return [*filter(None, told)]


def dropped_config_notice(launch: Launch) -> str:
    """That DeepSpeed is on by a file that the launcher dropped; else nothing."""
    if launch.dropped_config is None:
        return ""
    return (
        f"DeepSpeed is engaged by --deepspeed_config_file {launch.dropped_config}, which `accelerate"
        f" launch` drops without --use_deepspeed; it is {launch.deepspeed_config} here"
    )


def idle_gpus(device: str, launch: Launch) -> str:
    """What to type when more GPUs are visible than processes were started; else nothing."""
    gpus = torch.cuda.device_count()
    if device == "cpu" or gpus <= launch.local_world_size:
        return ""
    return (
        f"warning  {gpus} GPUs are visible, {launch.local_world_size} of them are used; type"
        f" NUM_PROCESSES={gpus} bash run_accelerate.sh ... (torchrun --nproc_per_node {gpus} ...),"
        " or hide the others with CUDA_VISIBLE_DEVICES"
    )


def single_process_advice(resolved: Resolved, world_size: int) -> str:
    """What to type where ZeRO buys nothing that a process alone has not; else nothing."""
    config = resolved.config
    offloaded = any(offloads(config, what) for what in ("optimizer", "param"))
    is_ours = resolved.optimizer_params == {"eps": 1e-8} and resolved.optimizer == "AdamW"
    if not config or world_size > 1 or offloaded or resolved.scheduler or not is_ours:
        return ""
    return (
        f"ZeRO stage {resolved.zero_stage} has nothing to share out at 1 process, and costs"
        " time and memory; --deepspeed_config none does without it (docs/performance.md)"
    )


def slow_bf16(run: RunConfig, device: str) -> str:
    """What to type where a model of transformers would crawl; our own widens its products."""
    if run.hugging_face is None or run.dtype != "bfloat16" or device != "cpu" or HAS_BF16:
        return ""
    return (
        "this CPU has no instructions for bfloat16, and transformers' layers take many times as"
        " long by it as by float32; --dtype float32 does without it"
    )


def without_effect(resolved: Resolved) -> str:
    """The ZeRO keys of the file that its stage or device passes over; else nothing."""
    keys = keys_without_effect(resolved.config, resolved.sources, resolved.path)
    return f"no effect at ZeRO stage {resolved.zero_stage}: {', '.join(keys)}" if keys else ""
