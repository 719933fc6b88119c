"""Values of the DeepSpeed and Accelerate files: adopted by the run, or filled from it if "auto".

A config value overrides a default, with the file as its source. A contradiction with an explicit
flag is a fault that names both values and both remedies. Values are normalized to what DeepSpeed
0.19.8 reads, and each has its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minimind.config.deepspeed.schema import (
    ANY_CASE,
    AUTO,
    FIELD_NAMES,
    LOWERED,
    MODELLED,
    OPTIMIZER_PARAMS,
    READ_BY_PYDANTIC,
    optimizer_name,
)
from minimind.config.launcher_env import Launch
from minimind.config.optimizers import ADAM_TYPES
from minimind.config.parse import convert
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule, planned_warmup
from minimind.errors import UsageError

MISSING = object()
DTYPE_BLOCKS = {"bf16": "bfloat16", "fp16": "float16"}
FLAG_OF_KEY = {
    "gradient_accumulation_steps": "accumulation_steps",
    "gradient_clipping": "grad_clip",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.cycle_max_lr": "learning_rate",
    "scheduler.params.lr_range_test_min_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.cos_min_ratio": "min_lr_ratio",
}
TENSOR_PARALLEL = "tensor_parallel.autotp_size"
MICRO_BATCH, BATCH = "train_micro_batch_size_per_gpu", "train_batch_size"
BETAS, TOTAL_STEPS = "optimizer.params.betas", "scheduler.params.total_num_steps"


def apply_launch(run: RunConfig, launch: Launch, faults: list[str]) -> RunConfig:
    """Adopt precision, accumulation, clipping and config file of `accelerate launch`."""
    for name, (value, field) in launch.flags.items():
        if name == "device" and run.device == "auto":  # even an explicit --device auto
            run = run.with_values(f"{launch.source}: {field}", device=value)
            continue
        run = adopt(run, name, value, f"{launch.source}: {field}", "remove it there", faults)
    if launch.deepspeed_config and not run.is_explicit("deepspeed_config"):
        source = f"{launch.source}: deepspeed_config_file"
        run = run.with_values(source, deepspeed_config=launch.deepspeed_config)
    return run


def apply_yaml_fields(
    config: dict[str, Any], path: str, launch: Launch, faults: list[str]
) -> dict[str, str]:
    """Write the YAML's ZeRO fields into `config`; return their sources by key."""
    sources: dict[str, str] = {}
    for key, (value, field) in launch.deepspeed.items():
        config_value = get(config, key)
        if config_value in (MISSING, AUTO):
            put(config, key, value)
            sources[key] = f"{launch.source}: {field}"
        elif config_value != value:
            faults.append(
                f"{path}: {key} is {json.dumps(config_value)} but {launch.source} says {field} ="
                f" {value}; remove one of them"
            )
    return sources


def apply_file(
    config: Mapping[str, Any], path: str, run: RunConfig, world_size: int, faults: list[str]
) -> RunConfig:
    """Adopt every value of the DeepSpeed file that corresponds to a flag."""
    run = _apply_dtype(config, path, run, faults)
    auto = 'write "auto" in the file'
    total = get(config, TOTAL_STEPS)
    if isinstance(total, int) and run.is_explicit("epochs") and not run.is_explicit("max_steps"):
        faults.append(
            f"{path}: {TOTAL_STEPS} is {total} but {run.sources['epochs']} says epochs ="
            f" {run.epochs}; {auto}, or give the same --max_steps"
        )
        run = run.with_values(f"{path}: {TOTAL_STEPS}", max_steps=total)
    for key, name in FLAG_OF_KEY.items():
        config_value = get(config, key)
        where = f"{path}: {key}"
        # null defers to the parameter groups; a list has one value per group.
        if isinstance(config_value, list) and run.is_explicit(name):
            faults.append(
                f"{where} is {config_value} but {run.sources[name]} says {name} ="
                f" {getattr(run, name)}; drop {name}, or {auto}"
            )
        elif config_value not in (MISSING, AUTO, None) and not isinstance(config_value, list):
            run = adopt(run, name, config_value, where, auto, faults)
    run = _apply_tensor_parallel(config, path, run, faults)
    betas = get(config, BETAS)
    if isinstance(betas, list) and len(betas) == 2:
        for place, (name, config_value) in enumerate(zip(("beta1", "beta2"), betas, strict=True)):
            run = adopt(run, name, config_value, f"{path}: {BETAS}[{place}]", auto, faults)
    elif isinstance(betas, list):  # schema.py reports other types
        faults.append(f"{path}: {BETAS} is {json.dumps(betas)}, not two numbers; write [0.9, 0.95]")
    data_size = run.parallel(world_size).data_size
    rows, where = get(config, MICRO_BATCH), f"{path}: {MICRO_BATCH}"
    if isinstance(rows, int) and run.split_batches:
        rows *= data_size  # --batch_size then counts all processes
        where += f" x {data_size} processes (--split_batches)"
    if rows not in (MISSING, AUTO):
        run = adopt(run, "batch_size", rows, where, auto, faults)
    return _apply_batch(config, path, run, data_size)


