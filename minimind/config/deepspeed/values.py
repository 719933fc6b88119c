"""Values of the DeepSpeed and Accelerate files: adopted by the run, or filled from it if "auto".

A config value overrides a default, with the file as its source. A contradiction with an explicit
flag is a fault that names both values and both remedies. Values are normalized to what DeepSpeed
0.19.8 reads, and each has its source.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minimind.config.checks import given
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
from minimind.config.optimizers import ADAM_TYPES, OPTIMIZERS
from minimind.config.parse import convert
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule, planned_warmup
from minimind.errors import UsageError

MISSING = object()
DTYPE_BLOCKS = {"bf16": "bfloat16", "fp16": "float16"}
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
    for key in (key for key in KEYS if key.flag and key.is_adopted):
        name, config_value, where = key.flag, get(config, key.path), f"{path}: {key.path}"
        # null defers to the parameter groups; a list has one value per group.
        if isinstance(config_value, list) and run.is_explicit(name):
            faults.append(
                f"{where} is {config_value} but {run.sources[name]} says {name} ="
                f" {getattr(run, name)}; {given(run, name).drop}, or {auto}"
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
            values = {"accumulation_steps": total // rows}
            if not run.is_explicit("batch_size"):
                values["batch_size"] = run.batch_size  # no rule decides it
            return run.with_values(where, **values)
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
            f" {given(run, name).drop}, or {remedy}"
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
            f"{where} is {shown} but {run.sources['dtype']} says dtype = {run.dtype};"
            f' {given(run, "dtype").drop}, or write "auto" in the file'
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


# Parameters that only DeepSpeed's Adam has, with the values by which torch's AdamW is equal.
DEEPSPEED_ADAM = {
    "bias_correction": (True,),
    "set_grad_none": (True, False),
    "fp32_optimizer_states": (True,),
}


def offloads(config: Mapping[str, Any], what: str) -> bool:
    """Whether ZeRO offloads `what`: `optimizer` or `param`."""
    device = get(config, f"zero_optimization.offload_{what}.device")
    return device in ("cpu", "nvme")


Value = tuple[Any, str]  # and its source
UNCOUNTED = "derived: by the steps of the run, which the start counts"


@dataclass(frozen=True)
class Facts:
    """What the values of keys are derived from, and rules look at."""

    config: Mapping[str, Any]
    run: RunConfig
    world_size: int
    device: str
    schedule: Schedule | None = None
    path: str = ""  # of the file
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of its keys

    def __getitem__(self, key: str) -> Any:
        """The value of the file at a dotted path, or `MISSING`."""
        return get(self.config, key)

    @property
    def stage(self) -> Any:
        """ZeRO stage as it is written."""
        return self[f"{ZERO}stage"]

    def by(self, name: str) -> str:
        """A flag with its source."""
        return f"{name} ({self.run.sources[name]})"

    @property
    def optimizer(self) -> str:
        """DeepSpeed's type of the optimizer block; empty without one."""
        return optimizer_name(self["optimizer.type"]) or ""

    def takes(self, param: str) -> bool:
        """Whether the optimizer of the file has the parameter."""
        return param in OPTIMIZER_PARAMS.get(self.optimizer, "").split()

    def schedules(self, *types: str) -> bool:
        """Whether the scheduler of the file is of one of these types."""
        return self["scheduler.type"] in types

    @property
    def own_adam(self) -> list[str]:
        """Parameters in the file that only DeepSpeed's Adam has."""
        params = self["optimizer.params"]
        return [name for name in DEEPSPEED_ADAM if isinstance(params, Mapping) and name in params]

    @property
    def is_torch_adam(self) -> bool:
        """Whether AdamW is torch's; DeepSpeed's is compiled (on GPUs by nvcc)."""
        written = self["optimizer.params.torch_adam"]
        is_chosen = written in (MISSING, AUTO) and not self.own_adam
        return self["optimizer"] is MISSING or written is True or is_chosen

    @property
    def steps(self) -> int | None:
        """Steps of the run, at most; None before the text is read."""
        return self.schedule.total_steps if self.schedule else self.run.max_steps

    @property
    def has_steps(self) -> bool:
        """Whether `steps` are those of the run, which the epochs may end earlier."""
        is_counted = self.run.max_steps is not None and self.run.epochs is None
        return self.schedule is not None or is_counted

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        total = self.steps
        return planned_warmup(self.run, total) if total else self.run.warmup_steps or 0


