"""Text -> tokenizer and token shards, in the cache of a run.

The folder is filled under a temporary name and renamed when complete. A killed preparation resumes
and gives the same files. A fine-tuning run has the tokenizer of its model.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minimind.config.flags import BY_TASK
from minimind.config.run_config import RunConfig
from minimind.data.chat.conversations import require_records
from minimind.data.chat.template import (
    DEFAULT_TEMPLATE,
    named_tokens,
    own_template,
    readable,
    require_bounded,
    special_names,
)
from minimind.data.prepare.encode import (
    TOKENIZER_NAME,
    Work,
    documents_of,
    ignore,
    refusal,
    refuse,
    split_of,
)
from minimind.data.prepare.merge import (
    REJECTED_NAME,
    clear,
    merge,
    no_training_documents,
    require_few_rejected,
)
from minimind.data.prepare.work_units import PLAN_NAME, Options, Plan, Unit, files_of, make_plan
from minimind.data.prepare.workers import encode_plan
from minimind.data.shards.conversation_shards import ConversationShards
from minimind.data.shards.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    read_manifest,
    require_untouched,
)
from minimind.data.shards.token_shards import TokenShards
from minimind.data.text.inputs import Source, kind_of
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.hf_tokenizer import AnyTokenizer, load_tokenizer
from minimind.data.tokenizer.lossless import MOST_LOST, TextLoss, require_kept
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.data.tokenizer.vocabulary import (
    MODEL_NAME,
    TEMPLATE_NAME,
    ChatTemplates,
    require_learnable,
    write_tokenizer,
)
from minimind.errors import DataError, StorageError, UsageError
from minimind.runtime.durable_files import (
    canonical_json,
    fingerprint,
    read_small_text,
    sha256_of,
    storing,
    sync_directory,
    write_whole,
)
from minimind.runtime.file_kinds import kind_of_file
from minimind.runtime.object_cache import named
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
    if directory.is_dir():
        return
    with storing(f"{directory}: cannot be written", remedy):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(directory.with_name(f"{directory.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.is_dir():
                _build(directory, build, is_resumable)


def _build(directory: Path, build: Callable[[Path], None], is_resumable: bool) -> None:
    if is_resumable:
        draft = directory.with_name(f"{directory.name}.part")
        draft.mkdir(exist_ok=True)
    else:
        for leftover in directory.parent.glob(f"{directory.name}.tmp-*"):  # of a killed process
            shutil.rmtree(leftover)
        draft = Path(tempfile.mkdtemp(prefix=f"{directory.name}.tmp-", dir=directory.parent))
        draft.chmod(0o755)  # mkdtemp makes it private
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


REMEDY = "free space or give another --cache_dir"
NEEDED = (MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME)
CONVERSATIONS = "chat_template"  # the option that a folder of conversations has
SAMPLED_BYTES = 2**30  # of input to train a tokenizer on
TOKENS_AT_ONCE = 2**20
# Increase when files in a cache may hold what is refused now: conversations, or text that a
# tokenizer loses.
CACHE_VERSION = 2


@dataclass(frozen=True)
class PrepareRequest:
    """The options of a preparation."""

    sources: tuple[Source, ...]
    tokenizer_path: str | None = None
    vocab_size: int = 6400  # of the tokenizer that is trained if none is given
    options: Options = field(default_factory=Options)
    skips_bad: bool = False
    max_bad_fraction: float = 0.05
    allow_lossy: bool = False  # a tokenizer that loses text
    unit_bytes: int | None = None
    processes: int | None = None  # None: as many as the cores of this host can use
    progress: bool = True
    ray: str | None = None  # address of a cluster, or `local`; for dataset folders only

    def plan(self) -> Plan:
        """Plan the units of the text; raise UsageError for an impossible vocabulary size."""
        if self.tokenizer_path is None:
            require_learnable(self.vocab_size)
        return make_plan(self.sources, self.options, self.unit_bytes)


@dataclass(frozen=True)
class Prepared:
    """A tokenizer and the tokens of both splits, open for reading."""

    directory: Path
    tokenizer: AnyTokenizer
    train: TokenShards
    val: TokenShards
    manifest: dict[str, Any]
    names: dict[str, str]  # of inputs when they were prepared -> now

    def bytes_per_id(self, split: str) -> list[np.ndarray]:
        """Bytes of text that each id stands for, (vocabulary,), by source; see `mean_bytes`."""
        sizes, found = self.tokenizer.piece_bytes(), []
        is_text = ~np.isin(np.arange(len(sizes)), [*self.tokenizer.special_tokens().values()])
        for number, source in enumerate(self.manifest["sources"]):
            loss, mean = TextLoss(**source.get("text_loss", {})), self.mean_bytes(number, split)
            if mean is not None:
                found.append(np.full(len(sizes), mean))
            elif loss.share > MOST_LOST:  # of conversations
                found.append(np.where(is_text, loss.bytes / max(1, loss.tokens), 0.0))
            else:
                found.append(sizes * (loss.bytes / loss.token_bytes) if loss.token_bytes else sizes)
        return found

    def mean_bytes(self, source: int, split: str) -> float | None:
        """Bytes of text per token of a split; None unless its tokenizer loses some of the text.

        What each token stands for is then less than the text, so the text is spread over them.
        """
        given, size = self.manifest["sources"][source], self.split_bytes(source, split)
        is_lossy = TextLoss(**given.get("text_loss", {})).share > MOST_LOST
        if not size or not is_lossy or CONVERSATIONS in self.manifest["options"]:
            return None
        return size / max(1, given["tokens"][split])

    def split_bytes(self, source: int, split: str) -> int:
        """Bytes of text of a source in a split; 0 in early folders of several sources."""
        sources = self.manifest["sources"]
        whole = self.manifest["splits"][split]["text_bytes"] if len(sources) == 1 else 0
        return sources[source].get("split_bytes", {}).get(split, whole)

    @property
    def first_rejected(self) -> str:
        """The first skipped document and the reason; "" if there is none."""
        first = self.manifest["rejected"]["first"]
        before = next((name for name in self.names if first.startswith(f"{name}:")), "")
        return f"{named(self.names.get(before, ''))}{first[len(before) :]}"

    def text(self, start: int, length: int) -> str:
        """Text of `length` training tokens from `start` on; of conversations as `readable`."""
        if isinstance(self.train, ConversationShards):
            return readable(self.tokenizer, *self.train.with_targets(start, length))
        return self.tokenizer.decode(self.train.stretch(start, length).tolist())

    def list_rejected(self, out_dir: Path) -> None:
        """Write rejected.jsonl to `out_dir` if documents were skipped."""
        own = self.directory / REJECTED_NAME
        if own.exists():
            with open(own, "rb") as lines, open(out_dir / REJECTED_NAME, "wb") as copy:
                for line in lines:
                    entry = json.loads(line)
                    name: str = entry["file"]
                    entry["file"] = named(self.names.get(name, name))
                    copy.write(canonical_json(entry) + b"\n")


def is_prepared(path: str | Path) -> bool:
    """Whether the folder holds shards and not text."""
    return not missing_of(path)


def missing_of(path: str | Path) -> list[str]:
    """Return the required files that a folder lacks."""
    return [name for name in NEEDED if not (Path(path).expanduser() / name).exists()]


def open_prepared(
    directory: Path, tokenizer_path: str | None = None, names: Sequence[str] = ()
) -> Prepared:
    """Open the shards of a folder; raise DataError if they changed or have another tokenizer.

    `names` are the current names of its inputs, in order.
    """
    manifest = read_manifest(directory)
    require_untouched(directory, manifest)
    tokenizer = load_tokenizer(directory / TOKENIZER_NAME)
    problem = f"is not the tokenizer of {directory}"
    if tokenizer.fingerprint != manifest["tokenizer"]:
        raise DataError(f"{tokenizer.path}: {problem}; restore that one, or prepare the text again")
    if tokenizer_path is not None:
        given = load_tokenizer(tokenizer_path)
        if given.fingerprint != manifest["tokenizer"]:
            raise DataError(
                f"{tokenizer_path}: {problem}; leave out --tokenizer, or prepare the text"
                " again with it"
            )
    if CONVERSATIONS in manifest["options"]:
        kind = partial(ConversationShards, eos_id=manifest["eos_id"])
    else:
        kind = TokenShards
    train, val = (kind(directory, split) for split in ("train", "val"))
    before = [given["path"] for source in manifest["sources"] for given in source["inputs"]]
    renamed = dict(zip(before, names, strict=True)) if names else {}
    return Prepared(directory, tokenizer, train, val, manifest, renamed)


def holds_conversations(directory: Path) -> bool:
    """Whether the shards of a folder are conversations and not text."""
    return CONVERSATIONS in read_manifest(directory)["options"]


def open_text(
    directory: Path, tokenizer_path: str | None = None, allow_lossy: bool = False
) -> Prepared:
    """Open a folder of text to pretrain on; raise DataError for the conversations of a run.

    A folder that was finished with a tokenizer that loses text was allowed to be. An early one says
    nothing of it: then the bytes of its tokens are compared with those of its text.
    """
    prepared = open_prepared(directory, tokenizer_path)
    if isinstance(prepared.train, ConversationShards):
        raise DataError(
            f"{directory}: holds conversations, as --task sft prepares them; give text, or --task"
            " sft and the files of the conversations"
        )
    sources = prepared.manifest["sources"]
    if not prepared.tokenizer.is_lossless and not any("text_loss" in one for one in sources):
        _add_early_losses(prepared)
        require_kept(sources, prepared.tokenizer, allow_lossy)
    return prepared


def _add_early_losses(prepared: Prepared) -> None:
    """Add to each source what its tokens lack in bytes, of its held-out text if it has some."""
    sizes, eos_id = prepared.tokenizer.piece_bytes(), prepared.tokenizer.eos_id
    for shards, split in ((prepared.val, "val"), (prepared.train, "train")):
        begin = 0
        for number, end in enumerate(shards.source_ends().tolist()):
            source, size = prepared.manifest["sources"][number], prepared.split_bytes(number, split)
            loss = TextLoss(size, example="it was prepared without a comparison of the text")
            for at in range(begin, end, TOKENS_AT_ONCE):
                ids = shards.stretch(at, min(TOKENS_AT_ONCE, end - at))
                loss.tokens += int((ids != eos_id).sum())
                loss.token_bytes += int(sizes[ids].sum())
            spaces = end - begin - loss.tokens  # one may be added before each document
            loss.lost = max(size - loss.token_bytes, loss.token_bytes - size - spaces, 0)
            if size and "text_loss" not in source:
                source["text_loss"] = asdict(loss)
            begin = end


def prepare_for_run(request: PrepareRequest, cache_dir: Path) -> Prepared:
    """Prepare the tokens of a run's text; every process calls it and one does the work.

    The cache is keyed by the content of the text, not by the names of its files.
    """
    plan = request.plan()
    contents = [_content(Path(given.path)) for given in plan.inputs]
    documents = {
        "format_version": FORMAT_VERSION,
        "contents": contents,
        "options": plan.options.to_json(),
        "unit_bytes": request.unit_bytes,
    }
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
    prepared = open_prepared(directory, names=[given.path for given in plan.inputs])
    if not request.skips_bad and (first := prepared.first_rejected):
        raise refusal(first)
    require_few_rejected(prepared.manifest, request.max_bad_fraction, request.sources)
    require_kept(prepared.manifest["sources"], tokenizer, request.allow_lossy)
    return prepared


def _content(path: Path) -> list[str]:
    """The format of an input and the hashes of its files."""
    try:
        return [kind_of(path), *(sha256_of(file) for file in files_of(path))]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check it") from error


def tokenizer_of(request: PrepareRequest, plan: Plan, trained: Path, remedy: str) -> AnyTokenizer:
    """Load the given tokenizer, or train one into `trained` unless it exists."""
    if request.tokenizer_path is not None:
        return load_tokenizer(request.tokenizer_path)
    texts = _training_texts(plan, request)

    def build(draft: Path) -> None:
        with phase("training the tokenizer", on_any_rank=request.progress):
            train_tokenizer(texts, request.vocab_size, draft / MODEL_NAME)

    build_once(trained, build, remedy)
    return load_tokenizer(trained)


def _training_texts(plan: Plan, request: PrepareRequest) -> Iterator[str]:
    """Yield training documents of a sample of units; raise DataError if there are none."""
    options, is_empty, held_out = plan.options, True, 0
    reading = options.reading
    reject = ignore if request.skips_bad else refuse
    segments = [segment for unit in _sampled(plan.units) for segment in unit.segments]
    total = sum(segment.weight for segment in segments)
    silent = not (request.progress and sys.stderr.isatty())
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, disable=silent) as bar:
        for text, reached in documents_of(segments, reading, reject):
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


def read_template(path: str) -> tuple[str, str]:
    """Source and name in messages of --chat_template `path`.

    Raise UsageError if it cannot be read, or takes too much time or memory.
    """
    name = f"--chat_template {path}"
    try:
        source = read_small_text(Path(path).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        kind = kind_of_file(Path(path).expanduser())
        reason = f"it is {kind}" if kind else "it is not UTF-8"
        reason = error.strerror if isinstance(error, OSError) else reason
        raise UsageError(
            f"{name}: cannot be read ({reason}); name a file with a Jinja template"
        ) from error
    require_bounded(source, name)
    return source, name


def chosen_template(path: str | None, tokenizer: AnyTokenizer | None) -> tuple[str, str, str]:
    """The source of a run's template, its name in messages, and its line of the start summary.

    It is that of --chat_template `path`, else that of the tokenizer, else ours.
    """
    templates = ChatTemplates() if tokenizer is None else tokenizer.templates
    if path is not None:
        source, name = read_template(path)
        instead = f", instead of that in {templates.origin}" if templates.by_name else ""
        return source, name, f"template  {name}{instead}"
    if tokenizer is not None and (own := own_template(tokenizer)):
        others = len(templates.by_name) - 1
        more = f", the default one of {others + 1}" if others else ""
        return *own, f"template  its own ({templates.origin}{more})"
    return DEFAULT_TEMPLATE, "--chat_template by default", "template  the default: it has none"


def chat_tokenizer(
    tokenizer: AnyTokenizer, template: str, name: str, cache_dir: Path
) -> AnyTokenizer:
    """The tokenizer with the special tokens that a template writes, and the template beside it.

    Tokens that it lacks are appended after its last id. `name` is what messages call the template.
    """
    names = special_names(template, named_tokens(tokenizer), name)
    templates = tokenizer.templates
    is_one_of_several = template == templates.default and len(templates.by_name) > 1
    beside = {} if is_one_of_several else {TEMPLATE_NAME: template.encode()}
    files = {name: sha256(content).hexdigest() for name, content in tokenizer.files().items()}
    directory = cache_dir / f"tokenizer-{fingerprint([files, names, template])}"

    def build(draft: Path) -> None:
        extended = with_special_tokens(tokenizer, names, draft / "extended")
        write_tokenizer(draft, {**extended.files(), **beside})

    build_once(directory, build, REMEDY)
    return load_tokenizer(directory)


def with_vocabulary_of(run: RunConfig, checkpoint: Path, rows: int) -> RunConfig:
    """Return the run with the rows of a checkpoint, which include added special tokens.

    Raise UsageError if --vocab_size is neither with nor without them.
    """
    if run.is_explicit("vocab_size"):
        special, before = {*load_tokenizer(checkpoint).special_tokens().values()}, rows
        while before - 1 in special:
            before -= 1
        if not before <= run.vocab_size <= rows:
            raise UsageError(
                f"vocab_size = {run.vocab_size} ({run.sources['vocab_size']}), but {checkpoint} has"
                f" {rows}; drop it"
            )
    return run.with_values(BY_TASK, vocab_size=rows)
