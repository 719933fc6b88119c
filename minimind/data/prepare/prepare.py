"""Text -> tokenizer and token shards, in the cache of a run.

The folder is filled under a temporary name and renamed when complete. A killed preparation resumes
and gives the same files. A fine-tuning run has the tokenizer of its model.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from tqdm import tqdm

from minimind.data.prepare.encode import (
    Work,
    documents_of,
    held_out_by,
    ignore,
    refusal,
    refuse,
    split_of,
)
from minimind.data.prepare.merge import (
    clear,
    input_bytes,
    merge,
    no_training_documents,
    require_few_rejected,
)
from minimind.data.prepare.prepared import Prepared, is_prepared, open_prepared
from minimind.data.prepare.work_units import Plan, Unit, files_of, make_plan
from minimind.data.prepare.workers import encode_plan
from minimind.data.shards.manifest import (
    FORMAT_VERSION,
    PLAN_NAME,
    TOKENIZER_NAME,
    Options,
    require_hash,
)
from minimind.data.text.formats import format_of
from minimind.data.text.inputs import Source, require_records
from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from minimind.data.tokenizer.lossless import require_kept
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.data.tokenizer.vocabulary import MODEL_NAME, require_learnable, write_tokenizer
from minimind.errors import DataError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.drafts import draft_of, remove_left
from minimind.runtime.durable_files import (
    canonical_json,
    fingerprint,
    sha256_of,
    storing,
    sync_directory,
    write_whole,
)
from minimind.runtime.object_cache import fetched_sha256
from minimind.runtime.terminal import phase


def build_once(
    directory: Path, build: Callable[[Path], None], remedy: str, is_resumable: bool = False
) -> None:
    """Call `build` to fill `directory` unless it exists; other processes wait meanwhile.

    A resumable build continues from what a killed one left.

    `build` fills a temporary directory that is renamed when complete, so `directory` can be used
    without a lock, also in a read-only cache. The kernel releases the lock when its process ends.
    The lock file stays: if it were removed, two processes could lock two files of one name.
    """
    if disk.is_dir(directory):
        return
    with storing(f"{directory}: cannot be written", remedy):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(directory.with_name(f"{directory.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not disk.is_dir(directory):
                remove_left(directory.parent)
                _build(directory, build, is_resumable)


def _build(directory: Path, build: Callable[[Path], None], is_resumable: bool) -> None:
    if is_resumable:
        draft = directory.with_name(f"{directory.name}.part")
        draft.mkdir(exist_ok=True)
    else:
        for leftover in disk.matching(directory.parent, f"{directory.name}.tmp-*"):
            shutil.rmtree(leftover)  # a killed process left it
        draft = draft_of(directory)
        draft.mkdir()
    try:
        build(draft)
        sync_directory(draft)
        os.rename(draft, directory)
        sync_directory(directory.parent)
    except BaseException as error:  # Ctrl-C, too; raised again
        # Kept after Ctrl-C and after the death of a worker, not if the same text would fail again
        # or the disk is full.
        if isinstance(error, DataError | UsageError | StorageError | OSError) or not is_resumable:
            shutil.rmtree(draft, ignore_errors=True)
        raise


REMEDY = "give another --cache_dir"
SAMPLED_BYTES = 2**30  # bytes of input to train a tokenizer on
# Increase when a new check would refuse data that is cached: conversations, or text that a
# tokenizer loses.
CACHE_VERSION = 2
TOKENIZER_SUM = f"{MODEL_NAME}.sha256"  # of a tokenizer that was trained


@dataclass(frozen=True)
class PrepareRequest:
    """The options of a preparation."""

    sources: tuple[Source, ...]
    tokenizer_path: str | None = None
    vocab_size: int = 6400  # size of the tokenizer that is trained if none is given
    options: Options = field(default_factory=Options)
    skips_bad: bool = False
    max_bad_fraction: float = 0.05
    allow_lossy: bool = False  # a tokenizer that loses text
    unit_bytes: int | None = None
    processes: int | None = None  # None: as many as the cores of this host can use
    progress: bool = True
    ray: str | None = None  # address of a cluster, or `local`; for dataset folders only
    val_path: tuple[str, ...] = ()  # text that is held out, of the only source

    def plan(self) -> Plan:
        """Plan the units of the text; raise UsageError for an impossible vocabulary size."""
        if self.tokenizer_path is None:
            require_learnable(self.vocab_size)
        return make_plan(self.sources, self.options, self.unit_bytes, self.val_path)


def prepare_for_run(request: PrepareRequest, cache_dir: Path) -> Prepared:
    """Prepare the tokens of a run's text; every process calls it and one does the work.

    The cache is keyed by the content of the text, not by the names of its files and sources, nor
    by weights.
    """
    sources = request.sources
    plan = replace(request, sources=tuple(replace(one, weight=None) for one in sources)).plan()
    contents = [_content(Path(given.path)) for given in plan.inputs]
    documents = {
        "format_version": FORMAT_VERSION,
        "contents": contents,
        "options": plan.options.to_json(),
        "unit_bytes": request.unit_bytes,
    }
    if plan.held_out:
        documents["held_out"] = len(plan.held_out)  # the last contents
    if len(sources) > 1:
        documents["sources"] = [given.source for given in plan.inputs]
    trained = (
        cache_dir / f"tokenizer-{fingerprint({**documents, 'vocab_size': request.vocab_size})}"
    )
    tokenizer = tokenizer_of(request, plan, trained, REMEDY)
    if plan.options.chat_template is not None:
        require_records(Path(given.path) for given in plan.inputs)
    if plan.options.chat_template is not None or not tokenizer.is_lossless:
        documents["cache_version"] = CACHE_VERSION
    directory = cache_dir / f"tokens-{fingerprint({**documents, 'is': tokenizer.fingerprint})}"

    def build(draft: Path) -> None:
        if is_prepared(draft):  # killed in clear()
            return clear(draft)
        write_tokenizer(draft / TOKENIZER_NAME, tokenizer.files())
        write_whole(draft / PLAN_NAME, canonical_json(plan.to_json()))
        work = Work(draft, plan, tokenizer, not request.skips_bad)
        with phase("tokenizing the text", on_any_rank=request.progress):
            encode_plan(work, progress=request.progress)
        merge(work, request.max_bad_fraction, allow_lossy=True)  # the flag may change: see below
        clear(draft)

    build_once(directory, build, REMEDY, is_resumable=True)
    names = [given.path for given in plan.inputs]
    prepared = open_prepared(directory, names=names, sources=sources)
    if not request.skips_bad and (first := prepared.first_rejected):
        raise refusal(first)
    require_few_rejected(
        prepared.manifest["rejected"],
        prepared.manifest["documents"],
        input_bytes(prepared.manifest),
        request.max_bad_fraction,
        request.sources,
    )
    require_kept(prepared.manifest["sources"], tokenizer, request.allow_lossy)
    return prepared


def _content(path: Path) -> list[str]:
    """The format of an input and the hashes of its files.

    Raise DataError for a file of the cache that is not as it was fetched.
    """
    try:
        hashes = {file: sha256_of(file) for file in files_of(path)}
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check it") from error
    for file, found in hashes.items():
        if fetched_sha256(file) not in (None, found):
            raise DataError(
                f"{file}: was changed after it was fetched; delete {file} to fetch it again"
            )
    return [format_of(path).suffix, *hashes.values()]


def tokenizer_of(request: PrepareRequest, plan: Plan, trained: Path, remedy: str) -> Tokenizer:
    """Load the given tokenizer, or train one into `trained` unless it exists.

    Raise DataError for a trained one that is not as it was written: with it the text would be
    tokenized anew, and differently.
    """
    if request.tokenizer_path is not None:
        return load_tokenizer(request.tokenizer_path)
    texts = _training_texts(plan, request)

    def build(draft: Path) -> None:
        with phase("training the tokenizer", on_any_rank=request.progress):
            train_tokenizer(texts, request.vocab_size, draft / MODEL_NAME)
        write_whole(draft / TOKENIZER_SUM, sha256_of(draft / MODEL_NAME).encode())

    build_once(trained, build, remedy)
    recorded = trained / TOKENIZER_SUM
    digest = recorded.read_text("ascii", "replace") if disk.exists(recorded) else ""
    require_hash(trained / MODEL_NAME, digest)
    return load_tokenizer(trained)


def _training_texts(plan: Plan, request: PrepareRequest) -> Iterator[str]:
    """Yield training documents of a sample of units; raise DataError if there are none."""
    options, is_empty, held_out = plan.options, True, 0
    reading = options.reading
    reading = replace(reading, held_out=held_out_by(plan, reading))
    reject = ignore if request.skips_bad else refuse
    units = [unit for unit in plan.units if not plan.is_held_out(unit)]
    segments = [segment for unit in _sampled(units) for segment in unit.segments]
    total = sum(segment.weight for segment in segments)
    silent = not (request.progress and sys.stderr.isatty())
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, disable=silent) as bar:
        for text, reached, _ in documents_of(segments, reading, reject):
            bar.update(reached - bar.n)
            if split_of(sha256(text.encode()).digest(), options.val_fraction) == "train":
                is_empty = False
                yield text
            else:
                held_out += 1
        bar.update(total - bar.n)
    if is_empty:
        raise no_training_documents(options.val_fraction, held_out)


def _sampled(units: Sequence[Unit]) -> list[Unit]:
    """Return all units, or a seeded sample of about `SAMPLED_BYTES`, in order."""
    shuffled = random.Random(0).sample(units, len(units))
    kept, size = [], 0
    for unit in shuffled:
        if kept and size + unit.bytes > SAMPLED_BYTES:
            break
        kept.append(unit)
        size += unit.bytes
    return sorted(kept, key=lambda unit: unit.number)
