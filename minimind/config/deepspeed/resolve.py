"""Resolve a DeepSpeed JSON against a run: fill every "auto" and record the source of each value.

Does not import deepspeed. Unknown keys, values that contradict an explicit flag and "auto" values
that cannot be filled are faults; all faults are reported together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minimind.config.deepspeed import schema as deepspeed_schema
from minimind.config.deepspeed.rules import adopt_optimizer, setting_faults
from minimind.config.deepspeed.values import (
    AUTO,
    BATCH,
    DEEPSPEED_ADAM,
    MICRO_BATCH,
    MISSING,
    UNCOUNTED,
    Facts,
    apply_file,
    apply_launch,
    apply_yaml_fields,
    auto_values,
    get,
    leaves,
    normalize_config,
    put,
    required_keys,
)
from minimind.config.launcher_env import Launch
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.run_config import RunConfig, deepspeed_files
from minimind.config.schedule import Schedule
from minimind.errors import UsageError, fault_error
from minimind.runtime.durable_files import read_small_text
from minimind.runtime.secret_keys import HIDDEN_VALUE, is_secret
from minimind.runtime.terminal import aligned
from minimind.runtime.urls import masked_values

# Not part of the identity: the first three are flags, the others select an implementation.
NOT_IDENTITY = ("lr", "betas", "weight_decay", "torch_adam", "foreach", "fused", "capturable")
Sections = Callable[[Mapping[str, Any], str], list[str]]


@dataclass(frozen=True)
class ResolvedConfig:
    """The resolved run, the backend and its DeepSpeed config, with the source of each value."""

    run: RunConfig
    backend: str  # deepspeed, ddp or single
    config: dict[str, Any] = field(default_factory=dict)  # for DeepSpeed; else empty
    sources: dict[str, str] = field(default_factory=dict)
    path: str = "none"  # of the DeepSpeed file

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
        return deepspeed_schema.optimizer_name(type_name) or OPTIMIZERS[self.run.optimizer].name

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
        undecided, rows = [UNCOUNTED, *(f"{name} (auto)" for name in self.run.open_flags)], []
        for key, value in leaves(masked_values(self.config)).items():
            source = self.sources[key]
            rows.append((key, json.dumps(AUTO if source in undecided else value), source))
        return aligned(rows, indent="  ")


def read_deepspeed_json(path: str, source: str = "--deepspeed_config") -> dict[str, Any]:
    """Load the object in `path`; raise UsageError, with line and column if malformed."""
    try:
        config = _parse(read_small_text(path).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}"))
    except OSError as error:
        raise UsageError(
            f"{source} {path}: {error.strerror}; name a DeepSpeed JSON file, or"
            f" {', '.join(deepspeed_files())}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}:{error.lineno}:{error.colno}: {error.msg}; correct the JSON there"
        ) from error
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise UsageError(f"{path}: {error}; correct the JSON") from error
    except KeyError as error:
        raise UsageError(f"{path}: {error.args[0]} is written twice; remove one") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: holds {type(config).__name__}, not a JSON object; write one")
    return config


def _parse(text: str) -> Any:
    """Parse JSON, else the Hjson that DeepSpeed reads: comments, trailing commas, bare keys, ...

    Raise JSONDecodeError for the first fault that is one in both.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        if not text.strip():  # an empty object in Hjson
            raise
        import hjson

        try:
            return hjson.loads(text, object_pairs_hook=_without_repeats)
        except hjson.HjsonDecodeError as other:
            in_both = "property name" not in error.msg and "trailing comma" not in error.msg
            if error.pos >= len(text.rstrip()):  # cut off
                raise error from None
            if in_both and text[error.pos : error.pos + 1] not in ("/", "#", "'"):
                raise error from None
            raise json.JSONDecodeError(other.msg, text, other.pos) from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:  # json keeps the last one
            raise KeyError(key)
        unique[key] = value
    return unique


