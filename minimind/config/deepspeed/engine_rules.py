"""Settings that DeepSpeed's parser accepts and its engine refuses.

The engine raises when it is built or in the first step. These rules report the same faults before
the data is read, also for --dry_run, without importing deepspeed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from importlib.util import find_spec
from math import gcd
from typing import Any

from minimind.config.deepspeed.auto_values import offloads
from minimind.config.deepspeed.config_values import MISSING, get, leaves
from minimind.config.deepspeed.keys import DTYPES
from minimind.config.deepspeed.schema import optimizer_name
from minimind.config.run_config import RunConfig

ZERO = "zero_optimization."
WITHOUT_CHECKPOINTS = ("zenflow", "offload_optimizer.super_offload")
# Stage 3 options that DeepSpeed implements for GPUs only.
GPU_ONLY = (
    *("zero_quantized_weights", "zero_quantized_gradients"),
    "stage3_module_granularity_threshold",
)
# Blocks that import a package when the engine is built.
PACKAGES = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
# These select which other keys are read; require_accepted tries them last.
SELECTORS = ("optimizer.type", "optimizer.params.torch_adam", "scheduler.type", f"{ZERO}stage")
OUTPUTS = {  # path -> the switch of the block that writes there, and the name of a folder in it
    "tensorboard.output_path": ("tensorboard.enabled", "tensorboard.job_name"),
    "csv_monitor.output_path": ("csv_monitor.enabled", "csv_monitor.job_name"),
    "flops_profiler.output_file": ("flops_profiler.enabled", ""),
}
JOB = "DeepSpeedJobName"  # DeepSpeed's default


def engine_faults(config: Mapping[str, Any], path: str, run: RunConfig, device: str) -> list[str]:
    """Return one sentence for each setting in a filled `config` that the engine refuses."""
    faults = (
        _zero_faults(config, device)
        + _norm_faults(config)
        + _packages_faults(config)
        + _adam_faults(config)
    )
    config_value = get(config, "data_types.param_dtype")
    if isinstance(config_value, str) and DTYPES.get(config_value, run.dtype) != run.dtype:
        faults.append(
            f"data_types.param_dtype is {config_value}, and dtype = {run.dtype}"
            f" ({run.sources['dtype']}); remove it, or give --dtype {DTYPES[config_value]}"
        )
    config_value = get(config, "data_types.buffer_dtype")
    if isinstance(config_value, str) and DTYPES.get(config_value) != "float32":
        faults.append(
            f"data_types.buffer_dtype is {config_value}, and rotary frequencies stay in fp32;"
            " remove it"
        )
    random_ltd = "data_efficiency.data_routing.random_ltd.enabled"
    config_value = get(config, random_ltd)
    if config_value is not MISSING and config_value:  # DeepSpeed tests for truth, and only this key
        faults.append(
            f"{random_ltd} is {json.dumps(config_value)}, but no layer drops tokens here; remove it"
        )
    of_tensors = tensor_parallel_faults(config, path, run)  # which name where a value comes from
    return [f"{path}: {fault}" for fault in faults] + of_tensors


def tensor_parallel_faults(config: Mapping[str, Any], path: str, run: RunConfig) -> list[str]:
    """Keys and flags beside which tensor parallelism is wrong, or not tested."""
    if run.tensor_parallel == 1:
        return []
    flag = f"tensor_parallel = {run.tensor_parallel} ({run.sources['tensor_parallel']})"
    stage, of_adam = get(config, f"{ZERO}stage"), get(config, "optimizer.params.torch_adam")
    keys = {
        f"{ZERO}stage is 3": (stage == 3, "use stage 0, 1 or 2"),
        f"{ZERO}offload_optimizer": (offloads(config, "optimizer"), "remove it"),
        f"{ZERO}round_robin_gradients": (
            get(config, f"{ZERO}round_robin_gradients") is True,
            "remove it",
        ),
        f"{ZERO}compute_grad_norm is false": (
            get(config, f"{ZERO}compute_grad_norm") is False,
            "remove it",
        ),
        "data_types.grad_accum_dtype": (
            get(config, "data_types.grad_accum_dtype") not in (MISSING, None),
            "remove it",
        ),
        "optimizer.params.torch_adam is false": (of_adam is False, "remove it"),
        "flops_profiler": (get(config, "flops_profiler.enabled") is True, "switch it off"),
    }
    flags = {
        "dtype": (run.dtype == "float16", "use bfloat16 or float32"),
        "optimizer": (run.optimizer != "adamw", "use adamw"),
        "use_moe": (run.use_moe, "drop it"),
        "mup_base_dim": (run.mup_base_dim is not None, "drop it"),
        "model": (run.hugging_face is not None, "use the built-in decoder"),
        "compile": (run.compile == "on", "drop it"),
        "verify_interval": (run.verify_interval > 0, "drop it"),
        "sequence_parallel": (run.sequence_parallel > 1, "drop it"),
    }
    found = [(f"{path}: {key}", remedy) for key, (is_set, remedy) in keys.items() if is_set]
    if stage == 0 and run.dtype == "bfloat16":
        # DeepSpeed 0.19.8 then counts the gradients of the first rank only.
        at = f"{_given(run, 'dtype')} at stage 0 ({path})"
        found.append((at, "use stage 1, which needs less memory"))
    found += [(_given(run, name), remedy) for name, (is_set, remedy) in flags.items() if is_set]
    faults = [
        f"{what} is not supported with {flag}; {remedy}, or drop tensor_parallel"
        for what, remedy in found
    ]
    return faults or _indivisible(run, flag)


def _given(run: RunConfig, name: str) -> str:
    """A flag with its value and source."""
    return f"{name} = {getattr(run, name)} ({run.sources[name]})"


def _indivisible(run: RunConfig, flag: str) -> list[str]:
    """Numbers of heads and channels that cannot be divided over the ranks."""
    sizes = {_given(run, name): getattr(run, name) for name in ("n_heads", "n_kv_heads")}
    width = run.feed_forward_width
    source = run.sources["hidden_dim"]
    if run.hidden_dim is None:
        source = f"default for dim = {run.dim}"
    sizes[f"hidden_dim = {width} ({source})"] = width
    largest = gcd(*sizes.values())
    works = ", ".join(str(n) for n in range(2, largest + 1) if largest % n == 0)
    return [
        f"{given} is not divisible by {flag}; "
        + (f"with this shape {works} would be possible" if works else "change the shape")
        for given, size in sizes.items()
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


def _zero_faults(config: Mapping[str, Any], device: str) -> list[str]:
    faults = []
    stage = get(config, f"{ZERO}stage")
    for name in WITHOUT_CHECKPOINTS:
        if get(config, ZERO + name) not in (MISSING, None, False):
            faults.append(f"{ZERO}{name} has an optimizer that cannot be checkpointed; remove it")
    for name in GPU_ONLY:
        value = get(config, ZERO + name)
        if device == "cpu" and stage == 3 and value not in (MISSING, None, False, 0):
            faults.append(f"{ZERO}{name} is {json.dumps(value)} and needs a GPU; remove it")
    bucket = get(config, f"{ZERO}allgather_bucket_size")
    if stage in (1, 2) and isinstance(bucket, int | float) and bucket % 2:
        faults.append(f"{ZERO}allgather_bucket_size is {bucket}, an odd number; write an even one")
    ratio = get(config, f"{ZERO}offload_optimizer.ratio")
    is_part = isinstance(ratio, int | float) and ratio != 1
    if stage == 3 and is_part and not _is_cpu_adam(config):
        faults.append(
            f"{ZERO}offload_optimizer.ratio = {ratio} needs DeepSpeed's own Adam on the CPU;"
            ' remove it, or write "torch_adam": false in an AdamW block'
        )
    return faults


def _adam_faults(config: Mapping[str, Any]) -> list[str]:
    """Parameters that DeepSpeed's Adam classes reject after compilation."""
    name = optimizer_name(get(config, "optimizer.type"))
    is_torch_adam = get(config, "optimizer.params.torch_adam") is True
    key = "optimizer.params.amsgrad"
    if name not in ("Adam", "AdamW") or is_torch_adam or get(config, key) is not True:
        return []
    return [f'{key} is true, and only torch\'s Adam has it; write "torch_adam": true, or remove it']


