"""Faults of settings whose values are valid on their own.

Settings that exclude one another, that have no effect in this training loop, or that DeepSpeed's
parser accepts and its engine refuses; and the optimizer as a block of the file or as flags.
DeepSpeed 0.19.8 rejects some of these late and with a traceback, silently ignores others, and
trains a few of them incorrectly.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

from minimind.config.checks import given
from minimind.config.deepspeed.schema import AUTO, DTYPES, optimizer_name
from minimind.config.deepspeed.values import (
    BATCH,
    MISSING,
    PARAMS,
    TENSOR_PARALLEL,
    TOTAL_STEPS,
    UNCOUNTED,
    ZERO,
    Facts,
    adopt,
    get,
    leaves,
    offloads,
)
from minimind.config.optimizers import ADAM_TYPES, FLAG_OF_TYPE, OPTIMIZERS, READ_BY, RESUMABLE
from minimind.config.run_config import CONFIGS, DEFAULT_DEEPSPEED_CONFIG, RunConfig
from minimind.runtime import disk
from minimind.runtime.installed import install_packages
from minimind.runtime.terminal import first_lines

# Parameters of DeepSpeed's Muon that torch's does not have, with their only accepted values.
OTHERS = {
    "torch_adam": (True,),
    "eps": (1e-8,),
    "adam_lr": (),
    "ns_method": (),
    "per_head_muon": (),
}


def adopt_optimizer(
    config: dict[str, Any], path: str, run: RunConfig, faults: list[str]
) -> RunConfig:
    """Adopt the optimizer block of the file as flags; a shipped default gives way to a flag."""
    name = FLAG_OF_TYPE.get(optimizer_name(get(config, "optimizer.type")) or "")
    if name is None:
        return run
    if not run.is_explicit("optimizer"):
        run = run.with_values(f"{path}: optimizer.type", optimizer=name)
    elif run.optimizer != name and _is_shipped_default(config["optimizer"], path):
        del config["optimizer"]
        return run
    elif run.optimizer != name:
        written = json.dumps(config.pop("optimizer")["type"])
        shipped = "muon" if run.muon else "torch_adamw, which has no such block"
        faults.append(
            f"{path}: optimizer.type is {written} but {run.sources['optimizer']} says optimizer ="
            f" {run.optimizer}; {given(run, 'optimizer').drop}, or take --deepspeed_config none or"
            f" {shipped}"
        )
        return run
    if not OPTIMIZERS[name].keeps_block:
        return _adopt_muon(config, path, run, faults)
    return _adopt_params(config, path, run, faults)


def is_shipped(path: str) -> bool:
    """Whether a DeepSpeed JSON is of this package."""
    file = disk.resolve(Path(path))
    return file == DEFAULT_DEEPSPEED_CONFIG or file.parent == CONFIGS / "deepspeed"


def _is_shipped_default(block: Mapping[str, Any], path: str) -> bool:
    """Whether a block of AdamW holds nothing that a user chose, in a file of this package."""
    params = block.get("params", {})
    return (
        is_shipped(path)
        and block.keys() <= {"type", "params"}
        and block["type"] == "AdamW"
        and all(value == AUTO or (key, value) == ("eps", 1e-8) for key, value in params.items())
    )


def replaced_block(document: Mapping[str, Any], path: str, run: RunConfig) -> str:
    """Notice that --optimizer replaces the block of a shipped file; else empty."""
    written = optimizer_name(get(document, "optimizer.type")) or ""
    if FLAG_OF_TYPE.get(written, run.optimizer) == run.optimizer:
        return ""
    by = run.sources["optimizer"]
    return f"optimizer {run.optimizer} by {by}, in place of {path}'s {written}"


def _adopt_params(
    config: dict[str, Any], path: str, run: RunConfig, faults: list[str]
) -> RunConfig:
    """Adopt parameters of the block; one that lacks it has the flag's if given, else torch's 0."""
    for key, name in OPTIMIZERS[run.optimizer].params.items():
        params = config["optimizer"].setdefault("params", {})
        if key not in params and not run.is_explicit(name):
            run = run.with_values("torch's default", **{name: 0.0})
        if params.setdefault(key, AUTO) not in (AUTO, None):
            where, remedy = f"{path}: {PARAMS}{key}", 'write "auto" in the file'
            run = adopt(run, name, params[key], where, remedy, faults)
    return run


def _adopt_muon(config: dict[str, Any], path: str, run: RunConfig, faults: list[str]) -> RunConfig:
    """Adopt a block of type Muon, and remove it from `config`.

    DeepSpeed's Muon clips the orthogonalized update in place of the gradient, and its checkpoints
    fit one number of processes only; torch's has neither fault.
    """
    params = config.pop("optimizer").get("params", {})
    for key, name in OPTIMIZERS[run.optimizer].params.items():
        if params.get(key, AUTO) not in (AUTO, None):
            where, remedy = f"{path}: {PARAMS}{key}", 'write "auto" in the file'
            run = adopt(run, name, params[key], where, remedy, faults)
    if "muon_lr" not in params:
        faults.append(
            f"{path}: {PARAMS}muon_lr is missing, and Muon's rate is not AdamW's; write a number,"
            ' or "auto" for --muon_lr'
        )
    faults += [
        f"{path}: {PARAMS}{key} is {json.dumps(params[key])}, which torch's Muon does not have;"
        " remove it"
        for key, accepted in OTHERS.items()
        if key in params
        and params[key] not in (AUTO, *accepted)
        and not any(fault.startswith(f"{path}: {PARAMS}{key} is ") for fault in faults)  # its type
    ]
    return run


def with_optimizer_defaults(run: RunConfig) -> RunConfig:
    """Return the run with every value that only its optimizer reads, defaults included."""
    for name, value in run.optimizer_values.items():
        if getattr(run, name) is None:
            is_shared = name == "muon_lr" and run.muon["muon_scaling"] != "original"
            source = (
                "derived: learning_rate"
                if is_shared
                else f"{OPTIMIZERS[run.optimizer].name}'s default"
            )
            run = run.with_values(source, **{name: value})
    return run


def unread_flag_faults(run: RunConfig) -> list[str]:
    """Faults of given flags that the optimizer does not read."""
    return [
        f"{given(run, name)} has no effect with {given(run, 'optimizer')};"
        f" {given(run, name).drop}, or use --optimizer {READ_BY[name][0]}"
        for name in run.unread_flags
        if run.is_explicit(name)
    ]


def plain_faults(run: RunConfig) -> list[str]:
    """Faults of given flags without DeepSpeed."""
    faults = unread_flag_faults(run)
    if run.tensor_parallel > 1:
        flag = given(run, "tensor_parallel")
        faults.append(f"{flag} needs DeepSpeed; give --deepspeed_config FILE, or drop it")
    return faults


# Keys and blocks that DeepSpeed's engine applies in the calls that this package makes.
ENGINE = frozenset(
    """
    optimizer scheduler bf16 fp16 data_types timers flops_profiler comms_logger tensorboard wandb
    csv_monitor comet prescale_gradients gradient_predivide_factor gradient_clipping
    communication_data_type log_level steps_per_print dump_state disable_python_gc
    wall_clock_breakdown memory_breakdown zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer train_batch_size train_micro_batch_size_per_gpu
    gradient_accumulation_steps
    """.split()
)
# A rule above allows a single value of each.
ONE_VALUE = frozenset(
    """
    managed_gradient_accumulation gradient_allreduce_op sequence_parallel_size data_parallel_size
    torch_autocast
    """.split()
)
# Blocks that DeepSpeed's engine would apply and that must be off: {"enabled": false}, or absent.
OFF = {
    "hybrid_engine": "no text is generated by DeepSpeed while training",
    "expert_parallel": "experts are flags of this package (--use_moe), on every process",
    "data_efficiency": "the row order is this package's own",
    "autotuning": "`minimind plan` finds the micro-batch that fits",
}
_LOADER = "rows come from this package's loader, which has no partial batch"
_SAVING = "checkpoints are written in this package's own format"
_OWN_TP = "this package names the layers that are divided; remove it"
_NVME = "nothing is kept on NVMe here"
# Keys and blocks without effect here: their harmless values, and the remedy.
IGNORED: dict[str, tuple[tuple[Any, ...], str]] = {
    "activation_checkpointing": ((False, None), "use --gradient_checkpointing"),
    "compile": ((False,), "use --compile on"),
    "checkpoint": ((False, None), f"{_SAVING}; remove it"),
    "datastates_ckpt": ((), f"{_SAVING}; remove it"),
    "pipeline": (
        (None,),
        "DeepSpeed's pipeline engine needs ZeRO below stage 2, and is not used here; remove it",
    ),
    "tensor_parallel": ((False, None), _OWN_TP),
    "tensor_parallel.tp.tp_size": ((1,), _OWN_TP),
    "weight_quantization": ((False,), "weights are not quantized in training; remove it"),
    "aio": ((None,), f"{_NVME}; remove it"),
    "dataloader_drop_last": ((False,), f"{_LOADER}; remove it"),
    "vocabulary_size": ((None,), "use --vocab_size"),
    "disable_allgather": ((False,), "DeepSpeed never reads it; remove it"),
    "use_data_before_expert_parallelism": ((False,), "there are no expert groups; remove it"),
    "seq_parallel_communication_data_type": ((None,), "no sequence is split; remove it"),
    "zero_optimization.elastic_checkpoint": (
        (False,),
        "checkpoints resume on any number of processes without it; remove it",
    ),
    "zero_optimization.load_from_fp32_weights": (
        (True,),
        "checkpoints hold fp32 weights; remove it",
    ),
    "zero_optimization.pipeline_loading_checkpoint": ((False,), f"{_SAVING}; remove it"),
    "zero_optimization.allgather_partitions": ((True,), "DeepSpeed never reads it; remove it"),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        (False,),
        "every weight is trained; remove it",
    ),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (
        (False,),
        "DeepSpeed's own Muon is not used; remove it",
    ),
    "zero_optimization.override_module_apply": (
        (True,),
        "no module is made inside zero.Init; remove it",
    ),
}
# Stages at which a ZeRO key has an effect; keys that are not listed apply at every stage.
ONE_TWO, THREE, FROM_ONE = (1, 2), (3,), (1, 2, 3)
STAGES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        """reduce_scatter use_multi_rank_bucket_allreduce allgather_bucket_size
        round_robin_gradients ignore_unused_parameters parameter_alignment zenflow""".split(),
        ONE_TWO,
    ),
    **dict.fromkeys(
        """stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params
        stage3_allgather_sequential stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_module_granularity_threshold sub_group_size zero_hpz_partition_size
        zero_quantized_weights zero_quantized_gradients memory_efficient_linear
        log_trace_cache_warnings enable_sanity_checks leaf_module offload_param""".split(),
        THREE,
    ),
    **dict.fromkeys(
        """contiguous_gradients reduce_bucket_size overlap_comm compute_grad_norm
        offload_optimizer""".split(),
        FROM_ONE,
    ),
}
EVERY_STAGE = frozenset(("stage",))
# Below stage 3 these would not save the memory or traffic that they promise.
SAVINGS = {
    "zero_hpz_partition_size": (1,),
    "zero_quantized_weights": (False,),
    "zero_quantized_gradients": (False,),
}
NVME_ONLY = (
    "offload_optimizer.nvme_path offload_optimizer.buffer_count offload_optimizer.pipeline_read"
    " offload_optimizer.pipeline_write offload_optimizer.fast_init offload_param.nvme_path"
    " offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu"
).split()


def _without_effect(f: Facts) -> Iterator[str]:
    for name, value in leaves(f.config).items():
        rules = [key for key in IGNORED if f"{name}.".startswith(f"{key}.")]
        if rules and value != AUTO and name != TENSOR_PARALLEL:
            harmless, remedy = IGNORED[max(rules, key=len)]
            if not _is_one_of(value, harmless) and not (value == {} and harmless):
                yield f"{name} is {json.dumps(value)}, which has no effect here; {remedy}"
    for key, why in OFF.items():
        block = f[key]
        if isinstance(block, Mapping) and block and block.get("enabled") is not False:
            shown = json.dumps(block.get("enabled", "missing"))
            yield f'{key}.enabled is {shown}, but {why}; write "enabled": false or remove it'
    for name, harmless in SAVINGS.items():
        value = f[ZERO + name]
        if (
            f.stage in (0, 1, 2)
            and value not in (MISSING, AUTO)
            and not _is_one_of(value, harmless)
        ):
            yield (
                f"{ZERO}{name} is {json.dumps(value)}, which only stage 3 supports, and stage is"
                f' {f.stage}; remove it, or write "stage": 3'
            )


def keys_without_effect(
    config: Mapping[str, Any], sources: Mapping[str, str], path: str
) -> list[str]:
    """Return the ZeRO keys of the file (`path`) that have no effect at its stage or device."""
    stage = get(config, f"{ZERO}stage")
    keys = []
    for key, source in sources.items():
        name = key.removeprefix(ZERO)
        block = name.split(".")[0]
        if source != path or not key.startswith(ZERO) or block in EVERY_STAGE:
            continue
        if stage not in STAGES.get(block, (stage,)):
            keys.append(name)
        elif name in NVME_ONLY and get(config, f"{ZERO}{block}.device") != "nvme":
            keys.append(name)
    return keys


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether `value` is in `harmless`, where 0 is not False and 1 is not True."""
    return any(type(value) is type(one) and value == one for one in harmless)


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