def resolve(
    document: Mapping[str, Any],
    path: str,
    run: RunConfig,
    world_size: int,
    device: str,
    schedule: Schedule | None = None,
    launch: Launch | None = None,
    sections: Sections = lambda config, path: [],
) -> ResolvedConfig:
    """Resolve `document` (read from `path`) against `run` for `world_size` processes on `device`.

    Without `schedule`, numbers of the scheduler that follow from it are placeholders.
    `sections` returns the faults that DeepSpeed's own models find in a filled config. Raise a
    UsageError that lists all faults.
    """
    config = normalize_config(json.loads(json.dumps(document)))
    for key in (BATCH, MICRO_BATCH, "gradient_accumulation_steps"):
        if key in config and config[key] is None:  # DeepSpeed treats null as unset
            config[key] = AUTO
    faults: list[str] = []
    if launch:
        run = apply_launch(run, launch, faults)
    from_yaml = apply_yaml_fields(config, path, launch, faults) if launch else {}
    faults += deepspeed_schema.faults(config, path)
    faults += [
        f'{path}: {key} is "{HIDDEN_VALUE}", as a run writes it in place of a secret; write the'
        f" secret there, or remove the key and set what its library reads"
        for key, value in leaves(config).items()
        if value == HIDDEN_VALUE and is_secret(key)
    ]
    blocks = {key: get(config, key) for key in OBJECTS}
    wrong_types = [
        f"{path}: {key} is {json.dumps(value)}, not an object; write {{...}}"
        for key, value in blocks.items()
        if not (value is MISSING or isinstance(value, dict) or (value is None and "offload" in key))
    ]
    if wrong_types:  # the checks below read these objects
        raise fault_error([*faults, *wrong_types])
    run = apply_file(config, path, run, world_size, faults)
    run = adopt_optimizer(config, path, run, faults)
    try:
        run.micro_batch_rows(world_size)
    except UsageError as error:
        raise fault_error([*faults, str(error)]) from error
    sources = {key: path for key in leaves(config)} | from_yaml
    facts = Facts(config, run, world_size, device, schedule, path, sources)
    _fill(config, sources, facts)
    faults += _unsupported_autos(config, path, faults)
    faults += setting_faults(facts)
    # Skip DeepSpeed's message for a key that already has a fault.
    reported = [_key(fault, path) for fault in faults]
    for fault in sections(config, path):
        if not any(f"{key}.".startswith(f"{_key(fault, path)}.") for key in reported):
            faults.append(fault)
    if faults:
        raise fault_error(faults)
    return ResolvedConfig(run, "deepspeed", config, {k: sources[k] for k in leaves(config)}, path)


def _key(fault: str, path: str) -> str:
    """Return the key path at the start of a fault."""
    return fault.removeprefix(f"{path}: ").split(" ")[0].rstrip(":")


OBJECTS = ("bf16", "fp16", "zero_optimization", "optimizer", "optimizer.params", "scheduler")
OBJECTS += ("scheduler.params", "zero_optimization.offload_optimizer")
OBJECTS += ("zero_optimization.offload_param",)


def _fill(config: dict[str, Any], sources: dict[str, str], facts: Facts) -> None:
    """Fill "auto" and missing required values in `config`, and record their sources."""
    required = required_keys(facts)
    for key, (value, source) in auto_values(facts).items():
        config_value = get(config, key)
        if config_value == AUTO or (config_value is MISSING and key in required):
            put(config, key, value)
            sources[key] = source


def _unsupported_autos(config: Mapping[str, Any], path: str, faults: list[str]) -> list[str]:
    reported = tuple(f"{_key(fault, path)}." for fault in faults)
    left = [key for key, value in leaves(config).items() if value == AUTO]
    keys = [key for key in left if not f"{key}.".startswith(reported)]
    return (
        [f'{path}: "auto" is not supported for {", ".join(keys)}; write a value there']
        if keys
        else []
    )
