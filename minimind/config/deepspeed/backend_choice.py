"""Choose the backend, the DeepSpeed file and the device, and what replaces ops of DeepSpeed.

An op that an optimizer needs is compiled at the start, if the host has what that takes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from minimind.config.checks import given
from minimind.config.deepspeed.adopt import adopt_launch, is_shipped
from minimind.config.deepspeed.document import AUTO, get, offloads, put, read_deepspeed_json
from minimind.config.deepspeed.keys import DEEPSPEED_ADAM, optimizer_name
from minimind.config.deepspeed.resolve import (
    ResolvedConfig,
    collected,
    completed,
    require_none,
    resolve,
)
from minimind.config.deepspeed.rules import (
    keys_without_effect,
    plain_faults,
    precision_faults,
    with_optimizer_defaults,
)
from minimind.config.flags import ALONE, FLAGS
from minimind.config.launcher_env import Launch, parent_command, with_dropped_config
from minimind.config.optimizers import FLAG_OF_TYPE
from minimind.config.origin import DEFAULT, Origin, Rank, derived
from minimind.config.rules import with_dtype
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, RunConfig
from minimind.config.run_record import config_notice
from minimind.config.schedule import Schedule
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.device import CUDA, HOST, Accelerator, accelerator, device_kind
from minimind.runtime.environment import GPU_VARIABLES, visible_gpu_names
from minimind.runtime.hardware import (
    compiler_fault,
    extension_fault,
    invisible_gpus_fault,
    list_gpus,
)
from minimind.runtime.installed import LAUNCH

WITHOUT_ADAM = 'write "torch_adam": true in optimizer.params: torch\'s needs no compiler'
KINDS = {"Adam": "adam", "AdamW": "adam", "Lion": "lion"}
OPS = ("fused_adam", "cpu_adam", "fused_lion", "cpu_lion")
CPU_OPS = ("fused_adam", "cpu_adam", "cpu_lion")  # those it has for CPU runs


def required_op(config: Mapping[str, Any]) -> str:
    """Return the op that the optimizer of a resolved configuration loads; empty if none."""
    block = config.get("optimizer", {})
    kind = KINDS.get(optimizer_name(block.get("type")) or "")
    if kind is None or (kind == "adam" and block.get("params", {}).get("torch_adam") is True):
        return ""
    return f"{'cpu' if offloads(config, 'optimizer') else 'fused'}_{kind}"


def op_fault(op: str, device: str) -> str:
    """Return why `op` cannot be loaded on a type of device; empty if it can.

    Only a fused op on a GPU is CUDA code.
    """
    if is_installed(op):
        return ""
    if op.startswith("cpu_") or device == "cpu":
        return extension_fault("cpu")
    return extension_fault(device) or architectures_fault(
        os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    )


def architectures_fault(written: str) -> str:
    """Return which word of TORCH_CUDA_ARCH_LIST DeepSpeed cannot read; empty if it reads all.

    torch reads 9.0a and names such as Hopper too.
    """
    words = written.replace(";", " ").split()
    unread = [word for word in words if not re.fullmatch(r"\d+\.\d+(\+PTX)?", word)]
    if not unread:
        return ""
    return f"TORCH_CUDA_ARCH_LIST is {written!r}, and DeepSpeed cannot read {unread[0]!r} in it"


def is_installed(op: str) -> bool:
    """Whether `op` was compiled when DeepSpeed was installed (DS_BUILD_OPS=1)."""
    spec = find_spec("deepspeed")
    folders = spec.submodule_search_locations or () if spec else ()
    return any(any(disk.matching(Path(folder), f"ops/*/{op}_op.*so")) for folder in folders)


def is_compiled(op: str) -> bool:
    """Whether an earlier start has compiled `op`, in torch's folder of extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        from torch.utils.cpp_extension import get_default_build_root  # slow to import

        cuda = torch.version.cuda
        build = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
        major, minor = sys.version_info[:2]
        root = Path(get_default_build_root()) / f"py{major}{minor}{sys.abiflags}_{build}"
    return disk.exists(Path(root) / op / f"{op}.so")