@dataclass(frozen=True)
class Key:
    """A key of the DeepSpeed file that has a flag, or a value in place of "auto"."""

    path: str
    flag: str = ""  # that decides it, with the same value unless `value` is given
    needed: Callable[[Facts], bool] = lambda f: False  # filled even where the file lacks it
    value: Callable[[Facts], Value | None] | None = None  # if not the flag's; None: unknown
    is_adopted: bool = True  # by the flag, as it is written; else by a function of its own


def _always(f: Facts) -> bool:
    return True


def _fixed(value: Any, source: str = "DeepSpeed's default") -> Callable[[Facts], Value]:
    return lambda f: (value, source)


def _micro_batch(f: Facts) -> Value:
    data_size = f.run.parallel(f.world_size).data_size
    shared = f"derived: {f.run.batch_size} rows / {data_size} processes (--split_batches)"
    is_shared = f.run.split_batches and "batch_size" not in f.run.open_flags
    source = shared if is_shared else f.by("batch_size")
    return f.run.micro_batch_rows(f.world_size), source


def _batch(f: Facts) -> Value:
    if "batch_size" in f.run.open_flags:
        return f.run.rows_per_step(f.world_size), f.by("batch_size")
    rows, data_size = f.run.micro_batch_rows(f.world_size), f.run.parallel(f.world_size).data_size
    factors = f"{rows} rows x {f.run.accumulation_steps} micro-batches x {data_size} processes"
    return f.run.rows_per_step(f.world_size), f"derived: {factors}"


def _overlap(f: Facts) -> Value:
    is_useful = f.device != "cpu" and f.world_size > 1
    return is_useful, f"derived: {'' if is_useful else 'not '}several GPUs"


def _bucket(f: Facts) -> Value:
    # the usual dim x dim means 64 all-reduces per step for the tiny preset
    return 12 * f.run.dim**2, "derived: 12 x dim x dim, about a block"


def _fused(f: Facts) -> Value | None:
    others = (f"{PARAMS}{name}" for name in ("foreach", "differentiable"))
    if not f.is_torch_adam or any(get(f.config, name) is True for name in others):
        return None
    return True, "derived: an AdamW of torch's, in one kernel"


def _torch_adam(f: Facts) -> Value:
    reason = f"of {f.own_adam[0]}" if f.own_adam else "nothing has to be compiled"
    return not f.own_adam, f"derived: {reason}"


def _cpu_optimizer(f: Facts) -> Value:
    by = "torch" if f.is_torch_adam else "DeepSpeed"
    return not f.is_torch_adam, f"derived: the optimizer is {by}'s"


def _of_optimizer(name: str) -> Callable[[Facts], Value | None]:
    """The value of a flag if the run's optimizer reads it, its default included."""

    def value(f: Facts) -> Value | None:
        values = f.run.optimizer_values
        return (values[name], f.by(name)) if name in values else None

    return value


def _accumulation(f: Facts) -> Value:
    by = "batch_size" if f.run.has_open_accumulation else "accumulation_steps"
    return f.run.accumulation_steps, f.by(by)


def _warmup_steps(f: Facts) -> Value:
    is_open = "warmup_steps" in f.run.open_flags
    if f.run.warmup_steps is None and not is_open and not f.has_steps:
        return max(f.warmup, 2), UNCOUNTED
    if f.warmup > 1 or is_open:
        return max(f.warmup, 2), f.by("warmup_steps")
    return 2, "the shortest warm-up of DeepSpeed's schedulers"


def _total_steps(f: Facts) -> Value:
    if not f.has_steps:
        return f.steps or max(f.warmup, 2) + 1, UNCOUNTED
    return f.steps, "derived: the steps of the run"


