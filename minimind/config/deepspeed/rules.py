"""Combinations of settings that do not train: one row each, in the order of the report.

Settings that cannot be used together, that have no effect in this training loop, or that the
parser of DeepSpeed accepts and its engine refuses. DeepSpeed 0.19.8 rejects some of these late and
with a traceback, silently ignores others, and trains a few of them incorrectly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import gcd
from typing import Any

from minimind.config.checks import given
from minimind.config.deepspeed.adopt import is_shipped
from minimind.config.deepspeed.document import MISSING, get, offloads
from minimind.config.deepspeed.key_checks import Fault, is_one_of
from minimind.config.deepspeed.keys import (
    ACCUMULATION,
    BATCH,
    DTYPES,
    KEYS,
    MICRO_BATCH,
    PARAMS,
    RATE,
    TOTAL_STEPS,
    ZERO,
    Facts,
)
from minimind.config.flags import FLAGS, MIXED
from minimind.config.optimizers import ADAM_TYPES, FLAG_OF_TYPE, OPTIMIZERS, READ_BY
from minimind.config.origin import Origin, Rank, derived
from minimind.config.run_config import RunConfig
from minimind.runtime.installed import install_packages
from minimind.runtime.terminal import first_lines


@dataclass(frozen=True)
class Rule:
    """A combination that is refused, which each of `keys` may be part of.

    In the sentence `{key}` is the key as `name is value`, `{stage}` the ZeRO stage with its source,
    and the name of a flag is that flag as `name = value (source)`. Other names are values that
    `when` returns in place of true.
    """

    keys: str
    when: Callable[[Facts, str], object]
    sentence: str

    def __call__(self, facts: Facts) -> Iterator[Fault]:
        """Yield a fault for each key with which the file breaks the rule."""
        for key in self.keys.split():
            if not (values := self.when(facts, key)):
                continue
            words: dict[str, Any] = {name: given(facts.run, name) for name in FLAGS}
            words["key"] = f"{key} is {json.dumps(facts[key], default=str)}"
            words["stage"] = f"stage is {facts.stage} ({facts.sources[f'{ZERO}stage']})"
            words |= values if isinstance(values, dict) else {}
            yield Fault(key, f"{facts.path}: {self.sentence.format_map(words)}")


def _is_below(least: float) -> Callable[[Facts, str], bool]:
    return lambda f, key: (number := f.number(key)) is not None and number < least


def _is_own_adam(f: Facts) -> bool:
    """Whether the optimizer is DeepSpeed's Adam."""
    return f.optimizer in ADAM_TYPES and f[f"{PARAMS}torch_adam"] is not True


def _other_batch(f: Facts, key: str) -> dict[str, Any]:
    run, in_step = f.run, f.run.padded_rows(f.world_size)
    if f[key] == in_step or not isinstance(f[key], int):
        return {}
    rows, processes = run.micro_batch_rows(f.world_size), run.parallel(f.world_size).data_size
    return {
        "product": f"{rows} rows ({run.sources['batch_size']}) x {run.accumulation_steps}"
        f" micro-batches ({run.sources['accumulation_steps']}) x {processes} processes = {in_step}"
    }


def _other_split(f: Facts, key: str) -> dict[str, Any]:
    """What a key of the split is, where --global_batch_size needs another value."""
    run, size = f.run, f.world_size
    needed = run.micro_batch_rows(size) if key == MICRO_BATCH else run.accumulation_steps
    is_other = run.global_batch_size is not None and f[key] not in (MISSING, needed)
    return {"needed": needed} if is_other else {}


def _short_warmup(f: Facts, key: str) -> bool:
    """Whether the flag says a warm-up that the file's scheduler lengthens."""
    is_short = f.run.is_explicit("warmup_steps") and f.run.warmup_steps in (0, 1)
    return is_short and f[f"{RATE}warmup_num_steps"] == 2