def unbuildable_optimizer(config: Mapping[str, Any], device: str) -> str:
    """Describe the optimizer of DeepSpeed that cannot be compiled here; empty if there is none."""
    op, name = required_op(config), optimizer_name(config.get("optimizer", {}).get("type"))
    fault = op_fault(op, device) if op else ""
    if not fault:
        return ""
    remedy = WITHOUT_ADAM if "adam" in op else "install that, or use AdamW"
    params = config["optimizer"].get("params", {})
    if "adam" in op and (named := [key for key in DEEPSPEED_ADAM if key in params]):
        remedy = f'write "torch_adam": true and remove {", ".join(named)}, which only this one has'
    return f"{name} needs DeepSpeed's {op}, which cannot be compiled here ({fault}); {remedy}"


def replaceable_params(
    config: Mapping[str, Any], sources: Mapping[str, Origin], device: str
) -> tuple[list[str], str]:
    """Return parameters without which torch's AdamW does the same, and why DeepSpeed's cannot run.

    Both are empty unless `"torch_adam": "auto"` selected DeepSpeed's, for these parameters, and it
    cannot be compiled here.
    """
    source, op = sources.get(TORCH_ADAM), required_op(config)
    if not op or not source or source.rank is not Rank.RULE:
        return [], ""
    params = config["optimizer"]["params"]
    keys = [key for key in DEEPSPEED_ADAM if key in params]
    has_equal = all(params[key] in DEEPSPEED_ADAM[key] for key in keys)
    fault = op_fault(op, device) if has_equal else ""
    return (keys, f"DeepSpeed's {op} cannot be compiled: {fault}") if fault else ([], "")


def compilation_text(op: str) -> str:
    """Return the line that announces the compilation of `op`."""
    remedy = ' ("torch_adam": true in optimizer.params avoids it)' if "adam" in op else ""
    return f"DeepSpeed's {op} is compiled at the first start, which takes minutes{remedy}"


ELSEWHERE = "checked for the CPU, as there is no GPU here; --device cuda checks for a GPU host"
TORCH_ADAM = "optimizer.params.torch_adam"
CHOSEN = ("compile", "loss", "muon_lr")  # flags that `with_choices` decides


@dataclass(frozen=True)
class Setup:
    """Flags, launcher settings and the unresolved DeepSpeed JSON of a run."""

    run: RunConfig
    launch: Launch
    device: str
    backend: str  # deepspeed, ddp or single
    document: Mapping[str, Any]
    path: str

    def resolve(self) -> ResolvedConfig:
        """Resolve flags, files and launcher; raise a UsageError that lists all faults."""
        if self.backend == "deepspeed":
            return self._with_choices(self._with_available_adam())
        run, faults = collected(adopt_launch(self.run, self.launch))
        require_none([*faults, *precision_faults(run, self.device), *plain_faults(run)])
        run = run.with_micro_batches(self.launch.world_size)
        return self._with_choices(ResolvedConfig(run, self.backend))

    def complete(
        self, resolved: ResolvedConfig, run: RunConfig, schedule: Schedule | None
    ) -> ResolvedConfig:
        """Complete `resolved` by the numbers of `run` that text and rules decide."""
        chosen = [name for name in CHOSEN if run.sources[name].rank is Rank.RULE]
        plain = {name: FLAGS[name].default for name in chosen}
        run = run.with_values(DEFAULT, **plain)
        run = run.with_micro_batches(self.launch.world_size)
        if self.backend == "deepspeed":
            size = self.launch.world_size
            resolved = completed(resolved, run, size, self.device, schedule)
        return self._with_choices(replace(resolved, run=run))

    def _with_choices(self, resolved: ResolvedConfig) -> ResolvedConfig:
        return with_choices(resolved, self.device, is_of_another_host(self.run, self.launch))

    def _with_available_adam(self) -> ResolvedConfig:
        """Resolve with torch's AdamW if "auto" selected DeepSpeed's, which cannot be compiled."""

        def resolved(document: Mapping[str, Any], adam_fault: str = "") -> ResolvedConfig:
            size, launch = self.launch.world_size, self.launch
            return resolve(document, self.path, self.run, size, self.device, launch, adam_fault)

        selected = resolved(self.document)
        names, fault = replaceable_params(selected.config, selected.sources, self.device)
        if not names:
            return selected
        document = deepcopy(dict(self.document))
        for name in names:
            document["optimizer"]["params"].pop(name)
        return resolved(document, fault)


