"""Resolve a DeepSpeed JSON against a run: fill every "auto" and record the source of each value.

A value of the file overrides a default of the run, with the file as its source; one that
contradicts an explicit flag is a fault that names both values and both remedies. Unknown keys and
"auto" values that cannot be filled are faults too; all faults are reported together. DeepSpeed
itself is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from minimind.config.deepspeed.adopt import (
    adopt_file,
    adopt_launch,
    adopt_optimizer,
    adopt_zero_fields,
)
from minimind.config.deepspeed.document import AUTO, MISSING, get, leaves, put
from minimind.config.deepspeed.key_checks import (
    Fault,
    is_one_of,
    key_faults,
    normalize_config,
    without_effect,
)
from minimind.config.deepspeed.keys import (
    ACCUMULATION,
    BATCH,
    DEEPSPEED_ADAM,
    KEYS,
    MICRO_BATCH,
    Facts,
    Value,
    optimizer_name,
)
from minimind.config.deepspeed.rules import setting_faults
from minimind.config.launcher_env import Launch
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.origin import Origin, Rank
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.errors import UsageError, fault_error
from minimind.runtime.terminal import aligned
from minimind.runtime.urls import masked_values

# Not part of the identity: the first three are flags, the others select an implementation.
NOT_IDENTITY = ("lr", "betas", "weight_decay", "torch_adam", "foreach", "fused", "capturable")
# Objects that rules read; offload_* may be null.
OBJECTS = ("bf16", "fp16", "zero_optimization", "optimizer", "optimizer.params", "scheduler")
OBJECTS += ("torch_autocast", "scheduler.params", "zero_optimization.offload_optimizer")
OBJECTS += ("zero_optimization.offload_param",)
T = TypeVar("T")


@dataclass(frozen=True)
class ResolvedConfig:
    """The resolved run, the backend and its DeepSpeed config, with the source of each value."""

    run: RunConfig
    backend: str  # deepspeed, ddp or single
    config: dict[str, Any] = field(default_factory=dict)  # for DeepSpeed; else empty
    sources: dict[str, Origin] = field(default_factory=dict)
    path: str = "none"  # of the DeepSpeed file
    adam_fault: str = ""  # why torch's AdamW replaces DeepSpeed's, if it does

    @property
    def zero_stage(self) -> int | None:
        """ZeRO stage; None without DeepSpeed."""
        return int(self.config["zero_optimization"]["stage"]) if self.config else None

    @property
    def scheduler(self) -> str | None:
        """Type of DeepSpeed's scheduler; None if this package sets the learning rate."""
        return self.config.get("scheduler", {}).get("type")

    @property
    def optimizer(self) -> str:
        """Name of the optimizer: from the file, else of --optimizer."""
        type_name = self.config.get("optimizer", {}).get("type")
        return optimizer_name(type_name) or OPTIMIZERS[self.run.optimizer].name

    @property
    def optimizer_params(self) -> dict[str, Any]:
        """Optimizer parameters that affect updates and have no flag."""
        row, values = OPTIMIZERS[self.run.optimizer], self.run.optimizer_values
        if row.keeps_block:  # named as in the block
            values = {key: values[flag] for key, flag in row.params.items()}
        values = {k: value for k, value in values.items() if row.unrecorded.get(k) != value}
        params = self.config.get("optimizer", {}).get("params", {})
        written = {
            key: value
            for key, value in params.items()
            if key not in NOT_IDENTITY and value not in DEEPSPEED_ADAM.get(key, ())
        }
        return {**row.fixed, **values, **written}

    def table(self) -> str:
        """One line per value: key path, value, source; "auto" for one that the start decides."""
        rows = []
        for key, value in leaves(masked_values(self.config)).items():
            source = self.sources[key]
            rows.append((key, json.dumps(AUTO if source.rank is Rank.OPEN else value), source))
        return aligned(rows, indent="  ")


def collected(layers: Generator[Fault, None, T]) -> tuple[T, list[Fault]]:
    """Return what `layers` returns, and the faults that it yields."""
    faults: list[Fault] = []
    while True:
        try:
            faults.append(next(layers))
        except StopIteration as end:
            return end.value, faults


def require_none(faults: Iterable[Fault]) -> None:
    """Raise a UsageError of all faults; a key is reported once, and what it holds with it."""
    kept: list[Fault] = []
    for fault in faults:
        keys = [other.key for other in kept if other.key]
        if not any(f"{fault.key}.".startswith(f"{key}.") for key in keys):
            kept.append(fault)
    if kept:
        raise fault_error([fault.sentence for fault in kept])


