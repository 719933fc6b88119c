"""The documents of the training tokens of a prepared folder, and their place in the text.

A folder stores where documents end, not where they came from: a unit of the plan is read again,
up to the document, with the same split by hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from minimind.data.prepare.encode import Work, split_of
from minimind.data.prepare.prepared import Prepared
from minimind.data.prepare.remote import local_text
from minimind.data.prepare.work_units import Plan, Unit, placed, read_described
from minimind.data.shards.conversation_shards import TARGET
from minimind.data.text.documents import Rejection, Segment
from minimind.data.text.formats import format_of, read_segment
from minimind.data.text.readers import line_offset, newlines
from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.object_cache import ObjectCache
from minimind.runtime.urls import is_url, masked, named

CHANGED = "changed since it was prepared"


@dataclass(frozen=True)
class Place:
    """File, line (or row of a table) from 1, and byte of the line in the (decompressed) file."""

    file: str
    line: int  # 0 for a file that is one document
    byte: int | None  # None for a row of a table

    def __str__(self) -> str:
        """`FILE:LINE`, or `FILE`."""
        return f"{named(self.file)}:{self.line}" if self.line else named(self.file)


def place_json(place: Place | None) -> dict[str, Any]:
    """File, line and byte as JSON; null where the place is unknown."""
    if place is None:
        return {"file": None, "line": None, "byte": None}
    return {**asdict(place), "file": named(place.file)}


@dataclass(frozen=True)
class Placed:
    """A document of the text: its place, its split (empty if it is rejected) and its text."""

    place: Place
    split: str
    text: str


@dataclass(frozen=True)
class EncodedUnit:
    """A unit of the plan of a folder, and the numbers of its training documents."""

    folder: Path
    plan: Plan
    unit: Unit
    numbers: range


@dataclass
class Documents:
    """The training documents of a text, numbered from 0 in the order of their tokens."""

    prepared: Prepared
    ends: np.ndarray  # int64, cumulative tokens
    units: list[EncodedUnit]
    cache: ObjectCache | None = None
    faults: dict[str, str] = field(default_factory=dict)  # why documents are not found, by file
    _fetched: dict[str, str] = field(default_factory=dict)  # fetched inputs by the lost name
    _line_at: dict[Path, tuple[int, int]] = field(default_factory=dict)  # a known offset and line
    _works: dict[Path, Work] = field(default_factory=dict)  # by folder

    @classmethod
    def of(cls, prepared: Prepared, cache: ObjectCache | None = None) -> Documents:
        """Read the index of a text; with a cache, text at URLs that is gone is fetched."""
        numbers, before = {}, 0
        for shard in prepared.manifest["splits"]["train"]["shards"]:
            path = prepared.directory / shard["name"]
            unit = int(path.stem.removeprefix("train-"))  # a manifest names units by their shards
            numbers[path.parent, unit] = range(before, before + shard["documents"])
            before += shard["documents"]
        units = []
        parts = [(part.folder, part.number) for part in prepared.parts]
        for folder, source in parts or [(prepared.directory, None)]:
            plan = Plan.from_json(read_described(folder))
            units += [
                EncodedUnit(folder, plan, unit, numbers.get((folder, unit.number), range(0)))
                for unit in plan.units
                if source in (None, unit.source)
            ]
        return cls(prepared, prepared.train.document_ends(), units, cache)

    def over(self, start: int, stop: int) -> range:
        """Numbers of the documents with any of the tokens `start` to `stop`."""
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        return range(int(first), int(last) + 1)

    def tokens(self, number: int) -> tuple[int, int]:
        """First token of a document, and the one after its end token."""
        return int(self.ends[number - 1]) if number else 0, int(self.ends[number])

    def places(self, wanted: Iterable[int]) -> dict[int, Place]:
        """Place by number; without those whose text is gone or changed (`faults`)."""
        left = set(wanted)
        places: dict[int, Place] = {}
        for unit in self.units:
            if in_unit := {number for number in left if number in unit.numbers}:
                places |= self._places_in(unit, in_unit)
                left -= in_unit
        return places

    def _places_in(self, unit: EncodedUnit, wanted: set[int]) -> dict[int, Place]:
        """Place of each document of a unit that is found unchanged."""
        places: dict[int, Place] = {}
        last = max(wanted)
        train = (document for document in self._read(unit) if document.split == "train")
        number = unit.numbers.start - 1
        for number, document in enumerate(train, unit.numbers.start):
            if number in wanted and self._is_stored(unit, number, document.text):
                places[number] = document.place
            elif number in wanted:
                self.faults[named(document.place.file)] = CHANGED
            if number == last:
                break
        files = [named(str(self._now(segment.path))) for segment in unit.unit.segments]
        if number < last and not any(file in self.faults for file in files):
            self.faults[files[-1]] = CHANGED
        return places

    def _work_of(self, unit: EncodedUnit) -> Work:
        if unit.folder not in self._works:
            plan, tokenizer = self._plan_now(unit.plan), self.prepared.tokenizer
            self._works[unit.folder] = Work(unit.folder, plan, tokenizer, False)
        return self._works[unit.folder]

    def _plan_now(self, plan: Plan) -> Plan:
        """The plan with the current names of what it holds out as a whole."""
        if not plan.held_out:
            return plan
        units = []
        for unit in plan.units:
            if plan.is_held_out(unit):
                now = (replace(one, path=self._now(one.path)) for one in unit.segments)
                units.append(replace(unit, segments=tuple(now)))
            else:
                units.append(unit)
        names = (str(self._now(Path(path))) for path in plan.held_out)
        return replace(plan, units=tuple(units), held_out=(*plan.held_out, *names))

    def _is_stored(self, unit: EncodedUnit, number: int, text: str) -> bool:
        """Whether a text has the tokens of a document."""
        start, stop = self.tokens(number)
        (stored,), _ = self._work_of(unit).encode([text], 1)
        ids = stored & (TARGET - 1)  # without marks
        return np.array_equal(ids, self.prepared.train.stretch(start, stop - start - 1))

    def find(self, file: str, line: int) -> tuple[Placed, int | None]:
        """The document at FILE:LINE and its number; None if it is not trained on.

        All lines of a file that is one text are one document. Raise UsageError if the file is not
        part of the text or has no such line, DataError if it has changed.
        """
        path = self._now(Path(self._input_of(file)))
        left_out = None  # another folder may train on it
        for unit in self._units_at(path, line):
            number = unit.numbers.start - 1
            for document in self._read(unit):
                number += document.split == "train"
                if document.place.file != str(path) or document.place.line not in (line, 0):
                    continue
                if document.split != "train":
                    left_out = document
                    break
                if number not in unit.numbers or not self._is_stored(unit, number, document.text):
                    raise DataError(f"{file}: {CHANGED}; restore it")
                return document, number
        if left_out:
            return left_out, None
        if self.faults:
            name, fault = next(iter(self.faults.items()))
            raise DataError(f"{name}: {fault}; restore it")
        raise UsageError(f"{file}:{line}: there is no such line; lines are counted from 1")

    def _units_at(self, path: Path, line: int) -> list[EncodedUnit]:
        """The units that may hold a line of a file: those with its byte or its row."""
        if not disk.exists(path):
            raise DataError(f"{path}: is gone; restore it")
        form = format_of(path)
        at = line_offset(path, line) if form.is_cut_in_lines else line - 1
        is_cut = form.is_cut_in_lines or form.is_table  # the others are read whole

        def has_line(segment: Segment) -> bool:
            inside = not is_cut or segment.start <= at < max(segment.stop, segment.start + 1)
            return inside and self._now(segment.path) == path

        return [unit for unit in self.units if any(map(has_line, unit.unit.segments))]

    def _input_of(self, file: str) -> str:
        """The plan's path of a file; `file` may name the input in any way."""
        inputs = dict.fromkeys(
            given.path for unit in self.units for given in unit.plan.inputs_of(unit.unit)
        )
        by_now = {named(str(self._now(Path(path)))): path for path in inputs}
        wanted = named(file if is_url(file) else str(placed(Path(file).expanduser())))
        if wanted in by_now:
            return by_now[wanted]
        close = [now for now in by_now if now.endswith(f"/{file}")]
        if len(close) != 1:
            some = ", ".join(sorted(close or by_now)[:3])
            problem = "names several files" if close else "is not a file of this text"
            raise UsageError(f"{masked(file)} {problem}; give the path of one, such as {some}")
        return by_now[close[0]]

    def _now(self, path: Path) -> Path:
        """The current name of an input; what was fetched from a URL and is gone comes again."""
        before = str(path)
        name = self.prepared.names.get(before) or self.prepared.names.get(named(before), before)
        url = named(name)
        if self.cache is None or not is_url(url) or disk.exists(Path(name)):
            return Path(name)
        if name not in self._fetched:
            try:
                (self._fetched[name],) = local_text([url], self.cache)
            except DataError:  # it is gone there, too
                self._fetched[name] = name
        return Path(self._fetched[name])

    def _read(self, unit: EncodedUnit) -> Iterator[Placed]:
        """Documents of a unit, in order, up to a file that cannot be read (`faults`)."""
        for segment in unit.unit.segments:
            path = self._now(segment.path)
            try:
                if not disk.exists(path):
                    raise DataError("is gone, and the documents after it cannot be counted")
                yield from self._read_segment(unit, replace(segment, path=path))
            except DataError as error:
                self.faults[named(str(path))] = str(error).removeprefix(f"{path}: ")
                return

    def _read_segment(self, unit: EncodedUnit, segment: Segment) -> Iterator[Placed]:
        reading = self._work_of(unit).reading_of(unit.unit, set())
        path, form = segment.path, format_of(segment.path)
        before = None if form.is_cut_in_lines and segment.start else 0
        for document in read_segment(segment, reading):
            if isinstance(document, Rejection):
                text, split, line, byte = "", "", document.line, document.byte
            else:
                text, _, line, byte = document
                digest = sha256(text.encode()).digest()
                split = split_of(digest, unit.plan.val_fraction_of(unit.unit))
            if before is None:  # lines count from the start of the segment
                before = self._line_of(path, byte or 0) - line
            at = 0 if form.is_one_text else line + before
            yield Placed(Place(str(path), at, byte), split, text)

    def _line_of(self, path: Path, byte: int) -> int:
        """Line at an offset, counted from the last known one: units are read in order."""
        at, line = self._line_at.get(path, (0, 1))
        if byte < at:
            at, line = 0, 1
        line += newlines(path, at, byte)
        self._line_at[path] = byte, line
        return line
