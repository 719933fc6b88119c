"""The keys of a DeepSpeed JSON and their types; faults of others, each with its remedy.

DeepSpeed silently ignores unknown keys: with `zero_optimisation` it runs stage 0. The contents of
compile, hybrid_engine, tensor_parallel, weight_quantization, comms_logger and the monitors are not
checked here, because DeepSpeed has strict models for them. Imports neither deepspeed nor torch.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minimind.runtime.secret_keys import without_secret
from minimind.runtime.terminal import shorten_line
from minimind.runtime.urls import masked_values

VERSION = "0.19.8"
AUTO = "auto"


def _kinds(table: str) -> dict[str, str]:
    """Name -> kind, of words in which `kind:` stands before the names it holds for."""
    kinds, kind = {}, ""
    for word in table.split():
        if word.endswith(":"):
            kind = word[:-1]
        else:
            kinds[word] = kind
    return kinds


TOP_LEVEL = _kinds("""
    object: optimizer scheduler zero_optimization bf16 fp16 torch_autocast data_types
        activation_checkpointing checkpoint flops_profiler comms_logger tensorboard wandb
        csv_monitor comet compile timers autotuning pipeline hybrid_engine data_efficiency
        tensor_parallel expert_parallel weight_quantization datastates_ckpt
    object|null: aio
    bool: managed_gradient_accumulation prescale_gradients disable_allgather dump_state
        disable_python_gc wall_clock_breakdown memory_breakdown dataloader_drop_last
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        use_data_before_expert_parallelism
    int: sequence_parallel_size data_parallel_size
    int|null: train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        vocabulary_size
    number: gradient_clipping gradient_predivide_factor
    number|null: steps_per_print
    text: gradient_allreduce_op
    text|null: communication_data_type seq_parallel_communication_data_type log_level
