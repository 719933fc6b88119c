"""Normalize the values of a DeepSpeed JSON to what DeepSpeed 0.19.8 reads.

DeepSpeed reads `"SUM"` as `"sum"`, and its pydantic models read `"on"` as true, `"2"` as 2 and some
keys by two names. All rules check normalized values, so none depends on spelling. Does not import
deepspeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minimind.config.deepspeed.keys import AUTO, FIELD_NAMES, LOWERED, MODELLED, READ_BY_PYDANTIC
from minimind.config.deepspeed.schema import optimizer_name

OTHER_KINDS = {"stage": "whole", "enabled": "bool"}  # of the kind `any` in MODELLED
# What pydantic takes for a boolean, in any case.
_TRUE = ("true", "t", "yes", "y", "on", "1")
_FALSE = ("false", "f", "no", "n", "off", "0")


def normalize_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` with every value as DeepSpeed reads it.

    Values that DeepSpeed does not convert stay for the schema to check, including strings for
    booleans that it only tests for truth, where "false" would be true.
    """
    normalized = _block("", config)
    written = normalized.get("optimizer")
    if isinstance(written, dict) and (name := optimizer_name(written.get("type"))):
        written["type"] = name
    return normalized


def _block(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    kinds = MODELLED.get(where, READ_BY_PYDANTIC.get(where, {}))
    normalized: dict[str, Any] = {}
    for written, value in block.items():
        name = f"{where}.{written}" if where else str(written)
        alias = FIELD_NAMES.get(name, written)
        key = written if alias in block else alias  # the schema reports both together
        if isinstance(value, Mapping):
            normalized[key] = _block(name, value)
        elif value == AUTO:
            normalized[key] = value
        elif name in LOWERED and isinstance(value, str):
            normalized[key] = value.lower()
        else:
            kind = kinds.get(key, "")
            normalized[key] = _as_pydantic_reads(value, OTHER_KINDS[key] if kind == "any" else kind)
    return normalized


def _as_pydantic_reads(value: Any, kind: str) -> Any:
    """Convert `value` as a pydantic field of `kind` does; unchanged if pydantic rejects it."""
    kind = kind.removesuffix("|null")
    if kind == "bool" and isinstance(value, str | int | float):
        word = str(int(value)) if value in (0, 1) else str(value).lower()
        return True if word in _TRUE else False if word in _FALSE else value
    if kind not in ("whole", "number") or not isinstance(value, str | float):
        return value
    try:
        number = float(value)
        is_whole = kind == "whole" or (isinstance(value, str) and value.strip("+-_ ").isdecimal())
        return int(value if isinstance(value, str) else number) if is_whole else number
    except (ValueError, OverflowError):
        return value
