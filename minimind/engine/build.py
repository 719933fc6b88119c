"""Build the engine with Accelerate and DeepSpeed; the only other importer is `minimind.launch`.

Without CUDA, Accelerate's DeepSpeed path finds no backend and every rank believes it is rank 0 of
1, so gloo is requested and the number of ranks is checked. DeepSpeed's shared-memory op for
inference is not compiled. Accelerate's `clip_grad_norm_` and prepared schedulers behave differently
under DeepSpeed and are not used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from minimind.config.deepspeed.backend_choice import unbuildable_optimizer
from minimind.config.deepspeed.document import offloads
from minimind.config.deepspeed.keys import BATCH, optimizer_name
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.deepspeed.rules import tracker_refusal
from minimind.config.launcher_env import configure_libraries, set_rendezvous_defaults
from minimind.config.optimizers import ADAM_TYPES, OPTIMIZERS
from minimind.engine.compile import compile_model, compute_in
from minimind.engine.engine import Engine
from minimind.engine.optimizers import optimizer_of, run_groups, trial_optimizer
from minimind.engine.plain_backend import PlainBackend, prepare_for_ddp, unused_parameters
from minimind.errors import RendezvousError, StorageError, UsageError
from minimind.runtime.collectives import collective_backend, lost_peers, own_store, rendezvous
from minimind.runtime.device import CUDA, HOST, set_numerics
from minimind.runtime.environment import allow_connections
from minimind.runtime.installed import require_extra
from minimind.runtime.secret_keys import without_secret, without_those_of
from minimind.runtime.terminal import first_lines, phase
from minimind.runtime.urls import masked_values

if TYPE_CHECKING:
    from minimind.engine.deepspeed_backend import DeepSpeedBackend

# Raised by DeepSpeed and torch's optimizers for a configuration they do not support.
REFUSALS = (ValueError, TypeError, AssertionError, NotImplementedError)
# Parameters of an Adam block that DeepSpeed removes before it calls the class.
NOT_PASSED = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
CORRECT = "correct or remove that key"
MODELS = {  # DeepSpeed's models of sections
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "TPTrainingConfig": "tensor_parallel",
    "CompileConfig": "compile",
    "CommsLoggerConfig": "comms_logger",
    "DeepSpeedMonitorConfig": "",  # of several sections
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
PRECISION = {"bfloat16": "bf16", "float16": "fp16"}  # DeepSpeed has blocks for


@phase("building the engine")
def build_engine(resolved: ResolvedConfig, model: PreTrainedModel, device: str) -> Engine:
    """Build the resolved backend with its process group and optimizer."""
    run = resolved.run
    parameters = sum(p.numel() for p in model.parameters())
    configure_libraries(device)
    set_numerics(device, run.deterministic, run.tf32)
    if device == HOST.name:
        keep_freed_memory(os.environ)
    build = _deepspeed if resolved.backend == "deepspeed" else _plain
    backend, actual = build(resolved, model, device)
    assert actual.type == device, f"requested {device}, got {actual}"
    return Engine(backend, resolved, actual, parameters)


def _deepspeed(
    resolved: ResolvedConfig, model: PreTrainedModel, device: str
) -> tuple[DeepSpeedBackend, torch.device]:
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin, DummyOptim
    from deepspeed.ops.op_builder.builder import OpBuilder

    from minimind.engine.deepspeed_backend import DeepSpeedBackend, configuration
    from minimind.engine.op_build_lock import monitored_builds

    run = resolved.run
    if "log_level" not in resolved.config:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if deepspeed.comm.comm.cdb is not None and not dist.is_initialized():
        raise UsageError(
            "DeepSpeed was started in this process before and keeps its old state of the ranks;"
            " start a new process (in a notebook: restart the kernel, or notebook_launcher)"
        )
    leave_out_shm_comm()
    if device == HOST.name:
        count_devices_once()
    set_rendezvous_defaults(os.environ)
    accelerator = _accelerator(
        device,
        run.dist_timeout,
        mixed_precision=PRECISION.get(run.dtype, "no"),
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration(resolved)),
        gradient_accumulation_steps=run.accumulation_steps,
    )
    if accelerator.num_processes != dist.get_world_size():
        raise RendezvousError(
            f"Accelerate counts {accelerator.num_processes} processes, the process group"
            f" {dist.get_world_size()}; ranks would train on the same rows"
        )
    groups = run_groups(model, run)
    plugin = accelerator.deepspeed_plugin
    assert plugin is not None
    # Apply our configuration again: Accelerate overwrites steps_per_print.
    plugin.deepspeed_config.update(configuration(resolved))
    compute_in(run.dtype, model, device)
    compile_model(model, run, device)
    has_block = "optimizer" in resolved.config
    optimizer = DummyOptim(groups, lr=run.learning_rate) if has_block else optimizer_of(groups, run)
    with _refusals(resolved), lost_peers(), monitored_builds(OpBuilder, resolved.path):
        prepared = accelerator.prepare(model, optimizer)[0]
    timeout = collective_backend(device, run.dist_timeout)[1]
    for group in list(distributed_c10d._world.pg_map):  # ZeRO's groups default to 30 minutes
        distributed_c10d._set_pg_timeout(timeout, group)
    log = resolved.config.get("comms_logger", {})
    if log.get("enabled") and log.get("verbose") and "log_level" not in resolved.config:
        deepspeed.utils.logging.set_log_level_from_string("info")
    collectives = deepspeed.comm.comm.cdb
    backend = DeepSpeedBackend(prepared, collectives, run.spike_guard, run.zero_update)
    return backend, accelerator.device


def keep_freed_memory(environ: Mapping[str, str], keeps: bool = True) -> None:
    """Let this process keep what tensors free, for the next step. Settings of the user are kept.

    keeps=False returns it and restores the defaults, for a notebook that outlives the run.

    glibc returns large blocks to the kernel at once, and each step faults them again: the search
    for huge pages then takes up to a sixth of a step where other processes use the memory. Without
    effect where the C library is not glibc.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0 if keeps else 1 << 16)
        libc.mallopt(M_TRIM_THRESHOLD, -1 if keeps else 1 << 17)  # -1: never
        if not keeps:
            libc.malloc_trim(0)