""")
# Inside these DeepSpeed looks up the names it knows and never at the others.
SECTIONS = {
    "activation_checkpointing": _kinds("""
        bool: partition_activations contiguous_memory_optimization cpu_checkpointing
            synchronize_checkpoint_boundary profile
        int|null: number_checkpoints"""),
    "aio": _kinds("""
        int: block_size queue_depth intra_op_parallelism
        bool: single_submit overlap_events use_gds"""),
    "checkpoint": _kinds("""
        bool: load_universal use_node_local_storage checkpoint_serialization
        text: tag_validation  object: parallel_write  object|null: writer"""),
    "data_types": _kinds("""
        text|null: grad_accum_dtype param_dtype buffer_dtype  list: keep_in_fp32_modules"""),
    "flops_profiler": _kinds("""
        bool: enabled detailed  number: recompute_fwd_factor
        int: profile_step module_depth top_modules  text|null: output_file"""),
    "timers": _kinds("object: throughput"),
    "torch_autocast": _kinds("bool: enabled  text: dtype  list: lower_precision_safe_modules"),
    "optimizer": _kinds("text: type  object: params  bool: legacy_fusion"),
    "scheduler": _kinds("text: type  object: params"),
}
# Here it has a model of its own, which refuses other names, but late and without a suggestion.
# Faults of `any` are reported elsewhere: those of stage by rules.py, of enabled by values.py.
MODELLED = {
    "zero_optimization": _kinds("""
        any: stage
        bool: contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce
            allgather_partitions compute_grad_norm load_from_fp32_weights elastic_checkpoint
            ignore_unused_parameters round_robin_gradients parameter_alignment
            stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params
            stage3_allgather_sequential zero_quantized_weights zero_quantized_gradients
            zero_quantized_nontrainable_weights memory_efficient_linear
            pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
            enable_sanity_checks save_muon_momentum_buffer_in_memory
        bool|null: overlap_comm
        whole: reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size
            stage3_prefetch_bucket_size stage3_param_persistence_threshold
            stage3_model_persistence_threshold stage3_max_live_parameters
            stage3_max_reuse_distance stage3_module_granularity_threshold
        object: leaf_module
        object|null: offload_optimizer offload_param zenflow"""),
    "zero_optimization.offload_optimizer": _kinds("""
        text: device  text|null: nvme_path  whole: buffer_count
        bool: pin_memory pipeline_read pipeline_write fast_init super_offload
        number: ratio cpuadam_cores_perc"""),
    "zero_optimization.offload_param": _kinds("""
        text: device  text|null: nvme_path  whole: buffer_count buffer_size max_in_cpu
        bool: pin_memory"""),
    "bf16": _kinds("""
        any: enabled
        bool: immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
            bf16_optimizer_states"""),
    "fp16": _kinds("""
        any: enabled
        bool: auto_cast consecutive_hysteresis fp16_master_weights_and_grads
        number: loss_scale
        whole: initial_scale_power loss_scale_window hysteresis min_loss_scale"""),
}
# Fields of DeepSpeed's ZeRO model whose keys have a prefix; it reads both names.
FIELD_NAMES = {
    f"zero_optimization.{key.removeprefix('stage3_')}": key
    for key in MODELLED["zero_optimization"]
    if key.startswith("stage3_")
}
# The keys that a rule reads in sections which DeepSpeed's own models check.
READ_BY_PYDANTIC = {
    "hybrid_engine": _kinds("bool: enabled"),
    "tensor_parallel": _kinds("whole: autotp_size"),
    "tensor_parallel.tp": _kinds("bool: enabled  whole: tp_size"),
    "compile": _kinds("bool: deepcompile"),
    "timers.throughput": _kinds("bool: enabled synchronized"),
    **dict.fromkeys(
        ("comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"), _kinds("bool: enabled")
    ),
}
# Texts that DeepSpeed lowers before it compares them.
LOWERED = (
    "gradient_allreduce_op",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "log_level",
)
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
    "zero_optimization.cpu_offload": "is the old name; write"
    ' "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": "is the old name; write"
    ' "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "is ignored by DeepSpeed; write pin_memory"
    " inside offload_optimizer or offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "is the old name; write"
    " stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.legacy_stage1": f'{_GONE}; use "stage": 1',
    "zero_optimization.mics_hierarchical_params_gather": f"{_GONE}; use zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": f"{_GONE}; use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": f"{_GONE}; zero_quantized_gradients works without it",
    "optimizer.params.max_grad_norm": "is refused by DeepSpeed; use gradient_clipping",
}
# A false or null value is ignored, unless the new name is there too.
SUCCESSORS = {
    "zero_optimization.cpu_offload": ("offload_optimizer",),
    "zero_optimization.cpu_offload_param": ("offload_param",),
    "zero_optimization.cpu_offload_use_pin_memory": ("offload_optimizer", "offload_param"),
}
# Written one level too high more often than misspelt.
HOME = {
    **dict.fromkeys(MODELLED["zero_optimization"], "zero_optimization"),
    **{name.partition(".")[2]: "zero_optimization" for name in FIELD_NAMES},
    **dict.fromkeys(("lr", "betas", "eps", "weight_decay", "torch_adam"), "optimizer.params"),
    **dict.fromkeys(("loss_scale", "initial_scale_power", "loss_scale_window"), "fp16"),
    **dict.fromkeys(("warmup_num_steps", "total_num_steps"), "scheduler.params"),
}
_TORCH = "lr weight_decay foreach maximize differentiable"
_ADAMW = f"{_TORCH} betas eps amsgrad capturable fused"
# Which of them holds depends on the class behind the name: torch's, the fused one or the CPU one.
_ADAM_CLASSES = "bias_correction set_grad_none torch_adam adam_w_mode fp32_optimizer_states"
ANY_CASE = {  # names that DeepSpeed itself lowers before it compares them
    "Adam": f"{_ADAMW} {_ADAM_CLASSES} decoupled_weight_decay",
    "AdamW": f"{_ADAMW} {_ADAM_CLASSES}",
    "Adagrad": f"{_TORCH} lr_decay initial_accumulator_value eps fused amsgrad"
    " fp32_optimizer_states",
    "Lamb": "lr bias_correction betas eps eps_inside_sqrt weight_decay max_coeff min_coeff amsgrad",
    "Lion": "lr betas weight_decay set_grad_none fp32_optimizer_states",
    "Muon": "lr muon_lr adam_lr momentum weight_decay ns_method betas eps per_head_muon torch_adam"
    " adam_w_mode fp32_optimizer_states foreach",
}
OPTIMIZER_PARAMS = ANY_CASE | {  # from torch.optim, as spelt there
    "ASGD": f"{_TORCH} lambd alpha t0 capturable",
    "Adadelta": f"{_TORCH} rho eps capturable",
    "Adafactor": "lr beta2_decay eps d weight_decay foreach maximize",
    "Adamax": f"{_TORCH} betas eps capturable",
    "NAdam": f"{_TORCH} betas eps momentum_decay decoupled_weight_decay capturable",
    "RAdam": f"{_TORCH} betas eps decoupled_weight_decay capturable",
    "RMSprop": f"{_TORCH} alpha eps momentum centered capturable",
    "Rprop": "lr etas step_sizes capturable foreach maximize differentiable",
    "SGD": f"{_TORCH} momentum dampening nesterov fused",
}
REFUSED_OPTIMIZERS = {
    **dict.fromkeys(("OneBitAdam", "ZeroOneAdam", "OneBitLamb"), f"{_GONE}; use AdamW"),
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), "needs a model made for mup; use AdamW"),
    "LBFGS": "needs a closure, which DeepSpeed never gives; use AdamW",
    "SparseAdam": "takes sparse gradients only; use AdamW",
}
_WARMUP = "warmup_num_steps warmup_type last_batch_iteration"
SCHEDULERS = {
    "WarmupLR": f"{_WARMUP} warmup_min_lr warmup_max_lr",
    "WarmupDecayLR": f"{_WARMUP} warmup_min_lr warmup_max_lr total_num_steps",
    "WarmupCosineLR": f"{_WARMUP} warmup_min_ratio cos_min_ratio total_num_steps",
    "OneCycle": """cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size
        cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size
        cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate last_batch_iteration""",
    "LRRangeTest": """lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate
        lr_range_test_staircase last_batch_iteration""",
}
NEEDED = {"OneCycle": ("cycle_min_lr", "cycle_max_lr")}  # total_num_steps is always filled
# Parameters of optimizers and schedulers; every other parameter is a number.
PARAMS = _kinds("""
    bool: amsgrad maximize differentiable capturable decoupled_weight_decay torch_adam adam_w_mode
        fp32_optimizer_states bias_correction set_grad_none eps_inside_sqrt nesterov centered
        per_head_muon cycle_momentum lr_range_test_staircase
    bool|null: foreach fused
    int: warmup_num_steps total_num_steps last_batch_iteration decay_step_size
        cycle_first_step_size cycle_first_stair_count lr_range_test_step_size
    int|null: cycle_second_step_size cycle_second_stair_count
    list: betas etas step_sizes
    number|list: eps warmup_min_lr cycle_min_lr cycle_max_lr lr_range_test_min_lr
    number|list|null: warmup_max_lr
    text: warmup_type ns_method
