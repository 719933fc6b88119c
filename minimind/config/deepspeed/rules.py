"""Combinations of settings that do not train: one row each, in the order of the report.

Settings that exclude one another, that have no effect in this training loop, or that DeepSpeed's
parser accepts and its engine refuses. DeepSpeed 0.19.8 rejects some of these late and with a
traceback, silently ignores others, and trains a few of them incorrectly.
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
from minimind.config.deepspeed.document import AUTO, MISSING, get, offloads
from minimind.config.deepspeed.key_checks import Fault, is_one_of
from minimind.config.deepspeed.keys import (
    BATCH,
    DTYPES,
    KEYS,
    PARAMS,
    RATE,
    TOTAL_STEPS,
    UNCOUNTED,
    ZERO,
    Facts,
)
from minimind.config.optimizers import ADAM_TYPES, FLAG_OF_TYPE, OPTIMIZERS, READ_BY
from minimind.config.run_config import FLAGS, RunConfig
from minimind.runtime.installed import install_packages
from minimind.runtime.terminal import first_lines


@dataclass(frozen=True)
class Rule:
    """A combination that is refused, which the key `key` of the file is part of.

    In the sentence `{key}` is the key as `name is value`, `{stage}` the ZeRO stage with its source,
    and the name of a flag is that flag as `name = value (source)`. Other names are values that
    `when` returns in place of true.
    """

    key: str
    when: Callable[[Facts], object]
    sentence: str

    def __call__(self, facts: Facts) -> Iterator[Fault]:
        """Yield the fault if the file breaks the rule."""
        if not (values := self.when(facts)):
            return
        words = {name: given(facts.run, name) for name in FLAGS}
        words["key"] = f"{self.key} is {json.dumps(facts[self.key], default=str)}"
        words["stage"] = f"stage is {facts.stage} ({facts.sources[f'{ZERO}stage']})"
        sentence = self.sentence.format_map(words | (values if isinstance(values, dict) else {}))
        yield Fault(self.key, f"{facts.path}: {sentence}")


def _each(keys: str, when: Callable[[Facts, str], object], sentence: str) -> list[Rule]:
    """A rule for each of these keys."""
    return [Rule(key, lambda f, key=key: when(f, key), sentence) for key in keys.split()]


def _is_on(f: Facts, key: str) -> bool:
    return f[key] is True


def _is_set(f: Facts, key: str) -> bool:
    return f[key] not in (MISSING, None, False, 0)


def _is_below(least: float) -> Callable[[Facts, str], object]:
    return lambda f, key: (number := f.number(key)) is not None and number < least


def _is_part(f: Facts) -> bool:
    """Whether a part of the optimizer is offloaded."""
    return f.number(f"{ZERO}offload_optimizer.ratio") not in (None, 1)


def _is_own_adam(f: Facts) -> bool:
    """Whether the optimizer is DeepSpeed's Adam."""
    return f.optimizer in ADAM_TYPES and f[f"{PARAMS}torch_adam"] is not True


def _scatters(f: Facts) -> bool:
    return f.stage >= 2 and f[f"{ZERO}reduce_scatter"] in (MISSING, True)


def _other_batch(f: Facts) -> dict[str, Any]:
    run, total = f.run, f[BATCH]
    in_step = run.rows_per_step(f.world_size)
    if total == in_step or not isinstance(total, int):
        return {}
    rows, processes = run.micro_batch_rows(f.world_size), run.parallel(f.world_size).data_size
    return {
        "product": f"{rows} rows ({run.sources['batch_size']}) x {run.accumulation_steps}"
        f" micro-batches ({run.sources['accumulation_steps']}) x {processes} processes = {in_step}"
    }


def _short_warmup(f: Facts) -> bool:
    """Whether the flag says a warm-up that the file's scheduler lengthens."""
    is_short = f.run.is_explicit("warmup_steps") and f.run.warmup_steps in (0, 1)
    return is_short and f[f"{RATE}warmup_num_steps"] == 2


def _ends_in_warmup(f: Facts) -> dict[str, Any]:
    warmup, total = f[f"{RATE}warmup_num_steps"], f[TOTAL_STEPS]
    total = f.run.max_steps if total is MISSING else total
    is_counted = f.sources.get(TOTAL_STEPS) != UNCOUNTED
    if not (isinstance(warmup, int) and isinstance(total, int) and total < warmup and is_counted):
        return {}
    by = f.run.sources["max_steps"] if total == f.run.max_steps else "the steps of the run"
    return {"total": total, "by": by, "warmup": warmup, "source": f.run.sources["warmup_steps"]}


