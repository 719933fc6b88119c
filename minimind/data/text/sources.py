"""Sources of text by name, each with paths and an optional weight."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.config.parse import load_yaml_texts
from minimind.errors import UsageError
from minimind.runtime.urls import masked

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Source:
    """Inputs that are mixed as one; without weights all rows count equally."""

    name: str
    paths: tuple[str, ...]
    weight: float | None = None


def parse_source(text: str) -> Source:
    """Parse `NAME=PATH` or `NAME=PATH:WEIGHT`; raise UsageError otherwise."""
    name, equals, path = text.partition("=")
    head, _, tail = path.rpartition(":")
    weight = None
    if head and not _exists(path) and _is_meant_as_weight(head, tail):
        path, weight = head, _weight(tail, f"--source {masked(text)}")
    if not equals or not path:
        raise UsageError(
            f"--source {masked(text)}: is not NAME=PATH or NAME=PATH:WEIGHT; write it so"
        )
    return Source(_name(name, f"--source {masked(text)}"), (path,), weight)


def _is_meant_as_weight(head: str, tail: str) -> bool:
    if re.fullmatch(r"[0-9.eE+-]+", tail):
        return True
    return not glob.has_magic(tail) and "/" not in tail and (_exists(head) or glob.has_magic(head))


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))  # which no path makes raise


def read_sources(path: Path) -> list[Source]:
    """Read the sources of a YAML file: `{NAME: {paths: [...], weight: 2}}`, or NAME: PATH."""
    entries = load_yaml_texts(str(path), "--sources")
    return [_source(str(name), given, f"--sources {path}") for name, given in entries.items()]


def _source(name: str, given: Any, where: str) -> Source:
    given = given if isinstance(given, dict) else {"paths": given}
    if unknown := given.keys() - {"paths", "weight"}:
        raise UsageError(f"{where}: {name} has {unknown.pop()!r}; it takes paths and weight")
    paths = given.get("paths")
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not paths or not all(isinstance(p, str) for p in paths):
        raise UsageError(f"{where}: {name} names no paths; write paths: [FILE, ...]")
    weight = given.get("weight")
    value = None if weight is None else _weight(str(weight), f"{where}: {name}")
    return Source(_name(name, where), tuple(paths), value)


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 < weight < float("inf"):
        raise UsageError(f"{where}: weight = {text} is no number above 0; give one")
    return weight


def _name(name: str, where: str) -> str:
    if not NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!r} is no name; use letters, digits, '.', '_' and '-'")
    return name


def join_sources(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Join sources by name; raise UsageError for different or partly missing weights."""
    joined: dict[str, Source] = {}
    for source in sources:
        before = joined.get(source.name, Source(source.name, (), source.weight))
        if before.weight != source.weight:
            raise UsageError(
                f"source {source.name} has weight {before.weight} and {source.weight}; give one"
            )
        joined[source.name] = Source(source.name, before.paths + source.paths, source.weight)
    without = [source.name for source in joined.values() if source.weight is None]
    if without and len(without) < len(joined):
        raise UsageError(
            f"source {without[0]} has no weight and others have; give all of them one, or none"
        )
    return tuple(joined.values())
