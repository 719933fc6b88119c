"""The keys that DeepSpeed 0.19.8 reads from its JSON; what is wrong with a file that has others.

DeepSpeed ignores a key that it does not know: with `zero_optimisation` it runs stage 0 and says
nothing. Here an unknown key is a fault. Left alone is the inside of the sections for which
DeepSpeed has a strict model of its own: zero_optimization, bf16, fp16, compile, hybrid_engine,
tensor_parallel, weight_quantization, comms_logger and the monitors. Pure: no deepspeed, no torch.
A test compares the tables with the installed DeepSpeed.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

VERSION = "0.19.8"
AUTO = "auto"


def _kinds(table: str) -> dict[str, str]:
    """Name -> kind, of words in which `kind:` stands before the names it holds for."""
    found, kind = {}, ""
    for word in table.split():
        if word.endswith(":"):
            kind = word[:-1]
        else:
            found[word] = kind
    return found


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
_GONE = "was removed from DeepSpeed"
REMOVED = {
    "amp": f"{_GONE}; use bf16, fp16 or torch_autocast",
    "bfloat16": "is the old name, which DeepSpeed ignores beside bf16; write bf16",
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
    **dict.fromkeys(
        ("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_use_pin_memory"),
        'is the old name; write "offload_optimizer": {"device": "cpu"}',
    ),
    "zero_optimization.cpu_offload_param": "is the old name; write"
    ' "offload_param": {"device": "cpu"}',
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "is the old name; write"
    " stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.legacy_stage1": f'{_GONE}; use "stage": 1',
    "zero_optimization.mics_hierarchical_params_gather": f"{_GONE}; use zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": f"{_GONE}; use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": f"{_GONE}; zero_quantized_gradients works without it",
    "optimizer.params.max_grad_norm": "is refused by DeepSpeed; use gradient_clipping",
}
_ZERO = """stage overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size
    allgather_bucket_size offload_optimizer offload_param sub_group_size round_robin_gradients
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters"""
# Written one level too high more often than misspelt.
HOME = {
    **dict.fromkeys(_ZERO.split(), "zero_optimization"),
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
OPTIMIZERS = ANY_CASE | {  # from torch.optim, as spelt there
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
# Of optimizers and schedulers alike; any other is a number.
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
CHOICES = {
    "communication_data_type": _DTYPES,
    "data_types.grad_accum_dtype": _DTYPES,
    "seq_parallel_communication_data_type": _DTYPES,
    "gradient_allreduce_op": ("mean", "sum"),
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "scheduler.params.warmup_type": ("log", "linear"),
    "optimizer.params.ns_method": ("gram", "standard"),
}


def faults(config: Mapping[str, Any], path: str) -> list[str]:
    """One sentence for each thing in `config` (read from `path`) that DeepSpeed would not obey.

    Whether a value is sensible is not asked, and "auto" is right everywhere. Never raises.
    """
    if not isinstance(config, Mapping):
        return [f"{path}: holds {_shown(config)}, not a JSON object; write one"]
    found = _members("", config, TOP_LEVEL)
    for name, kinds in SECTIONS.items():
        found += _members(f"{name}.", config.get(name), kinds)
    found += _removed_inside("zero_optimization", config.get("zero_optimization"))
    found += _built("optimizer", config.get("optimizer"), OPTIMIZERS, "AdamW")
    found += _built("scheduler", config.get("scheduler"), SCHEDULERS, "WarmupLR")
    return [f"{path}: {fault}" for fault in found]


def optimizer_name(written: Any) -> str | None:
    """The optimizer that DeepSpeed builds for a type, spelt as in `OPTIMIZERS`; None if none."""
    if not isinstance(written, str):
        return None
    lowered = {name.lower(): name for name in ANY_CASE}
    return lowered.get(written.lower(), written if written in OPTIMIZERS else None)


def _members(
    where: str, block: Any, kinds: Mapping[str, str], what: str = f"key of DeepSpeed {VERSION}"
) -> list[str]:
    """The faults of an object's keys and values; what is no object was told one level up."""
    found = []
    for key, value in block.items() if isinstance(block, Mapping) else ():
        name = f"{where}{key}"
        if name in REMOVED:
            found.append(f"{name} {REMOVED[name]}")
        elif key in kinds:
            found += _wrong(name, value, kinds[key])
        else:
            found.append(f"{name} is no {what}; {_advice(str(key), kinds, where)}")
    return found


def _removed_inside(section: str, block: Any) -> list[str]:
    names = [f"{section}.{key}" for key in block] if isinstance(block, Mapping) else []
    return [f"{name} {REMOVED[name]}" for name in names if name in REMOVED]


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
    found = _members(f"{name}.params.", params, kinds, f"parameter of {known}")
    missing = [n for n in NEEDED.get(known, ()) if isinstance(params, Mapping) and n not in params]
    return found + [f"{name}.params.{n} is missing; {known} needs it, write one" for n in missing]


def _advice(name: str, names: Iterable[str], where: str) -> str:
    """What to do about a name that is not among `names`."""
    if name.startswith(("_", "#", "//")) or "comment" in name.lower():
        return "JSON has no place for notes, remove it"
    if not where and name in HOME:
        return f"write it inside {HOME[name]}"
    lowered = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"did you mean {lowered[close[0]]}?"
    return f"there are {', '.join(lowered.values())}" if where else "remove it"


def _wrong(name: str, value: Any, kind: str) -> list[str]:
    """The fault of a value that is not of its kind or none of its choices; else nothing."""
    if isinstance(value, str) and value == AUTO:
        return []
    kinds = kind.split("|")
    if not any(_FITS[kind][1](value) for kind in kinds):
        words = " or ".join(_FITS[kind][0] for kind in kinds)
        advice = "write {...}" if kinds[0] == "object" else "write one"
        return [f"{name} is {_shown(value)}, not {words}; {advice}"]
    choices = CHOICES.get(name)
    # The top-level ones DeepSpeed lowers itself.
    if choices and isinstance(value, str):
        if (value if "." in name else value.lower()) not in choices:
            return [f"{name} is {_shown(value)}, not one of {', '.join(choices)}; write one"]
    return []


def _number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


_FITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "object": ("an object", lambda value: isinstance(value, Mapping)),
    "list": ("a list", lambda value: isinstance(value, list | tuple)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: _number(value) and isinstance(value, int)),
    "number": ("a number", _number),
    "text": ("a text", lambda value: isinstance(value, str)),
    "null": ("null", lambda value: value is None),
}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    return text if len(text) <= 60 else f"{text[:57]}..."