def setting_faults(f: Facts) -> list[str]:
    """Return one sentence per fault of the settings of a filled file, and of flags beside them."""
    parts = (_batch, _scheduler, _least, _other_values, _without_effect, _compiled, _by_stage)
    of_file = [fault for part in (*parts, _muon, _mup) for fault in part(f)]
    of_flags = precision_faults(f.run, f.device) + unread_flag_faults(f.run)  # name their source
    of_engine = [fault for part in (_zero, _norm, _packages, _unsupported) for fault in part(f)]
    return [
        *(f"{f.path}: {fault}" for fault in of_file),
        *of_flags,
        *(f"{f.path}: {fault}" for fault in of_engine),
        *tensor_parallel_faults(f),
    ]


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


def precision_faults(run: RunConfig, device: str) -> list[str]:
    """Faults of float16 and TF32 where they do not apply, with or without DeepSpeed."""
    faults = []
    elsewhere = ", or check the run of a GPU host (--device cuda)" if run.dry_run else ""
    if run.dtype == "float16" and device == "cpu":
        dtype = given(run, "dtype")
        faults.append(f"{dtype} needs a GPU; use bfloat16 or float32 here{elsewhere}")
    has_none = device != "cuda"
    if run.tf32 and (run.dtype != "float32" or has_none):
        where = "on a CPU" if device == "cpu" else f"on {device}"
        where = where if has_none else f"in {run.dtype} ({run.sources['dtype']})"
        remedy = f"drop it{elsewhere}" if has_none else "drop it"
        faults.append(f"{given(run, 'tf32')} has no effect {where}; {remedy}")
    return faults


