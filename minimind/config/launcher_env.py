"""Rank, world size and Accelerate settings from the environment variables of the launcher.

`accelerate launch` passes its YAML only as ACCELERATE_* variables; run_accelerate.sh adds the path
of that file. torchrun, the deepspeed launcher and notebook_launcher set only rank and world size.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minimind.config.flags import ALONE
from minimind.config.run_config import CONFIGS
from minimind.config.yaml_files import load_yaml
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.environment import rank_of, require_environment
from minimind.runtime.urls import masked_text

# Variable -> (field of the Accelerate YAML's deepspeed_config, key of the DeepSpeed JSON).
YAML_FIELDS = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", "zero_optimization.stage"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
        "offload_optimizer_device",
        "zero_optimization.offload_optimizer.device",
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
        "offload_param_device",
        "zero_optimization.offload_param.device",
    ),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": (
        "zero3_save_16bit_model",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
}
YAML_FLAGS = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "dtype"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", "accumulation_steps"),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", "grad_clip"),
    "ACCELERATE_USE_CPU": ("use_cpu", "device"),
}
YAML_VALUES = {
    "dtype": {"bf16": "bfloat16", "fp16": "float16"},
    "device": {"true": "cpu"},
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": {"true": True},
}
UNSET = ("", "no", "none", "auto", "false")
SOURCE = "accelerate launch (YAML or flag)"
# Flags that `accelerate launch` accepts and drops when it does not enable DeepSpeed.
DROPPED = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
# The sizes of Accelerate's parallelism_config, and the flag that divides by each here.
DIVISIONS = {
    "SP": "--sequence_parallel {}",
    "CP": "--sequence_parallel {}",
    "TP": "--tensor_parallel {}",
    "DP_SHARD": "",  # what a ZeRO stage does
    "DP_REPLICATE": "",  # what all processes do without it
}
ACCELERATE = re.compile(r"(.*/)?accelerate(-launch|[./]commands[./].+)?")
# Settings of torch's allocators; torch 2.9 deprecates the others, which have precedence.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
READ_BY_US = (
    *(f"ACCELERATE_{n}_" for n in ("DEEPSPEED", "CONFIG", "USE", "GRADIENT", "MIXED", "DYNAMO")),
    *("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "MPI_LOCAL"),  # of tasks, by MPI
)


@dataclass(frozen=True)
class Launch:
    """Rank and world size of this process, and the settings of `accelerate launch`."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # on this host
    local_rank: int = 0
    uses_deepspeed: bool = False
    deepspeed_config: str | None = None
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # name: (value, YAML field)
    deepspeed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # JSON key: likewise
    source: str = SOURCE  # of `flags` and `deepspeed`: the path of the YAML if known
    dropped_config: str | None = None  # --deepspeed_config_file that `accelerate launch` dropped
    is_elsewhere: bool = False  # rehearsed here for another machine


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read the launcher's settings from `environ`; without a launcher, rank 0 of 1."""
    require_environment(environ)
    world_size = int(environ.get("WORLD_SIZE", "1"))
    source = environ.get("MINIMIND_CONFIG_FILE") or SOURCE
    local = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or world_size
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    divided = environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
    if fault := compiled_by(backend) or (divided_by(environ) if divided else ""):
        raise UsageError(f"{source}: {fault}")
    for engine in ("FSDP", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{engine}", "").lower() == "true":
            raise UsageError(
                f"{source}: distributed_type = {engine} is not supported; write DEEPSPEED there,"
                " with a ZeRO stage that does the same"
            )
    uses_deepspeed = environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") if uses_deepspeed else "none"
    zero = _read_settings(environ, YAML_FIELDS) if uses_deepspeed else {}
    stage, field = zero.get("zero_optimization.stage", (0, ""))
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"{source}: {field} is {stage}; write 0, 1, 2 or 3")
    flags = _read_settings(environ, YAML_FLAGS)
    # run_accelerate.sh's, with the field that says so: ACCELERATE_USE_CPU switches DeepSpeed off.
    if by := environ.get("MINIMIND_CPU_BY"):
        flags["device"] = ("cpu", by)
    return Launch(
        rank=rank_of(environ),
        world_size=world_size,
        local_world_size=int(local),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        uses_deepspeed=uses_deepspeed,
        deepspeed_config=None if path.lower() in UNSET else _find_config(path),
        flags=flags,
        deepspeed=zero,
        source=source,
    )


def compiled_by(backend: str) -> str:
    """Fault of a dynamo backend of Accelerate; empty if there is none."""
    if backend.lower() in UNSET:
        return ""
    return (
        f"dynamo_backend = {backend} compiles the model outside this program's control; remove it"
        " there"
    )


def divided_by(sizes: Mapping[str, Any]) -> str:
    """Fault of a parallelism_config, as YAML or as variables; empty if it divides nothing."""
    upper = {str(name).upper(): str(size) for name, size in sizes.items()}
    found = {}
    for kind in DIVISIONS:
        names = (f"PARALLELISM_CONFIG_{kind}_SIZE", f"{kind}_SIZE")
        found[kind] = next((upper[name] for name in names if name in upper), "1")
    divided = {kind: size for kind, size in found.items() if size not in ("1", "None")}
    if not divided:
        return ""
    flags = [DIVISIONS[kind].format(size) for kind, size in divided.items() if DIVISIONS[kind]]
    use = f"use {' '.join(flags)}" if flags else "write a ZeRO stage"
    if divided.keys() == {"DP_REPLICATE"}:
        use = "the processes divide the rows without it"
    return f"parallelism_config is not read; remove it, and {use}"


