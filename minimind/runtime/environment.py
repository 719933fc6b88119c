"""Checks of the environment variables of the rendezvous, and what else a process is given.

Launchers set them, and leftovers of other launchers may remain in a shell. torch, Accelerate and
DeepSpeed raise tracebacks for bad values or wait for ranks that do not exist, so the variables are
checked before these libraries are imported. Standard library only.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from minimind.errors import RendezvousError, StorageError
from minimind.runtime.process import LAUNCHER_PID, SCRIPT_PID, SWEEP_PID

COUNT, INDEX = range(1, 2**31), range(2**31)
LAUNCHER_VARIABLES = ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")  # also read by launchers
RANGES = {
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), COUNT),
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK"), INDEX),
    "MASTER_PORT": range(1, 65_536),
    **dict.fromkeys(LAUNCHER_VARIABLES, COUNT),
    **dict.fromkeys((SCRIPT_PID, LAUNCHER_PID, SWEEP_PID), COUNT),
}
CHOICES = {"TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL")}
# Launchers that start tasks without torch's variables: those with the number of tasks, of which the
# first that is set counts; those with the number of a task, and with its number on its host. Some
# launchers also set those of the last two rows.
SLURM, STEP_SIZE, PMIX = "Slurm (srun)", "SLURM_STEP_NUM_TASKS", ("PMIX_RANK", "PMIX_NAMESPACE")
TASKS = {
    SLURM: ((STEP_SIZE, "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_PROCID", "SLURM_LOCALID")),
    "Flux": (("FLUX_JOB_SIZE",), ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID")),
    "LSF (jsrun)": (("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK")),
    "Open MPI (mpirun)": (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    "MVAPICH (mpirun)": (
        ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPIRUN_NPROCS"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPIRUN_RANK"),
    ),
    "PALS (mpiexec)": (("PALS_SIZE", "PALS_LOCAL_SIZE"), ("PALS_RANKID", "PALS_LOCAL_RANKID")),
    "Intel MPI or MPICH (mpiexec)": (
        ("PMI_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("PMI_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ),
    "PMIx": ((), ("PMIX_RANK",)),
}
# From here on the ids of steps that srun did not start: the batch script, the shell of salloc.
SPECIAL_STEPS = 0xFFFF_FFF0
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
HIDDEN = ("", "-1", "NoDevFiles")  # their values that hide every GPU
# NCCL runs only with one of them; without, its variables may be meant for other hosts.
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# Connections of a process to each other one at most: gloo makes one per group (of all ranks, for
# decisions, saves, compilation, and of ZeRO on CPUs), and the host of a store two.
CONNECTIONS, FEWEST_CONNECTIONS, OTHER_FILES = 8, 2, 512
# A host alone, or with what belongs to a URL around it: a scheme, the brackets of IPv6, a port.
ADDRESS = re.compile(
    r"(?:[a-z][a-z0-9+.-]*://)?(?:\[([0-9a-f:.%\w]+)\]|([\w.-]+))(?::([0-9]{1,5}))?/?",
    re.IGNORECASE,
)
NAME = re.compile(r"[^:]*[a-z][^:]*", re.IGNORECASE)  # no number
NAME_TIMEOUT = 60  # seconds
COMMAND_TIMEOUT = 20.0  # seconds; nvidia-smi takes several without the persistence daemon


def rank_of(environ: Mapping[str, str]) -> int:
    """RANK, or 0 where it is unset or malformed; `require_environment` reports the latter."""
    value = environ.get("RANK", "0")
    return int(value) if _is_in(value, INDEX) else 0


@contextmanager
def environment_kept() -> Iterator[None]:
    """Undo what the block changes of the environment variables."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def module_path() -> dict[str, str]:
    """Variables by which `python -m` imports what this process does, whichever folder it is in."""
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def usable_cores() -> int:
    """CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def peak_bytes() -> int:
    """Most bytes of memory that this process had so far.

    On Linux ru_maxrss may be that of the process which started this one, so it is asked only where
    the kernel does not tell VmHWM.
    """
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        if found := re.search(r"VmHWM:\s+(\d+) kB", file.read()):
            return int(found[1]) * 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


def allow_connections(processes: int) -> None:
    """Raise the limit of open files of this process to what a run of `processes` needs.

    It is 1,024 by default, and gloo connects every pair of ranks. Raise RendezvousError if it
    cannot be high enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = CONNECTIONS * processes + OTHER_FILES
    if resource.RLIM_INFINITY in (soft, hard):
        highest = needed
    elif hard < FEWEST_CONNECTIONS * processes:
        raise RendezvousError(
            f"{processes:,} processes need about {needed:,} open files each, and the hard limit of"
            f" this host is {hard:,} (ulimit -Hn); raise it in /etc/security/limits.conf, or for a"
            " container by --ulimit nofile"
        )
    else:
        highest = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


