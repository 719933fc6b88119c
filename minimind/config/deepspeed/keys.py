"""The keys of a DeepSpeed JSON, one row each: as what it is read, its flag, what fills "auto".

DeepSpeed silently ignores unknown keys: with `zero_optimisation` it runs stage 0. A row has a kind
where this package reads the value, and where DeepSpeed only tests it for truth; DeepSpeed's own
models judge the other values when it is imported. Imports neither deepspeed nor torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from minimind.config.deepspeed.document import AUTO, MISSING, get, offloads
from minimind.config.flags import MIXED
from minimind.config.optimizers import ADAM_TYPES
from minimind.config.origin import Origin, Rank, derived
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule, planned_warmup

VERSION = "0.19.8"
ZERO, PARAMS, RATE = "zero_optimization.", "optimizer.params.", "scheduler.params."
TENSOR_PARALLEL = "tensor_parallel.autotp_size"
MICRO_BATCH, BATCH = "train_micro_batch_size_per_gpu", "train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
BETAS, TOTAL_STEPS = f"{PARAMS}betas", f"{RATE}total_num_steps"
DEEPSPEEDS_DEFAULT = Origin("DeepSpeed's default", Rank.DEFAULT)
UNCOUNTED = Origin("derived: by the steps of the run, which the start counts", Rank.OPEN)

# Parameters of the optimizers that have checkpoints, from torch's classes and DeepSpeed's.
_TORCH = "lr weight_decay foreach maximize differentiable"
_ADAM = f"{_TORCH} betas eps amsgrad capturable fused"
_ADAM += " bias_correction set_grad_none torch_adam adam_w_mode fp32_optimizer_states"
OPTIMIZER_PARAMS = {
    "Adam": f"{_ADAM} decoupled_weight_decay",
    "AdamW": _ADAM,
    "Lion": "lr betas weight_decay set_grad_none fp32_optimizer_states",
    "Muon": "lr muon_lr adam_lr momentum weight_decay ns_method betas eps per_head_muon torch_adam"
    " adam_w_mode fp32_optimizer_states foreach",
    "SGD": f"{_TORCH} momentum dampening nesterov fused",
}
IN_TORCH = ("SGD",)  # which DeepSpeed takes from torch, by the very name
_WARMUP = "warmup_num_steps warmup_type last_batch_iteration"
SCHEDULER_PARAMS = {
    "WarmupLR": f"{_WARMUP} warmup_min_lr warmup_max_lr",
    "WarmupDecayLR": f"{_WARMUP} warmup_min_lr warmup_max_lr total_num_steps",
    "WarmupCosineLR": f"{_WARMUP} warmup_min_ratio cos_min_ratio total_num_steps",
    "OneCycle": """cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size
        cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size
        cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate last_batch_iteration""",
    "LRRangeTest": """lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate
        lr_range_test_staircase last_batch_iteration""",
}
_DECAYING = ("WarmupDecayLR", "WarmupCosineLR")
DTYPES = {  # in each spelling that DeepSpeed's DtypeEnum reads, and as --dtype names it
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "bfloat", "torch.bfloat16"), "bfloat16"),
}
# Parameters that only DeepSpeed's Adam has, with the values by which torch's AdamW is equal.
DEEPSPEED_ADAM = {
    "bias_correction": (True,),
    "set_grad_none": (True, False),
    "fp32_optimizer_states": (True,),
}


def optimizer_name(written: Any) -> str | None:
    """Return the optimizer that DeepSpeed builds for a type, as in `OPTIMIZER_PARAMS`, or None."""
    if not isinstance(written, str) or written in OPTIMIZER_PARAMS:
        return written if isinstance(written, str) else None
    lowered = {name.lower(): name for name in OPTIMIZER_PARAMS if name not in IN_TORCH}
    return lowered.get(written.lower())


@dataclass(frozen=True)
class Facts:
    """What the values of keys are derived from, and rules look at."""

    config: Mapping[str, Any]
    run: RunConfig
    world_size: int
    device: str
    schedule: Schedule | None = None
    path: str = ""  # of the file
    sources: Mapping[str, Origin] = dataclasses.field(default_factory=dict)  # of its keys
    adam_fault: str = ""  # why torch's AdamW replaces DeepSpeed's, if it does

    def __getitem__(self, key: str) -> Any:
        """The value of the file at a dotted path, or `MISSING`."""
        return get(self.config, key)

    def number(self, key: str) -> float | None:
        """The number at a dotted path; None if there is none."""
        value = self[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else None

    @property
    def stage(self) -> int:
        """ZeRO stage of a filled file."""
        return self[f"{ZERO}stage"]

    def by(self, name: str) -> Origin:
        """A flag as the source of a key, with its own source."""
        source = self.run.sources[name]
        rank = Rank.OPEN if source.rank is Rank.OPEN else Rank.FLAG
        return Origin(f"{name} ({source})", rank)

    @property
    def optimizer(self) -> str:
        """DeepSpeed's type of the optimizer block; empty without one."""
        return optimizer_name(self["optimizer.type"]) or ""

    @property
    def own_adam(self) -> list[str]:
        """Parameters in the file that only DeepSpeed's Adam has."""
        params = self["optimizer.params"]
        return [name for name in DEEPSPEED_ADAM if isinstance(params, Mapping) and name in params]

    @property
    def is_torch_adam(self) -> bool:
        """Whether AdamW is torch's; DeepSpeed's is compiled (on GPUs by nvcc)."""
        written = self[f"{PARAMS}torch_adam"]
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