def read_setup(run: RunConfig, launch: Launch) -> Setup:
    """Read the setup; raise UsageError if a file or a GPU is missing.

    DeepSpeed is used if a config file is set by flag or Accelerate YAML, or if `accelerate launch`
    enables it; without a file, the shipped one is used. Shipped files give way where DeepSpeed does
    not run.
    """
    launch = with_dropped_config(launch, run.deepspeed_config, parent_command())
    adopted, faults = collected(adopt_launch(run, launch))
    try:
        device = choose_device(adopted, launch)
    except UsageError:
        require_none(faults)  # else resolve() reports them, with those of the file
        raise
    if adopted.dtype == AUTO:  # else the launcher has it; the file may replace it, too
        has_bf16 = is_of_another_host(adopted, launch) or device_kind(device).has_bf16
        run = with_dtype(run, device, has_bf16)
    path = adopted.deepspeed_config
    if device in ALONE and path not in (None, "none") and not is_shipped(path):
        raise UsageError(
            f"deepspeed_config = {path} ({adopted.sources['deepspeed_config']}), and DeepSpeed does"
            f" not run on {device}; give --deepspeed_config none, or --device cpu"
        )
    if path == "none" or device in ALONE or (path is None and not launch.uses_deepspeed):
        backend = "ddp" if launch.world_size > 1 else "single"
        return Setup(run, launch, device, backend, {}, "none")
    if path is not None:
        document = read_deepspeed_json(path, adopted.sources["deepspeed_config"])
        return Setup(run, launch, device, "deepspeed", document, path)
    shipped = str(DEFAULT_DEEPSPEED_CONFIG)
    document = read_deepspeed_json(shipped)
    if "zero_optimization.stage" in launch.deepspeed:  # else 2, which is Accelerate's default too
        put(document, "zero_optimization.stage", AUTO)
    return Setup(run, launch, device, "deepspeed", document, shipped)


def with_choices(
    resolved: ResolvedConfig, device: str, is_elsewhere: bool = False
) -> ResolvedConfig:
    """Replace the `auto` of --compile and then of --loss; fill in defaults of the optimizer."""
    resolved = replace(resolved, run=with_optimizer_defaults(resolved.run))
    return with_loss(with_compile(resolved, device, is_elsewhere), device)


def with_loss(resolved: ResolvedConfig, device: str) -> ResolvedConfig:
    """Replace `loss = auto`: chunked where float32 logits of all positions would fill a GPU.

    Compiled, the logits are kept in the dtype of the weights. On CPUs full is faster.
    """
    run = resolved.run
    if run.loss != "auto":
        return resolved
    full = {
        "no GPU": device == HOST.name,
        "a teacher": run.teacher is not None,
        "a model of transformers": run.hugging_face is not None,
        "compiled": run.compile == "on",
    }
    reason = next((reason for reason, applies in full.items() if applies), "not compiled")
    chosen = "chunked" if reason == "not compiled" else "full"
    return replace(resolved, run=run.with_values(derived(reason), loss=chosen))


