"""Faults of a DeepSpeed JSON: unknown keys and values of the wrong type, each with its remedy.

DeepSpeed silently ignores unknown keys: with `zero_optimisation` it runs stage 0. The contents of
compile, hybrid_engine, tensor_parallel, weight_quantization, comms_logger and the monitors are not
checked here, because DeepSpeed has strict models for them. Imports neither deepspeed nor torch.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minimind.config.deepspeed.keys import (
    ANY_CASE,
    AUTO,
    CHOICES,
    FIELD_NAMES,
    HOME,
    MODELLED,
    NEEDED,
    OPTIMIZERS,
    PARAMS,
    REFUSED_OPTIMIZERS,
    REMOVED,
    SCHEDULERS,
    SECTIONS,
    SUCCESSORS,
    TOP_LEVEL,
    VERSION,
)

INSIDE = SECTIONS | MODELLED
MANY = 20  # names in a message


def faults(config: Mapping[str, Any], path: str) -> list[str]:
    """Return one sentence per unknown key or mistyped value in a normalized `config` of `path`.

    Checks types, not ranges; "auto" is valid everywhere. Never raises.
    """
    if not isinstance(config, Mapping):
        return [f"{path}: holds {_shown(config)}, not a JSON object; write one"]
    problems = _members("", config, TOP_LEVEL) + _extremes("", config)
    problems += _built("optimizer", config.get("optimizer"), OPTIMIZERS, "AdamW")
    problems += _built("scheduler", config.get("scheduler"), SCHEDULERS, "WarmupLR")
    return [f"{path}: {fault}" for fault in problems]


def optimizer_name(written: Any) -> str | None:
    """Return the optimizer that DeepSpeed builds for a type, as in `OPTIMIZERS`, or None."""
    if not isinstance(written, str):
        return None
    lowered = {name.lower(): name for name in ANY_CASE}
    return lowered.get(written.lower(), written if written in OPTIMIZERS else None)


def _members(
    where: str, block: Any, kinds: Mapping[str, str], what: str = f"key of DeepSpeed {VERSION}"
) -> list[str]:
    """The faults of an object's keys and values; other types are reported one level up."""
    problems = []
    for key, value in block.items() if isinstance(block, Mapping) else ():
        name = f"{where}{key}"
        if name in REMOVED:
            problems += _removed(name, value, block)
        elif key in kinds:
            problems += _wrong(name, value, kinds[key])
            problems += _members(f"{name}.", value, INSIDE[name]) if name in INSIDE else []
        elif name in FIELD_NAMES:
            problems.append(
                f"{name} is another name of {FIELD_NAMES[name]}, which is there too; remove one"
            )
        else:
            problems.append(f"{name} is no {what}; {_advice(str(key), kinds, where)}")
    return problems


def _extremes(where: str, value: Any) -> list[str]:
    """Faults of NUL characters and numbers above 64 bits, at any depth."""
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [one for key, v in pairs for one in _extremes(f"{where}.{key}".lstrip("."), v)]
    if isinstance(value, str) and "\0" in value:
        return [f"{where} holds a NUL character; remove it"]
    if isinstance(value, int) and abs(value) >= 2**63:
        return [f"{where} is a number of more than 64 bits; write a smaller one"]
    return []


def _removed(name: str, value: Any, block: Mapping[str, Any]) -> list[str]:
    """Fault of a removed or renamed key, unless it is switched off."""
    if name not in SUCCESSORS or value not in (False, None):
        return [f"{name} {REMOVED[name]}"]
    beside = [key for key in SUCCESSORS[name] if key in block]
    return [f"{name} is an old name beside {beside[0]}; remove it"] if beside else []


def _built(name: str, block: Any, types: Mapping[str, str], example: str) -> list[str]:
    """The faults of an optimizer's or scheduler's type and parameters."""
    if not isinstance(block, Mapping):
        return []
    if "type" not in block:
        return [f'{name} has no type, so that DeepSpeed ignores it; write "type": "{example}"']
    written, params = block["type"], block.get("params", {})
    if not isinstance(written, str) or written == AUTO:
        return []
    known = (optimizer_name(written) or "") if name == "optimizer" else written
    if known not in types:
        refused = {key.lower(): clause for key, clause in REFUSED_OPTIMIZERS.items()}
        if name == "optimizer" and written.lower() in refused:
            return [f'{name}.type is "{written}", which {refused[written.lower()]}']
        advice = _advice(written, types, f"{name}.")
        return [f"{name}.type is {_shown(written)}, no {name} of DeepSpeed {VERSION}; {advice}"]
    kinds = {param: PARAMS.get(param, "number") for param in types[known].split()}
    problems = _members(f"{name}.params.", params, kinds, f"parameter of {known}")
    missing = [n for n in NEEDED.get(known, ()) if isinstance(params, Mapping) and n not in params]
    required = f"is missing; {known} needs it, write one"
    return problems + [f"{name}.params.{n} {required}" for n in missing]


def _advice(name: str, names: Iterable[str], where: str) -> str:
    """Return the remedy for a name that is not among `names`."""
    if name.startswith(("_", "#", "//")) or "comment" in name.lower():
        return "JSON has no place for notes, remove it"
    if not where and name in HOME:
        return f"write it inside {HOME[name]}"
    lowered = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"did you mean {lowered[close[0]]}?"
    few = where and len(lowered) <= MANY
    return f"there are {', '.join(lowered.values())}" if few else "remove it"


def _wrong(name: str, value: Any, kind: str) -> list[str]:
    """Fault of a value of the wrong type or outside its choices; else empty."""
    if isinstance(value, str) and value == AUTO:
        return []
    kinds = kind.split("|")
    if not any(_FITS[kind][1](value) for kind in kinds):
        is_object = kinds[0] == "object"
        words = " or ".join(_FITS[kind][0] for kind in (kinds[:1] if is_object else kinds))
        advice = "write {...}" if is_object else "write one"
        return [f"{name} is {_shown(value)}, not {words}; {advice}"]
    choices = CHOICES.get(name)
    if choices and isinstance(value, str) and value not in choices:
        return [f"{name} is {_shown(value)}, not one of {', '.join(choices)}; write one"]
    return []


def _number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


_FITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("anything", lambda value: True),  # checked in another module
    "object": ("an object", lambda value: isinstance(value, Mapping)),
    "list": ("a list", lambda value: isinstance(value, list | tuple)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: _number(value) and isinstance(value, int)),
    # As pydantic reads it: 5e8 is one.
    "whole": ("a whole number", lambda value: _number(value) and value == int(value)),
    "number": ("a number", _number),
    "text": ("a text", lambda value: isinstance(value, str)),
    "null": ("null", lambda value: value is None),
}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


# DeepSpeed's pydantic models of sections.
MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
}


def format_model_fault(section: str, fault: Any) -> str:
    """Format an error of such a model as `SECTION.KEY is VALUE: reason`."""
    key = ".".join(map(str, (section, *fault["loc"])))
    if fault["type"] == "extra_forbidden":
        return f"{key} is no key of DeepSpeed's"
    given = f" is {fault['input']!r}" if fault["loc"] else ""
    return f"{key}{given}: {fault['msg']}"