Value = tuple[Any, Origin]  # and its source
Fill = Callable[[Facts], Value | None]  # None: unknown


def _always(f: Facts) -> bool:
    return True


def _fixed(value: Any, source: Origin = DEEPSPEEDS_DEFAULT) -> Fill:
    return lambda f: (value, source)


def _micro_batch(f: Facts) -> Value:
    data_size = f.run.parallel(f.world_size).data_size
    shared = derived(f"{f.run.batch_size} rows / {data_size} processes (--split_batches)")
    is_shared = f.run.split_batches and "batch_size" not in f.run.open_flags
    source = shared if is_shared else f.by("batch_size")
    if f.run.global_batch_size is not None:
        source = f.by("global_batch_size")
    return f.run.micro_batch_rows(f.world_size), source


def _batch(f: Facts) -> Value:
    if "batch_size" in f.run.open_flags:
        return f.run.padded_rows(f.world_size), f.by("batch_size")
    rows, data_size = f.run.micro_batch_rows(f.world_size), f.run.parallel(f.world_size).data_size
    factors = f"{rows} rows x {f.run.accumulation_steps} micro-batches x {data_size} processes"
    return f.run.padded_rows(f.world_size), derived(factors)


def _accumulation(f: Facts) -> Value:
    by = "batch_size" if f.run.has_open_accumulation else "accumulation_steps"
    return f.run.accumulation_steps, f.by(by)


def _has_dtype(dtype: str) -> Fill:
    return lambda f: (f.run.dtype == dtype, f.by("dtype"))


def _overlap(f: Facts) -> Value:
    is_useful = f.device != "cpu" and f.world_size > 1
    return is_useful, derived(f"{'' if is_useful else 'not '}several GPUs")


def _bucket(f: Facts) -> Value:
    # the usual dim x dim means 64 all-reduces per step for the tiny preset
    return 12 * f.run.dim**2, derived("12 x dim x dim, about a block")


def _momentum(f: Facts) -> Value | None:
    momentum = f.run.optimizer_values.get("sgd_momentum")
    return None if momentum is None else (momentum, f.by("sgd_momentum"))


def _betas(f: Facts) -> Value:
    return [f.run.beta1, f.run.beta2], Origin(f"{f.by('beta1')}, {f.by('beta2')}", Rank.FLAG)


def _fused(f: Facts) -> Value | None:
    others = (f[f"{PARAMS}foreach"], f[f"{PARAMS}differentiable"])
    if not f.is_torch_adam or any(value is True for value in others):
        return None
    return True, derived("an AdamW of torch's, in one kernel")