def resolve(
    document: Mapping[str, Any],
    path: str,
    run: RunConfig,
    world_size: int,
    device: str,
    launch: Launch | None = None,
    adam_fault: str = "",
) -> ResolvedConfig:
    """Resolve `document` (read from `path`) against `run` for `world_size` processes on `device`.

    `adam_fault` says why torch's AdamW replaces DeepSpeed's, if it does.
    Numbers of the scheduler that follow from the steps of the run are placeholders, which
    `completed` replaces. Raise a UsageError that lists all faults.
    """
    config = normalize_config(json.loads(json.dumps(document)))
    for key in (BATCH, MICRO_BATCH, ACCUMULATION):
        if key in config and config[key] is None:  # DeepSpeed treats null as unset
            config[key] = AUTO
    facts = Facts(config, run, world_size, device, path=path, adam_fault=adam_fault)
    facts, faults = collected(_resolved(config, facts, launch or Launch()))
    require_none(faults)
    sources = {key: facts.sources[key] for key in leaves(config)}
    return ResolvedConfig(facts.run, "deepspeed", config, sources, path, adam_fault)


def _resolved(
    config: dict[str, Any], facts: Facts, launch: Launch
) -> Generator[Fault, None, Facts]:
    """Fill `config`, which is that of `facts`; return what its values follow from.

    After faults of types that rules read no further fault is looked for.
    """
    path, world_size = facts.path, facts.world_size
    run = yield from adopt_launch(facts.run, launch)
    from_launcher = yield from adopt_zero_fields(config, path, launch)
    yield from key_faults(config, path)
    blocks = {key: get(config, key) for key in OBJECTS}
    if any(not isinstance(v, dict) for v in blocks.values() if v not in (MISSING, None)):
        return facts
    if any(value is None for key, value in blocks.items() if "offload" not in key):
        return facts
    run = yield from adopt_file(config, path, run, world_size)
    run = yield from adopt_optimizer(config, path, run)
    try:
        run = run.with_micro_batches(world_size)
    except UsageError as error:
        yield Fault("", str(error))
        return facts
    sources = dict.fromkeys(leaves(config), Origin(path, Rank.DEEPSPEED)) | from_launcher
    facts = replace(facts, run=run, sources=sources)
    sources |= _fill(config, facts)
    for key, value in leaves(config).items():
        if value == AUTO:
            yield Fault(key, f'{path}: "auto" is not supported for {key}; write a value there')
    yield from without_effect(config, path)
    if is_one_of(facts.stage, (0, 1, 2, 3)):
        yield from setting_faults(facts)
    return facts


def completed(
    resolved: ResolvedConfig,
    run: RunConfig,
    world_size: int,
    device: str,
    schedule: Schedule | None,
) -> ResolvedConfig:
    """Fill again what `resolve` filled, with the final numbers of `run` and its schedule.

    Raise a UsageError that lists the faults of the numbers.
    """
    config, sources = deepcopy(resolved.config), dict(resolved.sources)
    path, fault = resolved.path, resolved.adam_fault
    facts = Facts(config, run, world_size, device, schedule, path, sources, fault)
    for key, (value, source) in auto_values(facts).items():
        if key in sources and sources[key].rank not in (Rank.LAUNCHER, Rank.DEEPSPEED):
            put(config, key, value)
            sources[key] = source
    require_none(setting_faults(facts))
    return replace(resolved, run=run, config=config, sources=sources)


def auto_values(facts: Facts) -> dict[str, Value]:
    """Return value and source, by key path, of every key that this package can fill."""
    values: dict[str, Value | None] = {}
    for path, key in KEYS.items():
        if key.fill:
            values[path] = key.fill(facts)
        elif key.flag:
            values[path] = getattr(facts.run, key.flag), facts.by(key.flag)
    return {path: value for path, value in values.items() if value is not None}


def _fill(config: dict[str, Any], facts: Facts) -> dict[str, Origin]:
    """Fill "auto" and missing required values in `config`; return their sources."""
    required = {path for path, key in KEYS.items() if key.needed(facts)}
    sources = {}
    for key, (value, source) in auto_values(facts).items():
        written = get(config, key)
        if written == AUTO or (written is MISSING and key in required):
            put(config, key, value)
            sources[key] = source
    return sources