def leave_out_shm_comm() -> None:
    """Keep DeepSpeed from compiling shm_comm in this process; only inference uses it.

    Compiling takes up to 80 s, and a process killed meanwhile leaves a lock on which every later
    start waits silently.
    """
    import deepspeed

    buildable = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}
    deepspeed.ops.__dict__["__compatible_ops__"] = buildable


def count_devices_once() -> None:
    """Have DeepSpeed's CPU accelerator keep its number of devices.

    At stage 3 it is asked for with every bucket, and starts the program numactl each time.
    """
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    accelerator.device_count = cache(partial(type(accelerator).device_count, accelerator))


@contextmanager
def _refusals(resolved: ResolvedConfig) -> Iterator[None]:
    """Convert DeepSpeed's configuration errors into errors that name the key or file."""
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    try:
        yield
    except (*REFUSALS, DeepSpeedConfigError, ZeRORuntimeException) as error:
        message = without_those_of(first_lines(error, None), resolved.config)
        refusal = f"DeepSpeed refuses the file: {message}; {CORRECT}"
        raise UsageError(f"{resolved.path}: {refusal}") from error
    except OSError as error:
        if error.filename is None:
            raise
        problem = f"{error.filename}: {error.strerror}"
        raise StorageError(f"{resolved.path}: DeepSpeed cannot use {problem}; change it") from error
    except Exception as error:  # a tracker raises its own types; others are raised again
        if not (message := tracker_refusal(error)):
            raise
        message = without_those_of(message, resolved.config)
        raise UsageError(f"{resolved.path}: {message}") from error


def print_collectives(resolved: ResolvedConfig) -> None:
    """Print DeepSpeed's table of collectives if its comms_logger is on; collective."""
    if resolved.config.get("comms_logger", {}).get("enabled"):
        import deepspeed

        deepspeed.comm.log_summary()


def _plain(
    resolved: ResolvedConfig, model: PreTrainedModel, device: str
) -> tuple[PlainBackend, torch.device]:
    from accelerate.utils import DistributedDataParallelKwargs

    run = resolved.run
    if resolved.backend == "single":
        _init_single_process()
    else:
        set_rendezvous_defaults(os.environ)
    has_unused = resolved.backend == "ddp" and bool(unused_parameters(model))
    prepare_for_ddp(model)
    model.to(getattr(torch, run.weight_dtype))
    ddp = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True, find_unused_parameters=has_unused
    )
    accelerator = _accelerator(
        device, run.dist_timeout, ddp, mixed_precision="no", cpu=device == "cpu"
    )
    compute_in(run.dtype, model, device)
    compile_model(model, run, device)
    with lost_peers():
        forward = accelerator.prepare_model(model)
    groups = run_groups(model, run)
    return PlainBackend(forward, model, resolved, groups), accelerator.device


