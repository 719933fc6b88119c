"""Untrusted JSON objects: bounded in size and depth, every value of a checked type."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from minimind.errors import CheckpointError
from minimind.runtime import disk
from minimind.runtime.durable_files import read_small
from minimind.runtime.file_kinds import JSON_TEXT, kind_of_content
from minimind.runtime.terminal import shorten_line

MAX_BYTES = 8 * 2**20  # size of a JSON file; the manifest of 10,000 ranks takes a quarter of it
MAX_DEPTH = 32
MAX_INTEGER = 2**53
ELSEWHERE = "resume from another checkpoint"
PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,100}")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")

Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Size = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Real = Annotated[float, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Positive = Annotated[float, Field(gt=0, le=MAX_INTEGER)]
FileName = Annotated[str, Field(pattern=f"^{FILE_NAME.pattern}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Shape = Annotated[list[Size], Field(max_length=8), FailFast()]


REQUIREMENTS = {  # by pydantic's type of the fault, where its own message is about Python
    **dict.fromkeys(("model_type", "dict_type"), "which should be an object"),
    "string_pattern_mismatch": "which is not a valid name or digest",
    "string_unicode": "which is not valid Unicode",
    "too_long": "which has too many items",
}


class CheckedJson(BaseModel):
    """Base of the models of untrusted JSON: no conversions, finite numbers."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class ClosedJson(CheckedJson):
    """An object with no other fields."""

    model_config = ConfigDict(extra="forbid")


class Unreadable(CheckpointError):
    """A file exists but cannot be read (permissions, disk, network). It may be intact."""


def read_object(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the JSON object in a file, and its text.

    Raise CheckpointError, without the path; Unreadable if the file exists but cannot be read.
    """
    try:
        if not stat.S_ISREG(disk.stat(path, follow=False).st_mode):
            raise CheckpointError("is not a regular file")
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from error
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from error
    return parse_object(text), text


def read_foreign_object(path: Path) -> dict[str, Any]:
    """`read_object` of a file in somebody else's folder, which may be a link, as a hub's cache has.

    The errors are the same.
    """
    try:
        content = read_small(path, MAX_BYTES)
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from error
    return parse_object(content)


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise CheckpointError if it is too large, too deep, or none."""
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"has more than the {MAX_BYTES:,} bytes of the limit")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = kind_of_content(text, JSON_TEXT)
        raise CheckpointError(f"is {kind}, not JSON" if kind else "is not JSON") from error
    if type(parsed) is not dict:
        raise CheckpointError("is not a JSON object")
    if is_deeper(parsed, MAX_DEPTH):
        raise CheckpointError(f"is nested deeper than {MAX_DEPTH}")
    return parsed


def is_deeper(parsed: Any, most: int) -> bool:
    """Whether a value of JSON is nested more than `most` deep."""
    layer, depth = [parsed], 0
    while layer and depth <= most:
        depth += 1
        layer = [inner for outer in layer for inner in _children(outer)]
    return depth > most


def _children(value: Any) -> Any:
    if type(value) is dict:
        return value.values()
    return value if type(value) is list else ()


def validate(model: type[BaseModel], values: dict[str, Any], where: str = "") -> None:
    """Raise CheckpointError for the first field that `model` refuses; `where` prefixes its name."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(describe_fault(error.errors(include_url=False)[0], where)) from error


def describe_fault(fault: Any, where: str = "") -> str:
    """Describe a fault of pydantic, without the names of models and patterns."""
    kind, path = fault["type"], list(fault["loc"])
    is_key = bool(path) and path[-1] == "[key]"  # the fault is in the name of a field
    if is_key:
        path[-2:] = [fault["input"]]
    parts = [str(part) for part in path]
    name = where + ".".join(part if PLAIN.fullmatch(part) else shown(part) for part in parts)
    if kind == "missing":
        return f"has no {name}"
    if kind == "extra_forbidden":
        return f"has the unknown field {name}"
    value = "" if is_key else f" = {shown(fault['input'])}"
    requirement = REQUIREMENTS.get(kind) or re.sub(r"^\w+ ", "which ", fault["msg"])
    return f"has {name}{value}, {requirement}"


def shown(value: Any) -> str:
    """Format a value for one line, shortened and escaped."""
    is_huge = type(value) is int and abs(value) > MAX_INTEGER
    return "a huge number" if is_huge else shorten_line(repr(value), 60)


def require_listed(manifest: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if the manifest does not list the file: it has no verified hash."""
    if all(entry["name"] != path.name for entry in manifest["files"]):
        raise CheckpointError(f"{path}: is not listed in the manifest; {ELSEWHERE}")


def read_checkpoint_config(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint; raise CheckpointError, naming the file."""
    path = directory / "config.json"
    require_listed(manifest, path)
    try:
        return read_object(path)[0]
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}; {ELSEWHERE}") from error