def _ends_in_warmup(f: Facts, key: str) -> dict[str, Any]:
    warmup, total = f[f"{RATE}warmup_num_steps"], f[key]
    total = f.run.max_steps if total is MISSING else total
    is_counted = key not in f.sources or f.sources[key].rank is not Rank.OPEN
    if not (isinstance(warmup, int) and isinstance(total, int) and total < warmup and is_counted):
        return {}
    by = f.run.sources["max_steps"] if total == f.run.max_steps else "the steps of the run"
    source = f.run.sources["warmup_steps"]
    return {"end": f"{key} = {total} ({by})", "warmup": f"warmup_num_steps = {warmup} ({source})"}


def _offloads_too_early(least: int) -> Callable[[Facts, str], object]:
    def when(f: Facts, key: str) -> object:
        is_early = offloads(f.config, key.rpartition("_")[2]) and f.stage < least
        return is_early and {"offload": f"{key} ({f.sources[f'{key}.device']})"}

    return when


def _another_dtype(f: Facts, key: str) -> dict[str, Any]:
    dtype = DTYPES.get(str(f[key]), f.run.weight_dtype)
    return {"needed": dtype} if dtype != f.run.weight_dtype else {}


def _scales_with_gradient(f: Facts, key: str) -> bool:
    """Whether the size of an update under muP follows the gradient."""
    flag = FLAG_OF_TYPE.get(f.optimizer)
    return f.run.mup_base_dim is not None and flag is not None and not OPTIMIZERS[flag].normalizes


def _lacks_package(f: Facts, key: str) -> object:
    package = PACKAGES[key.partition(".")[0]]
    is_lacking = f[key] is True and find_spec(package) is None
    return is_lacking and {"package": package, "install": install_packages(package)}