def command_output(command: Sequence[str]) -> str:
    """Return the standard output of a command; "" if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def require_environment(environ: Mapping[str, str]) -> None:
    """Raise RendezvousError for a malformed or contradictory variable, StorageError for TMPDIR."""
    require_numbers(environ, RANGES)
    for name, choices in CHOICES.items():
        if environ.get(name, choices[0]).upper() not in choices:
            raise RendezvousError(
                f"{name} is {environ[name]!r} in the environment, not one of {', '.join(choices)};"
                " unset it"
            )
    _require_torchs_variables(environ)
    _require_ranks(environ)
    _require_address(environ)
    _require_interfaces(environ)
    _require_temporary_folder(environ)


def address_fault(address: str) -> str:
    """What is wrong with the form of a host's name or IP address, and the remedy; "" if nothing."""
    host, colon, scope = address.partition("%")
    with suppress(ValueError):
        if ipaddress.ip_address(host) and bool(colon) == bool(scope):
            return ""
    if not (parts := ADDRESS.fullmatch(address)):
        return f"is {address!r}, no name and no IP address of a host; correct it"
    host, port = parts[1] or parts[2], parts[3]
    if host == address:
        return ""
    without = " without a scheme, brackets or a port"
    return f"is {address!r}; write {host},{without}{f', and {port} as the port' if port else ''}"


def _require_address(environ: Mapping[str, str]) -> None:
    """Raise RendezvousError for a MASTER_ADDR that ranks would wait for in vain."""
    address = environ.get("MASTER_ADDR", "localhost")
    if not address.strip():
        raise RendezvousError("MASTER_ADDR is empty in the environment; unset it")
    if fault := address_fault(address):
        raise RendezvousError(f"MASTER_ADDR in the environment {fault}")
    if environ.get("WORLD_SIZE", "1") == "1":  # there is nobody to meet
        return
    end, is_told = time.monotonic() + NAME_TIMEOUT, False
    while True:
        try:
            socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            number = error.errno if isinstance(error, socket.gaierror) else None
            # A server of names that does not answer may answer later; torch asks again.
            if number == socket.EAI_AGAIN:
                return
            # A pod or a container has a name once it has started.
            may_come = number is not None and NAME.fullmatch(address)
            if not may_come or time.monotonic() >= end:
                reason = getattr(error, "strerror", None) or "it is not a name of a host"
                raise RendezvousError(
                    f"MASTER_ADDR is {address!r} in the environment, and this host knows no such"
                    f" address ({reason}); correct it"
                ) from error
        if not is_told:
            what = f"no host of the name {address} (MASTER_ADDR) is known yet"
            print(f"{what}; asking for {NAME_TIMEOUT} s", file=sys.stderr, flush=True)
        is_told = True
        time.sleep(1)


def _require_torchs_variables(environ: Mapping[str, str]) -> None:
    """Raise RendezvousError in one of several tasks of a launcher that sets none for torch.

    Each would train alone, on its part of the batch. WORLD_SIZE=1 says that this is meant.
    """
    needed = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    missing = [name for name in needed if name not in environ]
    if not missing or environ.get("WORLD_SIZE") == "1":
        return
    launcher, told = _launcher_of_tasks(environ)
    if not launcher:
        return
    sizes, ranks = TASKS[launcher]
    size = next((name for name in told if name in sizes and "LOCAL" not in name), "")
    theirs: dict[str, str] = dict(zip(needed, (size, *ranks), strict=False))
    exports = [f"{ours}=${theirs[ours]}" if theirs.get(ours) in told else ours for ours in missing]
    values = ", ".join(f"{name} is {environ[name]!r}" for name in told)
    raise RendezvousError(
        f"this process is one of several tasks of {launcher} ({values} in the environment), without"
        f" {' and '.join(missing)}; start run_accelerate.sh as the only task of each host"
        f" (docs/launching.md), export {' '.join(exports)} MASTER_ADDR MASTER_PORT in every task,"
        " or WORLD_SIZE=1 to train alone in each"
    )