def with_compile(
    resolved: ResolvedConfig, device: str, is_elsewhere: bool = False
) -> ResolvedConfig:
    """Replace `compile = auto` by on or off; raise UsageError if on needs what is missing.

    What another machine (`is_elsewhere`) has is not known, and nothing is missing there.
    """
    run = resolved.run
    find_fault = compiler_fault if not is_elsewhere else lambda *_: ""
    needs_bf16 = run.product_dtype == "bfloat16"
    if run.compile == "on" and (fault := find_fault(device, needs_bf16)):
        raise UsageError(
            f"compile = on ({run.sources['compile']}), but {fault}; correct that, or use"
            " --compile off"
        )
    if run.compile != "auto":
        return resolved
    blockers = {
        "no GPU": device == HOST.name,
        f"on {device} only by --compile on": not device_kind(device).has_triton,
        "ZeRO stage 3": resolved.zero_stage == 3,
        "experts": run.use_moe,
        "--sequence_parallel": run.sequence_parallel > 1,
        "DeepSpeed's flops_profiler": get(resolved.config, "flops_profiler.enabled") is True,
        "a model of transformers": run.hugging_face is not None,
        "tensor parallelism": run.tensor_parallel > 1,
    }
    reasons = [reason for reason, applies in blockers.items() if applies]
    if not reasons and (fault := find_fault(device, needs_bf16)):
        reasons = [fault]
    origin, chosen = (derived(reasons[0]), "off") if reasons else (derived("GPU"), "on")
    return replace(resolved, run=run.with_values(origin, compile=chosen))


def choose_device(run: RunConfig, launch: Launch) -> str:
    """Return the type of the device; raise UsageError if there are too few GPUs."""
    if is_of_another_host(run, launch):
        _require_alone(run.device, run.sources["device"], launch)
        return run.device
    return device_for(run.device, run.sources["device"], launch)


def _require_alone(device: str, source: str, launch: Launch) -> None:
    if device in ALONE and launch.world_size > 1:
        raise UsageError(
            f"device = {device} ({source}) trains in one process, and {launch.world_size} were"
            f" started; start one (NUM_PROCESSES=1 {LAUNCH} ...), or use --device cpu"
        )


def is_of_another_host(run: RunConfig, launch: Launch) -> bool:
    """Whether a dry run is for another host: a rehearsal, or --device of a host such as a login
    node that lacks it.
    """
    if launch.is_elsewhere:
        return True
    if not run.dry_run or run.device == "auto" or device_kind(run.device).is_available():
        return False
    return run.device != CUDA.name or not list_gpus()


def device_for(requested: str, source: str, launch: Launch) -> str:
    """Resolve a value of --device, which came from `source`.

    Raise RendezvousError for a malformed list of visible GPUs.
    """
    kind = accelerator(requested)
    if not isinstance(kind, Accelerator):
        return kind.name
    for variable in GPU_VARIABLES:
        visible_gpu_names(os.environ.get(variable, ""), variable)
    if kind.was_forked():  # torch then counts no GPU
        raise UsageError(
            f"device = {requested} ({source}), but {kind.name.upper()} was used before this process"
            " was forked; in a notebook, restart the kernel and use notebook_launcher first"
        )
    gpus = kind.count()
    if not gpus:
        visible = os.environ.get(CUDA.variable)
        fault = remedy = ""
        if kind is CUDA:
            fault, remedy = invisible_gpus_fault(list_gpus(), torch.version.cuda, visible)
        if fault:  # training on the CPU instead would take days and look normal
            raise UsageError(
                f"device = {requested} ({source}), but {fault}; {remedy}, or use --device cpu"
            )
        if requested != "auto":
            what = "GPU" if kind is CUDA else "such device"
            there = accelerator().name if accelerator().count() else HOST.name
            raise UsageError(
                f"device = {requested} ({source}), but torch sees no {what} here; use --device"
                f" {there}"
            )
        return HOST.name
    if kind.name in ALONE and launch.world_size > 1 and requested == "auto":
        return HOST.name
    _require_alone(kind.name, source, launch)
    if launch.local_world_size > gpus:
        visible = os.environ.get(kind.variable)
        by = f" ({kind.variable} = {visible})" if visible is not None else ""
        more = ", make all of them visible to every process" if by else ""
        seen = f"{gpus} GPU{' is' if gpus == 1 else 's are'} visible{by}"
        raise UsageError(
            f"{launch.local_world_size} processes were started here and {seen}; start {gpus}"
            f" (NUM_PROCESSES={gpus} {LAUNCH} ...){more}, or use --device cpu"
        )
    return kind.name