def _batch(f: Facts) -> Iterator[str]:
    run, value = f.run, f[BATCH]
    rows, in_step = run.micro_batch_rows(f.world_size), run.rows_per_step(f.world_size)
    if value != in_step and isinstance(value, int | None):  # schema.py checks types
        yield (
            f"{BATCH} is {json.dumps(value)}, but {rows} rows ({run.sources['batch_size']}) x"
            f" {run.accumulation_steps} micro-batches ({run.sources['accumulation_steps']}) x"
            f" {run.parallel(f.world_size).data_size} processes = {in_step}; write"
            ' "auto" there, or change --batch_size or --accumulation_steps'
        )


def _scheduler(f: Facts) -> Iterator[str]:
    run, warmup, total = f.run, f["scheduler.params.warmup_num_steps"], f[TOTAL_STEPS]
    momenta = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")
    written = [name for name in momenta if f[f"scheduler.params.{name}"] is not MISSING]
    if written and f["scheduler.params.cycle_momentum"] is False:
        yield (
            f"scheduler.params.{written[0]} is ignored while cycle_momentum is false; write true,"
            " or remove it"
        )
    if isinstance(warmup, int) and warmup < 2:
        yield (
            f"scheduler.params.warmup_num_steps = {warmup}, and DeepSpeed's schedulers warm up over"
            " 2 steps at least; write 2 or more"
        )
    elif warmup == 2 and run.is_explicit("warmup_steps") and run.warmup_steps in (0, 1):
        yield (
            f"{given(run, 'warmup_steps')}, and DeepSpeed's schedulers warm up over 2 steps at"
            " least; raise it, or remove the scheduler block"
        )
    total = run.max_steps if total is MISSING else total
    is_counted = f.sources.get(TOTAL_STEPS) != UNCOUNTED
    if isinstance(warmup, int) and isinstance(total, int) and total < warmup and is_counted:
        length = run.sources["max_steps"] if total == run.max_steps else "the steps of the run"
        yield (
            f"{TOTAL_STEPS} = {total} ({length}) is less than warmup_num_steps = {warmup}"
            f" ({run.sources['warmup_steps']}); lower the warm-up, or train longer"
        )
    for block, kind, name in ignored_flags(f.config):
        if run.is_explicit(name):
            flag = given(run, name)
            yield f"{block}.type is {kind}, which ignores {flag}; {flag.drop}, or change the block"


