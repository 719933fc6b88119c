"""What the launcher says, read from the environment that every launcher sets.

`accelerate launch` hands its YAML on as ACCELERATE_* variables and nothing else; run_accelerate.sh
adds which file that was. torchrun, the deepspeed launcher and notebook_launcher say no more than
who this process is among how many. Nothing slow is imported.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minimind.config.run_config import CONFIGS
from minimind.config.yaml_files import load_yaml
from minimind.errors import RendezvousError, UsageError
from minimind.runtime.environment import rank_of, require_environment

# The fields of an Accelerate YAML's deepspeed_config that say something a DeepSpeed JSON says too.
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
}
YAML_FLAGS = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "dtype"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", "accumulation_steps"),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", "grad_clip"),
    "ACCELERATE_USE_CPU": ("use_cpu", "device"),
}
MEANT = {"bf16": "bfloat16", "fp16": "float16", "true": "cpu"}
UNSAID = ("", "no", "none", "auto", "false")
SOURCE = "accelerate launch (YAML or flag)"
# What `accelerate launch` takes and does not hand on where it does not engage DeepSpeed.
DROPPED = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
ACCELERATE = re.compile(r"(.*/)?accelerate(-launch|[./]commands[./].+)?")
READ_BY_US = tuple(
    f"ACCELERATE_{part}_" for part in ("DEEPSPEED", "CONFIG", "USE", "GRADIENT", "MIXED", "DYNAMO")
)


@dataclass(frozen=True)
class Launch:
    """Who this process is, and what the Accelerate YAML or `accelerate launch` asked for."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # on this host
    uses_deepspeed: bool = False
    deepspeed_config: str | None = None
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # name: (value, YAML field)
    deepspeed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # JSON key: likewise
    source: str = SOURCE  # of `flags` and `deepspeed`: the YAML, where its path is known
    dropped_file: str | None = (
        None  # deepspeed_config as `accelerate launch`, which drops it, got it
    )