ZERO, PARAMS, RATE = "zero_optimization.", "optimizer.params.", "scheduler.params."
_DECAYING = ("WarmupDecayLR", "WarmupCosineLR")
# DeepSpeed's own models read "auto" as the default of a field.
DEFAULTS = {
    f"{ZERO}sub_group_size": 10**9,
    f"{ZERO}stage3_max_live_parameters": 10**9,
    f"{ZERO}stage3_max_reuse_distance": 10**9,
    f"{ZERO}contiguous_gradients": True,
    f"{ZERO}reduce_scatter": True,
    f"{ZERO}allgather_partitions": True,
    f"{ZERO}offload_optimizer.device": "none",
    f"{ZERO}offload_param.device": "none",
    "fp16.loss_scale": 0,
    "fp16.loss_scale_window": 1000,
    "fp16.initial_scale_power": 16,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
}
# In the order in which they are adopted and filled. Some are always filled, because DeepSpeed has
# defaults of its own (clipping: 1.0).
KEYS = (
    Key(MICRO_BATCH, "batch_size", _always, _micro_batch, is_adopted=False),
    Key("gradient_accumulation_steps", "accumulation_steps", _always, _accumulation),
    Key(BATCH, "", _always, _batch),
    Key("gradient_clipping", "grad_clip", _always),
    Key("bf16.enabled", "", _always, lambda f: (f.run.dtype == "bfloat16", f.by("dtype"))),
    Key("fp16.enabled", "", _always, lambda f: (f.run.dtype == "float16", f.by("dtype"))),
    # a timer that would synchronize with the GPU twice per micro-batch
    Key(
        "timers.throughput.synchronized",
        "",
        _always,
        _fixed(False, "derived: it would wait for the device"),
    ),
    Key(TENSOR_PARALLEL, "tensor_parallel", lambda f: f.run.tensor_parallel > 1, is_adopted=False),
    *(Key(path, value=_fixed(value)) for path, value in DEFAULTS.items()),
    Key(f"{ZERO}stage", "", _always, _fixed(0, "DeepSpeed's default: no stage is named")),
    Key(f"{ZERO}overlap_comm", value=_overlap),
    Key(f"{ZERO}reduce_bucket_size", value=_bucket),
    Key(f"{ZERO}allgather_bucket_size", value=_bucket),
    Key(
        f"{ZERO}stage3_prefetch_bucket_size",
        value=lambda f: (f.run.dim**2 * 9 // 10, "derived: 0.9 x dim x dim"),
    ),
    Key(
        f"{ZERO}stage3_param_persistence_threshold",
        value=lambda f: (f.run.dim * 10, "derived: 10 x dim"),
    ),
    Key(
        f"{ZERO}stage3_gather_16bit_weights_on_model_save",
        value=_fixed(False, "derived: DeepSpeed saves nothing"),
    ),
    Key(f"{PARAMS}fused", "", lambda f: f.optimizer in ADAM_TYPES, _fused),
    Key(f"{PARAMS}lr", "learning_rate", lambda f: f.takes("lr")),
    Key(
        BETAS,
        "",
        lambda f: f.takes("betas"),
        lambda f: ([f.run.beta1, f.run.beta2], f"{f.by('beta1')}, {f.by('beta2')}"),
    ),
    Key(f"{PARAMS}eps", value=_fixed(1e-8, "AdamW's default")),
    Key(f"{PARAMS}weight_decay", "weight_decay", lambda f: f.takes("weight_decay")),
    Key(f"{PARAMS}torch_adam", "", lambda f: f.optimizer in ADAM_TYPES, _torch_adam),
    Key(
        "zero_allow_untested_optimizer",
        "",
        lambda f: f.optimizer not in ("", *ANY_CASE),
        _fixed(True, "derived: an optimizer of torch's"),
    ),
    Key(
        "zero_force_ds_cpu_optimizer", "", lambda f: offloads(f.config, "optimizer"), _cpu_optimizer
    ),
    *(
        Key(f"{PARAMS}{param}", flag, value=_of_optimizer(flag), is_adopted=False)
        for row in OPTIMIZERS.values()
        if row.keeps_block
        for param, flag in row.params.items()
    ),
    Key(f"{RATE}warmup_min_lr", value=_fixed(0.0)),
    Key(
        f"{RATE}warmup_max_lr", "learning_rate", lambda f: f.schedules("WarmupLR", "WarmupDecayLR")
    ),
    Key(
        f"{RATE}warmup_num_steps",
        "warmup_steps",
        lambda f: f.schedules("WarmupLR", *_DECAYING),
        _warmup_steps,
    ),
    Key(TOTAL_STEPS, "max_steps", lambda f: f.schedules(*_DECAYING), _total_steps),
    Key(f"{RATE}warmup_min_ratio", value=_fixed(0.0)),
    Key(f"{RATE}cos_min_ratio", "min_lr_ratio", lambda f: f.schedules("WarmupCosineLR")),
    Key(f"{RATE}cycle_max_lr", "learning_rate"),
    Key(
        f"{RATE}cycle_momentum",
        "",
        lambda f: f.schedules("OneCycle"),
        _fixed(False, "derived: the betas are beta1 and beta2"),
    ),
    Key(f"{RATE}lr_range_test_min_lr", "learning_rate"),
)


def required_keys(facts: Facts) -> set[str]:
    """Keys that are filled even if the file does not contain them."""
    return {key.path for key in KEYS if key.needed(facts)}


def auto_values(facts: Facts) -> dict[str, Value]:
    """Return value and source, by key path, of every key that this package can fill."""
    flags = {
        key.path: (getattr(facts.run, key.flag), facts.by(key.flag)) for key in KEYS if key.flag
    }
    values = {key.path: key.value(facts) if key.value else flags[key.path] for key in KEYS}
    return {path: value for path, value in values.items() if value is not None}


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
