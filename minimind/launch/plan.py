"""Build the YAML for `accelerate launch` from CONFIG_FILE and the environment.

Imports torch only if nvidia-smi is missing.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minimind.errors import RendezvousError, UsageError
from minimind.runtime import disk
from minimind.runtime.environment import (
    GPU_VARIABLES,
    LAUNCHER_VARIABLES,
    address_fault,
    allow_connections,
    require_numbers,
    usable_cores,
    visible_gpu_names,
)
from minimind.runtime.heartbeat import Worker, registered_workers, this_worker
from minimind.runtime.process import NAME
from minimind.runtime.terminal import phase

PROJECT = Path(__file__).resolve().parents[2]  # the checkout, or site-packages
# Device files of the drivers of GPUs that CUDA_VISIBLE_DEVICES names (NVIDIA, its Jetsons, AMD,
# WSL 2), and of others (Ascend, Intel): nvidia-smi may be missing, and knows no others.
DRIVERS = [Path(f"/dev/{name}") for name in ("nvidiactl", "nvmap", "kfd", "dxg")]
OTHER_DRIVERS = [Path("/dev/davinci_manager"), Path("/dev/dri/renderD128")]
LOCAL = "LOCAL_MACHINE"
PRECISIONS = ("no", "bf16", "fp16")
# Fields of the YAML that Accelerate does not get: they are exported, or ask for nothing here.
ANSWERED = ("gpu_ids", "dynamo_backend", "dynamo_config", "parallelism_config")
TYPES = ("DEEPSPEED", "MULTI_GPU", "MULTI_CPU", "NO")
SCRATCH, OWNER = "minimind-launch-", "owner"  # prefix of a command's folder, and a file there
RESTARTS = {  # variable: (allowed values, default); minimind/launch/restart.py reads them
    "MAX_RESTARTS": (range(10_001), 0),
    "RESTART_WAIT": (range(1, 301), 5),  # seconds before the first restart
}
OTHER_VERSIONS = ("ipex_config", "use_xpu", "tp_config")  # keys that Accelerate 1.15 has not
PER_HOST = "start the script on each host with its MACHINE_RANK"
# Fields that name what this script does not do, and what to do instead of writing them.
UNREAD = {
    "mpirun_config": PER_HOST,
    "fsdp_config": "write DEEPSPEED, with a ZeRO stage that does the same",
    "megatron_lm_config": "write DEEPSPEED, with a ZeRO stage that does the same",
    "deepspeed_hostfile": PER_HOST,
    "deepspeed_exclusion_filter": "name the GPUs of each host in its CUDA_VISIBLE_DEVICES",
    "deepspeed_inclusion_filter": "name the GPUs of each host in its CUDA_VISIBLE_DEVICES",
}
# Fields that change nothing in a run; those with a value that asks for something are named.
WITHOUT_EFFECT = (
    *("debug", "main_training_function", "fp8_config", "downcast_bf16"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
    *("command_file", "commands"),
    *("zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
)
NOTHING_ASKED = ("", "no", "none", "false", "main", "standard", "[]", "{}")
DEEPSPEED_FIELDS = (  # `accelerate launch` ignores others silently
    "deepspeed_config_file",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
    "deepspeed_moe_layer_cls_names",
)


class LaunchSettings:
    """Values of the environment, with those of the YAML as defaults."""

    def __init__(self, document: Mapping[str, Any], path: str, environ: Mapping[str, str]) -> None:
        self.document = document
        self.path = path
        self.environ = environ
        self.overridden: list[str] = []

    def text(self, variable: str, field: str) -> tuple[str, str]:
        """Return (value, its source); the value is empty if not set."""
        value = self.environ.get(variable, "")
        document_value = self.document.get(field)
        is_auto = document_value in (None, "auto", -1)  # left to `plan`
        literal = "" if is_auto else str(document_value)
        if value and literal and value != literal:
            self.overridden.append(
                f"{variable}={value} overrides {field}: {literal} of {self.path}"
            )
        return (value, variable) if value else (literal, f"{field} in {self.path}")

    def number(self, variable: str, field: str, allowed: range) -> int | None:
        """Return an int in `allowed`, None if not set; raise UsageError otherwise."""
        value, source = self.text(variable, field)
        if value and not (value.isdecimal() and int(value) in allowed):
            raise UsageError(
                f"{source} is {value}, not a whole number from {allowed[0]} to {allowed[-1]};"
                " change it"
            )
        return int(value) if value else None


def distributed_type(settings: LaunchSettings) -> str:
    """Return the distributed_type; raise UsageError if the YAML cannot be launched as written."""
    from minimind.config.launcher_env import DROPPED  # it imports yaml, which may be missing

    document, path = settings.document, settings.path
    environment = document.get("compute_environment", LOCAL)
    if environment != LOCAL:
        raise UsageError(
            f"{path}: compute_environment is {environment}; write {LOCAL}, the only one that this"
            " script starts"
        )
    refuse_unknown(document, fields(), path, "")
    kind = document.get("distributed_type", "missing")
    kind = "NO" if kind is False else kind  # how YAML reads a bare NO
    if kind not in TYPES:
        raise UsageError(f"{path}: distributed_type is {kind}; write one of {', '.join(TYPES)}")
    if kind != "DEEPSPEED" and document.get("deepspeed_config"):
        raise UsageError(
            f"{path}: distributed_type {kind} ignores deepspeed_config; write DEEPSPEED, or"
            " remove deepspeed_config"
        )
    block = document.get("deepspeed_config")
    if not isinstance(block, dict | None):
        raise UsageError(
            f"{path}: deepspeed_config is {block!r}, not `name: value` lines; write"
            " deepspeed_config_file: PATH inside it"
        )
    known = (*DEEPSPEED_FIELDS, *DROPPED)
    refuse_unknown(block or {}, known, path, " in deepspeed_config")
    refuse_unread(document, path)
    return kind


def refuse_unread(document: Mapping[str, Any], path: str) -> None:
    """Raise UsageError for a precision, a compiler or a division that no process would apply."""
    from minimind.config.launcher_env import compiled_by, divided_by  # they import yaml

    precision = document.get("mixed_precision")
    if precision not in (None, False) and str(precision).lower() not in PRECISIONS:
        raise UsageError(
            f"{path}: mixed_precision is {precision}; write one of {', '.join(PRECISIONS)}"
        )
    if document.get("fp16") and precision not in (None, "fp16"):
        raise UsageError(
            f"{path}: fp16 is {document['fp16']}, which Accelerate ignores as mixed_precision is"
            f" {precision}; remove fp16, or write mixed_precision: fp16"
        )
    dynamo = document.get("dynamo_config")
    backends = [document.get("dynamo_backend")]
    backends += [dynamo.get("dynamo_backend")] if isinstance(dynamo, Mapping) else []
    for backend in backends:
        if fault := compiled_by(str(backend or "no")):
            raise UsageError(f"{path}: {fault}")
    asked = asked_fields(document)
    for name, remedy in UNREAD.items():
        if name in asked:
            raise UsageError(f"{path}: {name} is not read; remove it, and {remedy}")
    parallelism = document.get("parallelism_config")
    if isinstance(parallelism, Mapping) and (fault := divided_by(parallelism)):
        raise UsageError(f"{path}: {fault}")


def asked_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the YAML, and of its deepspeed_config, with a value that asks for something."""
    given = {**document, **(document.get("deepspeed_config") or {})}
    return {name: v for name, v in given.items() if str(v).lower() not in NOTHING_ASKED}


