"""`minimind tokenizer train | inspect`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from minimind.cli.command import (
    PLACE,
    Cached,
    Group,
    OfPlace,
    Output,
    argument,
    count_of_bytes,
    non_empty,
    shared,
    utf8,
)
from minimind.config.names import no_run
from minimind.errors import CheckpointError, DataError, Interrupted, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.object_cache import ObjectCache, open_cache

if TYPE_CHECKING:
    from minimind.data.text.documents import ReadOptions, Rejection
    from minimind.interop.weights import Weights

HELD_OUT_BYTES = 2**22
SMALLEST_SAMPLE = 2**16
SAMPLE_BYTES = 2**24  # of text that pieces are learnt from
EXTEND = "tokenizer extend"
TRAIN = "minimind tokenizer train my_text.jsonl --out out/tokenizer"


@dataclass(kw_only=True)
class OfText(Cached):
    """A command that reads text."""

    is_subject: ClassVar = True
    data_path: list[str] | None = argument(None, nargs="+", repeats="PATH", metavar="PATH")
    """text files, directories, globs or dataset directories"""
    text_field: str = shared("text_field", parse=utf8, metavar="NAME")
    max_document_bytes: int | None = argument(None, parse=count_of_bytes)
    """maximum bytes of a document in UTF-8 (default: 64MiB, less with some tokenizers)"""
    on_bad_data: str = shared("on_bad_data")
    """stop at a bad document (error), or skip it"""

    def reading(self, tokenizer: str | None) -> ReadOptions:
        """How documents are read for a tokenizer, None for one that is trained."""
        from minimind.data.text.documents import ReadOptions
        from minimind.data.tokenizer.load import longest_document

        return ReadOptions(self.text_field, self.max_document_bytes or longest_document(tokenizer))


@dataclass(kw_only=True)
class Train(OfText, Output):
    """Train a byte-pair tokenizer on text, for --tokenizer and AutoTokenizer."""

    example = TRAIN
    paths: list[str] = argument((), nargs="*", metavar="PATH", is_positional=True)
    """text files, directories, globs or dataset directories"""
    data_path: list[str] | None = argument(None, nargs="+", repeats="PATH", metavar="PATH")
    """more text, as PATH"""
    vocab_size: int = shared("vocab_size", le=None)
    """number of pieces"""
    special_tokens: list[str] | None = argument(None, nargs="+", repeats="NAME", metavar="NAME")
    """additional pieces that text never encodes to, such as '<|im_start|>'"""
    sample_bytes: int = argument("16MiB", parse=count_of_bytes)
    """bytes of text to train on, sampled evenly"""
    seed: int = argument(42, ge=0)
    """seed of the sample"""
    val_fraction: float = shared("val_fraction")
    """fraction of documents that a run holds out; the tokenizer is not trained on them"""

    def execute(self) -> None:
        try:
            with open_cache(self.cache_dir, self.max_cache_gib) as cache:
                _train(self, cache)
        except KeyboardInterrupt as stop:
            raise Interrupted(
                f"stopped; {self.out} is unchanged, and the same command starts again"
            ) from stop


@dataclass(kw_only=True)
class Extend(OfText, OfPlace, Output):
    """Add pieces to a model's tokenizer, and rows for them to its embedding and head."""

    example = "minimind tokenizer extend out/mine --learn 500 --data_path new.jsonl --out out/grown"
    place: Any = argument(None, **PLACE)
    """a run's out_dir, a step_ directory, or a directory of weights"""
    learn: int | None = argument(
        None, ge=1, needs="data_path", excludes={"tokens": "both say which pieces to add"}
    )
    """number of pieces to learn, each of the pair of pieces that --data_path has most often"""
    tokens: str | None = argument(None, parse=non_empty, metavar="FILE")
    """tokens to add, one a line, each as it stands in a text: with the space before a word"""
    val_fraction: float = shared("val_fraction")
    """fraction of documents that a run holds out; nothing is learnt from them"""

    def execute(self) -> None:
        if self.learn is None and self.tokens is None:
            raise UsageError("nothing is added; give --learn N and --data_path, or --tokens FILE")
        if fault := no_run(self.checkpoint, self.typed):
            raise CheckpointError(fault)
        from minimind.interop.export import output  # imports torch
        from minimind.interop.weights import read_weights

        output(self.out, self.force, EXTEND).require_free()
        print(read_weights(self.checkpoint, partial(_extend, self)))