def _least(f: Facts) -> Iterator[str]:
    """Numbers below their lower bound."""
    for bound, (keys, words) in LEAST.items():
        for key in keys.split():
            value = f[key]
            if isinstance(value, int | float) and not isinstance(value, bool):
                if value < 0 or (bound == "above" and value == 0):
                    yield f"{key} is {json.dumps(value)}, not {words}; change it"


def _other_values(f: Facts) -> Iterator[str]:
    for key, (value, why) in ONLY.items():
        if f[key] is not MISSING and f[key] is not None and f[key] != value:
            yield f"{key} is {json.dumps(f[key])}, but {why}; remove it"


def _compiled(f: Facts) -> Iterator[str]:
    """Settings of a model that is not compiled."""
    if f.run.compile == "on" and f["flops_profiler.enabled"] is True:
        yield (
            "flops_profiler.enabled is true, and in a model that is compiled the profiler miscounts"
            f" and has it compiled again and again; drop {given(f.run, 'compile')} or switch the"
            " profiler off"
        )
    if f.run.compile == "on" and f.stage == 3:
        yield (
            f"{ZERO}stage is 3 ({f.sources[f'{ZERO}stage']}), whose hooks in every module would be"
            f" compiled again and again; drop {given(f.run, 'compile')}, or use stage 2"
        )