def refuse_unknown(names: Iterable[Any], known: Sequence[str], path: str, where: str) -> None:
    """Raise UsageError with the closest known name for a key that Accelerate does not know."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.8)
            is_typo = close and name not in OTHER_VERSIONS
            remedy = f"did you mean {close[0]}?" if is_typo else "remove it"
            raise UsageError(f"{path}: unknown key {name!r}{where}; {remedy}")


def fields() -> list[str]:
    """Return the keys of Accelerate's YAML, parsed from its source; it rejects others."""
    spec = find_spec("accelerate")
    assert spec is not None  # checked by require_installed
    source = Path(str(spec.origin)).parent / "commands" / "config" / "config_args.py"
    classes = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef)]
    lines = [line for n in classes if n.name in ("BaseConfig", "ClusterConfig") for line in n.body]
    named = [line.target for line in lines if isinstance(line, ast.AnnAssign)]
    return [n.id for n in named if isinstance(n, ast.Name)] + ["fp16", "dynamo_backend"]


def plan(settings: LaunchSettings, gpus: int) -> dict[str, Any]:
    """Return the YAML to launch, with processes, hosts and port filled in; port 0 is any free."""
    kind = distributed_type(settings)
    each = 1 if kind == "NO" else gpus or 2
    machines = settings.number("NUM_MACHINES", "num_machines", range(1, 10_001)) or 1
    requested = settings.number("NUM_PROCESSES", "num_processes", range(1, 1_000_001))
    if kind == "NO" and (requested or 1) > 1 and not settings.environ.get("NUM_PROCESSES"):
        raise UsageError(
            f"{settings.path}: distributed_type NO is one process, and num_processes is"
            f" {requested}; write MULTI_GPU, or num_processes: 1"
        )
    processes = requested or each * machines
    if processes % machines:
        raise UsageError(
            f"NUM_PROCESSES = {processes} (all hosts) is not divisible by NUM_MACHINES ="
            f" {machines}; change one"
        )
    rank = settings.number("MACHINE_RANK", "machine_rank", range(machines))
    ip, ip_source = settings.text("MAIN_IP", "main_process_ip")
    if ip and (fault := address_fault(ip)):
        raise UsageError(f"{ip_source} {fault}")
    port = settings.number("MAIN_PORT", "main_process_port", range(65_536))
    needed = {"MACHINE_RANK": rank is not None, "MAIN_IP": ip, "MAIN_PORT": port}
    missing = " and ".join(name for name, is_set in needed.items() if not is_set)
    if machines > 1 and missing:
        raise UsageError(
            f"NUM_MACHINES is {machines}, which needs {missing}; set each on every host"
        )
    launcher = asked_fields(settings.document).get("deepspeed_multinode_launcher")
    if machines > 1 and launcher:
        raise UsageError(
            f"{settings.path}: deepspeed_multinode_launcher is {launcher}, which is not started;"
            f" write standard, and {PER_HOST}"
        )
    kept = {key: value for key, value in settings.document.items() if key not in ANSWERED}
    if kept.get("mixed_precision") is False:  # how YAML reads a bare no
        kept["mixed_precision"] = "no"
    return {
        "same_network": True,  # without it Accelerate requires a rendezvous service
        **kept,
        # For MULTI_CPU, NO and use_cpu Accelerate starts one process and forwards no signals;
        # MULTI_GPU makes it start torchrun, also on CPUs.
        "distributed_type": "DEEPSPEED" if kind == "DEEPSPEED" else "MULTI_GPU",
        "use_cpu": False,
        "num_processes": processes,
        "num_machines": machines,
        "machine_rank": rank or 0,
        "main_process_ip": ip or None,
        "main_process_port": port or 0,
    }


