"""Adopt values of the DeepSpeed and Accelerate files as values of the run.

A config value overrides a default, with the file as its source. A contradiction with an explicit
flag is a fault that names both values and both remedies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minimind.config.deepspeed.keys import AUTO
from minimind.config.launcher_env import Launch
from minimind.config.parse import convert
from minimind.config.run_config import RunConfig
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
