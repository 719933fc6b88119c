"""The names and kinds of everything that DeepSpeed 0.19.8 reads from its JSON: tables, no logic.

A test compares them with the installed DeepSpeed.
"""

from __future__ import annotations

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
# Of `any` other modules report: incompatible.py of stage, config_values.py of enabled.
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
# Of the sections that schema.py leaves to DeepSpeed's own models: what a rule looks at.
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
# These ask for nothing where they are false or null, unless the new name is there too.
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
