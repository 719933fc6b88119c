"""Read documents one at a time, write those that pass every step, and list the others."""

from __future__ import annotations

import json
import shutil
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from minimind.data.prepare.merge import require_few_rejected
from minimind.data.prepare.remote import local_text
from minimind.data.prepare.unit_reader import refuse
from minimind.data.quality.language import in_languages, require_known
from minimind.data.quality.near_duplicates import MinHash, near_duplicates, require_datatrove
from minimind.data.quality.parts import PartWriter
from minimind.data.quality.steps import (
    Check,
    Removal,
    at_least_chars,
    at_most_chars,
    exact_duplicates,
    file_and_line,
    place_of,
)
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.inputs import find_files, require_once, segments_of
from minimind.data.text.readers import read_segment
from minimind.data.text.sources import Source
from minimind.errors import DataError, UsageError
from minimind.runtime.durable_files import canonical_json, read_small, sync_file, write_durably
from minimind.runtime.output_folder import NewFolder
from minimind.runtime.terminal import phase
from minimind.runtime.urls import masked
from minimind.storage.object_cache import ObjectCache, named

REPORT_NAME = "report.json"
REMOVED_NAME = "removed.ndjson"  # a suffix that is no input, so that --data_path takes the folder
LARGEST_REPORT = 2**28  # bytes: it lists every input
OWN = (REPORT_NAME, REMOVED_NAME, "part-[0-9]*.jsonl.gz", "part-[0-9]*.jsonl.zst")


@dataclass(frozen=True)
class FilterRequest:
    """The text and the steps."""

    paths: tuple[str, ...]
    reading: ReadOptions = field(default_factory=ReadOptions)
    skips_bad: bool = False
    max_bad_fraction: float = 0.05
    min_chars: int | None = None
    max_chars: int | None = None
    exact_dedup: bool = False
    minhash: MinHash | None = None
    languages: tuple[str, ...] = ()
    min_language_probability: float = 0.0

    def checks(self) -> list[Check]:
        """The checks of single documents, in order."""
        checks = [] if self.min_chars is None else [at_least_chars(self.min_chars)]
        checks += [] if self.max_chars is None else [at_most_chars(self.max_chars)]
        if self.languages:
            checks.append(in_languages(self.languages, self.min_language_probability))
        return [*checks, exact_duplicates()] if self.exact_dedup else checks

    def steps(self) -> dict[str, Any]:
        """The steps and their values, as in the report."""
        names = ["min_chars", "max_chars", "languages", "exact_dedup"]
        names += ["min_language_probability"] if self.languages else []
        values = {name: getattr(self, name) for name in names}
        found = {name: value for name, value in values.items() if value not in (None, False, ())}
        return found if self.minhash is None else {**found, "minhash": asdict(self.minhash)}


def filter_text(
    request: FilterRequest, out: Path, force: bool, cache: ObjectCache
) -> dict[str, Any]:
    """Write the documents that stay to a new folder `out`; return its report.

    Text at URLs is fetched to `cache`, when all else that can be wrong is checked.
    Raise DataError if a document is bad and none may be skipped, too many are, or none stays.
    """
    author = "minimind data filter"
    folder = NewFolder(out.expanduser().resolve(), force, OWN, author, _is_output)
    folder.require_free()
    require_known(request.languages)
    if request.minhash:
        require_datatrove()
    files = find_files(local_text(request.paths, cache))
    require_once(files, "")
    if inside := next((file for file in files if file.resolve().is_relative_to(folder.path)), None):
        raise UsageError(
            f"--out {out} holds {inside}, which is read; give another folder, outside of the text"
        )
    with folder.written_aside() as draft:
        with (
            phase("filtering the text"),
            open(draft / REMOVED_NAME, "wb") as listed,
            closing(PartWriter(draft)) as writer,
        ):
            run = _Run(request, files, listed)
            if request.minhash is None:
                for text, _ in run.passing():
                    run.keep(text, writer)
            else:
                run.keep_distinct(request.minhash, draft / "minhash", writer)
        run.require_usable()
        sync_file(draft / REMOVED_NAME)
        report = {**run.report(), "parts": writer.names}
        write_durably(draft / REPORT_NAME, json.dumps(report, indent=1).encode() + b"\n")
    return report


def _is_output(folder: Path) -> bool:
    """Whether a folder has what every output has, and a report that lists its parts."""
    if not (folder / REPORT_NAME).exists() or not (folder / REMOVED_NAME).exists():
        return False
    try:
        report = json.loads(read_small(folder / REPORT_NAME, LARGEST_REPORT))
    except (ValueError, RecursionError):
        return False
    parts = sorted(path.name for path in folder.glob("part-*"))
    return isinstance(report, dict) and report.get("parts") == parts


