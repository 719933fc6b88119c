"""Text -> tokenizer and token shards, in the cache of a run.

It is filled under another name and renamed when it is whole. A preparation that was
killed goes on where it stood, and gives the same files as one that was not.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minimind.data.loader.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    read_manifest,
    require_untouched,
)
from minimind.data.loader.token_shards import TokenShards
from minimind.data.prepare.cache import build_once
from minimind.data.prepare.encode import TOKENIZER_NAME, Work
from minimind.data.prepare.merge import (
    REJECTED_NAME,
    clear,
    merge,
    no_training_documents,
    require_few_rejected,
)
from minimind.data.prepare.plan_file import PLAN_NAME
from minimind.data.prepare.unit_reader import documents_of, pass_over, refusal, refuse, split_of
from minimind.data.prepare.work_units import Options, Plan, Unit, files_of, make_plan
from minimind.data.prepare.workers import encode_plan
from minimind.data.text.documents import Reading
from minimind.data.text.inputs import kind_of
from minimind.data.text.sources import Source
from minimind.data.tokenizer.files import MODEL_NAME, write_tokenizer
from minimind.data.tokenizer.load import AnyTokenizer, load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.data.tokenizer.vocabulary import require_learnable
from minimind.errors import DataError
from minimind.runtime.durable_files import canonical_json, fingerprint, sha256_of, write_whole
from minimind.runtime.terminal import phase

REMEDY = "free space or give another --cache_dir"
NEEDED = (MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME)
SAMPLED_BYTES = 2**30  # of input, in which passages for a tokenizer are looked for


@dataclass(frozen=True)
class PrepareRequest:
    """What is asked of a preparation."""

    sources: tuple[Source, ...]
    tokenizer_path: str | None = None
    vocab_size: int = 6400  # of the tokenizer that is learnt, where none is given
    options: Options = field(default_factory=Options)
    skips_bad: bool = False
    max_bad_fraction: float = 0.05
    unit_bytes: int | None = None
    processes: int | None = None  # None: as many as the cores of this host can use
    progress: bool = True

    def plan(self) -> Plan:
        """The units of the text that is there now; a UsageError for a vocabulary that cannot be."""
        if self.tokenizer_path is None:
            require_learnable(self.vocab_size)
        return make_plan(self.sources, self.options, self.unit_bytes)


@dataclass(frozen=True)
class Prepared:
    """A tokenizer and the tokens of the two splits, ready to be read."""

    directory: Path
    tokenizer: AnyTokenizer
    train: TokenShards
    val: TokenShards
    manifest: dict[str, Any]
    names: dict[str, str]  # of inputs as they were prepared -> as they are called now

    @property
    def first_rejected(self) -> str:
        """The first thing that was passed over, and why; empty where nothing was."""
        first = self.manifest["rejected"]["first"]
        before = next((name for name in self.names if first.startswith(f"{name}:")), "")
        return self.names.get(before, "") + first[len(before) :]

    def list_rejected(self, out_dir: Path) -> None:
        """Write rejected.jsonl there, if there is anything to list."""
        own = self.directory / REJECTED_NAME
        if own.exists():
            with open(own, "rb") as lines, open(out_dir / REJECTED_NAME, "wb") as listed:
                for line in lines:
                    entry = json.loads(line)
                    entry["file"] = self.names.get(entry["file"], entry["file"])
                    listed.write(canonical_json(entry) + b"\n")


def is_prepared(path: str | Path) -> bool:
    """Whether the folder holds shards, and not text."""
    return not missing_of(path)


def missing_of(path: str | Path) -> list[str]:
    """Of what every prepared folder has, what this one has not."""
    return [name for name in NEEDED if not (Path(path).expanduser() / name).exists()]


def open_prepared(
    directory: Path, tokenizer_path: str | None = None, names: Sequence[str] = ()
) -> Prepared:
    """The shards of a folder; a DataError where they are of another tokenizer, or were changed.

    `names` are what its inputs are called now, in their order.
    """
    manifest = read_manifest(directory)
    require_untouched(directory, manifest)
    tokenizer = load_tokenizer(directory / TOKENIZER_NAME)
    entry = f"is not the tokenizer that {directory} was made with"
    if tokenizer.fingerprint != manifest["tokenizer"]:
        raise DataError(f"{tokenizer.path}: {entry}; put that back, or prepare the text again")
    if tokenizer_path is not None:
        given = load_tokenizer(tokenizer_path)
        if given.fingerprint != manifest["tokenizer"]:
            raise DataError(
                f"{tokenizer_path}: {entry}; leave out --tokenizer, or prepare the text"
                " again with it"
            )
    train, val = (TokenShards(directory, split) for split in ("train", "val"))
    before = [given["path"] for source in manifest["sources"] for given in source["inputs"]]
    renamed = dict(zip(before, names, strict=True)) if names else {}
    return Prepared(directory, tokenizer, train, val, manifest, renamed)


def prepare_for_run(request: PrepareRequest, cache_dir: Path) -> Prepared:
    """The tokens of a run's text; every process calls it, one of them does the work.

    Found in the cache by the content of the text, whatever its files are called.
    """
    plan = request.plan()
    contents = [_content(Path(given.path)) for given in plan.inputs]
    documents = {
        "format_version": FORMAT_VERSION,
        "contents": contents,
        "options": asdict(plan.options),
        "unit_bytes": request.unit_bytes,
    }
    learnt = cache_dir / f"tokenizer-{fingerprint({**documents, 'vocab_size': request.vocab_size})}"
    tokenizer = tokenizer_of(request, plan, learnt, REMEDY)
    directory = cache_dir / f"tokens-{fingerprint({**documents, 'is': tokenizer.fingerprint})}"

    def build(draft: Path) -> None:
        if is_prepared(draft):  # it was killed while it cleared up
            return clear(draft)
        write_tokenizer(draft / TOKENIZER_NAME, tokenizer.files())
        write_whole(draft / PLAN_NAME, canonical_json(plan.to_json()))
        work = Work(draft, plan, tokenizer, not request.skips_bad)
        with phase("tokenizing the text", on_any_rank=request.progress):
            encode_plan(work, progress=request.progress)
        merge(work, request.max_bad_fraction)
        clear(draft)

    build_once(directory, build, REMEDY, is_resumable=True)
    prepared = open_prepared(directory, names=[given.path for given in plan.inputs])
    if not request.skips_bad and (first := prepared.first_rejected):
        raise refusal(first)
    require_few_rejected(prepared.manifest, request.max_bad_fraction, request.sources)
    return prepared


def _content(path: Path) -> list[str]:
    """What the documents of an input depend on, but not what it is called."""
    try:
        return [kind_of(path), *(sha256_of(file) for file in files_of(path))]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check it") from error


def tokenizer_of(request: PrepareRequest, plan: Plan, learnt: Path, remedy: str) -> AnyTokenizer:
    """The tokenizer that was given, or the one learnt into `learnt` by whoever comes first."""
    if request.tokenizer_path is not None:
        return load_tokenizer(request.tokenizer_path)
    texts = _training_texts(plan, request)

    def build(draft: Path) -> None:
        with phase("training the tokenizer", on_any_rank=request.progress):
            train_tokenizer(texts, request.vocab_size, draft / MODEL_NAME)

    build_once(learnt, build, remedy)
    return load_tokenizer(learnt)


def _training_texts(plan: Plan, request: PrepareRequest) -> Iterator[str]:
    """The documents of some units that are not held out; a DataError when there is none."""
    options, found, held_out = plan.options, False, 0
    reading = Reading(options.text_field, options.max_document_bytes)
    reject = pass_over if request.skips_bad else refuse
    segments = [segment for unit in _sampled(plan.units) for segment in unit.segments]
    total = sum(segment.weight for segment in segments)
    silent = not (request.progress and sys.stderr.isatty())
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, disable=silent) as bar:
        for text, reached in documents_of(segments, reading, reject):
            bar.update(reached - bar.n)
            if split_of(sha256(text.encode()).digest(), options.val_fraction) == "train":
                found = True
                yield text
            else:
                held_out += 1
        bar.update(total - bar.n)
    if not found:
        raise no_training_documents(options.val_fraction, held_out)


def _sampled(units: Sequence[Unit]) -> list[Unit]:
    """All units, or a seeded choice of about `SAMPLED_BYTES`, in their order."""
    drawn = random.Random(0).sample(units, len(units))
    kept, size = [], 0
    for unit in drawn:
        if kept and size + unit.bytes > SAMPLED_BYTES:
            break
        kept.append(unit)
        size += unit.bytes
    return sorted(kept, key=lambda unit: unit.number)
