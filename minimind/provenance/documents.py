"""The documents of the training tokens of a prepared folder, and their place in the text.

A folder stores where documents end, not where they came from: a unit of the plan is read again,
up to the document, with the same split by hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from minimind.data.prepare.prepare import Prepared
from minimind.data.prepare.unit_reader import split_of
from minimind.data.prepare.work_units import Plan, Unit, read_described
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.inputs import kind_of
from minimind.data.text.readers import line_number, read_segment
from minimind.errors import DataError, UsageError


@dataclass(frozen=True)
class Place:
    """File, line (or row of a table) from 1, and byte of the line in the (decompressed) file."""

    file: str
    line: int
    byte: int | None  # None for a row of a table

    def __str__(self) -> str:
        """`FILE:LINE`."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Placed:
    """A document of the text: its place, its split (empty if it is rejected) and its text."""

    place: Place
    split: str
    text: str


@dataclass
class Documents:
    """The training documents of a folder, numbered from 0 in the order of their tokens."""

    prepared: Prepared
    ends: np.ndarray  # int64, cumulative tokens
    plan: Plan
    first: Mapping[int, int]  # number of the first document by unit
    faults: dict[str, str] = field(default_factory=dict)  # why a text could not be read, by file

    @classmethod
    def of(cls, prepared: Prepared) -> Documents:
        """Read the index of a folder."""
        plan = Plan.from_json(read_described(prepared.directory))
        first, before = {}, 0
        for shard in prepared.manifest["splits"]["train"]["shards"]:
            unit = int(Path(shard["name"]).stem.removeprefix("train-"))
            first[unit] = before
            before += shard["documents"]
        return cls(prepared, prepared.train.document_ends(), plan, first)

    def over(self, start: int, stop: int) -> range:
        """Numbers of the documents with any of the tokens `start` to `stop`."""
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        return range(int(first), int(last) + 1)

    def tokens(self, number: int) -> tuple[int, int]:
        """First token of a document, and the one after its end token."""
        return int(self.ends[number - 1]) if number else 0, int(self.ends[number])

    def places(self, numbers: Iterable[int]) -> dict[int, Place]:
        """Place by number; without those whose text is gone or changed (`faults`)."""
        wanted = sorted(set(numbers))
        units = np.array(sorted(self.first))
        starts = np.array([self.first[unit] for unit in units.tolist()])
        found: dict[int, Place] = {}
        for unit in np.unique(units[np.searchsorted(starts, wanted, side="right") - 1]).tolist():
            own = {n - self.first[unit] for n in wanted if n >= self.first[unit]}
            own -= {n - self.first[unit] for n in found}
            found |= self._places_in(self.plan.units[unit], own)
        return found

    def _places_in(self, unit: Unit, wanted: set[int]) -> dict[int, Place]:
        """Place by number, for those of `wanted` (counted from the unit's first) in a unit."""
        found: dict[int, Place] = {}
        before = self.first[unit.number]
        train = (one for one in self._read(unit) if one.split == "train")
        try:
            for at, one in enumerate(train):
                if at not in wanted:
                    continue
                if self._is_stored(before + at, one.text):
                    found[before + at] = one.place
                else:
                    self.faults[one.place.file] = "changed since it was prepared"
                if len(found) == len(wanted):
                    break
        except DataError as error:
            self.faults[str(self._now(unit.segments[0].path))] = str(error)
        return found

    def _is_stored(self, number: int, text: str) -> bool:
        """Whether a text has the tokens of a document."""
        start, stop = self.tokens(number)
        ids = self.prepared.tokenizer.encode_arrays([text], 1)[0]
        return np.array_equal(ids, self.prepared.train.stretch(start, stop - start - 1))

    def find(self, file: str, line: int) -> tuple[Placed, int | None]:
        """The document at FILE:LINE and its number; None if it is not trained on.

        Raise UsageError if the file is not part of the text or has no such line.
        """
        path = self._input_of(file)
        for unit in self.plan.units:
            if path not in {str(segment.path) for segment in unit.segments}:
                continue
            number = self.first.get(unit.number, 0) - 1
            for one in self._read(unit):
                number += one.split == "train"
                if (one.place.file, one.place.line) == (str(self._now(Path(path))), line):
                    is_trained = one.split == "train"
                    if is_trained and not self._is_stored(number, one.text):
                        raise DataError(f"{file}: changed since it was prepared; restore it")
                    return one, number if is_trained else None
        raise UsageError(f"{file}:{line}: there is no such line; lines are counted from 1")

    def _input_of(self, file: str) -> str:
        """The path, as in the plan, of a file given in any way that names one input."""
        by_now = {str(self._now(Path(one.path))): one.path for one in self.plan.inputs}
        wanted = str(Path(file).expanduser().absolute())
        close = [now for now in by_now if now == wanted or now.endswith(f"/{file}")]
        if wanted in by_now:
            return by_now[wanted]
        if len(close) != 1:
            some = ", ".join(sorted(close or by_now)[:3])
            problem = "names several files" if close else "is no file of this text"
            raise UsageError(f"{file} {problem}; give the path of one, such as {some}")
        return by_now[close[0]]

    def _now(self, path: Path) -> Path:
        """The current name of an input."""
        return Path(self.prepared.names.get(str(path), str(path)))

    def _read(self, unit: Unit) -> Iterator[Placed]:
        """All documents of a unit, in order."""
        options = self.plan.options
        reading = ReadOptions(options.text_field, options.max_document_bytes)
        for segment in unit.segments:
            path = self._now(segment.path)
            here = type(segment)(path, segment.start, segment.stop, segment.weight)
            before = None if kind_of(path) == ".jsonl" and segment.start else 0
            for one in read_segment(here, reading):
                if isinstance(one, Rejection):
                    text, split, line, byte = "", "", one.line, one.byte
                else:
                    text, _, line, byte = one
                    split = split_of(sha256(text.encode()).digest(), options.val_fraction)
                if before is None:  # lines count from the start of the segment
                    before = line_number(path, byte or 0) - line
                yield Placed(Place(str(path), line + before, byte), split, text)