""")
_DTYPES = ("fp32", "fp16", "bf16")
DTYPES = {  # in each spelling that DeepSpeed's DtypeEnum reads, and as --dtype names it
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "bfloat", "torch.bfloat16"), "bfloat16"),
}
_DEVICES = ("none", "cpu", "nvme")
CHOICES = {
    "communication_data_type": _DTYPES,
    "data_types.grad_accum_dtype": _DTYPES,
    **dict.fromkeys(("data_types.param_dtype", "data_types.buffer_dtype"), tuple(DTYPES)),
    "seq_parallel_communication_data_type": _DTYPES,
    "gradient_allreduce_op": ("mean", "sum"),
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "scheduler.params.warmup_type": ("log", "linear"),
    "optimizer.params.ns_method": ("gram", "standard"),
    "zero_optimization.offload_optimizer.device": _DEVICES,
    "zero_optimization.offload_param.device": _DEVICES,
}


INSIDE = SECTIONS | MODELLED
MANY = 20  # names in a message


def faults(config: Mapping[str, Any], path: str) -> list[str]:
    """Return one sentence per unknown key or mistyped value in a normalized `config` of `path`.

    Checks types, not ranges; "auto" is valid everywhere. Never raises.
    """
    if not isinstance(config, Mapping):
        return [f"{path}: holds {_shown(config)}, not a JSON object; write one"]
    problems = _members("", config, TOP_LEVEL) + _extremes("", config)
    problems += _built("optimizer", config.get("optimizer"), OPTIMIZER_PARAMS, "AdamW")
    problems += _built("scheduler", config.get("scheduler"), SCHEDULERS, "WarmupLR")
    return [f"{path}: {fault}" for fault in problems]


def optimizer_name(written: Any) -> str | None:
    """Return the optimizer that DeepSpeed builds for a type, as in `OPTIMIZER_PARAMS`, or None."""
    if not isinstance(written, str):
        return None
    lowered = {name.lower(): name for name in ANY_CASE}
    return lowered.get(written.lower(), written if written in OPTIMIZER_PARAMS else None)


def _members(
    where: str, block: Any, kinds: Mapping[str, str], what: str = f"key of DeepSpeed {VERSION}"
) -> list[str]:
    """The faults of an object's keys and values; other types are reported one level up."""
    problems = []
    for key, value in block.items() if isinstance(block, Mapping) else ():
        name = f"{where}{key}"
        if name in REMOVED:
            problems += _removed(name, value, block)
        elif key in kinds:
            problems += _wrong(name, value, kinds[key])
            problems += _members(f"{name}.", value, INSIDE[name]) if name in INSIDE else []
        elif name in FIELD_NAMES:
            problems.append(
                f"{name} is another name of {FIELD_NAMES[name]}, which is there too; remove one"
            )
        else:
            problems.append(f"{name} is no {what}; {_advice(str(key), kinds, where)}")
    return problems