def _apply_tensor_parallel(
    config: Mapping[str, Any], path: str, run: RunConfig, faults: list[str]
) -> RunConfig:
    """Adopt the number of tensor-parallel ranks, of which DeepSpeed reads 0 as 1."""
    size, where = get(config, TENSOR_PARALLEL), f"{path}: {TENSOR_PARALLEL}"
    if not isinstance(size, int):  # DeepSpeed's model reports other types
        return run
    return adopt(run, "tensor_parallel", size or 1, where, 'write "auto" in the file', faults)


def _apply_batch(config: Mapping[str, Any], path: str, run: RunConfig, data_size: int) -> RunConfig:
    """Derive accumulation_steps or batch_size, whichever is not explicit, from train_batch_size."""
    total = get(config, BATCH)
    if not isinstance(total, int) or isinstance(total, bool) or total < 1:
        return run
    where = f"{path}: {BATCH}"
    if not run.is_explicit("accumulation_steps"):
        rows = run.batch_size * (1 if run.split_batches else data_size)
        if total % rows == 0:
            return run.with_values(where, accumulation_steps=total // rows)
    if not run.is_explicit("batch_size"):
        rows = run.accumulation_steps * (1 if run.split_batches else data_size)
        if total % rows == 0:
            return run.with_values(where, batch_size=total // rows)
    return run


def adopt(
    run: RunConfig, name: str, config_value: Any, where: str, remedy: str, faults: list[str]
) -> RunConfig:
    """Adopt `config_value` as `name`; add a fault if it contradicts an explicit value."""
    current = getattr(run, name)
    try:
        value = convert(name, config_value, where)
    except UsageError as error:
        if not any(fault.startswith(f"{where} is ") for fault in faults):  # its type was reported
            faults.append(str(error))
        return run
    if value == current:
        return run if run.is_explicit(name) else run.with_values(where, **{name: value})
    if run.is_explicit(name):
        faults.append(
            f"{where} is {config_value} but {run.sources[name]} says {name} = {current};"
            f" drop {name}, or {remedy}"
        )
        return run
    return run.with_values(where, **{name: value})


def _apply_dtype(
    config: Mapping[str, Any], path: str, run: RunConfig, faults: list[str]
) -> RunConfig:
    """Adopt the precision of the bf16 and fp16 blocks."""
    enabled = {name: get(config, f"{block}.enabled") for block, name in DTYPE_BLOCKS.items()}
    for block, name in DTYPE_BLOCKS.items():
        if enabled[name] not in (MISSING, AUTO) and not isinstance(enabled[name], bool):
            shown = json.dumps(enabled[name])
            faults.append(f'{path}: {block}.enabled is {shown}; write true, false or "auto"')
            return run
    on = [name for name, value in enabled.items() if value is True]
    if len(on) > 1:
        faults.append(f"{path}: bf16.enabled and fp16.enabled are both true; turn one off")
        return run
    if not on and enabled.get(run.dtype) is not False:
        return run
    dtype = on[0] if on else "float32"
    block = next(b for b, name in DTYPE_BLOCKS.items() if name == (on[0] if on else run.dtype))
    where, shown = f"{path}: {block}.enabled", json.dumps(enabled[DTYPE_BLOCKS[block]])
    if dtype == run.dtype:
        return run if run.is_explicit("dtype") else run.with_values(where, dtype=dtype)
    if run.is_explicit("dtype"):
        faults.append(
            f"{where} is {shown} but {run.sources['dtype']} says dtype = {run.dtype}; drop"
            ' dtype, or write "auto" in the file'
        )
        return run
    return run.with_values(where, dtype=dtype)


def get(config: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted path, or `MISSING`."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted path, creating missing objects."""
    *parents, last = key.split(".")
    for part in parents:
        below = config.setdefault(part, {})
        if not isinstance(below, dict):  # reported elsewhere
            return
        config = below
    config[last] = value


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values but non-empty objects, by dotted path."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            values |= leaves(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


Filled = dict[str, tuple[Any, str]]  # key path: value, source

# Always written, because DeepSpeed has its own defaults (clipping: 1.0). The last one is a timer
# that would synchronize with the GPU twice per micro-batch.
ALWAYS = (
    BATCH,
    MICRO_BATCH,
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.stage",
    "timers.throughput.synchronized",
)
# Written if the file has an optimizer or a scheduler, or offloads the optimizer.
OPTIMIZER = tuple(f"optimizer.params.{name}" for name in ("lr", "betas", "weight_decay"))
ADAM = ("optimizer.params.torch_adam",)
FUSED = ("optimizer.params.fused",)
# Parameters that only DeepSpeed's Adam has, with the values by which torch's AdamW is equal.
DEEPSPEED_ADAM = {
    "bias_correction": (True,),
    "set_grad_none": (True, False),
    "fp32_optimizer_states": (True,),
}
# DeepSpeed's own models read "auto" as the default of a field.
DEFAULTS = {
    **dict.fromkeys(
        (
            "zero_optimization.sub_group_size",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance",
        ),
        10**9,
    ),
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.device": "none",
    "fp16.loss_scale": 0,
    "fp16.loss_scale_window": 1000,
    "fp16.initial_scale_power": 16,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
}
WARMUP = ("scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps")
DECAY = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")
COSINE, CYCLE = ("scheduler.params.cos_min_ratio",), ("scheduler.params.cycle_momentum",)
UNTESTED = ("zero_allow_untested_optimizer",)
OFFLOAD = ("zero_force_ds_cpu_optimizer",)


def required_keys(config: Mapping[str, Any], run: RunConfig) -> tuple[str, ...]:
    """Keys that are filled even if the file does not contain them."""
    keys = ALWAYS + ((TENSOR_PARALLEL,) if run.tensor_parallel > 1 else ())
    optimizer = optimizer_name(get(config, "optimizer.type"))
    accepted = OPTIMIZER_PARAMS.get(optimizer or "", "").split()
    keys += tuple(key for key in OPTIMIZER if key.rsplit(".", 1)[1] in accepted)
    keys += ADAM + FUSED if optimizer in ADAM_TYPES else ()
    keys += UNTESTED if optimizer and optimizer not in ANY_CASE else ()
    scheduler = get(config, "scheduler.type")
    keys += WARMUP if scheduler in ("WarmupLR", "WarmupDecayLR") else ()
    keys += DECAY if scheduler in ("WarmupDecayLR", "WarmupCosineLR") else ()
    keys += COSINE if scheduler == "WarmupCosineLR" else CYCLE if scheduler == "OneCycle" else ()
    return keys + (OFFLOAD if offloads(config, "optimizer") else ())


def offloads(config: Mapping[str, Any], what: str) -> bool:
    """Whether ZeRO offloads `what`: `optimizer` or `param`."""
    device = get(config, f"zero_optimization.offload_{what}.device")
    return device in ("cpu", "nvme")


def auto_values(
    config: Mapping[str, Any],
    run: RunConfig,
    world_size: int,
    device: str,
    schedule: Schedule | None,
) -> Filled:
    """Return value and source of every key that this package can fill."""
    values: Filled = {key: (value, "DeepSpeed's default") for key, value in DEFAULTS.items()}
    values |= _numbers(run, world_size) | _buckets(run, world_size, device)
    return values | _optimizer(config, run) | _sgd(run) | _rates(run, schedule)


def _by(run: RunConfig, name: str) -> str:
    return f"{name} ({run.sources[name]})"


def _numbers(run: RunConfig, world_size: int) -> Filled:
    """Batch sizes, clipping, precision and timers."""
    rows, data_size = run.micro_batch_rows(world_size), run.parallel(world_size).data_size
    shared = f"derived: {run.batch_size} rows / {data_size} processes (--split_batches)"
    steps = run.accumulation_steps
    return {
        MICRO_BATCH: (rows, shared if run.split_batches else _by(run, "batch_size")),
        "gradient_accumulation_steps": (steps, _by(run, "accumulation_steps")),
        BATCH: (
            run.rows_per_step(world_size),
            f"derived: {rows} rows x {steps} micro-batches x {data_size} processes",
        ),
        "gradient_clipping": (run.grad_clip, _by(run, "grad_clip")),
        "bf16.enabled": (run.dtype == "bfloat16", _by(run, "dtype")),
        "fp16.enabled": (run.dtype == "float16", _by(run, "dtype")),
        "timers.throughput.synchronized": (False, "derived: it would wait for the device"),
        TENSOR_PARALLEL: (run.tensor_parallel, _by(run, "tensor_parallel")),
    }


def _buckets(run: RunConfig, world_size: int, device: str) -> Filled:
    """ZeRO bucket sizes and communication overlap."""
    overlap = device == "cuda" and world_size > 1
    # the usual dim x dim means 64 all-reduces per step for the tiny preset
    block = (12 * run.dim**2, "derived: 12 x dim x dim, about a block")
    zero = {
        "stage": (0, "DeepSpeed's default: no stage is named"),
        "overlap_comm": (overlap, f"derived: {'' if overlap else 'not '}several GPUs"),
        "reduce_bucket_size": block,
        "allgather_bucket_size": block,
        "stage3_prefetch_bucket_size": (run.dim**2 * 9 // 10, "derived: 0.9 x dim x dim"),
        "stage3_param_persistence_threshold": (run.dim * 10, "derived: 10 x dim"),
        "stage3_gather_16bit_weights_on_model_save": (False, "derived: DeepSpeed saves nothing"),
    }
    return {f"zero_optimization.{name}": value for name, value in zero.items()}


def _optimizer(config: Mapping[str, Any], run: RunConfig) -> Filled:
    """Optimizer parameters and implementation.

    torch's AdamW unless a parameter needs DeepSpeed's, which is compiled (on GPUs by nvcc).
    """
    params = get(config, "optimizer.params")
    named = [name for name in DEEPSPEED_ADAM if isinstance(params, Mapping) and name in params]
    config_value = get(config, "optimizer.params.torch_adam")
    is_torch_adam = get(config, "optimizer") is MISSING or config_value is True
    is_torch_adam = is_torch_adam or (config_value in (MISSING, AUTO) and not named)
    otherwise = any(
        get(config, f"optimizer.params.{name}") is True for name in ("foreach", "differentiable")
    )
    one_kernel = {"optimizer.params.fused": (True, "derived: an AdamW of torch's, in one kernel")}
    return (one_kernel if is_torch_adam and not otherwise else {}) | {
        "optimizer.params.lr": (run.learning_rate, _by(run, "learning_rate")),
        "optimizer.params.betas": (
            [run.beta1, run.beta2],
            f"{_by(run, 'beta1')}, {_by(run, 'beta2')}",
        ),
        "optimizer.params.eps": (1e-8, "AdamW's default"),
        "optimizer.params.weight_decay": (run.weight_decay, _by(run, "weight_decay")),
        "optimizer.params.torch_adam": (
            not named,
            f"derived: {f'of {named[0]}' if named else 'nothing has to be compiled'}",
        ),
        "zero_allow_untested_optimizer": (True, "derived: an optimizer of torch's"),
        "zero_force_ds_cpu_optimizer": (
            not is_torch_adam,
            f"derived: the optimizer is {'torch' if is_torch_adam else 'DeepSpeed'}'s",
        ),
    }


def _sgd(run: RunConfig) -> Filled:
    """Momentum of SGD."""
    momentum = run.optimizer_values.get("sgd_momentum")
    if momentum is None:
        return {}
    return {"optimizer.params.momentum": (momentum, _by(run, "sgd_momentum"))}


def _rates(run: RunConfig, schedule: Schedule | None) -> Filled:
    """Scheduler parameters."""
    total = schedule.total_steps if schedule else run.max_steps
    warmup = planned_warmup(run, total) if total else run.warmup_steps or 0
    length = "derived: the steps of the run"
    if total is None:
        total, length = max(warmup, 2) + 1, "not known before the text is read"
    peak = (run.learning_rate, _by(run, "learning_rate"))
    floor = (run.min_lr_ratio, _by(run, "min_lr_ratio"))
    least = "the shortest warm-up of DeepSpeed's schedulers"
    steps = (warmup, _by(run, "warmup_steps")) if warmup > 1 else (2, least)
    params = {
        "warmup_min_lr": (0.0, "DeepSpeed's default"),
        "warmup_max_lr": peak,
        "warmup_num_steps": steps,
        "total_num_steps": (total, length),
        "warmup_min_ratio": (0.0, "DeepSpeed's default"),
        "cos_min_ratio": floor,
        "cycle_max_lr": peak,
        "cycle_momentum": (False, "derived: the betas are beta1 and beta2"),
        "lr_range_test_min_lr": peak,
    }
    return {f"scheduler.params.{name}": value for name, value in params.items()}


OTHER_KINDS = {"stage": "whole", "enabled": "bool"}  # of the kind `any` in MODELLED
# What pydantic takes for a boolean, in any case.
_TRUE = ("true", "t", "yes", "y", "on", "1")
_FALSE = ("false", "f", "no", "n", "off", "0")


def normalize_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` with every value as DeepSpeed reads it.

    Values that DeepSpeed does not convert stay for the schema to check, including strings for
    booleans that it only tests for truth, where "false" would be true.
    """
    normalized = _block("", config)
    written = normalized.get("optimizer")
    if isinstance(written, dict) and (name := optimizer_name(written.get("type"))):
        written["type"] = name
    return normalized


def _block(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    kinds = MODELLED.get(where, READ_BY_PYDANTIC.get(where, {}))
    normalized: dict[str, Any] = {}
    for written, value in block.items():
        name = f"{where}.{written}" if where else str(written)
        alias = FIELD_NAMES.get(name, written)
        key = written if alias in block else alias  # the schema reports both together
        if isinstance(value, Mapping):
            normalized[key] = _block(name, value)
        elif value == AUTO:
            normalized[key] = value
        elif name in LOWERED and isinstance(value, str):
            normalized[key] = value.lower()
        else:
            kind = kinds.get(key, "")
            normalized[key] = _as_pydantic_reads(value, OTHER_KINDS[key] if kind == "any" else kind)
    return normalized


def _as_pydantic_reads(value: Any, kind: str) -> Any:
    """Convert `value` as a pydantic field of `kind` does; unchanged if pydantic rejects it."""
    kind = kind.removesuffix("|null")
    if kind == "bool" and isinstance(value, str | int | float):
        word = str(int(value)) if value in (0, 1) else str(value).lower()
        return True if word in _TRUE else False if word in _FALSE else value
    if kind not in ("whole", "number") or not isinstance(value, str | float):
        return value
    try:
        number = float(value)
        is_whole = kind == "whole" or (isinstance(value, str) and value.strip("+-_ ").isdecimal())
        return int(value if isinstance(value, str) else number) if is_whole else number
    except (ValueError, OverflowError):
        return value
