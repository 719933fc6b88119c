"""DeepSpeed and Accelerate files of the projects that people come from, and what becomes of each.

One row a file: repository, path, its settings, and the verdict on a host with 8 GPUs and on a CPU
of 2 processes (as many as an Accelerate file says). A verdict is a dictionary of resolved values,
or a part of the sentence that refuses the file. The settings are those of July and August 2026; of
several files with the same settings one is here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from minimind.config.deepspeed import backend_choice
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.deepspeed.document import AUTO, leaves
from minimind.config.deepspeed.key_checks import normalize_config
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import Launch, read_launch
from minimind.config.parse import parse_flags
from minimind.engine.build import require_accepted
from minimind.errors import UsageError
from minimind.launch import plan
from minimind.runtime.device import Host
from tools.runs import MEETING

Settings = dict[str, Any]
Verdict = str | dict[str, Any]


class File(NamedTuple):
    """A file and its verdicts; without one for CPUs, both are the same."""

    repository: str
    path: str
    settings: Settings | str  # text where a YAML cannot be built from a dictionary
    on_gpus: Verdict
    on_cpus: Verdict | None = None


def auto(*names: str) -> Settings:
    return dict.fromkeys(names, AUTO)


# Pieces of DeepSpeed files.
MICRO, TOTAL, STEPS = (
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_accumulation_steps",
)
BATCH = auto(MICRO, TOTAL, STEPS, "gradient_clipping")
QUIET = {"wall_clock_breakdown": False}
SELDOM = {"steps_per_print": 2000, **QUIET}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
EITHER = {"fp16": {**auto("enabled"), **SCALE, "initial_scale_power": 16}, "bf16": auto("enabled")}
FP16 = {"fp16": {"enabled": True, **SCALE, "initial_scale_power": 16}}
BF16 = {"bf16": {"enabled": True}}
ADAMW = auto("lr", "weight_decay")
TORCH_ADAMW = {**ADAMW, "torch_adam": True, "adam_w_mode": True}
FULL_ADAMW = {**ADAMW, **auto("betas", "eps")}
WARMUP = auto("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
DECAY = {**WARMUP, **auto("total_num_steps")}
CPU = {"device": "cpu", "pin_memory": True}
NOWHERE = {"device": "none", "pin_memory": True}
MODEL_SIZED = auto(
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"
)
BILLIONS = dict.fromkeys(
    ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"), 1e9
)
GATHER = "stage3_gather_16bit_weights_on_model_save"


def optimizer(params: Settings, kind: str = "AdamW") -> Settings:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str, params: Settings) -> Settings:
    return {"scheduler": {"type": kind, "params": params}}


def zero(stage: int, **settings: Any) -> Settings:
    return {"zero_optimization": {"stage": stage, **settings}}


def buckets(size: float, reduce: Any = None, **settings: Any) -> Settings:
    """What stages up to 2 partition and reduce by."""
    return {
        **dict.fromkeys(("allgather_partitions", "reduce_scatter", "contiguous_gradients"), True),
        "allgather_bucket_size": size,
        "reduce_bucket_size": reduce or size,
        **settings,
    }


# Pieces of Accelerate files.
ASKED = {  # what `accelerate config` writes whatever one answers
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}
NO_TPU = {"tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}
HERE = {**ASKED, **NO_TPU, "mixed_precision": "bf16"}
STANDARD = {"deepspeed_multinode_launcher": "standard"}
NO_OFFLOAD = {"offload_optimizer_device": "none", "offload_param_device": "none"}
OLD = {  # of Accelerate 0.11
    "compute_environment": "LOCAL_MACHINE",
    "deepspeed_config": {},
    "distributed_type": "NO",
    "fsdp_config": {},
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "use_cpu": False,
}
TE = {
    "backend": "TE",
    "amax_history_len": 1024,
    "fp8_format": "E4M3",
    "interval": 1,
    "margin": 0,
    "use_autocast_during_eval": False,
}


def engaged(processes: int, around: Settings, **fields: Any) -> Settings:
    """An Accelerate file that engages DeepSpeed, by a file or by fields."""
    here = {"distributed_type": "DEEPSPEED", "num_processes": processes}
    return {**around, **here, "deepspeed_config": fields}


def fsdp(processes: int | None, version: int | None = None, **beside: Any) -> Settings:
    settings = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": False}
    settings |= {} if version is None else {"fsdp_version": version}
    count = {} if processes is None else {"num_processes": processes}
    return {**ASKED, "distributed_type": "FSDP", "fsdp_config": settings, **count, **beside}


# Verdicts.
ADAM = {"optimizer.type": "AdamW", "optimizer.params.lr": 5e-4}
NO_FP16 = "fp16.enabled) needs a GPU; use bfloat16 or float32 here"
NO_FSDP = "distributed_type is FSDP; write one of DEEPSPEED, MULTI_GPU, MULTI_CPU, NO"
COMPILED = 'compile.backend is "inductor", but --compile on is the switch; remove it'


def runs(stage: int | None = None, processes: int = 0, /, **values: Any) -> dict[str, Any]:
    return {"stage": stage, "processes": processes, "dtype": "bfloat16", **values}


def offloaded(*parts: str) -> dict[str, str]:
    return {f"zero_optimization.offload_{part}.device": "cpu" for part in parts}


HALF = {"dtype": "float16", "fp16.enabled": True}
SIZED = {
    "zero_optimization.reduce_bucket_size": 12 * 512 * 512,
    "zero_optimization.stage3_prefetch_bucket_size": 9 * 512 * 512 // 10,
    "zero_optimization.stage3_param_persistence_threshold": 10 * 512,
}

ACCELERATE, AXOLOTL = "huggingface/accelerate", "axolotl-ai-cloud/axolotl"
FACTORY, SWIFT = "hiyouga/LLaMA-Factory", "modelscope/ms-swift"
TRANSFORMERS, TRL = "huggingface/transformers", "huggingface/trl"

# DeepSpeed files.
TEMPLATE = {
    **FP16,
    **optimizer(TORCH_ADAMW),
    **scheduler("WarmupDecayLR", DECAY),
    **BATCH,
    STEPS: 1,
}
TEMPLATE |= SELDOM
TEMPLATE_3 = {**TEMPLATE, **optimizer(ADAMW)}
CONTIGUOUS = {"contiguous_gradients": True, "overlap_comm": True}
STAGE_3 = {"contiguous_gradients": True, **MODEL_SIZED, **BILLIONS}
TEMPLATE_ZERO_3 = {**STAGE_3, "overlap_comm": True, GATHER: AUTO}
OVERLAPPED = buckets(2e8, AUTO, overlap_comm=True)
DECAYED = {**HALF, **ADAM, "scheduler.params.total_num_steps": 3, STEPS: 1}
TESTED = {**EITHER, **optimizer(TORCH_ADAMW), **scheduler("WarmupLR", WARMUP), **BATCH, STEPS: 1}
TESTED |= SELDOM
HUGE = dict.fromkeys((*MODEL_SIZED, *BILLIONS), 1e9)
AXOLOTL_16 = {"fp16": {**EITHER["fp16"], "auto_cast": False, "initial_scale_power": 32}}
AXOLOTL_EITHER = {**EITHER, **AXOLOTL_16, **BATCH, **QUIET}
AXOLOTL_2 = {"offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True}
AXOLOTL_2 |= {"overlap_comm": True}
AXOLOTL_3 = {
    **{"overlap_comm": True, "contiguous_gradients": True, **MODEL_SIZED},
    **{"gather_16bit_weights_on_model_save": True},
    **dict.fromkeys(("sub_group_size", "max_live_parameters", "max_reuse_distance"), 0),
}
NO_LIVE = {f"zero_optimization.stage3_max_{n}": 0 for n in ("live_parameters", "reuse_distance")}
UNTESTED = {"zero_allow_untested_optimizer": True}
AXOLOTL_OFFLOAD = {"zero_force_ds_cpu_optimizer": False, **UNTESTED, **BF16, **BATCH, **QUIET}
INDUCTOR = {"compile": {"disable": False, "backend": "inductor"}}
FACTORY_EITHER = {**BATCH, **UNTESTED, **EITHER}
FACTORY_2 = buckets(5e8, overlap_comm=False, round_robin_gradients=True)
FACTORY_3 = {**STAGE_3, "overlap_comm": False, GATHER: True}
FACTORY_FP8 = {
    **{**BATCH, **UNTESTED, "zero_force_ds_cpu_optimizer": True, **EITHER},
    "fp16": {**EITHER["fp16"], "enabled": False},
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor"},
}
del FACTORY_FP8[TOTAL]
FP8_ZERO = {**FACTORY_3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
FP8_ZERO |= dict(zip(MODEL_SIZED, (12845056, 11560550, 35840), strict=True))
SWIFT_EITHER = {**EITHER, **BATCH, **SELDOM}
SWIFT_2 = buckets(2e8, overlap_comm=False, offload_optimizer=NOWHERE)
SWIFT_3 = {**FACTORY_3, "zero_quantized_weights": False, "zero_quantized_gradients": False}
SMALL = {**auto(*BATCH), "fp16": auto("enabled"), "bf16": auto("enabled")}
SMALL |= {**optimizer(FULL_ADAMW), **scheduler("WarmupLR", WARMUP)}
LARGE = {**SMALL, **EITHER, **SELDOM}
BFLOAT16 = {**{k: v for k, v in LARGE.items() if k not in EITHER}, "bfloat16": auto("enabled")}
FIXED = {
    **{**FP16, **SELDOM},
    **optimizer({"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}),
    **scheduler("WarmupLR", {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}),
}
FIXED_ZERO = {**CONTIGUOUS, **BILLIONS, "sub_group_size": 1e14, **dict.fromkeys(MODEL_SIZED, 0)}
FIXED_ZERO |= {"stage3_gather_fp16_weights_on_model_save": True}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
LRS = {**ADAM, "optimizer.params.betas": [0.9, 0.95], "scheduler.params.warmup_max_lr": 5e-4}

TEMPLATES = "examples/deepspeed_config_templates/zero_stage"
JSONS = [
    File(
        *(ACCELERATE, "examples/alst_ulysses_sequence_parallelism/sp-alst.ds-config.json"),
        {
            **{**BF16, **zero(3), STEPS: 1, **auto(TOTAL, MICRO)},
            "seq_parallel_communication_data_type": "bf16",
        },
        'seq_parallel_communication_data_type is "bf16", but no sequence',
    ),
    *(
        File(ACCELERATE, f"{TEMPLATES}{name}_config.json", settings, runs(**expected), NO_FP16)
        for name, settings, expected in (
            ("1", {**TEMPLATE, **zero(1, **OVERLAPPED)}, {"stage": 1, **DECAYED}),
            (
                "2_offload",
                {**TEMPLATE, **zero(2, **OVERLAPPED, offload_optimizer=CPU)},
                {"stage": 2, **DECAYED, **offloaded("optimizer")},
            ),
            (
                "3_offload",
                {**TEMPLATE_3, **zero(3, **TEMPLATE_ZERO_3, **BOTH)},
                {"stage": 3, **DECAYED, **SIZED, **offloaded("optimizer", "param")},
            ),
        )
    ),
    *(
        File(ACCELERATE, f"tests/deepspeed/ds_config_zero{name}.json", settings, runs(**expected))
        for name, settings, expected in (
            (
                "2",
                {**TESTED, **zero(2, **OVERLAPPED, offload_optimizer=CPU)},
                {"stage": 2, **ADAM, "scheduler.type": "WarmupLR", **offloaded("optimizer")},
            ),
            (
                "3_model_only",
                {
                    **{**EITHER, MICRO: 1, **SELDOM},
                    **zero(3, overlap_comm=True, offload_param=CPU, **HUGE, **{GATHER: True}),
                },
                {"stage": 3, MICRO: 1, **offloaded("param")},
            ),
        )
    ),
    *(
        File(AXOLOTL, f"deepspeed_configs/{name}.json", settings, verdict)
        for name, settings, verdict in (
            (
                "zero1_torch_compile",
                {**AXOLOTL_EITHER, **INDUCTOR, **zero(1, overlap_comm=True)},
                COMPILED,
            ),
            ("zero3", {**AXOLOTL_EITHER, **zero(3, **AXOLOTL_3)}, runs(3, **NO_LIVE, **SIZED)),
            (
                "zero3_bf16_cpuoffload_all",
                {**AXOLOTL_OFFLOAD, **zero(3, **AXOLOTL_3, **BOTH)},
                runs(3, **NO_LIVE, **offloaded("optimizer", "param")),
            ),
        )
    ),
    *(
        File(FACTORY, f"examples/deepspeed/ds_{name}_config.json", settings, verdict)
        for name, settings, verdict in (
            ("z0", {**FACTORY_EITHER, **zero(0, **FACTORY_2)}, runs(0)),
            (
                "z2_autotp",
                {
                    **{"_comment": "which models it takes", **FACTORY_EITHER},
                    **{**zero(2, **FACTORY_2), "tensor_parallel": {"autotp_size": 2}},
                },
                "round_robin_gradients is true, which is not supported with tensor_parallel = 2",
            ),
            (
                "z3_fp8",
                {**FACTORY_FP8, **zero(3, **FP8_ZERO)},
                "comms_config is not a key of DeepSpeed 0.19.8; did you mean comms_logger? (2) ",
            ),
            (
                "z3_offload",
                {**FACTORY_EITHER, **zero(3, **FACTORY_3, **BOTH)},
                runs(3, **SIZED, **offloaded("optimizer", "param")),
            ),
        )
    ),
    *(
        File(SWIFT, f"swift/config/{name}.json", {**SWIFT_EITHER, **settings}, runs(**expected))
        for name, settings, expected in (
            ("zero2", zero(2, **SWIFT_2), {"stage": 2}),
            (
                "zero3",
                zero(3, **SWIFT_3, offload_optimizer=NOWHERE, offload_param=NOWHERE),
                {"stage": 3, **SIZED},
            ),
        )
    ),
    *(
        File(TRANSFORMERS, f"tests/trainer/distributed/scripts/{name}.json", settings, verdict)
        for name, settings, verdict in (
            ("ds_config_zero2", {**SMALL, **zero(2)}, runs(2, **LRS)),
            ("ds_config_zero3", {**SMALL, **zero(3, **MODEL_SIZED)}, runs(3, **LRS, **SIZED)),
        )
    ),
    *(  # of 2020 to 2025
        File(TRANSFORMERS, f"tests/deepspeed/{name}.json", settings, verdict)
        for name, settings, verdict in (
            (
                "ds_config_zero2_bf16",
                {**BFLOAT16, **zero(2, **buckets(2e8, overlap_comm=True), offload_optimizer=CPU)},
                "bfloat16 is the old name; write bf16",
            ),
            (
                "ds_config_zero3",
                {**FIXED, **zero(3, **FIXED_ZERO, **BOTH)},
                "stage3_gather_fp16_weights_on_model_save is the old name; write stage3_gather_16",
            ),
        )
    ),
]

# Accelerate files. A path in one is that of a file above, beside or below it.
ULYSSES = "examples/alst_ulysses_sequence_parallelism/sp-alst.accelerate-config.yml"
SPLIT = {
    "parallelism_config_sp_size": 2,
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length_is_variable": True,
}
SPLIT_TRL = {
    **{**SPLIT, "parallelism_config_sp_attn_implementation": "flash_attention_2"},
    "parallelism_config_dp_replicate_size": 1,
    "parallelism_config_dp_shard_size": 2,
    "parallelism_config_tp_size": 1,
}
NO_SPLIT = "parallelism_config is not read; remove it, and use --sequence_parallel 2"
HF_CONFIGS = "tests/trainer/distributed/accelerate_configs"
HF_2, HF_3 = (f"tests/trainer/distributed/scripts/ds_config_zero{n}.json" for n in (2, 3))
TRL_3 = {**STANDARD, **NO_OFFLOAD, "zero3_init_flag": True, "zero3_save_16bit_model": True}
TRL_3 |= {"zero_stage": 3}
TRL_2 = {**STANDARD, **NO_OFFLOAD, "zero3_init_flag": False, "zero_stage": 2}
TRL_1 = {**STANDARD, "gradient_accumulation_steps": 1, "zero3_init_flag": False, "zero_stage": 1}
GATHERED = {f"zero_optimization.{GATHER}": True}
MULTI_GPU = {**HERE, "distributed_type": "MULTI_GPU", "gpu_ids": "all", "num_processes": 8}
ONE_GPU = {**HERE, "distributed_type": "NO", "gpu_ids": "all"}
TWO = {"distributed_type": "MULTI_GPU", "num_processes": 2}
CONFIGS = "examples/config_yaml_templates"
TESTS = "tests/test_configs"
HOSTS = {"num_machines": 2, "main_process_ip": "192.168.0.1", "main_process_port": 29500}
YAMLS = [
    File(
        *(ACCELERATE, ULYSSES),
        engaged(
            4,
            {k: v for k, v in ASKED.items() if k not in ("debug", "downcast_bf16")},
            deepspeed_config_file="sp-alst.ds-config.json",
            zero3_init_flag=False,
        ),
        "seq_parallel_communication_data_type is",
    ),
    File(
        *(ACCELERATE, f"{CONFIGS}/deepspeed.yaml"),
        engaged(
            2,
            {},
            deepspeed_config_file="../deepspeed_config_templates/zero_stage1_config.json",
            zero3_init_flag=False,
        ),
        runs(1, 2, **HALF),
        NO_FP16,
    ),
    File(
        *(ACCELERATE, f"{CONFIGS}/fsdp.yaml"),
        {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2},
        NO_FSDP,
    ),
    File(
        ACCELERATE, f"{CONFIGS}/multi_gpu.yaml", {**TWO, "mixed_precision": "bf16"}, runs(None, 2)
    ),
    File(
        *(ACCELERATE, f"{CONFIGS}/multi_node.yaml"),
        {
            **{"distributed_type": "MULTI_GPU", "machine_rank": 0, "main_process_ip": "1234"},
            **{"main_process_port": 9999, "num_machines": 2, "num_processes": 8},
            **{"rdzv_backend": "static", "same_network": False},
        },
        runs(None, 8),
    ),
    File(
        *(ACCELERATE, f"{CONFIGS}/multi_xpu.yaml"),
        {"distributed_type": "MULTI_XPU", "mixed_precision": "bf16", "num_processes": 2},
        "distributed_type is MULTI_XPU; write one of",
    ),
    File(
        *(ACCELERATE, f"{CONFIGS}/single_accelerator.yaml"),
        {"distributed_type": "NO", "mixed_precision": "bf16"},
        runs(None, 1),
    ),
    File(ACCELERATE, f"{TESTS}/0_11_0.yaml", OLD, runs(None, 1)),
    File(
        *(ACCELERATE, f"{TESTS}/0_28_0_mpi.yaml"),
        {
            **{**ASKED, **NO_TPU, "distributed_type": "MULTI_CPU", "main_process_ip": "127.0.0.1"},
            **{"main_process_port": 29500, "num_machines": 4, "num_processes": 16},
            **{"mixed_precision": "no", "use_cpu": True},
            "mpirun_config": {"mpirun_hostfile": "/home/user/hostfile"},
        },
        "mpirun_config is not read; remove it, and start the script on each host with its",
    ),
    File(
        *(ACCELERATE, f"{TESTS}/0_30_0_sagemaker.yaml"),
        "compute_environment: AMAZON_SAGEMAKER\ndebug: false\ndistributed_type: NO\n"
        "mixed_precision: fp16\ndebug: false\nuse_cpu: false\nec2_instance_type: MY_TYPE\n",
        "5:1: duplicate key debug; correct the YAML there",
    ),
    File(
        *(ACCELERATE, f"{TESTS}/0_34_0_fp8.yaml"),
        {**HERE, **TWO, "gpu_ids": "all", "mixed_precision": "fp8", "fp8_config": TE},
        "mixed_precision is fp8; write one of no, bf16, fp16",
    ),
    File(
        *(ACCELERATE, f"{TESTS}/invalid_keys.yaml"),
        {**OLD, "invalid_key": "invalid_value", "another_invalid_key": "another_invalid_value"},
        "unknown key 'another_invalid_key'; remove it",
    ),
    File(
        *(ACCELERATE, f"{TESTS}/latest.yaml"),
        {
            **{**OLD, **ASKED, "gpu_ids": "all", "megatron_lm_config": {}, "commands": None},
            **{"tpu_name": "test-tpu", "tpu_zone": "us-central1-a", "command_file": "a.sh"},
        },
        runs(None, 1),
    ),
    File(
        *(ACCELERATE, f"{TESTS}/validate_launch_cmd.yaml"),
        {
            **{"compute_environment": "LOCAL_MACHINE", "debug": True, "num_processes": 1},
            **{"distributed_type": "NO", "fsdp_config": {"fsdp_sync_module_states": False}},
            "deepspeed_config": {"deepspeed_config_file": "path/to/be/ignored"},
        },
        "distributed_type NO ignores deepspeed_config; write DEEPSPEED, or remove deepspeed_config",
    ),
    File(
        *(SWIFT, "examples/train/multi-node/accelerate/multi_node.yaml"),
        engaged(
            8,
            {
                **{"compute_environment": "LOCAL_MACHINE", "main_training_function": "main"},
                **{**HOSTS, "rdzv_backend": "static", "use_cpu": False, "mixed_precision": "bf16"},
            },
            **{**STANDARD, **NO_OFFLOAD, "gradient_accumulation_steps": 16},
            zero3_init_flag=False,
            zero_stage=3,
        ),
        "NUM_MACHINES is 2, which needs MACHINE_RANK; set each on every host",
    ),
    *(
        File(TRANSFORMERS, f"{HF_CONFIGS}/{name}.yaml", settings, verdict)
        for name, settings, verdict in (
            ("ddp_sp", {**TWO, "num_machines": 1, "parallelism_config": SPLIT}, NO_SPLIT),
            ("deepspeed_zero2", engaged(2, {}, deepspeed_config_file=HF_2), runs(2, 2, **LRS)),
            ("deepspeed_zero3", engaged(2, {}, deepspeed_config_file=HF_3), runs(3, 2, **LRS)),
            (
                "deepspeed_zero3_sp_accelerate",
                engaged(2, {"parallelism_config": SPLIT}, deepspeed_config_file=HF_3),
                NO_SPLIT,
            ),
        )
    ),
    *(
        File(TRL, f"trl/accelerate_configs/{name}.yaml", settings, verdict)
        for name, settings, verdict in (
            ("zero1", engaged(8, HERE, **TRL_1), runs(1, 8, **{STEPS: 1})),
            ("zero2", engaged(8, HERE, **TRL_2), runs(2, 8)),
            ("zero3", engaged(8, HERE, **TRL_3), runs(3, 8, **GATHERED)),
            ("fsdp2", fsdp(8, 2, **NO_TPU, enable_cpu_affinity=False), NO_FSDP),
            ("multi_gpu", MULTI_GPU, runs(None, 8)),
            ("single_gpu", {**ONE_GPU, "num_processes": 8}, "is one process, and num_"),
        )
    ),
    File(
        *(TRL, "examples/accelerate_configs/alst_ulysses_4gpu.yaml"),
        engaged(
            4,
            {**HERE, "parallelism_config": SPLIT_TRL},
            **{k: v for k, v in TRL_3.items() if k not in STANDARD},
            seq_parallel_communication_data_type="bf16",
        ),
        "unknown key 'seq_parallel_communication_data_type' in deepspeed_config; r",
    ),
]
HOSTS_OF = ((8, "cuda"), (2, "cpu"))


def named(files: list[File]) -> Any:
    return pytest.mark.parametrize("file", files, ids=[f"{f.repository}:{f.path}" for f in files])


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend_choice, "parent_command", lambda: ["bash"])
    monkeypatch.setattr(Host, "has_bf16", True)
    for name in ("DS_ACCELERATOR", "ACCELERATE_TORCH_DEVICE"):  # require_accepted sets both
        monkeypatch.setenv(name, "cpu")


def resolved(launch: Launch, device: str) -> ResolvedConfig:
    """What a start without other flags resolves to; a dry run takes cuda where no GPU is."""
    setup = read_setup(parse_flags(["--device", device, "--dry_run"]), launch)
    found = setup.resolve()
    require_accepted(found, "cpu")
    return found


def require(found: ResolvedConfig, processes: int, expected: Mapping[str, Any]) -> None:
    values = leaves(found.config)
    seen = {"stage": found.zero_stage, "processes": processes, "dtype": found.run.dtype} | values
    assert {name: seen.get(name) for name in expected} == expected
    assert AUTO not in values.values()
    if found.config:
        assert values[TOTAL] == values[MICRO] * values[STEPS] * processes


@pytest.mark.parametrize(("processes", "device"), HOSTS_OF)
@named(JSONS)
def test_a_deepspeed_file_resolves_or_is_refused_in_true_words(
    file: File, processes: int, device: str, tmp_path: Path
):
    path = tmp_path / Path(file.path).name
    path.write_text(json.dumps(file.settings))
    launch = Launch(
        world_size=processes,
        local_world_size=processes,
        uses_deepspeed=True,
        deepspeed_config=str(path),
    )
    verdict = file.on_cpus if device == "cpu" and file.on_cpus else file.on_gpus
    if isinstance(verdict, str):
        with pytest.raises(UsageError) as caught:
            resolved(launch, device)
        assert verdict in str(caught.value)
        return
    found = resolved(launch, device)
    require(found, processes, {**verdict, "processes": processes})
    assert isinstance(file.settings, dict)
    literal = {k: v for k, v in leaves(normalize_config(file.settings)).items() if v != AUTO}
    assert {name: leaves(found.config)[name] for name in literal} == literal


def environment(target: Path) -> dict[str, str]:
    """What `accelerate launch` would start its processes with."""
    args = launch_command_parser().parse_args(["--config_file", str(target), "train_pretrain.py"])
    defaults: Any
    args, defaults, has_precision = _validate_launch_command(args)
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    of = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {name: value for name, value in of.items() if "ACCELERATE" in name or "PARALLEL" in name}


def launched(path: Path, gpus: int, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """The launch of run_accelerate.sh with CONFIG_FILE=path on a host with so many GPUs."""
    monkeypatch.setattr(plan, "count_gpus", lambda *visible: gpus)
    monkeypatch.setenv("CONFIG_FILE", str(path))
    started, exports, _ = plan.write_plan(path.with_name("target.yaml"), "auto")
    count, hosts = started["num_processes"], started["num_machines"]
    ranks = {"WORLD_SIZE": count, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": count // hosts}
    exported = {name: str(value) for name, value in {**ranks, **MEETING, **exports}.items()}
    return read_launch({**environment(path.with_name("target.yaml")), **exported})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@named(YAMLS)
def test_an_accelerate_file_is_launched_or_refused_in_true_words(
    file: File, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for other in JSONS:
        if other.repository == file.repository:
            (tmp_path / other.path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / other.path).write_text(json.dumps(other.settings))
    path = tmp_path / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    text = file.settings if isinstance(file.settings, str) else yaml.safe_dump(file.settings)
    path.write_text(text)
    # transformers names its files from the top of its checkout, Accelerate from the YAML's folder.
    monkeypatch.chdir(tmp_path if file.repository == TRANSFORMERS else path.parent)
    verdict = file.on_cpus if device == "cpu" and file.on_cpus else file.on_gpus
    gpus = 8 if device == "cuda" else 0
    if isinstance(verdict, str):
        with pytest.raises(UsageError) as caught:
            resolved(launched(path, gpus, monkeypatch), device)
        assert verdict in str(caught.value)
        return
    launch = launched(path, gpus, monkeypatch)
    require(resolved(launch, device), launch.world_size, verdict)


def test_no_file_is_here_twice():
    names = [(file.repository, file.path) for file in (*JSONS, *YAMLS)]
    assert len(set(names)) == len(names)
