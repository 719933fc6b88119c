"""Values for each "auto" of a DeepSpeed JSON, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minimind.config.deepspeed.config_values import (
    AUTO,
    BATCH,
    MICRO_BATCH,
    MISSING,
    TENSOR_PARALLEL,
    get,
)
from minimind.config.deepspeed.schema import ANY_CASE, OPTIMIZERS, optimizer_name
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule, planned_warmup

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
    accepted = OPTIMIZERS.get(optimizer or "", "").split()
    keys += tuple(key for key in OPTIMIZER if key.rsplit(".", 1)[1] in accepted)
    keys += ADAM + FUSED if optimizer in ("Adam", "AdamW") else ()
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
    momentum = run.sgd.get("sgd_momentum")
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
