"""Formats of text, a row each: how files of a suffix are cut into segments, and how these are read.

A new format is a reader and a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from minimind.data.text.documents import Found, ReadOptions, Rejection, Segment
from minimind.data.text.packed import PACKINGS
from minimind.data.text.readers import (
    csv_rows,
    emptiness,
    newlines,
    plain_lines,
    streamed_lines,
    whole_file,
)
from minimind.data.text.tables import dataset_rows, dataset_segments, parquet_rows, parquet_segments
from minimind.errors import DataError
from minimind.runtime import disk


def by_bytes(path: Path, unit_bytes: int) -> Iterator[Segment]:
    """Cut a file of lines."""
    size = disk.stat(path).st_size
    for start in range(0, max(size, 1), unit_bytes):
        stop = min(start + unit_bytes, size)
        yield Segment(path, start, stop, stop - start)


def not_cut(path: Path, unit_bytes: int) -> Iterator[Segment]:
    """The whole file."""
    size = disk.stat(path).st_size
    yield Segment(path, 0, size, size)


@dataclass(frozen=True)
class Format:
    """How inputs of a suffix are cut and read."""

    suffix: str
    read: Callable[[Segment, ReadOptions], Found]
    cut: Callable[[Path, int], Iterator[Segment]] = not_cut
    read_packed: Callable[[Segment, ReadOptions], Found] | None = None  # None: as it is without
    is_one_text: bool = False  # a file is a document

    @property
    def is_cut_in_lines(self) -> bool:
        return self.cut is by_bytes

    @property
    def is_table(self) -> bool:
        """Whether segments are numbers of rows."""
        return self.cut not in (by_bytes, not_cut)

    def packed(self, packing: str) -> Format:
        """The format of the same content in compressed files, which are read as a whole."""
        return replace(
            self, suffix=self.suffix + packing, read=self.read_packed or self.read, cut=not_cut
        )


PLAIN = (
    Format(".jsonl", plain_lines, by_bytes, streamed_lines),
    Format(".ndjson", plain_lines, by_bytes, streamed_lines),
    Format(".json", partial(streamed_lines, may_be_list=True)),
    Format(".txt", whole_file, is_one_text=True),
    Format(".md", whole_file, is_one_text=True),
    Format(".csv", csv_rows),
    Format(".tsv", partial(csv_rows, delimiter="\t")),
)
PACKED = [form.packed(packing) for form in PLAIN for packing in PACKINGS]
TABLES = (Format(".parquet", parquet_rows, parquet_segments),)
FORMATS = {form.suffix: form for form in (*PLAIN, *PACKED, *TABLES)}
DATASET = Format("dataset", dataset_rows, dataset_segments)  # a folder
KNOWN = (
    f"{', '.join(form.suffix for form in PLAIN)} (also with .gz, .zst, .xz or .bz2) or"
    f" {', '.join(form.suffix for form in TABLES)}"
)
RECORDS = [form.suffix for form in (*PLAIN, *TABLES) if not form.is_one_text]


def format_of(path: Path) -> Format:
    """The format of an input, by its name; raise DataError for an unknown one."""
    if disk.is_dir(path):
        return DATASET
    for suffix, form in FORMATS.items():
        if path.name.lower().endswith(suffix):
            return form
    raise DataError(
        f"{path}: the suffix {path.suffix!r} is not one of {KNOWN}; convert the file, or rename it"
        " if it is one of these"
    )


def segments_of(path: Path, unit_bytes: int) -> list[Segment]:
    """Cut an input into segments of about `unit_bytes`, if its format allows.

    An empty input is one empty segment, reported by its reader. Raise DataError for a damaged
    table.
    """
    return [*format_of(path).cut(path, unit_bytes)]


def read_segment(segment: Segment, reading: ReadOptions) -> Found:
    r"""Yield documents or rejections, with the bytes of the segment read so far and the place.

    A document is the `text_field` of a line, an item or a row, or all of it (`records`), or a whole
    file of text with its newlines; lines of JSON may end with \r\n. Reading continues after a
    rejection unless the file is damaged. Raise DataError for an unreadable file, or a table without
    these columns.

    Lines, rows and offsets count as in a Rejection; lines of a file that is cut in lines count from
    the start of the segment. Every line gives one document or one rejection. Items of a JSON list
    are counted as lines are.
    """
    form = format_of(segment.path)
    if segment.start == segment.stop:
        yield emptiness(segment.path, form.is_table)
        return
    try:
        found = form.read(segment, reading)
        yield from _not_held_out(found, segment.path, reading) if reading.held_out else found
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{segment.path}: cannot be read ({reason}); check the file") from error


def _not_held_out(found: Found, path: Path, reading: ReadOptions) -> Found:
    for one in found:
        if isinstance(one, Rejection):
            yield one
            continue
        text, _, line, byte = one
        held_out = reading.held_out.get(sha256(text.encode()).digest())
        if held_out is None:
            yield one
        else:
            reason = f"is also in {held_out}, which is held out"
            yield Rejection(path, line, byte, reason, "remove it from one of the two")


def in_file(rejection: Rejection) -> Rejection:
    """Return the rejection with its line number in the file, which requires reading up to it."""
    if rejection.byte is None or not format_of(rejection.path).is_cut_in_lines:
        return rejection
    return replace(rejection, line=newlines(rejection.path, 0, rejection.byte) + 1)