def advice(setup: Setup, resolved: ResolvedConfig, is_start: bool = True) -> Iterator[str]:
    """Yield notices of wasted time, memory and devices, and of settings other than in the files.

    A dry run (`is_start` false) has the second kind, and tells what a start would compile.
    """
    run, launch, device, path = resolved.run, setup.launch, setup.device, setup.path
    kind, config = device_kind(device), resolved.config
    if notice := config_notice(setup.run):
        yield notice
    if launch.dropped_config is not None:
        yield (
            f"`accelerate launch` drops --deepspeed_config_file {launch.dropped_config} without"
            f" --use_deepspeed; this run uses DeepSpeed with {launch.deepspeed_config} all the same"
        )
    named = setup.run.deepspeed_config or launch.deepspeed_config
    if device in ALONE and (named not in (None, "none") or launch.uses_deepspeed):
        yield (
            f"DeepSpeed does not run on {device}: one process trains without it, and"
            f" {named or DEFAULT_DEEPSPEED_CONFIG.name} has no effect"
        )
    written = optimizer_name(get(setup.document, "optimizer.type")) or ""
    if FLAG_OF_TYPE.get(written, run.optimizer) != run.optimizer:  # of a shipped file
        by = run.sources["optimizer"]
        yield f"optimizer {run.optimizer} by {by}, in place of {path}'s {written}"
    used = launch.local_world_size
    if is_start and isinstance(kind, Accelerator) and (gpus := kind.count()) > used:
        yield (
            f"warning  {gpus} GPUs are visible, {used} of them are used; type"
            f" NUM_PROCESSES={gpus} {LAUNCH} ... (torchrun --nproc_per_node {gpus} ...),"
            f" or hide the others with {kind.variable}"
        )
    is_alone = config and launch.world_size == 1 and not resolved.scheduler
    has_all = is_alone and not any(offloads(config, what) for what in ("optimizer", "param"))
    is_ours = resolved.optimizer_params == {"eps": 1e-8} and resolved.optimizer == "AdamW"
    if is_start and has_all and is_ours:
        yield (
            f"ZeRO stage {resolved.zero_stage} has nothing to divide in 1 process;"
            " --deepspeed_config none trains without DeepSpeed (docs/memory.md)"
        )
    if run.product_dtype == "bfloat16" and device == HOST.name and not HOST.has_bf16:
        yield (
            f"warning  {given(run, 'dtype')}: this CPU has no bf16 instructions and emulates them,"
            " many times slower than float32; --dtype float32 is faster"
        )
    auto = {b: get(setup.document, f"{b}.enabled") == AUTO for b in ("fp16", "bf16")}
    has_bf16 = auto["bf16"] and run.dtype == "bfloat16"
    if auto["fp16"] and not (run.is_explicit("dtype") or has_bf16 or is_shipped(path)):
        yield (
            f'fp16.enabled is "auto" in {path} and off: {given(run, "dtype")}; --dtype float16'
            " switches it on"
        )
    if is_start and kind.has_triton and run.compile == "off":
        fault = compiler_fault(device, run.product_dtype == "bfloat16")
        if fault and run.sources["compile"] == derived(fault):
            yield f"warning  the model is not compiled, which is slower: {fault}"
    if is_start and kind.has_tf32 and run.dtype == "float32" and not run.is_explicit("tf32"):
        yield (
            "float32 matrices are multiplied exactly, without tensor cores; --tf32 is several times"
            " as fast, with 10 bits of mantissa"
        )
    if fault := resolved.adam_fault:
        yield f"warning  {fault}; torch's fused AdamW takes its place, with equal updates"
    if is_start and (keys := keys_without_effect(config, resolved.sources)):
        yield f"no effect at ZeRO stage {resolved.zero_stage}: {', '.join(keys)}"
    if is_start:
        return
    op = required_op(config)
    if op and not (op_fault(op, device) or is_installed(op) or is_compiled(op)):
        yield f"compile  {compilation_text(op)}"
    if device == HOST.name and not setup.run.is_explicit("device"):
        yield ELSEWHERE