def _by_stage(f: Facts) -> Iterator[str]:
    """A stage that does not exist, or does not support a setting."""
    run, stage = f.run, f.stage
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        where = f.sources.get(f"{ZERO}stage", f.path)
        yield f"{ZERO}stage is {json.dumps(stage)} ({where}); write 0, 1, 2 or 3"
        return
    if run.dtype == "float16" and stage == 0 and f.device != "cpu":
        yield (
            f"{given(run, 'dtype')} trains incorrectly at ZeRO stage 0 in DeepSpeed 0.19.8"
            " (gradients are unscaled that were never scaled); use bfloat16, or stage 1 to 3"
        )
    if f["data_types.grad_accum_dtype"] == "fp32" and run.dtype == "bfloat16" and stage == 0:
        yield (
            "data_types.grad_accum_dtype is fp32 in bfloat16 at stage 0, which DeepSpeed 0.19.8 has"
            " not implemented; use stage 1 to 3"
        )
    if f.optimizer == "Lion" and f.device == "cpu" and not offloads(f.config, "optimizer"):
        yield (
            "optimizer.type Lion runs on a CPU only with offload_optimizer; remove the block, and"
            " use --optimizer lion"
        )
    elif f.optimizer and f.optimizer not in RESUMABLE:
        yield f"optimizer.type {f.optimizer} has no checkpoints; use {', '.join(RESUMABLE)}"
    for what, least in (("optimizer", 1), ("param", 3)):
        name = f"{ZERO}offload_{what}"
        if offloads(f.config, what) and stage < least:
            yield (
                f"{name} ({f.sources[f'{name}.device']}) needs stage {least} or above and stage is"
                f" {stage} ({f.sources[f'{ZERO}stage']}); change one"
            )
        elif f[f"{name}.device"] == "nvme":
            yield (
                f'{name}.device is "nvme" ({f.sources[f"{name}.device"]}), of which there are no'
                ' checkpoints; write "cpu"'
            )
    yield from _reduction(f)