def _extremes(where: str, value: Any) -> list[str]:
    """Faults of NUL characters and numbers above 64 bits, at any depth."""
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [one for key, v in pairs for one in _extremes(f"{where}.{key}".lstrip("."), v)]
    if isinstance(value, str) and "\0" in value:
        return [f"{where} holds a NUL character; remove it"]
    if isinstance(value, int) and abs(value) >= 2**63:
        return [f"{where} is a number of more than 64 bits; write a smaller one"]
    return []


def _removed(name: str, value: Any, block: Mapping[str, Any]) -> list[str]:
    """Fault of a removed or renamed key, unless it is switched off."""
    if name not in SUCCESSORS or value not in (False, None):
        return [f"{name} {REMOVED[name]}"]
    beside = [key for key in SUCCESSORS[name] if key in block]
    return [f"{name} is an old name beside {beside[0]}; remove it"] if beside else []


def _built(name: str, block: Any, types: Mapping[str, str], example: str) -> list[str]:
    """The faults of an optimizer's or scheduler's type and parameters."""
    if not isinstance(block, Mapping):
        return []
    if "type" not in block:
        return [f'{name} has no type, so that DeepSpeed ignores it; write "type": "{example}"']
    written, params = block["type"], block.get("params", {})
    if not isinstance(written, str) or written == AUTO:
        return []
    known = (optimizer_name(written) or "") if name == "optimizer" else written
    if known not in types:
        refused = {key.lower(): clause for key, clause in REFUSED_OPTIMIZERS.items()}
        if name == "optimizer" and written.lower() in refused:
            return [f'{name}.type is "{written}", which {refused[written.lower()]}']
        advice = _advice(written, types, f"{name}.")
        return [f"{name}.type is {_shown(written)}, no {name} of DeepSpeed {VERSION}; {advice}"]
    kinds = {param: PARAMS.get(param, "number") for param in types[known].split()}
    problems = _members(f"{name}.params.", params, kinds, f"parameter of {known}")
    missing = [n for n in NEEDED.get(known, ()) if isinstance(params, Mapping) and n not in params]
    required = f"is missing; {known} needs it, write one"
    return problems + [f"{name}.params.{n} {required}" for n in missing]


def _advice(name: str, names: Iterable[str], where: str) -> str:
    """Return the remedy for a name that is not among `names`."""
    if name.startswith(("_", "#", "//")) or "comment" in name.lower():
        return "JSON has no place for notes, remove it"
    if not where and name in HOME:
        return f"write it inside {HOME[name]}"
    lowered = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"did you mean {lowered[close[0]]}?"
    few = where and len(lowered) <= MANY
    return f"there are {', '.join(lowered.values())}" if few else "remove it"


def _wrong(name: str, value: Any, kind: str) -> list[str]:
    """Fault of a value of the wrong type or outside its choices; else empty."""
    if isinstance(value, str) and value == AUTO:
        return []
    shown = _shown(without_secret(name, value))
    kinds = kind.split("|")
    if not any(_FITS[kind][1](value) for kind in kinds):
        is_object = kinds[0] == "object"
        words = " or ".join(_FITS[kind][0] for kind in (kinds[:1] if is_object else kinds))
        advice = "write {...}" if is_object else "write one"
        return [f"{name} is {shown}, not {words}; {advice}"]
    choices = CHOICES.get(name)
    if choices and isinstance(value, str) and value not in choices:
        return [f"{name} is {shown}, not one of {', '.join(choices)}; write one"]
    return []


def _number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


_FITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("anything", lambda value: True),  # checked in another module
    "object": ("an object", lambda value: isinstance(value, Mapping)),
    "list": ("a list", lambda value: isinstance(value, list | tuple)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: _number(value) and isinstance(value, int)),
    # As pydantic reads it: 5e8 is one.
    "whole": ("a whole number", lambda value: _number(value) and value == int(value)),
    "number": ("a number", _number),
    "text": ("a text", lambda value: isinstance(value, str)),
    "null": ("null", lambda value: value is None),
}


def _shown(value: Any) -> str:
    shown = masked_values(value)
    return shorten_line(json.dumps(shown, ensure_ascii=False, default=str, skipkeys=True), 60)


# DeepSpeed's pydantic models of sections.
MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
}


def format_model_fault(section: str, fault: Any) -> str:
    """Format an error of such a model as `SECTION.KEY is VALUE: reason`."""
    key = ".".join(map(str, (section, *fault["loc"])))
    if fault["type"] == "extra_forbidden":
        return f"{key} is no key of DeepSpeed's"
    shown = masked_values(without_secret(key, fault["input"]))
    given = f" is {shown!r}" if fault["loc"] else ""
    return f"{key}{given}: {fault['msg']}"
