"""What text there is, cut into units that are tokenised apart: the plan of a preparation.

A unit becomes one shard of each split. The plan depends on the inputs and options alone, never on
how many processes work or on which were killed, and so do the files that come of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from minimind.data.inputs import Segment, find_files, segments_of
from minimind.data.manifest import FORMAT_VERSION
from minimind.errors import DataError, UsageError
from minimind.files import fingerprint

SMALLEST_UNIT = 2**24  # bytes of input; a killed preparation does so much again
MOST_UNITS = 1024  # about; every rank of a run maps all shards
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Source:
    """Inputs that are mixed as one; where no source has a weight, all rows count the same."""

    name: str
    paths: tuple[str, ...]
    weight: float | None = None


@dataclass(frozen=True)
class Input:
    """A file (or a dataset's folder) as it was when the plan was made."""

    path: str
    bytes: int
    modified_ns: int
    source: int

    @classmethod
    def of(cls, path: Path, source: int) -> Input:
        """As it is now."""
        return cls(str(path.resolve()), *_size_and_time(path), source)

    def require_unchanged(self) -> None:
        """Nothing, or a DataError when it is no longer what the plan was made of."""
        path = Path(self.path)
        if not path.exists() or _size_and_time(path) != (self.bytes, self.modified_ns):
            raise DataError(
                f"{path}: changed since its preparation began; put it back, or begin again"
            )


def files_of(path: Path) -> list[Path]:
    """The file itself, or all of a dataset's folder, sorted."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        stats = [file.stat() for file in files_of(path)]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check it") from error
    return sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)


@dataclass(frozen=True)
class Options:
    """What decides which documents there are, and in which split each is."""

    text_field: str = "text"
    max_document_bytes: int = 64 * 2**20
    val_fraction: float = 0.01


@dataclass(frozen=True)
class Unit:
    """Segments that are tokenised one after another, all of one source."""

    number: int
    source: int
    segments: tuple[Segment, ...]

    @property
    def bytes(self) -> int:
        """Of input, about."""
        return sum(segment.weight for segment in self.segments)


@dataclass(frozen=True)
class Plan:
    """The units of a preparation, in the order of the rows they become."""

    sources: tuple[Source, ...]
    inputs: tuple[Input, ...]
    options: Options
    units: tuple[Unit, ...]

    def to_json(self) -> dict[str, Any]:
        """For plan.json, from which other processes take it."""
        return json.loads(json.dumps(asdict(self), default=str))

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote."""
        segments = (
            tuple(Segment(**{**s, "path": Path(s["path"])}) for s in unit["segments"])
            for unit in found["units"]
        )
        return cls(
            tuple(Source(s["name"], tuple(s["paths"]), s["weight"]) for s in found["sources"]),
            tuple(Input(**given) for given in found["inputs"]),
            Options(**found["options"]),
            tuple(
                Unit(unit["number"], unit["source"], own)
                for unit, own in zip(found["units"], segments, strict=True)
            ),
        )

    @cached_property
    def _by_path(self) -> dict[str, Input]:
        return {given.path: given for given in self.inputs}

    def inputs_of(self, unit: Unit) -> list[Input]:
        """The inputs that a unit reads."""
        paths = dict.fromkeys(str(segment.path) for segment in unit.segments)
        return [self._by_path[path] for path in paths]

    def key_of(self, unit: Unit, tokenizer: str) -> str:
        """What a unit's shards depend on; whatever has the same need not be made again."""
        facts = {
            "format_version": FORMAT_VERSION,
            "tokenizer": tokenizer,
            "options": asdict(self.options),
            "inputs": [[i.path, i.bytes, i.modified_ns] for i in self.inputs_of(unit)],
            "segments": [[str(s.path), s.start, s.stop] for s in unit.segments],
        }
        return fingerprint(facts)


def make_plan(sources: Sequence[Source], options: Options, unit_bytes: int | None = None) -> Plan:
    """The units of all files of all sources; a DataError for a file that cannot be one."""
    files = [(number, path) for number, s in enumerate(sources) for path in find_files(s.paths)]
    inputs = tuple(Input.of(path, number) for number, path in files)
    times = Counter(given.path for given in inputs)
    if twice := [path for path, count in times.items() if count > 1]:
        raise UsageError(
            f"{twice[0]}: is named {times[twice[0]]} times; name it once, and give its source a"
            " weight if it should be read more often"
        )
    if unit_bytes is None:
        total = sum(given.bytes for given in inputs)
        unit_bytes = SMALLEST_UNIT
        while unit_bytes * MOST_UNITS < total:
            unit_bytes *= 2
    units: list[Unit] = []
    for number in range(len(sources)):
        own = (Path(given.path) for given in inputs if given.source == number)
        segments = (segment for path in own for segment in segments_of(path, unit_bytes))
        for group in _grouped(segments, unit_bytes):
            units.append(Unit(len(units), number, group))
    return Plan(tuple(sources), inputs, options, tuple(units))


def _grouped(segments: Iterator[Segment], unit_bytes: int) -> Iterator[tuple[Segment, ...]]:
    """Small files together, up to about `unit_bytes`."""
    group: list[Segment] = []
    size = 0
    for segment in segments:
        if group and size + segment.weight > unit_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(segment)
        size += segment.weight
    if group:
        yield tuple(group)


def parse_source(text: str) -> Source:
    """`NAME=PATH` or `NAME=PATH:WEIGHT`; a UsageError for anything else."""
    name, equals, path = text.partition("=")
    head, colon, tail = path.rpartition(":")
    weight = None
    if colon and re.fullmatch(r"[0-9.eE+-]+", tail):
        path, weight = head, _weight(tail, f"--source {text}")
    if not equals or not path:
        raise UsageError(f"--source {text}: is not NAME=PATH or NAME=PATH:WEIGHT; write it so")
    return Source(_name(name, f"--source {text}"), (path,), weight)


def read_sources(path: Path) -> list[Source]:
    """The sources of a YAML file: `{NAME: {paths: [...], weight: 2}}`, or NAME: PATH."""
    try:
        found = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())
        raise UsageError(f"--sources {path}: cannot be read ({told}); correct it") from error
    if not isinstance(found, dict) or not found:
        raise UsageError(f"--sources {path}: is no mapping of names; write NAME: {{paths: [...]}}")
    return [_source(str(name), given, f"--sources {path}") for name, given in found.items()]


def _source(name: str, given: Any, where: str) -> Source:
    given = given if isinstance(given, dict) else {"paths": given}
    if unknown := given.keys() - {"paths", "weight"}:
        raise UsageError(f"{where}: {name} has {unknown.pop()!r}; it takes paths and weight")
    paths = given.get("paths")
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not paths or not all(isinstance(p, str) for p in paths):
        raise UsageError(f"{where}: {name} names no paths; write paths: [FILE, ...]")
    weight = given.get("weight")
    told = None if weight is None else _weight(str(weight), f"{where}: {name}")
    return Source(_name(name, where), tuple(paths), told)


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
    """One source per name; a UsageError where weights differ, or some have one and others none."""
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