def _reduction(f: Facts) -> Iterator[str]:
    """Gradient reduction options that only some stages support."""
    stage, ratio = f.stage, f[f"{ZERO}offload_optimizer.ratio"]
    if isinstance(ratio, int | float) and ratio != 1 and stage != 3:
        yield f"{ZERO}offload_optimizer.ratio = {ratio} needs stage 3; remove it"
    if f[f"{ZERO}compute_grad_norm"] is False and stage in (0, 3):
        yield f"{ZERO}compute_grad_norm is false, which stage {stage} refuses; remove it"
    scattered = f"is refused beside reduce_scatter at stage {stage}; remove it, or write"
    if stage >= 2 and f[f"{ZERO}reduce_scatter"] in (MISSING, True):
        if f["gradient_predivide_factor"] not in (MISSING, 1, 1.0):
            yield f'gradient_predivide_factor {scattered} "reduce_scatter": false'
        if f["prescale_gradients"] is True:
            yield f'prescale_gradients {scattered} "reduce_scatter": false'
    if stage == 3 and f[f"{ZERO}round_robin_gradients"] is True:
        yield f"{ZERO}round_robin_gradients is for stages 1 and 2, and stage is 3; remove it"
    for key in ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"):
        if f[key] is True:
            yield f"{key} gives up the fp32 weights, which every checkpoint holds; remove it"


def _muon(f: Facts) -> Iterator[str]:
    """Settings that exclude Muon."""
    if f.run.muon and f["scheduler.type"] is not MISSING:
        yield (
            f"scheduler sets one learning rate, and {given(f.run, 'optimizer')} has two; take a"
            " file without the block, and use --schedule"
        )
    if f.run.muon and offloads(f.config, "optimizer"):
        yield (
            f"{ZERO}offload_optimizer is not supported with {given(f.run, 'optimizer')}; take a"
            " file without it, or use AdamW"
        )


def _mup(f: Facts) -> Iterator[str]:
    """Blocks that do not apply a rate and a decoupled weight decay per parameter group."""
    if f.run.mup_base_dim is None:
        return
    flag = given(f.run, "mup_base_dim")
    if f.optimizer in FLAG_OF_TYPE and not OPTIMIZERS[FLAG_OF_TYPE[f.optimizer]].normalizes:
        yield (
            f"optimizer.type is {f.optimizer}, and {flag} has rates for optimizers that normalize"
            " the gradient; use AdamW, or drop mup_base_dim"
        )
    if f.optimizer == "Adam" and f["optimizer.params.adam_w_mode"] is False:
        yield (
            f"optimizer.params.adam_w_mode is false, and {flag} scales a decoupled weight decay;"
            " remove it, or drop mup_base_dim"
        )
    if f["scheduler.type"] is not MISSING:
        yield (
            f"scheduler sets one learning rate, and {flag} sets several; remove the block, and use"
            " --schedule"
        )


WITHOUT_CHECKPOINTS = (f"{ZERO}zenflow", f"{ZERO}offload_optimizer.super_offload")
# Stage 3 options that DeepSpeed implements for GPUs only.
GPU_ONLY = (
    *(f"{ZERO}zero_quantized_weights", f"{ZERO}zero_quantized_gradients"),
    f"{ZERO}stage3_module_granularity_threshold",
)
# Blocks that import a package when the engine is built.
PACKAGES = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
# Each decides which other keys DeepSpeed reads, so require_accepted tries them last.
SELECTORS = ("optimizer.type", "optimizer.params.torch_adam", "scheduler.type", f"{ZERO}stage")
OUTPUTS = {  # path -> the switch of the block that writes there, and the name of a folder in it
    "tensorboard.output_path": ("tensorboard.enabled", "tensorboard.job_name"),
    "csv_monitor.output_path": ("csv_monitor.enabled", "csv_monitor.job_name"),
    "flops_profiler.output_file": ("flops_profiler.enabled", ""),
}
JOB = "DeepSpeedJobName"  # DeepSpeed's default


