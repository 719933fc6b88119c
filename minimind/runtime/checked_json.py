"""Untrusted JSON objects: bounded in size and depth, every value of a checked type."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.errors import CheckpointError

MAX_BYTES = 8 * 2**20  # of a JSON file; the manifest of 10,000 ranks takes a quarter of it
MAX_DEPTH = 32
MAX_INTEGER = 2**53
ELSEWHERE = "resume from another checkpoint"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class Unreadable(CheckpointError):
    """A file exists but cannot be read (permissions, disk, network). It may be intact."""


@dataclass(frozen=True)
class Kind:
    """A type of value: its description and its test."""

    description: str
    holds: Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return type(value) is int and -MAX_INTEGER <= value <= MAX_INTEGER


def _count(value: Any) -> bool:
    return _whole(value) and value >= 0


def _number(value: Any) -> bool:
    return _whole(value) or (type(value) is float and math.isfinite(value))


WHOLE = Kind("a whole number", _whole)
COUNT = Kind("a whole number from 0", _count)
SIZE = Kind("a whole number from 1", lambda value: _count(value) and value > 0)
NUMBER = Kind("a number", _number)
AT_LEAST_0 = Kind("a number from 0", lambda value: _number(value) and value >= 0)
ABOVE_0 = Kind("a number above 0", lambda value: _number(value) and value > 0)
YES_OR_NO = Kind("true or false", lambda value: type(value) is bool)
OBJECT = Kind("an object", lambda value: type(value) is dict)
OBJECTS = Kind(
    "an object of objects",
    lambda value: type(value) is dict and all(type(v) is dict for v in value.values()),
)
LIST = Kind("a list", lambda value: type(value) is list)
SIZES = Kind(
    "a list of sizes from 1", lambda value: type(value) is list and all(map(SIZE.holds, value))
)
WEIGHTS = Kind(
    "a list of numbers above 0",
    lambda value: type(value) is list and all(map(ABOVE_0.holds, value)),
)
DIGEST = Kind("a sha256", lambda value: type(value) is str and bool(SHA256.fullmatch(value)))
NAME = Kind("the name of a file", lambda value: type(value) is str)
SHAPE = Kind(
    "a list of up to 8 sizes",
    lambda value: (
        type(value) is list and len(value) <= 8 and all(_count(v) and v > 0 for v in value)
    ),
)


def or_null(kind: Kind) -> Kind:
    """`kind` or null."""
    return Kind(f"{kind.description} or null", lambda value: value is None or kind.holds(value))


def read_object(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the JSON object in a file, and its text.

    Raise CheckpointError, without the path; Unreadable if the file exists but cannot be read.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError("is not a regular file")
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from error
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from error
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"has more than the {MAX_BYTES:,} bytes of the limit")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("is not JSON") from error
    if type(parsed) is not dict:
        raise CheckpointError("is no JSON object")
    layer, depth = [parsed], 0
    while layer:
        depth += 1
        if depth > MAX_DEPTH:
            raise CheckpointError(f"is nested deeper than {MAX_DEPTH}")
        layer = [inner for outer in layer for inner in _children(outer)]
    return parsed, text


def _children(value: Any) -> Any:
    if type(value) is dict:
        return value.values()
    return value if type(value) is list else ()


def require(values: dict[str, Any], kinds: dict[str, Kind], where: str = "") -> None:
    """Raise CheckpointError for the first of `kinds` that is missing or of another type."""
    for name, kind in kinds.items():
        if name not in values:
            raise CheckpointError(f"has no {where}{name}")
        if not kind.holds(values[name]):
            raise CheckpointError(
                f"has {where}{name} = {shown(values[name])}, not {kind.description}"
            )


def shown(value: Any) -> str:
    """Format a value for one line, shortened and escaped."""
    text = "a huge number" if type(value) is int and abs(value) > MAX_INTEGER else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_listed(manifest: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if the manifest does not list the file: it has no verified hash."""
    if all(entry["name"] != path.name for entry in manifest["files"]):
        raise CheckpointError(f"{path}: is not listed in the manifest; {ELSEWHERE}")


def told_by_config(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint; raise CheckpointError, naming the file."""
    path = directory / "config.json"
    require_listed(manifest, path)
    try:
        return read_object(path)[0]
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}; {ELSEWHERE}") from error
