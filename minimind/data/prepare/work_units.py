"""The plan of a preparation (plan.json): input text divided into independent work units.

A unit becomes one shard of each split. The plan and the shards depend only on the inputs and the
options, not on the number of processes or on interruptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minimind.data.shards.manifest import FORMAT_VERSION, PLAN_NAME, Options
from minimind.data.text.documents import Segment
from minimind.data.text.formats import format_of
from minimind.data.text.inputs import Source, find_files, require_once, without
from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import fingerprint

TEXT = "text"
SMALLEST_UNIT = 2**24  # bytes of input; a killed preparation repeats at most this much per process
MAX_UNITS = 1024  # about; every rank of a run maps all shards


@dataclass(frozen=True)
class Input:
    """An input file or dataset folder, with the size and time it had when the plan was made."""

    path: str
    bytes: int
    modified_ns: int
    source: int

    @classmethod
    def of(cls, path: Path, source: int) -> Input:
        """Describe `path` as it is now."""
        return cls(str(placed(path)), *_size_and_time(path), source)

    def require_unchanged(self) -> None:
        """Raise DataError if the input changed since the plan was made."""
        path = Path(self.path)
        if not disk.exists(path) or _size_and_time(path) != (self.bytes, self.modified_ns):
            raise DataError(
                f"{path}: changed since its preparation started; restore it, or start again"
            )


def placed(path: Path) -> Path:
    """Absolute path of an input. A link keeps its name: the suffix is the format."""
    return disk.resolve(path) if disk.is_dir(path) else disk.resolve(path.parent) / path.name


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or all files of a dataset folder, sorted."""
    return sorted(disk.files_below(path)) if disk.is_dir(path) else [path]


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        stats = [disk.stat(file) for file in files_of(path)]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check it") from error
    return sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)


@dataclass(frozen=True)
class Unit:
    """Segments of one source that are tokenised in order into one shard per split."""

    number: int
    source: int
    segments: tuple[Segment, ...]

    @property
    def bytes(self) -> int:
        """Approximate bytes of input."""
        return sum(segment.weight for segment in self.segments)


@dataclass(frozen=True)
class Plan:
    """The units of a preparation, in the order of their rows."""

    sources: tuple[Source, ...]
    inputs: tuple[Input, ...]
    options: Options
    units: tuple[Unit, ...]
    held_out: tuple[str, ...] = ()  # the inputs that are held out as a whole

    def to_json(self) -> dict[str, Any]:
        """Return the content of plan.json, which other processes read."""
        content = {**asdict(self), "options": self.options.to_json()}
        if not self.held_out:
            del content["held_out"]
        return json.loads(json.dumps(content, default=str))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Plan:
        segments = (
            tuple(Segment(**{**s, "path": Path(s["path"])}) for s in unit["segments"])
            for unit in content["units"]
        )
        return cls(
            tuple(Source(s["name"], tuple(s["paths"]), s["weight"]) for s in content["sources"]),
            tuple(Input(**given) for given in content["inputs"]),
            Options(**content["options"]),
            tuple(
                Unit(unit["number"], unit["source"], own)
                for unit, own in zip(content["units"], segments, strict=True)
            ),
            tuple(content.get("held_out", ())),
        )

    @cached_property
    def _by_path(self) -> dict[str, Input]:
        return {given.path: given for given in self.inputs}

    def val_fraction_of(self, unit: Unit) -> float:
        """Fraction of the documents of a unit that are held out."""
        return 1.0 if self.is_held_out(unit) else self.options.val_fraction

    def is_held_out(self, unit: Unit) -> bool:
        return str(unit.segments[0].path) in self.held_out

    def inputs_of(self, unit: Unit) -> list[Input]:
        paths = dict.fromkeys(str(segment.path) for segment in unit.segments)
        return [self._by_path[path] for path in paths]

    def key_of(self, unit: Unit, tokenizer: str) -> str:
        """Hash of all that determines a unit's shards; equal keys mean equal shards."""
        facts = {
            "format_version": FORMAT_VERSION,
            "tokenizer": tokenizer,
            "options": self.options.to_json(),
            "inputs": [[i.path, i.bytes, i.modified_ns] for i in self.inputs_of(unit)],
            "segments": [[str(s.path), s.start, s.stop] for s in unit.segments],
        }
        if self.held_out:  # also decides what is left of the other text
            held_out = [self._by_path[path] for path in self.held_out]
            facts["held_out"] = [[i.path, i.bytes, i.modified_ns] for i in held_out]
        return fingerprint(facts)