def _init_single_process() -> None:
    """Initialize a process group of this process alone."""
    os.environ.pop("LOCAL_RANK", None)  # so Accelerate uses DDP
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented, not listed)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _accelerator(device: str, dist_timeout: int, *handlers: Any, **options: Any) -> Any:
    """Create an Accelerator and the process group: NCCL on GPUs, else gloo."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs, check_cuda_p2p_ib_support

    if device == CUDA.name and not check_cuda_p2p_ib_support():
        # `accelerate launch` sets them; under other launchers Accelerate raises without them.
        for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
            os.environ.setdefault(name, "1")
    allow_connections(int(os.environ.get("WORLD_SIZE", 1)))
    backend, timeout = collective_backend(device, dist_timeout)
    group = InitProcessGroupKwargs(backend=backend, timeout=timeout)
    with rendezvous():
        own_store(os.environ, timeout)
        return Accelerator(kwargs_handlers=[group, *handlers], **options)


@contextmanager
def evaluation_accelerator(device: str, dist_timeout: int) -> Iterator[Any]:
    """Yield an Accelerator for evaluation; destroy its process group at the end."""
    configure_libraries(device)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _init_single_process()
    else:
        set_rendezvous_defaults(os.environ)
    try:
        accelerator = _accelerator(device, dist_timeout, cpu=device == "cpu")
        with lost_peers():
            yield accelerator
    finally:
        leave_process_group()


def open_tracker(name: str, project: str, folder: str, options: Mapping[str, Any]) -> Any:
    """Start one of Accelerate's trackers; raises whatever its library raises."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
    directory = {"logging_dir": folder} if tracker_class.requires_logging_directory else {}
    tracker = tracker_class(project, **directory, **options)
    tracker.start()
    return tracker


def leave_process_group() -> None:
    """Destroy the process group, so that this process (a notebook) can start another run."""
    from accelerate.state import AcceleratorState

    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


def require_accepted(resolved: ResolvedConfig, device: str) -> None:
    """Raise UsageError if DeepSpeed's configuration, optimizer or scheduler refuses a value.

    Also if the optimizer is of a package that is not installed or has no update for `device`.
    Starts and compiles nothing.
    """
    name = resolved.run.optimizer
    if package := OPTIMIZERS[name].package:
        require_extra(package, f"--optimizer {name}", package)
        if device not in ("cpu", "cuda", "xpu"):
            raise UsageError(
                f"--optimizer {name} has no update for --device {device} in {package};"
                " use --optimizer adamw"
            )
    if resolved.backend != "deepspeed":
        return
    configure_libraries(device)
    if fault := unbuildable_optimizer(resolved.config, device):
        raise UsageError(f"{resolved.path}: {fault}")
    if reason := _refusal(resolved.config):
        raise UsageError(f"{resolved.path}: DeepSpeed refuses {reason}; {CORRECT}")


def _refusal(config: Mapping[str, Any]) -> str:
    """Return what of `config` cannot be built, and why; empty if all can.

    The global batch size is left out: it was checked before, and does not fit one process.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its import sets another level
    part = "the file"
    try:
        DeepSpeedConfig({key: deepcopy(value) for key, value in config.items() if key != BATCH})
        part, block = "optimizer.params", config.get("optimizer", {})
        name, params = optimizer_name(block.get("type")), block.get("params", {})
        optimizer = trial_optimizer(name, params)
        if name in ADAM_TYPES and params.get("torch_adam") is not True:
            factory = DeepSpeedCPUAdam if offloads(config, "optimizer") else FusedAdam
            signature(factory).bind([], **{k: v for k, v in params.items() if k not in NOT_PASSED})
        if "scheduler" in config:
            part = "scheduler.params"
            factory = getattr(lr_schedules, config["scheduler"]["type"])
            factory(optimizer, **config["scheduler"].get("params", {}))
    except ValidationError as error:
        return format_model_fault(MODELS.get(error.title, error.title), error.errors()[0])
    except Exception as error:  # its parsers raise many types
        return f"{part}: {without_those_of(first_lines(error, None), config)}"
    return ""


def format_model_fault(section: str, fault: Any) -> str:
    """Format an error of a model of DeepSpeed as `SECTION.KEY = VALUE: reason`."""
    key = ".".join(str(part) for part in (section, *fault["loc"]) if part != "")
    if fault["type"] == "extra_forbidden":
        return f"{key}: it has no such key"
    shown = masked_values(without_secret(key, fault["input"]))
    value = f" = {shown!r}" if fault["loc"] else ""
    return f"{key}{value}: {fault['msg']}"
