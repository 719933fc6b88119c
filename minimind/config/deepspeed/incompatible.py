"""Faults of incompatible settings whose values are valid on their own.

DeepSpeed 0.19.8 rejects some of these late and with a traceback, silently ignores others, and
trains a few of them incorrectly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minimind.config.deepspeed.auto_values import offloads
from minimind.config.deepspeed.config_values import BATCH, MISSING, get
from minimind.config.deepspeed.effects import ignored_faults
from minimind.config.deepspeed.optimizer import muon_faults, unread_flag_faults
from minimind.config.deepspeed.schema import optimizer_name
from minimind.config.run_config import RunConfig

ZERO = "zero_optimization."
RESUMABLE = ("Adam", "AdamW", "Lion", "SGD")  # state supported by engine/optimizer/state.py
# DeepSpeed schedulers that support these flags; any other scheduler ignores them.
SUPPORTED_BY = {
    "schedule": (),
    "warmup_steps": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    "min_lr_ratio": ("WarmupCosineLR",),
}
# The only supported value of each. Others would change the rows per rank or the gradient mean; for
# the last, they would apply non-finite gradients to the weights.
ONLY = {
    "managed_gradient_accumulation": (True, "accumulation is counted by DeepSpeed here"),
    "gradient_allreduce_op": ("mean", "the loss is a mean over all processes"),
    "sequence_parallel_size": (1, "the flag --sequence_parallel divides rows here"),
    "data_parallel_size": (1, "the launcher says how many processes there are"),
    "torch_autocast.enabled": (False, "--dtype decides the precision"),
    "bf16.check_grad_overflow": (True, "a step with a gradient that is not finite is skipped"),
}
# DeepSpeed divides by the first group; negative values of the second are rejected or wrong.
LEAST = {
    "above": (
        "steps_per_print gradient_predivide_factor scheduler.params.cycle_first_step_size"
        " scheduler.params.lr_range_test_step_size",
        "above 0",
    ),
    "at_least": (
        "optimizer.params.eps scheduler.params.warmup_min_lr scheduler.params.cycle_min_lr",
        "0 or above",
    ),
}


def incompatible_settings(
    config: Mapping[str, Any],
    path: str,
    run: RunConfig,
    world_size: int,
    device: str,
    sources: Mapping[str, str],
) -> list[str]:
    """Return one sentence per incompatible combination in a filled `config`."""
    faults = _batch(config, run, world_size) + _scheduler(config, run)
    faults += [
        f"{block}.type is {kind}, which ignores {name} = {getattr(run, name)}"
        f" ({run.sources[name]}); drop {name}, or change the block"
        for block, kind, name in ignored_flags(config)
        if run.is_explicit(name)
    ]
    faults += _least(config) + _other_values(config) + ignored_faults(config)
    if run.compile == "on" and get(config, "flops_profiler.enabled") is True:
        faults.append(
            "flops_profiler.enabled is true, and in a model that is compiled the profiler miscounts"
            f" and has it compiled again and again; drop compile = on ({run.sources['compile']})"
            " or switch the profiler off"
        )
    stage = get(config, f"{ZERO}stage")
    if run.compile == "on" and stage == 3:
        where = sources.get(f"{ZERO}stage", path)
        faults.append(
            f"zero_optimization.stage is 3 ({where}), whose hooks in every module would be compiled"
            f" again and again; drop compile = on ({run.sources['compile']}), or use stage 2"
        )
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        where = sources.get(f"{ZERO}stage", path)
        faults.append(
            f"zero_optimization.stage is {json.dumps(stage)} ({where}); write 0, 1, 2 or 3"
        )
    else:
        faults += _precision(config, run, device, stage) + _optimizer(config, device)
        faults += _stage(config, stage, sources) + _reduction(config, stage)
    faults += muon_faults(run, config) + _mup(config, run)
    of_flags = precision_faults(run, device) + unread_flag_faults(run)  # which name their source
    return [f"{path}: {fault}" for fault in faults] + of_flags


def ignored_flags(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (block, type, flag) for each flag that the file's scheduler ignores."""
    scheduler = get(config, "scheduler.type")
    unsupported = (
        [] if scheduler is MISSING else [n for n, k in SUPPORTED_BY.items() if scheduler not in k]
    )
    ignored = [("scheduler", scheduler, name) for name in unsupported]
    if get(config, "scheduler.params.cycle_momentum") is True:
        ignored += [("scheduler", "OneCycle with cycle_momentum", n) for n in ("beta1", "beta2")]
    return ignored