def _torch_adam(f: Facts) -> Value:
    if f.own_adam:
        return False, derived(f"of {f.own_adam[0]}")
    return True, derived(f.adam_fault or "nothing has to be compiled")


def _cpu_optimizer(f: Facts) -> Value:
    by = "torch" if f.is_torch_adam else "DeepSpeed"
    return not f.is_torch_adam, derived(f"the optimizer is {by}'s")


def _warmup_steps(f: Facts) -> Value:
    is_open = "warmup_steps" in f.run.open_flags
    if f.run.warmup_steps is None and not is_open and not f.has_steps:
        return max(f.warmup, 2), UNCOUNTED
    if f.warmup > 1 or is_open:
        return max(f.warmup, 2), f.by("warmup_steps")
    return 2, Origin("the shortest warm-up of DeepSpeed's schedulers", Rank.RULE)


def _total_steps(f: Facts) -> Value:
    if not f.has_steps:
        return f.steps or max(f.warmup, 2) + 1, UNCOUNTED
    return f.steps, derived("the steps of the run")


class Key(NamedTuple):
    """A key of the file.

    `kind` is a type, several with | between, or a tuple of choices. The flag's value, or that of
    `fill`, replaces "auto", and is written into a file without the key where `needed`. A key with a
    reason `why` has no effect here, or a wrong one, and values other than `only` are refused.
    """

    name: str
    kind: str | tuple[Any, ...] = ""
    flag: str = ""
    fill: Fill | None = None
    needed: Callable[[Facts], bool] = lambda f: False
    stages: str = "0123"  # at which it has an effect; nvme: of that device alone
    only: tuple[Any, ...] = ()
    why: str = ""


def _named(kind: str, names: str, stages: str = "0123") -> tuple[Key, ...]:
    """Rows that have a name and a kind."""
    return tuple(Key(name, kind, stages=stages) for name in names.split())


def _is_adam(f: Facts) -> bool:
    return f.optimizer in ADAM_TYPES


def _is_mixed(f: Facts) -> bool:
    return f.run.dtype == MIXED


def _takes(param: str) -> Callable[[Facts], bool]:
    return lambda f: param in OPTIMIZER_PARAMS.get(f.optimizer, "").split()


def _schedules(*types: str) -> Callable[[Facts], bool]:
    return lambda f: f["scheduler.type"] in types