def _is_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed builds its DeepSpeedCPUAdam."""
    name = optimizer_name(get(config, "optimizer.type"))
    is_torch_adam = get(config, "optimizer.params.torch_adam") is True
    return name in ("Adam", "AdamW") and not is_torch_adam and offloads(config, "optimizer")


def _norm_faults(config: Mapping[str, Any]) -> list[str]:
    """Settings that conflict with compute_grad_norm = false at stages 1 and 2."""
    key = f"{ZERO}compute_grad_norm"
    if get(config, key) is not False or get(config, f"{ZERO}stage") not in (1, 2):
        return []
    clipping = get(config, "gradient_clipping")
    if isinstance(clipping, int | float) and clipping > 0:
        return [
            f"{key} is false beside gradient_clipping = {clipping}; remove it, or set that to 0"
        ]
    if offloads(config, "optimizer"):
        return [f"{key} is false beside {ZERO}offload_optimizer; remove one"]
    return []


def _packages_faults(config: Mapping[str, Any]) -> list[str]:
    return [
        f"{block}.enabled is true and the package {package} is not installed; remove the block, or"
        f" pip install {package}"
        for block, package in PACKAGES.items()
        if get(config, f"{block}.enabled") is True and find_spec(package) is None
    ]


def error_text(error: Exception) -> str:
    """Return the text of an error on one line, or its type if it has none."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


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
        f"{block}.enabled is true and {package} fails: {error_text(error)}; correct that, or remove"
        f" the block and give --report_to {package}, which never stops the run"
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