@dataclass(kw_only=True)
class Inspect(OfText):
    """Print pieces by kind, bytes per token by source, and whether text round-trips."""

    example = "minimind tokenizer inspect out/tokenizer --data_path my_text.jsonl"
    tokenizer: str = argument(metavar="DIR|FILE", is_positional=True)
    """tokenizer, as for --tokenizer of a run"""

    def execute(self) -> None:
        with open_cache(self.cache_dir, self.max_cache_gib) as cache:
            _inspect(self, cache)


def _train(args: Train, cache: ObjectCache) -> None:
    from minimind.data.prepare.remote import local_text
    from minimind.data.text.inputs import print_left_out
    from minimind.data.text.sample import sample
    from minimind.data.tokenizer.load import load_tokenizer
    from minimind.data.tokenizer.sentencepiece import is_trained, train_tokenizer
    from minimind.data.tokenizer.statistics import measure
    from minimind.data.tokenizer.vocabulary import (
        CONFIG_NAME,
        JSON_NAME,
        MODEL_NAME,
        require_learnable,
    )
    from minimind.runtime.output_folder import NewFolder

    started = time.perf_counter()
    if args.sample_bytes < SMALLEST_SAMPLE:
        raise UsageError(
            f"--sample_bytes {args.sample_bytes} is less than the {SMALLEST_SAMPLE} bytes that one"
            " passage can have; raise it"
        )
    paths = [*args.paths, *(args.data_path or ())]
    if not paths:
        raise UsageError(f"no text was named; give files or directories, for example: {TRAIN}")
    special = args.special_tokens or []
    require_learnable(args.vocab_size, special)
    path, author = disk.resolve(args.out.expanduser()), "minimind tokenizer train"
    names = (MODEL_NAME, JSON_NAME, CONFIG_NAME)
    out = NewFolder(path, args.force, names, author, is_trained)
    out.require_free()
    reader = Reader(args.val_fraction, args.reading(None), args.on_bad_data == "skip")
    print_left_out(paths)
    paths = local_text(paths, cache)
    passages = sample(reader.training_texts(paths), args.sample_bytes, args.seed)
    if not reader.training:
        raise DataError(
            f"no document is left to train on: --val_fraction {args.val_fraction} holds out all"
            f" {reader.documents}; lower it, or add documents"
        )
    with out.written_aside() as draft:
        model = draft / MODEL_NAME
        options = (args.sample_bytes, args.seed, special)
        train_tokenizer(passages, args.vocab_size, model, *options)
        tokenizer = load_tokenizer(model)
        tokenizer.save(draft)
        label, texts = "held-out text", reader.held_out
        if not texts:
            label, texts = "that text", passages
        measured = measure(tokenizer, texts)  # before --out exists: a Ctrl-C leaves nothing
    size = mebibytes(sum(len(passage.encode()) for passage in passages))
    print(
        f"{args.out}: {tokenizer.vocab_size:,} pieces ({tokenizer.unused:,} of them unused), learnt"
        f" from {size} of {reader.training:,} documents"
    )
    size = mebibytes(measured.bytes)
    print(f"{measured.bytes_per_token:.3f} bytes per token on {size} of {label}")
    print(f"{time.perf_counter() - started:.1f} seconds")


def _extend(args: Extend, weights: Weights) -> str:
    from minimind.data.prepare.remote import local_text
    from minimind.data.text.sample import sample
    from minimind.data.tokenizer.add_pieces import count_words, with_pieces
    from minimind.data.tokenizer.statistics import measure
    from minimind.inference.prompts import read_text
    from minimind.interop.export import OURS, TRANSFORMERS, export
    from minimind.interop.weights import grow_vocabulary

    before = weights.load_tokenizer()
    reader = Reader(args.val_fraction, args.reading(str(before.path)), args.on_bad_data == "skip")
    with open_cache(args.cache_dir, args.max_cache_gib) as cache:
        texts = sample(reader.training_texts(local_text(args.data_path or (), cache)), SAMPLE_BYTES)
    listed = read_text(args.tokens, "--tokens").split("\n") if args.tokens else ()
    words = dict.fromkeys(filter(None, listed), 1) if args.tokens else count_words(texts)
    with TemporaryDirectory() as folder:
        after, joined = with_pieces(before, words, Path(folder), args.learn)
        weights.set_special_ids(after)
        grown = grow_vocabulary(weights, after.vocab_size, joined)
        form = OURS if grown.config.model_type == OURS else TRANSFORMERS
        written = export(grown, after, args.out, form, force=args.force, author=EXTEND)
        shown = [
            written.summary(f"as {form} in float32", weights.path, args.out),
            f"vocabulary {before.vocab_size:,} -> {after.vocab_size:,}, embedding"
            f" {weights.config.vocab_size:,} -> {grown.config.vocab_size:,} rows",
        ]
        if measured := reader.held_out or texts:
            old, new = (measure(one, measured) for one in (before, after))
            shown.append(
                f"{old.tokens:,} -> {new.tokens:,} tokens, {old.bytes_per_token:.3f} ->"
                f" {new.bytes_per_token:.3f} bytes per token on {new.bytes:,} bytes of"
                f" {'held-out' if reader.held_out else 'that'} text"
            )
    return "\n".join(shown)