def count_gpus(visible: str | None, source: str = "CUDA_VISIBLE_DEVICES") -> int:
    """Count the GPUs of this host that `visible` lists (None: all).

    Raise RendezvousError if the list is malformed or names a GPU that is not there.
    """
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return 1  # which no variable hides
    names = None if visible is None else visible_gpu_names(visible, source)
    if names == []:
        return 0
    try:
        command = ["nvidia-smi", "--list-gpus"]
        asked = subprocess.run(command, capture_output=True, text=True)
        listed, has_failed = asked.stdout, asked.returncode != 0
    except OSError:
        listed, has_failed = "", True
    drivers = DRIVERS if names else DRIVERS + OTHER_DRIVERS
    if has_failed and any(disk.exists(driver) for driver in drivers):
        if names:
            return len(names)
        from minimind.runtime.device import accelerator  # torch is slow, but the only way to know

        return accelerator().count()
    gpus = len(re.findall("^GPU", listed, re.MULTILINE))
    uuids = re.findall(r"UUID: ([^)]+)", listed)
    for name in names or []:
        if name.isdecimal():
            is_there = int(name) < gpus or "MIG-" in listed
        else:  # drivers before 470 name a slice by its GPU, MIG-GPU-.../1/0, and do not list it
            is_there = name.startswith("MIG-GPU-") or sum(u.startswith(name) for u in uuids) == 1
        if not is_there:
            there = f"nvidia-smi lists {gpus} GPU{'s' if gpus > 1 else ''}"
            raise RendezvousError(
                f"{source} is {visible!r}, and {there if gpus else 'this host has no GPU driver'};"
                " correct it, or unset it"
            )
    return gpus if names is None else len(names)


def free_port(port: int) -> int:
    """Return `port`, or a free one for 0, after binding and releasing it."""
    try:
        with socket.socket() as probe:
            # torch sets it too: connections of a launch that was lost keep its port for a minute.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return probe.getsockname()[1]
    except OSError as error:
        raise RendezvousError(f"MAIN_PORT={port}: {error.strerror}; choose another") from error