def planned_launch(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """Return the launch of a dry run: without a launcher, of the processes that one would start."""
    if "WORLD_SIZE" in environ:
        return launch
    value, source = environ.get("NUM_PROCESSES", ""), "NUM_PROCESSES"
    if not value and (path := environ.get("CONFIG_FILE")):
        value, source = load_yaml(path, "CONFIG_FILE").get("num_processes"), path
    if value in ("", None, "auto"):
        return launch
    if not (str(value).isdecimal() and 0 < int(value)):
        raise UsageError(f"{source}: {value!r} is not a number of processes; change it")
    return replace(launch, world_size=int(value))


def _read_settings(
    environ: Mapping[str, str], names: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[Any, str]]:
    settings: dict[str, tuple[Any, str]] = {}
    for variable, (yaml_field, ours) in names.items():
        value: Any = environ.get(variable, "").strip().lower()
        if value not in UNSET:
            value = YAML_VALUES.get(ours, {}).get(value, value)
            is_number = ours.endswith("stage")
            settings[ours] = (int(value) if is_number and value.isdecimal() else value, yaml_field)
    return settings


def _find_config(path: str) -> str:
    """Find a DeepSpeed file relative to the current directory, the project or configs/."""
    places = (Path(path), CONFIGS.parent / path, CONFIGS / path)
    return str(next((place for place in places if disk.exists(place)), path))


def with_dropped_config(launch: Launch, own_config: str | None, launcher: Sequence[str]) -> Launch:
    """Return the launch with DeepSpeed enabled by a config file that `accelerate launch` drops.

    Without --use_deepspeed, or a YAML of type DEEPSPEED, Accelerate trains plain DDP silently. Its
    --deepspeed_config_file is used anyway; any other dropped DeepSpeed flag is a UsageError.
    `own_config` is the run's --deepspeed_config, `launcher` the command line of the parent process.
    """
    started = [n for n, word in enumerate(launcher[:3]) if ACCELERATE.fullmatch(word)]
    if launch.uses_deepspeed or own_config == "none" or not started:
        return launch
    flags = _flags_of(launcher[started[-1] + 1 :])
    if dropped := next((name for name in DROPPED if name in flags), None):
        raise UsageError(
            f"--{dropped} was passed to `accelerate launch`, which drops it without"
            " --use_deepspeed; add --use_deepspeed (and remove --multi_gpu), or write it into the"
            " DeepSpeed file"
        )
    if file := flags.get("deepspeed_config_file"):
        path = _find_config(file)
        if own_config is None:
            return replace(launch, uses_deepspeed=True, deepspeed_config=path, dropped_config=file)
        if disk.resolve(Path(own_config)) != disk.resolve(Path(path)):
            raise UsageError(
                f"--deepspeed_config is {own_config} but --deepspeed_config_file of"
                f" `accelerate launch` is {file}; remove one of them"
            )
    path = flags.get("config_file")
    if not own_config and path and load_yaml(path, "--config_file").get("deepspeed_config"):
        raise UsageError(
            f"{path}: `accelerate launch` ignores deepspeed_config here, and trains without"
            " DeepSpeed; write distributed_type: DEEPSPEED there (and give neither --multi_gpu nor"
            " --cpu), or remove deepspeed_config"
        )
    return launch


def _flags_of(words: Sequence[str]) -> dict[str, str]:
    """Parse the flags of `accelerate launch` up to the name of the script."""
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):
            break
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            flags[name[2:].replace("-", "_")] = value if equals else following
    return flags


def parent_command() -> list[str]:
    """Return the command line of the parent process; empty if it cannot be read."""
    import psutil

    with suppress(psutil.Error):
        return psutil.Process(os.getppid()).cmdline()
    return []


def set_rendezvous_defaults(environ: MutableMapping[str, str]) -> None:
    """Set the rendezvous variables for a process group of one; several have theirs."""
    if environ.get("WORLD_SIZE", "1") == "1" and "MASTER_PORT" not in environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environ["MASTER_PORT"] = str(free.getsockname()[1])
        environ["MASTER_ADDR"] = "127.0.0.1"
    environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        environ.setdefault(name, value)


def set_allocator_defaults(environ: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its segments, which avoids fragmentation, and let that of the
    CPU ask for huge pages, of which each step faults fewer.

    Call before torch is imported, since it reads the variables once. Settings of the user are kept.
    """
    if not any(environ.get(name) for name in ALLOCATOR):
        environ[ALLOCATOR[0]] = "expandable_segments:True"
    environ.setdefault(HUGE_PAGES, "1")


def _mask(record: logging.LogRecord) -> bool:
    """Mask a line of a log; a filter, which lets every line pass."""
    record.msg, record.args = masked_text(record.getMessage()), ()
    return True


def configure_libraries(device: str) -> None:
    """Set the environment variables, log levels and warnings of Accelerate and DeepSpeed."""
    # Already read by read_launch(). Some would override our arguments. Accelerate raises if
    # ACCELERATE_CONFIG_DS_FIELDS is set, and both libraries if MPI counts other ranks than torch.
    for name in [n for n in os.environ if n.startswith(READ_BY_US)]:
        del os.environ[name]
    # Read at import; without them both libraries may select a GPU in a CPU run.
    os.environ["DS_ACCELERATOR"] = device
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)  # it would assign the same GPU to all ranks
    if device == "cpu" or device in ALONE:
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
    for name in ("DeepSpeed", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(name).addFilter(_mask)  # DeepSpeed logs its whole configuration
    # DeepSpeed 0.19.8 still calls the old names of two collectives; torch 2.13 warns each time.
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)