def _another_dtype(f: Facts) -> dict[str, Any]:
    dtype = DTYPES.get(str(f["data_types.param_dtype"]), f.run.dtype)
    return {"needed": dtype} if dtype != f.run.dtype else {}


def _normalizes(f: Facts) -> bool:
    flag = FLAG_OF_TYPE.get(f.optimizer)
    return flag is None or OPTIMIZERS[flag].normalizes


def _loses_savings(f: Facts, key: str) -> bool:
    """Whether a key would not save the memory or traffic that it promises, below stage 3."""
    return f.stage < 3 and f[key] not in (MISSING, AUTO) and not is_one_of(f[key], (False, 1))


# Blocks that import a package when the engine is built.
PACKAGES = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
OFFLOAD, GRAD_NORM = f"{ZERO}offload_optimizer", f"{ZERO}compute_grad_norm"
RULES = (
    Rule(
        BATCH,
        _other_batch,
        '{key}, but {product}; write "auto" there, or change --batch_size or --accumulation_steps',
    ),
    *_each(
        f"{RATE}cycle_min_mom {RATE}cycle_max_mom {RATE}decay_mom_rate",
        lambda f, key: f[key] is not MISSING and f[f"{RATE}cycle_momentum"] is False,
        "{key} and cycle_momentum is false, which ignores it; write true, or remove it",
    ),
    *_each(
        f"{RATE}warmup_num_steps",
        _is_below(2),
        "{key}, and DeepSpeed's schedulers warm up over 2 steps at least; write 2 or more",
    ),
    Rule(
        "scheduler",
        _short_warmup,
        "{warmup_steps}, and DeepSpeed's schedulers warm up over 2 steps at least; raise it, or"
        " remove the scheduler block",
    ),
    Rule(
        TOTAL_STEPS,
        _ends_in_warmup,
        f"{TOTAL_STEPS} = {{total}} ({{by}}) is less than warmup_num_steps = {{warmup}}"
        " ({source}); lower the warm-up, or train longer",
    ),
    *_each(
        f"steps_per_print gradient_predivide_factor {RATE}cycle_first_step_size"
        f" {RATE}lr_range_test_step_size",
        lambda f, key: (number := f.number(key)) is not None and number <= 0,
        "{key}, not above 0; change it",
    ),
    *_each(
        f"{PARAMS}eps {RATE}warmup_min_lr {RATE}cycle_min_lr",
        _is_below(0),
        "{key}, not 0 or above; change it",
    ),
    Rule(
        "flops_profiler.enabled",
        lambda f: f.run.compile == "on" and f["flops_profiler.enabled"] is True,
        "{key}, and in a model that is compiled the profiler miscounts and has it compiled again"
        " and again; {compile.drop}, or switch the profiler off",
    ),
    Rule(
        f"{ZERO}stage",
        lambda f: f.run.compile == "on" and f.stage == 3,
        "{stage}, and with {compile} its hooks in every module would be compiled again and again;"
        " {compile.drop}, or use stage 2",
    ),
    Rule(
        f"{ZERO}stage",
        lambda f: f.run.dtype == "float16" and f.stage == 0 and f.device != "cpu",
        "{dtype} trains incorrectly at ZeRO stage 0 in DeepSpeed 0.19.8 (gradients are unscaled"
        " that were never scaled); use bfloat16, or stage 1 to 3",
    ),
    Rule(
        "data_types.grad_accum_dtype",
        lambda f: (
            f["data_types.grad_accum_dtype"] == "fp32" and (f.run.dtype, f.stage) == ("bfloat16", 0)
        ),
        "{key} in bfloat16 at stage 0, which DeepSpeed 0.19.8 has not implemented; use stage 1, 2"
        " or 3",
    ),
    Rule(
        "optimizer.type",
        lambda f: (
            f.optimizer == "Lion" and f.device == "cpu" and not offloads(f.config, "optimizer")
        ),
        "{key}, which runs on a CPU only with offload_optimizer; remove the block, and use"
        " --optimizer lion",
    ),
    Rule(
        OFFLOAD,
        lambda f: (
            offloads(f.config, "optimizer")
            and f.stage < 1
            and {"by": f.sources[f"{OFFLOAD}.device"]}
        ),
        f"{OFFLOAD} ({{by}}) needs stage 1 or above and {{stage}}; change one",
    ),
    Rule(
        f"{ZERO}offload_param",
        lambda f: (
            offloads(f.config, "param")
            and f.stage < 3
            and {"by": f.sources[f"{ZERO}offload_param.device"]}
        ),
        f"{ZERO}offload_param ({{by}}) needs stage 3 or above and {{stage}}; change one",
    ),
    *_each(
        f"{OFFLOAD}.device {ZERO}offload_param.device",
        lambda f, key: f[key] == "nvme" and {"by": f.sources[key]},
        '{key} ({by}), and what is on a disk has no checkpoints; write "cpu"',
    ),
    Rule(
        f"{OFFLOAD}.ratio",
        lambda f: _is_part(f) and f.stage != 3,
        "{key} and {stage}, and it needs stage 3; remove it",
    ),
    Rule(
        f"{OFFLOAD}.ratio",
        lambda f: _is_part(f) and not (_is_own_adam(f) and offloads(f.config, "optimizer")),
        "{key}, which needs DeepSpeed's own Adam on the CPU; remove it, or write"
        ' "torch_adam": false in an AdamW block',
    ),
    Rule(
        GRAD_NORM,
        lambda f: f[GRAD_NORM] is False and f.stage in (0, 3),
        "{key}, which this stage refuses ({stage}); remove it",
    ),
    Rule(
        GRAD_NORM,
        lambda f: (
            f[GRAD_NORM] is False
            and (f.number("gradient_clipping") or 0) > 0
            and {"clipping": f["gradient_clipping"]}
        ),
        "{key} beside gradient_clipping = {clipping}; remove it, or set that to 0",
    ),
    Rule(
        GRAD_NORM,
        lambda f: f[GRAD_NORM] is False and offloads(f.config, "optimizer"),
        f"{{key}} beside {OFFLOAD}; remove one",
    ),
    Rule(
        "gradient_predivide_factor",
        lambda f: _scatters(f) and f["gradient_predivide_factor"] not in (MISSING, 1),
        '{key} beside reduce_scatter, and {stage}; remove it, or write "reduce_scatter": false',
    ),
    Rule(
        "prescale_gradients",
        lambda f: _scatters(f) and f["prescale_gradients"] is True,
        '{key} beside reduce_scatter, and {stage}; remove it, or write "reduce_scatter": false',
    ),
    Rule(
        f"{ZERO}round_robin_gradients",
        lambda f: f[f"{ZERO}round_robin_gradients"] is True and f.stage == 3,
        "{key}, which is for stages 1 and 2, and {stage}; remove it",
    ),
    *_each(
        f"{ZERO}zero_hpz_partition_size {ZERO}zero_quantized_weights"
        f" {ZERO}zero_quantized_gradients",
        _loses_savings,
        '{key}, which only stage 3 supports, and {stage}; remove it, or write "stage": 3',
    ),
    *_each(
        f"{ZERO}zero_quantized_weights {ZERO}zero_quantized_gradients"
        f" {ZERO}stage3_module_granularity_threshold",
        lambda f, key: f.device == "cpu" and f.stage == 3 and _is_set(f, key),
        "{key} and needs a GPU; remove it",
    ),
    Rule(
        f"{ZERO}allgather_bucket_size",
        lambda f: f.stage in (1, 2) and (f.number(f"{ZERO}allgather_bucket_size") or 0) % 2,
        "{key}, an odd number; write an even one",
    ),
    Rule(
        "scheduler",
        lambda f: f.run.muon and f["scheduler"] is not MISSING,
        "scheduler sets one learning rate, and {optimizer} has two; take a file without the block,"
        " and use --schedule",
    ),
    Rule(
        OFFLOAD,
        lambda f: f.run.muon and offloads(f.config, "optimizer"),
        f"{OFFLOAD} is not supported with {{optimizer}}; take a file without it, or use AdamW",
    ),
    Rule(
        "optimizer.type",
        lambda f: f.run.mup_base_dim and not _normalizes(f),
        "{key}, and {mup_base_dim} has rates for optimizers that normalize the gradient; use AdamW,"
        " or {mup_base_dim.drop}",
    ),
    Rule(
        f"{PARAMS}adam_w_mode",
        lambda f: (
            f.run.mup_base_dim and f.optimizer == "Adam" and f[f"{PARAMS}adam_w_mode"] is False
        ),
        "{key}, and {mup_base_dim} scales a decoupled weight decay; remove it, or"
        " {mup_base_dim.drop}",
    ),
    Rule(
        "scheduler",
        lambda f: f.run.mup_base_dim and f["scheduler"] is not MISSING,
        "scheduler sets one learning rate, and {mup_base_dim} sets several; remove the block, and"
        " use --schedule",
    ),
    Rule(
        f"{PARAMS}amsgrad",
        lambda f: _is_own_adam(f) and f[f"{PARAMS}amsgrad"] is True,
        '{key}, and only torch\'s Adam has it; write "torch_adam": true, or remove it',
    ),
    Rule(
        "data_types.param_dtype",
        _another_dtype,
        "{key}, and {dtype}; remove it, or give --dtype {needed}",
    ),
    *(
        Rule(
            f"{block}.enabled",
            lambda f, block=block: (
                f[f"{block}.enabled"] is True and find_spec(PACKAGES[block]) is None
            ),
            f"{{key}} and the package {package} is not installed; remove the block, or"
            f" {install_packages(package)}",
        )
        for block, package in PACKAGES.items()
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
            sentence = f"scheduler.type is {kind}, which ignores {flag}; {flag.drop}, or change it"
            yield Fault("", f"{f.path}: {sentence}")
    yield from precision_faults(f.run, f.device)
    yield from unread_flag_faults(f.run)
    yield from tensor_parallel_faults(f)


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
        yield Fault("", f"{tf32} has no effect on {where}; drop it{elsewhere}")
    elif run.tf32 and run.dtype != "float32":
        where = f"{run.dtype} ({run.sources['dtype']})"
        yield Fault("", f"{tf32} has no effect in {where}; drop it")


def unread_flag_faults(run: RunConfig) -> Iterator[Fault]:
    """Yield the faults of given flags that the optimizer does not read."""
    for name in run.unread_flags:
        if run.is_explicit(name):
            flag, optimizer = given(run, name), given(run, "optimizer")
            remedy = f"{flag.drop}, or use --optimizer {READ_BY[name][0]}"
            yield Fault("", f"{flag} has no effect with {optimizer}; {remedy}")


def plain_faults(run: RunConfig) -> Iterator[Fault]:
    """Yield the faults of given flags without DeepSpeed."""
    yield from unread_flag_faults(run)
    if run.tensor_parallel > 1:
        flag = given(run, "tensor_parallel")
        yield Fault("", f"{flag} needs DeepSpeed; give --deepspeed_config FILE, or drop it")


def tensor_parallel_faults(f: Facts) -> Iterator[Fault]:
    """Yield what is wrong, or not tested, beside tensor parallelism."""
    run = f.run
    if run.tensor_parallel == 1:
        return
    torch_adam, accumulated = f[f"{PARAMS}torch_adam"], f["data_types.grad_accum_dtype"]
    keys = {
        f"{ZERO}stage is 3": (f.stage == 3, "use stage 0, 1 or 2"),
        OFFLOAD: (offloads(f.config, "optimizer"), "remove it"),
        f"{ZERO}round_robin_gradients": (f[f"{ZERO}round_robin_gradients"] is True, "remove it"),
        f"{GRAD_NORM} is false": (f[GRAD_NORM] is False, "remove it"),
        "data_types.grad_accum_dtype": (accumulated not in (MISSING, None), "remove it"),
        f"{PARAMS}torch_adam is false": (torch_adam is False, "remove it"),
        "flops_profiler": (f["flops_profiler.enabled"] is True, "switch it off"),
        # DeepSpeed 0.19.8 then counts the gradients of the first rank only.
        f"{ZERO}stage is 0 with {given(run, 'dtype')}": (
            f.stage == 0 and run.dtype == "bfloat16",
            "use stage 1, which needs less memory",
        ),
    }
    flags = {
        "dtype": (run.dtype == "float16", "use bfloat16 or float32"),
        "optimizer": (run.optimizer != "adamw", "use adamw"),
        "use_moe": (run.use_moe, "drop it"),
        "qkv_bias": (run.qkv_bias, "drop it"),
        "mup_base_dim": (run.mup_base_dim is not None, "drop it"),
        "model": (run.hugging_face is not None, "use the built-in decoder"),
        "compile": (run.compile == "on", "drop it"),
        "verify_interval": (run.verify_interval > 0, "drop it"),
        "sequence_parallel": (run.sequence_parallel > 1, "drop it"),
    }
    excluded = [(f"{f.path}: {key}", remedy) for key, (is_set, remedy) in keys.items() if is_set]
    excluded += [(given(run, name), remedy) for name, (is_set, remedy) in flags.items() if is_set]
    flag = given(run, "tensor_parallel")
    for what, remedy in excluded:
        sentence = f"{what} is not supported with {flag}; {remedy}, or drop tensor_parallel"
        yield Fault("", sentence)
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


def keys_without_effect(
    config: Mapping[str, Any], sources: Mapping[str, str], path: str
) -> list[str]:
    """Return the ZeRO keys of the file (`path`) that have no effect at its stage or device."""
    stage = str(get(config, f"{ZERO}stage"))
    names = []
    for key, source in sources.items():
        name = key.removeprefix(ZERO)
        block = name.split(".")[0]
        if source != path or not key.startswith(ZERO):
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
            source = "derived: learning_rate" if is_shared else default
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
