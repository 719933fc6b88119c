"""Each value of a DeepSpeed JSON as DeepSpeed reads it, and the faults of names and types."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from minimind.config.deepspeed.document import AUTO, MISSING, get, leaves
from minimind.config.deepspeed.keys import (
    CONVERTED,
    FIELD_NAMES,
    KEYS,
    MAY_BE_OFF,
    OPTIMIZER_PARAMS,
    REMOVED,
    SCHEDULER_PARAMS,
    SECTIONS,
    VERSION,
    ZERO,
    optimizer_name,
)
from minimind.runtime.secret_keys import HIDDEN_VALUE, is_secret, without_secret
from minimind.runtime.terminal import shorten_line
from minimind.runtime.urls import masked_values

SWITCHED = ("autotuning", "data_efficiency", "expert_parallel", "hybrid_engine")
MANY = 20  # names in a message
# What pydantic takes for a boolean, in any case.
_TRUE = ("true", "t", "yes", "y", "on", "1")
_FALSE = ("false", "f", "no", "n", "off", "0")
_TYPES = {"object": Mapping, "list": list | tuple, "bool": bool, "text": str}
_WORDS = {
    "object": "an object",
    "list": "a list",
    "bool": "true or false",
    "int": "a whole number",
    "whole": "a whole number",
    "number": "a number",
    "text": "a text",
    "null": "null",
}


class Fault(NamedTuple):
    """A mistake in a configuration: the key of the file, empty for flags, and one sentence."""

    key: str
    sentence: str


def normalize_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` with every value as DeepSpeed reads it.

    Values that DeepSpeed does not convert stay as they are, including strings for booleans that it
    only tests for truth, where "false" would be true.
    """
    normalized = _normalized("", config)
    written = normalized.get("optimizer")
    if isinstance(written, dict) and (name := optimizer_name(written.get("type"))):
        written["type"] = name
    return normalized


def _normalized(section: str, block: Mapping[str, Any]) -> dict[str, Any]:
    normalized: dict[str, Any] = {}
    for written, value in block.items():
        name = f"{section}.{written}".lstrip(".")
        alias = FIELD_NAMES.get(name, written)
        key = written if alias in block else alias  # both together are a fault
        row = KEYS.get(f"{section}.{key}".lstrip("."))
        kind = row.kind if row else ""
        if isinstance(value, Mapping):
            value = _normalized(name, value)
        elif not section and isinstance(kind, tuple) and isinstance(value, str):
            value = value.lower()  # as DeepSpeed does before it compares
        elif section in CONVERTED and value != AUTO:
            value = _converted(value, "whole" if key == "stage" else kind)
        normalized[key] = value
    return normalized


def _converted(value: Any, kind: Any) -> Any:
    """Convert `value` as a pydantic field of `kind` does; unchanged if pydantic rejects it."""
    if not isinstance(kind, str) or not isinstance(value, str | int | float):
        return value
    kind = kind.removesuffix("|null")
    if kind == "bool":
        word = str(int(value)) if value in (0, 1) else str(value).lower()
        return True if word in _TRUE else False if word in _FALSE else value
    if kind not in ("whole", "number") or isinstance(value, int):
        return value
    try:
        is_of_int = isinstance(value, str) and (kind == "whole" or value.strip("+-_ ").isdecimal())
        number = int(value) if is_of_int else float(value)
        return int(number) if kind == "whole" and number == int(number) else number
    except (ValueError, OverflowError):
        return value


def key_faults(config: Mapping[str, Any], path: str) -> Iterator[Fault]:
    """Yield the faults of names and types in the normalized `config` of `path`.

    Types are checked, not ranges; "auto" is valid everywhere.
    """
    faults = {
        **_unknown("", config, [key.name for key in SECTIONS[""]]),
        **_block_faults("optimizer", config.get("optimizer"), OPTIMIZER_PARAMS, "AdamW"),
        **_block_faults("scheduler", config.get("scheduler"), SCHEDULER_PARAMS, "WarmupLR"),
    }
    for name, value in _values(config):
        block, _, param = name.partition(".params.")
        if name in faults or (param and f"{block}.type" in faults):
            continue
        if fault := _wrong_value(name, value):
            faults[name] = fault
    for name, fault in faults.items():
        yield Fault(name, f"{path}: {name} {fault}")


def _unknown(
    section: str, block: Any, names: Iterable[str], what: str = f"key of DeepSpeed {VERSION}"
) -> dict[str, str]:
    """What is wrong with the names in a section, and in the sections in it."""
    faults: dict[str, str] = {}
    for written in block if isinstance(block, Mapping) else ():
        name = f"{section}.{written}".lstrip(".")
        if name in REMOVED:
            if name not in MAY_BE_OFF or block[written] not in (False, None):
                faults[name] = REMOVED[name]
        elif name in FIELD_NAMES:
            other = FIELD_NAMES[name]
            faults[name] = f"is another name of {other}, which is also there; remove one of them"
        elif written not in names:
            faults[name] = f"is not a {what}; {_advice(written, names, section)}"
        elif name in SECTIONS and not name.endswith(".params"):
            faults |= _unknown(name, block[written], [key.name for key in SECTIONS[name]])
    return faults