def _zero(f: Facts) -> Iterator[str]:
    for key in WITHOUT_CHECKPOINTS:
        if f[key] not in (MISSING, None, False):
            yield f"{key} has an optimizer that cannot be checkpointed; remove it"
    for key in GPU_ONLY:
        if f.device == "cpu" and f.stage == 3 and f[key] not in (MISSING, None, False, 0):
            yield f"{key} is {json.dumps(f[key])} and needs a GPU; remove it"
    bucket, ratio = f[f"{ZERO}allgather_bucket_size"], f[f"{ZERO}offload_optimizer.ratio"]
    if f.stage in (1, 2) and isinstance(bucket, int | float) and bucket % 2:
        yield f"{ZERO}allgather_bucket_size is {bucket}, an odd number; write an even one"
    is_own_adam = f.optimizer in ADAM_TYPES and f["optimizer.params.torch_adam"] is not True
    is_cpu_adam = is_own_adam and offloads(f.config, "optimizer")
    if f.stage == 3 and isinstance(ratio, int | float) and ratio != 1 and not is_cpu_adam:
        yield (
            f"{ZERO}offload_optimizer.ratio = {ratio} needs DeepSpeed's own Adam on the CPU;"
            ' remove it, or write "torch_adam": false in an AdamW block'
        )


def _norm(f: Facts) -> Iterator[str]:
    """Settings that conflict with compute_grad_norm = false at stages 1 and 2."""
    key, clipping = f"{ZERO}compute_grad_norm", f["gradient_clipping"]
    if f[key] is not False or f.stage not in (1, 2):
        return
    if isinstance(clipping, int | float) and clipping > 0:
        yield f"{key} is false beside gradient_clipping = {clipping}; remove it, or set that to 0"
    elif offloads(f.config, "optimizer"):
        yield f"{key} is false beside {ZERO}offload_optimizer; remove one"


def _packages(f: Facts) -> Iterator[str]:
    for block, package in PACKAGES.items():
        if f[f"{block}.enabled"] is True and find_spec(package) is None:
            yield (
                f"{block}.enabled is true and the package {package} is not installed; remove the"
                f" block, or {install_packages(package)}"
            )


def _unsupported(f: Facts) -> Iterator[str]:
    """Values that the engine refuses late, or that say what it does not do."""
    is_own_adam = f.optimizer in ADAM_TYPES and f["optimizer.params.torch_adam"] is not True
    if is_own_adam and f["optimizer.params.amsgrad"] is True:
        yield (
            "optimizer.params.amsgrad is true, and only torch's Adam has it; write"
            ' "torch_adam": true, or remove it'
        )
    param, buffer = f["data_types.param_dtype"], f["data_types.buffer_dtype"]
    if isinstance(param, str) and DTYPES.get(param, f.run.dtype) != f.run.dtype:
        yield (
            f"data_types.param_dtype is {param}, and {given(f.run, 'dtype')}; remove it, or give"
            f" --dtype {DTYPES[param]}"
        )
    if isinstance(buffer, str) and DTYPES.get(buffer) != "float32":
        yield (
            f"data_types.buffer_dtype is {buffer}, and rotary frequencies stay in fp32; remove it"
        )
    key = "data_efficiency.data_routing.random_ltd.enabled"
    if f[key] is not MISSING and f[key]:  # DeepSpeed tests for truth, and only this key
        yield f"{key} is {json.dumps(f[key])}, but no layer drops tokens here; remove it"