# Blocks that import a package when the engine is built.
PACKAGES = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
OFFLOAD, GRAD_NORM = f"{ZERO}offload_optimizer", f"{ZERO}compute_grad_norm"
QUANTIZED = f"{ZERO}zero_quantized_weights {ZERO}zero_quantized_gradients"
RULES = (
    Rule(
        BATCH,
        _other_batch,
        '{key}, but {product}; write "auto" there, or change --batch_size or --accumulation_steps'
        " (--global_batch_size keeps the rows of a step on any number of processes)",
    ),
    Rule(
        f"{MICRO_BATCH} {ACCUMULATION}",
        _other_split,
        '{key}, but {global_batch_size} needs {needed} here; write "auto" there',
    ),
    Rule(
        f"{RATE}cycle_min_mom {RATE}cycle_max_mom {RATE}decay_mom_rate",
        lambda f, key: f[key] is not MISSING and f[f"{RATE}cycle_momentum"] is False,
        "{key}, but has no effect with cycle_momentum false; write true there, or remove it",
    ),
    Rule(
        f"{RATE}warmup_num_steps",
        _is_below(2),
        "{key}, but DeepSpeed's schedulers warm up over at least 2 steps; write 2 or more",
    ),
    Rule(
        "scheduler",
        _short_warmup,
        "{warmup_steps}, but DeepSpeed's schedulers warm up over at least 2 steps; raise it, or"
        " remove the scheduler block",
    ),
    Rule(
        TOTAL_STEPS,
        _ends_in_warmup,
        "{end} is less than {warmup}; lower the warm-up, or train longer",
    ),
    Rule(
        f"steps_per_print gradient_predivide_factor {RATE}cycle_first_step_size"
        f" {RATE}lr_range_test_step_size",
        lambda f, key: f.number(key) == 0 or _is_below(0)(f, key),
        "{key}, not above 0; change it",
    ),
    Rule(
        f"{PARAMS}eps {RATE}warmup_min_lr {RATE}cycle_min_lr",
        _is_below(0),
        "{key}, not 0 or above; change it",
    ),
    Rule(
        "flops_profiler.enabled",
        lambda f, key: f.run.compile == "on" and f[key] is True,
        "{key}, but with {compile} the profiler miscounts, and the model is compiled again and"
        " again; {compile.remove}, or write false there",
    ),
    Rule(
        f"{ZERO}stage",
        lambda f, key: f.run.compile == "on" and f.stage == 3,
        "{key}, but with {compile} its hooks in every module would be compiled again and again;"
        " {compile.remove}, or use stage 2",
    ),
    Rule(
        f"{ZERO}stage",
        lambda f, key: f.run.dtype == "float16" and f.stage == 0 and f.device != "cpu",
        "{dtype} trains incorrectly at ZeRO stage 0 in DeepSpeed 0.19.8 (it unscales gradients"
        " that were never scaled); use bfloat16, or stage 1 to 3",
    ),
    Rule(
        "data_types.grad_accum_dtype",
        lambda f, key: (f[key], f.run.dtype, f.stage) == ("fp32", "bfloat16", 0),
        "{key}, which DeepSpeed 0.19.8 does not implement with {dtype} at stage 0; use stage 1 to"
        " 3, or remove it",
    ),
    Rule(
        "optimizer.type",
        lambda f, key: (
            (f[key], f.device) == ("Lion", "cpu") and not offloads(f.config, "optimizer")
        ),
        "{key}, which runs on a CPU only with offload_optimizer; remove the block, and use"
        " --optimizer lion",
    ),
    Rule(
        OFFLOAD, _offloads_too_early(1), "{offload} needs stage 1 or above, but {stage}; change one"
    ),
    Rule(
        f"{ZERO}offload_param",
        _offloads_too_early(3),
        "{offload} needs stage 3, but {stage}; change one",
    ),
    Rule(
        f"{OFFLOAD}.device {ZERO}offload_param.device",
        lambda f, key: f[key] == "nvme" and {"by": f.sources[key]},
        '{key} ({by}), but a checkpoint cannot hold what is on a disk; write "cpu"',
    ),
    Rule(
        GRAD_NORM,
        lambda f, key: f[key] is False and f.stage in (0, 3),
        "{key}, which only stages 1 and 2 support, but {stage}; remove it",
    ),
    Rule(
        GRAD_NORM,
        lambda f, key: f[key] is False and f.run.grad_clip > 0,
        "{key}, but gradient_clipping = {grad_clip.value} needs the norm; remove it, or give 0 for"
        " gradient_clipping",
    ),
    Rule(
        GRAD_NORM,
        lambda f, key: f[key] is False and offloads(f.config, "optimizer"),
        f"{{key}}, which is not supported with {OFFLOAD}; remove one of them",
    ),
    Rule(
        "gradient_predivide_factor prescale_gradients",
        lambda f, key: (
            (f.stage >= 2 and f[f"{ZERO}reduce_scatter"] in (MISSING, True))
            and not is_one_of(f[key], (MISSING, False, 1, 1.0))
        ),
        "{key}, which is not supported with reduce_scatter at stages 2 and 3, and {stage}; remove"
        ' it, or write "reduce_scatter": false',
    ),
    Rule(
        f"{ZERO}round_robin_gradients",
        lambda f, key: f[key] is True and f.stage == 3,
        "{key}, which only stages 1 and 2 support, but {stage}; remove it",
    ),
    Rule(
        f"{ZERO}zero_hpz_partition_size {QUANTIZED}",
        lambda f, key: f.stage < 3 and f[key] is not MISSING and not is_one_of(f[key], (False, 1)),
        '{key}, which only stage 3 supports, but {stage}; remove it, or write "stage": 3',
    ),
    Rule(
        f"{QUANTIZED} {ZERO}stage3_module_granularity_threshold",
        lambda f, key: f.device == "cpu" and f.stage == 3 and f[key] not in (MISSING, None, 0),
        "{key}, which needs a GPU; remove it",
    ),
    Rule(
        f"{ZERO}allgather_bucket_size",
        lambda f, key: f.stage in (1, 2) and (f.number(key) or 0) % 2,
        "{key}, but has to be even; write an even number",
    ),
    Rule(
        "scheduler",
        lambda f, key: f.run.muon and f[key] is not MISSING,
        "scheduler sets one learning rate, but {optimizer} has two; remove the block, and use"
        " --schedule",
    ),
    Rule(
        OFFLOAD,
        lambda f, key: f.run.muon and offloads(f.config, "optimizer"),
        f"{OFFLOAD} is not supported with {{optimizer}}; remove it, or use AdamW",
    ),
    Rule(
        "optimizer.type",
        _scales_with_gradient,
        "{key}, but {mup_base_dim} scales the rates of optimizers that normalize the gradient; use"
        " AdamW, or {mup_base_dim.remove}",
    ),
    Rule(
        f"{PARAMS}adam_w_mode",
        lambda f, key: f.run.mup_base_dim and f.optimizer == "Adam" and f[key] is False,
        "{key}, but {mup_base_dim} scales a decoupled weight decay; remove it, or"
        " {mup_base_dim.remove}",
    ),
    Rule(
        "scheduler",
        lambda f, key: f.run.mup_base_dim and f[key] is not MISSING,
        "scheduler sets one learning rate, but {mup_base_dim} sets several; remove the block, and"
        " use --schedule",
    ),
    Rule(
        f"{PARAMS}amsgrad",
        lambda f, key: f[key] is True and _is_own_adam(f),
        '{key}, but only torch\'s Adam has it; write "torch_adam": true, or remove it',
    ),
    Rule(
        "data_types.param_dtype",
        _another_dtype,
        "{key}, but {dtype}; remove it, or give --dtype {needed}",
    ),
    Rule(
        "torch_autocast.dtype",
        lambda f, key: f.run.dtype == MIXED and DTYPES.get(str(f[key])) != "bfloat16",
        '{key}, but {dtype} multiplies in bfloat16; write "auto", or use another block',
    ),
    # Measured: the losses after a start are not those of a process that goes on.
    Rule(
        "torch_autocast.lower_precision_safe_modules",
        lambda f, key: f.run.dtype == MIXED and f.stage == 3 and f[key] != [],
        "{key}, but at stage 3 a run would then not resume exactly: DeepSpeed 0.19.8 rounds weights"
        ' differently in its first step; write [], or "stage": 2',
    ),
    Rule(
        "communication_data_type",
        lambda f, key: f.run.dtype == MIXED and f.stage and f[key] not in (MISSING, None, "fp32"),
        "{key}, which DeepSpeed 0.19.8 ignores with {dtype} at stage 1 and above; remove it, or"
        " name layers in torch_autocast.lower_precision_safe_modules",
    ),
    Rule(
        f"{ZERO}zero_quantized_weights",
        lambda f, key: f.run.dtype == MIXED and f[key] is True,
        "{key}, which DeepSpeed 0.19.8 refuses with {dtype}; remove it, or use bfloat16",
    ),
    Rule(
        "wandb.enabled comet.enabled tensorboard.enabled",
        _lacks_package,
        "{key}, but the package {package} is not installed; remove the block, or run {install}",
    ),
    Rule(
        f"{ZERO}stage",
        lambda f, key: f.run.tensor_parallel > 1 and f.stage == 3,
        "{key}, which is not supported with {tensor_parallel}; use stage 0, 1 or 2, or"
        " {tensor_parallel.remove}",
    ),
    # DeepSpeed 0.19.8 then counts the gradients of the first rank only.
    Rule(
        f"{ZERO}stage",
        lambda f, key: f.run.tensor_parallel > 1 and (f.run.dtype, f.stage) == ("bfloat16", 0),
        "{key}, which is not supported with {dtype} and {tensor_parallel}; use stage 1, which needs"
        " less memory, or {tensor_parallel.remove}",
    ),
    Rule(
        OFFLOAD,
        lambda f, key: f.run.tensor_parallel > 1 and offloads(f.config, "optimizer"),
        f"{OFFLOAD} is not supported with {{tensor_parallel}}; remove it, or"
        " {tensor_parallel.remove}",
    ),
    Rule(
        f"{ZERO}round_robin_gradients flops_profiler.enabled",
        lambda f, key: f.run.tensor_parallel > 1 and f[key] is True,
        "{key}, which is not supported with {tensor_parallel}; write false there, or"
        " {tensor_parallel.remove}",
    ),
    Rule(
        f"{GRAD_NORM} {PARAMS}torch_adam data_types.grad_accum_dtype",
        lambda f, key: f.run.tensor_parallel > 1 and f[key] not in (MISSING, None, True),
        "{key}, which is not supported with {tensor_parallel}; remove it, or"
        " {tensor_parallel.remove}",
    ),
)
# DeepSpeed schedulers that support these flags; any other scheduler ignores them.
SUPPORTED_BY = {
    "schedule": (),
    "warmup_steps": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    "min_lr_ratio": ("WarmupCosineLR",),
}