def _block_faults(
    block: str, written: Any, params_of: Mapping[str, str], example: str
) -> dict[str, str]:
    """What is wrong with the type of an optimizer or scheduler and the names of its parameters."""
    if not isinstance(written, Mapping):
        return {}
    if "type" not in written:
        return {block: f'has no type, so DeepSpeed ignores it; write "type": "{example}"'}
    kind = written["type"]
    if not isinstance(kind, str) or kind == AUTO:
        return {}
    name = optimizer_name(kind) if block == "optimizer" else kind
    if name is None or name not in params_of:
        advice = _near(kind, params_of) or "write one of these"
        return {f"{block}.type": f"is {_shown(kind)}, not one of {', '.join(params_of)}; {advice}"}
    params = written.get("params", {})
    faults = _unknown(f"{block}.params", params, params_of[name].split(), f"parameter of {name}")
    if name == "OneCycle" and isinstance(params, Mapping):
        for needed in ("cycle_min_lr", "cycle_max_lr"):
            if needed not in params:
                faults[f"{block}.params.{needed}"] = f"is missing, but {name} needs it; add it"
    return faults


def _advice(name: str, names: Iterable[str], section: str) -> str:
    """The remedy for a name that is not among `names`."""
    if name.startswith(("_", "#", "//")) or "comment" in name.lower():
        return "remove it, or write it as a comment (// ...)"
    homes = [home for home, keys in SECTIONS.items() if name in [key.name for key in keys]]
    if f"{ZERO}{name}" in FIELD_NAMES:
        homes.append("zero_optimization")
    if not section and homes and name not in ("enabled", "type", "params", "device"):
        return f"write it inside {homes[0]}"
    if near := _near(name, names):
        return near
    known = [*names]
    return f"the keys are {', '.join(known)}" if section and len(known) <= MANY else "remove it"


def _near(name: str, names: Iterable[str]) -> str:
    """Ask whether another name is meant; empty if none is near."""
    lowered = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f"did you mean {lowered[close[0]]}?" if close else ""


def _values(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its path, objects and the values in them."""
    for key, value in config.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{key}.")


def _wrong_value(name: str, value: Any) -> str:
    """What is wrong with the type of a value; empty if it is right."""
    kind = KEYS[name].kind if name in KEYS else ""
    if value == AUTO and not (isinstance(kind, str) and kind.startswith("object")):
        return ""
    if isinstance(value, str) and "\0" in value:
        return "holds a NUL character; remove it"
    if isinstance(value, int) and abs(value) >= 2**63:
        return "is a number of more than 64 bits; write a smaller one"
    if value == HIDDEN_VALUE and is_secret(name):
        return (
            f'is "{HIDDEN_VALUE}", which a run writes in place of a secret; write the secret there,'
            " or remove the key and set what its library reads"
        )
    shown = _shown(without_secret(name, value))
    if isinstance(kind, tuple):
        choices = ", ".join("null" if choice is None else str(choice) for choice in kind)
        return "" if is_one_of(value, kind) else f"is {shown}, not one of {choices}; write one"
    kinds = kind.split("|") if kind else []
    if not kinds or any(_fits(value, one) for one in kinds):
        return ""
    if kinds[0] == "object":
        return f"is {shown}, not an object; write {{...}}"
    return f"is {shown}, not {' or '.join(_WORDS[one] for one in kinds)}; write one"


def _fits(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind])
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return kind == "number" or isinstance(value, int) or (kind == "whole" and value == int(value))


def is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether `value` is in `values`, where 0 is not False and 1 is not True."""
    return any(type(value) is type(one) and value == one for one in values)


def _shown(value: Any) -> str:
    shown = masked_values(value)
    return shorten_line(json.dumps(shown, ensure_ascii=False, default=str, skipkeys=True), 60)


def without_effect(config: Mapping[str, Any], path: str) -> Iterator[Fault]:
    """Yield the faults of values that have no effect here, or change what a step computes."""
    for name, value in leaves(config).items():
        nearest = name
        while nearest and nearest not in KEYS:
            nearest = nearest.rpartition(".")[0]
        row = KEYS.get(nearest)
        if row and row.why and value != AUTO and not is_one_of(value, row.only):
            yield Fault(name, f"{path}: {name} is {json.dumps(value)}, but {row.why}; remove it")
    for block in SWITCHED:
        if (
            get(config, block) not in (MISSING, AUTO, {})
            and get(config, f"{block}.enabled") is MISSING
        ):
            yield Fault(block, f'{path}: {block} has no "enabled", so it has no effect; remove it')
