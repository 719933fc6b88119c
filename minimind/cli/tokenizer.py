"""`minimind tokenizer train | inspect`: what each takes, prints and writes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import (
    Parser,
    at_least,
    count_of_bytes,
    fraction,
    non_empty_path,
    utf8,
)
from minimind.config.run_config import FLAGS
from minimind.errors import DataError, Interrupted, UsageError
from minimind.runtime.durable_files import mebibytes

if TYPE_CHECKING:
    from minimind.data.text.documents import Reading

HELD_OUT_BYTES = 2**22
SMALLEST_SAMPLE = 2**16
TRAIN = "minimind tokenizer train my_text.jsonl --out out/tokenizer"
TEXT_HELP = "text files, directories and globs of them, dataset directories"


def add_parser(subs: Any) -> None:
    """`minimind tokenizer`, to the subcommands."""
    told = "A tokenizer of your own text, and what one does with text. No GPU is needed."
    group = subs.add_parser("tokenizer", help="train | inspect", description=told, example=TRAIN)
    actions = group.add_subparsers(
        dest="action", required=True, parser_class=Parser, metavar="train | inspect"
    )

    def action(name: str, told: str, example: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=told, description=f"{told}.", example=example)
        added.add_argument("--debug", action="store_true", help="show tracebacks")
        how = "longest document accepted (default: 64MiB, less with some tokenizers)"
        added.add_argument("--max_document_bytes", type=count_of_bytes, help=how)
        told = "what is no document ends this (error), or is passed over"
        added.add_argument("--on_bad_data", choices=("error", "skip"), default="error", help=told)
        told = "field or column that has the text"
        added.add_argument("--text_field", type=utf8, default="text", metavar="NAME", help=told)
        added.add_argument(
            "--data_path", nargs="+", action="extend", default=[], metavar="PATH", help=TEXT_HELP
        )
        return added

    _add_training(
        action(
            "train", "Learn byte-pair pieces from text, for --tokenizer and AutoTokenizer", TRAIN
        )
    )
    added = action(
        "inspect",
        "Pieces by kind, bytes per token by source, whether text comes back",
        "minimind tokenizer inspect out/tokenizer --data_path my_text.jsonl",
    )
    added.add_argument("tokenizer", metavar="DIR|FILE", help="as for --tokenizer of a run")


def _add_training(added: argparse.ArgumentParser) -> None:
    added.add_argument("paths", nargs="*", metavar="PATH", help=TEXT_HELP)
    added.add_argument(
        "--out", type=non_empty_path, required=True, metavar="DIR", help="a new folder"
    )
    vocabulary = FLAGS["vocab_size"]
    added.add_argument(
        "--vocab_size",
        type=at_least(vocabulary.metadata["at_least"]),
        default=vocabulary.default,
        help="pieces in all",
    )
    added.add_argument(
        "--special_tokens",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="pieces of yours that no text is made of, such as '<|im_start|>'",
    )
    added.add_argument(
        "--sample_bytes",
        type=count_of_bytes,
        default="16MiB",
        help="bytes of text to learn from, taken from all over it",
    )
    added.add_argument("--seed", type=at_least(0), default=42, help="decides which text is taken")
    added.add_argument(
        "--val_fraction",
        type=fraction,
        default=FLAGS["val_fraction"].default,
        help="share of the documents a run holds out, so not learnt from",
    )
    added.add_argument("--force", action="store_true", help="replace an earlier --out")


def run(args: argparse.Namespace) -> int:
    """The exit status of `minimind tokenizer ACTION`."""
    return ACTIONS[args.action](args)


def run_train(args: argparse.Namespace) -> int:
    """Learn a tokenizer, write it, and say how it does on text it has not seen.

    An Interrupted says what a Ctrl-C leaves.
    """
    try:
        return _train(args)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"stopped; {args.out} is as it was before, and the same command begins anew"
        ) from stop


def _train(args: argparse.Namespace) -> int:
    from minimind.data.text.sample import sample
    from minimind.data.tokenizer.files import MODEL_NAME, TOKENIZER_FILES
    from minimind.data.tokenizer.load import load_tokenizer
    from minimind.data.tokenizer.sentencepiece import train_tokenizer
    from minimind.data.tokenizer.statistics import measure
    from minimind.data.tokenizer.vocabulary import require_learnable
    from minimind.runtime.output_folder import NewFolder

    started = time.perf_counter()
    if args.sample_bytes < SMALLEST_SAMPLE:
        raise UsageError(
            f"--sample_bytes {args.sample_bytes} is less than the {SMALLEST_SAMPLE} bytes that one"
            " passage can have; raise it"
        )
    paths = [*args.paths, *args.data_path]
    if not paths:
        raise UsageError(f"no text was named; give files or directories, for example: {TRAIN}")
    require_learnable(args.vocab_size, args.special_tokens)
    path, author = args.out.expanduser().resolve(), "minimind tokenizer train"
    out = NewFolder(path, args.force, TOKENIZER_FILES, author)
    out.require_free()
    read = Reader(args.val_fraction, _reading(args, None), args.on_bad_data == "skip")
    passages = sample(read.training_texts(paths), args.sample_bytes, args.seed)
    if not read.training:
        raise DataError(
            f"no document is left to learn from: --val_fraction {args.val_fraction} holds out all"
            f" {read.documents}; lower it, or add documents"
        )
    with out.written_aside() as draft:
        model = draft / MODEL_NAME
        how = (args.sample_bytes, args.seed, args.special_tokens)
        train_tokenizer(passages, args.vocab_size, model, *how)
        tokenizer = load_tokenizer(model)
        tokenizer.save(draft)
        kind, texts = ("held-out text", read.held_out) if read.held_out else ("that text", passages)
        found = measure(tokenizer, texts)  # before --out is there, so that a Ctrl-C leaves nothing
    size = sum(len(passage.encode()) for passage in passages)
    print(
        f"{args.out}: {tokenizer.vocab_size:,} pieces ({tokenizer.unused:,} of them unused), learnt"
        f" from {mebibytes(size)} of {read.training:,} documents"
    )
    print(f"{found.bytes_per_token:.3f} bytes per token on {mebibytes(found.bytes)} of {kind}")
    print(f"{time.perf_counter() - started:.1f} seconds")
    return 0


class Reader:
    """The training documents of some files, in one reading that keeps some of the others."""

    def __init__(self, val_fraction: float, reading: Reading, skips_bad: bool) -> None:
        self.val_fraction = val_fraction
        self.reading = reading
        self.skips_bad = skips_bad
        self.held_out: list[str] = []
        self.documents = self.training = self._held_out_bytes = 0

    def training_texts(self, paths: Sequence[str]) -> Iterator[str]:
        """Every document that a run would train on."""
        from minimind.data.prepare.unit_reader import split_of
        from minimind.data.text.inputs import find_files, require_once

        files = find_files(paths)
        require_once(files)
        for path in files:
            for text in texts_of(path, self.reading, self.skips_bad):
                content = text.encode()
                self.documents += 1
                if split_of(sha256(content).digest(), self.val_fraction) == "train":
                    self.training += 1
                    yield text
                elif self._held_out_bytes + len(content) <= HELD_OUT_BYTES:
                    self.held_out.append(text)
                    self._held_out_bytes += len(content)


def texts_of(path: Path, reading: Reading, skips_bad: bool) -> Iterator[str]:
    """The texts of one input; how many are read, on a terminal. A DataError for a bad one."""
    from tqdm import tqdm

    from minimind.data.prepare.unit_reader import documents_of, pass_over, refuse
    from minimind.data.text.inputs import segments_of

    reject = pass_over if skips_bad else refuse
    found = documents_of(segments_of(path, 2**62), reading, reject)
    silent = not sys.stderr.isatty()
    for text, _ in tqdm(found, desc=path.name, unit=" documents", leave=False, disable=silent):
        yield text


def _reading(args: argparse.Namespace, tokenizer: str | None) -> Reading:
    from minimind.data.text.documents import Reading
    from minimind.data.tokenizer.load import longest_document

    return Reading(args.text_field, args.max_document_bytes or longest_document(tokenizer))


def run_inspect(args: argparse.Namespace) -> int:
    """Print what the pieces are, and what they make of text."""
    import numpy as np

    from minimind.cli.tokenizer_tables import about, kinds, longest, sources, special, unused
    from minimind.data.text.inputs import find_files
    from minimind.data.tokenizer.load import load_tokenizer
    from minimind.data.tokenizer.statistics import AWKWARD, measure

    tokenizer, reading = load_tokenizer(args.tokenizer), _reading(args, args.tokenizer)
    pieces = tokenizer.pieces()
    files, skips_bad = find_files(args.data_path), args.on_bad_data == "skip"
    print(about(tokenizer))
    print(kinds(pieces))
    print(special(tokenizer.special_tokens()))
    print(longest(pieces))
    measured = {"awkward text": measure(tokenizer, AWKWARD)}
    for path in files:
        measured[str(path)] = measure(tokenizer, texts_of(path, reading, skips_bad))
    print(sources(measured))
    if files:
        print(unused(pieces, np.sum([measured[str(path)].used for path in files], axis=0)))
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": run_train,
    "inspect": run_inspect,
}
