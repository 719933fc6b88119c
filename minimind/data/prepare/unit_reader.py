"""Read the documents of a work unit in batches, with their split, and list rejected ones."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from minimind.data.prepare.work_units import Unit
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.inputs import Segment, kind_of
from minimind.data.text.readers import in_file, read_segment
from minimind.errors import DataError
from minimind.runtime.durable_files import canonical_json

BATCH_CHARACTERS = 2**20  # takes about the same time in any language
DOCUMENT_CHARACTERS = 64  # overhead per document, which dominates for short ones
MAX_LISTED = 10_000  # rejected documents of a unit; all are counted


def split_of(digest: bytes, val_fraction: float) -> str:
    """Split of a document by the sha256 of its text, independent of other documents."""
    place = int.from_bytes(digest[:8], "big")
    return "val" if place < val_fraction * 2**64 else "train"


def refusal(message: str) -> DataError:
    """Return the error for a bad document when none may be skipped."""
    return DataError(f"{message}; or skip bad documents with --on_bad_data skip")


def refuse(rejection: Rejection) -> None:
    """Raise for a bad document when none may be skipped."""
    raise refusal(str(in_file(rejection)))


def ignore(rejection: Rejection) -> None:
    """Ignore a bad document."""


def documents_of(
    segments: Iterable[Segment],
    reading: ReadOptions,
    reject: Callable[[Rejection], None],
    lines: Counter[str] | None = None,
) -> Iterator[tuple[str, int]]:
    """Yield each text with the bytes of input read so far; call `reject` for bad documents.

    `lines` counts the lines of each .jsonl file, once per finished segment.
    """
    before = 0
    for segment in segments:
        read = 0
        for document in read_segment(segment, reading):
            read += 1
            if isinstance(document, Rejection):
                reject(document)
                continue
            yield document[0], before + document[1]
            del document
        before += segment.weight
        if lines is not None and kind_of(segment.path) == ".jsonl":
            lines[str(segment.path)] += read


@dataclass(frozen=True)
class Batch:
    """Documents that are tokenized together, in order."""

    texts: list[str]
    splits: list[str]
    bytes: list[int]


class UnitReader:
    """Iterates over the documents of a unit in batches and lists rejected ones."""

    def __init__(
        self,
        unit: Unit,
        reading: ReadOptions,
        val_fraction: float,
        is_strict: bool,
        listed: Path,
        report_bytes: Callable[[int], object],
    ) -> None:
        self.unit = unit
        self.reading = reading
        self.val_fraction = val_fraction
        self.is_strict = is_strict  # the first rejection is an error
        self.listed = listed  # file of the first `MAX_LISTED` rejections
        self.report_bytes = report_bytes
        self.reported = 0  # bytes of input
        self.rejected = 0
        self.first_rejected: dict[str, Any] | None = None  # fields of a Rejection
        # Per .jsonl file; line numbers count from the first line of this unit.
        self.lines: Counter[str] = Counter()
        self.digest = hashlib.sha256()  # over the digests of all documents
        self._rejections: BinaryIO | None = None

    def batches(self) -> Iterator[Batch]:
        """Yield batches of about `BATCH_CHARACTERS`."""
        texts: list[str] = []
        size = 0
        for text, reached in documents_of(
            self.unit.segments, self.reading, self._reject, self.lines
        ):
            texts.append(text)
            size += len(text) + DOCUMENT_CHARACTERS
            if size >= BATCH_CHARACTERS:
                del text
                self._report(reached)
                yield self._batch(texts)
                texts, size = [], 0
        if texts:
            yield self._batch(texts)
        self._report(self.unit.bytes)

    def _batch(self, texts: list[str]) -> Batch:
        contents = [text.encode() for text in texts]
        digests = [hashlib.sha256(content).digest() for content in contents]
        self.digest.update(b"".join(digests))
        splits = [split_of(digest, self.val_fraction) for digest in digests]
        return Batch(texts, splits, [*map(len, contents)])

    def _report(self, reached: int) -> None:
        self.report_bytes(reached - self.reported)
        self.reported = reached

    def _reject(self, rejection: Rejection) -> None:
        if self.is_strict:
            refuse(rejection)
        path = str(rejection.path)
        number = rejection.line + self.lines[path]
        if self._rejections is None:
            self._rejections = open(self.listed, "wb")
            self.first_rejected = {**asdict(rejection), "path": path, "line": number}
        if self.rejected < MAX_LISTED:
            line = {"file": path, "line": number, "byte": rejection.byte, "what": rejection.what}
            self._rejections.write(canonical_json(line) + b"\n")
        self.rejected += 1

    def close(self) -> None:
        """Close the list of rejected documents."""
        if self._rejections:
            self._rejections.close()

    def finish(self) -> None:
        """Make the list durable."""
        if self._rejections:
            self._rejections.flush()
            os.fsync(self._rejections.fileno())