def _launcher_of_tasks(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The launcher of which this process is one of several tasks, and the variables that say so.

    Empty if there is none: also for one task, and in a job's own shell or script.
    """
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    is_shell = is_in_step = STEP_SIZE in given  # of salloc: a task of its own
    if step := given.get("SLURM_STEP_ID", given.get("SLURM_STEPID", "")):
        is_in_step = step.isdecimal() and int(step) < SPECIAL_STEPS
    if not is_in_step:  # the numbers are those of the job
        given = {name: value for name, value in given.items() if name not in TASKS[SLURM][0]}
    is_counted = is_shell or any(name in given for sizes, _ in TASKS.values() for name in sizes)
    for launcher, (sizes, ranks) in TASKS.items():
        told = [*[name for name in sizes if name in given][:1], *(n for n in ranks if n in given)]
        if any(given[name] != ("1" if name in sizes else "0") for name in told):
            return launcher, told
    # PMIx has no variable with the number of tasks: there may be several.
    told = [name for name in PMIX if name in given]
    return ("PMIx", told) if told and not is_counted else ("", [])


def require_numbers(environ: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise RendezvousError if a variable is not a number of its range."""
    for name in names:
        value, allowed = environ.get(name), RANGES[name]
        if value is not None and not _is_in(value, allowed):
            span = f"from {allowed[0]} to {allowed[-1]}"
            raise RendezvousError(
                f"{name} is {value!r} in the environment, not a whole number {span}; unset it"
            )


def visible_gpu_names(value: str, source: str) -> list[str]:
    """The numbers or UUIDs in a list of GPUs, which -1 ends; `source` is a variable or a field.

    Raise RendezvousError for a list from which CUDA would drop GPUs, or all of them, in silence.
    """
    if value.strip() in HIDDEN:
        return []
    names = [name.strip() for name in value.strip().removesuffix(",").split(",")]
    names = names[: names.index("-1")] if "-1" in names else names
    kinds = {name.isdecimal() or name[:4] for name in names}
    if not all(re.fullmatch(r"[0-9]+|(GPU|MIG)-[\w/-]+", name, re.ASCII) for name in names):
        fault = "not numbers or UUIDs of GPUs, separated by commas"
    elif len(kinds) > 1:
        fault = "of several kinds, and CUDA reads only the first"
    elif len({int(name) if name.isdecimal() else name for name in names}) < len(names):
        fault = "in which one GPU is named twice, and CUDA then sees none"
    else:
        return names
    raise RendezvousError(f"{source} is {value!r}, {fault}; write it as 0,1, or unset it")


def _is_in(value: str, allowed: range) -> bool:
    is_number = value.isascii() and value.isdecimal() and len(value) <= 19
    return is_number and int(value) in allowed


def _require_ranks(environ: Mapping[str, str]) -> None:
    """Raise RendezvousError for a variable that one of several processes lacks, or a wrong rank."""
    if int(environ.get("WORLD_SIZE", "1")) > 1:
        names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if missing := ", ".join(name for name in names if not environ.get(name)):
            raise RendezvousError(
                f"WORLD_SIZE is {environ['WORLD_SIZE']} in the environment, without {missing}; set"
                " the missing variables for every process, or use a launcher (docs/launching.md)"
            )
    world = _size_above(environ, "RANK", ("WORLD_SIZE",))
    here = _size_above(environ, "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"))
    if here > world:
        raise RendezvousError(
            f"LOCAL_WORLD_SIZE is {here} in the environment, more than the {world} processes of"
            " WORLD_SIZE; unset both, or use a launcher (docs/launching.md)"
        )


def _size_above(environ: Mapping[str, str], rank: str, sizes: Sequence[str]) -> int:
    """Return the first of `sizes` that is set, else 1; raise if `rank` is not below it."""
    name = next((size for size in sizes if size in environ), sizes[-1])
    size = int(environ.get(name, "1"))
    if int(environ.get(rank, "0")) >= size:
        state = f"{name} is {size}" if name in environ else f"{name} is not set"
        raise RendezvousError(
            f"{rank} is {environ[rank]} in the environment and {state}, though ranks count from 0;"
            f" unset {rank}, or use a launcher (docs/launching.md)"
        )
    return size


def _require_interfaces(environ: Mapping[str, str]) -> None:
    """Raise RendezvousError if the interfaces for gloo or NCCL do not exist.

    Both treat empty as unset. gloo takes names; NCCL takes prefixes, exact names after =, and
    exclusions after ^.
    """
    try:
        interfaces = [name for _, name in socket.if_nameindex()]
    except OSError:  # the system does not list them
        return
    gloo, nccl = (environ.get(f"{library}_SOCKET_IFNAME", "") for library in ("GLOO", "NCCL"))
    is_found = {"GLOO": not gloo or set(gloo.split(",")) <= {*interfaces}}
    if nccl and nccl[0] != "^" and any(driver.exists() for driver in GPU_DRIVERS):
        names = tuple(nccl.removeprefix("=").split(","))
        is_exact = nccl[0] == "="
        is_found["NCCL"] = any(
            name in names if is_exact else name.startswith(names) for name in interfaces
        )
    for library, exists in is_found.items():
        if not exists:
            variable = f"{library}_SOCKET_IFNAME"
            raise RendezvousError(
                f"{variable} is {environ[variable]!r} in the environment, and the interfaces of"
                f" this host are {', '.join(interfaces)}; name one of these, or unset it"
            )


def _require_temporary_folder(environ: Mapping[str, str]) -> None:
    folder = environ.get("TMPDIR")
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise StorageError(
            f"TMPDIR is {folder!r} in the environment, not a folder that can be written to; unset"
            " it, or name another"
        )
