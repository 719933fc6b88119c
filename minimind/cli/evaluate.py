"""`minimind eval`: prepare the text, score it and print a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import add_model, at_least, count_of_bytes, fraction, utf8
from minimind.errors import DataError, UsageError
from minimind.runtime.durable_files import printing, storing

if TYPE_CHECKING:
    from minimind.data.prepare.prepare import Prepared
    from minimind.data.tokenizer.load import AnyTokenizer
    from minimind.train.evaluate import LossSums, Part

SPLITS = {"train": ("train",), "val": ("val",), "all": ("train", "val")}


def add_parser(subs: Any) -> None:
    """Add the parser of `eval`."""
    parser = subs.add_parser(
        "eval",
        help="loss, perplexity and bits per byte of a model on text",
        description="Print loss, perplexity and bits per byte of text, per source and in total, in"
        " one process or several: torchrun --nproc-per-node 2 -m minimind eval ...",
        example="minimind eval --checkpoint out --data held_out.jsonl",
    )
    add_model(parser)
    add = parser.add_argument
    text = "text, one source per path; or folders of `minimind prepare`"
    add("--data", nargs="+", required=True, metavar="PATH", help=text)
    text = "part of a prepared folder (default: val); raw text is read whole"
    add("--split", choices=tuple(SPLITS), help=text)
    add("--batch_size", type=at_least(1), default=8, help="windows per batch")
    text = "tokens of a window (default: the positions of the model)"
    add("--max_seq_len", type=at_least(1), help=text)
    text = "windows per source, up to the end of the last document (default: all)"
    add("--max_rows", type=at_least(1), help=text)
    text = "evaluate each document separately; off: packed rows"
    add("--doc_mask", action=argparse.BooleanOptionalAction, help=text)
    parser.set_defaults(doc_mask=True)  # Python 3.10 would add its own default to the help
    text = "field or column of the text"
    add("--text_field", type=utf8, default="text", help=text)
    text = "longest document of raw text (default: 64MiB, less with some tokenizers)"
    add("--max_document_bytes", type=count_of_bytes, help=text)
    text = "stop at a bad document (error), or skip and report it"
    add("--on_bad_data", choices=("error", "skip"), default="error", help=text)
    text = "fraction of documents that may be bad, with skip"
    add("--max_bad_fraction", type=fraction, default=0.05, help=text)
    add("--cache_dir", default="~/.cache/minimind", help="cache of the tokens")
    add("--json", action="store_true", help="print a JSON object")


def run_eval(args: argparse.Namespace) -> int:
    """Evaluate a model; of several processes only the first one prints."""
    from minimind.config.deepspeed.backend_choice import device_for
    from minimind.config.launcher_env import read_launch
    from minimind.data.prepare.prepare import is_prepared
    from minimind.data.text.inputs import find_files, require_once
    from minimind.engine.build import evaluation_accelerator
    from minimind.inference.load_model import load_model
    from minimind.train.evaluate import score

    files: list[Path] = []
    for place in args.data:
        files += [Path(place).expanduser()] if is_prepared(place) else find_files([place])
    require_once(files, "")
    launch = read_launch(os.environ)
    device = device_for(args.device, "--device", launch)
    model, tokenizer, path = load_model(args.checkpoint, args.model, args.tokenizer, args.weights)
    model.config.doc_mask = False  # the windows define the documents
    positions = model.config.max_position_embeddings
    if args.max_seq_len is not None and args.max_seq_len > positions:
        raise UsageError(
            f"--max_seq_len {args.max_seq_len} is more than the {positions} positions of the model;"
            " lower it"
        )
    with _copied(tokenizer) as folder:
        data = [_open_data(p, tokenizer, folder, args, launch.rank == 0) for p in args.data]
    parts = [
        part
        for place, prepared in zip(args.data, data, strict=True)
        for part in _parts(place, prepared, args.max_seq_len or positions, args)
    ]
    with evaluation_accelerator(device, dist_timeout=600) as accelerator:
        sums = score(accelerator, model, parts, tokenizer.piece_bytes(), args.batch_size)
        is_first = accelerator.is_main_process
    if is_first:
        text_bytes = [count for part in parts for count in part.text_bytes]
        with printing():
            _print_results(sums, path, None in text_bytes, args.json)
    return 0


@contextmanager
def _copied(tokenizer: AnyTokenizer) -> Iterator[str]:
    """A temporary folder with the tokenizer files: a running job may delete the original."""
    from minimind.data.tokenizer.files import write_tokenizer

    with storing("a temporary folder", "free some space, or name another place by TMPDIR"):
        folder = TemporaryDirectory()
    with folder as place:
        write_tokenizer(place, tokenizer.files())
        yield place


def _open_data(
    place: str, tokenizer: AnyTokenizer, folder: str, args: argparse.Namespace, is_first: bool
) -> Prepared:
    """Tokens of a prepared folder, or of raw text through the cache.

    `folder` has the files of the tokenizer; only the process with `is_first` prints.
    """
    from minimind.data.prepare.prepare import (
        PrepareRequest,
        is_prepared,
        open_prepared,
        prepare_for_run,
    )
    from minimind.data.prepare.work_units import Options, Source
    from minimind.data.tokenizer.load import longest_document

    if is_prepared(place):
        prepared = open_prepared(Path(place).expanduser())
        if prepared.tokenizer.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{place}: was prepared with another tokenizer than the model's; prepare its text"
                f" again with --tokenizer {tokenizer.path}, or give the text itself"
            )
        return prepared
    if args.split not in (None, "all"):
        raise UsageError(f"--split {args.split}: {place} is raw text; leave --split out")
    max_bytes = args.max_document_bytes or longest_document(folder)
    request = PrepareRequest(
        (Source("data", (place,)),),
        folder,
        options=Options(args.text_field, max_bytes, val_fraction=0.0),
        skips_bad=args.on_bad_data == "skip",
        max_bad_fraction=args.max_bad_fraction,
        progress=is_first,
    )
    prepared = prepare_for_run(request, Path(args.cache_dir).expanduser())
    if is_first and (bad := prepared.manifest["rejected"]["count"]):
        count = f"{bad:,} of {bad + prepared.manifest['documents']:,} documents"
        text = f"{count} are bad and skipped, the first: {prepared.first_rejected}"
        print(f"{place}: {text}", file=sys.stderr)
    return prepared


def _parts(place: str, prepared: Prepared, length: int, args: argparse.Namespace) -> list[Part]:
    """The windows of each split to be read."""
    from minimind.data.loader.batches import windows_of
    from minimind.data.prepare.prepare import is_prepared
    from minimind.train.evaluate import Part

    splits, sources = ("train",), prepared.manifest["sources"]
    names = (place,) * len(sources)
    if is_prepared(place):
        splits = SPLITS[args.split or "val"]
        prefix = f"{place}:" if len(args.data) > 1 else ""
        names = tuple(prefix + source["name"] for source in sources)
    parts = []
    for split in splits:
        shards = prepared.train if split == "train" else prepared.val
        eos_id = prepared.tokenizer.eos_id
        windows = windows_of(shards, length, eos_id, args.doc_mask, args.max_rows)
        if args.max_rows is not None:
            text_bytes = (None,) * len(sources)
        elif len(sources) == 1:
            text_bytes = (prepared.manifest["splits"][split]["text_bytes"],)
        else:
            text_bytes = tuple(source.get("split_bytes", {}).get(split) for source in sources)
        parts.append(Part(windows, names, text_bytes))
    if not sum(len(part.windows) for part in parts):
        raise DataError(
            f"{place}: its {splits[0]} split holds no text; give --split train, or prepare it with"
            " a larger --val_fraction"
        )
    return parts


def _print_results(
    sums: Mapping[str, LossSums], path: Path, is_estimated: bool, as_json: bool
) -> None:
    """Print a table or JSON; `is_estimated`: bytes are those of the tokens, not of the text."""
    total = reduce(add, sums.values())
    if as_json:
        bytes_of = "tokens" if is_estimated else "text"
        result = {"model": str(path), **_figures(total), "bytes_of": bytes_of}
        if len(sums) > 1:
            result["by_source"] = {name: _figures(one) for name, one in sums.items()}
        print(json.dumps(result, ensure_ascii=False))
        return
    width = max(len(name) for name in (*sums, "source"))
    print(path)
    print(f"{'source':<{width}} {'loss':>8} {'perplexity':>11} {'bits/byte':>10} {'tokens':>13}")
    for name, one in [*sums.items(), *([("all", total)] if len(sums) > 1 else [])]:
        print(
            f"{name:<{width}} {one.mean:>8.4f} {one.perplexity:>11,.2f}"
            f" {one.bits_per_byte:>10.4f} {int(one.tokens):>13,}"
        )
    if is_estimated:
        print("bits/byte: over the bytes of the tokens; those of the text are not known here")


def _figures(sums: LossSums) -> dict[str, Any]:
    return {
        "loss": sums.mean,
        "perplexity": sums.perplexity,
        "bits_per_byte": sums.bits_per_byte,
        "tokens": int(sums.tokens),
        "bytes": int(sums.text_bytes),
    }