class _Run:
    """Reads the files once, and counts each document as kept, rejected or removed."""

    def __init__(self, request: FilterRequest, files: Sequence[Path], listed: BinaryIO) -> None:
        self.request = request
        self.files = files
        self.documents: Counter[str] = Counter()  # by reason, "kept" and "rejected"
        self.bytes: Counter[str] = Counter()  # of text in UTF-8; a rejected document has none
        self._listed = listed
        self._first_rejected = ""

    def passing(self) -> Iterator[tuple[str, int]]:
        """Yield the documents that pass the checks, with their places; list the others."""
        checks = self.request.checks()
        for text, place in self._documents():
            found = (check(text, place) for check in checks)
            removal = next((removal for removal in found if removal), None)
            if removal is None:
                yield text, place
            else:
                self.remove(text, place, removal)

    def _documents(self) -> Iterator[tuple[str, int]]:
        for number, path in enumerate(self.files):
            for segment in segments_of(path, sys.maxsize):  # one, so that lines are the file's
                for document in read_segment(segment, self.request.reading):
                    if isinstance(document, Rejection):
                        self._reject(document, place_of(number, document.line))
                    else:
                        yield document[0], place_of(number, document[2])

    def keep(self, text: str, writer: PartWriter) -> None:
        """Write a document."""
        self._count("kept", text)
        writer.add(text)

    def keep_distinct(self, options: MinHash, scratch: Path, writer: PartWriter) -> None:
        """Write the documents that pass the checks and are no near-duplicates; list the others.

        Copies what passes to `scratch` first: the input may change before it is read again.
        """
        places = array("Q")
        scratch.mkdir()
        with closing(PartWriter(scratch)) as copy:
            replaced = near_duplicates(self._copied(copy, places), options, scratch)
        for number, text in enumerate(copy.texts()):
            if number in replaced:
                kept = places[replaced[number]]
                self.remove(text, places[number], Removal("near_duplicate", kept))
            else:
                self.keep(text, writer)
        shutil.rmtree(scratch)

    def _copied(self, copy: PartWriter, places: array[int]) -> Iterator[str]:
        for text, place in self.passing():
            copy.add(text)
            places.append(place)
            yield text

    def remove(self, text: str, place: int, removal: Removal) -> None:
        """Count and list a document that is removed."""
        self._count(removal.reason, text)
        entry = {**self._at(place), "reason": removal.reason, **removal.found}
        if removal.kept is not None:
            kept = self._at(removal.kept)
            entry["kept"] = f"{kept['file']}:{kept['line']}"
        self._list(entry)

    def _reject(self, rejection: Rejection, place: int) -> None:
        if not self.request.skips_bad:
            refuse(rejection)
        self._first_rejected = self._first_rejected or str(rejection)
        self.documents["rejected"] += 1
        self._list({**self._at(place), "reason": "rejected", "what": rejection.what})

    def _count(self, reason: str, text: str) -> None:
        self.documents[reason] += 1
        self.bytes[reason] += len(text.encode())

    def _at(self, place: int) -> dict[str, Any]:
        file, line = file_and_line(place)
        return {"file": named(str(self.files[file])), "line": line}

    def _list(self, entry: dict[str, Any]) -> None:
        self._listed.write(canonical_json(entry) + b"\n")

    def require_usable(self) -> None:
        """Raise DataError if too many documents were bad, or none is kept."""
        rejected = {"count": self.documents["rejected"], "first": self._first_rejected}
        counts = {"rejected": rejected, "documents": self.documents.total() - rejected["count"]}
        source = Source("data", tuple(map(masked, self.request.paths)))
        require_few_rejected(counts, self.request.max_bad_fraction, [source])
        if not self.documents["kept"]:
            reason, count = self.documents.most_common(1)[0]
            raise DataError(
                f"{masked(self.request.paths[0])}: no document is left of"
                f" {self.documents.total():,}, and {reason} is the reason of {count:,};"
                " change the steps"
            )

    def report(self) -> dict[str, Any]:
        """Return the content of report.json; what was read is the sum of the rest."""
        counts = {
            reason: {"documents": count, "bytes": self.bytes[reason]}
            for reason, count in self.documents.items()
        }
        none = {"documents": 0, "bytes": 0}
        return {
            "inputs": [named(str(path)) for path in self.files],
            "steps": self.request.steps(),
            "read": {"documents": self.documents.total(), "bytes": self.bytes.total()},
            "kept": counts.pop("kept", none),
            "rejected": counts.pop("rejected", none),
            "removed": counts,
        }
