"""A DeepSpeed JSON as it is read, and its values at dotted paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minimind.config.names import no_such_name
from minimind.config.run_config import deepspeed_files
from minimind.errors import UsageError
from minimind.runtime.durable_files import read_small_text

AUTO = "auto"
MISSING = object()


def get(config: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted path, or `MISSING`."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted path, creating missing objects."""
    *parents, last = key.split(".")
    for part in parents:
        below = config.setdefault(part, {})
        if not isinstance(below, dict):  # reported elsewhere
            return
        config = below
    config[last] = value


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values but non-empty objects, by dotted path."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            values |= leaves(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def offloads(config: Mapping[str, Any], what: str) -> bool:
    """Whether ZeRO offloads `what`: `optimizer` or `param`."""
    device = get(config, f"zero_optimization.offload_{what}.device")
    return device in ("cpu", "nvme")


def read_deepspeed_json(path: str, source: str = "--deepspeed_config") -> dict[str, Any]:
    """Load the object in `path`; raise UsageError, with line and column if malformed."""
    try:
        config = _parse(read_small_text(path).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}"))
    except OSError as error:
        shipped = sorted(deepspeed_files())
        if isinstance(error, FileNotFoundError):
            fault = no_such_name(str(path), shipped, "DeepSpeed JSON")
            raise UsageError(f"{source} {fault}") from error
        raise UsageError(
            f"{source} {path}: {error.strerror}; give a DeepSpeed JSON file, or"
            f" {', '.join(shipped)}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}:{error.lineno}:{error.colno}: {error.msg}; correct the JSON there"
        ) from error
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise UsageError(f"{path}: {error}; correct the JSON") from error
    except KeyError as error:
        raise UsageError(f"{path}: {error.args[0]} is written twice; remove one of them") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: is not a JSON object; write {{...}}")
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