class Reader:
    """Read the training documents of some files once, and keep some of the held-out ones."""

    def __init__(self, val_fraction: float, reading: ReadOptions, skips_bad: bool) -> None:
        self.val_fraction = val_fraction
        self.reading = reading
        self.skips_bad = skips_bad
        self.held_out: list[str] = []
        self.documents = self.training = self._held_out_bytes = 0

    def training_texts(self, paths: Sequence[str]) -> Iterator[str]:
        from minimind.data.prepare.encode import split_of
        from minimind.data.text.inputs import find_files, require_once

        files = find_files(paths)
        require_once(files)
        for path in files:
            for text in read_texts(path, self.reading, self.skips_bad):
                content = text.encode()
                self.documents += 1
                if split_of(sha256(content).digest(), self.val_fraction) == "train":
                    self.training += 1
                    yield text
                elif self._held_out_bytes + len(content) <= HELD_OUT_BYTES:
                    self.held_out.append(text)
                    self._held_out_bytes += len(content)


def read_texts(path: Path, reading: ReadOptions, skips_bad: bool) -> Iterator[str]:
    """The texts of one input, with a progress bar on a terminal.

    Raise DataError for a malformed document. If these are skipped, print their number at the end.
    """
    from tqdm import tqdm

    from minimind.data.prepare.encode import MAX_REMARKS, documents_of, refuse
    from minimind.data.text.formats import in_file, segments_of
    from minimind.report.formats import count

    reading = replace(reading, remarks=[])
    first: list[Rejection] = []
    documents_lost = bytes_lost = 0

    def skip(rejection: Rejection) -> None:
        nonlocal documents_lost, bytes_lost
        documents_lost += rejection.documents
        bytes_lost += rejection.bytes
        first.extend([] if first else [rejection])

    reject = skip if skips_bad else refuse
    documents = documents_of(segments_of(path, 2**62), reading, reject)
    is_silent = not sys.stderr.isatty()
    bar = {"desc": path.name, "unit": " documents", "leave": False, "disable": is_silent}
    for text, *_ in tqdm(documents, **bar):
        yield text
    if first:
        bad = count(documents_lost, "bad document")
        lost = f", {count(bytes_lost, 'byte')} lost" if bytes_lost else ""
        print(
            f"note   {path}: {bad} skipped{lost}, the first: {in_file(first[0])}", file=sys.stderr
        )
    for _, what in reading.remarks[:MAX_REMARKS]:
        print(f"note   {path}{what}", file=sys.stderr)


def _inspect(args: Inspect, cache: ObjectCache) -> None:
    import numpy as np

    from minimind.data.prepare.remote import local_text
    from minimind.data.text.inputs import find_files
    from minimind.data.tokenizer.load import load_tokenizer
    from minimind.data.tokenizer.statistics import (
        AWKWARD,
        compare,
        describe,
        measure,
        never_produced,
    )

    tokenizer, reading = load_tokenizer(args.tokenizer), args.reading(args.tokenizer)
    pieces = tokenizer.pieces()
    paths = local_text(args.data_path or (), cache)
    files, skips_bad = find_files(paths), args.on_bad_data == "skip"
    print(describe(tokenizer, pieces))
    measured = {"awkward text": measure(tokenizer, AWKWARD)}
    for path in files:
        measured[str(path)] = measure(tokenizer, read_texts(path, reading, skips_bad))
    print(compare(measured))
    if files:
        used = np.sum([measured[str(path)].used for path in files], axis=0)
        print(never_produced(pieces, used))


TOKENIZER = Group(
    "Train a tokenizer on your own text, extend a model's, or inspect one. No GPU is needed.",
    TRAIN,
    {"train": Train, "extend": Extend, "inspect": Inspect},
)
