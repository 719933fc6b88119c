"""Read the documents of a work unit of a plan, and encode them into shards.

Its marker is written last, so that a killed preparation resumes with the units that have none.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import numpy as np

from minimind.data.prepare.work_units import Plan, Unit
from minimind.data.shards.conversation_shards import DTYPE, marked
from minimind.data.shards.manifest import SPLITS, is_whole
from minimind.data.shards.token_shards import ShardWriter, token_dtype
from minimind.data.text.documents import DocumentError, ReadOptions, Rejection, Segment
from minimind.data.text.formats import format_of, in_file, read_segment
from minimind.data.tokenizer.load import Tokenizer
from minimind.data.tokenizer.lossless import TextLoss
from minimind.errors import DataError, UsageError
from minimind.runtime.durable_files import canonical_json, storing, sync_directory, write_whole
from minimind.runtime.urls import named

if TYPE_CHECKING:
    from minimind.data.chat.conversations import Conversation
    from minimind.data.chat.template import ChatTemplate, Written

BATCH_CHARACTERS = 2**20  # takes about the same time in any language
DOCUMENT_CHARACTERS = 64  # overhead per document, which dominates for short ones
MAX_LISTED = 10_000  # rejections of a unit; all are counted


def split_of(digest: bytes, val_fraction: float) -> str:
    """Split of a document by the sha256 of its text, independent of other documents."""
    position = int.from_bytes(digest[:8], "big")
    return "val" if position < val_fraction * 2**64 else "train"


def refusal(message: str) -> DataError:
    """Return the error for a bad document when none may be skipped."""
    return DataError(f"{message}, or skip bad documents with --on_bad_data skip")


def refuse(rejection: Rejection) -> None:
    """Raise for a bad document when none may be skipped."""
    raise refusal(str(in_file(rejection)))


def ignore(rejection: Rejection) -> None:
    """Ignore a bad document."""


class Place(NamedTuple):
    """Where a document stands: see `Rejection`."""

    path: Path
    line: int
    byte: int | None


def documents_of(
    segments: Iterable[Segment],
    reading: ReadOptions,
    reject: Callable[[Rejection], None],
    lines: Counter[str] | None = None,
) -> Iterator[tuple[str, int, Place]]:
    """Yield each text with the bytes of input read so far; call `reject` for bad documents.

    Line numbers of a file that is cut count from the first of the segments. `lines` counts them.
    """
    before = 0
    lines = Counter() if lines is None else lines
    for segment in segments:
        read, above = 0, lines[str(segment.path)]
        for document in read_segment(segment, reading):
            read += 1
            if isinstance(document, Rejection):
                reject(replace(document, line=above + document.line))
                continue
            text, reached, line, byte = document
            del document
            yield text, before + reached, Place(segment.path, above + line, byte)
            del text
        before += segment.weight
        if format_of(segment.path).is_cut_in_lines:
            lines[str(segment.path)] += read


def held_out_by(plan: Plan, reading: ReadOptions) -> dict[bytes, str]:
    """Map the sha256 of every document of --val_path to the name of its file."""
    found: dict[bytes, str] = {}
    units = filter(plan.is_held_out, plan.units)
    for segment in (segment for unit in units for segment in unit.segments):
        name = named(str(segment.path))
        for text, _, _ in documents_of([segment], reading, ignore):
            found[hashlib.sha256(text.encode()).digest()] = name
    return found


@dataclass(frozen=True)
class Batch:
    """Documents that are tokenized together, in order."""

    texts: list[str]
    places: list[Place]
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
        self.rejected = 0  # documents
        self.listed_documents = 0
        self.lost_bytes = 0  # of files, in which documents cannot be counted
        self.first_rejected: dict[str, Any] | None = None  # fields of a Rejection
        # Per file that is cut; line numbers count from the first line of this unit.
        self.lines: Counter[str] = Counter()
        self.digest = hashlib.sha256()  # over the digests of all documents
        self._rejections: BinaryIO | None = None
        self._lines_listed = 0

    def batches(self) -> Iterator[Batch]:
        """Yield batches of about `BATCH_CHARACTERS`."""
        texts: list[str] = []
        places: list[Place] = []
        size = 0
        for text, reached, place in documents_of(
            self.unit.segments, self.reading, self._reject, self.lines
        ):
            texts.append(text)
            places.append(place)
            size += len(text) + DOCUMENT_CHARACTERS
            if isinstance(text, WrittenText):
                size += len(text.written[0])
            if size >= BATCH_CHARACTERS:
                del text
                self._report(reached)
                yield self._batch(texts, places)
                texts, places, size = [], [], 0
        if texts:
            yield self._batch(texts, places)
        self._report(self.unit.bytes)

    def _batch(self, texts: list[str], places: list[Place]) -> Batch:
        contents = [text.encode() for text in texts]
        digests = [hashlib.sha256(content).digest() for content in contents]
        self.digest.update(b"".join(digests))
        splits = [split_of(digest, self.val_fraction) for digest in digests]
        return Batch(texts, places, splits, [*map(len, contents)])

    def _report(self, reached: int) -> None:
        self.report_bytes(reached - self.reported)
        self.reported = reached

    def _reject(self, rejection: Rejection) -> None:
        if self.is_strict:
            refuse(rejection)
        fields = {**asdict(rejection), "path": str(rejection.path)}
        if self._rejections is None:
            self._rejections = open(self.listed, "wb")
            self.first_rejected = fields
        if self._lines_listed < MAX_LISTED:
            listed = {name: fields[name] for name in ("line", "byte", "what", "documents", "bytes")}
            self._rejections.write(canonical_json({"file": fields["path"], **listed}) + b"\n")
            self._lines_listed += 1
            self.listed_documents += rejection.documents
        self.rejected += rejection.documents
        self.lost_bytes += rejection.bytes

    def close(self) -> None:
        """Close the list of rejected documents."""
        if self._rejections:
            self._rejections.close()

    def finish(self) -> None:
        """Make the list durable."""
        if self._rejections:
            self._rejections.flush()
            os.fsync(self._rejections.fileno())


MARKER_VERSION = 6  # increase when the content of a marker, or of files that merge reads, changes
LARGE_BYTES = 2**23  # bytes of one document
PREFETCH_BATCHES = 6  # short documents are read slower than they are encoded
MAX_IGNORED, KEY_CHARACTERS = 20, 40  # keys of conversations that are named
MAX_REMARKS = 20  # on places of files
REMEDY = "give another folder"
Encoded = tuple[list[np.ndarray], TextLoss]


class WrittenText(str):
    """The text of a conversation, with what its template writes of it."""

    written: Written


@dataclass(frozen=True)
class Work:
    """Context of encoding: folder, plan, tokenizer and options."""

    directory: Path
    plan: Plan
    tokenizer: Tokenizer
    is_strict: bool  # the first rejection is an error
    threads: int = 1
    report_bytes: Callable[[int], object] = lambda _: None  # bytes of input since the last call
    overlap_task: Callable[[], object] = lambda: None  # called while the end of a unit is tokenized

    @property
    def dtype(self) -> np.dtype[Any]:
        is_text = self.plan.options.chat_template is None
        return token_dtype(self.tokenizer.vocab_size) if is_text else DTYPE

    @cached_property
    def _chat(self) -> ChatTemplate | None:
        options = self.plan.options
        if options.chat_template is None:
            return None
        told = options.template_date
        today = date.fromisoformat(told) if told else None
        from minimind.data.chat.template import ChatTemplate

        variables = options.chat_template_kwargs or {}
        return ChatTemplate(options.chat_template, self.tokenizer, today=today, variables=variables)

    @property
    def _train_on(self) -> Any:
        return self.plan.options.train_on

    @cached_property
    def _sizes(self) -> np.ndarray:
        return self.tokenizer.piece_bytes()

    @cached_property
    def _held_out(self) -> dict[bytes, str]:
        return held_out_by(self.plan, self._reading(set()))

    def reading_of(self, unit: Unit, ignored: set[str]) -> ReadOptions:
        """How documents of a unit are read.

        Conversations that cannot be encoded, and what the plan holds out, are rejected. The keys of
        conversations that are not read are added to `ignored`. Remarks are those on this unit.
        """
        held_out = {} if self.plan.is_held_out(unit) else self._held_out
        return replace(self._reading(ignored), held_out=held_out, remarks=[])

    def _reading(self, ignored: set[str]) -> ReadOptions:
        reading, chat = self.plan.options.reading, self._chat
        if chat is None:
            return reading
        from minimind.data.chat.conversations import conversation_records, document_of
        from minimind.data.chat.turns import Unbounded

        def written(conversation: Conversation, reading: ReadOptions) -> WrittenText:
            text = WrittenText(document_of(conversation, reading))
            try:
                text.written = chat.write(conversation, self._train_on)
            except Unbounded:  # which conversations are skipped may not depend on the host's speed
                raise
            except UsageError as error:  # report the line; the template itself is valid
                reason, _, remedy = str(error).rpartition("; ")
                raise DocumentError(reason, remedy) from error
            return text

        return replace(reading, records=conversation_records(reading, ignored, written))

    def encode_batch(self, batch: Batch, threads: int) -> Encoded:
        """See `encode`; a DataError names the place of the document."""
        try:
            return self.encode(batch.texts, threads)
        except DataError:
            for text, place in zip(batch.texts, batch.places, strict=True):
                try:
                    self.encode([text], threads)
                except DataError as error:
                    what, _, remedy = str(error).rpartition("; ")
                    rejection = in_file(Rejection(*place, what, remedy))
                    raise DataError(f"{rejection}, or leave the document out") from error
            raise

    def encode(self, texts: Sequence[str], threads: int) -> Encoded:
        """Tokens of each document, of conversations with the marks of targets; and what is lost.

        Raise DataError where the tokenizer fails.
        """
        loss = TextLoss()
        if self._chat is None:
            ids = self.tokenizer.encode_arrays(texts, threads)
            if not self.tokenizer.is_lossless:
                loss.count(self.tokenizer, self._sizes, texts, ids)
            return ids, loss
        measured = None if self.tokenizer.is_lossless else loss
        written = [cast(WrittenText, text).written for text in texts]
        documents = []
        for encoded in self._chat.encode_written(written, threads, measured):
            if isinstance(encoded, DocumentError):
                raise DataError(f"{encoded.reason}; {encoded.remedy}")
            documents.append(marked(*encoded))
        return documents, loss

    def path(self, kind: str, number: int) -> Path:
        """`unit-00012.json`, its marker, or `rejected-00012.jsonl`."""
        suffix = {"unit": "json", "rejected": "jsonl", "claim": "lock"}[kind]
        return self.directory / f"{kind}-{number:05d}.{suffix}"

    def done(self, unit: Unit) -> dict[str, Any] | None:
        """Return the marker of a finished unit of this text with intact shards, else None."""
        path = self.path("unit", unit.number)
        try:
            marker = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(marker, dict) or marker.get("key") != self._key(unit):
            return None  # it is the marker of another text or version
        shards = marker["shards"].values()
        return marker if all(is_whole(self.directory, shard) for shard in shards) else None

    def _key(self, unit: Unit) -> str:
        return f"{MARKER_VERSION}-{self.plan.key_of(unit, self.tokenizer.fingerprint)}"

    def begin(self, unit: Unit) -> None:
        """Remove files of an earlier attempt at a unit."""
        for split in SPLITS:
            for suffix in ("bin", "idx"):
                (self.directory / f"{split}-{unit.number:05d}.{suffix}").unlink(missing_ok=True)
        self.path("rejected", unit.number).unlink(missing_ok=True)

    def mark(self, unit: Unit, content: dict[str, Any]) -> None:
        """Write the marker of a finished unit, whose files are durable."""
        sync_directory(self.directory)
        marker = canonical_json({**content, "key": self._key(unit)})
        write_whole(self.path("unit", unit.number), marker)


def encode_unclaimed(work: Work, unit: Unit, waiting: bool) -> bool:
    """Encode a unit if it is not done; return False if another process has claimed it.

    With `waiting`, wait for that process.
    """
    with _claimed(work.path("claim", unit.number), waiting) as is_ours:
        if is_ours and work.done(unit):
            work.report_bytes(unit.bytes)
        elif is_ours:
            encode_unit(work, unit)
        return is_ours


@contextmanager
def _claimed(path: Path, waiting: bool) -> Iterator[bool]:
    """Claim `path`; return whether that succeeded. With `waiting`, wait for the other process.

    The lock is the kernel's: it ends with its holder, however that ends.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waiting else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def encode_unit(work: Work, unit: Unit) -> None:
    """Write shards, rejections and marker of a unit, fsynced, in this order."""
    number, directory = unit.number, work.directory
    for given in work.plan.inputs_of(unit):
        given.require_unchanged()
    rejected = work.path("rejected", number)
    ignored: set[str] = set()
    reader = UnitReader(
        unit,
        work.reading_of(unit, ignored),
        work.plan.val_fraction_of(unit),
        work.is_strict,
        rejected,
        work.report_bytes,
    )
    writers = {
        split: ShardWriter(directory, f"{split}-{number:05d}", work.dtype) for split in SPLITS
    }
    text_bytes: dict[str, int] = dict.fromkeys(SPLITS, 0)
    loss = TextLoss()
    with ExitStack() as stack, storing(f"{directory}: cannot be written", REMEDY):
        work.begin(unit)
        stack.enter_context(_no_collection())
        for file in (reader, *writers.values()):
            stack.enter_context(closing(file))
        for batch, (ids, lost) in _overlapped(reader.batches(), work):
            loss.add(lost)
            for split, writer in writers.items():
                numbers = [n for n, name in enumerate(batch.splits) if name == split]
                writer.add(*_joined([ids[n] for n in numbers], work.tokenizer.eos_id))
                text_bytes[split] += sum(batch.bytes[n] for n in numbers)
        shards = {split: writer.finish() for split, writer in writers.items()}
        reader.finish()
        for given in work.plan.inputs_of(unit):
            given.require_unchanged()
        content = {
            "shards": {split: shard for split, shard in shards.items() if shard},
            "text_bytes": text_bytes,
            "rejected": reader.rejected,
            "listed": reader.listed_documents,
            "lost_bytes": reader.lost_bytes,
            "first_rejected": reader.first_rejected,
            "remarks": [(str(path), what) for path, what in reader.reading.remarks[:MAX_REMARKS]],
            "lines": reader.lines,
            "sha256": reader.digest.hexdigest(),
            "text_loss": None if work.tokenizer.is_lossless else asdict(loss),
            "ignored": sorted(key[:KEY_CHARACTERS] for key in ignored)[:MAX_IGNORED],
        }
        work.mark(unit, content)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector: there are no cycles, and its scans cost a tenth."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _joined(documents: list[np.ndarray], eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate documents with their eos ids; return tokens and lengths."""
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    ids = np.concatenate([np.empty(0, np.int32), *documents])
    return np.insert(ids, np.cumsum(lengths), eos), lengths + 1


def _overlapped(batches: Iterable[Batch], work: Work) -> Iterator[tuple[Batch, Encoded]]:
    """Each batch with the ids of its documents, in order; while some are tokenised, more are read.

    Each thread has a batch of its own: sharing one, all would wait for the last. But a document
    that is large has all threads, and memory, to itself.
    """
    encode, threads = work.encode_batch, work.threads
    large = min(LARGE_BYTES, (work.tokenizer.longest_at_once or sys.maxsize) // threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="tokenize") as pool:
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in batches:
            is_large = max(batch.bytes) >= large
            if is_large:
                yield from _taken(waiting, 0)
            waiting.append((batch, pool.submit(encode, batch, threads if is_large else 1)))
            del batch
            yield from _taken(waiting, 0 if is_large else PREFETCH_BATCHES + threads)
        work.overlap_task()
        yield from _taken(waiting, 0)


def _taken(
    waiting: deque[tuple[Batch, Future[Encoded]]], left: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Yield the oldest results until `left` are pending."""
    while len(waiting) > left:
        batch, ids = waiting.popleft()
        yield batch, ids.result()
        del batch, ids