def setting_faults(f: Facts) -> Iterator[Fault]:
    """Yield the faults of a filled file, and of flags beside it."""
    for rule in RULES:
        yield from rule(f)
    for kind, name in ignored_flags(f.config):
        if f.run.is_explicit(name):
            flag = given(f.run, name)
            sentence = f"scheduler.type is {kind}, which ignores {flag}; {flag.remove}"
            yield Fault("", f"{f.path}: {sentence}")
    yield from precision_faults(f.run, f.device)
    yield from unread_flag_faults(f.run)
    yield from tensor_parallel_faults(f.run)


def ignored_flags(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (type, flag) for each flag that the file's scheduler ignores."""
    scheduler = get(config, "scheduler.type")
    if scheduler is MISSING:
        return []
    ignored = [(scheduler, name) for name, types in SUPPORTED_BY.items() if scheduler not in types]
    if get(config, f"{RATE}cycle_momentum") is True:
        ignored += [("OneCycle with cycle_momentum", name) for name in ("beta1", "beta2")]
    return ignored


def precision_faults(run: RunConfig, device: str) -> Iterator[Fault]:
    """Yield the faults of float16 and TF32 where they do not apply, with or without DeepSpeed."""
    elsewhere = ", or check the run of a GPU host (--device cuda)" if run.dry_run else ""
    if run.dtype == "float16" and device == "cpu":
        dtype = given(run, "dtype")
        yield Fault("", f"{dtype} needs a GPU; use bfloat16 or float32 here{elsewhere}")
    tf32 = given(run, "tf32")
    if run.tf32 and device != "cuda":
        where = "a CPU" if device == "cpu" else device
        yield Fault("", f"{tf32} has no effect on {where}; {tf32.remove}{elsewhere}")
    elif run.tf32 and run.dtype != "float32":
        where = f"{run.dtype} ({run.sources['dtype']})"
        yield Fault("", f"{tf32} has no effect in {where}; {tf32.remove}")


def unread_flag_faults(run: RunConfig) -> Iterator[Fault]:
    """Yield the faults of given flags that the optimizer does not read."""
    for name in run.unread_flags:
        if run.is_explicit(name):
            flag, optimizer = given(run, name), given(run, "optimizer")
            reader, file = READ_BY[name][0], optimizer.source.rpartition(": ")[0]
            is_own_file = optimizer.source.rank is Rank.DEEPSPEED and not is_shipped(file)
            use = f'write "{OPTIMIZERS[reader].name}" there' if is_own_file else ""
            use = use or f"use --optimizer {reader}"
            yield Fault("", f"{flag} has no effect with {optimizer}; {flag.remove}, or {use}")


def plain_faults(run: RunConfig) -> Iterator[Fault]:
    """Yield the faults of given flags without DeepSpeed."""
    yield from unread_flag_faults(run)
    if run.tensor_parallel > 1:
        flag = given(run, "tensor_parallel")
        yield Fault("", f"{flag} needs DeepSpeed; give --deepspeed_config FILE, or {flag.remove}")


def tensor_parallel_faults(run: RunConfig) -> Iterator[Fault]:
    """Yield the flags beside which tensor parallelism is wrong or not tested."""
    if run.tensor_parallel == 1:
        return
    flag = given(run, "tensor_parallel")
    flags = {
        "dtype": (run.dtype in ("float16", MIXED), "use bfloat16 or float32"),
        "optimizer": (run.optimizer != "adamw", "use adamw"),
        "use_moe": (run.use_moe, ""),
        "qkv_bias": (run.qkv_bias, ""),
        "mup_base_dim": (run.mup_base_dim is not None, ""),
        "model": (run.hugging_face is not None, "use the built-in decoder"),
        "compile": (run.compile == "on", ""),
        "verify_interval": (run.verify_interval > 0, ""),
        "sequence_parallel": (run.sequence_parallel > 1, ""),
    }
    excluded = {name: remedy for name, (is_set, remedy) in flags.items() if is_set}
    for name, remedy in excluded.items():
        other = given(run, name)
        remedies = f"{remedy or other.remove}, or {flag.remove}"
        yield Fault("", f"{other} is not supported with {flag}; {remedies}")
    if not excluded:
        yield from _indivisible(run)


def _indivisible(run: RunConfig) -> Iterator[Fault]:
    """Yield the numbers of heads and channels that cannot be divided over the ranks."""
    width, source = run.feed_forward_width, run.sources["hidden_dim"]
    if run.hidden_dim is None:
        source = f"default for dim = {run.dim}"
    sizes = {f"{given(run, name)}": getattr(run, name) for name in ("n_heads", "n_kv_heads")}
    sizes[f"hidden_dim = {width} ({source})"] = width
    largest = gcd(*sizes.values())
    works = ", ".join(str(n) for n in range(2, largest + 1) if largest % n == 0)
    remedy = f"with this shape {works} would be possible" if works else "change the shape"
    for shown, size in sizes.items():
        if size % run.tensor_parallel:
            flag = given(run, "tensor_parallel")
            yield Fault("", f"{shown} is not divisible by {flag}; {remedy}")


def keys_without_effect(config: Mapping[str, Any], sources: Mapping[str, Origin]) -> list[str]:
    """Return the ZeRO keys of the file that have no effect at its stage or device."""
    stage = str(get(config, f"{ZERO}stage"))
    names = []
    for key, source in sources.items():
        name = key.removeprefix(ZERO)
        block = name.split(".")[0]
        if source.rank is not Rank.DEEPSPEED or not key.startswith(ZERO):
            continue
        is_of_disk = key in KEYS and KEYS[key].stages == "nvme"
        if stage not in KEYS[f"{ZERO}{block}"].stages or is_of_disk:
            names.append(name)
    return names


def with_optimizer_defaults(run: RunConfig) -> RunConfig:
    """Return the run with every value that only its optimizer reads, defaults included."""
    for name, value in run.optimizer_values.items():
        if getattr(run, name) is None:
            is_shared = name == "muon_lr" and run.muon["muon_scaling"] != "original"
            default = f"{OPTIMIZERS[run.optimizer].name}'s default"
            source = derived("learning_rate") if is_shared else Origin(default, Rank.DEFAULT)
            run = run.with_values(source, **{name: value})
    return run


OUTPUTS = {  # path -> the switch of the block that writes there, and the name of a folder in it
    "tensorboard.output_path": ("tensorboard.enabled", "tensorboard.job_name"),
    "csv_monitor.output_path": ("csv_monitor.enabled", "csv_monitor.job_name"),
    "flops_profiler.output_file": ("flops_profiler.enabled", ""),
}
JOB = "DeepSpeedJobName"  # DeepSpeed's default


def output_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the output paths of DeepSpeed by their config key."""
    paths = {}
    for key, (switch, folder) in OUTPUTS.items():
        place, job = get(config, key), get(config, folder) if folder else ""
        job = JOB if job is MISSING else job
        is_file = not folder and isinstance(place, str) and place
        if get(config, switch) is True and (is_file or folder):
            base = place if isinstance(place, str) else ""
            paths[key] = os.path.join(base, job) if isinstance(job, str) else base
    return paths


def tracker_refusal(error: Exception) -> str:
    """Return the fault and its remedy if a tracker of DeepSpeed raised `error`; else ""."""
    package = type(error).__module__.partition(".")[0]
    block = next((block for block, name in PACKAGES.items() if name == package), "")
    if not block:
        return ""
    return (
        f"{block}.enabled is true and {package} fails: {first_lines(error, None)}; correct that, or"
        f" remove the block and give --report_to {package}, which never stops the run"
    )