def _optimizer(config: Mapping[str, Any], device: str) -> list[str]:
    """Optimizers without checkpoint support."""
    name = optimizer_name(get(config, "optimizer.type"))
    if name == "Lion" and device == "cpu" and not offloads(config, "optimizer"):
        return [
            "optimizer.type Lion runs on a CPU only with offload_optimizer; remove the block, and"
            " use --optimizer lion"
        ]
    if name and name not in RESUMABLE:
        return [f"optimizer.type {name} has no checkpoints; use {', '.join(RESUMABLE)}"]
    return []


def _mup(config: Mapping[str, Any], run: RunConfig) -> list[str]:
    """Blocks that do not apply a rate and a decoupled weight decay per parameter group."""
    if run.mup_base_dim is None:
        return []
    flag = f"mup_base_dim = {run.mup_base_dim} ({run.sources['mup_base_dim']})"
    name, faults = optimizer_name(get(config, "optimizer.type")), []
    if name == "SGD":
        faults.append(
            f"optimizer.type is SGD, and {flag} has rates for optimizers that normalize the"
            " gradient; use AdamW, or drop mup_base_dim"
        )
    if name == "Adam" and get(config, "optimizer.params.adam_w_mode") is False:
        faults.append(
            f"optimizer.params.adam_w_mode is false, and {flag} scales a decoupled weight decay;"
            " remove it, or drop mup_base_dim"
        )
    if get(config, "scheduler.type") is not MISSING:
        faults.append(
            f"scheduler sets one learning rate, and {flag} sets several; remove the block, and use"
            " --schedule"
        )
    return faults


def _batch(config: Mapping[str, Any], run: RunConfig, world_size: int) -> list[str]:
    rows, in_step = run.micro_batch_rows(world_size), run.rows_per_step(world_size)
    config_value = config[BATCH]
    if config_value == in_step or not isinstance(
        config_value, int | None
    ):  # schema.py checks types
        return []
    return [
        f"{BATCH} is {json.dumps(config[BATCH])}, but {rows} rows ({run.sources['batch_size']}) x"
        f" {run.accumulation_steps} micro-batches ({run.sources['accumulation_steps']}) x"
        f' {run.parallel(world_size).data_size} processes = {in_step}; write "auto" there, or'
        " change --batch_size or"
        " --accumulation_steps"
    ]


def precision_faults(run: RunConfig, device: str) -> list[str]:
    """Faults of float16 and TF32 where they do not apply, with or without DeepSpeed."""
    faults = []
    elsewhere = ", or check the run of a GPU host (--device cuda)" if run.dry_run else ""
    if run.dtype == "float16" and device == "cpu":
        place = run.sources["dtype"]
        faults.append(
            f"dtype = float16 ({place}) needs a GPU; use bfloat16 or float32 here{elsewhere}"
        )
    if run.tf32 and (run.dtype != "float32" or device == "cpu"):
        where = "on a CPU" if device == "cpu" else f"in {run.dtype} ({run.sources['dtype']})"
        remedy = f"drop it{elsewhere}" if device == "cpu" else "drop it"
        faults.append(f"tf32 = True ({run.sources['tf32']}) has no effect {where}; {remedy}")
    return faults


def _precision(config: Mapping[str, Any], run: RunConfig, device: str, stage: int) -> list[str]:
    faults = []
    if run.dtype == "float16" and stage == 0 and device != "cpu":
        faults.append(
            f"dtype = float16 ({run.sources['dtype']}) trains incorrectly at ZeRO stage 0 in"
            " DeepSpeed 0.19.8 (gradients are unscaled that were never scaled); use bfloat16, or"
            " stage 1 to 3"
        )
    accumulated = get(config, "data_types.grad_accum_dtype")
    if accumulated == "fp32" and run.dtype == "bfloat16" and stage == 0:
        faults.append(
            "data_types.grad_accum_dtype is fp32 in bfloat16 at stage 0, which DeepSpeed 0.19.8 has"
            " not implemented; use stage 1 to 3"
        )
    return faults