def take(scratch: Path) -> None:
    """Record that this process has the folder, and remove those of launchers that were killed.

    The workers of a killed launcher use its folder until they have ended.
    """
    if not scratch.name.startswith(SCRATCH):
        return
    (scratch / OWNER).write_text(json.dumps(asdict(this_worker(0))))
    for other in disk.matching(scratch.parent, f"{SCRATCH}*"):
        with suppress(OSError, ValueError, TypeError):  # of another user, or not recorded yet
            script = Worker(**json.loads((other / OWNER).read_text()))
            launches = [path for path in disk.entries(other) if disk.is_dir(path)]
            users = [script, *(one for here in launches for one in registered_workers(here))]
            if script.is_here() and all(one.state() == "gone" for one in users):
                shutil.rmtree(other)


def require_installed(environ: Mapping[str, str]) -> None:
    """Raise UsageError if this Python does not have Accelerate."""
    if find_spec("accelerate") and find_spec("yaml"):
        return
    setup = f"make -C '{PROJECT}' setup"
    if not disk.exists(PROJECT / "Makefile"):
        remedy = "install it there"
    elif environ.get("PYTHON"):
        remedy = "unset PYTHON to use the environment of this project"
    elif disk.exists(PROJECT / ".venv"):  # incomplete; -B rebuilds it even if up to date
        remedy = setup.replace("make", "make -B")
    else:
        remedy = f"{setup} installs into {PROJECT / '.venv'}"
    raise UsageError(f"accelerate is not installed for {sys.executable}; {remedy}")


def write_plan(target: Path, device: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Write the YAML to `target`; return its content, variables to export and a start message."""
    require_numbers(
        {name: value for name, value in os.environ.items() if value}, LAUNCHER_VARIABLES
    )
    import yaml  # after `require_installed`

    from minimind.config.run_config import CONFIGS
    from minimind.config.yaml_files import load_yaml

    take(target.parent.parent)
    path = os.environ.get("CONFIG_FILE") or str(CONFIGS / "accelerate_config.yaml")
    settings = LaunchSettings(load_yaml(path, "CONFIG_FILE"), path, os.environ)
    exports: dict[str, Any] = {"MINIMIND_CONFIG_FILE": path}
    for variable, (allowed, default) in RESTARTS.items():
        value = settings.number(variable, "", allowed)  # no field of the YAML
        exports[variable] = default if value is None else value
    for field, value in (("use_cpu", True), ("distributed_type", "MULTI_CPU")):
        if settings.document.get(field) == value:
            exports["MINIMIND_CPU_BY"] = field
            device = "cpu"
    visible, source = os.environ.get("CUDA_VISIBLE_DEVICES"), "CUDA_VISIBLE_DEVICES"
    ids = settings.document.get("gpu_ids")
    ids = ",".join(map(str, ids)) if isinstance(ids, list) else ids
    if visible is None and ids not in (None, "all"):
        visible, source = str(ids), f"gpu_ids in {path}"
        exports["CUDA_VISIBLE_DEVICES"] = visible
    gpus = 0
    if device != "cpu":
        for variable in GPU_VARIABLES:
            visible_gpu_names(os.environ.get(variable, ""), variable)
        with phase("counting the GPUs", after=0.5):
            gpus = count_gpus(visible, source)
    if not gpus:
        exports["DS_ACCELERATOR"] = "cpu"
    launched = plan(settings, gpus)
    allow_connections(launched["num_processes"])  # or end here
    if launched["machine_rank"] == 0:  # the other hosts connect to it
        launched["main_process_port"] = free_port(launched["main_process_port"])
    target.write_text(yaml.safe_dump(launched), encoding="utf-8")
    if idle := [name for name in asked_fields(settings.document) if name in WITHOUT_EFFECT]:
        settings.overridden.append(f"no effect here: {', '.join(idle)} of {path}")
    for message in settings.overridden:
        print(f"{NAME}: {message}", file=sys.stderr)
    if not os.environ.get("OMP_NUM_THREADS"):
        here = launched["num_processes"] // launched["num_machines"]
        exports["OMP_NUM_THREADS"] = max(1, usable_cores() // here)
    return launched, exports, starting(launched, gpus, path)


def starting(launched: Mapping[str, Any], gpus: int, path: str) -> str:
    """Return the start message: processes, devices, YAML, and the Python if not .venv's."""
    count, hosts = launched["num_processes"], launched["num_machines"]
    processes = f"{count} process{'es' if count > 1 else ''}"
    device = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the CPU"
    on = f"{hosts} hosts, this one is host {launched['machine_rank']}," if hosts > 1 else ""
    own = Path(sys.prefix) == PROJECT / ".venv"
    near = os.path.relpath(path)
    source = (path if near.startswith("..") else near) + ("" if own else f", {sys.executable}")
    return " ".join(f"starting {processes} on {on} {device} ({source}) ...".split())