def tensor_parallel_faults(f: Facts) -> list[str]:
    """Keys and flags beside which tensor parallelism is wrong, or not tested."""
    run = f.run
    if run.tensor_parallel == 1:
        return []
    flag = f"{given(run, 'tensor_parallel')}"
    torch_adam, accumulated = f["optimizer.params.torch_adam"], f["data_types.grad_accum_dtype"]
    keys = {
        f"{ZERO}stage is 3": (f.stage == 3, "use stage 0, 1 or 2"),
        f"{ZERO}offload_optimizer": (offloads(f.config, "optimizer"), "remove it"),
        f"{ZERO}round_robin_gradients": (f[f"{ZERO}round_robin_gradients"] is True, "remove it"),
        f"{ZERO}compute_grad_norm is false": (f[f"{ZERO}compute_grad_norm"] is False, "remove it"),
        "data_types.grad_accum_dtype": (accumulated not in (MISSING, None), "remove it"),
        "optimizer.params.torch_adam is false": (torch_adam is False, "remove it"),
        "flops_profiler": (f["flops_profiler.enabled"] is True, "switch it off"),
    }
    flags = {
        "dtype": (run.dtype == "float16", "use bfloat16 or float32"),
        "optimizer": (run.optimizer != "adamw", "use adamw"),
        "use_moe": (run.use_moe, "drop it"),
        "qkv_bias": (run.qkv_bias, "drop it"),
        "mup_base_dim": (run.mup_base_dim is not None, "drop it"),
        "model": (run.hugging_face is not None, "use the built-in decoder"),
        "compile": (run.compile == "on", "drop it"),
        "verify_interval": (run.verify_interval > 0, "drop it"),
        "sequence_parallel": (run.sequence_parallel > 1, "drop it"),
    }
    found = [(f"{f.path}: {key}", remedy) for key, (is_set, remedy) in keys.items() if is_set]
    if f.stage == 0 and run.dtype == "bfloat16":
        # DeepSpeed 0.19.8 then counts the gradients of the first rank only.
        at = f"{given(run, 'dtype')} at stage 0 ({f.path})"
        found.append((at, "use stage 1, which needs less memory"))
    found += [(given(run, name), remedy) for name, (is_set, remedy) in flags.items() if is_set]
    faults = [
        f"{what} is not supported with {flag}; {remedy}, or drop tensor_parallel"
        for what, remedy in found
    ]
    return faults or _indivisible(run, flag)


def _indivisible(run: RunConfig, flag: str) -> list[str]:
    """Numbers of heads and channels that cannot be divided over the ranks."""
    sizes = {f"{given(run, name)}": getattr(run, name) for name in ("n_heads", "n_kv_heads")}
    width = run.feed_forward_width
    source = run.sources["hidden_dim"]
    if run.hidden_dim is None:
        source = f"default for dim = {run.dim}"
    sizes[f"hidden_dim = {width} ({source})"] = width
    largest = gcd(*sizes.values())
    works = ", ".join(str(n) for n in range(2, largest + 1) if largest % n == 0)
    return [
        f"{shown} is not divisible by {flag}; "
        + (f"with this shape {works} would be possible" if works else "change the shape")
        for shown, size in sizes.items()
        if size % run.tensor_parallel
    ]


def output_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the output paths of DeepSpeed by their config key."""
    paths = {}
    for key, (switch, folder) in OUTPUTS.items():
        place, job = get(config, key), get(config, folder) if folder else ""
        job = JOB if job is MISSING else job
        is_file = not folder and isinstance(place, str) and place
        if get(config, switch) is True and (is_file or folder):
            base = place if isinstance(place, str) else ""
            paths[key] = os.path.join(base, job) if isinstance(job, str) else base
    return paths


def remedy_for(config: Mapping[str, Any], message: str) -> str:
    """Return what to change: the key of `config` that DeepSpeed's message mentions first."""
    names = {key: rf"\b{re.escape(key.rsplit('.', 1)[-1])}\b" for key in leaves(config)}
    places = {
        key: match.start() for key, name in names.items() if (match := re.search(name, message))
    }
    key = min(places, key=places.__getitem__, default="")
    return f"change or remove {key}" if key else "correct the file"


def tracker_refusal(error: Exception) -> str:
    """Return the fault and its remedy if a tracker of DeepSpeed raised `error`; else ""."""
    package = type(error).__module__.partition(".")[0]
    block = next((block for block, name in PACKAGES.items() if name == package), "")
    if not block:
        return ""
    return (
        f"{block}.enabled is true and {package} fails: {first_lines(error, None)}; correct that, or"
        f" remove the block and give --report_to {package}, which never stops the run"
    )


def without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a copy without the value at a dotted path."""
    copy = deepcopy(dict(config))
    *parents, last = key.split(".")
    block = copy
    for part in parents:
        block = block[part]
    del block[last]
    return copy