def read_launch(environ: Mapping[str, str]) -> Launch:
    """What `environ` says; a process started by hand is rank 0 of 1."""
    require_environment(environ)
    world_size = int(environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        _require(environ, ("RANK", "LOCAL_RANK"))
    source = environ.get("MINIMIND_CONFIG_FILE") or SOURCE
    local = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or world_size
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in UNSAID:
        raise UsageError(
            f"{source}: dynamo_backend = {backend} compiles the model behind this program's back;"
            " remove it there"
        )
    for engine in ("FSDP", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{engine}", "").lower() == "true":
            raise UsageError(
                f"{source}: distributed_type = {engine} is not supported; write DEEPSPEED there,"
                " with a ZeRO stage for what it does"
            )
    uses_deepspeed = environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") if uses_deepspeed else "none"
    zero = _said(environ, YAML_FIELDS) if uses_deepspeed else {}
    flags = _said(environ, YAML_FLAGS)
    # run_accelerate.sh's, with the field that says so: ACCELERATE_USE_CPU switches DeepSpeed off.
    if by := environ.get("MINIMIND_CPU_BY"):
        flags["device"] = ("cpu", by)
    return Launch(
        rank=rank_of(environ),
        world_size=world_size,
        local_world_size=int(local),
        uses_deepspeed=uses_deepspeed,
        deepspeed_config=None if path.lower() in UNSAID else _beside_project(path),
        flags=flags,
        deepspeed=zero,
        source=source,
    )


def _said(
    environ: Mapping[str, str], names: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for variable, (of_yaml, ours) in names.items():
        value: Any = environ.get(variable, "").strip().lower()
        if value not in UNSAID:
            value = MEANT.get(value, value)
            is_number = ours.endswith("stage")
            found[ours] = (int(value) if is_number and value.isdecimal() else value, of_yaml)
    return found


def _require(environ: Mapping[str, str], names: Sequence[str]) -> None:
    """Nothing, or a RendezvousError when one of several processes lacks one of `names`."""
    missing = " and ".join(name for name in names if not environ.get(name))
    if missing:
        raise RendezvousError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']} in the environment, without {missing}; set what"
            " is missing for every process, or use a launcher (docs/launching.md)"
        )


def _beside_project(path: str) -> str:
    """A DeepSpeed file as a launcher names it: from here, from beside configs/ or within."""
    places = (Path(path), CONFIGS.parent / path, CONFIGS / path)
    return str(next((place for place in places if place.exists()), path))


def with_dropped_file(launch: Launch, asked: str | None, launcher: Sequence[str]) -> Launch:
    """The launch with DeepSpeed engaged by a file that `accelerate launch` was given and drops.

    Without --use_deepspeed, or a YAML of that type, Accelerate trains plain DDP in silence. Its
    --deepspeed_config_file is used all the same; what else of DeepSpeed it drops is a UsageError.
    `asked` is the run's own --deepspeed_config, `launcher` the command line of the parent process.
    """
    started = [n for n, word in enumerate(launcher[:3]) if ACCELERATE.fullmatch(word)]
    if launch.uses_deepspeed or asked == "none" or not started:
        return launch
    given = _flags_of(launcher[started[-1] + 1 :])
    if dropped := next((name for name in DROPPED if name in given), None):
        raise UsageError(
            f"--{dropped} was given to `accelerate launch`, which drops it without --use_deepspeed;"
            " add --use_deepspeed (and remove --multi_gpu), or write it into the DeepSpeed file"
        )
    if file := given.get("deepspeed_config_file"):
        path = _beside_project(file)
        if asked is None:
            return replace(launch, uses_deepspeed=True, deepspeed_config=path, dropped_file=file)
        if Path(asked).resolve() != Path(path).resolve():
            raise UsageError(
                f"--deepspeed_config is {asked} but --deepspeed_config_file of `accelerate launch`"
                f" is {file}; drop one of the two"
            )
    path = given.get("config_file")
    if not asked and path and load_yaml(path, "--config_file").get("deepspeed_config"):
        raise UsageError(
            f"{path}: `accelerate launch` passes over deepspeed_config here, and trains without"
            " DeepSpeed; write distributed_type: DEEPSPEED there (and give neither --multi_gpu nor"
            " --cpu), or remove deepspeed_config"
        )
    return launch


def _flags_of(words: Sequence[str]) -> dict[str, str]:
    """The flags of `accelerate launch` by name, up to the script that it starts."""
    given: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):
            break
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            given[name[2:].replace("-", "_")] = value if equals else following
    return given


def parent_command() -> list[str]:
    """The command line of the process that started this one; empty where there is no /proc."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")


def join_by_hand(environ: MutableMapping[str, str]) -> None:
    """Complete what a process of its own lacks to be rank 0 of 1 in a process group.

    One of several gets nothing, or a RendezvousError that names what it lacks.
    """
    if environ.get("WORLD_SIZE", "1") != "1":
        _require(environ, ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    elif "MASTER_PORT" not in environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environ["MASTER_PORT"] = str(free.getsockname()[1])
        environ["MASTER_ADDR"] = "127.0.0.1"
    environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        environ.setdefault(name, value)


def settle(device: str) -> None:
    """Settle what Accelerate and DeepSpeed would otherwise take from the environment or print."""
    # What the launcher said has been read; left set, some of it overrides our arguments, and
    # ACCELERATE_CONFIG_DS_FIELDS makes Accelerate raise.
    for name in [n for n in os.environ if n.startswith(READ_BY_US)]:
        del os.environ[name]
    # Each reads its own when it is first imported, and may find a GPU where none is asked for.
    os.environ["DS_ACCELERATOR"] = device
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)  # else all ranks would be given the same GPU
    if device == "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    for name in ("DeepSpeed", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed 0.19.8 still calls the old names of two collectives; torch 2.13 says so each time.
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)