def make_plan(
    sources: Sequence[Source],
    options: Options,
    unit_bytes: int | None = None,
    val_path: Sequence[str] = (),
) -> Plan:
    """Divide all files of all sources into units; raise DataError for an unusable file.

    What `val_path` names is held out, also where a source names it, and belongs to the first one.
    """
    files = [(number, path) for number, s in enumerate(sources) for path in find_files(s.paths)]
    val_files = find_files(val_path)
    left = set(without([path for _, path in files], val_files))
    files = [(number, path) for number, path in files if path in left]
    if not files:
        raise DataError(f"{', '.join(val_path)}: is all of the text; name text to train on, too")
    inputs = tuple(Input.of(path, number) for number, path in files)
    val_inputs = tuple(Input.of(path, 0) for path in val_files)
    require_once([*(path for _, path in files), *val_files])
    max_units = None if unit_bytes is None else MAX_UNITS
    if unit_bytes is None:
        unit_bytes, total = SMALLEST_UNIT, sum(given.bytes for given in inputs)
        while unit_bytes * MAX_UNITS < total:
            unit_bytes *= 2
    units: list[Unit] = []
    parts = [
        [given for given in inputs if given.source == number] for number in range(len(sources))
    ]
    for number, part in ((0, parts[0]), (0, val_inputs), *enumerate(parts[1:], 1)):
        paths = (Path(given.path) for given in part)
        segments = (one for path in paths for one in format_of(path).cut(path, unit_bytes))
        for group in _group(segments, unit_bytes):
            if len(units) == max_units:
                raise _too_many_units(inputs, unit_bytes)
            units.append(Unit(len(units), number, group))
    held_out = tuple(given.path for given in val_inputs)
    return Plan(tuple(sources), inputs + val_inputs, options, tuple(units), held_out)


def _too_many_units(inputs: Sequence[Input], unit_bytes: int) -> UsageError:
    total = sum(given.bytes for given in inputs)
    return UsageError(
        f"shard_bytes = {unit_bytes:,} cuts {total:,} bytes of text into more than {MAX_UNITS:,}"
        " shards, all of which every process of a run keeps open; raise --shard_bytes, or remove it"
    )


def _group(segments: Iterator[Segment], unit_bytes: int) -> Iterator[tuple[Segment, ...]]:
    """Yield groups of segments of up to about `unit_bytes`."""
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


def described(
    plan: Plan, skips_bad: bool, max_bad_fraction: float, vocab_size: int | None
) -> dict[str, Any]:
    """Return the content of plan.json without the tokenizer's fingerprint.

    `vocab_size` is the size of a tokenizer to train, None if one is given.
    """
    policy = {"skips_bad": skips_bad, "max_bad_fraction": max_bad_fraction}
    return {**plan.to_json(), **policy, "vocab_size": vocab_size}


def read_described(directory: Path) -> Any:
    """Read plan.json; None if it is missing or damaged."""
    try:
        return json.loads((directory / PLAN_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def differences(here: dict[str, Any], there: Any) -> list[str]:
    """Return the flags in which two preparations differ, with both values where they are short.

    The spelling of paths does not count. Trained tokenizers are equal if everything else is.
    """
    ours, theirs = _compared_values(here), _compared_values(there)
    if not theirs:
        return ["version"]
    if ours[TEXT] != theirs[TEXT]:  # other text also changes the units
        ours.pop("shard_bytes")
    names = []
    for name, value in ours.items():
        if value != theirs[name]:
            is_short = not isinstance(value, list)
            names.append(f"{name} ({theirs[name]}, here {value})" if is_short else name)
    return names


def _compared_values(plan_json: Any) -> dict[str, Any]:
    try:
        learnt = plan_json["vocab_size"]
        return {
            TEXT: [
                plan_json["inputs"],
                [source["name"] for source in plan_json["sources"]],
                plan_json.get("held_out"),
            ],
            "weights": [source["weight"] for source in plan_json["sources"]],
            "tokenizer": [plan_json.get("tokenizer") if learnt is None else learnt],
            "shard_bytes": [unit["segments"] for unit in plan_json["units"]],
            **{name: plan_json["options"][name] for name in sorted(plan_json["options"])},
            "on_bad_data": "skip" if plan_json["skips_bad"] else "error",
            "max_bad_fraction": plan_json["max_bad_fraction"],
        }
    except (KeyError, TypeError, AttributeError):
        return {}