def _stage(config: Mapping[str, Any], stage: int, sources: Mapping[str, str]) -> list[str]:
    """Offload options that the stage does not support."""
    faults = []
    for what, least in (("optimizer", 1), ("param", 3)):
        name = f"{ZERO}offload_{what}"
        if offloads(config, what) and stage < least:
            where = sources[f"{name}.device"]
            faults.append(
                f"{name} ({where}) needs stage {least} or above and stage is"
                f" {stage} ({sources[f'{ZERO}stage']}); change one"
            )
        elif get(config, f"{name}.device") == "nvme":
            faults.append(
                f'{name}.device is "nvme" ({sources[f"{name}.device"]}), of which there are no'
                ' checkpoints; write "cpu"'
            )
    return faults


def _reduction(config: Mapping[str, Any], stage: int) -> list[str]:
    """Gradient reduction options that only some stages support."""
    faults = []
    ratio = get(config, f"{ZERO}offload_optimizer.ratio")
    if isinstance(ratio, int | float) and ratio != 1 and stage != 3:
        faults.append(f"{ZERO}offload_optimizer.ratio = {ratio} needs stage 3; remove it")
    if get(config, f"{ZERO}compute_grad_norm") is False and stage in (0, 3):
        faults.append(f"{ZERO}compute_grad_norm is false, which stage {stage} refuses; remove it")
    if stage >= 2 and get(config, f"{ZERO}reduce_scatter") in (MISSING, True):
        if get(config, "gradient_predivide_factor") not in (MISSING, 1, 1.0):
            faults.append(
                "gradient_predivide_factor is refused beside reduce_scatter at stage"
                f' {stage}; remove it, or write "reduce_scatter": false'
            )
        if get(config, "prescale_gradients") is True:
            faults.append(
                f"prescale_gradients is refused beside reduce_scatter at stage {stage}; remove it,"
                ' or write "reduce_scatter": false'
            )
    if stage == 3 and get(config, f"{ZERO}round_robin_gradients") is True:
        faults.append(
            f"{ZERO}round_robin_gradients is for stages 1 and 2, and stage is 3; remove it"
        )
    for block in ("bf16", "fp16"):
        if get(config, f"{block}.{block}_master_weights_and_grads") is True:
            faults.append(
                f"{block}.{block}_master_weights_and_grads gives up the fp32 weights, which every"
                " checkpoint holds; remove it"
            )
    return faults


def _scheduler(config: Mapping[str, Any], run: RunConfig) -> list[str]:
    faults = []
    momenta = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")
    given = [n for n in momenta if get(config, f"scheduler.params.{n}") is not MISSING]
    if given and get(config, "scheduler.params.cycle_momentum") is False:
        faults.append(
            f"scheduler.params.{given[0]} is ignored while cycle_momentum is false; write"
            " true, or remove it"
        )
    warmup, total = (get(config, f"scheduler.params.{n}_num_steps") for n in ("warmup", "total"))
    if isinstance(warmup, int) and warmup < 2:
        faults.append(
            f"scheduler.params.warmup_num_steps = {warmup}, and DeepSpeed's schedulers warm up over"
            " 2 steps at least; write 2 or more"
        )
    elif warmup == 2 and run.is_explicit("warmup_steps") and run.warmup_steps in (0, 1):
        faults.append(
            f"warmup_steps = {run.warmup_steps} ({run.sources['warmup_steps']}), and DeepSpeed's"
            " schedulers warm up over 2 steps at least; raise it, or remove the scheduler block"
        )
    total = run.max_steps if total is MISSING else total
    if isinstance(warmup, int) and isinstance(total, int) and total < warmup:
        length = run.sources["max_steps"] if total == run.max_steps else "the steps of the run"
        faults.append(
            f"scheduler.params.total_num_steps = {total} ({length}) is less than warmup_num_steps ="
            f" {warmup} ({run.sources['warmup_steps']}); lower the warm-up, or train longer"
        )
    return faults


def _least(config: Mapping[str, Any]) -> list[str]:
    """Numbers below their lower bound."""
    faults = []
    for bound, (keys, words) in LEAST.items():
        for key in keys.split():
            value = get(config, key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                if value < 0 or (bound == "above" and value == 0):
                    faults.append(f"{key} is {json.dumps(value)}, not {words}; change it")
    return faults


def _other_values(config: Mapping[str, Any]) -> list[str]:
    faults = []
    for key, (value, why) in ONLY.items():
        config_value = get(config, key)
        if config_value is not MISSING and config_value is not None and config_value != value:
            faults.append(f"{key} is {json.dumps(config_value)}, but {why}; remove it")
    return faults