# What the table says of several keys.
_BILLION, _TRUE, _ZERO, _NONE = _fixed(10**9), _fixed(True), _fixed(0.0), _fixed("none")
_EPS = _fixed(1e-8, Origin("AdamW's default", Rank.DEFAULT))
_UNTESTED = _fixed(True, derived("an optimizer of torch's"))
_NO_WAIT = _fixed(False, derived("it would wait for the device"))
_NO_STAGE = _fixed(0, Origin("DeepSpeed's default: no stage is named", Rank.DEFAULT))
_NOT_SAVED = _fixed(False, derived("DeepSpeed saves nothing"))
_OF_MIXED = derived(f"the products of {MIXED}")
_ALL_FP32 = _fixed([], derived("all is sent in fp32"))
_FIXED_BETAS = _fixed(False, derived("the betas are beta1 and beta2"))
_WARMS = _schedules("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_PEAKS, _ENDS = _schedules("WarmupLR", "WarmupDecayLR"), _schedules(*_DECAYING)
_DTYPES = ("fp32", "fp16", "bf16", None)
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical", None)
_FP32 = tuple(name for name, dtype in DTYPES.items() if dtype == "float32")
_DEVICES = ("none", "cpu", "nvme")
_RECOMPUTED = "--gradient_checkpointing is the switch"
_LOADER = "rows come from this package's loader, which has no partial batch"
_FORMAT = "checkpoints are written in this package's own format"
_LAYERS = "this package names the layers that are divided"
_DISK = "nothing is kept on NVMe here"
_COUNTED = "DeepSpeed counts the micro-batches"
_NO_EXPERTS = "no group of processes has experts of its own"
_MEAN = "the loss is a mean over all processes"
_STATE = "its optimizer cannot be checkpointed"
_MASTERS = "every checkpoint holds the fp32 weights, which this gives up"
_UNREAD = "DeepSpeed never reads it"
_TRAINED = "every weight is trained"
_MUON = "DeepSpeed's own Muon is not used"
_SKIPPED = "a step with a gradient that is not finite is skipped"
# The sections of which every key is known, in the order in which values are adopted. DeepSpeed
# ignores other names in them, but for zero_optimization, bf16 and fp16, whose models refuse them
# without a suggestion.
SECTIONS: dict[str, tuple[Key, ...]] = {
    "": (
        Key(BATCH, "int|null", fill=_batch, needed=_always),
        Key(MICRO_BATCH, "int|null", "batch_size", _micro_batch, _always),
        Key(ACCUMULATION, "int|null", "accumulation_steps", _accumulation, _always),
        Key("gradient_clipping", "number", "grad_clip", needed=_always),  # DeepSpeed's is 1.0
        Key(
            "zero_allow_untested_optimizer",
            "bool",
            "",
            _UNTESTED,
            lambda f: f.optimizer in IN_TORCH,
        ),
        Key(
            "zero_force_ds_cpu_optimizer",
            "bool",
            fill=_cpu_optimizer,
            needed=lambda f: offloads(f.config, "optimizer"),
        ),
        Key("steps_per_print", "number|null"),
        Key("gradient_predivide_factor", "number"),
        Key("communication_data_type", _DTYPES),
        Key("log_level", _LOG_LEVELS),
        *_named("bool", "prescale_gradients dump_state disable_python_gc"),
        *_named("bool", "wall_clock_breakdown memory_breakdown"),
        *_named("object", "optimizer scheduler zero_optimization bf16 fp16 data_types timers"),
        *_named("object", "flops_profiler comms_logger tensorboard wandb csv_monitor comet"),
        *_named("object", "torch_autocast hybrid_engine expert_parallel data_efficiency"),
        *_named("object", "autotuning"),
        # The next keys have no effect in this package.
        Key("activation_checkpointing", only=(False, None, {}), why=_RECOMPUTED),
        Key("aio", only=(None, {}), why=_DISK),
        Key("checkpoint", only=(False, None, {}), why=_FORMAT),
        Key("compile", only=(False, {}), why="--compile on is the switch"),
        Key("datastates_ckpt", why=_FORMAT),
        Key("pipeline", only=(None, {}), why="its engine needs ZeRO below stage 2"),
        Key("tensor_parallel", only=(False, None, {}), why=_LAYERS),
        Key("weight_quantization", only=(False, {}), why="weights are not quantized in training"),
        Key("dataloader_drop_last", "bool", only=(False,), why=_LOADER),
        Key("disable_allgather", "bool", only=(False,), why=_UNREAD),
        Key("use_data_before_expert_parallelism", "bool", only=(False,), why=_NO_EXPERTS),
        Key("seq_parallel_communication_data_type", only=(None,), why="no sequence is split"),
        Key("vocabulary_size", "int|null", only=(None,), why="--vocab_size is the flag for it"),
        # The next keys would change the rows of a process or the mean of the gradients.
        Key("managed_gradient_accumulation", "bool", only=(True,), why=_COUNTED),
        Key("gradient_allreduce_op", ("mean", "sum"), only=("mean",), why=_MEAN),
        Key("sequence_parallel_size", "int", only=(1,), why="--sequence_parallel divides rows"),
        Key("data_parallel_size", "int", only=(1,), why="the launcher counts the processes"),
    ),
    "zero_optimization": (
        Key("stage", (0, 1, 2, 3), fill=_NO_STAGE, needed=_always),
        Key("overlap_comm", "bool|null", fill=_overlap, stages="123"),
        Key("reduce_bucket_size", "whole", fill=_bucket, stages="123"),
        Key("allgather_bucket_size", "whole", fill=_bucket, stages="12"),
        Key("sub_group_size", "whole", fill=_BILLION, stages="3"),
        Key(
            "stage3_prefetch_bucket_size",
            "whole",
            fill=lambda f: (f.run.dim**2 * 9 // 10, derived("0.9 x dim x dim")),
            stages="3",
        ),
        Key(
            "stage3_param_persistence_threshold",
            "whole",
            fill=lambda f: (f.run.dim * 10, derived("10 x dim")),
            stages="3",
        ),
        Key("stage3_max_live_parameters", "whole", fill=_BILLION, stages="3"),
        Key("stage3_max_reuse_distance", "whole", fill=_BILLION, stages="3"),
        Key("stage3_gather_16bit_weights_on_model_save", "bool", fill=_NOT_SAVED, stages="3"),
        Key("contiguous_gradients", "bool", fill=_TRUE, stages="123"),
        Key("reduce_scatter", "bool", fill=_TRUE, stages="12"),
        Key("compute_grad_norm", "bool", stages="123"),
        Key("offload_optimizer", "object|null", stages="123"),
        Key("offload_param", "object|null", stages="3"),
        *_named("bool", "round_robin_gradients", "12"),
        *_named("bool", "zero_quantized_weights zero_quantized_gradients", "3"),
        *_named("whole", "zero_hpz_partition_size stage3_model_persistence_threshold", "3"),
        *_named("whole", "stage3_module_granularity_threshold", "3"),
        *_named("", "use_multi_rank_bucket_allreduce ignore_unused_parameters", "12"),
        *_named("", "parameter_alignment", "12"),
        *_named("", "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential", "3"),
        *_named("", "memory_efficient_linear log_trace_cache_warnings enable_sanity_checks", "3"),
        *_named("", "leaf_module", "3"),
        Key("allgather_partitions", "bool", fill=_TRUE, only=(True,), why=_UNREAD),
        Key("elastic_checkpoint", "bool", only=(False,), why="any number of processes resumes"),
        Key("load_from_fp32_weights", "bool", only=(True,), why="checkpoints hold fp32 weights"),
        Key("pipeline_loading_checkpoint", "bool", only=(False,), why=_FORMAT),
        Key("override_module_apply", "bool", only=(True,), why="no module is made in zero.Init"),
        Key("zero_quantized_nontrainable_weights", "bool", only=(False,), why=_TRAINED),
        Key("save_muon_momentum_buffer_in_memory", "bool", only=(False,), why=_MUON),
        Key("zenflow", only=(None, False), why=_STATE, stages="12"),
    ),
    "zero_optimization.offload_optimizer": (
        Key("device", _DEVICES, fill=_NONE),
        Key(
            "ratio",
            "number",
            only=(1, 1.0),
            why="what stays on the GPU would keep its first learning rate, and no checkpoint would"
            " have its moments",
        ),
        Key("super_offload", "bool", only=(False, None), why=_STATE),
        *_named("", "pin_memory cpuadam_cores_perc"),
        *_named("", "nvme_path buffer_count pipeline_read pipeline_write fast_init", "nvme"),
    ),
    "zero_optimization.offload_param": (
        Key("device", _DEVICES, fill=_NONE),
        Key("pin_memory"),
        *_named("", "nvme_path buffer_count buffer_size max_in_cpu", "nvme"),
    ),
    "bf16": (
        Key("enabled", "bool", fill=_has_dtype("bfloat16"), needed=_always),
        Key("check_grad_overflow", "bool", only=(True, None), why=_SKIPPED),
        Key("bf16_master_weights_and_grads", "bool", only=(False,), why=_MASTERS),
        *_named("", "immediate_grad_update bf16_optimizer_states"),
    ),
    "fp16": (
        Key("enabled", "bool", fill=_has_dtype("float16"), needed=_always),
        Key("loss_scale", "number", fill=_fixed(0)),
        Key("loss_scale_window", "whole", fill=_fixed(1000)),
        Key("initial_scale_power", "whole", fill=_fixed(16)),
        Key("hysteresis", "whole", fill=_fixed(2)),
        Key("min_loss_scale", "whole", fill=_fixed(1)),
        Key("fp16_master_weights_and_grads", "bool", only=(False,), why=_MASTERS),
        *_named("", "auto_cast consecutive_hysteresis"),
    ),
    "data_types": (
        Key("grad_accum_dtype", _DTYPES),
        Key("param_dtype", (*DTYPES, None)),
        Key("buffer_dtype", only=(*_FP32, None), why="rotary frequencies stay in fp32"),
        Key("keep_in_fp32_modules"),
    ),
    "flops_profiler": (
        *_named("bool", "enabled detailed"),
        *_named("int", "profile_step module_depth top_modules"),
        Key("recompute_fwd_factor", "number"),
        Key("output_file", "text|null"),
    ),
    "timers": (Key("throughput", "object"),),
    "torch_autocast": (
        Key("enabled", "bool", fill=_has_dtype(MIXED), needed=_is_mixed),
        Key("dtype", (*DTYPES,), fill=_fixed("bfloat16", _OF_MIXED), needed=_is_mixed),
        # DeepSpeed's default sends gradients of linear layers, and at stage 3 weights, in bf16.
        Key("lower_precision_safe_modules", "list", "", _ALL_FP32, _is_mixed, stages="123"),
    ),
    "optimizer": (Key("type", "text"), Key("params", "object"), Key("legacy_fusion", "bool")),
    "optimizer.params": (
        Key("lr", "number", "learning_rate", needed=_takes("lr")),
        Key("weight_decay", "number", "weight_decay", needed=_takes("weight_decay")),
        Key("betas", "list", fill=_betas, needed=_takes("betas")),
        Key("eps", "number", fill=_EPS),
        Key("torch_adam", "bool", fill=_torch_adam, needed=_is_adam),
        Key("fused", "bool|null", fill=_fused, needed=_is_adam),
        Key("momentum", "number", fill=_momentum),
        *_named("bool|null", "foreach"),
        Key("differentiable", "bool", only=(False,), why="no step is differentiated"),
        *_named("bool", "amsgrad maximize capturable decoupled_weight_decay"),
        *_named("bool", "adam_w_mode fp32_optimizer_states bias_correction set_grad_none"),
        *_named("bool", "nesterov per_head_muon"),
        *_named("number", "muon_lr adam_lr dampening"),
        Key("ns_method", ("gram", "standard")),
    ),
    "scheduler": (Key("type", "text"), Key("params", "object")),
    "scheduler.params": (
        Key("warmup_min_lr", "number|list", fill=_ZERO),
        Key("warmup_max_lr", "number|list|null", "learning_rate", None, _PEAKS),
        Key("warmup_num_steps", "int", "warmup_steps", _warmup_steps, _WARMS),
        Key("total_num_steps", "int", "max_steps", _total_steps, _ENDS),
        Key("warmup_min_ratio", "number", fill=_ZERO),
        Key("cos_min_ratio", "number", "min_lr_ratio", None, _schedules("WarmupCosineLR")),
        Key("warmup_type", ("log", "linear")),
        Key("cycle_min_lr", "number|list"),
        Key("cycle_max_lr", "number|list", "learning_rate"),
        Key("cycle_momentum", "bool", "", _FIXED_BETAS, _schedules("OneCycle")),
        Key("lr_range_test_min_lr", "number|list", "learning_rate"),
        Key("lr_range_test_staircase", "bool"),
        *_named("int", "last_batch_iteration decay_step_size lr_range_test_step_size"),
        *_named("int", "cycle_first_step_size cycle_first_stair_count"),
        *_named("int|null", "cycle_second_step_size cycle_second_stair_count"),
        *_named("number", "cycle_min_mom cycle_max_mom decay_mom_rate decay_lr_rate"),
        *_named("number", "lr_range_test_step_rate"),
    ),
}
# The keys that this package reads in sections whose other names DeepSpeed judges.
READ: dict[str, tuple[Key, ...]] = {
    "autotuning": (Key("enabled", only=(False,), why="`minimind tune` measures settings"),),
    "data_efficiency": (Key("enabled", only=(False,), why="the row order is this package's own"),),
    "data_efficiency.data_routing.random_ltd": (
        Key("enabled", only=(False, None), why="no layer drops tokens"),
    ),
    "expert_parallel": (
        Key("enabled", only=(False,), why="experts are flags of this package (--use_moe)"),
    ),
    "hybrid_engine": (
        Key("enabled", "bool", only=(False,), why="DeepSpeed generates no text in training"),
    ),
    "tensor_parallel": (
        Key("autotp_size", "whole", "tensor_parallel", needed=lambda f: f.run.tensor_parallel > 1),
    ),
    "tensor_parallel.tp": (Key("tp_size", "whole", only=(1,), why=_LAYERS),),
    "timers.throughput": (
        Key("enabled", "bool"),
        Key("synchronized", "bool", fill=_NO_WAIT, needed=_always),
    ),
    **dict.fromkeys(
        ("comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"), _named("bool", "enabled")
    ),
}
KEYS = {
    f"{section}.{key.name}".lstrip("."): key
    for section, keys in (SECTIONS | READ).items()
    for key in keys
}
# The sections whose values DeepSpeed's models convert before it reads them.
CONVERTED = {"zero_optimization", "zero_optimization.offload_optimizer", "bf16", "fp16"}
CONVERTED |= {"zero_optimization.offload_param", "timers.throughput", "hybrid_engine"}
CONVERTED |= {"tensor_parallel", "tensor_parallel.tp", "comms_logger", "tensorboard", "wandb"}
CONVERTED |= {"csv_monitor", "comet"}
# Fields of DeepSpeed's ZeRO model whose keys have a prefix; it reads both names.
FIELD_NAMES = {
    f"{ZERO}{key.name.removeprefix('stage3_')}": key.name
    for key in SECTIONS["zero_optimization"]
    if key.name.startswith("stage3_")
}
_GONE = "was removed from DeepSpeed"
REMOVED = {
    "amp": f"{_GONE}; use bf16, fp16 or torch_autocast",
    "bfloat16": "is the old name; write bf16",
    "allgather_size": "is ignored by DeepSpeed; use zero_optimization.allgather_bucket_size",
    "compression_training": f"{_GONE}; remove it, nothing replaces it",
    "curriculum_learning": f"{_GONE}; it lives in data_efficiency.data_sampling",
    "eigenvalue": f"{_GONE} with quantize_training; remove it",
    "elasticity": f"{_GONE}; a run resumes on another number of GPUs without it, so remove it",
    "graph_harvesting": f"{_GONE}; remove it, nothing replaces it",
    "nebula": f"{_GONE}; remove it, checkpoints are written without it",
    "progressive_layer_drop": f"{_GONE}; remove it, nothing replaces it",
    "quantize_training": f"{_GONE}; remove it, nothing replaces it",
    "sparse_attention": f"{_GONE}; remove it, attention is the model's own business",
    "sparse_gradients": f"{_GONE}; remove it, nothing replaces it",
    f"{ZERO}cpu_offload": 'is the old name; write "offload_optimizer": {"device": "cpu"}',
    f"{ZERO}cpu_offload_param": 'is the old name; write "offload_param": {"device": "cpu"}',
    f"{ZERO}cpu_offload_use_pin_memory": "is ignored by DeepSpeed; write pin_memory inside"
    " offload_optimizer or offload_param",
    f"{ZERO}stage3_gather_fp16_weights_on_model_save": "is the old name; write"
    " stage3_gather_16bit_weights_on_model_save",
    f"{ZERO}legacy_stage1": f'{_GONE}; use "stage": 1',
    f"{ZERO}mics_hierarchical_params_gather": f"{_GONE}; use zero_hpz_partition_size",
    f"{ZERO}mics_shard_size": f"{_GONE}; use zero_hpz_partition_size",
    f"{ZERO}zeropp_loco_param": f"{_GONE}; zero_quantized_gradients works without it",
    f"{PARAMS}max_grad_norm": "is refused by DeepSpeed; use gradient_clipping",
}
# DeepSpeed reads false and null in these keys as absent.
MAY_BE_OFF = (f"{ZERO}cpu_offload", f"{ZERO}cpu_offload_param")
MAY_BE_OFF += (f"{ZERO}cpu_offload_use_pin_memory",)
